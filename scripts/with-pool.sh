#!/bin/sh
# Runs a command on a machine whose pool of 2 MiB pages has so many pages at least, as hosts' have: where root runs it, they are put there, and
# taken away afterwards. No test that takes from the pool has its turn while it is changed.
#
#   scripts/with-pool.sh PAGES COMMAND...
pool=/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
more=$(($1 - $(cat $pool 2>/dev/null || echo "$1")))
shift
# How many more it has after that, which may be fewer.
change() {
    flock -w 60 "${TMPDIR:-/tmp}/hugemm-lease-pool.lock" sh -c \
        'had=$(cat "$2"); echo $((had + $1)) >"$2"; echo $(($(cat "$2") - had))' - "$1" $pool 2>/dev/null || echo 0
}
if [ "$more" -gt 0 ]; then
    more=$(change "$more")
    trap 'change "-$more" >/dev/null' EXIT
    trap 'exit 130' INT TERM
fi
"$@"
