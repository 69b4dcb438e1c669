#!/usr/bin/env bash
# Installs the C library, its headers for C and C++, and its files for pkg-config and CMake.
#
#   scripts/install-c.sh PREFIX [BUILT]     BUILT: where cargo left the library, target/release by default
#
# With DESTDIR set, files are installed below it, and the paths in them are without it. Debug information, which is most of
# the libraries' size, is left out; with STRIP=: it is installed, too. A prefix such as /usr/local needs root.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
prefix=${1:?usage: scripts/install-c.sh PREFIX [BUILT]}
built=${2:-${CARGO_TARGET_DIR:-$here/target}/release}
to=${DESTDIR:-}$prefix

case $prefix in
/*) ;;
*) echo "install-c: the prefix must be an absolute path, and $prefix is not" >&2 && exit 1 ;;
esac
# For musl, Rust makes the static library only.
is_shared=1
if [[ $built/ == */*-musl/* ]]; then is_shared=; fi
for library in ${is_shared:+libpagemark_c.so} libpagemark_c.a; do
    if [ ! -e "$built/$library" ]; then
        echo "install-c: no $library in $built: build it with cargo build --release -p pagemark-c" >&2
        exit 1
    fi
done
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/Cargo.toml" | head -n 1)
# The name of the ABI, as crates/pagemark-c/build.rs gives it to the library.
IFS=. read -r major minor _ <<<"$version"
abi=$major
if [ "$major" = 0 ]; then abi=0.$minor; fi

cmake=$to/lib/cmake/pagemark

install -d "$to/lib/pkgconfig" "$cmake" "$to/include"
if [ -n "$is_shared" ]; then
    install -m 755 "$built/libpagemark_c.so" "$to/lib/libpagemark.so.$version"
    ln -sf "libpagemark.so.$version" "$to/lib/libpagemark.so.$abi"
    ln -sf "libpagemark.so.$abi" "$to/lib/libpagemark.so"
fi
install -m 644 "$built/libpagemark_c.a" "$to/lib/libpagemark.a"
if [ -z "$is_shared" ]; then
    # Rust's unwinder for musl; that of gcc needs the other C library.
    unwinder=$(rustc --print target-libdir --target x86_64-unknown-linux-musl)/self-contained/libunwind.a
    printf 'open %s\naddlib %s\nsave\nend\n' "$to/lib/libpagemark.a" "$unwinder" | ar -M 2> >(grep -v 'failed to create LTO module' >&2)
fi
# The names of functions are kept, for backtraces.
"${STRIP:-strip}" --strip-debug ${is_shared:+"$to/lib/libpagemark.so.$version"} "$to/lib/libpagemark.a"
install -m 644 "$here"/crates/pagemark-c/include/pagemark.h{,pp} "$to/include"
# fill TEMPLATE FILE
fill() {
    sed -e "s|@prefix@|$prefix|" -e "s|@version@|$version|" -e "s|@abi@|$abi|" -e "s|@major@|$major|g" -e "s|@minor@|$minor|g" \
        "$here/crates/pagemark-c/$1" >"$2"
    chmod 644 "$2"
}
fill pagemark.pc.in "$to/lib/pkgconfig/pagemark.pc"
fill pagemark-config.cmake.in "$cmake/pagemark-config.cmake"
fill pagemark-config-version.cmake.in "$cmake/pagemark-config-version.cmake"
echo "installed pagemark $version below $to"
