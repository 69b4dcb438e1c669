#!/usr/bin/env bash
# Builds the wheel of the Python package, optimized, into DIRECTORY (target/wheels by default):
#
#   scripts/wheel.sh [DIRECTORY]
#
# One wheel serves every CPython from 3.11 on (abi3). Its manylinux tag names the oldest C library with which it works, which is
# that of the machine that builds it or an older one.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${PAGEMARK_PYTHON_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/python}
if [ ! -x "$venv/bin/maturin" ]; then
    echo "wheel: no maturin in $venv" >&2
    echo "help: run \`make setup\`" >&2
    exit 1
fi
"$venv/bin/maturin" build --release --strip --locked \
    --manifest-path crates/pagemark-python/Cargo.toml --interpreter "$venv/bin/python" --out "${1:-${CARGO_TARGET_DIR:-target}/wheels}"
