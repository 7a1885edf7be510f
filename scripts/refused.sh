#!/usr/bin/env bash
# A program on `DefaultSetup` is accepted where hugemm has page tables, and refused elsewhere, by no error but the one that says so.
#
#   scripts/refused.sh TARGET      a Rust target, without std
set -euo pipefail
cd "$(dirname "$0")/.."
[ "${1-}" ] || { echo "which target? scripts/refused.sh riscv64gc-unknown-none-elf" >&2; exit 2; }
sentence="hugemm has page tables for x86-64 and arm64 only"
case $1 in x86_64-* | aarch64-*) expected=accepted ;; *) expected=refused ;; esac

# What cargo has just checked, by the name that it gave it.
hugemm=$("${CARGO:-cargo}" check --quiet --locked --target "$1" -p hugemm --message-format=json |
    sed -n '/"reason":"compiler-artifact".*"name":"hugemm"/s/.*"\([^"]*libhugemm-[^"]*\.rmeta\)".*/\1/p')
[ -f "$hugemm" ] || { echo "refused.sh: no checked hugemm for $1" >&2; exit 1; }

# A folder of its own: the compiler replaces what it is told to write to, `/dev/null` too.
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
if said=$(rustc --edition 2024 --crate-type lib --emit metadata --out-dir "$made" --target "$1" \
    -L "dependency=$(dirname "$hugemm")" --extern "hugemm=$hugemm" - 2>&1 <<'PROGRAM'
#![no_std]
use hugemm::prelude::{DefaultSetup, SingleCpu, Vm};

pub fn program(vm: Vm<'_, DefaultSetup<SingleCpu>>) {
    drop(vm);
}
PROGRAM
); then found=accepted; else found=refused; fi
# Each error is this one, or says that there were some.
others=$(grep '^error' <<<"$said" | grep -v -e "$sentence" -e '^error: aborting' || true)
if [ "$found" != "$expected" ] || [ "$others" ] || { [ $found = refused ] && ! grep -q "$sentence" <<<"$said"; }; then
    echo "$said" >&2
    echo "a program on DefaultSetup is $found on $1; expected: $expected, saying \"$sentence\"" >&2
    exit 1
fi
echo "a program on DefaultSetup is $found on $1"
