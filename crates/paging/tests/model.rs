//! The shipped mapper and shootdown on the model MMU: a random workload that the oracle finds nothing wrong with, and the
//! same with one bug planted, which it finds.

mod world;

use hugemm_base::{CpuId, Extent};
use world::{Plant, World};

/// Steps of one run.
const STEPS: usize = 400;

fn run(seed: u64, plant: Option<Plant>) -> Result<(), String> {
    world::with_memory(|memory| {
        let mut world = World::new(memory, seed, plant);
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

/// The bug is noticed within a few runs, and as what it is.
fn caught(plant: Plant, as_what: &[&str]) {
    let error = (0..40).find_map(|seed| run(seed, Some(plant)).err());
    let error = error.unwrap_or_else(|| panic!("{plant:?} was not noticed"));
    assert!(as_what.iter().any(|what| error.contains(what)), "{plant:?} was noticed as: {error}");
}

#[test]
fn frames_freed_before_the_flush() {
    caught(Plant::FreeBeforeFlush, &["stale translation", "freed table"]);
}

#[test]
fn a_cpu_that_is_not_asked() {
    caught(Plant::MissedCpu, &["stale translation", "freed table"]);
}

#[test]
fn a_lazy_cpu_that_walks_a_freed_table() {
    caught(Plant::LazyCpuSkipped, &["freed table"]);
}

#[test]
fn a_late_comer_that_skips_too_much() {
    caught(Plant::LateComer, &["stale translation", "freed table"]);
}

#[test]
fn a_store_into_a_moved_page_before_the_flush() {
    caught(Plant::StoreIntoMoved, &["store is lost"]);
}

#[test]
fn a_dirty_bit_lost_to_a_plain_store() {
    caught(Plant::LostDirty, &["dirty bit lost"]);
}

#[test]
fn a_missing_store_fence() {
    caught(Plant::MissingFence, &["before it was published"]);
}

#[test]
fn a_write_protection_that_is_not_flushed() {
    caught(Plant::ProtectWithoutFlush, &["stored to a read-only page"]);
}

#[test]
fn a_table_made_read_only_whose_upper_levels_are_not_flushed() {
    caught(Plant::UpperLevelsKept, &["stored to a read-only page"]);
}

#[test]
fn a_deferred_unmap_that_nobody_flushes() {
    caught(Plant::FreeBeforeDeferredFlush, &["stale translation"]);
}

/// CPUs as threads, the hardware's bits racing with software for real: no written page is taken for a clean one, and no
/// access meets a freed frame.
#[test]
fn threads_race_with_the_hardware() {
    world::with_memory(|memory| {
        let world = World::new(memory, 1, None);
        world.race(CpuId(0), [CpuId(1), CpuId(2)]);
        assert_eq!(world.mmu().check(), Ok(()));
    });
}

/// A CPU that loads another space over one in which it was lazy, and comes back, is no longer lazy there: a flush asks it.
#[test]
fn a_cpu_that_comes_back_is_no_longer_lazy() {
    for seed in 0..20 {
        let done = world::with_memory(|memory| World::new(memory, seed, None).come_back());
        assert_eq!(done, Ok(()), "seed {seed}");
    }
}

/// The table that a larger page has replaced is freed after every CPU that may walk it has let go of it, lazy ones included.
#[test]
fn a_collapsed_table_is_walked_by_nobody() {
    for seed in 0..20 {
        let done = world::with_memory(|memory| World::new(memory, seed, None).collapse_beside_a_lazy_cpu());
        assert_eq!(done, Ok(()), "seed {seed}");
    }
}

/// A table of the kernel's half is let go of under the tags of all spaces, not only of the one that is loaded.
#[test]
fn the_kernels_tables_go_from_every_tag() {
    // Odd seeds have two tags.
    for seed in (1..40).step_by(2) {
        let done = world::with_memory(|memory| World::new(memory, seed, None).collapse_in_the_kernels_half());
        assert_eq!(done, Ok(()), "seed {seed}");
    }
}

/// What the model promises about itself: a run is repeatable, and frames are known.
#[test]
fn the_model_is_repeatable() {
    assert_eq!(run(3, Some(Plant::FreeBeforeFlush)), run(3, Some(Plant::FreeBeforeFlush)));
    world::with_memory(|memory| {
        let world = World::new(memory, 1, None);
        let frame = Extent::new(world.free_frame(), 1).expect("a frame");
        world.mmu().freed(frame);
        assert!(matches!(world.mmu().check(), Err(hugemm_host::mmu::Violation::FreedTwice { .. })));
    });
}
