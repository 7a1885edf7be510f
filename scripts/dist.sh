#!/bin/sh
# What is handed to others: a static binary, the static library for C, manual pages, the systemd units, and a Debian package of all that,
# below target/dist. The binary needs no C library.
set -eu
cd "$(dirname "$0")/.."
arch=${ARCH:-$(uname -m)}
case $arch in
    x86_64) deb=amd64 ;;
    aarch64) deb=arm64 ;;
    *) echo "no package for $arch" >&2; exit 1 ;;
esac
target=$arch-unknown-linux-musl
scripts/need.sh target "$target" || { echo "the target $target is needed: rustup target add $target" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)

# Of programs that are handed out nobody has the sources beside them.
export CARGO_PROFILE_RELEASE_STRIP=symbols
CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld ${CARGO:-cargo} build --release --locked --target "$target" -p hugemm-cli
binary=${CARGO_TARGET_DIR:-target}/$target/release/hugemm
native=$arch-unknown-linux-gnu
library=
if [ "$arch" = "$(uname -m)" ] && scripts/need.sh target "$native"; then
    ${CARGO:-cargo} build --release --locked --target "$native" -p hugemm-lease-c
    library=${CARGO_TARGET_DIR:-target}/$native/release/libhugemm_lease_c.a
else
    echo "skipped: the library for C (it is built on $arch alone)"
fi

dist=target/dist
root=$dist/root
rm -rf "$root"
mkdir -p "$root/usr/bin" "$root/usr/share/man/man1" "$root/lib/systemd/system" "$root/etc/hugemm" "$root/usr/share/doc/hugemm" "$root/DEBIAN"
install -m 755 "$binary" "$root/usr/bin/hugemm"
if [ -n "$library" ]; then
    install -D -m 644 -t "$root/usr/lib/$native" "$library"
    install -D -m 644 -t "$root/usr/include" services/lease-c/include/hugemm_lease.h
fi
install -D -m 644 -t "$root/usr/lib/python3/dist-packages/hugemm" services/lease/python/hugemm/__init__.py
install -m 644 services/lease/systemd/hugemm-lease.socket services/lease/systemd/hugemm-lease.service "$root/lib/systemd/system/"
install -m 644 docs/lease.md LICENSE-APACHE "$root/usr/share/doc/hugemm/"
{
    echo "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
    echo
    echo "Files: *"
    echo "Copyright: hugemm developers"
    echo "License: Apache-2.0 or Expat"
    sed 's/^$/./; s/^/ /' LICENSE-MIT
} > "$root/usr/share/doc/hugemm/copyright"
gzip -9nc CHANGELOG.md > "$root/usr/share/doc/hugemm/CHANGELOG.md.gz"
maintainer="hugemm developers <hugemm@users.noreply.github.com>"
gzip -9n > "$root/usr/share/doc/hugemm/changelog.gz" <<CHANGES
hugemm ($version) unstable; urgency=medium

  * What is new is in CHANGELOG.md.

 -- $maintainer  $(git log -1 --format=%aD 2> /dev/null || date -R)
