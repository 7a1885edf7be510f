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

/// What is known of the machine, and what makes its figures noisy: a name and a text for each.
pub fn facts(e: &Environment) -> Vec<(String, String)> {
    let size = |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| Size(bytes).rounded());
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or("unknown".into());
    let (usable, nodes) = (e.cpu.allowed_cpus.len(), e.numa_nodes.len());
    let features = FEATURES.into_iter().filter(|name| e.cpu.features.iter().any(|feature| feature == name));
    let preemption = match (&e.kernel.preemption, e.kernel.preemption_dynamic) {
        (Some(model), _) => model,
        (None, true) => "dynamic, value not readable",
        (None, false) => "unknown",
    };
    let pools = e.hugetlb_pools.iter();
    let pools = pools.map(|pool| format!("hugetlb {}: {} pages", Size(pool.page_bytes), pool.total_pages.unwrap_or(0)));
    let mut facts = vec![
        (
            "CPU",
            format!(
                "{}, {usable} of {} CPUs usable, {nodes} node{}",
                or_unknown(&e.cpu.model),
                e.cpu.online_cpus,
                if nodes == 1 { "" } else { "s" }
            ),
        ),
        ("features", features.collect::<Vec<_>>().join(" ")),
        (
            "caches",
            format!("L1d {}, L2 {}, L3 {}", size(e.caches.l1d_bytes), size(e.caches.l2_bytes), size(e.caches.l3_bytes)),
        ),
        (
            "memory",
            format!(
                "{} in all, {} available, {} may be taken",
                size(e.memory.total_bytes),
                size(e.memory.available_bytes),
                size(e.memory.takeable_bytes)
            ),
        ),
        ("kernel", format!("{}, preemption {preemption}", e.kernel.release)),
        (
            "pages",
            format!(
                "THP {} (defrag {}), {}",
                or_unknown(&e.transparent_huge_pages.enabled),
                or_unknown(&e.transparent_huge_pages.defrag),
                pools.collect::<Vec<_>>().join(", ")
            ),
        ),
    ];
    facts.extend(e.regions.iter().map(|region| {
        let huge = region.huge_bytes.max(if region.page_bytes == e.base_page_bytes { region.bytes } else { 0 });
        let page = Size(region.page_bytes);
        (&*region.label, format!("{} of {} in {page} pages", Size(huge), Size(region.bytes)))
    }));
    facts.extend(e.guest.as_ref().map(|guest| {
        let (memory, interrupts) = (Size(guest.memory_bytes).rounded(), &guest.interrupt_controller);
        let text =
            format!("{} under {}, {} CPUs, {memory} of memory, {interrupts}", guest.kernel, guest.machine, guest.cpus);
        ("guest", text)
    }));
    facts.extend(checks::notes(e).map(|note| ("note", note)));
    facts.into_iter().map(|(what, text)| (what.to_owned(), text)).collect()
}

pub fn print(environment: &Environment) {
    println!("machine");
    facts(environment).iter().for_each(|(what, text)| println!("  {what:9} {text}"));
}
