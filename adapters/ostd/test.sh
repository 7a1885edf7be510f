#!/usr/bin/env bash
# Boots a small OSTD kernel on hugemm's frames and heap, under QEMU's emulation.
#
#   adapters/ostd/test.sh          our tests and OSTD's own at 1, 2, 4 and 8 CPUs; then mistakes that the tests must find
#   adapters/ostd/test.sh bench    a table: the same kernel on hugemm's allocators and on OSTD's defaults
#
# Exit code 0: all as it should be. Otherwise the last lines say what is missing or what failed.
set -euo pipefail
cd "$(dirname "$0")"

toolchain=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
../../scripts/need.sh toolchain "$toolchain"
../../scripts/need.sh program qemu-system-x86_64 qemu-system-x86

# Whatever toolchain the caller has chosen for the rest.
export RUSTUP_TOOLCHAIN=$toolchain
image=target/x86_64-unknown-none/release/hugemm-ostd-kernel

build() { cargo build --release --locked --quiet -p hugemm-ostd-kernel "$@"; }

# boot CPUS COMMAND [IMAGE]: what the kernel says; returns QEMU's exit code: 33 for success, 65 for failure, 124 for a hang.
# With clock=shift=0,sleep=off the guest's clock counts its instructions, so nothing else that runs here changes a figure.
boot() {
    timeout 300 qemu-system-x86_64 -machine q35 -accel tcg ${clock:+-icount "$clock"} -cpu max -smp "$1" -m 4G -nodefaults -no-user-config -no-reboot \
        -display none -monitor none -serial stdio -device isa-debug-exit,iobase=0xf4,iosize=0x4 \
        -kernel "${3-$image}" -append "$2" </dev/null
}

# expect CODE CPUS COMMAND [IMAGE]
expect() {
    local code=0
    boot "${@:2}" || code=$?
    [ "$code" = "$1" ] || { echo "failed: \"$3\" on $2 CPUs ended with exit code $code instead of $1" >&2; exit 1; }
}

if [ "${1-}" = bench ]; then
    build --features defaults
    cp "$image" "$image-defaults"
    build
    echo "one CPU, instructions for nanoseconds:"
    for which in "$image" "$image-defaults"; do clock=shift=0,sleep=off expect 33 1 bench "$which"; done
    echo "nanoseconds:"
    for _ in 1 2 3; do
        for which in "$image" "$image-defaults"; do expect 33 8 bench "$which"; done
    done
    exit
fi
cargo fmt --all --check
build
for cpus in 1 2 4 8; do expect 33 "$cpus" test; done
for plant in double leak short refusal; do
    echo "planted: $plant"
    expect 65 2 "test plant=$plant"
done
echo "ostd: everything as it should be"
