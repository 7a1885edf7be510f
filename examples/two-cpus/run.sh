#!/usr/bin/env bash
# Builds the example and boots it on two CPUs under QEMU's emulation. Exit code 0: it found everything as it should be.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${CARGO:-cargo}" build --locked --target x86_64-unknown-none -p hugemm-example-two-cpus
image=${CARGO_TARGET_DIR:-target}/x86_64-unknown-none/debug/hugemm-example-two-cpus
code=0
# 33 is what the example ends with; 0 would be a reset, 124 a hang.
said=$(timeout 120 qemu-system-x86_64 -machine q35 -accel tcg -cpu max -smp 2 -m 128M -nodefaults -no-user-config -no-reboot \
    -display none -monitor none -serial stdio -device isa-debug-exit,iobase=0xf4,iosize=0x4 -kernel "$image" </dev/null) || code=$?
printf '%s\n' "$said"
if [ "$code" != 33 ] || [[ $said != *"two-cpus: everything is back"* ]]; then
    echo "two-cpus: the example failed; QEMU ended with exit code $code" >&2
    exit 1
fi
