//! The slabs of the manager's own small objects: one for each type, which only that type reaches.

use crate::address_space::AddressSpace;
use crate::cpu_lines::{self, CpuLine};
use crate::cpu_masks;
use crate::notifier::Node;
use crate::object::Object;
use crate::setup::Setup;
use crate::vma::Vma;
use hugemm_frames::{Env, Slab};

pub(crate) type SlabOf<S> = Slab<<<S as Setup>::Env as Env>::Lock>;

/// The slabs of one manager.
pub(crate) struct Slabs<S: Setup> {
    pub(crate) spaces: SlabOf<S>,
    pub(crate) areas: SlabOf<S>,
    pub(crate) objects: SlabOf<S>,
    pub(crate) followers: SlabOf<S>,
    pub(crate) lines: SlabOf<S>,
}

impl<S: Setup> Slabs<S> {
    /// For spaces on so many CPUs. `None` if an object does not fit in a frame.
    pub(crate) fn new(cpus: usize) -> Option<Self> {
        let (size, align) = cpu_masks::layout::<AddressSpace<S>, S::Tlb>(cpus);
        let (_, _, size) = cpu_lines::layout(size, cpus);
        Some(Slabs {
            spaces: Slab::new(size, align.max(align_of::<CpuLine>()))?,
            areas: Slab::of::<Vma<S>>()?,
            objects: Slab::of::<Object<S>>()?,
            followers: Slab::of::<Node<S::Notifier>>()?,
            lines: Slab::of::<CpuLine>()?,
        })
    }
}

/// A type that has a slab, whose objects are as large and aligned as a value of it at least.
pub(crate) trait Kept<S: Setup>: Sized {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S>;
}

impl<S: Setup> Kept<S> for AddressSpace<S> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.spaces
    }
}

impl<S: Setup> Kept<S> for Vma<S> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.areas
    }
}

impl<S: Setup> Kept<S> for Object<S> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.objects
    }
}

impl<S: Setup> Kept<S> for Node<S::Notifier> {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.followers
    }
}

impl<S: Setup> Kept<S> for CpuLine {
    fn slab(slabs: &Slabs<S>) -> &SlabOf<S> {
        &slabs.lines
    }
}
