#!/usr/bin/env bash
# Runs each fuzz target for $1 seconds (20). The exit status is 77 where there is no fuzzer.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${1:-20}

skip() {
    echo "skipped: fuzz: $1"
    exit 77
}
rustup toolchain list 2>/dev/null | grep -q '^nightly' || skip "no nightly toolchain (rustup toolchain install nightly)"
cargo fuzz --version >/dev/null 2>&1 || skip "no cargo-fuzz (make setup)"

cargo +nightly fuzz build
for target in $(cargo +nightly fuzz list); do
    cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -print_final_stats=1
done
