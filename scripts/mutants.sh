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

# Runs a test program, for cargo, and ends it at its first test that fails; when it has had three times the seconds of CPU
# time that the file MUTANTS_USUAL has for it, and 20 s at least; or when it waits: twice 15 s without a line or 0.3 s of CPU
# time, which the busiest machine gives. Adds to the file MUTANTS_NOTES how much it had, or that it hung, and its name.
if [ "${1-}" = --until-failure ]; then
    shift
    [ -z "${MUTANTS_USUAL-}" ] || ulimit -t "$(awk -v name="${1##*/}" '
        $2 == name { usual = $1 }
        END { limit = 3 * (usual + 1); print limit < 20 ? 20 : limit }
    ' "$MUTANTS_USUAL")"
    exec 3< <(exec "$@" 2>&1)
    program=$! line='' had=0 idle=0 tick=$(getconf CLK_TCK)
    while read=0 && { IFS= read -r -t 15 part <&3 || read=$?; } && line+=$part && [ "$read" != 1 ]; do
        if [ "$read" = 0 ]; then
            printf '%s\n' "$line"
            case $line in test\ *\ FAILED) kill -KILL "$program"; exit 101 ;; esac
            line='' idle=0
        else
            now=$(awk '{ print $14 + $15 }' "/proc/$program/stat")
            idle=$((10 * (now - had) < 3 * tick ? idle + 1 : 0)) had=$now
            [ "$idle" -lt 2 ] || kill -KILL "$program"
        fi
    done
    status=0 && wait "$program" || status=$?
    times >"$MUTANTS_NOTES.times"
    case $status in
        137 | 152) echo hung ;; # SIGKILL, SIGXCPU
        *) awk -F '[ms ]+' 'NR == 2 { print int(60 * ($1 + $3) + $2 + $4) }' "$MUTANTS_NOTES.times" ;;
    esac | sed "s/$/ ${1##*/}/" >>"$MUTANTS_NOTES"
    exit "$status"
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
# Not `codegen`, which looks at release builds, and not loom's, which are empty without loom. The sources' own come first.
package=$(sed -n 's/^name = "\(.*\)"$/\1/p' "crates/$crate/Cargo.toml" | head -n 1)
tests=()
for file in "crates/$crate"/tests/*.rs "crates/$crate"/tests/*/main.rs; do
    name=${file#"crates/$crate/tests/"} name=${name%.rs} name=${name%/main}
    case $name in '*' | codegen | loom*) ;; *) tests+=("--test $name") ;; esac
done
while read -r other test; do
    tests+=("--package $other --test $test")
done < <(sed -n '/^\[package\.metadata\.mutants\]/,/^$/s/^also = \[\(.*\)\]$/\1/p' "crates/$crate/Cargo.toml" | tr ',' '\n' | tr -d '"')

# Short soaks: a mutant that lives through these is looked at by somebody anyway. And none fails by what another has left.
export CARGO_TARGET_DIR=$work/target CARGO_TERM_COLOR=never PROPTEST_CASES=64 PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
common=(--profile mutants --config "target.'cfg(all())'.runner = ['$PWD/scripts/mutants.sh', '--until-failure']")

# What the tests take as they are, in CPU time, and that they pass.
export MUTANTS_NOTES=$out/usual
cd "$tree"
echo "mutants: building and running the tests of $package as they are" >&2
test_them() { $cargo test --locked "${common[@]}" --package "$package" --lib ${tests[*]} "$@" >"$out/baseline.log" 2>&1; }
test_them --no-run && test_them ||
    { tail -n 20 "$out/baseline.log" >&2; fail 1 "the tests of $package fail before anything is changed"; }
export MUTANTS_USUAL=$out/usual MUTANTS_NOTES=$out/notes

# A program that has 3 s of CPU time or more is only run if the others have noticed nothing.
quick='' slow=''
for test in "${tests[@]}"; do
    awk -v name="${test##* }-" 'index($2, name) == 1 && $1 >= 3 { exit 1 }' "$out/usual" && quick+=" $test" || slow+=" $test"
done

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

# One mutant, by such tests, of which no other is built; one mutant is a shard of its own. Each program has limits of its own
# (above), so all of them together need none.
judge() {
    local args=("${common[@]}" "${@:2}")
    $cargo mutants --package "$package" --in-place --baseline skip --timeout 86400 --shard "$1/$total" --sharding round-robin \
        --output "$out" --annotations none "${args[@]/#/--cargo-arg=}" >>"$out/log" 2>&1 || [ $? -le 3 ] ||
        { tail -n 20 "$out/log" >&2; fail 1 "cargo-mutants failed"; }
}

# Tries one mutant. Its name is added to the list of what became of it.
try() {
    : >"$MUTANTS_NOTES"
    # What the tests in the sources see needs no other program to be built.
    for list in --lib "$quick" "$slow"; do
        [ -n "$list" ] || continue
        judge "$1" $list
        [ -s "$out/mutants.out/missed.txt" ] || break
    done
    for what in caught missed unviable; do
        list=$what
        [ $what != caught ] || ! grep -q hung "$MUTANTS_NOTES" || list=hung
        sed "s/^/$1:/" "$out/mutants.out/$what.txt" >>"$out/$list.txt"
    done
}
count() { wc -l <"$out/$1.txt"; }

for what in caught missed hung unviable; do : >"$out/$what.txt"; done
while IFS=: read -r index _; do
    viable=$(($(count caught) + $(count missed) + $(count hung)))
    [ "$viable" -lt "$sample" ] || break
    try "$index"
    printf '\rmutants: %s of %s, %s missed, %s hung ' "$((viable + 1))" "$sample" "$(count missed)" "$(count hung)" >&2
done <"$out/order.txt"
echo >&2

missed=$(count missed) hung=$(count hung) viable=$(($(count caught) + $(count missed) + $(count hung)))
cut -d: -f2- "$out/missed.txt" | sort -V | sed 's/^/missed: /'
cut -d: -f2- "$out/hung.txt" | sort -V | sed 's/^/hangs (caught): /'
share=$((viable == 0 ? 0 : 1000 * missed / viable))
echo "$package, seed $seed: $viable viable of $total, $((viable - missed)) caught ($hung hung)," \
    "$missed missed ($((share / 10)).$((share % 10)) %), $(count unviable) did not compile"
[ $((20 * missed)) -le "$viable" ] || fail 1 "more than 5 % survive; docs/mutants.md says what to do"
