#!/usr/bin/env bash
# What hugemm adds to a kernel's text: the code of two small kernels by crate, with fat LTO, at opt-level 3 and s. Code that is inlined
# counts for the function that it went into, and code of the standard library for the crate whose types it was made for (v0 symbols say
# so), so a crate's share is what would go without it, as nearly as symbols tell.
#
#   scripts/size.sh            one line per kernel and level
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}/size
for level in 3 s; do
    CARGO_PROFILE_RELEASE_LTO=fat CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1 CARGO_PROFILE_RELEASE_OPT_LEVEL=$level \
        CARGO_PROFILE_RELEASE_PANIC=abort "${CARGO:-cargo}" build --quiet --locked --release \
        --target x86_64-unknown-none --config 'target.x86_64-unknown-none.rustflags=["-Csymbol-mangling-version=v0"]' \
        --target-dir "$target" -p hugemm-example-ring0 -p hugemm-example-two-cpus
    for kernel in ring0 two-cpus; do
        nm --demangle --print-size --radix=d "$target/x86_64-unknown-none/release/hugemm-example-$kernel" |
            awk -v what="$kernel at opt-level $level" '
                # A symbol of a crate, or what implements something for one of its types.
                tolower($3) == "t" {
                    size = $2 + 0; name = $0; all += size
                    if (match(name, /hugemm_[a-z0-9_]+/)) of[substr(name, RSTART, RLENGTH)] += size
                }
                END {
                    printf "%s: %d KB of text", what, all / 1000
                    for (crate in of) if (crate !~ /example/) { printf ", %s %d", crate, of[crate] / 1000; sum += of[crate] }
                    printf "; hugemm %d\n", sum / 1000
                }'
    done
done
