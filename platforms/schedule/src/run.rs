//! Who runs next; what is a failure; what is said of it.

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use hugemm_base::{CpuId, PhysAddr};
use hugemm_host::mmu::Mmu;
use hugemm_threads::Random;
use std::any::Any;
use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::mem::{forget, transmute};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What a CPU does.
pub type Task<'a> = Box<dyn FnOnce() + 'a>;

/// Steps in which nobody gets anything done.
const PATIENCE: u64 = 3_000_000;

/// A stack. What is not touched is not there.
const STACK: usize = 1 << 20;

/// A CPU gives way once in so many steps, one of these a run: bugs that need many changes in a row, and those that need one CPU to get
/// far, are both found.
const TURNS: [u64; 6] = [2, 5, 12, 40, 150, 600];

/// An interrupt that nobody sent comes once in so many steps with interrupts on.
const INTERRUPTS: u64 = 400;

/// A question that a task has lent.
type Lent = *const dyn Fn() -> bool;

/// Nobody can go on.
const DEADLOCK: &str = "every CPU waits";
/// Nobody gets on.
const LIVELOCK: &str = "nobody got anything done";

/// What is known of a CPU.
#[derive(Default)]
struct State {
    yielder: Cell<Option<*const Yielder<(), ()>>>,
    /// What it waits for, and whether that is so by now.
    waits: Cell<Option<(&'static str, Lent)>>,
    /// Pins that have not ended; an interrupt handler has one.
    pins: Cell<u32>,
    /// Locks, each with the step in which it was taken.
    held: RefCell<Vec<(usize, u64)>>,
    interrupted: Cell<bool>,
    ended: Cell<bool>,
    /// The tables that it walks, and since which step.
    loaded: Cell<Option<(PhysAddr, u64)>>,
}

/// A run under way.
struct Run<'a> {
    random: RefCell<Random>,
    turn: u64,
    step: Cell<u64>,
    /// When somebody got something done last.
    done: Cell<u64>,
    states: Vec<State>,
    /// Who runs.
    current: Cell<usize>,
    handler: &'a dyn Fn(),
    /// Instead of going on, each says where it is.
    asked: Cell<bool>,
    said: RefCell<String>,
    /// Steps whose places are to be said.
    wanted: BTreeSet<u64>,
}

thread_local! {
    static RUN: Cell<Option<*const Run<'static>>> = const { Cell::new(None) };
    /// Steps whose places the next run is to say.
    static WANTED: RefCell<BTreeSet<u64>> = const { RefCell::new(BTreeSet::new()) };
    /// Where the last run failed, and the steps in which the locks were taken that were held there.
    static FAILED: RefCell<(u64, BTreeSet<u64>)> = const { RefCell::new((0, BTreeSet::new())) };
}

/// The run that the caller is a task of.
fn with<R>(f: impl FnOnce(&Run<'_>, &State) -> R) -> Option<R> {
    // SAFETY: `run` takes the pointer out before its `Run` goes.
    let run: &Run<'_> = unsafe { &*RUN.get()? };
    if std::thread::panicking() {
        return None;
    }
    let state = run.states.get(run.current.get())?;
    Some(f(run, state))
}

impl Run<'_> {
    fn one_in(&self, n: u64) -> bool {
        self.random.borrow_mut().below(n) == 0
    }

    fn count(&self) {
        let step = self.step.get() + 1;
        self.step.set(step);
        if self.wanted.contains(&step) {
            let _ = writeln!(self.said.borrow_mut(), "step {step}, cpu{}:\n{}", self.current.get(), places());
        }
        if step - self.done.get() > PATIENCE {
            self.done.set(step);
            panic!("{LIVELOCK} in {PATIENCE} steps");
        }
    }

    /// Lets the others run.
    fn give_way(&self, state: &State) {
        let yielder = state.yielder.get().expect("a task that runs has one");
        // SAFETY: the coroutine's own, which is there while it runs.
        let yielder = unsafe { &*yielder };
        yielder.suspend(());
        while self.asked.get() {
            let me = self.current.get();
            let waits = state.waits.get().map_or("nothing", |(what, _)| what);
            let held = state.held.borrow().len();
            let _ = writeln!(
                self.said.borrow_mut(),
                "cpu{me} waits for {waits}; it has {held} locks and {} pins:\n{}",
                state.pins.get(),
                places()
            );
            yielder.suspend(());
        }
    }

    /// Runs the handler, if an interrupt may come and has.
    fn interrupts(&self, state: &State) {
        while state.pins.get() == 0 && state.interrupted.take() {
            state.pins.set(1);
            (self.handler)();
            state.pins.set(0);
        }
    }

    fn is_ready(&self, state: &State) -> bool {
        // SAFETY: the task that waits has lent it until it goes on.
        let so = |(_, so): (_, Lent)| unsafe { (*so)() };
        !state.ended.get() && (state.waits.get().is_none_or(so) || state.interrupted.get() && state.pins.get() == 0)
    }
}

