//! What can be asked of the reference kernel: commands and their arguments, as one line from the host: `name key=value key=value …`.
//!
//! One definition serves all: the host reads a command line by it and makes a line with `Display`, the kernel reads that with
//! `FromStr`, and commands that do the same work on the host take the same arguments.

#[cfg(feature = "clap")]
use crate::options::{bytes, bytes_from, cpus, list, named, one_of, order, runs, time};
use crate::vm_create::CreateMethod;
use crate::words::{List, Word, named};
use core::fmt;
use core::str::FromStr;
use hugemm_base::{Order, PageSize, PreemptModel, with};
use hugemm_clear::ClearPolicy;
use hugemm_reclaim::{Ageing, LruPolicy};

/// Why a line is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// There is no such command.
    #[error("the image does not know this command; rebuild it from the sources of this hugemm")]
    NoSuchCommand,
    /// This argument is missing or has no valid value.
    #[error("the argument {0} is missing or has no valid value")]
    Argument(&'static str),
}

/// What follows a command's name, which ends with the line or a space.
fn after_name<'a>(name: &str, line: &'a str) -> Option<&'a str> {
    line.trim().strip_prefix(name).filter(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// An argument by its name.
fn value<T: Word>(line: &str, name: &str) -> Option<T> {
    line.split_ascii_whitespace().find_map(|word| T::read(word.strip_prefix(name)?.strip_prefix('=')?))
}

/// A command per line: its name, and a structure of its arguments, each with what a command line's parser has to know of it.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:literal $(| $alias:literal)* $type:ident {
        $($(#[$fdoc:meta])* $field:ident: $kind:ty [$($arg:tt)*],)*
    })+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq)]
            #[cfg_attr(feature = "clap", derive(clap::Args), group(skip))]
            pub struct $type { $($(#[$fdoc])* #[cfg_attr(feature = "clap", arg($($arg)*))] pub $field: $kind,)* }
        )+

        /// A command with its arguments.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Request { $($(#[$doc])* $type($type),)+ }

        impl fmt::Display for Request {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Request::$type(args) => {
                        f.write_str($name)?;
                        $(
                            f.write_str(concat!(" ", stringify!($field), "="))?;
                            args.$field.write(f)?;
                        )*
                        Ok(())
                    })+
                }
            }
        }

        impl FromStr for Request {
            type Err = RequestError;

            fn from_str(line: &str) -> Result<Self, RequestError> {
                $(if let Some(line) = after_name($name, line) {
                    return Ok(Request::$type($type {
                        $($field: value(line, stringify!($field)).ok_or(RequestError::Argument(stringify!($field)))?,)*
                    }));
                })+
                Err(RequestError::NoSuchCommand)
            }
        }

        #[cfg(feature = "clap")]
        impl Request {
            /// Every command, for a command line's parser and its help.
            pub fn commands() -> impl Iterator<Item = clap::Command> {
                [$(<$type as clap::Args>::augment_args(
                    clap::Command::new($name)$(.alias($alias))*.bin_name(concat!("hugemm boot -- ", $name)),
                ),)+]
                    .into_iter()
                    .map(|command| command.no_binary_name(true))
            }

            /// Reads a command from its matches.
            fn from_matches(name: &str, matches: &clap::ArgMatches) -> Result<Option<Self>, clap::Error> {
                Ok(match name {
                    $($name => Some(Request::$type(clap::FromArgMatches::from_arg_matches(matches)?)),)+
                    _ => None,
                })
            }

            /// Reads the words of a command line by these of the [commands](Self::commands); nothing if they do not begin with the
            /// name of one.
            ///
            /// # Errors
            ///
            /// What is wrong with the arguments, or the command's help, if that is asked for.
            pub fn read(
                words: &[String],
                commands: impl Iterator<Item = clap::Command>,
            ) -> Result<Option<Self>, clap::Error> {
                for mut command in commands {
                    let name = command.get_name().to_owned();
                    let words_of = |called: &str| {
                        let count = called.split(' ').count();
                        words.iter().take(count).eq(called.split(' ')).then_some(count)
                    };
                    let count = core::iter::once(&*name).chain(command.get_all_aliases()).find_map(words_of);
                    if let Some(count) = count {
                        let matches = command.try_get_matches_from_mut(&words[count..])?;
                        return Self::from_matches(&name, &matches);
                    }
                }
                Ok(None)
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
        /// Memory of the heap is handed out twice.
        DoubleAlloc = "double-alloc",
        /// A frame that went bad is handed out as before.
        ForgottenPoison = "forgotten-poison",
        /// Pages go to swap, and their frames are freed, without the flush before.
        UnflushedSwap = "unflushed-swap",
        /// Pages and addresses of kernel areas are given back, and areas made read-only, without the flush before.
        UnflushedArea = "unflushed-area",
        /// A guard page of a kernel area is mapped.
        MappedGuard = "mapped-guard",
    }
}

