#!/usr/bin/env bash
# Builds the wheels of the Python package, optimized, into DIRECTORY (target/wheels by default):
#
#   scripts/wheel.sh [DIRECTORY]
#
# One wheel serves every CPython from 3.11 on (abi3). A free-threaded CPython before 3.15 has no stable interface and needs a
# wheel of its own: one is built for each that is in PATH (python3.14t), and for that of PAGEMARK_FREE_THREADED_PYTHON. The
# manylinux tag of a wheel names the oldest C library with which it works, which is that of the machine that builds it or an
# older one.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${PAGEMARK_PYTHON_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/python}
if [ ! -x "$venv/bin/maturin" ]; then
    echo "wheel: no maturin in $venv" >&2
    echo "help: run \`make setup\`" >&2
    exit 1
fi
interpreters=("$venv/bin/python")
if [ -n "${PAGEMARK_FREE_THREADED_PYTHON:-}" ]; then
    interpreters+=("$PAGEMARK_FREE_THREADED_PYTHON")
fi
for minor in 14 15; do
    if found=$(command -v "python3.${minor}t"); then
        interpreters+=("$found")
    fi
done
for interpreter in "${interpreters[@]}"; do
    "$venv/bin/maturin" build --release --strip --locked --manifest-path crates/pagemark-python/Cargo.toml \
        --interpreter "$interpreter" --out "${1:-${CARGO_TARGET_DIR:-target}/wheels}"
done
