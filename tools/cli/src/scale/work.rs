//! What each CPU does, over and over, while all others do the same.

use crate::frames::area::{Gate, together};
use crate::stats::Samples;
use anyhow::{Result, anyhow};
use hugemm_base::{CpuCx, Never, Order, PageSize, VirtAddr, VirtRange};
use hugemm_frames::{Frames, Frozen, Plain};
use hugemm_host::cpu::Host;
use hugemm_paging::Counting;
use hugemm_vm::{Access, AddressSpaceRef, Backing, DefaultSetup, Vm, VmaKind};
use hugemm_workloads::alloc_free::Spent;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Nobody translates by the tables, so TLBs only count.
pub type OnHost<'h> = DefaultSetup<Host<'h>, Counting, Plain>;

/// The CPUs, their memory, and a space that all use.
#[derive(Clone, Copy)]
pub struct Machinery<'a, 'm, 'h: 'm> {
    pub host: &'a Host<'h>,
    pub frames: &'a Frames<'m, Plain>,
    pub vm: &'a Vm<'m, OnHost<'h>>,
    pub space: &'a AddressSpaceRef<'a, OnHost<'h>>,
}

/// What is done in a round, by each CPU.
pub type Run = fn(&mut Ground<'_, '_, '_, '_>) -> Result<Spent>;

impl Machinery<'_, '_, '_> {
    /// Operations per second of so many CPUs at once, round by round. One round before them touches what is new.
    pub fn rates(&self, cpus: u32, time: Duration, run: Run) -> Result<Samples> {
        let last = AtomicBool::new(false);
        let each = together(self.host, cpus, |cx, gate| {
            let cpu = cx.pinned(|pin| pin.cpu().get());
            let mut on = Ground { cx, cpu, gate, frames: self.frames, vm: self.vm, space: self.space };
            let mut rounds = vec![run(&mut on)?];
            let start = Instant::now();
            while !last.load(Ordering::Relaxed) {
                rounds.push(run(&mut on)?);
                if cpu == 0 {
                    last.store(start.elapsed() >= time, Ordering::Relaxed);
                }
                // The first has said whether this was the last round.
                on.gate.pass();
            }
            Ok(rounds)
        })?;
        let rounds = each.first().map_or(0, Vec::len);
        Ok((1..rounds)
            .map(|round| {
                let round = || each.iter().filter_map(|rounds| rounds.get(round));
                let nanos = round().map(|spent| spent.nanos).max().unwrap_or(0);
                round().map(|spent| spent.operations).sum::<u64>() as f64 * 1e9 / nanos.max(1) as f64
            })
            .collect())
    }
}

/// One of the CPUs.
pub struct Ground<'a, 's, 'm, 'h: 'm> {
    cx: &'a mut CpuCx<'s, Host<'h>>,
    cpu: u32,
    gate: &'a Gate,
    frames: &'a Frames<'m, Plain>,
    vm: &'a Vm<'m, OnHost<'h>>,
    space: &'a AddressSpaceRef<'a, OnHost<'h>>,
}

