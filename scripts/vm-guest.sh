#!/bin/sh
# Makes a small Linux guest for tests of virtual machines, and prints its directory, which has `kernel`
# and `initrd`. The guest has a file system and a database on its disk, writes to both, and checks them
# (crates/pagemark-vm/tests/guest/init). It is made once, in Pagemark's cache; the kernel is Debian's.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
init=$here/crates/pagemark-vm/tests/guest/init
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/vm-guest
key=$(cat "$0" "$init" | sha256sum | cut -c1-16)
if [ -e "$cache/$key/initrd" ]; then
    echo "$cache/$key"
    exit 0
fi
for program in apt-get dpkg-deb depmod modprobe busybox sqlite3 e2fsck cpio gzip; do
    command -v "$program" >/dev/null || { echo "vm-guest: no $program" >&2; exit 1; }
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
for module in virtio_pci virtio_blk ext4 crc32c_generic; do
    modprobe -d "$modules" -S "$release" --show-depends "$module" | sed -n 's/^insmod //p' | while read -r file _; do
        name=$(basename "$file" .ko)
        if ! ls "$root/modules"/*-"$name.ko" >/dev/null 2>&1; then
            cp "$file" "$root/modules/$number-$(ls "$root/modules" | wc -l | xargs printf %03d)-$name.ko"
        fi
    done
    number=$((number + 1))
done
for program in sqlite3 e2fsck; do
    path=$(readlink -f "$(command -v "$program")")
    cp "$path" "$root/bin/$program"
    ldd "$path" | sed -n 's/.* => \(\/[^ ]*\).*/\1/p; s/^\s*\(\/lib64[^ ]*\).*/\1/p' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
done
cp "$init" "$root/init"
chmod 755 "$root/init"
mkdir "$work/guest"
cp "$work/package/boot/vmlinuz-$release" "$work/guest/kernel"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/guest/initrd"
mv "$work/guest" "$cache/$key" 2>/dev/null || [ -e "$cache/$key/initrd" ]
echo "$cache/$key"
