#!/usr/bin/env bash
# Runs every fuzz target, so that all of them together take about $1 seconds. Leaves with 77 where it cannot run.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${1:-60}

skip() {
    echo "skipped: fuzz: $1"
    exit 77
}
rustup toolchain list 2>/dev/null | grep -q '^nightly' || skip "no nightly toolchain (rustup toolchain install nightly)"
cargo fuzz --version >/dev/null 2>&1 || skip "no cargo-fuzz (scripts/setup.sh rust)"

mapfile -t targets < <(cargo +nightly fuzz list)
for target in "${targets[@]}"; do
    cargo +nightly fuzz build "$target"
done
for target in "${targets[@]}"; do
    cargo +nightly fuzz run "$target" -- -max_total_time=$((seconds / ${#targets[@]})) -print_final_stats=1
done
