//! LLFree, which no registry has, written here after its published design: Wrenger et al., "LLFree: Scalable and
//! Optionally-Persistent Page-Frame Allocation", USENIX ATC 2023. It has no lock: each word is changed by compare-and-swap. The
//! thresholds below are this file's own, so its figures are this file's too, not its authors'.
//!
//! * **lower**: a bit per frame, 512 to a *child* of 2 MiB, and a 16-bit entry per child: how many of its frames are free, or that it
//!   is in use as a whole
//! * **upper**: a *tree* of 32 children has an entry: how many of its frames are free, and whether a CPU has it to itself
//! * **per CPU**: the tree that it takes from, and that tree's free frames, which the tree's own entry does not have meanwhile
//!
//! Expected of a block: three atomics to take it (the CPU's tree, the child's entry, the bits) and three to free it. Trees that are in
//! use in part go before whole ones. Whoever frees four times in a row into one tree takes from it next.

use crate::frames::peers::Peer;
use anyhow::{Result, ensure};
use hugemm_base::Order;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Frames of a child, and words of their bits.
const CHILD: u64 = 512;
const WORDS: usize = 8;

const HUGE: u32 = 9;

/// A child's entry that is in use as a whole: no number of free frames.
const WHOLE: u16 = 1 << 15;

/// Children of a tree, and its frames.
const CHILDREN: usize = 32;
const TREE: u32 = CHILDREN as u32 * CHILD as u32;

/// A tree's entry: a CPU has it.
const RESERVED: u32 = 1 << 31;

/// A tree is in use in part if so many of its frames are free, and as many are not.
const PART: u32 = 64;

/// Trees that lie near each other.
const NEAR: usize = 16;

/// CPUs with a tree of their own; more share.
const CPUS: usize = 64;

/// Frees in a row into one tree, after which that is taken from.
const IN_A_ROW: u64 = 4;

/// The bits of a child: set is in use.
#[repr(align(64))]
#[derive(Default)]
struct Bits([AtomicU64; WORDS]);

/// What a CPU has.
#[repr(align(128))]
#[derive(Default)]
struct Local {
    /// Its tree's number plus 1 in the upper half, its free frames in the lower; 0 for none.
    tree: AtomicU64,
    /// The child where it found room last.
    child: AtomicU32,
    /// The tree of the last free, and how many there were in a row: tree times 8 plus that.
    frees: AtomicU64,
}

pub struct LlFree {
    bits: Box<[Bits]>,
    children: Box<[AtomicU16]>,
    trees: Box<[AtomicU32]>,
    locals: Box<[Local]>,
}

/// Changes a word by compare-and-swap; the old one, or `None` if `f` does not want to change it.
macro_rules! change {
    ($word:expr, $f:expr) => {
        $word.fetch_update(Ordering::AcqRel, Ordering::Acquire, $f).ok()
    };
}

impl Peer for LlFree {
    const NAME: &'static str = "LLFree";
    const DIVISIBLE: bool = true;
    const CLAIMS: bool = false;
    const LARGEST: u32 = HUGE + 1;

    fn new(frames: u64) -> Result<Self> {
        ensure!(frames.is_multiple_of(CHILD), "LLFree as written here manages whole 2 MiB; use another --size");
        let count = (frames / CHILD) as usize;
        let trees = count.div_ceil(CHILDREN);
        let in_tree = |tree: usize| ((count - tree * CHILDREN).min(CHILDREN) as u64 * CHILD) as u32;
        Ok(LlFree {
            bits: (0..count).map(|_| Bits::default()).collect(),
            children: (0..trees * CHILDREN).map(|child| AtomicU16::new(if child < count { 512 } else { 0 })).collect(),
            trees: (0..trees).map(|tree| AtomicU32::new(in_tree(tree))).collect(),
            locals: (0..CPUS).map(|_| Local::default()).collect(),
        })
    }

