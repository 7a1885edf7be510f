//! Links the program where it runs when it is built for bare metal.

fn main() {
    println!("cargo:rerun-if-changed=linker.ld");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none") {
        let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        println!("cargo:rustc-link-arg-bins=-T{here}/linker.ld");
    }
}
