#!/bin/sh
# Starts CRIU through the loader and the libraries that came with it, without plugins.
here=$(dirname "$(readlink -f "$0")")
CRIU_LIBS_DIR=$here/no-plugins
export CRIU_LIBS_DIR
exec "$here/root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$here/root/usr/lib/x86_64-linux-gnu" \
    "$here/root/usr/sbin/criu" "$@"
