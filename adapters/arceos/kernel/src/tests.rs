//! What an ArceOS program does with memory, threads and files, and what the allocator says of itself.

use crate::{PAGE, Random, cpus, huge_pages, largest};
use ax_alloc::{AllocError, GlobalPage, UsageKind, global_allocator};
use core::alloc::Layout;
use core::ptr::NonNull;
use std::collections::BTreeMap;
use std::string::String;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::vec::Vec;
use std::{format, fs, println, thread, vec};

const MIB: usize = 1 << 20;

pub(crate) fn run() {
    println!("allocator: {}, CPUs: {}", global_allocator().name(), cpus::count());
    for (name, test) in [
        ("collections", collections as fn()),
        ("aligned", aligned),
        ("pages", pages),
        ("below 4 GiB", below_4_gib),
        ("all of it", all_of_it),
        ("across CPUs", across_cpus),
        ("idle CPUs", idle_cpus),
        ("threads", threads),
        ("files", files),
        ("nothing is lost", nothing_is_lost),
    ] {
        test();
        println!("test {name}: ok");
    }
    println!("{:?}", global_allocator().usages());
}

/// The memory example: a sorted vector, a map of strings.
fn collections() {
    let mut random = Random(0xdead_beef);
    let mut numbers: Vec<_> = (0..300_000).map(|_| random.below(1 << 30)).collect();
    numbers.sort_unstable();
    assert!(numbers.windows(2).all(|pair| pair[0] <= pair[1]));
    let map: BTreeMap<_, _> = (0..50_000).map(|_| random.below(1 << 30)).map(|n| (format!("key_{n}"), n)).collect();
    assert!(map.iter().all(|(key, n)| key[4..].parse() == Ok(*n)));
}

/// Memory of a layout whose bytes all have a value.
struct Piece(NonNull<u8>, Layout, u8);

// SAFETY: the memory is the piece's alone.
unsafe impl Send for Piece {}

impl Piece {
    fn new(size: usize, align: usize, value: u8) -> Self {
        let layout = Layout::from_size_align(size, align).expect("a layout");
        let memory = global_allocator().alloc(layout).expect("there is memory");
        assert!(memory.addr().get().is_multiple_of(align));
        // SAFETY: just allocated.
        unsafe { memory.write_bytes(value, size) };
        Piece(memory, layout, value)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: the piece's own, written when it was made.
        let bytes = unsafe { core::slice::from_raw_parts(self.0.as_ptr(), self.1.size()) };
        assert!(bytes.iter().all(|byte| *byte == self.2), "somebody else has written there");
        global_allocator().dealloc(self.0, self.1);
    }
}

fn aligned() {
    for round in 0..4 {
        let sizes = [1, 8, 24, 100, 500, 2048, 3000, 4096, 5000, 9000, 70_000, MIB];
        let pieces = sizes.iter().flat_map(|size| [1, 16, 64, 512, 4096, 1 << 16].map(|align| (*size, align)));
        let pieces: Vec<_> = pieces.zip(0..).map(|((size, align), n)| Piece::new(size, align, n ^ round)).collect();
        drop(pieces);
    }
}

fn pages() {
    let allocator = global_allocator();
    let before = allocator.usages().get(UsageKind::VirtMem);
    for (pages, align) in [(1, PAGE), (3, PAGE), (8, 1 << 16), (512, 2 * MIB), (1000, PAGE)] {
        let at = allocator.alloc_pages(pages, align, UsageKind::VirtMem).expect("there is memory");
        assert!(at.is_multiple_of(align));
        assert_eq!(allocator.usages().get(UsageKind::VirtMem), before + pages * PAGE);
        allocator.dealloc_pages(at, pages, UsageKind::VirtMem);
    }
    assert_eq!(allocator.alloc_pages(0, PAGE, UsageKind::VirtMem), Err(AllocError::InvalidParam));
    assert_eq!(allocator.alloc_pages(1, 3, UsageKind::VirtMem), Err(AllocError::InvalidParam));
    let mut page = GlobalPage::alloc_contiguous(3, PAGE).expect("there is memory");
    page.fill(7);
    assert!(page.as_slice().iter().all(|byte| *byte == 7));
}

fn below_4_gib() {
    let allocator = global_allocator();
    let taken: Vec<_> = (1..=64)
        .map(|pages| (pages, allocator.alloc_dma32_pages(pages, PAGE, UsageKind::Dma).expect("some")))
        .collect();
    for (pages, at) in taken {
        assert!(ax_hal::mem::virt_to_phys(at.into()).as_usize() + pages * PAGE <= 1 << 32);
        allocator.dealloc_pages(at, pages, UsageKind::Dma);
    }
}

