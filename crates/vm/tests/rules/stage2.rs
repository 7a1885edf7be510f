//! A hypervisor's second stage that follows an address space, over a page table of its own: the example of a notifier, and
//! the proof that no store of a guest goes to a page that the space no longer has.

use crate::support::{AT, Cpus, Cx, Follower, Handle, Rig, SMALL, bounds, span, with_cpu};
use hugemm_base::platform::Cpu;
use hugemm_base::{CpuCx, Extent, PageSize, VirtAddr, VirtRange};
use hugemm_frames::{Frames, Plain};
use hugemm_paging::{EditLock, Editing, Flags, FrameTables, Lookup, Mapping, PageTable, X86_64};
use hugemm_vm::{Access, Following, Notifier, VmError, VmaKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Guest address 0 is address `AT` of the space.
struct Stage2<'h> {
    frames: &'h Frames<'h, Plain<&'h hugemm_base::inject::FaultPlan>>,
    table: PageTable<X86_64, EditLock>,
    following: Following,
    guest: VirtRange,
    invalidated: AtomicU64,
}

impl<'h> Notifier<Cpus<'h>> for Stage2<'h> {
    fn begin(&self, cx: &mut CpuCx<'_, Cpus<'h>>, range: VirtRange) {
        // SAFETY: the model's memory is a direct map.
        let mut table = self.table.exclusive(unsafe { FrameTables::new(self.frames, cx) });
        self.following.begin();
        // The part of the range that the guest sees.
        let (first, last) = (range.start().get().max(AT), range.last().get().min(AT + self.guest.bytes() - 1));
        if first > last {
            return;
        }
        let part = span(first - AT, last + 1 - first);
        let unhooked = table.detach(part, Editing::LIVE).expect("whole pages");
        // SAFETY: guests run on no CPU here: their accesses below walk the table anew each time.
        let detached = unsafe { unhooked.assume_flushed() };
        let harvest = table.harvest(detached, Flags::HARDWARE, |_| ()).map_err(|(error, _)| error).expect("harvested");
        self.invalidated.fetch_add(harvest.pages, Ordering::Relaxed);
    }

    fn end(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {
        self.following.end();
    }
}

impl<'h> Stage2<'h> {
    /// Where a guest's store to a guest address goes; its faults are served from the space.
    fn guest_store(
        &self,
        rig: &Rig<'h>,
        cx: &mut Cx<'_, 'h>,
        space: &Handle<'_, 'h>,
        at: u64,
        value: u64,
    ) -> Result<(), VmError> {
        loop {
            let found = {
                // SAFETY: as above.
                let table = self.table.shared(unsafe { FrameTables::new(self.frames, cx) });
                table.translate(VirtAddr::new(at))
            };
            if let Some(phys) = found {
                let page = rig.mmu.host().address(hugemm_base::Pfn::containing(phys)).expect("memory");
                // SAFETY: a word of a page that the space maps, as the notifier guarantees.
                unsafe { page.add((phys.get() & 0xfff) as usize).cast::<u64>().write(value) };
                return Ok(());
            }
            self.fill(rig, cx, space, at)?;
        }
    }

    /// Copies the translation of one page, unless it changes meanwhile.
    fn fill(&self, rig: &Rig<'h>, cx: &mut Cx<'_, 'h>, space: &Handle<'_, 'h>, at: u64) -> Result<(), VmError> {
        let state = self.following.state();
        let primary = VirtAddr::new(AT + at);
        match rig.vm.lookup(cx, space, primary) {
            Lookup::Mapped(leaf) if leaf.flags.contains(Flags::WRITE) => {
                let extent = Extent::block(leaf.frame, leaf.size.order());
                let page = span(at & !(leaf.size.bytes() - 1), leaf.size.bytes());
                // SAFETY: as above.
                let mut table = self.table.shared(unsafe { FrameTables::new(self.frames, cx) });
                if self.following.is_unchanged(state) {
                    let how = Mapping { flags: Flags::WRITE, largest: leaf.size };
                    table.map(page, [extent], how).expect("memory for a table");
                }
                Ok(())
            }
            _ => rig.vm.fault(cx, space, primary, Access::Write).map(|_| ()),
        }
    }
}

