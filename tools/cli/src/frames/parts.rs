//! The other tables of `hugemm bench free`: one block freed by two CPUs at once, contiguous claims, arrays.

use crate::document::Row;
use crate::frames::area::{Area, Side, alternate, cell};
use crate::frames::args::Free;
use crate::frames::peers::{self, Managed, Peer, Visit};
use crate::results::Results;
use crate::stats::Samples;
use crate::table;
use anyhow::{Result, anyhow, bail};
use hugemm_base::{CpuId, Extent, Order, PAGE_SHIFT, Pfn};
use hugemm_host::cpu::Host;
use hugemm_workloads::alloc_free::ranges::{self, ArrayWay, FreeMethod};
use hugemm_workloads::alloc_free::{CountedPages, FrozenBlocks, Source, Unclaimed};
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

/// Blocks of 512 counted pages, freed by two CPUs at once, half of each block: the time over that of one CPU that frees
/// the same halves.
pub fn two_cpus(area: &Area<'_>, args: &Free, bar: &ProgressBar, results: &mut Results) -> Result<()> {
    let source = CountedPages(&area.frames);
    let nine = Order::new(9)?;
    let count = (area.extent.pages() >> 9 >> 1).clamp(1, 256) as usize;
    let measure = |parts: Parts| -> Result<Vec<Option<f64>>> {
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
        Ok(vec![Some(slowest as f64 / count as f64)])
    };
    let ways = [
        ("one CPU, whole", Parts::Whole),
        ("one CPU, two halves", Parts::Halves),
        ("two CPUs, a half each", Parts::TwoCpus),
    ];
    let mut sides = ways.map(|(name, parts)| Side { name, run: Box::new(move || measure(parts)) });
    let columns = alternate(&mut sides, args.measured.repeat(args.blocks.runs), bar)?;
    // The second CPU is idle from here on: what it has cached would be in the way of claims.
    area.on_cpus(2, &source, |_, _| Ok(()))?;
    let samples: Vec<Samples> = columns.into_iter().filter_map(|mut columns| columns.pop().flatten()).collect();
    let [whole, halves, both] = samples.as_slice() else { bail!("nothing was measured") };
    let mut lines = table::new(["ns per block", "free", "of one CPU, halves"]);
    for ((name, _), samples) in ways.iter().zip([whole, halves, both]) {
        let ratio = samples.per_run_ratio(halves).median();
        lines.add_row([(*name).to_owned(), cell(Some(samples)), format!("{ratio:.2} ×")]);
        results.rows.push(Row::median("bench.free.parts", samples, "ns per block").label("way", *name));
    }
    results.tables.push((format!("{count} blocks of 512 counted pages, freed in parts"), lines));
    results.goals.at_most("frames.free512_parts_2t_ratio", &both.per_run_ratio(halves), "ratio", 1.2);
    Ok(())
}

struct Claims<'a> {
    area: &'a Area<'a>,
    extents: Vec<Extent>,
    sides: Vec<Side<'a>>,
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
                Ok((claiming, freeing)) => Ok(vec![Some(claiming.each()), Some(freeing.each())]),
                Err(Unclaimed::NoSuchOperation) => Ok(vec![None, None]),
                Err(unclaimed @ Unclaimed::InUse) => Err(unclaimed.into()),
            })?;
            done.into_iter().next().ok_or_else(|| anyhow!("no CPU"))
        };
        self.sides.push(Side { name, run: Box::new(run) });
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
        let columns = alternate(&mut claims.sides, args.measured.repeat(args.blocks.runs), bar)?;
        let mut lines = table::new(["ns", "claim", "free"]);
        for (side, columns) in claims.sides.iter().zip(&columns) {
            lines.add_row([side.name.to_owned(), cell(columns[0].as_ref()), cell(columns[1].as_ref())]);
            for (figure, samples) in ["claim", "claim_free"].iter().zip(columns) {
                let Some(samples) = samples else { continue };
                let row = Row::median(format!("bench.free.{figure}"), samples, "ns").label("side", side.name);
                results.rows.push(row.label("pages", CLAIM_PAGES));
            }
        }
        results.tables.push((format!("{CLAIM_PAGES} particular frames claimed, and freed"), lines));
    }
    let count = ARRAY_PAGES.min(pages / 2);
    let frames = FrozenBlocks(&area.frames);
    let ways = [
        ("sorted, by runs", ArrayWay::Sorted),
        ("unsorted, sorted first", ArrayWay::Unsorted),
        ("unsorted, as it is", ArrayWay::AsIs),
        ("sorted, page by page", ArrayWay::EachPage),
    ];
    let mut sides = ways.map(|(name, way)| Side {
        name,
        run: Box::new(move || {
            let mut array = vec![Pfn::new(0); count as usize];
            area.on_cpus(1, &FrozenBlocks(&area.frames), |_, _| Ok(()))?;
            let spent = area.host.run_on(CpuId(0), |cx| ranges::array(cx, &area.frames, &mut array, way))??;
            Ok(vec![Some(spent.each())])
        }),
    });
    area.on_cpus(1, &frames, |_, _| Ok(()))?;
    let columns = alternate(&mut sides, args.measured.repeat(args.blocks.runs), bar)?;
    let mut lines = table::new(["ns per page", "free"]);
    for ((name, _), columns) in ways.iter().zip(&columns) {
        lines.add_row([(*name).to_owned(), cell(columns[0].as_ref())]);
        if let Some(samples) = &columns[0] {
            let row = Row::median("bench.free.array", samples, "ns per page").label("way", *name);
            results.rows.push(row.label("pages", count));
        }
    }
    let size = Size(count << PAGE_SHIFT);
    results.tables.push((format!("An array of {count} counted pages ({size}), freed as vfree does"), lines));
    Ok(())
}
