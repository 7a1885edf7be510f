//! Links the image by the kernel's script when it is built for bare metal.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none") {
        println!("cargo:rustc-link-arg-bins=-Thugemm-kernel.ld");
    }
}
