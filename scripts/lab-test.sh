#!/usr/bin/env bash
# Lightweight dirty tracking, tested on the kernel that has it: the kernel's own selftest, the oracle, and Pagemark's tests of its
# trackers. The kernel is built first unless it is in the lab's cache. Fails also when the kernel warns.
#
# LAB_KERNEL=ldt-debug takes another kernel; LAB_SECONDS is how long each run of the oracle takes in the lab (30).
set -euo pipefail
cd "$(dirname "$0")/.."
kernel=${LAB_KERNEL:-ldt}
seconds=${LAB_SECONDS:-30}
work=$(mktemp -d "${XDG_CACHE_HOME:-$HOME/.cache}/pagemark-lab-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
shares=()

# in_lab NAME SECONDS COMMAND…: one machine, one test.
in_lab() {
    local name=$1 limit=$2
    shift 2
    printf '\n== %s\n' "$name"
    if lab/lab run --kernel "$kernel" --memory 1G --timeout "$limit" "${shares[@]}" -- "$@"; then
        passed=$((passed + 1))
    else
        printf 'failed: %s (%s)\n' "$name" $?
        failed=$((failed + 1))
    fi
}

lab/lab build "$kernel" >/dev/null

# The selftest lies in the series, and needs a little of the kernel's source.
source=$work/source
mkdir "$source"
tar -C "$source" --strip-components=1 -xf "$(lab/lab source)" --wildcards '*/tools/testing/selftests/kselftest.h' \
    '*/tools/include/uapi/linux/fs.h'
for patch in kernel/ldt/*.patch; do
    git -C "$source" apply --include='tools/include/*' --include='tools/testing/selftests/mm/ldt.c' "$PWD/$patch"
done
gcc -O2 -Wall -static -isystem "$source/tools/include/uapi" -o "$work/ldt" "$source/tools/testing/selftests/mm/ldt.c"
gcc -O2 -Wall -static -pthread -o "$work/oracle" lab/tests/oracle.c
pressure=$PWD/lab/tests/memory-pressure.sh

in_lab "selftest" 300 sh -c "$pressure && $work/ldt"
for seed in 1 2; do
    in_lab "oracle, collect and restart in one step, seed $seed" $((seconds * 2 + 300)) \
        sh -c "$pressure && $work/oracle -s $seconds -t 4 -r $seed"
done
in_lab "oracle, the paper's list and restart" $((seconds * 2 + 300)) sh -c "$pressure && $work/oracle -s $seconds -m refs"
in_lab "the oracle notices what is missed" $((seconds * 2 + 300)) sh -c "$work/oracle -s $seconds -b; [ \$? = 1 ]"

if [ -z "${LAB_NO_CARGO:-}" ]; then
    # Where cargo left the test binary of that name.
    built() {
        cargo test --locked -p pagemark "$@" --no-run --message-format=json 2>/dev/null |
            sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
    }
    trackers=$(built --lib) regions=$(built --test region)
    # A build directory that the machine has of its own would hide that of this one.
    shares=(--share "$(dirname "$trackers")")
    in_lab "Pagemark's trackers" 1200 sh -c "$trackers --test-threads 2 tracker::"
    in_lab "regions by the dirty bits" 1200 "$regions" --exact those_of_which_there_is_one_behave --nocapture
    kernel=stock in_lab "regions by soft-dirty" 1200 "$regions" --exact those_of_which_there_is_one_behave --nocapture
fi

printf '\n%s passed, %s failed\n' $passed $failed
[ $failed = 0 ]
