#!/usr/bin/env bash
# Measures lightweight dirty tracking: the figures and tables of the paper, beside the other mechanisms, on the lab's kernel
# that has it; and the cost of the kernel's own work on written pages, beside the same kernel without the series. Needs root.
#
#   scripts/bench-ldt.sh [DIR]    tables, numbers (CSV) and pictures (SVG) go to DIR (target/bench-ldt)
#
# Where the lab emulates, the clock counts instructions, and the run takes some ten minutes. PAGEMARK_CLOCK=time measures
# times, for hosts where KVM works. BENCH_LDT adds options for `pagemark-bench ldt`, as in BENCH_LDT="--memory 1G --rounds 3".
# BENCH_LDT_FIGURES names the figures to measure in place of all, and BENCH_LDT_MACHINE is the memory of the machine, which
# must hold the largest buffer. The paper's sizes of figures 5 and 9:
#
#   BENCH_LDT_FIGURES=5 BENCH_LDT_MACHINE=5500M BENCH_LDT="--memory 4G --min-memory 4G --rounds 1" scripts/bench-ldt.sh
#   BENCH_LDT_FIGURES=9 BENCH_LDT="--rate-memory 1G --rounds 1" scripts/bench-ldt.sh
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:-target/bench-ldt}/plain"
out=$(realpath "${1:-target/bench-ldt}")
read -r -a options <<<"${BENCH_LDT:-}"
clock=(--icount)
if [ "${PAGEMARK_CLOCK:-instructions}" = time ]; then clock=(); fi

cargo build --locked --release -p pagemark-bench
bench=$(realpath "${CARGO_TARGET_DIR:-target}")/release/pagemark-bench
gcc -O2 -static -o "$out/waits" lab/guest/waits.c

# in_lab KERNEL DIRECTORY FIGURES OPTIONS…
in_lab() {
    local kernel=$1 directory=$2 figures=$3
    shift 3
    lab/lab run --kernel "$kernel" "${clock[@]}" --memory "${BENCH_LDT_MACHINE:-2G}" \
        --share "$(dirname "$bench")" --share "$out" --timeout 7200 -- \
        sh -c 'echo 1G >/sys/block/zram0/disksize && mkswap -q /dev/zram0 && swapon /dev/zram0 && exec "$@"' sh \
        "$bench" ldt --figure "$figures" --out "$directory" "${options[@]}" "$@"
}

{
    in_lab ldt "$out" "${BENCH_LDT_FIGURES:-3,5,6,7,8,9,10,11}"
    if [ -n "${BENCH_LDT_FIGURES:-}" ]; then exit; fi
    in_lab plain "$out/plain" helpers
    in_lab ldt "$out" helpers --against "$out/plain/helpers.csv"
    lab/lab run --kernel ldt "${clock[@]}" --share "$out" --timeout 3600 -- "$out/waits" -m 1024 -r 3
} | tee "$out/tables.txt"
