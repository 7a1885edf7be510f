#!/usr/bin/env bash
# ArceOS's crates from the registry on hugemm: the tests of page-table-generic and of ax-alloc, and a unikernel under QEMU's emulation.
#
#   adapters/arceos/test.sh          their tests and ours on this machine; the unikernel with 1, 2 and 4 CPUs, x86-64 and arm64
#   adapters/arceos/test.sh bench    a table: the same kernel on hugemm and on ArceOS's own allocator
#
# Exit code 0: all as it should be. Otherwise the last lines say what is missing or what failed.
set -euo pipefail
cd "$(dirname "$0")"

toolchain=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
../../scripts/need.sh toolchain "$toolchain"
# ax-posix-api's build script reads C headers; an image is a program without its ELF headers.
../../scripts/need.sh program clang clang
../../scripts/need.sh program llvm-objcopy llvm
../../scripts/need.sh program mkfs.ext4 e2fsprogs
../../scripts/need.sh program qemu-system-x86_64 qemu-system-x86
../../scripts/need.sh program qemu-system-aarch64 qemu-system-arm
firmware=/usr/share/OVMF/OVMF_CODE.fd
../../scripts/need.sh program "$firmware" ovmf

# Whatever toolchain the caller has chosen for the rest.
export RUSTUP_TOOLCHAIN=$toolchain
x86=x86_64-unknown-none
arm=aarch64-unknown-none-softfloat

# image NAME TARGET MANIFEST FEATURES...: builds a kernel, and leaves its image at target/NAME-TARGET.
image() {
    local name=$1 target=$2 manifest=$3
    shift 3
    cargo build --release --locked --quiet --manifest-path "$manifest/Cargo.toml" --target "$target" \
        -Z build-std=core,alloc,compiler_builtins -Z build-std-features=compiler-builtins-mem "$@"
    llvm-objcopy -O binary "target/$target/release/hugemm-arceos-$manifest" "target/$name-$target"
}

# boot CPUS IMAGE: what the kernel says. With clock=shift=0,sleep=on the guest's clock counts its instructions while it has work, so nothing
# else that runs here changes a figure; with sleep=off the disk seems too slow to it. ArceOS turns the machine off at the end; a panic leaves it halted, until the time is up.
boot() {
    local machine
    truncate -s 64M target/disk
    mkfs.ext4 -q -F -O ^has_journal target/disk
    case $2 in
    *"$x86") machine=(qemu-system-x86_64 -machine q35 -cpu max -drive "if=pflash,format=raw,readonly=on,file=$firmware") ;;
    *) machine=(qemu-system-aarch64 -machine virt,gic-version=3 -cpu cortex-a72) ;;
    esac
    timeout 300 "${machine[@]}" -accel tcg ${clock:+-icount "$clock"} -smp "$1" -m "${memory-1G}" -nodefaults -no-user-config -no-reboot \
        -display none -monitor none -serial stdio -kernel "$2" \
        -drive if=none,id=disk,format=raw,file=target/disk -device nvme,drive=disk,serial=disk </dev/null >target/said 2>&1 || true
    # Without colours and carriage returns, from the first line of ours on.
    sed -e 's/\x1b\[[0-9;]*[a-zA-Z]//g' -e 's/\r//g' target/said | sed -n '/^allocator: /,$p'
    grep -q 'arceos: done' target/said || { tail -n 30 target/said; echo "failed: $2 on $1 CPUs" >&2; exit 1; }
}

if [ "${1-}" = bench ]; then
    for target in $arm $x86; do
        image hugemm "$target" kernel --features bench
        image buddy-slab "$target" kernel-defaults --features bench
        if [ "$target" = $arm ]; then
            echo "$target, one CPU, instructions for nanoseconds:"
            for which in hugemm buddy-slab; do clock=shift=0,sleep=on memory=4G boot 1 "target/$which-$target"; done
        fi
        echo "$target, nanoseconds:"
        for _ in 1 2 3; do
            for which in hugemm buddy-slab; do memory=4G boot 4 "target/$which-$target"; done
        done
    done
    exit
fi

# Tests of the crates themselves, from the registry's copies.
source_of() { cargo metadata --locked --format-version 1 | grep -o '"manifest_path":"[^"]*/'"$1"'-[0-9.]*/Cargo.toml"' | head -n 1 | cut -d'"' -f4 | xargs dirname; }
rm -rf target/theirs
mkdir -p target/theirs
cp -r "$(source_of page-table-generic)/tests/." target/theirs
(cd kernel-defaults && cargo fetch --locked --quiet && source_of ax-alloc) >target/ax-alloc
sed -n '/^#\[cfg(test)\]/,$p' "$(cat target/ax-alloc)/src/lib.rs" >target/theirs/ax_alloc.rs
# Their frames come from `hugemm_arceos_theirs::alloc` in place of `std::alloc`: an import, here and there within braces.
for file in target/theirs/[b-z]*.rs target/theirs/mocks/mod.rs; do
    inner=$(sed -n 's/^    \(alloc::{.*}\),$/use hugemm_arceos_theirs::\1;/p' "$file")
    sed -i -e 's/^use std::alloc::/use hugemm_arceos_theirs::alloc::/' -e '/^    alloc::{.*},$/d' "$file"
    echo "$inner" >>"$file"
done
cargo fmt -p ax-alloc -p hugemm-arceos -p hugemm-arceos-kernel --check
cargo test --locked --quiet -p ax-alloc -p hugemm-arceos -p hugemm-arceos-theirs --features hugemm-arceos-theirs/copy-from

for target in $x86 $arm; do
    image hugemm "$target" kernel
    for cpus in 1 2 4; do
        boot "$cpus" "target/hugemm-$target"
    done
done
# More than 4 GiB, so that there is memory that some devices cannot reach.
memory=5G boot 2 "target/hugemm-$x86"
echo "arceos: everything as it should be"
