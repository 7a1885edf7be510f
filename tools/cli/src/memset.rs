//! `hugemm bench mem memset`: the chunk table of "huge page clearing optimizations".

use crate::args::Memset;
use crate::boot::transcript::{Transcript, of_guest as lines_of};
use crate::document::Row;
use crate::machine::{GIB, Machine};
use crate::measure::{Field, Repeat, Subject, bandwidths};
use crate::options::primitive;
use crate::results::{Line, Results};
use crate::stats::Samples;
use crate::{progress, table};
use anyhow::{Result, anyhow, bail};
use hugemm_base::{CpuId, PageSize};
use hugemm_clear::{ClearPolicy, Clearer, Primitive, Profile};
use hugemm_host::cpu::Host;
use hugemm_workloads::Pass;
use hugemm_workloads::record::Metric;
use hugemm_workloads::request;
use hugemm_workloads::size::Size;

/// perf's gigabyte: 2^30 bytes.
pub const PERF_GB: f64 = (1_u64 << 30) as f64;

pub const RATE: Metric<Pass> =
    Metric::new("", "GiB/s", |pass| pass.bytes as f64 / PERF_GB / (pass.nanos.max(1) as f64 / 1e9));

pub fn run(args: &Memset) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let subjects = subjects(args, &machine)?;
    let request::Memset { size, chunk: chunks, loops } = args.loops;
    let size = match size {
        Some(size) => machine.whole_pages(Size(size), PageSize::Size2M)?,
        None => machine.default_size(6, GIB, 4 * GIB)?,
    };
    for chunk in chunks.iter() {
        machine.whole_pages(Size(chunk), PageSize::Size4K)?;
        if chunk > size || !size.is_multiple_of(chunk) {
            let chunk = Size(chunk);
            bail!("chunks of {chunk} do not divide {}; choose -k or -s so that they do", Size(size));
        }
    }
    let places = machine.places(1)?;
    let mut region = machine.memory(size, PageSize::Size2M, args.kind)?;
    machine.note_region("measured", &region);
    // Nothing is chosen here, so nothing needs to be calibrated.
    let profile = Profile::uncalibrated(&machine.features, None);
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let host = Host::new(&places, region.as_mut_slice())?;

    let repeat = Repeat::new(loops, args.warmup.warmup);
    let bar = progress::bar((chunks.iter().count() * subjects.len() * repeat.all()) as u64, machine.quiet());
    let measured = host.run_on(CpuId(0), |cx| {
        // SAFETY: the only owner of the host's frames, made once.
        let mut memory = unsafe { host.own_frames() };
        let mut measured = Vec::new();
        for chunk in chunks.iter() {
            bar.set_message(format!("chunk {}", Size(chunk)));
            let field = Field::chunk(chunk, size);
            let each;
            (memory, each) = bandwidths(cx, &clearer, &subjects, &field, memory, repeat, || bar.inc(1))?;
            measured.push(each);
        }
        anyhow::Ok(measured)
    })??;
    bar.finish_and_clear();

    let names: Vec<String> = subjects.iter().map(Subject::name).collect();
    let of_chunk = |(chunk, each): (u64, Vec<Samples>)| {
        (chunk, each.iter().map(|samples| samples.map(|gbps| gbps * 1e9 / PERF_GB)).collect())
    };
    let results = results_of(&names, chunks.iter().zip(measured).map(of_chunk).collect(), size, loops as usize);
    machine.show(results)
}

/// The table and the rows: by chunk, a bandwidth for each name.
fn results_of(names: &[String], measured: Vec<(u64, Vec<Samples>)>, size: u64, loops: usize) -> Results {
    let mut lines = table::new(std::iter::once("chunk").chain(names.iter().map(String::as_str)));
    let mut rows = Vec::new();
    for (chunk, each) in measured {
        let mut line = vec![Size(chunk).to_string()];
        for (name, samples) in names.iter().zip(each) {
            line.push(format!("{:.2} ±{:.1}%", samples.mean(), samples.stdev_percent()));
            let row = Row::mean("bench.mem.memset", &samples, "GiB/s");
            rows.push(row.label("chunk", chunk).label("function", name.as_str()).label("size", size));
        }
        lines.add_row(line);
    }
    let title = format!("{} cleared by chunk, GB/sec (2^30), mean ± stdev of {loops} loops", Size(size));
    Results { tables: vec![(title, lines)], rows, ..Results::default() }
}

pub fn of_guest(transcript: &Transcript) -> Results {
    let lines: Vec<Line<Pass>> = lines_of(transcript);
    let Some(first) = lines.first() else { return Results::default() };
    let chunks = lines.chunk_by(|a, b| a.number("chunk") == b.number("chunk"));
    let names: Vec<String> =
        chunks.clone().next().unwrap_or_default().iter().map(|line| line.label("function")).collect();
    let rates = |line: &Line<Pass>| line.samples(&RATE);
    let measured = chunks.map(|lines| (lines[0].number("chunk"), lines.iter().map(rates).collect())).collect();
    results_of(&names, measured, first.number("size"), first.runs.len())
}

fn subjects(args: &Memset, machine: &Machine) -> Result<Vec<Subject>> {
    let mut subjects = Vec::new();
    for name in &args.function {
        if name == "all" {
            subjects.extend(machine.features.iter().map(Subject::Primitive));
            continue;
        }
        let p: Primitive = primitive(name).map_err(|why| anyhow!("'{name}': {why}, or all"))?;
        if !machine.features.contains(p) {
            bail!("this CPU does not have {p}; `hugemm probe` lists what it has");
        }
        subjects.push(Subject::Primitive(p));
    }
    Ok(subjects)
}
