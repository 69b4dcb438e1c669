#!/usr/bin/env bash
# Runs the kernel's own selftests of memory management on the kernel with the series and on one without it, and compares
# their results: a difference is a failure.
#
#   ldt-selftests.sh [quick|full] [UNPATCHED [PATCHED]]
#
# UNPATCHED is stock, Debian's own kernel, which is only fetched (or plain, built as PATCHED is); PATCHED is ldt.
# quick leaves out what takes minutes in emulation. LDT_SELFTESTS_OUTPUT=DIR keeps what each test has said.
set -euo pipefail
cd "$(dirname "$0")/.."
set_name=${1:-quick}
unpatched=${2:-stock}
patched=${3:-ldt}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/pagemark/lab
programs=(soft-dirty mremap_test mremap_dontunmap madv_populate mkdirty mlock2-tests ksm_functional_tests ksm_tests
    split_huge_page_test migration pagemap_ioctl hugetlb-madvise uffd-unit-tests uffd-stress gup_longterm cow khugepaged
    transhuge-stress)
libraries=(libc6-dev libcap-dev libnuma-dev liburing-dev rsync)

say() { printf 'selftests: %s\n' "$*" >&2; }

# Builds the programs from the kernel's source as it comes, unless they are there. The series adds a test and changes none.
need_programs() {
    local source version
    source=$(lab/lab source)
    version=$(echo "${programs[@]}" | cat "$cache/source/version" - | sha256sum | cut -c 1-16)
    directory=$cache/selftests-$version
    if [ -d "$directory" ]; then return; fi
    lab/lab install "${libraries[@]}"
    say "building the selftests"
    work=$cache/selftests.$$
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/source" "$work/build" "$work/done"
    tar -C "$work/source" --strip-components=1 -xf "$source" --exclude='*/drivers' --exclude='*/sound' --exclude='*/net' \
        --exclude='*/Documentation' --exclude='*/fs'
    nice -n 15 make -s -C "$work/source" "O=$work/build" ARCH=x86 headers_install >"$work/log" 2>&1 &&
        nice -n 15 make -s "-j$(nproc)" -C "$work/source/tools/testing/selftests/mm" "OUTPUT=$work/done" \
            "KHDR_INCLUDES=-isystem $work/build/usr/include" TEST_PROGS= TEST_GEN_PROGS= \
            "TEST_GEN_FILES=$(printf "$work/done/%s " "${programs[@]}")" >>"$work/log" 2>&1 || {
        tail -n 30 "$work/log" >&2
        say "building failed"
        exit 1
    }
    mv "$work/done" "$directory"
    rm -rf "$work"
    trap - EXIT
}

# run_on KERNEL: prints its results.
run_on() {
    local status=0 processors=2
    # See lab-test.sh.
    if [ "$1" = stock ]; then processors=1; fi
    mkdir -p "$output/$1"
    cp "$directory"/* "$output/$1"
    # A gigabyte and more is moved by tests of mremap; pages migrate where there are two nodes.
    lab/lab run --kernel "$1" --memory "$memory" --smp $processors --append numa=fake=2 --timeout "$limit" --share "$output" \
        -- lab/tests/selftests.sh "$output/$1" "$set_name" >"$output/$1.results" || status=$?
    if [ $status != 0 ]; then
        tail -n 5 "$output/$1.results" >&2
        say "the run on $1 has failed ($status)"
        exit 1
    fi
    say "$1: $(grep -c '	ok$' "$output/$1.results") ok, $(grep -c '	not ok$' "$output/$1.results") not ok; $(cat "$output/$1/seconds")"
}

case $set_name in
quick) memory=2G limit=1800 ;;
full) memory=4G limit=3600 ;;
*)
    say "quick or full?"
    exit 2
    ;;
esac
need_programs
output=${LDT_SELFTESTS_OUTPUT:-}
if [ -z "$output" ]; then
    output=$(mktemp -d "$cache/selftests-run.XXXXXX")
    trap 'rm -rf "$output"' EXIT
else
    mkdir -p "$output"
    output=$(realpath "$output")
fi
run_on "$unpatched"
run_on "$patched"
# Debian's kernel is configured in another way, so that it skips other tests, and has some that ours has not: there, what both
# have run must be the same. Everything must be where only the series makes the difference.
if awk -F '\t' -v exact="$([ "$unpatched" = stock ] || echo yes)" -v one="$unpatched" -v other="$patched" '
    FNR == NR { first[$1] = $2; next }
    { second[$1] = $2 }
    END {
        for (test in first) {
            if (!(test in second)) { if (exact) differ(test, first[test], "nothing"); continue }
            if (first[test] == second[test]) { same++; continue }
            if (exact || (first[test] != "skip" && second[test] != "skip")) differ(test, first[test], second[test])
        }
        for (test in second) if (exact && !(test in first)) differ(test, "nothing", second[test])
        printf "selftests: %d results are the same on %s and on %s, %d are not\n", same, one, other, different
        exit !(same && !different)
    }
    function differ(test, a, b) { different++; printf "%s: %s on %s, %s on %s\n", test, a, one, b, other }
    ' "$output/$unpatched.results" "$output/$patched.results"; then
    exit 0
fi
say "$patched differs from $unpatched"
exit 1
