//! Tells programs' linkers where the script is.

fn main() {
    println!("cargo:rerun-if-changed=linker/hugemm-kernel.ld");
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo:rustc-link-search={here}/linker");
}
