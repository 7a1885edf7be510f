//! The shipped mapper and shootdown on the model MMU: a random workload that the oracle finds nothing wrong with, and the
//! same with one bug planted, which it finds.

mod world;

use hugemm_base::{CpuId, Extent};
use hugemm_host::mmu::Tables;
use hugemm_paging::{Aarch64, PageFormat, X86_64};
use world::{Plant, Resizing, World};

/// arm64 CPUs, whose entries have to be broken before they change size, and such as let them change.
const ARM64: Tables = Tables::Arm64 { resizes: false };
const ARM64_RESIZES: Tables = Tables::Arm64 { resizes: true };

/// Steps of one run.
const STEPS: usize = 400;

fn run(seed: u64, plant: Option<Plant>) -> Result<(), String> {
    run_on::<X86_64>(Tables::X86_64, seed, plant)
}

fn run_on_arm64(seed: u64, plant: Option<Plant>) -> Result<(), String> {
    run_on::<Aarch64>(ARM64, seed, plant)
}

fn run_on<F: PageFormat>(walks: Tables, seed: u64, plant: Option<Plant>) -> Result<(), String> {
    world::with_memory(|memory| {
        let mut world = World::<F>::on(walks, memory, seed, plant);
        for _ in 0..STEPS {
            world.step()?;
        }
        world.finish()
    })
}

#[test]
fn a_random_workload_meets_nothing_stale() {
    let times = std::env::var("HUGEMM_SOAK").ok().and_then(|times| times.parse().ok()).unwrap_or(1_u64);
    for seed in 0..60 * times {
        if let Err(error) = run(seed, None) {
            panic!("seed {seed}: {error}");
        }
    }
}

/// The same on arm64, where two translations of one address that differ are a violation.
#[test]
fn a_random_workload_breaks_before_it_makes() {
    for seed in 0..20 {
        if let Err(error) = run_on_arm64(seed, None) {
            panic!("seed {seed}: {error}");
        }
    }
}

/// Whether a page that changes its size so, in use, is all right: in twenty runs, or not in all of them.
fn resizes<F: PageFormat>(walks: Tables, how: Resizing) -> Result<(), String> {
    (0..20).try_for_each(|seed| world::with_memory(|memory| World::<F>::on(walks, memory, seed, None).resize(how)))
}

#[test]
fn pages_in_use_change_their_size() {
    let (in_place, broken) = (Resizing::InPlace, Resizing::Broken { flushed: true });
    for (done, what) in [
        (resizes::<X86_64>(Tables::X86_64, in_place), "x86-64, in place"),
        (resizes::<X86_64>(Tables::X86_64, broken), "x86-64, broken"),
        (resizes::<Aarch64>(ARM64_RESIZES, in_place), "arm64, in place"),
        (resizes::<Aarch64>(ARM64_RESIZES, broken), "arm64, broken"),
        (resizes::<Aarch64>(ARM64, broken), "arm64 without FEAT_BBM, broken"),
    ] {
        assert_eq!(done, Ok(()), "{what}");
    }
    for how in [in_place, Resizing::Broken { flushed: false }] {
        let error = resizes::<Aarch64>(ARM64, how).expect_err("not noticed");
        assert!(error.contains("two translations"), "{how:?} was noticed as: {error}");
    }
}

