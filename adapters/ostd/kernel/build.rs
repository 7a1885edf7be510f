//! Links the kernel where OSTD expects it.

fn main() {
    println!("cargo::rerun-if-changed=x86_64.ld");
    println!("cargo::rustc-link-arg=-T{}/x86_64.ld", env!("CARGO_MANIFEST_DIR"));
}