/// A CPU may be interrupted here, and may give way.
pub fn point() {
    with(|run, state| {
        run.count();
        if run.one_in(run.turn) {
            run.give_way(state);
        }
        if state.pins.get() == 0 && run.one_in(INTERRUPTS) {
            state.interrupted.set(true);
        }
        run.interrupts(state);
    });
}

/// Something got done: there is no livelock.
pub fn progress() {
    with(|run, _| run.done.set(run.step.get()));
}

/// How many steps have been made.
pub fn step() -> u64 {
    with(|run, _| run.step.get()).unwrap_or_default()
}

/// A CPU walks these tables from here on.
pub(crate) fn loads(cpu: CpuId, root: Option<PhysAddr>) {
    with(|run, _| {
        let state = run.states.get(cpu.get() as usize)?;
        state.loaded.set(root.map(|root| (root, run.step.get())));
        Some(())
    });
}

/// Whether some CPU walks the tables below `root`, and has since before a step: tables that have gone since then.
pub fn has_loaded(root: PhysAddr, before: u64) -> bool {
    let walks = |state: &State| state.loaded.get().is_some_and(|(of, since)| of == root && since < before);
    with(|run, _| run.states.iter().any(walks)).unwrap_or(false)
}

/// Lets others run until something is so. Interrupts come meanwhile, if they are on. False if it will never be: a run has failed, and
/// what is left locked is nobody's any more.
pub fn wait_until(what: &'static str, so: &dyn Fn() -> bool) -> bool {
    let within = with(|run, state| {
        // SAFETY: taken out again before this returns; if it never does, nobody looks any more.
        let lent = unsafe { transmute::<*const (dyn Fn() -> bool + '_), Lent>(so) };
        while !so() {
            run.count();
            state.waits.set(Some((what, lent)));
            run.give_way(state);
            state.waits.set(None);
            run.interrupts(state);
        }
    });
    let is_so = within.is_some() || so();
    assert!(is_so || std::thread::panicking(), "nobody is there who could give {what} back");
    is_so
}

/// A reschedule point.
pub(crate) fn cond_resched() {
    with(|run, state| {
        run.count();
        let held: BTreeSet<u64> = state.held.borrow().iter().map(|(_, step)| *step).collect();
        if !held.is_empty() || state.pins.get() != 0 {
            let pins = state.pins.get();
            let text = format!("a reschedule point with locks held that were taken in steps {held:?}, and {pins} pins");
            FAILED.with_borrow_mut(|failed| failed.1.extend(held));
            panic!("{text}, in\n{}", places());
        }
        run.give_way(state);
        run.interrupts(state);
    });
}

pub(crate) fn interrupts_off() {
    with(|_, state| state.pins.set(state.pins.get() + 1));
}

pub(crate) fn interrupts_on() {
    with(|_, state| state.pins.set(state.pins.get() - 1));
}

pub(crate) fn took(lock: usize) {
    with(|run, state| state.held.borrow_mut().push((lock, run.step.get())));
}

pub(crate) fn gave_back(lock: usize) {
    with(|_, state| {
        let mut held = state.held.borrow_mut();
        let at = held.iter().rposition(|(of, _)| *of == lock).expect("whoever gives a lock back has it");
        held.remove(at);
    });
}

/// Fails if somebody else has a lock that the caller has waited for.
pub(crate) fn nobody_else_has(lock: usize) {
    with(|run, _| {
        for (cpu, state) in run.states.iter().enumerate().filter(|(cpu, _)| *cpu != run.current.get()) {
            let has = state.held.borrow().iter().any(|(of, _)| *of == lock);
            assert!(!has, "cpu{cpu} is inside a lock that another has alone");
        }
    });
}

/// Interrupts a CPU; false if no task plays it.
pub(crate) fn interrupt(cpu: u32) -> bool {
    let interrupted = with(|run, _| {
        let target = run.states.get(cpu as usize).filter(|state| !state.ended.get());
        target.inspect(|target| target.interrupted.set(true)).is_some()
    });
    interrupted.unwrap_or(false)
}

/// A task that unwinds waits for others' answers, too: they get their interrupts at once, for they do not run again.
pub(crate) fn answer_who_unwinds(mmu: &Mmu<'_, '_>) {
    if !std::thread::panicking() {
        return;
    }
    let Some(run) = RUN.get() else { return };
    // SAFETY: as in `with`.
    let run: &Run<'_> = unsafe { &*run };
    for (cpu, state) in run.states.iter().enumerate() {
        if state.interrupted.take() {
            mmu.as_cpu(CpuId::new(cpu as u32), |_| (run.handler)());
        }
    }
}

/// The calls in hugemm that lead here, innermost first.
fn places() -> String {
    let all = Backtrace::force_capture().to_string();
    let mut lines = all.lines().peekable();
    let mut text = String::new();
    while let Some(call) = lines.next() {
        let Some(at) = lines.next_if(|line| line.trim_start().starts_with("at ")) else { continue };
        if call.contains("corosensei") {
            break;
        }
        let name = call.split_once(": ").map_or(call, |(_, name)| name).split('<').next().unwrap_or_default();
        if let Some(at) = at.split_once("/crates/").or(at.split_once("tests/")).map(|(_, at)| at) {
            let _ = writeln!(text, "    {at} {name}");
        }
    }
    text
}

/// Lets CPU `n` of the model do what task `n` is, all of them beside each other, until each has ended. `handler` is what a CPU does at an
/// interrupt, with interrupts off. How many steps it took.
///
/// # Panics
///
/// What a task panics with; and at a deadlock, a livelock, or a lock held at a reschedule point. What the other tasks have on their
/// stacks is then left as it is, for ever.
pub fn run(mmu: &Mmu<'_, '_>, seed: u64, handler: &dyn Fn(), tasks: Vec<Task<'_>>) -> u64 {
    let mut random = Random(seed);
    let turn = TURNS[random.below(TURNS.len() as u64) as usize];
    let run = Run {
        random: RefCell::new(random),
        turn,
        step: Cell::new(0),
        done: Cell::new(0),
        states: tasks.iter().map(|_| State::default()).collect(),
        current: Cell::new(0),
        handler,
        asked: Cell::new(false),
        said: RefCell::default(),
        wanted: WANTED.take(),
    };
    let begin = |(number, task): (usize, Task<'_>)| {
        // SAFETY: only the lifetime is changed; the coroutine ends before this call does, or never runs again.
        let task = unsafe { transmute::<Task<'_>, Task<'static>>(task) };
        Coroutine::with_stack(
            DefaultStack::new(STACK).expect("memory for a stack"),
            move |yielder: &Yielder<(), ()>, ()| {
                with(|_, state| state.yielder.set(Some(yielder)));
                task();
                // Somebody may have asked it just now.
                with(|run, state| {
                    run.interrupts(state);
                    assert!(state.held.borrow().is_empty(), "cpu{number} ends with locks held");
                    state.ended.set(true);
                });
            },
        )
    };
    let mut cpus: Vec<Coroutine<(), (), ()>> = tasks.into_iter().enumerate().map(begin).collect();
    // SAFETY: only the lifetime is changed; the pointer is taken out below.
    let former = RUN.replace(Some(unsafe { transmute::<*const Run<'_>, *const Run<'static>>(&raw const run) }));
    let mut resume = |number: usize| {
        run.current.set(number);
        let resume = || mmu.as_cpu(CpuId::new(number as u32), |_| cpus[number].resume(()));
        catch_unwind(AssertUnwindSafe(resume)).map(|result| matches!(result, CoroutineResult::Return(())))
    };
    let failed: Option<Box<dyn Any + Send>> = loop {
        let ready: Vec<usize> = (0..run.states.len()).filter(|cpu| run.is_ready(&run.states[*cpu])).collect();
        if ready.is_empty() {
            if run.states.iter().all(|state| state.ended.get()) {
                break None;
            }
            break Some(Box::new(DEADLOCK.to_owned()));
        }
        let next = ready[run.random.borrow_mut().below(ready.len() as u64) as usize];
        if let Err(panic) = resume(next) {
            run.states[next].ended.set(true);
            break Some(panic);
        }
    };
    if failed.as_ref().is_some_and(|panic| [DEADLOCK, LIVELOCK].iter().any(|text| text_of(&**panic).starts_with(text)))
    {
        run.asked.set(true);
        for (number, state) in run.states.iter().enumerate() {
            if !state.ended.get() && state.yielder.get().is_some() {
                let _ = resume(number);
            }
        }
    }
    RUN.set(former);
    let Some(panic) = failed else { return run.step.get() };
    FAILED.with_borrow_mut(|failed| failed.0 = run.step.get());
    cpus.into_iter().for_each(forget);
    let said = run.said.take();
    resume_unwind(Box::new(format!("{}\n{said}", text_of(&*panic))));
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text")
}

/// What went wrong in a run.
#[derive(Debug)]
pub struct Failure {
    /// With it, it goes wrong again.
    pub seed: u64,
    /// After how many steps.
    pub step: u64,
    /// What, and where each CPU was.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, step {}: {}\nHUGEMM_SEED={} does it again.", self.seed, self.step, self.text, self.seed)
    }
}

/// Does `test` with each seed, until it fails with one. That one is done again, to say where locks were taken.
///
/// # Errors
///
/// The first failure.
pub fn explore(seeds: impl IntoIterator<Item = u64>, test: impl Fn(u64)) -> Result<u64, Failure> {
    let mut done = 0;
    for seed in seeds {
        let once = || catch_unwind(AssertUnwindSafe(|| test(seed))).err().map(|panic| text_of(&*panic).to_owned());
        FAILED.set(Default::default());
        if let Some(mut text) = once() {
            let (step, taken) = FAILED.take();
            if !taken.is_empty() {
                WANTED.set(taken);
                text = once().unwrap_or_else(|| format!("{text}\nIt did not go wrong again."));
            }
            return Err(Failure { seed, step, text });
        }
        done += 1;
    }
    Ok(done)
}

/// Seeds for a test: the first `few`; others, for as long as `HUGEMM_SOAK_SECONDS` says; or the one that `HUGEMM_SEED` is.
pub fn seeds(few: u64) -> impl Iterator<Item = u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (one, soak, begun) = (number("HUGEMM_SEED"), number("HUGEMM_SOAK_SECONDS"), Instant::now());
    // Those of another hour are others.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let first = one.unwrap_or(if soak.is_some() { now << 20 } else { 0 });
    let in_time = move |seed: &u64| match (one, soak) {
        (Some(one), _) => *seed == one,
        (None, Some(seconds)) => begun.elapsed().as_secs() < seconds,
        (None, None) => *seed < few,
    };
    (first..).take_while(in_time)
}