    fn alloc(&self, cpu: impl FnOnce() -> u32, order: Order) -> Option<u64> {
        let local = &self.locals[cpu() as usize % CPUS];
        let (order, need) = (order.get(), 1_u32.checked_shl(order.get())?);
        if order > Self::LARGEST {
            return None;
        }
        if let Some(tree) = self.take_of_local(local, need) {
            if let Some(frame) = self.take_in(tree, local.child.load(Ordering::Relaxed) as usize, order) {
                local.child.store((frame / CHILD) as u32, Ordering::Relaxed);
                return Some(frame);
            }
            self.give_back(local, tree, need);
        }
        self.take_another(local, order, need).or_else(|| {
            // What other CPUs have to themselves.
            self.locals.iter().for_each(|local| self.let_go(local));
            self.take_another(local, order, need)
        })
    }

    fn free(&self, cpu: impl FnOnce() -> u32, frame: u64, order: Order) {
        let local = &self.locals[cpu() as usize % CPUS];
        let tree = frame as usize / TREE as usize;
        match order.get() {
            order if order < HUGE => self.clear(frame, order),
            order => (0..1 << (order - HUGE)).for_each(|next| {
                self.children[(frame / CHILD) as usize + next].store(CHILD as u16, Ordering::Release);
            }),
        }
        self.give_back(local, tree, order.pages() as u32);
        self.follow(local, tree as u64);
    }

    fn divide(&self, frame: u64, order: Order) {
        if order.get() >= HUGE {
            for child in (frame / CHILD) as usize..((frame + order.pages()) / CHILD) as usize {
                // Whoever has the block has its children too.
                self.bits[child].0.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
                self.children[child].store(0, Ordering::Release);
            }
        }
    }

    fn free_range(&self, cpu: impl FnOnce() -> u32, first: u64, pages: u64) {
        let local = &self.locals[cpu() as usize % CPUS];
        // Of a child at most 256 frames at once, so that only whole blocks are whole children.
        let step = pages.min(CHILD / 2);
        for frame in (first..first + pages).step_by(step as usize) {
            self.clear(frame, step.ilog2());
            self.give_back(local, frame as usize / TREE as usize, step as u32);
        }
    }

    fn claim(&self, _first: u64, _pages: u64) -> bool {
        false
    }
}

impl LlFree {
    /// Takes frames of the CPU's tree, as a number; which tree that is.
    fn take_of_local(&self, local: &Local, need: u32) -> Option<usize> {
        let enough = |word: u64| (word as u32 >= need).then(|| word - u64::from(need));
        let number = |word: u64| ((word >> 32) as usize).checked_sub(1);
        if let Some(word) = change!(local.tree, enough) {
            return number(word);
        }
        // What others have freed there stands in the tree's entry.
        let tree = number(local.tree.load(Ordering::Acquire))?;
        let freed =
            change!(self.trees[tree], |entry| (entry & !RESERVED != 0).then_some(entry & RESERVED))? & !RESERVED;
        let mine = |word: u64| (number(word) == Some(tree)).then(|| word + u64::from(freed));
        if change!(local.tree, mine).is_none() {
            self.trees[tree].fetch_add(freed, Ordering::AcqRel);
            return None;
        }
        change!(local.tree, |word| enough(word).filter(|_| number(word) == Some(tree))).map(|_| tree)
    }

    /// Finds the CPU another tree, and takes a block there. Trees that are in use in part first, near ones before others, then any.
    fn take_another(&self, local: &Local, order: u32, need: u32) -> Option<u64> {
        let trees = self.trees.len();
        let last = local.child.load(Ordering::Relaxed) as usize / CHILDREN;
        let from = last / NEAR * NEAR;
        let part = |free: u32| (PART.max(need)..=TREE - PART).contains(&free);
        let half = |free: u32| free <= TREE / 2 && part(free);
        let passes: [(usize, &dyn Fn(u32) -> bool); 3] = [(NEAR.min(trees), &half), (trees, &part), (trees, &|_| true)];
        for (reach, wanted) in passes {
            for tree in (0..reach).map(|step| (from + step) % trees) {
                let free = |entry: u32| entry & RESERVED == 0 && entry >= need && wanted(entry);
                let Some(entry) = change!(self.trees[tree], |entry| free(entry).then_some(RESERVED)) else { continue };
                if let Some(frame) = self.take_in(tree, tree * CHILDREN, order) {
                    local.child.store((frame / CHILD) as u32, Ordering::Relaxed);
                    self.reserve(local, tree, entry - need);
                    return Some(frame);
                }
                // Enough free, but in pieces.
                change!(self.trees[tree], |now| Some((now & !RESERVED) + entry));
            }
        }
        None
    }