/// A bug that is planted is noticed within a few runs, and as one of those.
macro_rules! noticed {
    ($($(#[$about:meta])* fn $name:ident: $run:ident, $plant:ident, $as_what:expr;)+) => {$(
        $(#[$about])*
        #[test]
        fn $name() {
            let error = (0..120).find_map(|seed| $run(seed, Some(Plant::$plant)).err()).expect("it was not noticed");
            assert!($as_what.iter().any(|what| error.contains(what)), "it was noticed as: {error}");
        }
    )+};
}

noticed! {
    fn frames_freed_before_the_flush: run, FreeBeforeFlush, ["stale translation", "freed table"];
    fn a_cpu_that_is_not_asked: run, MissedCpu, ["stale translation", "freed table", "stored to a read-only page"];
    fn a_lazy_cpu_that_walks_a_freed_table: run, LazyCpuSkipped, ["freed table"];
    fn a_late_comer_that_skips_too_much: run, LateComer, ["stale translation", "freed table"];
    fn a_store_into_a_moved_page_before_the_flush: run, StoreIntoMoved, ["store is lost"];
    fn a_dirty_bit_lost_to_a_plain_store: run, LostDirty, ["dirty bit lost"];
    fn a_missing_store_fence: run, MissingFence, ["before it was published"];
    fn a_write_protection_that_is_not_flushed: run, ProtectWithoutFlush, ["stored to a read-only page"];
    fn a_table_made_read_only_whose_upper_levels_are_not_flushed: run, UpperLevelsKept, ["stored to a read-only page"];
    fn what_moves_without_a_flush: run, RelocateWithoutFlush, ["moved away", "stale translation", "freed table"];
    fn a_dirty_bit_lost_on_the_way: run, RelocateLosesDirty, ["dirty bit lost"];
    fn a_deferred_unmap_that_nobody_flushes: run, FreeBeforeDeferredFlush, ["stale translation"];
    /// A page that gets another frame before the old translation is flushed.
    fn a_frame_that_is_made_before_it_is_broken: run_on_arm64, MapBeforeFlush, ["two translations"];
    fn a_group_that_is_unfolded_and_not_flushed: run_on_arm64, UnfoldWithoutFlush, ["two translations"];
    fn a_group_of_which_a_part_is_changed: run_on_arm64, PartOfAGroup, ["folded group"];
    /// Hardware that is told of another size of leaves keeps those that are there.
    fn a_flush_of_another_level: run_on_arm64, AnotherLevel,
        ["stale translation", "two translations", "stored to a read-only page"];
}

/// Scenes of the world that end well, whatever the seed; odd ones have two tags.
macro_rules! scenes {
    ($($(#[$about:meta])* fn $name:ident: $format:ty, $walks:expr, $seeds:expr, $scene:ident;)+) => {$(
        $(#[$about])*
        #[test]
        fn $name() {
            for seed in $seeds {
                let done = world::with_memory(|memory| World::<$format>::on($walks, memory, seed, None).$scene());
                assert_eq!(done, Ok(()), "seed {seed}");
            }
        }
    )+};
}

scenes! {
    /// Where sizes have changed in place, a flush reaches leaves of all of them.
    fn a_part_of_a_page_that_was_divided_in_place: Aarch64, ARM64_RESIZES, 0..20, unmap_part_of_a_split;
    /// A CPU that loads another space over one in which it was lazy, and comes back, is no longer lazy there: a flush asks it.
    fn a_cpu_that_comes_back_is_no_longer_lazy: X86_64, Tables::X86_64, 0..20, come_back;
    /// A CPU that comes back to a space has missed the flush of a deferred unmap there, and catches up by the space's generation.
    fn a_cpu_that_comes_back_catches_up_with_a_deferred_unmap: X86_64, Tables::X86_64, (1..40).step_by(2), come_back_after_a_deferred_unmap;
    /// The table that a larger page has replaced is freed after every CPU that may walk it has let go of it, lazy ones included.
    fn a_collapsed_table_is_walked_by_nobody: X86_64, Tables::X86_64, 0..20, collapse_beside_a_lazy_cpu;
    /// A table of the kernel's half is let go of under the tags of all spaces, not only of the one that is loaded.
    fn the_kernels_tables_go_from_every_tag: X86_64, Tables::X86_64, (1..40).step_by(2), collapse_in_the_kernels_half;
}

/// What folding is for: a TLB of 64 translations reads fewer from the tables. By random loads over 1 MiB, of which one that keeps
/// single leaves can have a quarter.
#[test]
fn folded_pages_take_fewer_fills() {
    let fills = [false, true]
        .map(|folded| world::with_memory(|memory| World::<Aarch64>::on(ARM64, memory, 1, None).fills(folded)));
    println!("{} fills by single leaves, {} by groups", fills[0], fills[1]);
    assert!(2 * fills[1] < fills[0], "{fills:?}");
}

/// CPUs as threads, the hardware's bits racing with software for real: no written page is taken for a clean one, and no
/// access meets a freed frame.
#[test]
fn threads_race_with_the_hardware() {
    fn race<F: PageFormat>(walks: Tables) {
        world::with_memory(|memory| {
            let world = World::<F>::on(walks, memory, 1, None);
            world.race(CpuId::new(0), [CpuId::new(1), CpuId::new(2)]);
            assert_eq!(world.mmu().check(), Ok(()));
        });
    }
    race::<X86_64>(Tables::X86_64);
    race::<Aarch64>(ARM64);
}

/// What the model promises about itself: a run is repeatable, and frames are known.
#[test]
fn the_model_is_repeatable() {
    assert_eq!(run(3, Some(Plant::FreeBeforeFlush)), run(3, Some(Plant::FreeBeforeFlush)));
    world::with_memory(|memory| {
        let world = World::new(memory, 1, None);
        let frame = Extent::new(world.free_frame(), 1).expect("a frame");
        world.mmu().freed(frame);
        assert!(world.mmu().check().is_err_and(|violation| violation.to_string().ends_with("was freed twice")));
    });
}
