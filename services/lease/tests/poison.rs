//! A page breaks; no file that has it is lent.

mod support;

use hugemm_lease::daemon::{Daemon, PoolConfig};
use hugemm_lease::filler::{Manners, fill};
use hugemm_lease::memory_file::Page;
use hugemm_lease::policy::Asker;
use hugemm_lease::stock::Shapes;
use hugemm_lease::wire::Wish;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use support::{PAGE, Pool, judged, wait_for};

const FILE: u64 = 2 * PAGE;

/// Breaks the second page of one of this process's files that are ready; false where the kernel does not do that.
fn break_a_page() -> bool {
    let ready = fs::read_dir("/proc/self/fd").expect("descriptors").filter_map(Result::ok).find(|entry| {
        fs::read_link(entry.path()).is_ok_and(|name| name.to_string_lossy().contains("memfd:hugemm-lease"))
    });
    let file = File::options().read(true).write(true).open(ready.expect("a file").path()).expect("opened by root");
    let memory = map(&file.into());
    // SAFETY: advice on a page of this mapping, which is touched by nobody from here on.
    let answer = unsafe { libc::madvise(memory.byte_add(PAGE as usize), PAGE as usize, libc::MADV_HWPOISON) };
    // SAFETY: mapped above.
    unsafe { rustix::mm::munmap(memory, FILE as usize) }.expect("unmapped");
    answer == 0
}

fn map(file: &OwnedFd) -> *mut std::ffi::c_void {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: at an address of the kernel's choice.
    unsafe { rustix::mm::mmap(std::ptr::null_mut(), FILE as usize, rights, MapFlags::SHARED, file, 0) }.expect("mapped")
}

#[test]
#[ignore = "as root; takes a huge page from the machine until it is started anew (in a guest, say)"]
fn a_file_with_a_broken_page_is_not_lent() {
    judged(|| {
        let Some(_pool) = Pool::with_free(2 * FILE / PAGE) else { return };
        let shapes = Shapes::new(&[(FILE, 2)], 2 * FILE, PAGE).expect("shapes");
        let daemon = Daemon::new(PoolConfig::new(Page::Huge2M, shapes, FILE, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| fill(&daemon, &Manners::default()));
            wait_for("both are ready", || daemon.status().ready.len() == 2);
            daemon.stop();
        });
        if !break_a_page() {
            eprintln!("skipped: {}; root, and CONFIG_MEMORY_FAILURE, are needed", std::io::Error::last_os_error());
            return;
        }
        let lease = || {
            let wish = Wish::of(FILE);
            daemon.lease(&Asker::user(0), std::process::id(), &wish)
        };
        let all_there = |file: &OwnedFd| {
            let memory = map(file);
            // SAFETY: looks whether each page of the mapping can be had, and touches none.
            let looked = unsafe { rustix::mm::madvise(memory, FILE as usize, Advice::LinuxPopulateRead) };
            // SAFETY: mapped above.
            unsafe { rustix::mm::munmap(memory, FILE as usize) }.expect("unmapped");
            looked
        };
        let (_, sound) = lease().expect("the file without a broken page");
        assert_eq!(all_there(&sound), Ok(()));
        assert!(lease().is_err(), "the other is not lent");
        assert_eq!(daemon.status().counts.poisoned, 1);
        assert!(daemon.status().ready.is_empty(), "it is the kernel's again");
    });
}