impl Plant {
    /// Which part of the self-test is to find it; all, if there is nothing to find.
    pub const fn part(self) -> Part {
        match self {
            Plant::None => Part::All,
            Plant::FreeBeforeFlush | Plant::MissedCpu | Plant::LazyCpu => Part::Translations,
            Plant::UnflushedProtect | Plant::LostDirty => Part::Rights,
            Plant::DoubleFree | Plant::ForgottenPoison => Part::Frames,
            Plant::DoubleAlloc => Part::Heap,
            Plant::UnflushedSwap => Part::Pressure,
            Plant::UnflushedArea | Plant::MappedGuard => Part::Areas,
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
        /// Memory of the heap is taken, passed on and freed.
        Heap = "heap",
        /// Pages are touched and unmapped.
        Translations = "translations",
        /// Pages become read-only and writable.
        Rights = "rights",
        /// Descriptors' mapping changes under those who use them.
        Descriptors = "descriptors",
        /// All flush under a lock.
        Convoy = "convoy",
        /// A CPU goes offline and comes back.
        Hotplug = "hotplug",
        /// Faults, forks and unmaps.
        AddressSpaces = "address-spaces",
        /// The same while pages go to swap and come back.
        Pressure = "pressure",
        /// Huge page pools grow and shrink.
        Pools = "pools",
        /// Kernel areas are taken, passed on and freed.
        Areas = "areas",
    }
}

named! {
    /// What the kernel shows as text.
    Dumped {
        /// Free memory: a line per node, a column per order.
        Frames = "frames",
        /// The kernel's page table: a line for what is mapped with equal rights.
        Tables = "tables",
    }
}

named! {
    /// How the kernel is made to fail, to show what is reported.
    Crash {
        /// It panics.
        Panic = "panic",
        /// It reads an address that is not mapped.
        Fault = "fault",
        /// It stores into the descriptor of a tail, whose memory a pool has given back.
        Tail = "tail",
        /// It runs off its stack.
        Stack = "stack",
        /// It stores below a stack of another task.
        Guard = "guard",
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

named! {
    /// How hugemm clears: values of the same policy.
    Clearing {
        /// 4 KiB at a time, cached, with a reschedule point each: the old way.
        Page = "page",
        /// 8 MiB at most at a time, cached, as Linux does where the kernel is not preemptible.
        Batch = "batch",
        /// Whole extents, cached, as Linux does where the kernel is preemptible.
        Extent = "extent",
        /// What the calibrated policy makes of the size of the whole request.
        Bulk = "bulk",
    }
}

impl Clearing {
    /// The policy that clears so, of a calibrated one.
    pub fn of(self, calibrated: ClearPolicy) -> ClearPolicy {
        let cached = with!(calibrated, threshold = Some(u64::MAX));
        match self {
            Clearing::Page => with!(cached, unit = Some(PageSize::Size4K.bytes())),
            Clearing::Batch => with!(cached, unit = Some(8 << 20)),
            Clearing::Extent => cached,
            Clearing::Bulk => calibrated,
        }
    }

    /// The preemption model that it is for.
    pub const fn preempt_model(self) -> PreemptModel {
        match self {
            Clearing::Page | Clearing::Batch => PreemptModel::None,
            Clearing::Extent | Clearing::Bulk => PreemptModel::Full,
        }
    }

    /// The side that it is in results.
    pub const fn side(self) -> &'static str {
        match self {
            Clearing::Page => "hugemm-page",
            Clearing::Batch => "hugemm-batch",
            Clearing::Extent => "hugemm-extent",
            Clearing::Bulk => "hugemm-bulk",
        }
    }
}

named! {
    /// Where hugemm's huge pages come from; pages of 4 KiB come from free memory always.
    PagesFrom {
        /// A pool that has been filled before, and has promised all of them.
        Pool = "pool",
        /// Free memory.
        Frames = "frames",
    }
}

named! {
    /// Vmemmap optimization.
    Optimization {
        /// Redundant descriptors are given back, whole blocks of them by one store.
        On = "on",
        /// The same, but every block is divided and its entries changed in place.
        InPlace = "in-place",
        /// They stay.
        Off = "off",
    }
}

named! {
    /// How flushes are shared.
    FlushEach {
        /// One or two for each page, nothing swapped: the old way.
        Page = "page",
        /// At most two for the batch.
        Batch = "batch",
    }
}

requests! {
    /// The work of a virtual machine host, once through: the phases of 'hugemm run'.
    "run" Run {
        /// Runs, after one that is not counted.
        runs: u32 [short, long, default_value_t = 3, value_parser = runs()],
    }
    /// A virtual machine's memory allocated, cleared and mapped.
    "bench vm-create" | "bench mem mmap" VmCreate {
        /// Memory of the virtual machine [default: a quarter of what is available, at most 8 GiB, or 512 MiB by pages of 4KB, each
        /// of which is a fault; 256MB in the reference kernel].
        size: Option<u64> [short, long, value_parser = bytes],
        /// Page sizes.
        page: List<PageSize> [short, long, ignore_case = true, default_value = "2MB", value_parser = list(named::<PageSize>())],
        /// How it is asked for.
        how: List<CreateMethod> [long, default_value = "demand,prefault,pin", value_parser = list(named::<CreateMethod>())],
        /// Numbers of CPUs that fill it [default: 1 and all].
        workers: Option<List<u32>> [short, long, value_parser = list(cpus())],
        /// How hugemm clears.
        clear: List<Clearing> [long, default_value = "page,extent,bulk", value_parser = list(named::<Clearing>())],
        /// Where hugemm's huge pages come from.
        from: PagesFrom [long, default_value = "pool", value_parser = named::<PagesFrom>()],
        /// Runs of each, after an untimed one.
        runs: u32 [short, long, visible_short_alias = 'l', visible_alias = "loops", default_value_t = 3, value_parser = runs()],
    }
    /// Blocks divided into pages and freed, as ranges and page by page.
    "bench free" Free {
        /// Blocks per run [default: as many as make a million pages, a quarter million in the reference kernel, at least 4].
        n: Option<u64> [short, long, value_parser = clap::value_parser!(u64).range(1..=1 << 32)],
        /// Orders of the blocks: 0 (4 KiB) to 18 (1 GiB).
        order: List<Order> [short, long, default_value = "0,3,9", value_parser = list(order)],
        /// Runs of each measurement.
        runs: u32 [short, long, default_value_t = 5, value_parser = runs()],
    }
    /// Blocks taken and freed at once, on one to all CPUs.
    "bench alloc" Alloc {
        /// Orders of the blocks: 0 (4 KiB) to 18 (1 GiB).
        orders: List<Order> [short, long, default_value = "0,9", value_parser = list(order)],
        /// Milliseconds of each measurement, about.
        millis: u64 [long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000)],
        /// Runs of each measurement.
        runs: u32 [short, long, default_value_t = 5, value_parser = runs()],
    }
    /// A huge page pool grown from nothing and shrunk to nothing.
    "bench pool" Pool {
        /// Pages [default: 2000 of 2MB, 8 of 1GB; 200 in the reference kernel].
        n: Option<List<u64>> [short, long, value_parser = list(clap::value_parser!(u64).range(1..=1 << 22))],
        /// Page size.
        page: PageSize [short, long, ignore_case = true, default_value = "2MB", value_parser = one_of(|page: PageSize| page != PageSize::Size4K)],
        /// Vmemmap optimization.
        hvo: List<Optimization> [long, default_value = "off,on", value_parser = list(named::<Optimization>())],
        /// How flushes are shared.
        flush: List<FlushEach> [long, default_value = "page,batch", value_parser = list(named::<FlushEach>())],
        /// Runs of each measurement.
        runs: u32 [short, long, default_value_t = 5, value_parser = runs()],
    }
    /// Processes that share more memory than there is: ageing and swapping.
    "bench age" Age {
        /// Address spaces that share the region.
        procs: u32 [long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=14)],
        /// The region that they share [default: one and a half times the memory].
        shared: Option<u64> [long, value_parser = bytes],
        /// Memory that there is, compressed pages included, 48MB at least [default: two thirds of the shared region, or 128MB;
        /// 64MB with 'hugemm boot'].
        memory: Option<u64> [long, value_parser = bytes_from(LEAST_AGED)],
        /// Memory that compressed pages may take [default: half of it].
        swap: Option<u64> [long, value_parser = bytes],
        /// Seconds for each line of the table.
        seconds: f64 [long, default_value_t = 2.0, value_parser = time],
        /// How accessed bits are read.
        young: List<Ageing> [long, default_value = "noflush,batch", value_parser = list(named::<Ageing>())],
        /// Which pages are old.
        lru: List<LruPolicy> [long, default_value = "generations", value_parser = list(named::<LruPolicy>())],
        /// Sizes of the pages.
        page: List<PageSize> [short, long, ignore_case = true, default_value = "4KB,2MB",
            value_parser = list(one_of(|page: PageSize| page != PageSize::Size1G))],
    }
    /// Ranges unmapped and write-protected, in one batch and page by page.
    "bench shootdown" Shootdown {
        /// Pages per operation.
        pages: List<u64> [short, long, default_value = "1,8,33,34,512,4096,32768,262144",
            value_parser = list(clap::value_parser!(u64).range(1..=1 << 18))],
        /// Seconds that the page-at-a-time side of one measurement may take; what would take longer is left out, and said.
        limit: f64 [long, default_value_t = 0.1, value_name = "SECONDS", value_parser = time],
        /// Runs of each measurement.
        runs: u32 [short, long, default_value_t = 3, value_parser = runs()],
    }
    /// Kernel areas taken and freed in the ways of Linux's test_vmalloc, and many freed, batched and page by page.
    "bench vmalloc" Vmalloc {
        /// Areas of each test.
        areas: u64 [short = 'n', long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1 << 32)],
        /// Bytes of each area that are written, from its first on, where a CPU can reach it [default: none].
        write: Option<u64> [long, value_parser = bytes],
        /// Runs of each measurement.
        runs: u32 [short, long, default_value_t = 3, value_parser = runs()],
    }
    /// Every system's stress on the real machine.
    "selftest" Selftest {
        /// Seconds in all.
        seconds: u32 [short, long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400)],
        /// Resizes of huge page pools, at least, however long they take: with allocations that fail, and a look at every descriptor
        /// after each.
        resizes: u64 [long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000)],
        /// One part of it, with all the time to itself; a bug to make has its part to itself.
        only: Part [long, default_value = "all", value_parser = named::<Part>()],
        /// A bug to make on purpose, which it then has to find.
        plant: Plant [long, default_value = "none", value_parser = named::<Plant>()],
    }
    /// What the kernel has of one kind, as text.
    "dump" Dump {
        /// What.
        what: Dumped [value_parser = named::<Dumped>()],
    }
    /// A failure on purpose, to show what is reported.
    "crash" CrashTest {
        /// Which.
        how: Crash [value_parser = named::<Crash>()],
    }
}

