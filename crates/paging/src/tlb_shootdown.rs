//! The TLBs of all CPUs: what each has loaded, and the work of a shootdown on both ends.

use crate::ipi::{self, ANY_SPACE, Request, Slot};
use crate::shootdown_counters::{ShootdownCounters, ShootdownCounts};
use core::fmt;
use hugemm_base::platform::{Cpu, CpuId};
use hugemm_base::sync::{AtomicBool, AtomicU64, Ordering, spin_loop};
use hugemm_base::{CpuCx, Invalidation, TlbHw, TlbScope};

/// CPUs that one word of a mask stands for.
pub(crate) const WORD: usize = u64::BITS as usize;

/// Address spaces whose translations a CPU keeps apart at most; hardware may have fewer tags
/// ([`TlbHw::tags`]). More than a few are rarely worth their slots: what was flushed elsewhere meanwhile is stale.
const TAGS: usize = 6;

/// What is known of one CPU's TLB, its request slot and its counts. Only its own CPU writes any of it, pinned, except
/// for acknowledgements in the slot.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct TlbCpu {
    /// Identity of the space whose tables it walks; 0 for none.
    pub(crate) loaded: AtomicU64,
    /// Under which tag.
    pub(crate) tag: AtomicU64,
    /// Per tag: whose translations are under it, and up to which generation of that space they are right.
    pub(crate) tags: [Tagged; TAGS],
    /// The tag to be taken next for a space that has none.
    next_tag: AtomicU64,
    /// What is under its tags has been given up, by whomever, and it has not noticed yet.
    expired: AtomicBool,
    /// The same for the kernel's half.
    kernel: Tagged,
    pub(crate) slot: Slot,
    /// Spaces named so far; the first CPU's is used.
    pub(crate) spaces: AtomicU64,
    pub(crate) counters: ShootdownCounters,
}

#[derive(Debug, Default)]
pub(crate) struct Tagged {
    pub(crate) space: AtomicU64,
    pub(crate) seen: AtomicU64,
}

impl TlbCpu {
    /// A CPU that has nothing loaded, for statics: what [`default`](TlbCpu::default) says.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        // SAFETY: it has atomic integers and booleans, and nothing else: 0 is a value of each, and the one that it begins with.
        unsafe { core::mem::zeroed() }
    }

    /// What is known of the kernel's half as `space` has it. The last to be seen is known: of another nothing is.
    pub(crate) fn kernel_of(&self, space: u64) -> &Tagged {
        // Relaxed: only this CPU reads or writes these words.
        if self.kernel.space.load(Ordering::Relaxed) != space {
            self.kernel.space.store(space, Ordering::Relaxed);
            self.kernel.seen.store(0, Ordering::Relaxed);
        }
        &self.kernel
    }

    /// Whether what is under the tags was given up since this CPU noticed last. Then the tags are nobody's, but for `current`,
    /// whose translations the caller invalidates.
    pub(crate) fn notice_expiry(&self, current: Option<usize>) -> bool {
        // Relaxed: a hint about recency; all others are this CPU's own.
        if !self.expired.load(Ordering::Relaxed) {
            return false;
        }
        // Before the tags are emptied, which serves everybody who has asked by then.
        self.expired.store(false, Ordering::Relaxed);
        for (_, tagged) in self.tags.iter().enumerate().filter(|(tag, _)| Some(*tag) != current) {
            tagged.space.store(0, Ordering::Relaxed);
        }
        true
    }

    /// The tag of a space, and whether anything under it is the space's. Otherwise the tag changes hands.
    pub(crate) fn tag_of(&self, space: u64, tags: usize) -> (usize, bool) {
        // Relaxed: only this CPU reads or writes these words.
        let tags = tags.clamp(1, TAGS);
        if let Some(tag) = (0..tags).find(|&tag| self.tags[tag].space.load(Ordering::Relaxed) == space) {
            return (tag, true);
        }
        let tag = self.next_tag.load(Ordering::Relaxed) as usize % tags;
        self.next_tag.store(tag as u64 + 1, Ordering::Relaxed);
        self.tags[tag].space.store(space, Ordering::Relaxed);
        (tag, false)
    }
}

/// Why the parts do not fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlbShootdownError {
    /// There are no CPUs.
    NoCpus,
    /// A slice of words is too short.
    TooFewWords {
        /// How many it takes.
        needed: usize,
        /// How many there are.
        given: usize,
    },
}