    /// A tree that was marked as reserved is the CPU's from here on, with so many free frames; the one before is nobody's.
    fn reserve(&self, local: &Local, tree: usize, free: u32) {
        let before = local.tree.swap((tree as u64 + 1) << 32 | u64::from(free), Ordering::AcqRel);
        self.unreserve(before);
    }

    /// A CPU's tree is nobody's.
    fn let_go(&self, local: &Local) {
        self.unreserve(local.tree.swap(0, Ordering::AcqRel));
    }

    fn unreserve(&self, word: u64) {
        if let Some(tree) = ((word >> 32) as usize).checked_sub(1) {
            change!(self.trees[tree], |entry| Some((entry & !RESERVED) + word as u32));
        }
    }

    /// So many frames of a tree are free: the CPU's own counter, if that is its tree.
    fn give_back(&self, local: &Local, tree: usize, frames: u32) {
        let mine = |word: u64| (word >> 32 == tree as u64 + 1).then(|| word + u64::from(frames));
        if change!(local.tree, mine).is_none() {
            self.trees[tree].fetch_add(frames, Ordering::AcqRel);
        }
    }

    /// Notes a free; whoever keeps freeing into one tree takes from that one next.
    fn follow(&self, local: &Local, tree: u64) {
        let seen = local.frees.load(Ordering::Relaxed);
        let count = if seen >> 3 == tree { (seen & 7) + 1 } else { 1 };
        local.frees.store(tree << 3 | count.min(IN_A_ROW), Ordering::Relaxed);
        if count == IN_A_ROW && local.tree.load(Ordering::Relaxed) >> 32 != tree + 1 {
            let nobodys = |entry: u32| (entry & RESERVED == 0).then_some(RESERVED);
            if let Some(free) = change!(self.trees[tree as usize], nobodys) {
                local.child.store(tree as u32 * CHILDREN as u32, Ordering::Relaxed);
                self.reserve(local, tree as usize, free);
            }
        }
    }

    /// Takes a block in a tree of which as many frames have been taken by number, from a child on.
    fn take_in(&self, tree: usize, from: usize, order: u32) -> Option<u64> {
        let first = tree * CHILDREN;
        // The CPU's child may be of another tree.
        let start = from.wrapping_sub(first) % CHILDREN;
        let all = (0..CHILDREN).map(|step| (start + step) % CHILDREN);
        match order {
            HUGE.. => {
                let step = 1 << (order - HUGE);
                let mut whole = all.filter(|child| child % step == 0).map(|child| first + child);
                whole.find(|child| self.take_whole(*child, step)).map(|child| child as u64 * CHILD)
            }
            _ => all.map(|child| first + child).find_map(|child| {
                let need = 1_u16 << order;
                change!(self.children[child], |free| (free & WHOLE == 0 && free >= need).then(|| free - need))?;
                let index = self.set(child, order);
                if index.is_none() {
                    // In pieces.
                    self.children[child].fetch_add(need, Ordering::AcqRel);
                }
                index.map(|index| child as u64 * CHILD + index)
            }),
        }
    }

    /// Takes children as a whole.
    fn take_whole(&self, first: usize, count: usize) -> bool {
        for child in first..first + count {
            let free = &self.children[child];
            if free.compare_exchange(CHILD as u16, WHOLE, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                let taken = &self.children[first..child];
                taken.iter().for_each(|child| child.store(CHILD as u16, Ordering::Release));
                return false;
            }
        }
        true
    }

    /// Sets the bits of an aligned block in a child; its first one.
    fn set(&self, child: usize, order: u32) -> Option<u64> {
        let words = &self.bits[child].0;
        if order < 6 {
            return words.iter().enumerate().find_map(|(at, word)| {
                let free = |word: u64| aligned(word, order).map(|bit| word | ones(order) << bit);
                let old = change!(word, free)?;
                aligned(old, order).map(|bit| at as u64 * 64 + u64::from(bit))
            });
        }
        let step = 1 << (order - 6);
        (0..WORDS).step_by(step).find_map(|at| {
            let swap = |word: &AtomicU64| word.compare_exchange(0, u64::MAX, Ordering::AcqRel, Ordering::Relaxed);
            let done = words[at..at + step].iter().take_while(|word| swap(word).is_ok()).count();
            if done < step {
                words[at..at + done].iter().for_each(|word| word.store(0, Ordering::Release));
            }
            (done == step).then_some(at as u64 * 64)
        })
    }

