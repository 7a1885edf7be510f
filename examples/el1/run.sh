#!/usr/bin/env bash
# Builds the example and boots it on two CPUs under QEMU's emulation. Exit code 0: it found everything as it should be.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=aarch64-unknown-none-softfloat
"${CARGO:-cargo}" build --locked --target "$target" -p hugemm-example-el1
image=${CARGO_TARGET_DIR:-target}/$target/debug/hugemm-example-el1
code=0
# The machine switches itself off, which is 0 in any case; 124 is a hang.
said=$(timeout 120 qemu-system-aarch64 -machine virt,gic-version=2 -accel tcg -cpu max -smp 2 -m 128M -nodefaults -no-user-config \
    -no-reboot -display none -monitor none -serial stdio -kernel "$image" </dev/null) || code=$?
printf '%s\n' "$said"
if [ "$code" != 0 ] || [[ $said != *"el1: everything is back"* ]]; then
    echo "el1: the example failed; QEMU ended with exit code $code" >&2
    exit 1
fi
