#!/bin/sh
# What each package costs in lines of Rust: its sources without unit tests, and all of its tests, examples and benches.
cd "$(dirname "$0")/.." || exit 1

# Lines of all files below a directory.
all() { find "$1" -name '*.rs' -not -path '*/target/*' -exec cat {} + | wc -l; }

# Lines of its src/ (or those of its packages) up to each file's test module, without files of tests.
own() {
    find "$1" -path '*/src/*' -name '*.rs' -not -path '*/target/*' -not -name 'tests.rs' -not -name '*_tests.rs' -not -path '*/tests/*' -exec awk '
        FNR == 1 { held = tests = 0 }
        held { if (/^(pub(\([a-z]*\))? )?mod [a-z_]* \{$/) tests = 1; held = 0 }
        /^#\[cfg\(.*test.*\)\]$/ { held = 1 }
        { lines += !tests }
        END { print lines + 0 }' {} + | awk '{ sum += $1 } END { print sum + 0 }'
}

printf '%-22s %8s %8s\n' package sources tests
for floor in crates adapters platforms services tools examples; do
    sources=0 tests=0
    for package in "$floor"/*/; do
        package=${package%/}
        lines=$(own "$package")
        rest=$(($(all "$package") - lines))
        printf '%-22s %8d %8d\n' "$package" "$lines" "$rest"
        sources=$((sources + lines)) tests=$((tests + rest))
    done
    printf '%-22s %8d %8d\n\n' "$floor/" "$sources" "$tests"
done