#[test]
fn a_second_stage_follows() {
    for page in [PageSize::Size4K, PageSize::Size2M] {
        with_cpu(64, 2, 31, |rig, cx| {
            let guest = span(0, 8 << 20);
            let space = rig.space(cx, span(AT, 8 << 20), VmaKind::private(page));
            let frames = rig.vm.frames();
            // SAFETY: the model's memory is a direct map; no CPU walks this table.
            let table = unsafe { PageTable::new(&mut FrameTables::new(frames, cx), span(0, 1 << 39)) };
            let stage2 = Arc::new(Stage2 {
                frames,
                table: table.expect("a root"),
                following: Following::new(),
                guest,
                invalidated: AtomicU64::new(0),
            });
            let follower = rig.vm.follow(cx, &space, Follower(stage2.clone())).expect("memory");
            stage2.guest_store(rig, cx, &space, 0x230, 1).expect("served");
            stage2.guest_store(rig, cx, &space, page.bytes() + 8, 2).expect("served");
            rig.enter(cx, &space);
            assert_eq!(rig.load(cx, &space, AT + 0x230), Ok(1), "the guest's stores are the space's");
            // A fork takes rights away: the guest's next store makes a copy, and the child does not see it.
            let child = rig.vm.fork(cx, &space).expect("forked");
            assert_eq!(stage2.invalidated.load(Ordering::Relaxed), 2 * page.pages());
            stage2.guest_store(rig, cx, &space, 0x230, 3).expect("served");
            assert_eq!(rig.load(cx, &space, AT + 0x230), Ok(3));
            rig.enter(cx, &child);
            assert_eq!(rig.load(cx, &child, AT + 0x230), Ok(1));
            // The other way round: the space copies, and the guest is moved to the copy.
            rig.enter(cx, &space);
            rig.end(cx, child);
            let child = rig.vm.fork(cx, &space).expect("forked");
            stage2.guest_store(rig, cx, &space, page.bytes() + 8, 4).expect("served");
            rig.store(cx, &space, AT + 0x230, 5).expect("served");
            stage2.guest_store(rig, cx, &space, 0x238, 6).expect("served");
            assert_eq!(rig.load(cx, &space, AT + 0x238), Ok(6));
            assert_eq!(rig.load(cx, &space, AT + page.bytes() + 8), Ok(4));
            rig.leave(cx, &space);
            rig.vm.destroy(cx, child).expect("destroyed");
            // What is unmapped is gone from the second stage before its frames are free.
            rig.vm.unmap(cx, &space, span(AT, 8 << 20)).expect("unmapped");
            let lost = stage2.guest_store(rig, cx, &space, 0x230, 7);
            assert_eq!(lost, Err(VmError::NoArea { at: VirtAddr::new(AT + 0x230) }));
            let (error, space) = rig.vm.destroy(cx, space).expect_err("it is followed");
            assert_eq!(error, VmError::InUse);
            // SAFETY: it follows this space.
            drop(unsafe { rig.vm.unfollow(cx, &space, follower) });
            rig.vm.destroy(cx, space).expect("destroyed");
            // What remains are the tables themselves.
            {
                // SAFETY: as above.
                let mut table = stage2.table.exclusive(unsafe { FrameTables::new(frames, cx) });
                let unhooked = table.detach(stage2.table.bounds(), Editing::LIVE).expect("all of it");
                // SAFETY: as above.
                let detached = unsafe { unhooked.assume_flushed() };
                let harvest = table.harvest(detached, Flags::HARDWARE, |_| ()).map_err(|(error, _)| error);
                assert_eq!(harvest.expect("harvested").pages, 0);
            }
            // SAFETY: as above; nothing hangs below the root.
            unsafe { hugemm_paging::TableMemory::free(&mut FrameTables::new(frames, cx), stage2.table.root()) };
            assert_eq!(cx.platform().counters().snapshot().fences_on_drop, 0);
        });
    }
}

/// What was looked up may be used only if no range was under way when it was looked up, and none has ended since.
#[test]
fn a_look_up_is_good_while_nothing_changes() {
    let following = Following::new();
    let before = following.state();
    assert!(following.is_unchanged(before));
    following.begin();
    assert!(!following.is_unchanged(before), "one is under way");
    assert!(!following.is_unchanged(following.state()), "whenever the look-up began");
    following.begin();
    following.end();
    assert!(!following.is_unchanged(following.state()), "one still is");
    following.end();
    assert!(!following.is_unchanged(before), "two have ended since");
    let after = following.state();
    assert_ne!(after, before);
    assert!(following.is_unchanged(after));
    following.begin();
    following.end();
    assert!(!following.is_unchanged(after));
}

