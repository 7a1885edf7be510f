//! Commands and their arguments, as one line from the host: `name key=value key=value …`.
//!
//! One definition serves both sides: the host makes a line with `Display`, the kernel reads it with `FromStr`.

use core::fmt;
use core::str::FromStr;

/// Most numbers that a list can have.
pub const MOST: usize = 16;

/// A short list of numbers, written with commas.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct List {
    items: [u64; MOST],
    count: usize,
}

/// More numbers than a list can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

impl fmt::Display for TooMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "more than {MOST} values in one list; measure them in two runs")
    }
}

impl core::error::Error for TooMany {}

impl List {
    /// A list of these numbers.
    pub fn new(items: impl IntoIterator<Item = u64>) -> Result<Self, TooMany> {
        let mut list = List { items: [0; MOST], count: 0 };
        for item in items {
            *list.items.get_mut(list.count).ok_or(TooMany)? = item;
            list.count += 1;
        }
        Ok(list)
    }

    /// The numbers.
    pub fn items(&self) -> &[u64] {
        &self.items[..self.count]
    }
}

impl fmt::Debug for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.items()).finish()
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, item) in self.items().iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{item}")?;
        }
        Ok(())
    }
}

impl FromStr for List {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut list = List { items: [0; MOST], count: 0 };
        for part in text.split(',').filter(|part| !part.is_empty()) {
            *list.items.get_mut(list.count).ok_or(())? = part.parse().map_err(|_| ())?;
            list.count += 1;
        }
        Ok(list)
    }
}

/// Why a line is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// There is no such command.
    NoSuchCommand,
    /// This argument is missing or has no valid value.
    Argument(&'static str),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::NoSuchCommand => {
                f.write_str("the image does not know this command; rebuild it from the sources of this hugemm")
            }
            RequestError::Argument(name) => write!(f, "the argument {name} is missing or has no valid value"),
        }
    }
}

impl core::error::Error for RequestError {}

/// The text of an argument.
fn value<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// An enumeration whose values have names.
macro_rules! named {
    ($(#[$doc:meta])* $type:ident { $($(#[$vdoc:meta])* $value:ident = $name:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type { $($(#[$vdoc])* $value,)+ }

        impl $type {
            /// Every value.
            pub const ALL: &'static [$type] = &[$($type::$value,)+];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $($type::$value => $name,)+ }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = ();

            fn from_str(text: &str) -> Result<Self, ()> {
                Self::ALL.iter().copied().find(|value| value.name() == text).ok_or(())
            }
        }
    };
}

/// A command per line: its name, and a structure of its arguments.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:literal $type:ident { $($(#[$fdoc:meta])* $field:ident: $kind:ty,)* })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $type { $($(#[$fdoc])* pub $field: $kind,)* }
        )+

        /// A command with its arguments.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Request { $($(#[$doc])* $type($type),)+ }

        impl fmt::Display for Request {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Request::$type(args) => {
                        f.write_str($name)?;
                        $(write!(f, concat!(" ", stringify!($field), "={}"), args.$field)?;)*
                        Ok(())
                    })+
                }
            }
        }

        impl FromStr for Request {
            type Err = RequestError;

            fn from_str(line: &str) -> Result<Self, RequestError> {
                match line.split_ascii_whitespace().next() {
                    $(Some($name) => Ok(Request::$type($type {
                        $($field: value(line, stringify!($field))
                            .and_then(|text| text.parse().ok())
                            .ok_or(RequestError::Argument(stringify!($field)))?,)*
                    })),)+
                    _ => Err(RequestError::NoSuchCommand),
                }
            }
        }
    };
}

named! {
    /// A bug that the self-test makes on purpose, to show that it would be found.
    Plant {
        /// None.
        None = "none",
        /// Frames are freed before the flush.
        FreeBeforeFlush = "free-before-flush",
        /// A CPU that may hold entries is left out of a shootdown.
        MissedCpu = "missed-cpu",
        /// A CPU that said it would be lazy uses the space without saying that it has woken.
        LazyCpu = "lazy-cpu",
        /// Pages become read-only and no CPU is told.
        UnflushedProtect = "unflushed-protect",
        /// An accessed bit is cleared by a load and a store, while hardware sets the dirty bit.
        LostDirty = "lost-dirty",
        /// A frame is handed out twice.
        DoubleFree = "double-free",
        /// Pages go to swap, and their frames are freed, without the flush before.
        UnflushedSwap = "unflushed-swap",
    }
}

