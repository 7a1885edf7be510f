//! Stock QEMU on a lease by the library.

#[path = "../../lease/tests/support/mod.rs"]
mod support;

use hugemm_lease::memory_file::{MemoryFile, Page};
use hugemm_lease::preload::{Offer, VARIABLE};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use support::{PAGE, Pool, judged};

const MEMORY: u64 = 16 * PAGE;

/// Starts a machine, and says whether its memory is the file `inode`, mapped shared. It is at its monitor then.
fn machine(library: &Path, offer: &Offer, inode: u64) -> (Child, bool) {
    let memory = format!("memory-backend-memfd,id=m,size={MEMORY},hugetlb=on,share=on,prealloc=on");
    let mut child = Command::new("qemu-system-x86_64")
        .args(["-M", "q35,memory-backend=m", "-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-qmp", "stdio"])
        .args(["-m", &format!("{}M", MEMORY >> 20), "-object", &memory])
        .env("LD_PRELOAD", library)
        .env(VARIABLE, offer.variable().expect("text"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let input = child.stdin.as_mut().expect("a pipe");
    input.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-status\"}\n").expect("asked");
    let mut lines = BufReader::new(child.stdout.as_mut().expect("a pipe")).lines();
    assert!(lines.any(|line| line.expect("text").contains("\"running\"")), "it answers");
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).expect("its mappings");
    assert!(maps.contains("libhugemm_lease_preload"), "the library is loaded: {maps}");
    let is_leased = maps.lines().any(|line| line.contains(" rw-s ") && line.contains(&format!(" {inode} ")));
    (child, is_leased)
}

#[test]
fn the_first_machine_has_the_lease_and_others_their_own_memory() {
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("skipped: no QEMU");
        return;
    }
    judged(|| {
        let Some(pool) = Pool::with_free(2 * MEMORY / PAGE) else { return };
        let library = std::env::current_exe().expect("a path").with_file_name("libhugemm_lease_preload.so");
        assert!(library.exists(), "{}", library.display());
        let file = MemoryFile::new(Page::Huge2M, MEMORY).expect("a file");
        file.fill(0, MEMORY).expect("filled");
        file.make_lent(0, 0).expect("lent");
        let inode = rustix::fs::fstat(&file).expect("open").st_ino;
        let (offer, socket) = Offer::new(file.into_fd(), MEMORY, Page::Huge2M, false).expect("offered");
        let (mut first, is_leased) = machine(&library, &offer, inode);
        assert!(is_leased, "the first is on it");
        pool.wait_until_lacks(MEMORY / PAGE);
        let (mut second, is_leased) = machine(&library, &offer, inode);
        assert!(!is_leased, "it is lent once");
        pool.wait_until_lacks(2 * MEMORY / PAGE);
        for child in [&mut first, &mut second] {
            child.kill().expect("killed");
            child.wait().expect("ended");
        }
        drop(socket);
        pool.wait_until_lacks(0);
    });
}
