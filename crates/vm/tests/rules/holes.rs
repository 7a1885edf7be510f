//! Files while others hide, read, write back or take away what they lose or get. On both formats.

use crate::sources::{File, end, end_of_other, enter, show};
use crate::support::{
    AT, Cx, Metered, Rig, SMALL, before_flush, no_faults, on_both_formats, some_are_stale, span, with_format,
};
use hugemm_base::{CpuId, VirtAddr};
use hugemm_paging::{Aarch64, Lookup, PageFormat};
use hugemm_vm::{Access, Backing, Discard, Protection, Served};
use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

/// A page that reclaim has just taken away, and whose flush it still owes, is used by no CPU when it is gone from the file.
fn away<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for shorter in [false, true] {
        rig.on(0, |cx| {
            let (object, space) = enter(rig, cx, File::new(4 << 12));
            let at = VirtAddr::new(AT + 0x3000);
            assert_eq!(rig.load(cx, &space, at.get()), Ok(0x3000));
            let deferred = rig.deferred();
            let page = rig.unhook(cx, &space, at.get(), &deferred);
            let gone = if shorter { rig.vm.truncate(cx, &object, 3 << 12) } else { rig.vm.punch(cx, &object, 3, 4) };
            gone.expect("its own");
            assert!((0..50).all(|_| rig.mmu.load(CpuId::new(0), at).is_err()), "it is used, {shorter}");
            page.put_back(cx);
            assert_eq!(rig.load(cx, &space, at.get()).is_err(), shorter);
            end(rig, cx, (object, space));
        });
    }
}

/// What a file has no longer of its last page is zero when it grows again, though the page was on its way elsewhere when the file became
/// shorter.
fn moving<F: PageFormat>(rig: &Rig<'_, F, true>) {
    let (at, bytes) = (AT + 0x3000, (3 << 12) + 16);
    rig.on(0, |cx| {
        let (object, space) = enter(rig, cx, File::new(4 << 12));
        assert_eq!(rig.load(cx, &space, at), Ok(0x3000));
        let deferred = rig.deferred();
        let page = rig.unhook(cx, &space, at, &deferred);
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
        assert_eq!([8, 16].map(|word| rig.load(cx, &space, at + word)), [Ok(0x3008), Ok(0)]);
        rig.vm.truncate(cx, &object, 4 << 12).expect("longer");
        assert_eq!(
            [0, 8, 16, 4088].map(|word| rig.load(cx, &space, at + word)),
            [Ok(0x3000), Ok(0x3008), Ok(0), Ok(0)]
        );
        end(rig, cx, (object, space));
    });
}

fn read_before<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for shorter in [false, true] {
        let file = File::new(4096);
        rig.on(0, |cx| {
            let (object, space) = enter(rig, cx, file);
            file.calls.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
            file.gate.store(4, Ordering::SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    file.wait_for(5);
                    file.bytes().fill(0);
                    rig.beside_others(1, |cx| {
                        let gone =
                            if shorter { rig.vm.truncate(cx, &object, 8) } else { rig.vm.punch(cx, &object, 0, 1) };
                        assert_eq!(gone, Ok(0));
                    });
                    file.gate.store(6, Ordering::SeqCst);
                });
                assert_eq!(rig.load(cx, &space, AT + 8), Ok(0), "as the source has it afterwards");
            });
            file.calls.store(0, Ordering::Relaxed);
            end(rig, cx, (object, space));
        });
    }
}

