//! What the platform's traits provide, and that a reference to hardware is that hardware.

use hugemm_base::platform::StoreBuffer;
use hugemm_base::{
    Counters, Cpu, CpuId, Extent, Invalidation, NodeId, Pfn, PhysAddr, PhysMap, PreemptModel, SingleCpu, TlbHw,
    TlbScope,
};
use std::cell::RefCell;

/// No more than the trait demands.
#[derive(Default)]
struct Least(Counters);

// SAFETY: each test runs on one thread, and nothing interrupts it. The operating system fences when it switches
// threads.
unsafe impl Cpu for Least {
    fn current(&self) -> CpuId {
        CpuId::new(0)
    }

    unsafe fn pin(&self) -> usize {
        0
    }

    unsafe fn unpin(&self, _state: usize) {}

    unsafe fn cond_resched(&self) {}

    fn counters(&self) -> &Counters {
        &self.0
    }
}

#[test]
fn what_is_provided_grants_nothing_and_forbids_nothing() {
    let least = Least::default();
    assert_eq!((least.cpus(), least.preempt_model()), (1, PreemptModel::Voluntary));
    assert!(least.interrupts_on() && least.may_sleep());
    // SAFETY: nothing belongs to this CPU, and nothing was granted.
    assert!(unsafe { !least.migrate(CpuId::new(1)) && !least.vector_begin() });
    let buffer: Option<&dyn StoreBuffer> = least.store_buffer();
    assert!(buffer.is_none());
}

#[test]
fn preemption_models() {
    assert_eq!(PreemptModel::ALL.map(PreemptModel::name), ["none", "voluntary", "lazy", "full"]);
    assert_eq!(PreemptModel::ALL.map(PreemptModel::is_preemptible), [false, false, true, true]);
    assert_eq!((CpuId::new(7).to_string(), NodeId::new(1).to_string()), ("cpu7".to_string(), "node1".to_string()));
}

/// Hardware without tags and broadcasts, or with them; it writes down what it is asked.
struct Hardware<const RICH: bool>(RefCell<Vec<String>>);

macro_rules! hardware {
    ($rich:literal { $($more:tt)* }) => {
        // SAFETY: nobody walks any table.
        unsafe impl TlbHw for Hardware<$rich> {
            unsafe fn invalidate(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) {
                self.0.borrow_mut().push(format!("invalidate {cpu} {scope:?} {}", what.tables));
            }

            fn interrupt(&self, cpu: CpuId, first: CpuId, cpus: u64, serve: &mut dyn FnMut(CpuId)) {
                self.0.borrow_mut().push(format!("interrupt {cpu} {first} {cpus:#b}"));
                serve(CpuId::new(9));
            }

            unsafe fn load(&self, cpu: CpuId, root: PhysAddr, tag: usize, keep: bool) {
                self.0.borrow_mut().push(format!("load {cpu} {root} {tag} {keep}"));
            }

            unsafe fn unload(&self, cpu: CpuId) {
                self.0.borrow_mut().push(format!("unload {cpu}"));
            }

            $($more)*
        }
    };
}

hardware!(false {});
hardware!(true {
    fn broadcast(&self, cpu: CpuId, scope: TlbScope, what: &Invalidation) -> Option<u64> {
        self.0.borrow_mut().push(format!("broadcast {cpu} {scope:?} {}", what.tables));
        Some(7)
    }

    fn sync(&self, cpu: CpuId) {
        self.0.borrow_mut().push(format!("sync {cpu}"));
    }

    fn tags(&self) -> usize {
        6
    }
});

/// Asks everything once; what it was told.
fn ask<H: TlbHw>(hw: H) -> (Option<u64>, usize, Vec<CpuId>) {
    let (here, mut served) = (CpuId::new(2), Vec::new());
    // SAFETY: there is no hardware.
    unsafe { hw.invalidate(here, TlbScope::Space, &Invalidation::ALL) };
    hw.interrupt(here, CpuId::new(64), 0b101, &mut |cpu| served.push(cpu));
    // SAFETY: there is no hardware.
    unsafe { hw.load(here, PhysAddr::new(0x5000), 3, true) };
    // SAFETY: there is no hardware.
    unsafe { hw.unload(here) };
    let broadcast = hw.broadcast(here, TlbScope::Kernel, &Invalidation::ALL);
    hw.sync(here);
    (broadcast, hw.tags(), served)
}

#[test]
fn a_reference_to_hardware_is_that_hardware() {
    const ASKED: [&str; 4] =
        ["invalidate cpu2 Space true", "interrupt cpu2 cpu64 0b101", "load cpu2 0x5000 3 true", "unload cpu2"];
    let (plain, rich) = (Hardware::<false>(RefCell::default()), Hardware::<true>(RefCell::default()));
    assert_eq!(ask(&plain), (None, 1, vec![CpuId::new(9)]));
    assert_eq!(*plain.0.borrow(), ASKED);
    assert_eq!(ask(&rich), (Some(7), 6, vec![CpuId::new(9)]));
    assert_eq!(rich.0.borrow()[..4], ASKED);
    assert_eq!(rich.0.borrow()[4..], ["broadcast cpu2 Kernel true", "sync cpu2"]);
}

/// The platform lives in the first frame of its memory: nobody gets that one, neither to own nor to see.
#[test]
fn a_single_cpu_keeps_its_own_frame() {
    #[repr(align(4096))]
    struct Pages([[u8; 4096]; 4]);
    let (all, mut pages) = (Extent::new(Pfn::new(8), 4).expect("valid"), Box::new(Pages([[0; 4096]; 4])));
    // SAFETY: the test's memory, whose numbers nobody else uses.
    let (cx, ram) = unsafe { SingleCpu::start(all, pages.0.as_mut_ptr().cast()) };
    assert_eq!(ram.extent(), all.slice(1, 4));
    assert!(cx.platform().open(all.slice(0, 1), None).is_none());
    assert_eq!(cx.platform().open(ram.extent(), None).map(|window| window.pages), Some(3));
}
