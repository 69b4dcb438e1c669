#!/usr/bin/env bash
# Makes crates/pagemark-c/include/pagemark.h from the sources. `scripts/setup.sh c` gets the cbindgen that it uses.
set -euo pipefail
cd "$(dirname "$0")/.."
cbindgen=${PAGEMARK_CBINDGEN:-${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/cbindgen/bin/cbindgen}
if [ ! -x "$cbindgen" ]; then
    echo "header: no cbindgen at $cbindgen: scripts/setup.sh c gets it" >&2
    exit 1
fi
"$cbindgen" --quiet --config crates/pagemark-c/cbindgen.toml --output crates/pagemark-c/include/pagemark.h crates/pagemark-c