impl fmt::Display for TlbShootdownError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TlbShootdownError::NoCpus => f.write_str("there are no CPUs; give one TlbCpu for each"),
            TlbShootdownError::TooFewWords { needed, given } => {
                write!(f, "{given} words are too few for the masks of these CPUs; give {needed}")
            }
        }
    }
}

impl core::error::Error for TlbShootdownError {}

/// The TLBs of all CPUs, over memory that the caller supplies. See [`shootdown`](crate::shootdown) for the protocol.
///
/// It is a view: everything that changes is in the slices, so that making several over the same slices is harmless.
pub struct TlbShootdown<'m, H> {
    pub(crate) cpus: &'m [TlbCpu],
    /// For each CPU as many words as a mask has.
    inboxes: &'m [AtomicU64],
    pub(crate) hw: H,
}

impl<H> fmt::Debug for TlbShootdown<'_, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlbShootdown").field("cpus", &self.cpus.len()).finish_non_exhaustive()
    }
}

impl<'m, H: TlbHw> TlbShootdown<'m, H> {
    /// Words of a mask over this many CPUs.
    pub const fn mask_words(cpus: usize) -> usize {
        cpus.div_ceil(WORD)
    }

    /// Words that the inboxes of this many CPUs take.
    pub const fn inbox_words(cpus: usize) -> usize {
        cpus * Self::mask_words(cpus)
    }

    /// Gives up what CPUs keep under tags for spaces that they have switched away from: a CPU's next switch to each of them
    /// begins with no translations. Nobody is interrupted or waited for; one store per CPU.
    ///
    /// For whoever ages pages without flushing: a translation that outlives its space's turn on the CPU hides every later
    /// use, for as long as nothing else happens to flush it.
    pub fn expire(&self) {
        for cpu in self.cpus {
            // Relaxed: a hint about recency.
            cpu.expired.store(true, Ordering::Relaxed);
        }
    }

    /// The TLBs of `cpus.len()` CPUs. `inboxes` has [`inbox_words`](TlbShootdown::inbox_words) words, all 0 at first.
    ///
    /// # Errors
    ///
    /// [`NoCpus`](TlbShootdownError::NoCpus), or [`TooFewWords`](TlbShootdownError::TooFewWords) with what
    /// [`inbox_words`](TlbShootdown::inbox_words) says.
    ///
    /// # Safety
    ///
    /// The platform whose contexts are passed to the methods has at most these CPUs, `hw` is theirs, and every other
    /// `TlbShootdown` with any of these slices has both of them.
    pub unsafe fn new(cpus: &'m [TlbCpu], inboxes: &'m [AtomicU64], hw: H) -> Result<Self, TlbShootdownError> {
        let (needed, given) = (Self::inbox_words(cpus.len()), inboxes.len());
        match cpus.len() {
            0 => Err(TlbShootdownError::NoCpus),
            _ if given < needed => Err(TlbShootdownError::TooFewWords { needed, given }),
            _ => Ok(TlbShootdown { cpus, inboxes, hw }),
        }
    }

    /// What tells its CPUs from others, for as long as they are there: the same for every view of them.
    pub(crate) fn machine(&self) -> usize {
        self.cpus.as_ptr().addr()
    }

    /// The hardware.
    pub fn hw(&self) -> &H {
        &self.hw
    }

    /// How many CPUs there are.
    pub fn cpus(&self) -> usize {
        self.cpus.len()
    }

    /// The sum of all CPUs' counts. Not atomic across counts.
    pub fn counts(&self) -> ShootdownCounts {
        self.cpus.iter().fold(ShootdownCounts::default(), |sum, cpu| sum.plus(cpu.counters.read()))
    }

    /// What one CPU has counted: the flushes that it started, and what it did for others. Nothing if there is no such CPU.
    pub fn counts_of(&self, cpu: CpuId) -> ShootdownCounts {
        self.cpus.get(cpu.get() as usize).map_or(ShootdownCounts::default(), |cpu| cpu.counters.read())
    }

    /// Does what other CPUs have asked of this one: the interrupt handler's whole job, also to be called wherever a CPU
    /// waits with interrupts off. Any context; pins. One load per 64 CPUs if there is nothing.
    pub fn handle_ipi<P: Cpu>(&self, cx: &CpuCx<'_, P>) {
        cx.pinned(|pin| self.handle_ipi_as(pin.cpu()));
    }

