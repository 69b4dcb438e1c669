#!/usr/bin/env bash
# Dirty tracking, tested on kernels that this machine does not run: what is ours on the kernel with the series, on the same
# kernel that checks itself, and on Debian's own, and the kernel's selftests on both. Kernels are built or fetched first unless they
# are in the lab's cache. Says at the end what has run, how long, and what has failed. Fails also when a kernel warns.
#
#   lab-test.sh [quick|full] [PART...]
#
# quick takes some twelve minutes in emulation on two processors, full an hour. Parts: ldt, stock, debug, redis, selftests, and in
# full also plain; all of them unless named. LAB_NO_CARGO=1 leaves out what is built by cargo.
set -euo pipefail
cd "$(dirname "$0")/.."
set_name=quick
case ${1:-} in quick | full) set_name=$1 && shift ;; esac
if [ $# != 0 ]; then parts=("$@"); elif [ "$set_name" = quick ]; then
    parts=(ldt stock debug redis selftests)
else
    parts=(ldt stock plain debug redis selftests)
fi
if [ "$set_name" = quick ]; then seconds=12 seeds=(1); else seconds=60 seeds=(1 2 3); fi
work=$(mktemp -d "${XDG_CACHE_HOME:-$HOME/.cache}/pagemark-lab-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
: >"$work/all"

# machine KERNEL MEMORY SECONDS [OPTION...] <TESTS: runs tests in one machine. A line is NAME|SECONDS|COMMAND (see lab/tests/batch.sh).
machine() {
    local kernel=$1 memory=$2 limit=$3 status=0 start=$SECONDS name result took
    shift 3
    cat >"$work/tests"
    rm -f "$work/results" "$work/skips"
    touch "$work/results" "$work/skips"
    printf '\n== %s: %s tests\n' "$kernel" "$(grep -c '|' "$work/tests")"
    lab/lab run --kernel "$kernel" --memory "$memory" --timeout "$limit" --share "$work" "${shares[@]}" "$@" -- \
        env "PAGEMARK_SKIP_LOG=$work/skips" lab/tests/batch.sh "$work/tests" "$work/results" || status=$?
    while IFS='|' read -r name _; do
        if [ -z "$name" ]; then continue; fi
        result=$(grep -F "$name|" "$work/results" || echo "$name|not run to its end|")
        took=${result##*|}
        result=${result#*|}
        result=${result%|*}
        if [ "$result" = 0 ]; then result=passed; else result="FAILED ($result)"; fi
        note "$result" "$kernel: $name" "$took"
    done <"$work/tests"
    if [ $status != 0 ]; then note "FAILED ($status)" "$kernel: the machine and its kernel's log" ""; fi
    # A test that is skipped here has not been run anywhere, unless it is for the series' kernel.
    case $kernel in
    ldt*) cp "$work/skips" "$work/unwanted" ;;
    *) grep -v 'lightweight dirty tracking' "$work/skips" >"$work/unwanted" || true ;;
    esac
    if [ -s "$work/unwanted" ]; then
        cat "$work/unwanted"
        note "FAILED (skipped)" "$kernel: tests that cannot run" ""
    fi
    printf '   %s: %s s with the machine\n' "$kernel" $((SECONDS - start))
}

# note RESULT NAME SECONDS
note() { printf '%-20s %4s s  %s\n' "$1" "$3" "$2" >>"$work/all"; }

# What is ours and needs no cargo.
build_tests() {
    # The series' selftest needs a little of the kernel's source.
    local source=$work/source patch
    mkdir "$source"
    tar -C "$source" --strip-components=1 -xf "$(lab/lab source)" --wildcards '*/tools/testing/selftests/kselftest.h' \
        '*/tools/include/uapi/linux/fs.h'
    for patch in kernel/ldt/*.patch; do
        git -C "$source" apply --include='tools/include/*' --include='tools/testing/selftests/mm/ldt.c' "$PWD/$patch"
    done
    gcc -O2 -Wall -static -isystem "$source/tools/include/uapi" -o "$work/ldt" "$source/tools/testing/selftests/mm/ldt.c"
    gcc -O2 -Wall -static -pthread -o "$work/oracle" lab/tests/oracle.c
    gcc -O2 -Wall -static -pthread -o "$work/hostile" lab/tests/hostile.c
}

# built PACKAGE ARGUMENTS…: where cargo left the test binary, which need not be all that it has built.
built() {
    cargo test --locked -p "$@" --no-run --message-format=json 2>/dev/null |
        sed -n '/"profile":{[^}]*"test":true}/s/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

build_cargo() {
    trackers=$(built pagemark --lib)
    regions=$(built pagemark --test region)
    stories=$(built pagemark-testing --test comes_back)
    redis=$(built pagemark-cli --test redis)
    # A build directory that the machine has of its own would hide that of this one.
    shares=(--share "$(dirname "$(dirname "$trackers")")")
}

# oracle SEED SECONDS OPTIONS: a test's line.
oracle() {
    local seed=$1 time=$2
    shift 2
    echo "oracle${*:+ $*}, seed $seed|$((time * 3 + 100))|$work/oracle -s $time -t 4 -r $seed $*"
}

# Swap, KSM and khugepaged for all that follows.
pressure="swap, KSM and khugepaged|60|lab/tests/memory-pressure.sh"

of_ldt() {
    local seed
    echo "$pressure"
    echo "the series' selftest|300|$work/ldt"
    for seed in "${seeds[@]}"; do
        oracle "$seed" $seconds
        oracle "1$seed" $seconds -m refs
        oracle "2$seed" $seconds -u
        oracle "3$seed" $seconds -m refs -u
        echo "hostile callers, seed $seed|$((seconds * 3 + 100))|$work/hostile -s $seconds -r $seed"
    done
    echo "the oracle notices what is missed|100|$work/oracle -s $seconds -b; [ \$? = 1 ]"
    echo "the hostile caller notices what is wrong|100|$work/hostile -s $seconds -b; [ \$? = 1 ]"
    if [ -z "${LAB_NO_CARGO:-}" ]; then
        echo "Pagemark's trackers|2400|$trackers --test-threads 2 tracker::"
        echo "regions by the dirty bits|1200|$regions --exact those_of_which_there_is_one_behave"
        if [ "$set_name" = quick ]; then
            echo "a process comes back|1200|$stories --exact a_family_with_ldt"
        else
            echo "processes come back|3600|$stories --test-threads 1 with_ldt"
        fi
    fi
}

of_debug() {
    echo "$pressure"
    echo "the series' selftest|300|$work/ldt"
    oracle 41 $((seconds - 2))
    echo "hostile callers, seed 41|300|$work/hostile -s $((seconds - 2)) -r 41"
}

# Of kernels without the series.
of_unpatched() {
    local seed
    echo "$pressure"
    for seed in "${seeds[@]}"; do
        oracle "$seed" $seconds -m soft-dirty
        oracle "$seed" $seconds -m pagemap-scan
    done
    if [ -z "${LAB_NO_CARGO:-}" ]; then
        echo "regions by soft-dirty|1200|$regions --exact those_of_which_there_is_one_behave"
    fi
}

shares=()
build_tests
if [ -z "${LAB_NO_CARGO:-}" ]; then build_cargo; fi
for part in "${parts[@]}"; do
    case $part in
    # Two nodes, so that pages can be made to migrate.
    ldt) of_ldt | machine ldt 2G 7200 --append numa=fake=2 ;;
    debug) of_debug | machine ldt-debug 2G 1800 ;;
    # Debian's kernel changes its own code as it runs, which the emulator does not always get right with several processors.
    stock) of_unpatched | machine stock 2G 3600 --smp 1 ;;
    plain) of_unpatched | machine plain 2G 3600 ;;
    redis)
        if [ -n "${LAB_NO_CARGO:-}" ]; then continue; fi
        echo "Redis that swaps comes back|1500|$redis --exact a_redis_server_that_is_partly_swapped_out_comes_back --nocapture" |
            machine ldt 2G 1800
        ;;
    selftests)
        start=$SECONDS
        result=passed
        if [ "$set_name" = quick ]; then unpatched=stock; else unpatched=plain; fi
        printf '\n== the kernel'"'"'s selftests\n'
        # Some of them depend on chance: what differs twice differs.
        scripts/ldt-selftests.sh "$set_name" $unpatched || scripts/ldt-selftests.sh "$set_name" $unpatched || result="FAILED ($?)"
        note "$result" "selftests of the kernel, the same on ldt as on $unpatched" $((SECONDS - start))
        ;;
    *)
        echo "no part is called $part" >&2
        exit 2
        ;;
    esac
done

printf '\n== all, in %s s\n' $SECONDS
cat "$work/all"
! grep -q '^FAILED' "$work/all"
