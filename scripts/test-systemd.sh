#!/bin/sh
# The Debian package under a real systemd, in a root of its own whose changes are forgotten: notify, socket activation, the policy, files
# that the manager holds over `kill -9` and `stop`, a policy that is read again, removal. Needs root; changes nothing but the kernel's pool
# of huge pages, for as long.
#
#   scripts/test-systemd.sh PACKAGE [ROOT]
#
# ROOT has the systemd: this machine's own root, or what `debootstrap --include=systemd trixie ROOT` makes.
set -eu

skip() { echo "skipped: $*"; exit 0; }

# In the container, as root.
if [ "${1-}" = inside ]; then
    fail() { echo "FAILED: $*"; systemctl --no-pager --full status hugemm-lease.service | tail -30; exit 1; }
    # `is WHAT EXPECTED COMMAND…`: what a command says.
    is() { what=$1 want=$2; shift 2; said=$("$@" 2>&1) || :; [ "$said" = "$want" ] || fail "$what: '$said' is not '$want'"; }
    # `has WHAT PART COMMAND…`: what it says has this in it.
    has() { what=$1 part=$2; shift 2; said=$("$@" 2>&1) || :; case $said in *"$part"*) ;; *) fail "$what: no '$part' in '$said'" ;; esac; }
    ok() { echo "test $* ... ok"; }
    unit() { systemctl show --property "$1" --value hugemm-lease.service; }
    json() { hugemm pool status --json | sed "s/.*\"$1\":\([^]},]*\).*/\1/"; }
    becomes() { who=$1; shift; exec setpriv --reuid "$who" --regid "$who" --clear-groups hugemm lease 2MB --require --fd 9 -- "$@"; }
    user() { (becomes "$@"); }
    until_is() { for _ in $(seq 300); do "$@" > /dev/null 2>&1 && return; sleep 0.1; done; fail "never: $*"; }
    idle() { hugemm pool status --json | grep -q '"leases":\[\]'; }
    kept() { hugemm lease 2MB --require --keep cache --secret /root/secret --fd 9 -- true; }
    cd /
    PATH=/usr/sbin:/usr/bin:/sbin:/bin
    LC_ALL=C
    export PATH LC_ALL

    dpkg --install /package.deb > /dev/null
    is "after the installation" inactive systemctl is-active hugemm-lease.socket
    echo 'HUGEMM_POOL="--size 8MB --shape 2MBx4 --policy /etc/hugemm/lease.policy"' > /etc/hugemm/lease.conf
    echo 'uid 61001 4MB' > /etc/hugemm/lease.policy
    # As one that is enabled: the manager forgets what it holds for a unit that nothing names, once that is stopped.
    systemctl --quiet add-wants basic.target hugemm-lease.service
    ok installed

    systemctl start hugemm-lease.socket
    is "before anybody asks" inactive systemctl is-active hugemm-lease.service
    hugemm pool status --wait 60 > /dev/null || fail "nothing is filled"
    is "after somebody has asked" active systemctl is-active hugemm-lease.service
    is "it said that it is ready" running unit SubState
    has "its files are held" 4 unit NFileDescriptorStore
    ok "the socket starts it, and it says that it is ready"

    user 61001 sh -c 'exec test -w /proc/self/fd/9' || fail "a user of the policy has no lease"
    has "a stranger" "no line of the daemon's policy names this user" user 61002 true
    # The unit's sandbox keeps the daemon from nothing that it needs: it counts what is out, and what is left of it.
    becomes 61001 sleep 100 2> /dev/null & first=$!
    becomes 61001 sleep 100 2> /dev/null & second=$!
    until_is sh -c 'hugemm pool status --json | grep -q "\"lease\":.*\"lease\":"'
    has "more than the policy allows" "4194304 leased already" user 61001 true
    ok "a policy is asked through the socket"

    printf 'uid 61001 4MB\nuid 61002 4MB\n' > /etc/hugemm/lease.policy
    until_is user 61002 true
    has "what is out counts still" "4194304 leased already" user 61001 true
    echo 'uid x' > /etc/hugemm/lease.policy
    sleep 0.5
    has "a wrong line changes nothing" "4194304 leased already" user 61001 true
    printf 'uid 61001 4MB\n' > /etc/hugemm/lease.policy
    kill "$first" "$second"
    until_is idle
    ok "another policy holds without a new start"

    kept || fail "nothing is kept"
    until_is idle
    for how in "kill -9 $(unit MainPID)" "systemctl restart hugemm-lease.service"; do
        hugemm pool status --wait 60 > /dev/null || fail "nothing is filled"
        before=$(unit MainPID)
        $how
        until_is sh -c '[ "$(systemctl show --property MainPID --value hugemm-lease.service)" != '"$before"' ]'
        hugemm pool status --wait 60 > /dev/null || fail "not there again"
        is "$how: filled anew" 0 json filled_bytes
        has "$how" '"name":"cache"' hugemm pool status --json
        kept || fail "$how: kept memory is lost"
        until_is idle
    done
    ok "what is filled and what is kept outlives it"

    systemctl stop hugemm-lease.service
    has "a status starts nothing" "no lease daemon" hugemm pool status
    is "after stop" inactive systemctl is-active hugemm-lease.service
    systemctl start hugemm-lease.service
    if [ "$(systemctl --version | sed -n 's/^systemd \([0-9]*\).*/\1/p')" -ge 254 ]; then
        has "after stop" '"name":"cache"' hugemm pool status --json
        kept || fail "kept memory is lost by stop"
        ok "what is kept outlives a stop"
    else
        has "after stop" '"kept":[]' hugemm pool status --json
        ok "a stop gives all back (systemd before 254 keeps nothing)"
    fi
    until_is idle

    dpkg --remove hugemm > /dev/null
    is "after removal" inactive systemctl is-active hugemm-lease.service
    ok "removed while it runs"
    exit 0