/// Memory of a workload in the reference kernel, if nothing is said of it.
pub const KERNEL_SIZE: u64 = 256 << 20;

/// Least memory of processes that share more.
const LEAST_AGED: u64 = 48 << 20;

impl Age {
    /// Memory if nothing is said of it, on the host and beside Linux guests.
    pub const MEMORY: u64 = 128 << 20;
    /// The same in the reference kernel by itself.
    pub const KERNEL_MEMORY: u64 = 64 << 20;

    /// Bytes that are shared, of memory, and of it for compressed pages. What is not given follows from the others, in whole 2 MiB;
    /// if nothing is, from `memory`.
    pub fn sizes(&self, memory: u64) -> [u64; 3] {
        let whole = |bytes: u64| bytes / PageSize::Size2M.bytes() * PageSize::Size2M.bytes();
        let of_shared = self.shared.map(|shared| whole(shared / 3 * 2).max(LEAST_AGED));
        let memory = self.memory.or(of_shared).unwrap_or(memory);
        [self.shared.unwrap_or(whole(memory / 2 * 3)), memory, self.swap.unwrap_or(memory / 2)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn what_the_host_writes_the_kernel_reads() {
        let orders = List::new([0, 9, 18].map(|order| Order::new(order).expect("an order"))).expect("short");
        for request in [
            Request::Free(Free { n: Some(100_000), order: orders, runs: 5 }),
            Request::Free(Free { n: None, order: orders, runs: 5 }),
            Request::Alloc(Alloc { orders, millis: 20, runs: 7 }),
            Request::Age(Age {
                procs: 8,
                shared: None,
                memory: Some(64 << 20),
                swap: None,
                seconds: 0.25,
                young: List::new([Ageing::NoFlush, Ageing::Batch]).expect("short"),
                lru: List::new([LruPolicy::TwoList]).expect("short"),
                page: List::new([PageSize::Size4K]).expect("short"),
            }),
            Request::VmCreate(VmCreate {
                size: None,
                page: List::new([PageSize::Size2M, PageSize::Size1G]).expect("short"),
                how: List::new([CreateMethod::Demand, CreateMethod::Pin]).expect("short"),
                workers: Some(List::new([1, 2]).expect("short")),
                clear: List::new([Clearing::Extent]).expect("short"),
                from: PagesFrom::Frames,
                runs: 3,
            }),
            Request::Selftest(Selftest { seconds: 60, resizes: 100, only: Part::All, plant: Plant::MissedCpu }),
            Request::CrashTest(CrashTest { how: Crash::Deaf }),
            Request::Dump(Dump { what: Dumped::Tables }),
        ] {
            assert_eq!(request.to_string().parse(), Ok(request), "{request}");
        }
    }

    #[test]
    fn what_is_no_request_is_named() {
        for nothing in ["", "nonsense runs=1", "bench", "bench freedom n=1"] {
            assert_eq!(nothing.parse::<Request>(), Err(RequestError::NoSuchCommand), "{nothing}");
        }
        for (line, argument) in [
            ("bench free order=0 runs=1", "n"),
            ("bench free n=1 order=x runs=1", "order"),
            ("bench free n=1 order=0,19 runs=1", "order"),
            ("selftest seconds=1 resizes=0 only=all plant=x", "plant"),
        ] {
            assert_eq!(line.parse::<Request>(), Err(RequestError::Argument(argument)), "{line}");
        }
    }

    #[test]
    fn sizes_follow_from_what_is_given() {
        let none = "bench age procs=8 shared=- memory=- swap=- seconds=2 young=batch lru=classic page=4KB";
        let sizes = |given: &str, instead: &str| match none.replace(given, instead).parse() {
            Ok(Request::Age(age)) => age.sizes(64 << 20).map(|bytes| bytes >> 20),
            other => panic!("{other:?}"),
        };
        assert_eq!(sizes("", ""), [96, 64, 32]);
        assert_eq!(sizes("memory=-", "memory=134217728"), [192, 128, 64]);
        assert_eq!(sizes("shared=-", "shared=402653184"), [384, 256, 128]);
        assert_eq!(sizes("shared=-", "shared=4194304"), [4, 48, 24]);
        assert_eq!(sizes("swap=-", "swap=4194304"), [96, 64, 4]);
    }
}
