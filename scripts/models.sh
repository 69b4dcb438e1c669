#!/usr/bin/env bash
# Runs the models of what threads, and signal handlers, share without locks: loom tries the orders in which they may run and see
# each other's accesses. See crates/pagemark/src/sys/sync.rs.
set -euo pipefail
cd "$(dirname "$0")/.."
# With a build directory of its own, since everything is built anew under these flags.
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/loom RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" \
    cargo test --locked -p pagemark --lib -- models "$@"
