//! What becomes of what a file has no longer, or not yet, while others read it, write it back or take its pages away. On both formats.

use crate::sources::{File, end, enter, on_both};
use crate::support::{AT, Rig, span};
use hugemm_base::{CpuId, PageSize, VirtAddr};
use hugemm_paging::PageFormat;
use hugemm_vm::{Backing, VmaKind};
use std::sync::atomic::{AtomicU32, Ordering};

const SMALL: VmaKind = VmaKind::private(PageSize::Size4K);

/// A page that reclaim has just taken away, and whose flush it still owes, is used by no CPU when it is gone from the file.
fn away<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for shorter in [false, true] {
        rig.mmu.as_cpu(CpuId::new(0), |cx| {
            let (object, space) = enter(rig, cx, File::new(4 << 12));
            let at = VirtAddr::new(AT + 0x3000);
            assert_eq!(rig.load(cx, &space, at.get()), Ok(0x3000));
            let (leaf, deferred) = (rig.leaf(cx, &space, at.get()), rig.deferred());
            let page = rig.vm.unhook(cx, rig.hold(leaf.frame), &deferred).expect("nobody else has it");
            let gone = if shorter { rig.vm.truncate(cx, &object, 3 << 12) } else { rig.vm.punch(cx, &object, 3, 4) };
            gone.expect("its own");
            assert!((0..50).all(|_| rig.mmu.load(CpuId::new(0), at).is_err()), "it is used, {shorter}");
            page.put_back(cx);
            assert_eq!(rig.load(cx, &space, at.get()).is_err(), shorter);
            end(rig, cx, (object, space));
        });
    }
}

#[test]
fn what_is_away_is_gone_from_a_file_too() {
    on_both!(away);
}

/// What a file has no longer of its last page is zero when it grows again, though the page was on its way elsewhere when the file became
/// shorter.
fn moving<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let (at, bytes) = (AT + 0x3000, (3 << 12) + 16);
    rig.mmu.as_cpu(CpuId::new(0), |cx| {
        let (object, space) = enter(rig, cx, File::new(4 << 12));
        assert_eq!(rig.load(cx, &space, at), Ok(0x3000));
        let (leaf, deferred) = (rig.leaf(cx, &space, at), rig.deferred());
        let page = rig.vm.unhook(cx, rig.hold(leaf.frame), &deferred).expect("nobody else has it");
        let begun = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let shorter = scope.spawn(|| {
                rig.beside_others(1, |cx| {
                    begun.store(1, Ordering::SeqCst);
                    rig.vm.truncate(cx, &object, bytes).expect("its own");
                });
                begun.store(2, Ordering::SeqCst);
            });
            // Enough for one that does not wait to be over.
            for _ in 0..1000 {
                rig.vm.shootdown().handle_ipi(cx);
                std::thread::yield_now();
            }
            while begun.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            page.put_back(cx);
            while begun.load(Ordering::SeqCst) < 2 {
                rig.vm.shootdown().handle_ipi(cx);
            }
            shorter.join().expect("it ended");
        });
        rig.vm.truncate(cx, &object, 4 << 12).expect("longer");
        assert_eq!(
            [0, 8, 16, 4088].map(|word| rig.load(cx, &space, at + word)),
            [Ok(0x3000), Ok(0x3008), Ok(0), Ok(0)]
        );
        end(rig, cx, (object, space));
    });
}

#[test]
fn the_rest_of_a_last_page_that_moves_is_zero_too() {
    on_both!(moving);
}

fn read_before<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let file = File::new(4 << 12);
    rig.mmu.as_cpu(CpuId::new(0), |cx| {
        let (object, space) = enter(rig, cx, file);
        file.calls.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
        file.gate.store(4, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while file.gate.load(Ordering::SeqCst) != 5 {
                    std::thread::yield_now();
                }
                file.bytes()[..4096].fill(0);
                rig.beside_others(1, |cx| assert_eq!(rig.vm.punch(cx, &object, 0, 1), Ok(0)));
                file.gate.store(6, Ordering::SeqCst);
            });
            assert_eq!(rig.load(cx, &space, AT + 8), Ok(0), "as the source has it after the hole");
        });
        file.calls.store(0, Ordering::Relaxed);
        end(rig, cx, (object, space));
    });
}

