//! The worker, which takes memory away and moves it.

use super::*;

impl<'h, F: PageFormat> Test<'_, 'h, F> {
    /// What the worker does: it takes memory away, moves pages, changes its ways, and has pools and arenas come and go.
    pub fn work(&self, seed: u64) {
        let (world, mut random) = (self.world, Random(seed ^ 0x776f_726b));
        let cx = &mut world.machine.cx();
        while self.ended.get() < CPUS {
            let pager = world.vm.pager();
            let node = NodeId::new(random.below(2) as u32);
            match random.below(16) {
                3..=5 if self.is_narrow() => self.shrink_all(cx, node),
                0..=5 => {
                    let budget = ShrinkBudget::new(1 << random.below(8), 1 << random.below(9));
                    pager.shrink(&world.vm, cx, node, budget, &Never);
                }
                6 => drop(pager.balance(&world.vm, cx, node, 256, &Never)),
                7 => self.shrink_all(cx, node),
                8 => drop(pager.compact(&world.vm, cx, node)),
                9 => pager.set_ageing(Ageing::ALL[random.below(2) as usize]),
                10 => pager.lru(node).expect("one").set_policy(cx, LruPolicy::ALL[random.below(2) as usize]),
                11 => world.resize_pool(cx, random.below(4)),
                12 => self.come_and_go(cx),
                13 => {
                    let worker = ZeroWorker::new(world.vm.clearer(), PageSize::Size4K, 100);
                    let turn = world.vm.zero_ahead(cx, &worker, &Never);
                    self.did("zeroed ahead", u64::from(matches!(turn, ZeroTurn::Cleared { .. })));
                }
                _ => (0..200).for_each(|_| point()),
            }
            cx.cond_resched();
        }
    }

    /// Takes away all that there is, a few times: what has been used meanwhile, too.
    fn shrink_all(&self, cx: &mut Cx<'_, 'h>, node: NodeId) {
        let budget = ShrinkBudget::new(u64::MAX, 1 << 8);
        for _ in 0..16 {
            self.world.vm.pager().shrink(&self.world.vm, cx, node, budget, &Never);
            progress();
        }
        let in_pieces: u64 = self.world.store.usage(cx).map(|class| class.used).sum();
        self.did("compressed", in_pieces);
    }

    /// Pages that programs use are away for a while, and come back there or elsewhere: those that somebody wishes, or some.
    pub fn unhook(&self, seed: u64) {
        let (world, mut random) = (self.world, Random(seed ^ 0x6177_6179));
        let cx = &mut world.machine.cx();
        while self.ended.get() < CPUS {
            let wish = self.wish.take();
            let wished = wish.is_some();
            let (process, pages) = wish.unwrap_or_else(|| {
                let processes = self.processes.borrow();
                let open: Vec<_> = processes.iter().filter(|process| !process.doomed.get()).collect();
                let process = open[random.below(open.len() as u64) as usize];
                process.users.set(process.users.get() + 1);
                (process.clone(), PRIVATE.start..PRIVATE.end())
            });
            let deferred = world.deferred();
            let mut away = Vec::new();
            let pages = (pages.start..pages.end.min(PRIVATE.end())).step_by(self.stride as usize * 4096);
            for at in pages.filter(|_| wished || random.below(2) == 0) {
                away.extend(world.unhook(cx, &process.space, at, &deferred));
            }
            if wished {
                self.wished.set(false);
            }
            (0..random.below(600)).for_each(|_| point());
            self.did("unhooked", away.len() as u64);
            for page in away {
                if random.below(2) == 0 {
                    page.put_back(cx);
                } else {
                    page.move_elsewhere(cx);
                }
            }
            self.let_go(cx, process);
            let pause = random.below(600);
            (0..pause).take_while(|_| !self.wished.get()).for_each(|_| point());
            cx.cond_resched();
        }
        // A wish that came too late.
        if let Some((process, _)) = self.wish.take() {
            self.let_go(cx, process);
        }
    }

    /// Memory that comes if it is not there, and goes if it can be had.
    fn come_and_go(&self, cx: &mut Cx<'_, 'h>) {
        let (frames, spec) = (self.world.vm.frames(), &self.world.guest);
        if !self.has_guest.replace(true) {
            // What is kept about arenas stays, in part, when they have gone.
            let memory = ManuallyDrop::new(Memory::new(self.added_bytes()));
            // SAFETY: of this size, and never given back; the frames are nobody else's.
            unsafe {
                frames.add(cx, spec, memory.ptr(), memory.bytes()).expect("room");
                frames.release_extent(cx, spec.extent);
            }
        } else if let Ok(all) = frames.alloc_contig_range(cx, spec.extent, &mut NoMigration) {
            // SAFETY: no program asks for these frames by number, and nobody else is at it.
            let removed = unsafe { frames.remove(cx, all, |_| panic!("no frame was widened")) };
            match removed {
                Ok(_) => {
                    self.has_guest.set(false);
                    self.did("arenas removed", 1);
                }
                // Of somebody who compacts.
                Err((all, RemoveError::Contended)) => _ = frames.free_extent(cx, all),
                Err((_, error)) => panic!("all of one that was added: {error}"),
            }
        }
    }

    fn added_bytes(&self) -> std::alloc::Layout {
        Frames::<Surroundings<'h>>::added_bytes(&self.world.guest).expect("valid")
    }
}
