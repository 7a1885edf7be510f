//! What the verbs of a range cost, whatever its length: lock rounds of area lists, objects and page tables, and flushes. The table in
//! `docs/vm.md` is what is counted here.

use crate::sources::File;
use crate::support::{AT, Cx, Handle, Metered, Model, Rig, SMALL, as_first, lock_rounds, span};
use hugemm_base::{Never, VirtAddr, VirtRange};
use hugemm_paging::{Aarch64, PageFormat};
use hugemm_vm::{Access, Advice, Backing, Discard, Protection, SharedRef};

/// How many pages.
const LENGTHS: [u64; 2] = [64, 8192];
const USER: Protection = Protection::USER;

type Verb<'h, F, const AWAY: bool> = fn(&Rig<'h, F, AWAY>, &mut Cx<'_, 'h>, &Handle<'_, 'h, F, AWAY>, VirtRange);

/// A verb, and what has to be there before it.
type Row<'h, F, const AWAY: bool> = (&'static str, Verb<'h, F, AWAY>, Verb<'h, F, AWAY>);

fn protect<'h, F: PageFormat, const AWAY: bool>(
    rig: &Rig<'h, F, AWAY>,
    cx: &mut Cx<'_, 'h>,
    space: &Handle<'_, 'h, F, AWAY>,
    part: VirtRange,
    rights: Protection,
) {
    rig.vm.protect(cx, space, part, rights).expect("an area");
}

fn rows<'h, F: PageFormat, const AWAY: bool>() -> [Row<'h, F, AWAY>; 16] {
    [
        ("`protect`: `WRITE` goes", |_, _, _, _| (), |rig, cx, space, part| protect(rig, cx, space, part, USER)),
        (
            "`protect`: `WRITE` comes",
            |rig, cx, space, part| protect(rig, cx, space, part, USER),
            |rig, cx, space, part| protect(rig, cx, space, part, USER.with(Protection::WRITE)),
        ),
        (
            "`protect`: `EXEC` for `WRITE`",
            |_, _, _, _| (),
            |rig, cx, space, part| protect(rig, cx, space, part, USER.with(Protection::EXEC)),
        ),
        (
            "`discard`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.discard(cx, space, part, Discard::Now).expect("an area");
            },
        ),
        (
            "`discard`, `WhenShort`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.discard(cx, space, part, Discard::WhenShort).expect("an area");
            },
        ),
        (
            "`advise`: `Random`",
            |_, _, _, _| (),
            |rig, cx, space, part| rig.vm.advise(cx, space, part, Advice::Random).expect("an area"),
        ),
        (
            "`advise`: `Cold`",
            |_, _, _, _| (),
            |rig, cx, space, part| rig.vm.advise(cx, space, part, Advice::Cold).expect("an area"),
        ),
        (
            "`move_to`, tables",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                let there = span(part.start().get() + (1 << 40), part.bytes());
                rig.vm.move_to(cx, space, part, there).expect("nothing is there");
            },
        ),
        (
            "`move_to`, entries",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                let there = span(part.start().get() + (1 << 40) + 0x1000, part.bytes());
                rig.vm.move_to(cx, space, part, there).expect("nothing is there");
            },
        ),
        (
            "`unmap`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.unmap(cx, space, part).expect("in the space");
            },
        ),
        (
            "`read`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.read(cx, space, part.start(), &mut vec![0; part.bytes() as usize]).expect("an area");
            },
        ),
        (
            "`write`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.write(cx, space, part.start(), &vec![1; part.bytes() as usize]).expect("an area");
            },
        ),
        (
            "`zero`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.zero(cx, space, part.start(), part.bytes() as usize).expect("an area");
            },
        ),
        ("`lock`", |_, _, _, _| (), |rig, cx, space, part| rig.vm.lock(cx, space, part, u64::MAX).expect("an area")),
        (
            "`unlock`",
            |rig, cx, space, part| rig.vm.lock(cx, space, part, u64::MAX).expect("an area"),
            |rig, cx, space, part| rig.vm.unlock(cx, space, part).expect("an area"),
        ),
        (
            "`usage`",
            |_, _, _, _| (),
            |rig, cx, space, part| {
                rig.vm.usage(cx, space, part).expect("in the space");
            },
        ),
    ]
}

/// Atomic read-modify-writes of this thread, in `make races`, which counts them.
fn atomics() -> u64 {
    #[cfg(perturb)]
    return hugemm_base::sync::atomic_changes();
    #[cfg(not(perturb))]
    0
}