#[test]
fn what_was_read_before_a_hole_is_not_entered_after_it() {
    on_both!(read_before);
}

/// Who makes a hole, or a file shorter, goes on when nobody is about to write there what was there before.
fn overtaken<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for shorter in [false, true] {
        let file = File::new(4 << 12);
        rig.mmu.as_cpu(CpuId::new(0), |cx| {
            let (object, space) = enter(rig, cx, file);
            rig.store(cx, &space, AT + 0x3000, 9).expect("memory");
            file.calls.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
            file.gate.store(1, Ordering::SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while file.gate.load(Ordering::SeqCst) != 2 {
                        std::thread::yield_now();
                    }
                    rig.beside_others(1, |cx| {
                        let done = if shorter {
                            rig.vm.truncate(cx, &object, 0x3000)
                        } else {
                            rig.vm.punch(cx, &object, 3, 4)
                        };
                        assert_eq!(done, Ok(1));
                    });
                    file.gate.store(3, Ordering::SeqCst);
                });
                assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(1));
                while file.gate.load(Ordering::SeqCst) != 3 {
                    rig.vm.shootdown().handle_ipi(cx);
                }
            });
            file.calls.store(0, Ordering::Relaxed);
            end(rig, cx, (object, space));
        });
    }
}

#[test]
fn what_goes_is_not_written_afterwards() {
    on_both!(overtaken);
}

/// What programs have stored behind a file's end is not what the file has there when it grows.
fn longer<F: PageFormat>(rig: &Rig<'_, F, true>) {
    rig.mmu.as_cpu(CpuId::new(0), |cx| {
        let file = File::new(104);
        let (object, space) = enter(rig, cx, file);
        assert_eq!(object.pages(), 1);
        rig.store(cx, &space, AT + 96, 1).expect("memory");
        rig.store(cx, &space, AT + 200, 7).expect("memory");
        assert_eq!(rig.vm.sync(cx, &object, 0, 1), Ok(1));
        rig.store(cx, &space, AT + 96, 2).expect("memory");
        file.bytes().resize(8192, 0);
        // Also before anybody says so.
        assert_eq!(rig.vm.sync(cx, &object, 0, 1), Ok(1));
        assert_eq!((file.writes(), file.word(96), file.word(200)), (vec![(0, 104); 2], 2, 0));
        assert_eq!((rig.vm.truncate(cx, &object, 8192), object.pages()), (Ok(0), 2));
        assert_eq!([96, 104, 200, 4088].map(|at| rig.load(cx, &space, AT + at)), [Ok(2), Ok(0), Ok(0), Ok(0)]);
        rig.store(cx, &space, AT + 4088, 3).expect("memory");
        assert_eq!(rig.vm.sync(cx, &object, 0, 2), Ok(1));
        assert_eq!([96, 200, 4088].map(|at| file.word(at)), [2, 0, 3]);
        // What another task appends to the file is read, once the page that it was appended to is.
        rig.vm.truncate(cx, &object, 8192).expect("as long");
        file.bytes().truncate(6000);
        rig.vm.truncate(cx, &object, 6000).expect("shorter");
        file.bytes().resize(8192, 0xff);
        rig.vm.truncate(cx, &object, 8192).expect("longer");
        rig.vm.punch(cx, &object, 1, 2).expect("its own");
        rig.vm.map(cx, &space, span(2 * AT, 0x1000), SMALL, Backing::Shared(&object, 1)).expect("an area");
        assert_eq!(rig.load(cx, &space, 2 * AT + 4088), Ok(u64::MAX));
        end(rig, cx, (object, space));
    });
}

#[test]
fn what_is_stored_behind_the_end_of_a_file_is_not_its_when_it_grows() {
    on_both!(longer);
}
