//! Memory with the bytes of a snapshot's file: as they are, or none.

use crate::support::lease::{Daemon, with_pool};
use crate::support::{Scratch, hugemm, misused, refused};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

const MIB: u64 = 1 << 20;

/// Bytes that say where they are, in some places of a file that is no whole number of pages, with holes and zeroes between.
fn snapshot(path: &str, mark: u8) {
    let file = File::create(path).expect("a file");
    file.set_len(9 * MIB + 5000).expect("a length");
    for at in [0, 4095, 2 * MIB - 1, 5 * MIB + 17, 9 * MIB + 4999] {
        file.write_all_at(&[mark, at as u8 | 1], at - u64::from(at == 9 * MIB + 4999)).expect("written");
    }
    file.write_all_at(&[0; 3 << 16], 6 * MIB).expect("zeroes");
    file.sync_all().expect("on disk");
}

/// Runs a command of the shell on the template's bytes.
fn on(daemon: &Daemon, options: &[&str], command: &str) -> Output {
    let socket = daemon.scratch.path("socket");
    hugemm(&[&["lease", "--template", "snap", "--socket", &socket], options, &["--", "sh", "-c", command]].concat())
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The bytes of a lease, and how many there are; then it is written over. `head` and `cmp` read huge pages as any file.
fn compared(file: &str) -> String {
    format!(
        "stat -Lc %s @LEASE@; head -c {} @LEASE@ | cmp - {file} && tail -c +{} @LEASE@ | tr -d '\\0' | wc -c",
        9 * MIB + 5000,
        9 * MIB + 5001
    )
}

#[test]
fn a_template_has_the_files_bytes() {
    with_pool(32, || {
        let scratch = Scratch::new("template");
        let file = scratch.path("ram");
        snapshot(&file, b'a');
        let daemon = Daemon::with_files("template-bytes", &[8], &["--template", &format!("snap={file}")]);
        let whole = format!("{}\n0\n", 10 * MIB);
        for _ in 0..2 {
            assert_eq!(text(&on(&daemon, &[], &compared(&file))), whole);
            daemon.wait_until_filled();
        }
        let status = hugemm(&["pool", "status", "--json", "--socket", &daemon.scratch.path("socket")]);
        let digest = Command::new("sha256sum").arg(&file).output().expect("coreutils").stdout;
        let digest = String::from_utf8_lossy(&digest).split_whitespace().next().expect("a digest").to_owned();
        assert!(text(&status).contains(&format!("\"sha256\":\"{digest}\"")), "{}", text(&status));
        // What is clear is not a template's, and what an owner writes is its own.
        let me = std::env::current_exe().expect("a path");
        let write = format!("LEASED=@LEASE@ {} --ignored program_that_maps_what_is_leased --nocapture", me.display());
        assert!(on(&daemon, &["--require"], &write).status.success());
        daemon.wait_until_filled();
        assert_eq!(text(&on(&daemon, &[], &compared(&file))), whole, "no owner's bytes");
        let socket = daemon.scratch.path("socket");
        let clear = hugemm(&["lease", "8MB", "--socket", &socket, "--", "sh", "-c", "tr -d '\\0' <@LEASE@ | wc -c"]);
        assert_eq!(text(&clear), "0\n");
        // Longer memory than the file has bytes for.
        let output = on(&daemon, &["12MB", "--require"], "true");
        assert!(text(&output).contains("template `snap` has 10485760 bytes, not 12582912"), "{}", text(&output));
        let output = hugemm(&["lease", "--template", "other", "--require", "--socket", &socket, "--", "true"]);
        assert!(text(&output).contains("no template `other`"), "{}", text(&output));
    });
}

/// One that is replaced is read anew, and nobody has the bytes of the one before.
#[test]
fn a_template_that_was_replaced_is_filled_anew() {
    with_pool(32, || {
        let scratch = Scratch::new("template-new");
        let (file, new) = (scratch.path("ram"), scratch.path("new"));
        snapshot(&file, b'a');
        let daemon = Daemon::with_files("template-replaced", &[8], &["--template", &format!("snap={file}")]);
        snapshot(&new, b'b');
        fs::rename(&new, &file).expect("replaced");
        let output = on(&daemon, &["--require"], "head -c1 @LEASE@");
        let said = text(&output);
        assert!(said == "b" || said.contains("template `snap`: it is being filled"), "{said}");
        daemon.wait_until_filled();
        assert_eq!(text(&on(&daemon, &[], "head -c1 @LEASE@")), "b");
        // Cut, and gone: said, and nothing is lent.
        for (what, line) in [("cut", "is no file with bytes"), ("gone", "No such file or directory")] {
            match what {
                "cut" => drop(File::create(&file).expect("cut")),
                _ => fs::remove_file(&file).expect("removed"),
            }
            let output = on(&daemon, &["--require"], "true");
            assert!(!output.status.success() && text(&output).contains(line), "{what}: {}", text(&output));
            assert_eq!(text(&output).lines().count(), 1, "{}", text(&output));
        }
        snapshot(&file, b'c');
        daemon.wait_until_filled();
        assert_eq!(text(&on(&daemon, &[], "head -c1 @LEASE@")), "c");
    });
}

/// Whoever may not read the file has no memory with its bytes.
#[test]
fn a_template_is_for_whoever_may_read_its_file() {
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root has other users");
        return;
    }
    with_pool(32, || {
        let scratch = Scratch::new("template-mode");
        let (file, policy) = (scratch.path("ram"), scratch.put("policy", "uid 65534 1GB\n"));
        snapshot(&file, b'a');
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o640)).expect("its mode");
        let options = ["--template", &format!("snap={file}"), "--policy", &policy];
        let daemon = Daemon::with_files("template-mode", &[8], &options);
        let command = scratch.path("hugemm");
        fs::copy(env!("CARGO_BIN_EXE_hugemm"), &command).expect("copied");
        let ask = || {
            let socket = daemon.scratch.path("socket");
            let words = ["lease", "--template", "snap", "--require", "--socket", &socket, "--", "true"];
            text(&Command::new(&command).args(words).uid(65534).gid(65534).output().expect("it starts"))
        };
        assert!(ask().contains("no template `snap` whose file this user may read"), "{}", ask());
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("its mode");
        daemon.wait_until_filled();
        assert!(!ask().contains("no template"), "{}", ask());
        // Nor who may not search the directory that it is in.
        let directory = scratch.path("private");
        let inside = format!("{directory}/ram");
        fs::create_dir(&directory).expect("made");
        snapshot(&inside, b'b');
        fs::remove_file(&file).expect("removed");
        std::os::unix::fs::symlink(&inside, &file).expect("linked");
        for (mode, may) in [(0o700, false), (0o711, true)] {
            fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("its mode");
            assert_eq!(!ask().contains("no template"), may, "{mode:o}: {}", ask());
        }
        assert_eq!(fs::metadata(&file).expect("there").mode() & 0o777, 0o644);
    });
}

#[test]
fn words_about_templates_are_named() {
    misused(&["pool", "serve", "--template", "snap"], "'snap' is no template; write one as NAME=FILE");
    misused(&["pool", "serve"], "--size");
    misused(&["lease", "--template", "a", "--up-to", "1G", "--", "true"], "cannot be used with");
    refused(&["pool", "serve", "--template", "a=/x", "--template", "a=/y"], &["two templates `a`"]);
}