impl Plant {
    /// Which part of the self-test is to find it; all, if there is nothing to find.
    pub const fn part(self) -> Part {
        match self {
            Plant::None => Part::All,
            Plant::FreeBeforeFlush | Plant::MissedCpu | Plant::LazyCpu => Part::Translations,
            Plant::UnflushedProtect | Plant::LostDirty => Part::Rights,
            Plant::DoubleFree => Part::Frames,
            Plant::UnflushedSwap => Part::Pressure,
        }
    }
}

named! {
    /// A part of the self-test.
    Part {
        /// Each in turn.
        All = "all",
        /// Blocks are taken, passed on, divided and freed.
        Frames = "frames",
        /// Pages are touched and unmapped.
        Translations = "translations",
        /// Pages become read-only and writable.
        Rights = "rights",
        /// Descriptors' mapping changes under those who use them.
        Descriptors = "descriptors",
        /// All flush under a lock.
        Convoy = "convoy",
        /// Faults, forks and unmaps.
        AddressSpaces = "address-spaces",
        /// The same while pages go to swap and come back.
        Pressure = "pressure",
        /// Huge page pools grow and shrink.
        Pools = "pools",
    }
}

named! {
    /// How the kernel is made to fail, to show what is reported.
    Crash {
        /// It panics.
        Panic = "panic",
        /// It reads an address that is not mapped.
        Fault = "fault",
        /// It runs off its stack.
        Stack = "stack",
        /// All CPUs spin with interrupts on and make no progress.
        Hang = "hang",
        /// One CPU spins with interrupts off.
        Deaf = "deaf",
        /// Every CPU spins with interrupts off: nothing inside can report it.
        Dead = "dead",
        /// The machine resets.
        Reset = "reset",
    }
}

