#!/bin/sh
# Installs a released Firebrick from a folder or a URL. Needs no root, no Rust and no Python.
#
#   sh install.sh [FROM] [--features SET] [--version V] [--prefix FOLDER]
#
# FROM            a folder or a URL (https://, http://, file://) that holds what packaging/release wrote: archives and SHA256SUMS
#                 (default: the variable FIREBRICK_URL, then the address that this release was made for, if any)
# --features SET  which build: cpu (default), wgpu, vulkan, metal, cuda, mpi or cuda-mpi
# --version V     which version, where FROM has several
# --prefix FOLDER the program goes to FOLDER/bin (default: ~/.local)
set -eu

# packaging/release writes the address of its release here
default_url=

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0" >&2
    exit 2
}

needs_value() {
    [ "$1" -ge 2 ] || fail "$2 needs a value"
}

# Prints the checksums' list entry of the one archive that fits: its checksum and its name.
choose() {
    any='[^-]*\(-[^-]*\)*'
    pattern="^firebrick-${version:-$any}-$target-$features\.tar\.gz\$"
    found=$(awk '{ sub(/^\*/, "", $2); print $1, $2 }' "$work/SHA256SUMS" | while read -r sum name; do
        if echo "$name" | grep -q "$pattern"; then echo "$sum $name"; fi
    done)
    case $(echo "$found" | grep -c .) in
    1) echo "$found" ;;
    0) fail "$from has no build of '$features'${version:+ in version $version} for $target; it has:
$(awk '{ print "  " $2 }' "$work/SHA256SUMS")" ;;
    *) fail "$from has several versions; choose one with --version:
$(echo "$found" | awk '{ print "  " $2 }')" ;;
    esac
}

# Copies a file of FROM into the work folder.
get() {
    case "$from" in
    http://* | https://* | file://*)
        if command -v curl >/dev/null; then
            curl --fail --silent --show-error --location --output "$work/$1" "$from/$1" ||
                fail "cannot fetch $from/$1 (curl says why above)"
        elif command -v wget >/dev/null; then
            wget --quiet --output-document "$work/$1" "$from/$1" || fail "cannot fetch $from/$1 with wget"
        else
            fail "neither curl nor wget is installed; fetch $from/SHA256SUMS and the archive by hand, and name their folder instead"
        fi
        ;;
    *)
        [ -d "$from" ] || fail "$from is neither a folder nor a URL (https://…)"
        [ -f "$from/$1" ] || fail "$from has no $1; name the folder that packaging/release wrote"
        cp "$from/$1" "$work/$1"
        ;;
    esac
}

checksum() {
    if command -v sha256sum >/dev/null; then
        sha256sum "$1" | cut -d ' ' -f 1
    elif command -v shasum >/dev/null; then
        shasum -a 256 "$1" | cut -d ' ' -f 1
    else
        fail "neither sha256sum nor shasum is installed, so that the archive cannot be checked"
    fi
}

this_target() {
    machine=$(uname -m)
    case "$machine" in
    x86_64 | amd64) machine=x86_64 ;;
    aarch64 | arm64) machine=aarch64 ;;
    esac
    case "$(uname -s)" in
    Linux) echo "$machine-unknown-linux-gnu" ;;
    Darwin) echo "$machine-apple-darwin" ;;
    *) fail "there are no releases for $(uname -s); build from source: cargo install --path . --locked --no-default-features" ;;
    esac
}

from= features=cpu version= prefix=
while [ $# -gt 0 ]; do
    case "$1" in
    --features) needs_value $# "$1"; features=$2; shift ;;
    --version) needs_value $# "$1"; version=$2; shift ;;
    --prefix) needs_value $# "$1"; prefix=$2; shift ;;
    -h | --help) usage ;;
    -*) fail "unknown option $1; see install.sh --help" ;;
    *) [ -z "$from" ] || fail "one source is expected, found $from and $1"; from=${1%/} ;;
    esac
    shift
done
from=${from:-${FIREBRICK_URL:-$default_url}}
[ -n "$from" ] || fail "no source: name a folder or a URL, or set FIREBRICK_URL; see install.sh --help"
case "$features$version" in
*[!A-Za-z0-9.+-]*) fail "feature sets and versions are made of letters, digits, dots and dashes" ;;
esac
if [ -z "$prefix" ]; then
    [ -n "${HOME:-}" ] || fail "HOME is not set; say where to install with --prefix FOLDER"
    prefix=$HOME/.local
fi

target=$(this_target)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

get SHA256SUMS
chosen=$(choose)
wanted=${chosen%% *}
archive=${chosen#* }
get "$archive"
found=$(checksum "$work/$archive")
[ "$found" = "$wanted" ] ||
    fail "$archive is damaged or was changed: its SHA-256 is $found, SHA256SUMS says $wanted. Nothing was installed; fetch it again"

name=${archive%.tar.gz}
# this one file alone, whatever else the archive holds
tar -xzf "$work/$archive" -C "$work" "$name/firebrick" || fail "$archive has no $name/firebrick. Nothing was installed"
installed=$("$work/$name/firebrick" -V 2>&1) || {
    case "$installed" in
    *GLIBC_*) why="it needs a later C library than this system's ($(getconf GNU_LIBC_VERSION 2>/dev/null || echo 'not glibc'))" ;;
    *) why="the program does not start on this machine" ;;
    esac
    fail "$why: $installed
Nothing was installed; build from source: cargo install --path . --locked"
}

mkdir -p "$prefix/bin" 2>/dev/null && [ -w "$prefix/bin" ] ||
    fail "$prefix/bin cannot be written; name another folder with --prefix"
[ ! -d "$prefix/bin/firebrick" ] || fail "$prefix/bin/firebrick is a folder; remove it, or name another folder with --prefix"
# what this replaces, if it still starts
before=$("$prefix/bin/firebrick" -V 2>/dev/null) || before=
# aside and renamed, so that a running program is not written into
cp "$work/$name/firebrick" "$prefix/bin/.firebrick.$$" && chmod 755 "$prefix/bin/.firebrick.$$" &&
    mv "$prefix/bin/.firebrick.$$" "$prefix/bin/firebrick" || {
    rm -f "$prefix/bin/.firebrick.$$"
    fail "cannot write $prefix/bin/firebrick"
}
echo "installed $installed ($features) as $prefix/bin/firebrick${before:+, which was $before}"
case ":$PATH:" in
*":$prefix/bin:"*) ;;
*) echo "$prefix/bin is not in PATH; add it: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