/// What something costs: lock rounds, flushes and atomics.
type Cost = (u64, u64, u64);

fn cost_of<'h, F: PageFormat, const AWAY: bool>(rig: &Rig<'h, F, AWAY>, something: impl FnOnce()) -> Cost {
    let counts = || (lock_rounds(), rig.flushes(), atomics());
    let before = counts();
    something();
    let after = counts();
    (after.0 - before.0, after.1 - before.1, after.2 - before.2)
}

/// A line of the table of what has one length, up to what is expected.
fn line(name: &str, here: Cost, arm: Cost) -> String {
    let line = format!("| {name} | {} | {} | {} |", here.0, here.1, arm.1);
    if cfg!(perturb) { line + &format!(" {} |", here.2) } else { line }
}

/// The cost of a verb for the middle of an area whose pages are all written.
fn cost<F: PageFormat, const AWAY: bool>(row: usize, pages: u64) -> Cost {
    let mut cost = Cost::default();
    as_first::<F, AWAY>(64, 1, 5, |rig, cx| {
        let space = rig.space(cx, span(AT, (pages + 32) << 12), SMALL);
        let part = span(AT + (16 << 12), pages << 12);
        rig.enter(cx, &space);
        // One by one: small pages that a pool or a prefault makes at once may be folded.
        (0..pages).for_each(|page| rig.store(cx, &space, AT + ((page + 16) << 12), page).expect("memory"));
        let (_, before, verb) = rows::<F, AWAY>()[row];
        before(rig, cx, &space, part);
        cost = cost_of(rig, || verb(rig, cx, &space, part));
        rig.vm.prefault(&space, span(AT, 0x1000), None).work(cx, &Never).expect("the space goes on");
        assert!(space.find_vma(cx, VirtAddr::new(AT)).is_ok());
        rig.end(cx, space);
    });
    cost
}

/// Flushes do not grow with the range, and lock rounds do so only by the parts between which others run.
#[test]
fn the_table_is_what_is_counted() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vm.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let mut missing = Vec::new();
    for (row, (name, ..)) in rows::<Metered, false>().into_iter().enumerate() {
        // Where nobody takes pages away there is nothing to be done.
        let away = name.contains("WhenShort") || name.contains("Cold");
        let of = |arm: bool, pages| match (arm, away) {
            (false, false) => cost::<Metered, false>(row, pages),
            (false, true) => cost::<Metered, true>(row, pages),
            (true, false) => cost::<Aarch64, false>(row, pages),
            (true, true) => cost::<Aarch64, true>(row, pages),
        };
        let [few, many] = LENGTHS.map(|pages| of(false, pages));
        let [arm_few, arm_many] = LENGTHS.map(|pages| of(true, pages));
        assert_eq!((few.1, arm_few.1), (many.1, arm_many.1), "flushes of {name}");
        let mut line = format!("| {name} | {} | {} | {} | {} |", few.0, many.0, few.1, arm_few.1);
        if cfg!(perturb) {
            line += &format!(" {} | {} |", few.2, many.2);
        }
        if !page.contains(&line) {
            missing.push(line);
        }
    }
    assert!(missing.is_empty(), "docs/vm.md has not:\n{}", missing.join("\n"));
}

/// A load where nobody has stored, the first one apart, and the first store there.
fn zero_cost<F: PageFormat>() -> [Cost; 2] {
    let mut costs = [Cost::default(); 2];
    as_first::<F, false>(16, 1, 5, |rig, cx| {
        let space = rig.space(cx, span(AT, 16 << 12), SMALL);
        rig.enter(cx, &space);
        assert_eq!(rig.load(cx, &space, AT), Ok(0));
        for (cost, access) in costs.iter_mut().zip([Access::Read, Access::Write]) {
            let mut fault = || rig.vm.fault(cx, &space, VirtAddr::new(AT + 0x1000), access);
            *cost = cost_of(rig, || assert!(fault().is_ok()));
        }
        rig.end(cx, space);
    });
    costs
}

#[test]
fn the_table_of_zeroes_is_what_is_counted() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vm.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let names = ["load where nobody has stored", "first store there"];
    let counted = zero_cost::<Metered>().into_iter().zip(zero_cost::<Aarch64>());
    let lines = names.into_iter().zip(counted).map(|(name, (here, arm))| {
        assert_eq!(here.0, arm.0);
        line(name, here, arm)
    });
    let missing: Vec<_> = lines.filter(|line| !page.contains(line)).collect();
    assert!(missing.is_empty(), "docs/vm.md has not:\n{}", missing.join("\n"));
}

