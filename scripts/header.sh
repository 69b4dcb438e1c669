#!/usr/bin/env bash
# Makes crates/pagemark-c/include/pagemark.h from the sources, with the cbindgen that `make setup` installs.
set -euo pipefail
cd "$(dirname "$0")/.."
cbindgen=${PAGEMARK_CBINDGEN:-${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/cbindgen/bin/cbindgen}
if [ ! -x "$cbindgen" ]; then
    echo "header: no cbindgen at $cbindgen" >&2
    echo "help: run \`make setup\`" >&2
    exit 1
fi
"$cbindgen" --quiet --config crates/pagemark-c/cbindgen.toml --output crates/pagemark-c/include/pagemark.h crates/pagemark-c
