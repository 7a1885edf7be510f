//! What belongs to one space is out of reach for the others, whatever safe code asks for.

use crate::support::{AT, SMALL, bounds, span, with_cpu};
use hugemm_base::VirtAddr;
use hugemm_paging::{Flags, Lookup};
use hugemm_vm::{Backing, Protection};

const SECRET: u64 = 0x5ec2e7;

/// Everything that an area of its own pages may be asked to allow, stores always.
fn protections() -> impl Iterator<Item = Protection> {
    let choices = [Protection::EXEC, Protection::USER];
    (0..1_u32 << choices.len()).map(move |chosen| {
        let chosen = (0..choices.len()).filter(|&bit| chosen >> bit & 1 != 0).map(|bit| choices[bit]);
        chosen.fold(Protection::WRITE, Protection::with)
    })
}

/// A CPU that goes from one space to another uses nothing of the first, and nothing that has been freed, whatever the areas
/// allow.
#[test]
fn no_translation_outlives_its_space() {
    with_cpu(16, 1, 31, |rig, cx| {
        for protection in protections() {
            let kind = SMALL.allowing(protection);
            let [first, second] = [0, 1].map(|_| rig.vm.create(cx, bounds()).expect("a space"));
            for space in [&first, &second] {
                rig.vm.map(cx, space, span(AT, 0x1000), kind, Backing::Private).expect("an area");
            }
            rig.enter(cx, &first);
            rig.store(cx, &first, AT, SECRET).expect("a page");
            let found = rig.vm.lookup(cx, &first, VirtAddr::new(AT));
            let Lookup::Mapped(leaf) = found else { panic!("{found:?}") };
            assert_eq!(leaf.flags, protection.flags() | Flags::HARDWARE, "what was asked for, and nothing else");
            rig.leave(cx, &first);
            rig.enter(cx, &second);
            assert_eq!(rig.load(cx, &second, AT), Ok(0), "what another wrote, {protection:?}");
            rig.vm.destroy(cx, first).expect("destroyed");
            assert_eq!(rig.load(cx, &second, AT), Ok(0), "what has been freed, {protection:?}");
            rig.end(cx, second);
        }
    });
}
