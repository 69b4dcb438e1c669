#!/usr/bin/env bash
# Runs tests under Miri, which reports undefined behaviour: those of the modules that it can run in some minutes. Miri
# cannot run what needs more of the kernel than private memory. The exit status is 77 where there is no Miri.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! cargo +nightly miri --version >/dev/null 2>&1; then
    echo "skipped: miri: no Miri (rustup component add --toolchain nightly miri rust-src)"
    exit 77
fi
modules=(id:: content::tests::a_size snapshot:: store::
    track::page_bits:: track::emulate::words:: tree::tests::any_bytes tree::tests::refuses)
# Too slow under Miri.
slow=(snapshots_hold_what_memory_held a_tiny_budget_is_kept_or_refused)
# In a build directory of its own, because everything is built anew for Miri.
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/miri MIRIFLAGS="${MIRIFLAGS:--Zmiri-disable-isolation}" \
    PROPTEST_CASES=${PROPTEST_CASES:-2} \
    cargo +nightly miri test --locked -p pagemark --lib -- "${modules[@]}" "${slow[@]/#/--skip=}"
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/miri MIRIFLAGS="${MIRIFLAGS:--Zmiri-disable-isolation}" \
    PROPTEST_CASES=${PROPTEST_CASES:-2} \
    cargo +nightly miri test --locked -p pagemark-linux --lib -- ranges:: slab:: slots::
