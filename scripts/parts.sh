#!/usr/bin/env bash
# Makes targets, and says at the end what each took of its budget.
#
#   scripts/parts.sh "TARGET=SECONDS..."...
#
# The targets of one argument are made one after another, beside those of the other arguments: what waits, or has one thread, leaves a
# CPU to the others. Where there is more than one argument each line begins with its target. After one that fails no other is begun.
# Time over the budget is no failure: a machine may be slow or busy.
set -u

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }
row() { printf '%-15s %7s %7s  %s\n' "$@" | sed 's, *$,,'; }

notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT
# What a shell starts in the background does not hear a terminal's Ctrl-C.
trap 'trap - INT TERM; kill 0' INT TERM
many=$(($# > 1))
show() { if [ "$many" = 1 ]; then sed -u "s/^/$target: /"; else cat; fi; }
queue() {
    for part in $1; do
        [ ! -e "$notes/failed" ] || return
        target=${part%=*} budget=${part#*=} start=$SECONDS verdict=
        ${MAKE:-make} --no-print-directory "$target" 2>&1 | show
        [ "${PIPESTATUS[0]}" = 0 ] || verdict=FAILED
        took=$((SECONDS - start))
        [ "$took" -le "$budget" ] || verdict+="${verdict:+, }over its budget"
        row "$target" "$(clock "$took")" "$(clock "$budget")" "$verdict" >>"$notes/rows"
        case $verdict in FAILED*) echo "$target" >>"$notes/failed" ;; esac
    done
}
for parts in "$@"; do queue "$parts" & done
wait
printf '\n%s\n%s\n' "$(row part time budget '')" "$(cat "$notes/rows")"
row all "$(clock "$SECONDS")" '' ''
[ ! -e "$notes/failed" ] || { echo "failed: $(paste -sd ' ' "$notes/failed")"; exit 1; }