requests! {
    /// Memory cleared chunk by chunk.
    "memset" Memset {
        /// Bytes per loop.
        size: u64,
        /// Chunk sizes in bytes.
        chunk: List,
        /// Loops.
        runs: u32,
    }
    /// Memory mapped and populated: by touching each page, by one request, or both.
    "mmap" Mmap {
        /// Bytes per loop.
        size: u64,
        /// Order of the pages: 0, 9 or 18.
        order: u32,
        /// By page faults.
        demand: bool,
        /// By one request for all of it.
        populate: bool,
        /// Loops.
        runs: u32,
    }
    /// A virtual machine's memory allocated, cleared and mapped.
    "vm-create" VmCreate {
        /// Bytes.
        size: u64,
        /// Orders of the pages: 0, 9 or 18.
        order: List,
        /// By page faults.
        demand: bool,
        /// By one request.
        prefault: bool,
        /// By one request, and pinned.
        pin: bool,
        /// Numbers of CPUs.
        workers: List,
        /// Clearing 4 KiB at a time.
        page: bool,
        /// Clearing whole extents, cached.
        extent: bool,
        /// Clearing as the calibrated policy decides.
        bulk: bool,
        /// Huge pages come from a pool.
        pooled: bool,
        /// Runs.
        runs: u32,
    }
    /// Blocks divided into pages and freed, as ranges and page by page.
    "free" Free {
        /// Blocks per run; 0 for as many as make a quarter million pages.
        n: u64,
        /// Orders.
        order: List,
        /// Runs.
        runs: u32,
    }
    /// Blocks taken and freed on one to all CPUs.
    "alloc" Alloc {
        /// Orders.
        order: List,
        /// Milliseconds of each measurement, about.
        millis: u64,
        /// Runs.
        runs: u32,
    }
    /// Ranges of 1 to `pages` pages unmapped and write-protected, on one to all CPUs, in one batch and page by page.
    "shootdown" Shootdown {
        /// Largest range, in pages: a power of two.
        pages: u64,
        /// Largest range that is flushed page by page.
        each: u64,
        /// Runs.
        runs: u32,
    }
    /// A huge page pool grown from nothing and shrunk to nothing.
    "pool" Pool {
        /// Pages.
        n: List,
        /// Order of a page: 9 or 18.
        order: u32,
        /// Without vmemmap optimization.
        off: bool,
        /// With it, flushes per batch, whole blocks swapped.
        on: bool,
        /// With it, flushes per batch, every block divided.
        in_place: bool,
        /// With it, flushes per page.
        per_page: bool,
        /// Runs.
        runs: u32,
    }
    /// Processes that share more memory than there is.
    "age" Age {
        /// Orders of the pages: 0 or 9.
        page: List,
        /// Processes.
        procs: u32,
        /// Bytes that they share.
        shared: u64,
        /// Bytes of memory that there are.
        memory: u64,
        /// Bytes of it that compressed pages may take.
        swap: u64,
        /// Milliseconds of each measurement.
        millis: u64,
        /// With two lists.
        classic: bool,
        /// With generations.
        generations: bool,
        /// Ageing page by page, with a flush for each mapping that was young.
        flush: bool,
        /// The same, not waited for.
        nosync: bool,
        /// The same without flushes.
        noflush: bool,
        /// By runs, without flushes.
        batch: bool,
    }
    /// The work of a virtual machine host, once through.
    "run" Run {
        /// Runs.
        runs: u32,
    }
    /// A quantum of what a memory manager does: page faults, stores, page table edits, flushes on all CPUs.
    "trial" Trial {
        /// Pages that are touched in each round.
        pages: u64,
        /// Rounds.
        rounds: u32,
    }
    /// Every system's stress.
    "selftest" Selftest {
        /// Seconds in all.
        seconds: u32,
        /// Resizes of pools, at least, however long they take.
        resizes: u64,
        /// What is run of it; a bug to make has its part to itself.
        only: Part,
        /// The bug to make.
        plant: Plant,
    }
    /// A failure on purpose.
    "crash" CrashTest {
        /// Which.
        how: Crash,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_writes_the_kernel_reads() {
        let order = List::new([0, 9, 18]).expect("short");
        for request in [
            Request::Free(Free { n: 100_000, order, runs: 5 }),
            Request::Alloc(Alloc { order, millis: 20, runs: 7 }),
            Request::Memset(Memset { size: 1 << 30, chunk: List::new([4096, 1 << 21]).expect("short"), runs: 3 }),
            Request::Mmap(Mmap { size: 1 << 30, order: 9, demand: true, populate: false, runs: 3 }),
            Request::VmCreate(VmCreate {
                size: 1 << 30,
                order: List::new([9, 18]).expect("short"),
                demand: true,
                prefault: true,
                pin: false,
                workers: List::new([1, 2]).expect("short"),
                page: false,
                extent: true,
                bulk: true,
                pooled: true,
                runs: 3,
            }),
            Request::Pool(Pool {
                n: List::new([100, 2000]).expect("short"),
                order: 9,
                off: true,
                on: true,
                in_place: false,
                per_page: true,
                runs: 5,
            }),
            Request::Selftest(Selftest { seconds: 60, resizes: 100, only: Part::All, plant: Plant::MissedCpu }),
            Request::CrashTest(CrashTest { how: Crash::Deaf }),
            Request::Shootdown(Shootdown { pages: 1 << 18, each: 4096, runs: 3 }),
            Request::Trial(Trial { pages: 4096, rounds: 3 }),
        ] {
            assert_eq!(request.to_string().parse(), Ok(request), "{request}");
        }
    }

    #[test]
    fn what_is_no_request_is_named() {
        assert_eq!("".parse::<Request>(), Err(RequestError::NoSuchCommand));
        assert_eq!("nonsense runs=1".parse::<Request>(), Err(RequestError::NoSuchCommand));
        assert_eq!("free order=0 runs=1".parse::<Request>(), Err(RequestError::Argument("n")));
        assert_eq!("free n=1 order=x runs=1".parse::<Request>(), Err(RequestError::Argument("order")));
        assert_eq!(
            "selftest seconds=1 resizes=0 only=all plant=x".parse::<Request>(),
            Err(RequestError::Argument("plant"))
        );
    }

    #[test]
    fn lists_are_bounded() {
        assert!(List::new(0..MOST as u64).is_ok());
        assert_eq!(List::new(0..=MOST as u64), Err(TooMany));
        assert_eq!("1,2,".parse::<List>().map(|list| list.count), Ok(2));
        assert!("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17".parse::<List>().is_err());
    }
}