/// All memory is taken, page by page, and given back out of order: extents are as large as before.
fn all_of_it() {
    let allocator = global_allocator();
    let before = (largest(), huge_pages());
    let mut pages = Vec::with_capacity(allocator.available_pages() + 1);
    while let Ok(at) = allocator.alloc_pages(1, PAGE, UsageKind::Global) {
        pages.push(at);
    }
    assert_eq!(allocator.alloc_pages(1, PAGE, UsageKind::Global), Err(AllocError::NoMemory));
    let mut random = Random(1);
    for at in (1..pages.len()).rev() {
        pages.swap(at, random.below(at));
    }
    let taken = pages.len();
    pages.iter().for_each(|at| allocator.dealloc_pages(*at, 1, UsageKind::Global));
    drop(pages);
    println!(
        "  {taken} pages; largest extent {} before, {} after; 2 MiB: {} and {}",
        before.0,
        largest(),
        before.1,
        huge_pages()
    );
    assert_eq!((largest(), huge_pages()), before);
}

/// What one CPU allocates another frees, in a ring, while all allocate.
fn across_cpus() {
    let cpus = cpus::count();
    let mail: Arc<Vec<Mutex<Vec<Piece>>>> = Arc::new((0..cpus).map(|_| Mutex::new(Vec::new())).collect());
    let letters = mail.clone();
    cpus::on_each(cpus, move |cpu| {
        let mut random = Random(cpu as u64 + 1);
        for n in 0..4000_u32 {
            let size = 16 + random.below(if n.is_multiple_of(64) { 40_000 } else { 2000 });
            letters[(cpu + 1) % cpus].lock().push(Piece::new(size, 16, n as u8));
            let mine = core::mem::take(&mut *letters[cpu].lock());
            if n.is_multiple_of(16) {
                thread::yield_now();
            }
            drop(mine);
        }
    });
    mail.iter().for_each(|letters| letters.lock().clear());
}

/// The thread example: parts of a sum, by more threads than CPUs.
fn threads() {
    let numbers: Arc<Vec<u64>> = Arc::new((0..200_000).collect());
    let sum = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..16)
        .map(|part| {
            let (numbers, sum) = (numbers.clone(), sum.clone());
            thread::spawn(move || {
                let own: Vec<_> = numbers.iter().skip(part).step_by(16).copied().collect();
                sum.fetch_add(own.iter().sum(), Ordering::Relaxed);
                own.len()
            })
        })
        .collect();
    let all: usize = workers.into_iter().map(|worker| worker.join().expect("it ends")).sum();
    assert_eq!((all, sum.load(Ordering::Relaxed)), (200_000, 199_999 * 100_000));
}

/// The file example: written, read, listed, renamed and removed.
fn files() {
    fs::create_dir("/hugemm").expect("a directory");
    let large: Vec<u8> = (0..3 * MIB).map(|at| (at / 4096 * 31 + at) as u8).collect();
    fs::write("/hugemm/large", &large).expect("a file");
    assert!(fs::read("/hugemm/large").expect("it is there") == large);
    for n in 0..60 {
        fs::write(&format!("/hugemm/{n}"), vec![n; 100 * n as usize]).expect("a file");
    }
    let mut names: Vec<String> =
        fs::read_dir("/hugemm").expect("a directory").map(|entry| entry.expect("an entry").file_name()).collect();
    names.retain(|name| !name.starts_with('.'));
    assert_eq!(names.len(), 61);
    fs::rename("/hugemm/large", "/hugemm/huge").expect("renamed");
    for n in 0..60 {
        assert_eq!(fs::read(&format!("/hugemm/{n}")).expect("it is there"), vec![n; 100 * n as usize]);
        fs::remove_file(&format!("/hugemm/{n}")).expect("removed");
    }
    fs::remove_file("/hugemm/huge").expect("removed");
    fs::remove_dir("/hugemm").expect("removed");
}

/// What CPUs have cached others get when these CPUs serve, but for what their threads free as they end.
fn idle_cpus() {
    let allocator = global_allocator();
    cpus::on_each(cpus::count(), |_| {
        let pages: Vec<_> =
            (0..2000).map(|_| allocator.alloc_pages(1, PAGE, UsageKind::Global).expect("some")).collect();
        pages.into_iter().for_each(|at| allocator.dealloc_pages(at, 1, UsageKind::Global));
    });
    let before = allocator.cached_pages();
    cpus::on_each(cpus::count(), |_| allocator.serve());
    let after = allocator.cached_pages();
    println!("  {before} pages cached, then {after}");
    assert!(before >= 100 * cpus::count() && after * 2 < before);
}

/// The same work twice takes as much as once.
fn nothing_is_lost() {
    let allocator = global_allocator();
    let bytes =
        || UsageKindBytes(allocator.usages().get(UsageKind::RustHeap), allocator.usages().get(UsageKind::Global));
    let work = || {
        collections();
        aligned();
        pages();
    };
    work();
    let before = bytes();
    work();
    assert_eq!(bytes(), before);
}

#[derive(Debug, PartialEq)]
struct UsageKindBytes(usize, usize);