/// What lies far behind a file's beginning goes with what lies near.
fn far<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    const FAR: u64 = 3 << 14;
    let file = File::new(4096);
    let (object, space) = enter(rig, cx, file);
    file.bytes().resize((FAR as usize + 1) << 12, 0xff);
    rig.vm.truncate(cx, &object, (FAR + 1) << 12).expect("longer");
    rig.vm.map(cx, &space, span(2 * AT, 0x1000), SMALL, Backing::Shared(&object, FAR)).expect("an area");
    assert_eq!([AT, 2 * AT].map(|at| rig.load(cx, &space, at)), [Ok(0), Ok(u64::MAX)]);
    file.bytes().fill(0);
    rig.vm.punch(cx, &object, 0, FAR + 1).expect("its own");
    assert_eq!(rig.load(cx, &space, 2 * AT), Ok(0));
    rig.vm.truncate(cx, &object, 0).expect("its own");
    assert!(rig.load(cx, &space, 2 * AT).is_err());
    end(rig, cx, (object, space));
}

/// Who makes a hole, or a file shorter, goes on when nobody is about to write there what was there before.
fn overtaken<F: PageFormat>(rig: &Rig<'_, F, true>) {
    for shorter in [false, true] {
        let file = File::new(4 << 12);
        rig.on(0, |cx| {
            let (object, space) = enter(rig, cx, file);
            rig.store(cx, &space, AT + 0x3000, 9).expect("memory");
            file.calls.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
            file.gate.store(1, Ordering::SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    file.wait_for(2);
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

/// What programs have stored behind a file's end is not what the file has there when it grows.
fn longer<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
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
    // The other way round, nothing that is stored meanwhile is lost.
    file.bytes().truncate(6000);
    rig.vm.truncate(cx, &object, 6000).expect("shorter");
    rig.vm.truncate(cx, &object, 8192).expect("longer");
    rig.vm.map(cx, &space, span(3 * AT, 0x1000), SMALL, Backing::Shared(&object, 1)).expect("an area");
    rig.store(cx, &space, 3 * AT + 4080, 9).expect("memory");
    file.bytes().resize(8192, 0);
    assert_eq!(rig.vm.sync(cx, &object, 1, 2), Ok(1));
    assert_eq!((file.word(8176), rig.load(cx, &space, 3 * AT + 4080)), (9, Ok(9)));
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
}

/// Another CPU writes a page back that one is just hiding, or making read-only, and has not flushed yet: nobody stores to it any more by
/// what he has of it. Whether somebody could have.
fn not_flushed<F: PageFormat>(seed: u64, hides: bool) -> bool {
    let stale = Cell::new(false);
    with_format::<F, true>(16, 3, seed, &no_faults(), |rig| {
        let (file, other) =
            (File::new(4 << 12), |value| rig.mmu.store(CpuId::new(1), VirtAddr::new(AT), value).is_ok());
        let (object, space) = rig.on(0, |cx| show(rig, cx, file));
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            rig.store(cx, &space, AT, 1).expect("memory");
        });
        let through = rig.beside_a_flush(
            |cx| {
                if hides {
                    assert_eq!(rig.vm.discard(cx, &space, span(AT, 0x1000), Discard::Now), Ok(1));
                } else {
                    rig.vm.protect(cx, &space, span(AT, 0x1000), Protection::USER).expect("an area");
                }
            },
            || stale.set(other(2)),
            |cx| {
                assert_eq!(rig.vm.sync(cx, &object, 0, 4), Ok(1));
                other(3)
            },
        );
        assert!(!through, "it is clean, and stored to");
        assert_eq!(file.word(0), if stale.get() { 2 } else { 1 });
        end_of_other(rig, (object, space));
    });
    stale.get()
}

#[test]
fn nobody_stores_to_what_is_written_while_another_hides_it() {
    some_are_stale([|seed| not_flushed::<Metered>(seed, true), |seed| not_flushed::<Aarch64>(seed, true)]);
}

#[test]
fn nobody_stores_to_what_is_written_while_another_takes_the_right() {
    some_are_stale([|seed| not_flushed::<Metered>(seed, false), |seed| not_flushed::<Aarch64>(seed, false)]);
}

/// A page that reclaim has just taken away is punched; until its flush nobody is shown what the file has there now, because others may still
/// use what it had. Whether one does.
fn not_read_before<F: PageFormat>(seed: u64) -> bool {
    let stale = Cell::new(false);
    with_format::<F, true>(16, 3, seed, &no_faults(), |rig| {
        let (file, at) = (File::new(4 << 12), VirtAddr::new(AT + 8));
        let (object, space) = rig.on(0, |cx| show(rig, cx, file));
        rig.on(1, |cx| {
            rig.enter(cx, &space);
            assert_eq!(rig.load(cx, &space, at.get()), Ok(8));
        });
        rig.on(0, |cx| {
            let deferred = rig.deferred();
            let page = rig.unhook(cx, &space, AT, &deferred);
            file.bytes()[..4096].fill(0);
            let served = Cell::new(None);
            let meanwhile = || {
                let fault = || {
                    rig.beside_others(2, |cx| {
                        (rig.vm.fault(cx, &space, at, Access::Read), rig.vm.lookup(cx, &space, at))
                    })
                };
                served.set(std::thread::scope(|scope| scope.spawn(fault).join().ok()));
                stale.set(rig.mmu.load(CpuId::new(1), at) == Ok(8));
            };
            before_flush(&meanwhile, || assert_eq!(rig.vm.punch(cx, &object, 0, 1), Ok(0)));
            assert_eq!(served.take(), Some((Ok(Served::Meanwhile), Lookup::Absent)), "shown beside what it was");
            assert_ne!(rig.mmu.load(CpuId::new(1), at), Ok(8));
            page.put_back(cx);
            rig.enter(cx, &space);
            assert_eq!(rig.load(cx, &space, at.get()), Ok(0));
        });
        rig.end_for_both(space);
        rig.on(0, |cx| rig.vm.close(cx, object).expect("its own"));
    });
    stale.get()
}

/// Who waits for somebody who writes back has not made the file shorter yet.
fn waits<'h, F: PageFormat>(rig: &Rig<'h, F, true>, cx: &mut Cx<'_, 'h>) {
    let file = File::new(40 << 12);
    let (object, space) = enter(rig, cx, file);
    rig.store(cx, &space, AT + 0x3000, 9).expect("memory");
    file.calls.store(std::ptr::from_ref(&rig.vm).addr(), Ordering::Relaxed);
    file.gate.store(7, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            file.wait_for(8);
            let begun = Barrier::new(2);
            std::thread::scope(|scope| {
                let shorter = scope.spawn(|| {
                    rig.beside_others(1, |cx| {
                        begun.wait();
                        rig.vm.truncate(cx, &object, 10 << 12)
                    })
                });
                begun.wait();
                let stays = (0..1000).all(|_| {
                    std::thread::yield_now();
                    object.pages() == 40
                });
                file.gate.store(9, Ordering::SeqCst);
                let shorter = shorter.join().expect("it ended");
                file.gate.store(0, Ordering::SeqCst);
                assert_eq!((stays, shorter), (true, Ok(6)));
            });
        });
        assert_eq!(rig.vm.sync(cx, &object, 0, 40), Ok(1));
        while file.gate.load(Ordering::SeqCst) != 0 {
            rig.vm.shootdown().handle_ipi(cx);
        }
    });
    assert_eq!(object.pages(), 10);
    end(rig, cx, (object, space));
}

on_both_formats! {
    fn what_is_away_is_gone_from_a_file_too: away (rig);
    fn the_rest_of_a_last_page_that_moves_is_zero_too: moving (rig);
    fn what_was_read_before_a_hole_is_not_entered_after_it: read_before (rig);
    fn what_goes_is_not_written_afterwards: overtaken (rig);
    fn a_long_file_goes_to_its_end: far (first);
    fn what_is_stored_behind_the_end_of_a_file_is_not_its_when_it_grows: longer (first);
    fn a_hole_is_shown_to_nobody_while_others_use_what_it_was: not_read_before (stale);
    fn a_file_is_not_shorter_while_it_is_written: waits (first);
}
