#!/usr/bin/env bash
# Sees to it that a tool is there: installs it where that is possible, and otherwise says in one line how to.
#
#   scripts/need.sh target TRIPLE      a Rust target, through rustup
#   scripts/need.sh program PROGRAM PACKAGE    a program, or the path of a file, through the system's packages
#   scripts/need.sh toolchain NAME     a compiler with the library's sources, through rustup
#
# Exit code 0: it is there (now). 1: it is not, and the line on standard error says what to do.
set -u

have() { case $1 in /*) [ -e "$1" ] ;; *) command -v "$1" >/dev/null 2>&1 ;; esac; }

# Runs a command as root: directly, or through sudo if that asks for no password.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif have sudo && sudo -n true 2>/dev/null; then sudo -n "$@"; else return 1; fi
}

need_target() {
    if [ -d "$(rustc --print sysroot)/lib/rustlib/$1/lib" ]; then return 0; fi
    if have rustup && rustup target add "$1" >/dev/null 2>&1; then return 0; fi
    echo "missing: the Rust target $1; install it with: rustup target add $1" >&2
    return 1
}

need_toolchain() {
    local sources="$1 -c rust-src -c rustfmt -c clippy"
    have rustup || { echo "missing: rustup, which brings $1; see https://rustup.rs" >&2; return 1; }
    # shellcheck disable=SC2086
    rustup run "$1" rustc --version >/dev/null 2>&1 ||
        rustup toolchain install $sources --profile minimal >/dev/null 2>&1 ||
        { echo "missing: the toolchain $1; install it with: rustup toolchain install $sources" >&2; return 1; }
    [ -d "$(rustup run "$1" rustc --print sysroot)/lib/rustlib/src/rust/library" ] ||
        { echo "missing: the library's sources; install them with: rustup component add rust-src --toolchain $1" >&2; return 1; }
}

need_program() {
    if have "$1"; then return 0; fi
    if have apt-get; then
        { as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$2" ||
            { as_root apt-get update -q && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$2"; }; } \
            >/dev/null 2>&1
        have "$1" && return 0
        echo "missing: $1; install it with: sudo apt-get install $2" >&2
    elif have dnf; then
        as_root dnf install -y -q "$2" >/dev/null 2>&1
        have "$1" && return 0
        echo "missing: $1; install it with: sudo dnf install $2" >&2
    else
        echo "missing: $1; install the package that contains it (on Debian: $2)" >&2
    fi
    return 1
}

case "${1-}" in
target) need_target "$2" ;;
program) need_program "$2" "$3" ;;
toolchain) need_toolchain "$2" ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
