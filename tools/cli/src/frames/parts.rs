//! The other tables of `hugemm bench free`: one block freed by two CPUs at once, contiguous claims, arrays.

use crate::frames::area::Area;
use crate::frames::args::Free;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::results::{Line, Results};
use crate::sides::{Side, alternate, labelled, sheet};
use anyhow::{Result, anyhow};
use hugemm_base::{CpuId, Extent, Order, PAGE_SHIFT, Pfn};
use hugemm_host::cpu::Host;
use hugemm_workloads::alloc_free::ranges::{self, ArrayWay, FreeMethod};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Unclaimed};
use hugemm_workloads::record::Metric;
use hugemm_workloads::size::Size;
use indicatif::ProgressBar;

/// Pages of a contiguous claim, as in the series' second benchmark (64 MiB), and of an array (256 MiB).
const CLAIM_PAGES: u64 = 16_384;
const ARRAY_PAGES: u64 = 65_536;

#[derive(Clone, Copy)]
enum Parts {
    /// One CPU, all in one call.
    Whole,
    /// One CPU, one half after the other.
    Halves,
    /// Two CPUs in step, a half each.
    TwoCpus,
}

/// Blocks of 512 counted pages, freed by two CPUs at once, half of each block, beside one CPU that frees the same halves.
pub fn two_cpus(area: &Area<'_>, args: &Free, bar: &ProgressBar, results: &mut Results) -> Result<()> {
    let source = CountedPages(&area.frames);
    let nine = Order::new(9)?;
    let count = (area.extent.pages() >> 9 >> 1).clamp(1, 256) as usize;
    let measure = |parts: Parts| -> Result<f64> {
        let mut extents = vec![Extent::default(); count];
        area.host.run_on(CpuId(0), |cx| ranges::take(cx, &source, nine, &mut extents))??;
        let halves: Vec<Extent> = extents.iter().flat_map(|e| [e.slice(0, 256), e.slice(256, 512)]).collect();
        let spent = area.on_cpus(if matches!(parts, Parts::TwoCpus) { 2 } else { 1 }, &source, |cx, cpu| {
            Ok(match parts {
                Parts::Whole => ranges::give(cx, &source, &extents, FreeMethod::Range),
                Parts::Halves => ranges::give(cx, &source, &halves, FreeMethod::Range),
                Parts::TwoCpus => ranges::part(cx, &source, &extents, FreeMethod::Range, cpu.into(), 2),
            })
        })?;
        let slowest = spent.iter().map(|spent| spent.nanos).max().unwrap_or(0);
        Ok(slowest as f64 / count as f64)
    };
    let ways = [
        ("one CPU, whole", Parts::Whole),
        ("one CPU, two halves", Parts::Halves),
        ("two CPUs, a half each", Parts::TwoCpus),
    ];
    let sides = ways.map(|(name, parts)| way(name, move || measure(parts)));
    let lines = alternate(sides.into(), args.measured.repeat(args.blocks.runs), bar)?;
    // The second CPU is idle from here on: what it has cached would be in the way of claims.
    area.on_cpus(2, &source, |_, _| Ok(()))?;
    let metrics = [Metric::new("bench.free.parts", "ns per block", |it: &f64| *it).column("ns per block")];
    results.rows.extend(lines.iter().flat_map(|line| line.rows(&metrics)));
    let title = format!("{count} blocks of 512 counted pages, freed in parts");
    results.tables.push((title, sheet(&lines, ("way", ""), &metrics)));
    Ok(())
}

fn way<'a, R>(name: &str, run: impl FnMut() -> Result<R> + 'a) -> Side<'a, R> {
    Side { line: Line::new([("way", name.into())]), run: Box::new(run) }
}

/// Nanoseconds; nothing where there is no such operation.
struct Claimed {
    claiming: f64,
    freeing: f64,
}

