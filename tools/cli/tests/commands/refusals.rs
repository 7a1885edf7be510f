//! What is said to whoever asks for what cannot be: one line with its cause, and the way out.

use crate::support::{misused, refused};

/// Command lines that make no sense, and what the line says beside the help that says more.
const MISUSED: [(&str, &str); 18] = [
    ("bench mem mmap -s 0", "larger than zero"),
    ("bench mem mmap -s 12XB", "unknown unit 'XB'"),
    ("bench mem mmap -s 99999999999999999999GB", "larger than any memory"),
    ("probe -s 99999999999GB", "larger than any memory"),
    ("run -s -1", "no number in '-1'"),
    ("bench free -r -1", "-1 is not in 1.."),
    ("run --siz 1GB", "a similar argument exists: '--size'; see 'hugemm run --help'"),
    ("bench swim", "unrecognized subcommand 'swim'; see 'hugemm bench --help'"),
    ("compare a.json b.json -t -5", "'-5' is no percentage"),
    ("bench free --order 19", "there is no order 19; orders are 0 (4 KiB) to 18 (1 GiB)"),
    ("bench free --order 9,x", "'x' is no order"),
    ("bench free -n 99999999999", "99999999999 is not in 1..=4294967296"),
    ("bench alloc --pattern twice", "twice"),
    ("bench vmalloc --size 1MB", "128MB"),
    ("bench age --memory 4M", "'--memory <MEMORY>': that is too little; give at least 48MB"),
    ("bench shootdown --limit 0", "give a number above 0"),
    ("bench interference --warmup -1", "-1 is not in 0.."),
    ("completions csh", "csh"),
];

/// What cannot be done here, and what the line says.
const REFUSED: [(&str, &[&str]); 29] = [
    ("bench mem mmap -s 3000KB", &["not a multiple", "2MB", "next size up is 4MB"]),
    ("bench mem mmap -s 64MB -w 999", &["999 threads", "CPUs"]),
    ("probe -s 2MB", &["too small", "64MB"]),
    ("probe -s 512TB", &["512"]),
    ("bench interference -w 100", &["100B", "multiple of 64"]),
    ("run -s 1MB", &["1MB is not a multiple of 128MB", "--size 128MB"]),
    ("bench headline --only swim", &["no goal begins with 'swim'", "--help"]),
    // Before anything is measured.
    ("bench free --json=/nonexistent/a.json", CANNOT_WRITE),
    ("bench headline --json=/nonexistent/a.json", CANNOT_WRITE),
    ("doctor --json=/nonexistent/a.json", CANNOT_WRITE),
    ("probe --save-profile /nonexistent/a.json", CANNOT_WRITE),
    ("man /proc/nonexistent", &["cannot make the directory", "may write"]),
    ("report /nonexistent/a.json", &["cannot read /nonexistent/", "--json=FILE"]),
    ("compare /nonexistent/b.json /nonexistent/a.json", &["cannot read /nonexistent/", "--json=FILE"]),
    ("bench free -s 3000KB", &["3000KB is not a multiple", "2MB", "next size up is 4MB"]),
    ("bench free -s 512MB", &["order 18 is 1GB", "512MB", "--size 1GB"]),
    ("bench free -s 1GB -o 9 --held 600 -n 600", &["600 blocks", "--held 512"]),
    ("bench free -n 4294967296 -o 9", &["days", "-n 2147483648"]),
    ("bench free -s 16000000TB", &["physical addresses", "--size"]),
    ("bench alloc -s 4000TB", &["data for 4000TB", "ask for less"]),
    ("bench alloc -s 4MB -t 1 -o 9,10", &["4MB", "order 10", "--size"]),
    ("bench alloc -t 4000 -s 64MB", &["4000 threads", "CPUs"]),
    ("bench churn -s 512MB", &["order 18", "--size 1GB"]),
    ("bench map -s 3KB", &["3KB is not a multiple", "next size up is 4KB"]),
    ("bench map -s 200TB", &["lower half", "64TB"]),
    ("bench map -s 4MB --extent 12KB", &["12KB does not divide 4MB"]),
    ("bench heap -s 16MB", &["16MB is too little", "--size 32MB"]),
    ("bench heap -t 4000", &["4000", "CPUs"]),
    ("bench shootdown -c 4000", &["4000 CPUs need as many real ones", "ask for at most"]),
];

const CANNOT_WRITE: &[&str] = &["cannot write /nonexistent/a.json", "name a file in a directory"];

#[test]
fn what_cannot_be_names_the_way_out() {
    for (line, part) in MISUSED {
        misused(&line.split(' ').collect::<Vec<_>>(), part);
    }
    for (line, parts) in REFUSED {
        refused(&line.split(' ').collect::<Vec<_>>(), parts);
    }
}
