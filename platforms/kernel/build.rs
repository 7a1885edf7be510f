//! Tells programs' linkers where the script is: there is one for each architecture.

fn main() {
    println!("cargo:rerun-if-changed=linker");
    let of = |name| std::env::var(name).unwrap_or_default();
    println!("cargo:rustc-link-search={}/linker/{}", of("CARGO_MANIFEST_DIR"), of("CARGO_CFG_TARGET_ARCH"));
}