    /// The same as CPU `cpu`, which is the caller's, pinned, or one that a simulation plays.
    fn handle_ipi_as(&self, cpu: CpuId) {
        let whole = Whole;
        let words = Self::mask_words(self.cpus.len());
        let own = &self.cpus[cpu.get() as usize];
        for (word, inbox) in self.inboxes[cpu.get() as usize * words..][..words].iter().enumerate() {
            for initiator in bits(ipi::take(inbox)) {
                let slot = &self.cpus[word * WORD + initiator].slot;
                self.apply(cpu, &slot.read());
                own.counters.served.add(1);
                slot.acknowledge();
            }
        }
        core::mem::forget(whole);
    }

    /// Does what a request asks, on the calling CPU, pinned.
    fn apply(&self, cpu: CpuId, request: &Request) {
        // Relaxed throughout: only this CPU reads or writes its words.
        let own = &self.cpus[cpu.get() as usize];
        let loaded = own.loaded.load(Ordering::Relaxed);
        let tagged = match request.scope {
            TlbScope::Kernel => own.kernel_of(request.space),
            TlbScope::Space if loaded == request.space => &own.tags[own.tag.load(Ordering::Relaxed) as usize % TAGS],
            TlbScope::Space => {
                // It is no longer loaded (what is left under its tag is caught up with when it is loaded again), or the
                // request is for whatever is.
                if request.space == ANY_SPACE && loaded != 0 {
                    // SAFETY: pinned, by every caller.
                    unsafe { self.hw.invalidate(cpu, request.scope, &request.what) };
                }
                return;
            }
        };
        if request.unload {
            // SAFETY: pinned, by every caller.
            unsafe { self.hw.unload(cpu) };
            own.loaded.store(0, Ordering::Relaxed);
            return;
        }
        let seen = tagged.seen.load(Ordering::Relaxed);
        if request.generation <= seen {
            own.counters.late.add(1);
            return;
        }
        // Past a gap a range is not enough to be up to date. Everything is: the flushes in between were started, hence
        // their entries changed, before the one that asks.
        let what = if request.generation == seen + 1 {
            request.what
        } else {
            own.counters.caught_up.add(1);
            Invalidation::ALL
        };
        // SAFETY: pinned, by every caller.
        unsafe { self.hw.invalidate(cpu, request.scope, &what) };
        tagged.seen.store(request.generation, Ordering::Relaxed);
    }

