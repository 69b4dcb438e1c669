#!/usr/bin/env bash
# Builds the wheels of the Python package, optimized, into DIRECTORY (target/wheels by default):
#
#   scripts/wheel.sh [DIRECTORY]
#
# One wheel serves every CPython from 3.11 on (abi3). Python 3.9 and 3.10, which have no buffers in their stable interface, and
# free-threaded CPythons need a wheel for each version: one is built for each that is in PATH (python3.9, python3.14t), and for
# that of PAGEMARK_FREE_THREADED_PYTHON. The manylinux tag of a wheel names the oldest C library with which it works, which is
# that of the machine that builds it or an older one.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/python-common.sh
if [ ! -x "$tools/bin/maturin" ]; then
    echo "wheel: no maturin in $tools" >&2
    echo "help: run \`make setup\`" >&2
    exit 1
fi
interpreters=("$tools/bin/python")
if [ -n "${PAGEMARK_FREE_THREADED_PYTHON:-}" ]; then
    interpreters+=("$PAGEMARK_FREE_THREADED_PYTHON")
fi
for version in 3.9 3.10 3.14t 3.15t; do
    if found=$(find_python "$version"); then
        interpreters+=("$found")
    fi
done
for interpreter in "${interpreters[@]}"; do
    build_wheel "$interpreter" "${1:-${CARGO_TARGET_DIR:-target}/wheels}" --release --strip
done
