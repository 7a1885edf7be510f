#!/usr/bin/env bash
# The public API of each published crate against that of a tag or commit: what breaks it asks for another version. A crate that was not there
# then is named and left out. The facade only hands on what the others have, and is found unchanged.
#
#   scripts/semver.sh BASE
set -euo pipefail
cd "$(dirname "$0")/.."
[ "${1-}" ] || { echo "say against what: make semver BASE=TAG" >&2; exit 2; }
base=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "no tag or commit '$1' here; git tag lists tags" >&2; exit 2; }
if ! command -v cargo-semver-checks >/dev/null 2>&1; then
    echo "missing: cargo semver-checks; install it with: cargo install --locked cargo-semver-checks" >&2
    exit 1
fi
without=()
for crate in $("${CARGO:-cargo}" tree --workspace --locked --depth 0 --prefix none | sed -n 's/ v[0-9].*//p' | sort -u); do
    if ! git grep --quiet "^name = \"$crate\"\$" "$base" -- '*/Cargo.toml'; then
        echo "$crate: not there at $1"
        without+=(--exclude "$crate")
    fi
done
"${CARGO:-cargo}" semver-checks --workspace --baseline-rev "$base" ${without[@]+"${without[@]}"} </dev/null