/// Remembers what it was told.
#[derive(Default)]
struct Told(std::sync::Mutex<Vec<(&'static str, VirtRange)>>);

impl<'h> Notifier<Cpus<'h>> for Told {
    fn begin(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, range: VirtRange) {
        self.0.lock().expect("told").push(("begin", range));
    }

    fn end(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, range: VirtRange) {
        self.0.lock().expect("told").push(("end", range));
    }

    fn young(&self, range: VirtRange) -> bool {
        self.0.lock().expect("told").push(("young", range));
        range.start().get() == AT
    }
}

/// Begins and ends, and knows of no accesses.
struct Silent;

impl<'h> Notifier<Cpus<'h>> for Silent {
    fn begin(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {}
    fn end(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {}
}

/// A reference to a follower passes everything on; who knows of no accesses has used nothing.
#[test]
fn a_reference_follows_too() {
    with_cpu(8, 1, 32, |_, cx| {
        let told = Told::default();
        let [first, second] = [AT, 2 * AT].map(|at| span(at, 0x2000));
        fn through<'h>(by: impl Notifier<Cpus<'h>>, cx: &mut Cx<'_, 'h>, ranges: [VirtRange; 2]) -> [bool; 2] {
            by.begin(cx, ranges[0]);
            let young = ranges.map(|range| by.young(range));
            by.end(cx, ranges[1]);
            young
        }
        assert_eq!(through(&told, cx, [first, second]), [true, false]);
        let expected = [("begin", first), ("young", first), ("young", second), ("end", second)];
        assert_eq!(*told.0.lock().expect("told"), expected);
        assert_eq!(through(Silent, cx, [first, second]), [false, false]);
    });
}

/// Fails where it is told.
struct Failing;

impl<'h> Notifier<Cpus<'h>> for Failing {
    fn begin(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {
        panic!("planned");
    }

    fn end(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {}
}

/// A change that ends by unwinding has ended: whoever was told that it begins is told so, and nobody waits for it.
#[test]
fn a_change_that_unwinds_is_over() {
    with_cpu(16, 1, 34, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x8000), SMALL);
        let told = [0, 1].map(|_| Arc::new(Told::default()));
        let mut followers = Vec::new();
        for who in [Follower(told[0].clone()), Follower(Arc::new(Failing)), Follower(told[1].clone())] {
            followers.push(rig.vm.follow(cx, &space, who).expect("memory"));
        }
        let all = span(AT, 0x1000);
        let unmap = std::panic::AssertUnwindSafe(|| rig.vm.unmap(cx, &space, all).is_ok());
        assert!(std::panic::catch_unwind(unmap).is_err(), "the second fails");
        assert_eq!(*told[0].0.lock().expect("told"), [("begin", all), ("end", all)]);
        assert_eq!(*told[1].0.lock().expect("told"), [], "nobody came so far");
        for follower in followers {
            // SAFETY: it follows this space.
            drop(unsafe { rig.vm.unfollow(cx, &space, follower) });
        }
        rig.vm.unmap(cx, &space, all).expect("as it was");
        rig.vm.destroy(cx, space).expect("destroyed");
    });
}

/// Fails where it is told of ends.
struct FailingLate;

impl<'h> Notifier<Cpus<'h>> for FailingLate {
    fn begin(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {}

    fn end(&self, _cx: &mut CpuCx<'_, Cpus<'h>>, _range: VirtRange) {
        panic!("planned");
    }
}

/// What was unmapped would be blocked for ever, its areas would stay on their objects' lists, and other followers would never be told: a
/// follower that unwinds at the end ends the program.
#[test]
fn an_end_that_unwinds_is_the_end() {
    const NAME: &str = "HUGEMM_TEST_END_UNWINDS";
    if std::env::var(NAME).is_ok() {
        with_cpu(16, 1, 35, |rig, cx| {
            let (all, kind) = (span(AT, 0x8000), SMALL);
            let space = rig.space(cx, all, kind);
            let _follower = rig.vm.follow(cx, &space, Follower(Arc::new(FailingLate))).expect("memory");
            let unmap = std::panic::AssertUnwindSafe(|| rig.vm.unmap(cx, &space, all).is_ok());
            let _ = std::panic::catch_unwind(unmap);
            std::process::exit(0);
        });
    }
    let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
    let again = again.args(["--exact", "stage2::an_end_that_unwinds_is_the_end", "--nocapture"]).env(NAME, "");
    let output = again.output().expect("it starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), None, "it was not ended by a signal: {err}");
    assert!(err.contains("planned") && err.contains("a change was left by unwinding"), "{err}");
}

/// Every change is announced before and after to all followers, with the range that it concerns.
#[test]
fn followers_are_told_of_every_change() {
    with_cpu(16, 1, 33, |rig, cx| {
        let space = rig.space(cx, span(AT, 0x8000), SMALL);
        rig.enter(cx, &space);
        rig.store(cx, &space, AT, 1).expect("memory");
        let told = [0, 1].map(|_| Arc::new(Told::default()));
        let followers = [0, 1].map(|index| rig.vm.follow(cx, &space, Follower(told[index].clone())).expect("memory"));
        let child = rig.vm.fork(cx, &space).expect("forked");
        rig.store(cx, &space, AT, 2).expect("a copy");
        rig.leave(cx, &space);
        let hole = span(AT + 0x2000, 0x3000);
        rig.vm.unmap(cx, &space, hole).expect("unmapped");
        for follower in followers {
            // SAFETY: it follows this space.
            drop(unsafe { rig.vm.unfollow(cx, &space, follower) });
        }
        rig.vm.unmap(cx, &space, span(AT, 0x1000)).expect("nobody is told");
        let expected: Vec<_> = [bounds(), span(AT, 0x1000), hole]
            .into_iter()
            .flat_map(|changed| ["begin", "end"].map(|what| (what, changed)))
            .collect();
        for told in told {
            assert_eq!(*told.0.lock().expect("told"), expected);
        }
        for space in [space, child] {
            rig.vm.destroy(cx, space).expect("destroyed");
        }
    });
}
