//! A hypervisor: guest memory is an address space, and the guest's second stage follows it. What the guest has used, a snapshot while it
//! runs, a balloon. `cargo run -p hugemm-example-second-stage`
//!
//! Here the second stage is a map, and the guest a loop of stores. With hardware it is a table that processors walk, and `begin` also
//! ends what their TLBs know of the range (INVEPT, TLBI IPAS2).
use hugemm::base::sync::AtomicU64;
use hugemm::frames::Carved;
use hugemm::paging::{EditLock, Flags, Leaf, Lookup};
use hugemm::prelude::*;
use hugemm::vm::{AddressSpaceRef, Cx, Following, NoPager, Notifier, VmError};
use std::alloc::{Layout, alloc_zeroed};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

const MIB: u64 = 1 << 20;

/// The default setup, but for whoever follows.
struct Machine<'m>(PhantomData<&'m ()>);

impl<'m> Setup for Machine<'m> {
    type Platform = SingleCpu;
    type Env = Carved;
    type Format = X86_64;
    type Lock = EditLock;
    type Tlb = Counting;
    type Pager = NoPager;
    type Notifier = &'m SecondStage;
}

/// The guest's translations, by their first address: the leaf, and whether the guest has used it.
#[derive(Default)]
struct SecondStage {
    leaves: Mutex<BTreeMap<VirtAddr, (Leaf, bool)>>,
    following: Following,
}

/// The first address that a leaf which maps `at` translates.
fn start(at: VirtAddr, size: PageSize) -> VirtAddr {
    VirtAddr::new(at.get() & !(size.bytes() - 1))
}

impl SecondStage {
    fn leaves(&self) -> MutexGuard<'_, BTreeMap<VirtAddr, (Leaf, bool)>> {
        self.leaves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A store of the guest: by its own translations, which are copied from the space where they are missing.
    fn store<'m>(
        &self,
        cx: &mut Cx<'_, Machine<'m>>,
        vm: &Vm<'_, Machine<'m>>,
        space: &AddressSpaceRef<'_, Machine<'m>>,
        at: VirtAddr,
        byte: u8,
    ) -> Result<(), VmError> {
        loop {
            let mut leaves = self.leaves();
            let nearest = leaves.range_mut(..=at).next_back();
            if let Some((first, (leaf, young))) = nearest.filter(|(first, (leaf, _))| start(at, leaf.size) == **first) {
                *young = true;
                let page =
                    cx.platform().open(Extent::block(leaf.frame, leaf.size.order()), None).ok_or(VmError::NoMemory)?;
                // SAFETY: within the page, which is the space's for as long as the leaf is here: `begin` takes it away first, under
                // the lock held here.
                unsafe { page.ptr.add((at.get() - first.get()) as usize).write(byte) };
                return Ok(());
            }
            drop(leaves);
            let state = self.following.state();
            match vm.lookup(cx, space, at) {
                Lookup::Mapped(leaf) if leaf.flags.contains(Flags::WRITE) => {
                    let mut leaves = self.leaves();
                    // If something has changed since, what was looked up may be old: the loop looks again.
                    if self.following.is_unchanged(state) {
                        leaves.insert(start(at, leaf.size), (leaf, false));
                    }
                }
                _ => {
                    vm.fault(cx, space, at, Access::Write)?;
                }
            }
        }
    }
}

impl Notifier<SingleCpu> for SecondStage {
    fn begin(&self, _: &mut CpuCx<'_, SingleCpu>, range: VirtRange) {
        let mut leaves = self.leaves();
        self.following.begin();
        leaves
            .retain(|first, (leaf, _)| range.last() < *first || first.get() + leaf.size.bytes() <= range.start().get());
    }

    fn young(&self, range: VirtRange) -> bool {
        let mut leaves = self.leaves();
        let inside = leaves.iter_mut().filter(|(first, _)| range.start() <= **first && **first <= range.last());
        inside.fold(false, |found, (_, (_, young))| std::mem::take(young) | found)
    }

