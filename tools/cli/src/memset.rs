//! `hugemm bench mem memset`: the chunk table of "huge page clearing optimizations".

use crate::args::{Memset, primitive};
use crate::document::Row;
use crate::machine::{GIB, Machine};
use crate::measure::{Field, Repeat, Subject, bandwidths};
use crate::{environment_text, progress, table};
use anyhow::{Result, anyhow, bail};
use hugemm_base::{CpuId, PageSize};
use hugemm_clear::{ClearPolicy, Clearer, Primitive, Profile};
use hugemm_host::cpu::Host;
use hugemm_inspect::environment::Environment;
use hugemm_workloads::size::Size;

/// perf's gigabyte: 2^30 bytes.
pub const PERF_GB: f64 = (1_u64 << 30) as f64;

/// Runs the command.
pub fn run(args: &Memset) -> Result<()> {
    let machine = Machine::new(&args.common)?;
    let subjects = subjects(args, &machine)?;
    let size = match args.size {
        Some(size) => machine.whole_pages(size, PageSize::Size2M)?,
        None => machine.default_size(6, GIB, 4 * GIB)?,
    };
    for chunk in &args.chunk {
        machine.whole_pages(*chunk, PageSize::Size4K)?;
        if chunk.0 > size || !size.is_multiple_of(chunk.0) {
            bail!("chunks of {chunk} do not divide {}; choose -k or -s so that they do", Size(size));
        }
    }
    let places = machine.places(1)?;
    let mut environment = Environment::read()?;
    let mut region = machine.memory(size, PageSize::Size2M, args.kind)?;
    environment.note_region("measured", &region);
    // Nothing is chosen here, so nothing needs to be calibrated.
    let profile = Profile::uncalibrated(&machine.features, None);
    let clearer = Clearer::new(machine.features, ClearPolicy::new(profile))?;
    let host = Host::new(&places, region.as_mut_slice())?;

    let repeat = Repeat { runs: args.loops, warmup: args.warmup.warmup };
    let bar = progress::bar((args.chunk.len() * subjects.len() * repeat.all()) as u64, machine.quiet());
    let measured = host.run_on(CpuId(0), |cx| {
        // SAFETY: the only owner of the host's frames, made once.
        let mut memory = unsafe { host.own_frames() };
        let mut measured = Vec::new();
        for chunk in &args.chunk {
            bar.set_message(format!("chunk {chunk}"));
            let field = Field::chunk(chunk.0, size);
            let each;
            (memory, each) = bandwidths(cx, &clearer, &subjects, &field, memory, repeat, || bar.inc(1))?;
            measured.push(each);
        }
        anyhow::Ok(measured)
    })??;
    bar.finish_and_clear();

    let mut lines = table::new(std::iter::once("chunk".to_owned()).chain(subjects.iter().map(Subject::name)));
    let mut rows = Vec::new();
    for (chunk, each) in args.chunk.iter().zip(measured) {
        let mut line = vec![chunk.to_string()];
        for (subject, samples) in subjects.iter().zip(each) {
            let samples = samples.map(|gbps| gbps * 1e9 / PERF_GB);
            line.push(format!("{:.2} ±{:.1}%", samples.mean(), samples.stdev_percent()));
            let row = Row::mean("bench.mem.memset", &samples, "GiB/s");
            rows.push(row.label("chunk", chunk.0).label("function", subject.name()).label("size", size));
        }
        lines.add_row(line);
    }
    if !machine.quiet() {
        environment_text::print(&environment);
        let title = format!("{} cleared by chunk, GB/sec (2^30), mean ± stdev of {} loops", Size(size), args.loops);
        table::print(&title, &lines);
    }
    machine.report(&args.common, environment, rows)
}

/// The primitives that were asked for.
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