    /// Clears the bits of a block of less than a child, and counts its frames there.
    fn clear(&self, frame: u64, order: u32) {
        let (child, index) = ((frame / CHILD) as usize, frame % CHILD);
        let words = &self.bits[child].0;
        match order {
            0..6 => _ = words[index as usize / 64].fetch_and(!(ones(order) << (index % 64)), Ordering::AcqRel),
            _ => {
                let at = index as usize / 64;
                words[at..at + (1 << (order - 6))].iter().for_each(|word| word.store(0, Ordering::Release));
            }
        }
        self.children[child].fetch_add(1 << order, Ordering::AcqRel);
    }
}

/// The bits of a block of less than a word.
const fn ones(order: u32) -> u64 {
    u64::MAX >> (64 - (1 << order))
}

/// The lowest aligned block of which no bit is set.
fn aligned(word: u64, order: u32) -> Option<u32> {
    let mut free = !word;
    for step in 0..order {
        free &= free >> (1 << step);
    }
    // Where blocks of this order may begin.
    let begins = u64::MAX / ones(order);
    (free & begins != 0).then(|| (free & begins).trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hugemm_workloads::random::Random;

    #[test]
    fn the_lowest_aligned_block_is_found() {
        let mut random = Random::new(1);
        for _ in 0..2000 {
            let word = random.below(u64::MAX) & random.below(u64::MAX);
            for order in 0..6 {
                let fits = |bit: &u32| word >> bit & ones(order) == 0;
                assert_eq!(aligned(word, order), (0..64).step_by(1 << order).find(fits), "{word:#x} {order}");
            }
        }
    }

    /// Several CPUs, all orders: nothing is handed out twice, and all of it is free in the end. In so little memory that they meet in
    /// each word, and in two trees and a part of one.
    #[test]
    fn no_frame_has_two_owners() {
        used_by_several(2 * CHILD);
        used_by_several(3 * u64::from(TREE) - 4 * CHILD);
    }

    fn used_by_several(frames: u64) {
        let peer = LlFree::new(frames).expect("whole 2 MiB");
        let owned: Vec<AtomicU32> = (0..frames).map(|_| AtomicU32::new(0)).collect();
        let add = |frame: u64, order: Order, step: i32| {
            let was = if step > 0 { 0 } else { 1 };
            for frame in &owned[frame as usize..][..order.pages() as usize] {
                assert_eq!(frame.fetch_add(step as u32, Ordering::Relaxed), was, "a frame with two owners");
            }
        };
        std::thread::scope(|scope| {
            for cpu in 0..4 {
                let (peer, add) = (&peer, &add);
                scope.spawn(move || {
                    let (mut random, mut held) = (Random::new(u64::from(cpu) + 1), Vec::new());
                    for _ in 0..100_000 {
                        let order = random.below(11).min(random.below(11)).min(random.below(11)) as u32;
                        let order = Order::new(order).expect("small");
                        if random.below(100) < 52
                            && let Some(frame) = peer.alloc(|| cpu, order)
                        {
                            add(frame, order, 1);
                            held.push((frame, order));
                        } else if !held.is_empty() {
                            let (frame, order) = held.swap_remove(random.below(held.len() as u64) as usize);
                            add(frame, order, -1);
                            peer.free(|| cpu, frame, order);
                        }
                    }
                    for (frame, order) in held {
                        add(frame, order, -1);
                        peer.free(|| cpu, frame, order);
                    }
                });
            }
        });
        let huge = Order::new(HUGE).expect("2 MiB");
        let all: Vec<u64> = std::iter::from_fn(|| peer.alloc(|| 0, huge)).collect();
        assert_eq!(all.len() as u64, frames / CHILD);
        all.into_iter().for_each(|frame| add(frame, huge, 1));
    }
}
