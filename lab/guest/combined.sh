#!/bin/sh
# Prepares a machine of the lab for `combined`: huge pages, two nodes whose pages the kernel moves to who uses them.
echo 16 >/proc/sys/vm/nr_hugepages
echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled
if [ -e /proc/sys/kernel/numa_balancing ]; then
    echo 1 >/proc/sys/kernel/numa_balancing
    # Debian's kernels have no such settings.
    settings=/sys/kernel/debug/sched/numa_balancing
    if [ -d $settings ]; then
        echo 1 >$settings/scan_delay_ms
        echo 20 >$settings/scan_period_min_ms
        echo 100 >$settings/scan_period_max_ms
    fi
fi