/// Something with a file of sixteen pages that an area shows.
type OfFile<'h, F> = fn(&Rig<'h, F>, &mut Cx<'_, 'h>, &Handle<'_, 'h, F>, &SharedRef<'_, Model<'h, F>>);

/// Where another area copies it.
const COPIED: u64 = 2 * AT;

/// What is done, and what before it.
type FileRow<'h, F> = (&'static str, OfFile<'h, F>, OfFile<'h, F>);

fn of_files<'h, F: PageFormat>() -> [FileRow<'h, F>; 7] {
    let stored: OfFile<'h, F> = |rig, cx, space, _| {
        (0..16).for_each(|page| rig.store(cx, space, AT + (page << 12), page).expect("memory"));
    };
    let scattered: OfFile<'h, F> = |rig, cx, space, _| {
        (0..8).for_each(|page| rig.store(cx, space, AT + (page << 13), page).expect("memory"));
    };
    let copied: OfFile<'h, F> = |rig, cx, space, object| {
        rig.vm.map(cx, space, span(COPIED, 16 << 12), SMALL, Backing::Copied(object, 0)).expect("an area");
        assert_eq!(rig.load(cx, space, AT), Ok(0));
    };
    let lent: OfFile<'h, F> = |rig, cx, space, object| {
        rig.vm.map(cx, space, span(COPIED, 16 << 12), SMALL, Backing::Copied(object, 0)).expect("an area");
        for at in [AT, COPIED] {
            assert_eq!(rig.load(cx, space, at), Ok(0));
        }
    };
    let store: OfFile<'h, F> = |rig, cx, space, _| {
        rig.vm.fault(cx, space, VirtAddr::new(COPIED), Access::Write).expect("memory");
    };
    [
        (
            "fault at a page of a file, 16 pages read",
            |_, _, _, _| (),
            |rig, cx, space, _| {
                rig.vm.fault(cx, space, VirtAddr::new(AT), Access::Read).expect("memory");
            },
        ),
        ("load in a private mapping, 16 pages lent", copied, |rig, cx, space, _| {
            rig.vm.fault(cx, space, VirtAddr::new(COPIED), Access::Read).expect("memory");
        }),
        ("first store to a page that is lent", lent, store),
        ("first store where nothing was lent", copied, store),
        ("`sync`, 8 runs of a page", scattered, |rig, cx, _, object| {
            assert_eq!(rig.vm.sync(cx, object, 0, 16), Ok(8));
        }),
        ("`truncate`, 15 of 16 pages", stored, |rig, cx, _, object| {
            assert_eq!(rig.vm.truncate(cx, object, 0x1000), Ok(15));
        }),
        ("`punch`, 15 pages in two areas", lent, |rig, cx, _, object| {
            assert_eq!(rig.vm.punch(cx, object, 1, 16), Ok(15));
        }),
    ]
}

fn file_cost<F: PageFormat>(row: usize) -> Cost {
    let mut cost = Cost::default();
    as_first::<F, false>(16, 1, 5, |rig, cx| {
        let object = rig.vm.open_source(cx, File::new(16 << 12)).expect("memory");
        let space = rig.vm.create(cx, crate::support::bounds()).expect("memory");
        rig.vm.map(cx, &space, span(AT, 16 << 12), SMALL, Backing::Shared(&object, 0)).expect("an area");
        rig.enter(cx, &space);
        let (_, before, verb) = of_files::<F>()[row];
        before(rig, cx, &space, &object);
        cost = cost_of(rig, || verb(rig, cx, &space, &object));
        rig.end(cx, space);
        rig.vm.close(cx, object).expect("its own");
    });
    cost
}

/// Files too.
#[test]
fn the_table_of_files_is_what_is_counted() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vm.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let lines = of_files::<Metered>().into_iter().enumerate();
    let lines = lines.map(|(row, (name, ..))| line(name, file_cost::<Metered>(row), file_cost::<Aarch64>(row)));
    let missing: Vec<_> = lines.filter(|line| !page.contains(line)).collect();
    assert!(missing.is_empty(), "docs/vm.md has not:\n{}", missing.join("\n"));
}