CHANGES
mkdir -p "$root/usr/share/lintian/overrides"
cat > "$root/usr/share/lintian/overrides/hugemm" <<'OVERRIDES'
# A module for those who have Python; nothing here runs it.
hugemm: python-package-missing-depends-on-python
# It is static.
hugemm: shared-library-lacks-prerequisites [usr/bin/hugemm]
# Where the administrator enabled the units, they are disabled.
hugemm: maintainer-script-calls-systemctl [prerm:*]
OVERRIDES
mkdir "$root/usr/share/doc/hugemm/examples"
cat > "$root/usr/share/doc/hugemm/examples/lease.policy" <<'POLICY'
# Who may lease how much, all that a line names together: `--policy /etc/hugemm/lease.policy` in /etc/hugemm/lease.conf.
# The first line that names whoever asks decides; a daemon that runs reads it again when it has changed.
# who       how much  nodes (all, if none are named)
uid 1000    64G
gid 36      512G      0,1
POLICY
cat > "$root/etc/hugemm/lease.conf" <<'CONF'
# Options of `hugemm pool serve`; see hugemm-pool-serve(1).
HUGEMM_POOL="--size 1GB"
CONF
# The pages are the command line's own; a package for another machine takes them from this one's build of the same source.
"${HUGEMM:-$binary}" man "$root/usr/share/man/man1" > /dev/null
gzip -9n "$root"/usr/share/man/man1/*.1
for shell in bash:bash-completion/completions/hugemm zsh:zsh/vendor-completions/_hugemm fish:fish/vendor_completions.d/hugemm.fish; do
    mkdir -p "$root/usr/share/$(dirname "${shell#*:}")"
    "${HUGEMM:-$binary}" completions "${shell%%:*}" > "$root/usr/share/${shell#*:}"
done
cat > "$root/DEBIAN/control" <<CONTROL
Package: hugemm
Version: $version
Architecture: $deb
Maintainer: $maintainer
Homepage: https://github.com/hugemm/hugemm
Section: admin
Priority: optional
Recommends: qemu-system-x86
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Description: huge pages that are ready before a virtual machine asks for them
 A daemon fills files of huge pages in the background and lends each to one
 owner; stock programs run on them without a change of theirs or the kernel's.
 Also measures memory management by extents, beside this machine's kernel.
CONTROL
echo /etc/hugemm/lease.conf > "$root/DEBIAN/conffiles"
# The daemon is the administrator's to start; one that runs goes on with what it holds, by the new binary.
cat > "$root/DEBIAN/postinst" <<'SCRIPT'
#!/bin/sh
set -e
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    [ "$1" != configure ] || [ -z "$2" ] || systemctl try-restart hugemm-lease.service
fi
SCRIPT
cat > "$root/DEBIAN/prerm" <<'SCRIPT'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
    systemctl disable --now hugemm-lease.service hugemm-lease.socket
fi
SCRIPT
cat > "$root/DEBIAN/postrm" <<'SCRIPT'
#!/bin/sh
set -e
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
SCRIPT
chmod 755 "$root/DEBIAN/postinst" "$root/DEBIAN/prerm" "$root/DEBIAN/postrm"
cp "$binary" "$dist/hugemm-$version-$arch"
if command -v dpkg-deb > /dev/null; then
    dpkg-deb --root-owner-group --build "$root" "$dist/hugemm_${version}_$deb.deb" > /dev/null
    # It installs where nothing else is, and what its unit starts is there and starts.
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    mkdir -p "$fresh/var/lib/dpkg/info" "$fresh/var/lib/dpkg/updates"
    : > "$fresh/var/lib/dpkg/status"
    if [ "$(id -u)" = 0 ] && [ "$arch" = "$(uname -m)" ]; then
        dpkg --root="$fresh" --force-script-chrootless --install "$dist/hugemm_${version}_$deb.deb" > /dev/null
        start=$(sed -n 's/^ExecStart=\([^$]*\).*/\1/p' "$fresh/lib/systemd/system/hugemm-lease.service")
        # Words of the unit's own line.
        # shellcheck disable=SC2086
        chroot "$fresh" $start --help > /dev/null
        # A static binary has another C library than the tests.
        timeout 5 "$fresh/usr/bin/hugemm" pool serve --page thp --size 2MB --socket "$fresh/socket" | grep -q "leases at"
        if command -v systemd-analyze > /dev/null; then
            sed -i "s|=/usr/bin/|=$fresh/usr/bin/|; /^Documentation=/d" "$fresh"/lib/systemd/system/hugemm-lease.*
            systemd-analyze verify "$fresh"/lib/systemd/system/hugemm-lease.*
        fi
        echo "the package installs in an empty root, and its unit's command starts"
    fi
    if command -v lintian > /dev/null; then lintian --fail-on error "$dist/hugemm_${version}_$deb.deb"; else echo "skipped: lintian"; fi
else
    echo "skipped: the package (no dpkg-deb); its tree is in $root"
fi
ls -l "$dist"
