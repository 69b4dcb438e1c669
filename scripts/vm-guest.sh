#!/bin/sh
# Makes a small Linux guest, and prints its directory, which has `kernel` and `initrd`. Without an
# argument it is the guest of the tests of virtual machines: it has a file system and a database on its
# disk, writes to both, and checks them (crates/pagemark-vm/tests/guest/init). With `bench` it is that
# of `pagemark-bench vm --guest`, with a compiler (papers/product/vm/guest). A guest is made
# once, in Pagemark's cache; the kernel is Debian's.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
bench=$here/papers/product/vm/guest
case ${1:-check} in
check) init=$here/crates/pagemark-vm/tests/guest/init programs="sqlite3 e2fsck" sources=$init ;;
bench) init=$bench/init programs="mke2fs as cc1" sources="$init $bench/writer.c $bench/source.sh" ;;
*) echo "usage: $0 [bench]" >&2; exit 2 ;;
esac
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/vm-guest
key=$(cat "$0" $sources | sha256sum | cut -c1-16)
if [ -e "$cache/$key/initrd" ]; then
    echo "$cache/$key"
    exit 0
fi
# The file of a program; that of the compiler is where gcc finds it.
file() {
    case $1 in
    cc1) gcc -print-prog-name=cc1 ;;
    *) command -v "$1" ;;
    esac
}
for program in apt-get dpkg-deb depmod modprobe busybox cpio gzip $programs; do
    path=$(file "$program") && [ -x "$path" ] || { echo "vm-guest: no $program" >&2; exit 1; }
done
mkdir -p "$cache"
work=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$work"' EXIT
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/ *Depends: //p' | head -n 1)
[ -n "$package" ] || { apt-get update -q >&2; package=$(apt-cache depends linux-image-cloud-amd64 |
    sed -n 's/ *Depends: //p' | head -n 1); }
(cd "$work" && apt-get download -q "$package" >&2 2>"$work/log") || { cat "$work/log" >&2; exit 1; }
dpkg-deb -x "$work/$package"_*.deb "$work/package"
release=${package#linux-image-}
modules=$work/package
[ -e "$modules/lib" ] || ln -s usr/lib "$modules/lib"
depmod -b "$modules" "$release"

root=$work/root
mkdir -p "$root/bin" "$root/modules" "$root/proc" "$root/sys" "$root/dev" "$root/data" "$root/tmp" "$root/etc"
cp -L "$(command -v busybox)" "$root/bin/busybox"
number=100
for module in virtio_pci virtio_blk virtio_balloon ext4 crc32c_generic; do
    modprobe -d "$modules" -S "$release" --show-depends "$module" | sed -n 's/^insmod //p' | while read -r file _; do
        name=$(basename "$file" .ko)
        if ! ls "$root/modules"/*-"$name.ko" >/dev/null 2>&1; then
            cp "$file" "$root/modules/$number-$(ls "$root/modules" | wc -l | xargs printf %03d)-$name.ko"
        fi
    done
    number=$((number + 1))
done
for program in $programs; do
    path=$(readlink -f "$(file "$program")")
    cp "$path" "$root/bin/$program"
    ldd "$path" | sed -n 's/.* => \(\/[^ ]*\).*/\1/p; s/^\s*\(\/lib64[^ ]*\).*/\1/p' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
done
if [ "$init" = "$bench/init" ]; then
    gcc -O2 -static -o "$root/bin/writer" "$bench/writer.c"
    "$bench/source.sh" >"$root/source.c"
fi
cp "$init" "$root/init"
chmod 755 "$root/init"
mkdir "$work/guest"
cp "$work/package/boot/vmlinuz-$release" "$work/guest/kernel"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/guest/initrd"
mv "$work/guest" "$cache/$key" 2>/dev/null || [ -e "$cache/$key/initrd" ]
echo "$cache/$key"
