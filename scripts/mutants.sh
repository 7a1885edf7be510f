#!/usr/bin/env bash
# Breaks a crate on purpose, one small change at a time, and says which changes no test notices.
#
#   scripts/mutants.sh CRATE [SAMPLE] [SEED]
#
#   CRATE   a directory under crates/
#   SAMPLE  how many changes that compile are tried, 60 unless said; `all` of them
#   SEED    any text; the same seed draws the same sample from the same sources. The commit's id unless said
#
# Exit code 0: at most 5 % of the sample survived. 1: more did, or the tests fail as they are. 2: wrong arguments.
# docs/mutants.md says how it is done and what to do about survivors.
set -euo pipefail

fail() { echo "mutants: $2" >&2; exit "$1"; }

# Runs a test program, for cargo, and ends it at its first test that fails.
if [ "${1-}" = --until-failure ]; then
    shift
    exec 3< <(exec "$@" 2>&1)
    program=$!
    while IFS= read -r line <&3; do
        printf '%s\n' "$line"
        case $line in test\ *\ FAILED) kill -KILL "$program"; exit 101 ;; esac
    done
    wait "$program"
    exit
fi

cd "$(dirname "$0")/.."
crate=${1-} sample=${2:-60} seed=${3:-$(git rev-parse HEAD)}
[ -n "$crate" ] || fail 2 "which crate? CRATE is one of: $(cd crates && echo *)"
[ -f "crates/$crate/Cargo.toml" ] || fail 2 "no crates/$crate; CRATE is one of: $(cd crates && echo *)"
case $sample in all) ;; '' | *[!0-9]* | 0*) fail 2 "SAMPLE is a number of mutants or 'all', not '$sample'" ;; esac
cargo=${CARGO:-cargo}
command -v cargo-mutants >/dev/null 2>&1 || $cargo install --locked cargo-mutants ||
    fail 1 "cargo-mutants is missing; install it with: cargo install --locked cargo-mutants"

# A copy of the sources, to be changed in place: each build starts from the last one. Only what differs is copied, so that the
# next run does too, and a mutant that an interrupted run left is undone.
work=$PWD/target/mutants tree=$PWD/target/mutants/tree out=$PWD/target/mutants/$crate
rm -rf "$out" && mkdir -p "$tree" "$out"
git ls-files --cached --others --exclude-standard | sort >"$out/sources.txt"
while IFS= read -r file; do
    if [ -f "$file" ] && ! cmp -s "$file" "$tree/$file"; then mkdir -p "$tree/$(dirname "$file")" && cp "$file" "$tree/$file"; fi
done <"$out/sources.txt"
(cd "$tree" && find . -type f | sed 's,^\./,,' | sort | comm -23 - "$out/sources.txt" | tr '\n' '\0' | xargs -0 -r rm --)

# A crate's own tests judge it, and those of others that its manifest names, as "package test":
#   [package.metadata.mutants]
#   also = ["hugemm-reclaim spaces"]
# Not `codegen`, which looks at release builds, and not loom's, which are empty without loom.
package=$(sed -n 's/^name = "\(.*\)"$/\1/p' "crates/$crate/Cargo.toml" | head -n 1)
tests=(--lib)
for file in "crates/$crate"/tests/*.rs "crates/$crate"/tests/*/main.rs; do
    name=${file#"crates/$crate/tests/"} name=${name%.rs} name=${name%/main}
    case $name in '*' | codegen | loom*) ;; *) tests+=(--test "$name") ;; esac
done
while read -r other test; do
    tests+=(--package "$other" --test "$test")
done < <(sed -n '/^\[package\.metadata\.mutants\]/,/^$/s/^also = \[\(.*\)\]$/\1/p' "crates/$crate/Cargo.toml" | tr ',' '\n' | tr -d '"')

# Short soaks: a mutant that lives through these is looked at by somebody anyway.
export CARGO_TARGET_DIR=$work/target CARGO_TERM_COLOR=never PROPTEST_CASES=64
common=(--profile mutants --config "target.'cfg(all())'.runner = ['$PWD/scripts/mutants.sh', '--until-failure']")

