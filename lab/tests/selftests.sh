#!/bin/bash
# Runs the kernel's own selftests of memory management that lie in a directory, in the lab: what each has said goes to
# DIRECTORY/NAME.log, and its results, without what differs from run to run, to the standard output. How long each took goes
# to DIRECTORY/seconds.
#
#   selftests.sh DIRECTORY [quick|full]
cd "$1" || exit 125
set_name=${2:-full}
>seconds
huge_pages() { echo "$1" >/proc/sys/vm/nr_hugepages; }

# run NAME COMMAND...
run() {
    local name=$1 status start=$SECONDS
    shift
    timeout -k 5 "$limit" "$@" >"$name.log" 2>&1 </dev/null
    status=$?
    printf '%s %s s, ' "$name" $((SECONDS - start)) >>seconds
    results_of "$name" <"$name.log"
    printf '%s\texit %s\n' "$name" $status
}

# A line for each result: NAME: WHAT, a tab, and ok, not ok, skip or whatever the test calls it. TAP's lines are named by what was
# announced before or by what they say; those of userfaultfd and khugepaged have their own form.
results_of() {
    sed -E 's/\x1b\[[0-9;]*m//g; s/0x[0-9a-f]+/ADDRESS/g; s/[0-9]+(\.[0-9]+)?( ?(ns|us|ms|s|MiB\/s)\b|%)/N/g; s/Extra pages .*/Extra pages/' |
        awk -v name="$1" '
            function result(what, is) {
                what = name ": " what
                if (count[what]++) what = what " (" count[what] ")"
                print what "\t" is
            }
            /^# \[RUN\] / { announced = substr($0, 9); next }
            /^(not )?ok / {
                is = /^not/ ? "not ok" : /# SKIP/ ? "skip" : /# XFAIL/ ? "xfail" : "ok"
                sub(/^(not )?ok [0-9]+ ?/, "")
                result(announced != "" ? announced : $0, is)
                announced = ""
            }
            /^Testing .*(done|skipped|failed)/ {
                is = /skipped/ ? "skip" : /done/ ? "ok" : "not ok"
                sub(/\.\.\. .*/, "")
                result($0, is)
            }
            /\.\.\. *(OK|Fail|Skip)/ {
                is = /OK/ ? "ok" : /Skip/ ? "skip" : "not ok"
                sub(/\.\.\..*/, "")
                result($0, is)
            }'
}

# Those that take minutes in emulation.
run_long() { if [ "$set_name" = full ]; then limit=1200 run "$@"; fi; }

limit=400
echo 1 >/sys/kernel/mm/ksm/run
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
run soft-dirty ./soft-dirty
run mremap ./mremap_test
run mremap-dontunmap ./mremap_dontunmap
run madv-populate ./madv_populate
run mkdirty ./mkdirty
run mlock2 ./mlock2-tests
run_long ksm-functional ./ksm_functional_tests
run ksm-merge ./ksm_tests -M -p 10
run ksm-unmerge ./ksm_tests -U
run ksm-zero ./ksm_tests -Z -p 10 -z 1
run_long split-huge-page ./split_huge_page_test
run_long migration ./migration
huge_pages 32
run pagemap-ioctl ./pagemap_ioctl
run hugetlb-madvise ./hugetlb-madvise
run uffd-unit-move ./uffd-unit-tests -f move
run_long uffd-unit ./uffd-unit-tests
run uffd-stress-anon ./uffd-stress anon 8 2
run uffd-stress-hugetlb ./uffd-stress hugetlb 16 2
run uffd-stress-shmem ./uffd-stress shmem 8 2
run gup-longterm ./gup_longterm
run cow ./cow
huge_pages 0
run khugepaged ./khugepaged all:anon
run transhuge-stress ./transhuge-stress -d 10