    fn end(&self, _: &mut CpuCx<'_, SingleCpu>, _: VirtRange) {
        let _leaves = self.leaves();
        self.following.end();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (ram, layout) = (Extent::new(Pfn::new(0), 64 << 8)?, Layout::from_size_align(64 << 20, 2 << 20)?);
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null(), "no memory");
    // SAFETY: nobody else uses the memory, which stays where it is; there is no other.
    let (mut cx, ram) = unsafe { SingleCpu::start(ram, base) };
    let (cx, second_stage) = (&mut cx, SecondStage::default());
    let frames = Frames::carve(cx, ram)?;
    let (cpus, inboxes) = ([TlbCpu::default()], [AtomicU64::new(0)]);
    // SAFETY: no CPU walks the tables of this example, so there is nothing to invalidate.
    let shootdown = unsafe { TlbShootdown::new(&cpus, &inboxes, Counting) }?;
    // SAFETY: all memory is mapped as one; all contexts are this platform's.
    let vm: Vm<'_, Machine<'_>> =
        unsafe { Vm::new(Parts::new(&frames, &shootdown, Clearer::uncalibrated())) }.ok_or("no slab")?;

    // 16 MiB of guest memory, all of it there before the guest starts, from a boundary of 2 MiB on.
    let guest = VirtRange::new(VirtAddr::new(1 << 30), 16 * MIB)?;
    let at = |offset: u64| VirtAddr::new(guest.start().get() + offset);
    let space = vm.create(cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
    vm.map(cx, &space, guest, VmaKind::private(PageSize::Size2M), Backing::Private)?;
    vm.prefault(&space, guest, None).work(cx, &Never)?;
    let follower = vm.follow(cx, &space, &second_stage)?;

    // The guest stores to two of its eight pages of 2 MiB; a look at the working set finds these, and the next look none.
    second_stage.store(cx, &vm, &space, at(0), 1)?;
    second_stage.store(cx, &vm, &space, at(5 * MIB), 1)?;
    vm.test_and_clear_young(cx, &space, guest, |_| ())?; // prefault and the copies above count as use of the space
    second_stage.store(cx, &vm, &space, at(5 * MIB), 2)?;
    let mut used = 0;
    vm.test_and_clear_young(cx, &space, guest, |span| used += span.bytes() / MIB)?;
    println!("the guest has used {used} of {} MiB since the last look", guest.bytes() / MIB);
    assert_eq!(used, 2);

    // A snapshot takes the guest's rights to write, and shares every page; the guest's next store copies one.
    let snapshot = vm.fork(cx, &space)?;
    let before = frames.stats(cx).available();
    second_stage.store(cx, &vm, &space, at(5 * MIB), 3)?;
    println!("a store behind a snapshot took {} pages", before - frames.stats(cx).available());
    let then = vm.lookup(cx, &snapshot, at(5 * MIB));
    let Lookup::Mapped(leaf) = then else { return Err("the snapshot has lost a page".into()) };
    let page = cx.platform().open(Extent::block(leaf.frame, leaf.size.order()), None).ok_or("no such frame")?;
    // SAFETY: within the page, which nobody changes while the snapshot has it.
    assert_eq!(unsafe { page.ptr.add(MIB as usize).read() }, 2, "what the guest stored before the snapshot");
    vm.destroy(cx, snapshot).map_err(|(error, _)| error)?;

    // A balloon takes 4 MiB back: gone from the second stage before their frames are free.
    let balloon = VirtRange::new(at(4 * MIB), 4 * MIB)?;
    let before = frames.stats(cx).available();
    vm.unmap(cx, &space, balloon)?;
    println!("a balloon gave back {} pages", frames.stats(cx).available() - before);
    assert_eq!(second_stage.store(cx, &vm, &space, at(5 * MIB), 4), Err(VmError::NoArea { at: at(5 * MIB) }));

    // SAFETY: it follows this space.
    unsafe { vm.unfollow(cx, &space, follower) };
    vm.destroy(cx, space).map_err(|(error, _)| error)?;
    Ok(())
}