# How long the tests take as they are, and that they pass; a mutant has three times that, and 20 s at least.
cd "$tree"
echo "mutants: building and running the tests of $package as they are" >&2
test_them() { $cargo test --locked "${common[@]}" --package "$package" "${tests[@]}" "$@" >"$out/baseline.log" 2>&1; }
test_them --no-run && start=$SECONDS && test_them ||
    { tail -n 20 "$out/baseline.log" >&2; fail 1 "the tests of $package fail before anything is changed"; }
limit=$((3 * (SECONDS - start + 1)))
[ "$limit" -ge 20 ] || limit=20

# The order in which mutants are tried, as "index name": by chance within a file, and files mixed by how many they have, so that
# each first part of it is a fair sample of the crate.
yes "$seed" | head -c 4096 >"$out/seed" || true
$cargo mutants --list --package "$package" >"$out/all.txt"
total=$(wc -l <"$out/all.txt")
[ "$total" -gt 0 ] || fail 2 "$package has nothing that can be changed"
[ "$sample" != all ] || sample=$total
cut -d: -f1 "$out/all.txt" | sort -u | sort -R --random-source="$out/seed" >"$out/files.txt"
awk '{ print NR - 1 ":" $0 }' "$out/all.txt" | sort -t: -k2 -R --random-source="$out/seed" | awk -F: '
    FNR == NR { turn[$1] = files++; next }
    { file[++n] = $2; line[n] = $0; place[n] = size[$2]++ }
    END { for (i = 1; i <= n; i++) printf "%.9f %s\n", (place[i] + turn[file[i]] / files) / size[file[i]], line[i] }
' "$out/files.txt" - | sort -s -n -k1,1 | cut -d' ' -f2- >"$out/order.txt"

# Tries one mutant for so many seconds; one is a shard of its own. Its name is added to the list of what became of it.
try() {
    $cargo mutants --package "$package" --in-place --baseline skip --timeout "$2" --shard "$1/$total" --sharding round-robin \
        --output "$out" --annotations none "${common[@]/#/--cargo-arg=}" -- "${tests[@]}" >>"$out/log" 2>&1 || [ $? -le 3 ] ||
        { tail -n 20 "$out/log" >&2; fail 1 "cargo-mutants failed"; }
    for what in caught missed timeout unviable; do sed "s/^/$1:/" "$out/mutants.out/$what.txt" >>"$out/$what.txt"; done
}
count() { wc -l <"$out/$1.txt"; }

for what in caught missed timeout unviable; do : >"$out/$what.txt"; done
while IFS=: read -r index _; do
    viable=$(($(count caught) + $(count missed) + $(count timeout)))
    [ "$viable" -lt "$sample" ] || break
    try "$index" "$limit"
    printf '\rmutants: %s of %s, %s missed, %s over %s s ' "$((viable + 1))" "$sample" "$(count missed)" "$(count timeout)" "$limit" >&2
done <"$out/order.txt"
echo >&2

# A mutant that took long may only have met a busy machine: each once more, with three times the time.
mv "$out/timeout.txt" "$out/slow.txt" && : >"$out/timeout.txt"
while IFS=: read -r index _; do try "$index" $((3 * limit)); done <"$out/slow.txt"

missed=$(count missed) hung=$(count timeout) viable=$(($(count caught) + $(count missed) + $(count timeout)))
cut -d: -f2- "$out/missed.txt" | sort -V | sed 's/^/missed: /'
cut -d: -f2- "$out/timeout.txt" | sort -V | sed 's/^/hangs (caught): /'
share=$((viable == 0 ? 0 : 1000 * missed / viable))
echo "$package, seed $seed: $viable viable of $total, $((viable - missed)) caught ($hung by the time limit)," \
    "$missed missed ($((share / 10)).$((share % 10)) %), $(count unviable) did not compile"
[ $((20 * missed)) -le "$viable" ] || fail 1 "more than 5 % survive; docs/mutants.md says what to do"