const CLAIMED: [Metric<Claimed>; 2] = [
    Metric::new("bench.free.claim", "ns", |it: &Claimed| it.claiming).column("claim, ns"),
    Metric::new("bench.free.claim_free", "ns", |it: &Claimed| it.freeing).column("free, ns"),
];

struct Claims<'a> {
    area: &'a Area<'a>,
    extents: Vec<Extent>,
    sides: Vec<Side<'a, Claimed>>,
}

impl Visit for Claims<'_> {
    fn visit<T: Peer>(&mut self) -> Result<()> {
        let peer = Managed::<T>::new(self.area.extent)?;
        self.add(T::NAME, peer);
        Ok(())
    }
}

impl<'a> Claims<'a> {
    fn add<S: Source<Host<'a>> + Sync + 'a>(&mut self, name: &'static str, source: S) {
        let (area, extents) = (self.area, self.extents.clone());
        let run = move || {
            let done = area.on_cpus(1, &source, |cx, _| match ranges::claims(cx, &source, &extents) {
                Ok((claiming, freeing)) => Ok(Claimed { claiming: claiming.each(), freeing: freeing.each() }),
                Err(Unclaimed::NoSuchOperation) => Ok(Claimed { claiming: f64::NAN, freeing: f64::NAN }),
                Err(unclaimed @ Unclaimed::InUse) => Err(unclaimed.into()),
            })?;
            done.into_iter().next().ok_or_else(|| anyhow!("no CPU"))
        };
        self.sides.push(Side::new(name, run));
    }
}

pub fn claims_and_arrays(area: &Area<'_>, args: &Free, bar: &ProgressBar, results: &mut Results) -> Result<()> {
    let pages = area.extent.pages();
    if pages >= CLAIM_PAGES {
        let step = |i: u64| area.extent.slice(i * CLAIM_PAGES, (i + 1) * CLAIM_PAGES);
        let extents = (0..(pages / CLAIM_PAGES).min(16)).map(step).collect();
        let mut claims = Claims { area, extents, sides: Vec::new() };
        claims.add("hugemm", FrozenBlocks(&area.frames));
        peers::each(args.measured.no_peers, &mut claims)?;
        let lines = alternate(claims.sides, args.measured.repeat(args.blocks.runs), bar)?;
        let lines = labelled(lines, &[("pages", CLAIM_PAGES.into())]);
        results.rows.extend(lines.iter().flat_map(|line| line.rows(&CLAIMED)));
        let title = format!("{CLAIM_PAGES} particular frames claimed, and freed");
        results.tables.push((title, sheet(&lines, ("side", ""), &CLAIMED)));
    }
    let count = ARRAY_PAGES.min(pages / 2);
    let frames = FrozenBlocks(&area.frames);
    let ways = [
        ("sorted, by runs", ArrayWay::Sorted),
        ("unsorted, sorted first", ArrayWay::Unsorted),
        ("unsorted, as it is", ArrayWay::AsIs),
        ("sorted, page by page", ArrayWay::EachPage),
    ];
    let sides = ways.map(|(name, array_way)| {
        way(name, move || {
            let mut array = vec![Pfn::new(0); count as usize];
            area.on_cpus(1, &FrozenBlocks(&area.frames), |_, _| Ok(()))?;
            Ok(area.host.run_on(CpuId(0), |cx| ranges::array(cx, &area.frames, &mut array, array_way))??.each())
        })
    });
    area.on_cpus(1, &frames, |_, _| Ok(()))?;
    let lines = alternate(sides.into(), args.measured.repeat(args.blocks.runs), bar)?;
    let lines = labelled(lines, &[("pages", count.into())]);
    let metrics = [Metric::new("bench.free.array", "ns per page", |it: &f64| *it).column("ns per page")];
    results.rows.extend(lines.iter().flat_map(|line| line.rows(&metrics)));
    let title = format!("An array of {count} counted pages ({}), freed as vfree does", Size(count << PAGE_SHIFT));
    results.tables.push((title, sheet(&lines, ("way", ""), &metrics)));
    Ok(())
}
