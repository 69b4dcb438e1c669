#!/bin/sh
# Runs the kernel's own selftests of memory management that lie in a directory, in the lab: what each has said goes to
# DIRECTORY/NAME.log, and its results, without what differs from run to run, to the standard output.
#
#   selftests.sh DIRECTORY
cd "$1" || exit 125
huge_pages() { echo "$1" >/proc/sys/vm/nr_hugepages; }

# run NAME COMMAND...
run() {
    name=$1
    shift
    timeout 400 "$@" >"$name.log" 2>&1 </dev/null
    status=$?
    # TAP's results and those of the tests of userfaultfd. Counts and addresses in them are not results.
    grep -aE '^(not )?ok |^# Totals|^Testing .*(done|skipped|failed)|^(Success|FAIL)' "$name.log" |
        sed -E 's/0x[0-9a-f]+/ADDRESS/g; s/[0-9]+(\.[0-9]+)? ?(ns|us|ms|s|MiB\/s)\b/TIME/g' >"$name.results"
    sed "s/^/$name: /" "$name.results"
    echo "$name: exit $status, $(grep -c '^ok .*' "$name.results") ok, $(grep -ci 'skip' "$name.results") skipped"
}

echo 1 >/sys/kernel/mm/ksm/run
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled
run soft-dirty ./soft-dirty
run mremap ./mremap_test
run mremap-dontunmap ./mremap_dontunmap
run madv-populate ./madv_populate
run mkdirty ./mkdirty
run mlock2 ./mlock2-tests
run ksm-functional ./ksm_functional_tests
run ksm-merge ./ksm_tests -M -p 10
run ksm-unmerge ./ksm_tests -U
run ksm-zero ./ksm_tests -Z -p 10 -z 1
run split-huge-page ./split_huge_page_test
run migration ./migration
huge_pages 32
run pagemap-ioctl ./pagemap_ioctl
run hugetlb-madvise ./hugetlb-madvise
run uffd-unit ./uffd-unit-tests
run uffd-stress-anon ./uffd-stress anon 8 2
run uffd-stress-hugetlb ./uffd-stress hugetlb 16 2
run uffd-stress-shmem ./uffd-stress shmem 8 2
run gup-longterm ./gup_longterm
run cow ./cow
huge_pages 0
run khugepaged ./khugepaged all:anon
run transhuge-stress ./transhuge-stress -d 10
