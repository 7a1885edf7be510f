//! The environment block: what of the machine matters for the figures below it.

use crate::doctor::checks;
use hugemm_inspect::environment::Environment;
use hugemm_workloads::size::Size;

/// Features that clearing and flushing depend on, in the order in which they are printed.
const FEATURES: [&str; 12] = [
    "erms",
    "fsrm",
    "clzero",
    "movdir64b",
    "avx2",
    "avx512f",
    "invlpgb",
    "pcid",
    "invpcid",
    "pdpe1gb",
    "la57",
    "hypervisor",
];

pub fn print(environment: &Environment) {
    let e = environment;
    let size = |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| Size(bytes).rounded());
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or("unknown".into());
    println!("machine");
    println!(
        "  CPU       {}, {} of {} CPUs usable, {} node{}",
        or_unknown(&e.cpu.model),
        e.cpu.allowed_cpus.len(),
        e.cpu.online_cpus,
        e.numa_nodes.len(),
        if e.numa_nodes.len() == 1 { "" } else { "s" }
    );
    let features: Vec<&str> =
        FEATURES.into_iter().filter(|name| e.cpu.features.iter().any(|feature| feature == name)).collect();
    println!("  features  {}", features.join(" "));
    println!(
        "  caches    L1d {}, L2 {}, L3 {}",
        size(e.caches.l1d_bytes),
        size(e.caches.l2_bytes),
        size(e.caches.l3_bytes)
    );
    println!(
        "  memory    {} in all, {} available, {} may be taken",
        size(e.memory.total_bytes),
        size(e.memory.available_bytes),
        size(e.memory.takeable_bytes)
    );
    let preemption = match (&e.kernel.preemption, e.kernel.preemption_dynamic) {
        (Some(model), _) => model.clone(),
        (None, true) => "dynamic, value not readable".into(),
        (None, false) => "unknown".into(),
    };
    println!("  kernel    {}, preemption {preemption}", e.kernel.release);
    println!(
        "  pages     THP {} (defrag {}), {}",
        or_unknown(&e.transparent_huge_pages.enabled),
        or_unknown(&e.transparent_huge_pages.defrag),
        e.hugetlb_pools
            .iter()
            .map(|pool| format!("hugetlb {}: {} pages", Size(pool.page_bytes), pool.total_pages.unwrap_or(0)))
            .collect::<Vec<_>>()
            .join(", ")
    );
    for region in &e.regions {
        println!(
            "  {:9} {} of {} in {} pages",
            region.label,
            Size(region.huge_bytes.max(if region.page_bytes == e.base_page_bytes { region.bytes } else { 0 })),
            Size(region.bytes),
            Size(region.page_bytes)
        );
    }
    if let Some(guest) = &e.guest {
        println!(
            "  guest     {} under {}, {} CPUs, {} of memory, {}",
            guest.kernel,
            guest.machine,
            guest.cpus,
            Size(guest.memory_bytes).rounded(),
            guest.interrupt_controller
        );
    }
    for note in checks::notes(e) {
        println!("  note      {note}");
    }
}