    /// Has every user of a domain do what `request` asks, and waits for them. `users` has a bit per CPU; those in `lazy`
    /// are left out.
    ///
    /// Cost without broadcast: per mask word 2 loads and 1 atomic, per target 2 atomics (its inbox, our count), 2 atomics
    /// more, no fence of its own; one interrupt per target, sent together.
    pub(crate) fn shoot<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        users: &[AtomicU64],
        lazy: Option<&[AtomicU64]>,
        request: &Request,
    ) {
        let platform = cx.platform();
        debug_assert!(
            platform.interrupts_on(),
            "a shootdown with interrupts off deadlocks with a CPU that waits for this one: release the lock first"
        );
        let whole = Whole;
        cx.staying(|| {
            let me = platform.current();
            let own = &self.cpus[me.get() as usize];
            if request.what.ranges.is_all() {
                own.counters.flushes_all.add(1);
            } else {
                own.counters.flushes_range.add(1);
                own.counters.pages.add(request.what.ranges.touched(request.what.stride));
                own.counters.flushes_uniform.add(u64::from(request.what.leaf_size().is_some()));
            }
            // SAFETY: the caller's CPU, on which this stays.
            let broadcast = || unsafe { self.broadcast(me, request.scope, &request.what) };
            let everywhere = if request.unload { None } else { broadcast() };
            match everywhere {
                Some(instructions) => {
                    own.counters.broadcasts.add(1);
                    own.counters.instructions.add(instructions);
                }
                None => self.shoot_by_interrupt(cx, me, users, lazy, request),
            }
        });
        core::mem::forget(whole);
    }

    /// Invalidates on all CPUs, and waits until that is done, by instructions that reach them: how many. `None`, and nothing has
    /// happened, if there are none. For whoever meets an entry that is broken and has to be made
    /// ([`PageFormat::BREAK_BEFORE_MAKE`](crate::PageFormat::BREAK_BEFORE_MAKE)); others flush. Any context; counts nothing.
    ///
    /// # Safety
    ///
    /// `cpu` is the calling CPU, and the caller stays on it until this returns: a CPU waits for what it has begun itself, and for
    /// nothing else.
    pub unsafe fn broadcast(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        let instructions = self.hw.broadcast(cpu, scope, what)?;
        self.hw.sync(cpu);
        Some(instructions)
    }

    fn shoot_by_interrupt<P: Cpu>(
        &self,
        cx: &CpuCx<'_, P>,
        me: CpuId,
        users: &[AtomicU64],
        lazy: Option<&[AtomicU64]>,
        request: &Request,
    ) {
        let own = &self.cpus[me.get() as usize];
        let words = Self::mask_words(self.cpus.len());
        let (my_word, my_bit) = (me.get() as usize / WORD, 1 << (me.get() as usize % WORD));
        own.slot.open(request);
        let mut here = false;
        for (word, users) in users.iter().take(words).enumerate() {
            // Acquire pairs with the Release of a CPU that leaves or becomes lazy: what it did through old translations
            // has happened. That a CPU which joins is not overlooked is the doing of the fence before (see `shootdown`).
            let users = users.load(Ordering::Acquire);
            let skipped = lazy.map_or(0, |lazy| lazy[word].load(Ordering::Acquire)) & users;
            let mut targets = users & !skipped;
            if word == my_word {
                here = users & my_bit != 0;
                targets &= !my_bit;
            }
            own.counters.skipped_lazy.add(u64::from(skipped.count_ones()));
            if targets == 0 {
                continue;
            }
            own.slot.expect(u64::from(targets.count_ones()));
            let mut interrupt = 0_u64;
            for target in bits(targets) {
                let inbox = &self.inboxes[(word * WORD + target) * words + my_word];
                if ipi::ask(inbox, my_bit) {
                    interrupt |= 1 << target;
                }
            }
            own.counters.targets.add(u64::from(targets.count_ones()));
            own.counters.interrupts.add(u64::from(interrupt.count_ones()));
            if interrupt != 0 {
                let first = CpuId::new((word * WORD) as u32);
                self.hw.interrupt(me, first, interrupt, &mut |cpu| self.handle_ipi_as(cpu));
            }
        }
        if here {
            // While the others are on their way.
            cx.pinned(|_| self.apply(me, request));
        }
        own.slot.acknowledge();
        let mut looks = 0_u64;
        while !own.slot.is_done() {
            self.handle_ipi(cx);
            spin_loop();
            looks += 1;
            if cfg!(all(debug_assertions, not(loom))) && looks == DEAF {
                self.name_who_is_deaf(my_word, my_bit);
            }
        }
    }

    /// Ends the program: somebody does not answer.
    #[cold]
    fn name_who_is_deaf(&self, my_word: usize, my_bit: u64) -> ! {
        let words = Self::mask_words(self.cpus.len());
        // Relaxed: a report.
        let asked = |cpu: &usize| self.inboxes[cpu * words + my_word].load(Ordering::Relaxed) & my_bit != 0;
        match (0..self.cpus.len()).find(asked) {
            Some(cpu) => panic!(
                "cpu{cpu} does not serve shootdowns: its interrupt handler has to call `handle_ipi`, and it has had interrupts \
                 off for seconds, or no interrupt"
            ),
            None => panic!("a CPU has taken a shootdown's request and not finished it for seconds"),
        }
    }
}

/// How often whoever waits for other CPUs looks, in debug builds, before it says who does not answer: ten seconds to a minute.
const DEAF: u64 = 1 << 27;

/// A part of a shootdown that is forgotten when it has been done. If it is left by unwinding instead, this panics once more,
/// which ends the program: others would wait for this CPU for ever, or it for them. Costs nothing where panics do not unwind.
struct Whole;

impl Drop for Whole {
    fn drop(&mut self) {
        // loom unwinds the threads of a model in which another has failed.
        #[cfg(not(loom))]
        panic!("a shootdown was left by unwinding: what `TlbHw` and interrupt handlers do must not panic");
    }
}

/// Ends the program unless two machines are one: what is noted for the CPUs of one is not asked of another's, so a flush there would be for
/// nothing, and what it releases be in use.
#[track_caller]
pub(crate) fn same_machine(one: usize, other: usize) {
    assert!(
        one == other,
        "a space, batch or deferred unmap was given another machine's TLBs: those that it was made with are its own"
    );
}

/// The numbers of the set bits.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        (word != 0).then(|| {
            word &= word - 1;
            bit
        })
    })
}