impl<'h> Ground<'_, '_, '_, 'h> {
    /// Times so many while all other CPUs do as many.
    fn timed(&mut self, operations: u64, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Spent> {
        self.gate.pass();
        let start = Instant::now();
        work(self)?;
        let nanos = start.elapsed().as_nanos() as u64;
        self.gate.pass();
        Ok(Spent { operations, nanos })
    }

    /// Blocks taken, so many before they are freed.
    pub fn blocks(&mut self, order: Order, hand: usize) -> Result<Spent> {
        let mut blocks: Vec<Frozen> = Vec::with_capacity(hand);
        let rounds = (16 << 10) / hand;
        self.timed((rounds * hand) as u64, |on| {
            for _ in 0..rounds {
                for _ in 0..hand {
                    blocks.push(on.frames.alloc(on.cx, order)?);
                }
                blocks.drain(..).for_each(|block| on.frames.free(on.cx, block));
            }
            Ok(())
        })
    }

    /// 512 pages, each with a reference, freed by one call.
    pub fn range_frees(&mut self) -> Result<Spent> {
        let mut runs = Vec::new();
        for _ in 0..64 {
            let block = self.frames.alloc(self.cx, PageSize::Size2M)?;
            let run = self.frames.split(block, Order::ZERO).map_err(|_| anyhow!("a block"))?;
            runs.push(self.frames.count_run(run).map_err(|_| anyhow!("nobody else's"))?);
        }
        self.timed(64, |on| {
            for run in runs {
                on.frames.free_range(on.cx, run);
            }
            Ok(())
        })
    }

    /// Where this CPU's addresses begin: tables are nobody else's.
    fn at(&self) -> VirtAddr {
        VirtAddr::new((1 << 40) + (u64::from(self.cpu) << 32))
    }

    /// So many pages of them, from one on.
    fn pages(&self, first: u64, page: PageSize, count: u64) -> Result<VirtRange> {
        Ok(VirtRange::new(VirtAddr::new(self.at().get() + first * page.bytes()), count * page.bytes())?)
    }

    /// An area of so many pages; what is done with it; and it is gone.
    fn area(
        &mut self,
        space: &AddressSpaceRef<'_, OnHost<'h>>,
        page: PageSize,
        pages: u64,
        work: impl FnOnce(&mut Self, VirtRange) -> Result<Spent>,
    ) -> Result<Spent> {
        let span = self.pages(0, page, pages)?;
        self.vm.map(self.cx, space, span, VmaKind::private(page), Backing::Private)?;
        let spent = work(self, span)?;
        self.vm.unmap(self.cx, space, span)?;
        Ok(spent)
    }

    fn faults_in(&mut self, space: &AddressSpaceRef<'_, OnHost<'h>>, page: PageSize, pages: u64) -> Result<Spent> {
        self.area(space, page, pages, |on, span| {
            on.timed(pages, |on| {
                for index in 0..pages {
                    let at = VirtAddr::new(span.start().get() + index * page.bytes());
                    on.vm.fault(on.cx, space, at, Access::Write)?;
                }
                Ok(())
            })
        })
    }

    /// Faults in the space of all.
    pub fn faults(&mut self, page: PageSize, pages: u64) -> Result<Spent> {
        self.faults_in(self.space, page, pages)
    }

    /// Faults of 4 KiB in a space that no other CPU uses.
    pub fn faults_apart(&mut self, pages: u64) -> Result<Spent> {
        let space = self.vm.create(self.cx, VirtRange::new(VirtAddr::new(0), 1 << 47)?)?;
        let spent = self.faults_in(&space, PageSize::Size4K, pages);
        self.vm.destroy(self.cx, space).map_err(|(error, _)| anyhow!("{error}"))?;
        spent
    }

    /// This CPU's part of a range, by 4 KiB pages.
    pub fn prefault(&mut self) -> Result<Spent> {
        let pages = 8192;
        self.area(self.space, PageSize::Size4K, pages, |on, span| {
            on.timed(pages, |on| Ok(on.vm.prefault(on.space, span, None).work(on.cx, &Never)?))
        })
    }

    /// Single pages unmapped, the last one first.
    pub fn unmaps(&mut self) -> Result<Spent> {
        let (page, pages) = (PageSize::Size4K, 512);
        self.area(self.space, page, pages, |on, span| {
            on.vm.prefault(on.space, span, None).work(on.cx, &Never)?;
            on.timed(pages, |on| {
                for index in (0..pages).rev() {
                    on.vm.unmap(on.cx, on.space, on.pages(index, page, 1)?)?;
                }
                Ok(())
            })
        })
    }

    /// Areas of a page, with a page between two.
    pub fn maps(&mut self) -> Result<Spent> {
        let (page, areas) = (PageSize::Size4K, 512);
        let spent = self.timed(areas, |on| {
            for index in 0..areas {
                let span = on.pages(2 * index, page, 1)?;
                on.vm.map(on.cx, on.space, span, VmaKind::private(page), Backing::Private)?;
            }
            Ok(())
        })?;
        self.vm.unmap(self.cx, self.space, self.pages(0, page, 2 * areas)?)?;
        Ok(spent)
    }
}