fi

package=${1:?"which package? make dist makes one"}
root=$(realpath "${2:-/}")
package=$(realpath "$package")
[ "$(id -u)" = 0 ] || skip "systemd in a root of its own (only root can)"
for program in unshare nsenter setpriv dpkg; do
    command -v $program > /dev/null || skip "systemd in a root of its own (no $program)"
done
[ -x "$root/lib/systemd/systemd" ] || skip "systemd in a root of its own (no $root/lib/systemd/systemd; on Debian: apt-get install systemd)"
grep -q overlay /proc/filesystems && grep -q cgroup2 /proc/filesystems || skip "systemd in a root of its own (the kernel has no overlay or no cgroup2)"

pool=/sys/kernel/mm/hugepages/hugepages-2048kB
more=10
work=$(mktemp -d)
cp "$0" "$work/script"
mkdir "$work/root" "$work/layers"
machine=
end() {
    [ -z "$machine" ] || kill -9 "$machine" 2> /dev/null || :
    # The daemon's pages are free when its processes are gone.
    sleep 0.3
    echo $(($(cat $pool/nr_hugepages) - added)) > $pool/nr_hugepages
    rm -rf "$work"
}
before=$(cat $pool/nr_hugepages)
added=$more
echo $((before + more)) > $pool/nr_hugepages
added=$(($(cat $pool/nr_hugepages) - before))
trap end EXIT
trap 'exit 1' INT TERM
[ "$added" = "$more" ] || skip "systemd in a root of its own (no $more huge pages to be had)"

# Namespaces of its own; the machine's settings cannot be written from there.
cd /
unshare --mount --pid --fork --cgroup --uts --ipc --net --kill-child sh -euc '
    work=$1 root=$1/root
    mount -t tmpfs none "$work/layers"
    mkdir "$work/layers/upper" "$work/layers/work"
    mount -t overlay -o "lowerdir=$2,upperdir=$work/layers/upper,workdir=$work/layers/work" none "$root"
    mount -t proc none "$root/proc"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,bind,ro "$root/proc/sys"
    mount -t sysfs -o ro none "$root/sys"
    mount -t cgroup2 none "$root/sys/fs/cgroup"
    for directory in run tmp dev; do mount -t tmpfs -o mode=755 none "$root/$directory"; done
    for device in null zero full random urandom; do
        : > "$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
    : > "$root/etc/fstab"
    cp "$work/script" "$root/script"
    cp "$3" "$root/package.deb"
    exec env -i container=hugemm PATH=/usr/sbin:/usr/bin chroot "$root" /lib/systemd/systemd --unit=basic.target --show-status=0 --log-level=warning --log-target=console
' sh "$work" "$root" "$package" > "$work/log" 2>&1 < /dev/null &
machine=$!
first=
in_it() { nsenter --target "$first" --mount --pid --cgroup --uts --ipc --net --root --wdns=/ "$@"; }
for _ in $(seq 100); do
    first=$(pgrep -P "$machine" || :)
    if [ -n "$first" ] && in_it systemctl is-system-running 2> /dev/null | grep -Eq 'running|degraded'; then break; fi
    kill -0 "$machine" 2> /dev/null || break
    sleep 0.2
done
if ! kill -0 "$machine" 2> /dev/null || ! in_it systemctl is-active --quiet basic.target; then
    skip "systemd in a root of its own (it does not start: $(tail -1 "$work/log"))"
fi
echo "under $(in_it systemctl --version | head -1):"
in_it timeout 300 sh /script inside
