//! A daemon's figures as OpenMetrics text, and a small HTTP server for them.
//!
//! Source of the format: OpenMetrics 1.0.

use crate::daemon::Daemon;
use crate::listener::Listener;
use crate::status::{LeaseTimes, Status};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{Shutdown, SocketFlags, SocketType, shutdown};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// The type of the text, for whoever fetches it.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The figures as text.
pub fn text(status: &Status) -> String {
    let mut out = Text(String::new());
    let node = status.node.map_or("any".to_owned(), |node| node.to_string());
    let page = status.page;
    let of = |size: u64| format!("node=\"{node}\",page=\"{page}\",size=\"{size}\"");
    let mut sizes = status.wanted.clone();
    sizes.extend(&status.ready);
    sizes.sort_unstable();
    sizes.dedup();
    let number = |all: &[u64], size: u64| all.iter().filter(|&&bytes| bytes == size).count() as f64;
    out.family("hugemm_lease_files_ready", "gauge", "Files that are filled and nobody's.");
    sizes.iter().for_each(|&size| out.sample("hugemm_lease_files_ready", &of(size), number(&status.ready, size)));
    out.family("hugemm_lease_files_wanted", "gauge", "Files that should be.");
    sizes.iter().for_each(|&size| out.sample("hugemm_lease_files_wanted", &of(size), number(&status.wanted, size)));
    let templates: Vec<_> =
        status.templates.iter().map(|template| (label("template", &template.name), template)).collect();
    out.family("hugemm_lease_template_ready", "gauge", "1 if memory is filled with the template's bytes.");
    for (name, template) in &templates {
        out.sample("hugemm_lease_template_ready", name, f64::from(u8::from(template.ready)));
    }
    out.family("hugemm_lease_template_bytes", "gauge", "The length of the template's file, if there is one.");
    for (name, bytes) in templates.iter().filter_map(|(name, template)| Some((name, template.bytes?))) {
        out.sample("hugemm_lease_template_bytes", name, bytes as f64);
    }
    let leased: u64 = status.leases.iter().map(|lease| lease.bytes).sum();
    let kept: u64 = status.kept.iter().map(|kept| kept.bytes).sum();
    let left: u64 = status.left.iter().map(|left| left.bytes).sum();
    let counts = &status.counts;
    let seconds = |ns: u64| ns as f64 / 1e9;
    for (name, help, value) in [
        ("hugemm_lease_leased_bytes", "Memory that is lent.", leased as f64),
        ("hugemm_lease_leases", "Leases.", status.leases.len() as f64),
        ("hugemm_lease_kept_bytes", "Memory that is kept for programs that come back, lent or not.", kept as f64),
        ("hugemm_lease_left_bytes", "Memory of leases that are over that somebody still has.", left as f64),
        ("hugemm_lease_drained", "1 if the daemon was told to fill nothing.", f64::from(u8::from(status.drained))),
        (
            "hugemm_lease_waiting",
            "1 if something is missing and cannot be filled at present.",
            f64::from(u8::from(status.waiting.is_some())),
        ),
    ] {
        out.family(name, "gauge", help);
        out.sample(name, "", value);
    }
    out.family("hugemm_lease_requests", "counter", "Requests for memory, by what came of them.");
    for (result, count) in
        [("hit", counts.hits), ("grown", counts.grown), ("miss", counts.misses), ("refused", counts.refused)]
    {
        out.sample("hugemm_lease_requests_total", &format!("result=\"{result}\""), count as f64);
    }
    out.family("hugemm_lease_programs", "counter", "Leases by what their programs did with them.");
    for (what, count) in [("placed", counts.placed), ("private", counts.private), ("unused", counts.unused)] {
        out.sample("hugemm_lease_programs_total", &format!("memory=\"{what}\""), count as f64);
    }
    for (name, help, value) in [
        ("hugemm_lease_filled_bytes", "Memory filled ahead.", counts.filled_bytes as f64),
        ("hugemm_lease_fill_seconds", "Time spent on that, pauses left out.", seconds(counts.fill_ns)),
        ("hugemm_lease_fill_cpu_seconds", "CPU time spent on that.", seconds(counts.fill_cpu_ns)),
        ("hugemm_lease_filled_late_bytes", "Memory filled while clients waited.", counts.filled_late_bytes as f64),
        ("hugemm_lease_poisoned_files", "Files given up because of broken pages.", counts.poisoned as f64),
    ] {
        out.family(name, "counter", help);
        out.sample(&format!("{name}_total"), "", value);
    }
    out.family(
        "hugemm_lease_time_seconds",
        "histogram",
        "From the request to the descriptor, of leases that were given.",
    );
    let mut sum = 0;
    for (index, count) in status.times.counts.iter().enumerate() {
        sum += count;
        let bound = LeaseTimes::BOUNDS_MS.get(index).map_or("+Inf".to_owned(), |&ms| (ms as f64 / 1e3).to_string());
        out.sample("hugemm_lease_time_seconds_bucket", &format!("le=\"{bound}\""), sum as f64);
    }
    out.sample("hugemm_lease_time_seconds_count", "", sum as f64);
    out.sample("hugemm_lease_time_seconds_sum", "", seconds(status.times.sum_ns));
    out.0.push_str("# EOF\n");
    out.0
}

