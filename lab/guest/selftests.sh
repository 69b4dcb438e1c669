#!/bin/bash
# Runs, in a machine of the lab, the kernel's selftests of memory management that are in a directory. Writes the output of
# each to DIRECTORY/NAME.log and a line NAME STATUS SECONDS to DIRECTORY/ended.
#
#   selftests.sh DIRECTORY [quick|full]
cd "$1" || exit 125
extent=${2:-full}
: >ended
huge_pages() { echo "$1" >/proc/sys/vm/nr_hugepages; }

# run NAME COMMAND...
run() {
    local name=$1 status start=$SECONDS
    shift
    timeout -k 5 "$limit" "$@" >"$name.log" 2>&1 </dev/null
    status=$?
    echo "$name $status $((SECONDS - start))" >>ended
}

# These take minutes in emulation.
run_long() { if [ "$extent" = full ]; then limit=1200 run "$@"; fi; }

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
