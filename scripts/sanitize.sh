#!/usr/bin/env bash
# Runs the tests of regions and snapshots under the compiler's sanitizers, the standard library included.
#
#   scripts/sanitize.sh [SANITIZER]…     by the names of rustc; address by default
#
# The exit status is 77 where there is no nightly toolchain with the sources of the standard library.
set -euo pipefail
cd "$(dirname "$0")/.."

target=x86_64-unknown-linux-gnu
sources=$(rustc +nightly --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library/std || true
if [ ! -d "$sources" ]; then
    echo "skipped: sanitize: no nightly toolchain with sources (rustup component add --toolchain nightly rust-src)"
    exit 77
fi
# The first measures the memory that a region takes, to which a sanitizer adds its own. The second runs all tests again,
# also the first.
skipped=(memory_that_was_never_written_costs_nothing regions_behave_on_older_kernels)
for sanitizer in "${@:-address}"; do
    printf '== %s\n' "$sanitizer"
    tests=(region region_faults region_stores region_unmapped snapshot_threads)
    # The thread sanitizer delays signals, and reports a system call that writes to a region as a data race.
    if [ "$sanitizer" = thread ]; then tests=(region region_stores region_unmapped snapshot_threads); fi
    # In a build directory of its own, because everything is built anew for a sanitizer.
    CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/$sanitizer RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=$sanitizer" \
        PROPTEST_CASES=${PROPTEST_CASES:-24} \
        cargo +nightly test --locked -p pagemark -Zbuild-std --target $target --no-fail-fast \
        "${tests[@]/#/--test=}" -- "${skipped[@]/#/--skip=}"
done