/// A label whose value may be anything.
fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# TYPE {name} {kind}\n# HELP {name} {help}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = match labels {
            "" => writeln!(self.0, "{name} {value}"),
            _ => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }
}

/// Listens at `ADDRESS:PORT`, or makes the socket of that path.
///
/// # Errors
///
/// The system's; `AddrInUse` if somebody else listens there.
pub fn bind(place: &str) -> io::Result<Listener> {
    match place.contains('/') {
        true => Listener::bind_as(SocketType::STREAM, Path::new(place), false),
        false => TcpListener::bind(place).map(|listener| Listener::from(OwnedFd::from(listener))),
    }
}

/// Longest request that is read, and how long a fetch may take.
const MOST: usize = 8 << 10;
const PATIENCE: Duration = Duration::from_secs(2);

/// Most fetches at once; the oldest, which has had the most time, makes room for one more.
const MOST_FETCHES: usize = 32;

/// Answers fetches for ever: for a thread of its own. Each has one of its own, so that none waits for another, and what goes wrong with
/// one is that one's end.
pub fn serve(daemon: &Arc<Daemon>, listener: &Listener) {
    let mut fetches: VecDeque<Weak<File>> = VecDeque::new();
    loop {
        let Ok(stream) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else {
            // Out of descriptors, say.
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        fetches.retain(|fetch| fetch.strong_count() > 0);
        if fetches.len() >= MOST_FETCHES {
            // Its thread reads the end.
            let oldest = fetches.pop_front().and_then(|fetch| fetch.upgrade());
            oldest.map(|fetch| shutdown(&fetch, Shutdown::Both));
        }
        let (daemon, stream) = (Arc::clone(daemon), Arc::new(File::from(stream)));
        fetches.push_back(Arc::downgrade(&stream));
        let _ = thread::Builder::new().name("fetch".to_owned()).spawn(move || answer(&daemon, &stream));
    }
}

fn answer(daemon: &Daemon, mut stream: &File) -> io::Result<()> {
    let (end, mut request) = (Instant::now() + PATIENCE, Vec::new());
    set_socket_timeout(stream, Timeout::Send, Some(PATIENCE))?;
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut part = [0; 1024];
        let left = end.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut)?;
        set_socket_timeout(stream, Timeout::Recv, Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut part)? {
            0 => return Ok(()),
            got => request.extend(&part[..got]),
        }
        if request.len() > MOST {
            return Ok(());
        }
    }
    let (result, body) = match request.strip_prefix(b"GET ") {
        Some(path) if path.starts_with(b"/metrics ") || path.starts_with(b"/ ") => ("200 OK", text(&daemon.status())),
        Some(_) => ("404 Not Found", String::new()),
        None => ("405 Method Not Allowed", String::new()),
    };
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {result}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(answer.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::Page;
    use crate::status::{Counts, Lent, TemplateMemory};
    use crate::tests::daemon;

    fn status() -> Status {
        let mut times = LeaseTimes::default();
        [2_500_000, 700_000_000, 20_000_000_000].into_iter().map(Duration::from_nanos).for_each(|time| times.add(time));
        Status {
            page: Page::Huge2M,
            node: Some(1),
            wanted: vec![8 << 20, 8 << 20, 4 << 20],
            ready: vec![8 << 20, 6 << 20],
            filling: None,
            waiting: None,
            drained: false,
            leases: vec![Lent { lease: 1, uid: 0, pid: 1, bytes: 4 << 20, seconds: 1, seen: None }],
            kept: Vec::new(),
            templates: vec![
                TemplateMemory {
                    name: "a \"b\\".to_owned(),
                    bytes: Some(8 << 20),
                    ready: true,
                    sha256: None,
                    why: None,
                },
                TemplateMemory { name: "gone".to_owned(), bytes: None, ready: false, sha256: None, why: None },
            ],
            left: Vec::new(),
            counts: Counts { hits: 3, misses: 1, fill_cpu_ns: 1_500_000_000, ..Counts::default() },
            times,
        }
    }

    /// Peers that say a little of a request, again and again, keep nobody else from the figures, however many they are.
    #[test]
    fn a_slow_peer_keeps_nobody_waiting() {
        let place = std::env::temp_dir().join(format!("hugemm-metrics-{}", std::process::id()));
        let listener = bind(place.to_str().expect("UTF-8")).expect("a socket");
        let daemon = Arc::new(daemon(&[1]));
        // For as long as the tests run.
        thread::spawn(move || serve(&daemon, &listener));
        let connect = || std::os::unix::net::UnixStream::connect(&place).expect("connected");
        let mut slow: Vec<_> = (0..MOST_FETCHES + 8).map(|_| connect()).collect();
        let slow = thread::spawn(move || {
            // Until each has had its time, however often it says something.
            while slow.iter_mut().any(|peer| peer.write_all(b"G").is_ok()) {
                thread::sleep(PATIENCE / 8);
            }
        });
        let (mut peer, mut got) = (connect(), String::new());
        peer.set_read_timeout(Some(10 * PATIENCE)).expect("a socket");
        peer.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
        peer.read_to_string(&mut got).expect("answered");
        assert!(got.ends_with("# EOF\n"));
        slow.join().expect("no panic");
        let _ = std::fs::remove_file(place);
    }

    #[test]
    fn figures_are_where_a_scraper_looks_for_them() {
        let text = text(&status());
        for line in [
            "hugemm_lease_files_ready{node=\"1\",page=\"2M\",size=\"8388608\"} 1",
            "hugemm_lease_files_ready{node=\"1\",page=\"2M\",size=\"6291456\"} 1",
            "hugemm_lease_files_wanted{node=\"1\",page=\"2M\",size=\"8388608\"} 2",
            "hugemm_lease_files_wanted{node=\"1\",page=\"2M\",size=\"6291456\"} 0",
            r#"hugemm_lease_template_ready{template="a \"b\\"} 1"#,
            r#"hugemm_lease_template_bytes{template="a \"b\\"} 8388608"#,
            r#"hugemm_lease_template_ready{template="gone"} 0"#,
            "hugemm_lease_leased_bytes 4194304",
            "hugemm_lease_requests_total{result=\"hit\"} 3",
            "hugemm_lease_fill_cpu_seconds_total 1.5",
            "hugemm_lease_time_seconds_bucket{le=\"0.001\"} 0",
            "hugemm_lease_time_seconds_bucket{le=\"0.003\"} 1",
            "hugemm_lease_time_seconds_bucket{le=\"1\"} 2",
            "hugemm_lease_time_seconds_bucket{le=\"+Inf\"} 3",
            "hugemm_lease_time_seconds_count 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }

    /// As the format wants it: each sample is of the family that was named last, each family is named once, the end is marked.
    #[test]
    fn the_text_is_well_formed() {
        let text = text(&status());
        assert!(text.ends_with("\n# EOF\n"));
        let (mut families, mut family, mut kind) = (Vec::new(), "", "");
        for line in text.lines().take_while(|line| *line != "# EOF") {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                (family, kind) = rest.split_once(' ').expect("a name and a type");
                assert!(!families.contains(&family), "{family} twice");
                families.push(family);
            } else if let Some(rest) = line.strip_prefix("# HELP ") {
                assert!(rest.starts_with(family) && rest.ends_with('.'), "{line}");
            } else {
                let (name, value) = line.rsplit_once(' ').expect("a value");
                let suffix = name.split('{').next().and_then(|name| name.strip_prefix(family)).expect(line);
                let suffixes: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_count", "_sum"],
                    _ => &[""],
                };
                assert!(suffixes.contains(&suffix), "{line}");
                value.parse::<f64>().expect(line);
            }
        }
    }
}
