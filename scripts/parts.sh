#!/usr/bin/env bash
# Makes targets one after another, and says at the end what each took of its budget.
#
#   scripts/parts.sh TARGET=SECONDS...
#
# The first target that fails is the last. Time over the budget is no failure: a machine may be slow or busy.
set -u

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }
row() { printf '%-15s %7s %7s  %s' "$@" | sed 's, *$,,'; }

table=$(row part time budget '') sum=0 budgets=0 failed=
for part in "$@"; do
    target=${part%=*} budget=${part#*=} start=$SECONDS
    ${MAKE:-make} --no-print-directory "$target" || failed=$target
    took=$((SECONDS - start)) sum=$((sum + SECONDS - start)) budgets=$((budgets + budget))
    over=
    [ "$took" -le "$budget" ] || over="over its budget"
    table+=$'\n'$(row "$target" "$(clock "$took")" "$(clock "$budget")" "${failed:+FAILED}$over")
    [ -z "$failed" ] || break
done
printf '\n%s\n%s\n' "$table" "$(row all "$(clock "$sum")" "$(clock "$budgets")" '')"
[ -z "$failed" ] || { echo "$failed failed"; exit 1; }
