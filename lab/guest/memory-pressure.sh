#!/bin/sh
# Gives a machine of the lab swap in compressed memory, and makes KSM and khugepaged work all the time. Runs before tests.
set -e
[ -e /dev/zram0 ] || cat /sys/class/zram-control/hot_add >/dev/null
grep -q zram /proc/swaps || {
    echo "${1:-512M}" >/sys/block/zram0/disksize
    mkswap /dev/zram0 >/dev/null
    swapon /dev/zram0
}
echo 1 >/sys/kernel/mm/ksm/run
echo 10 >/sys/kernel/mm/ksm/sleep_millisecs
echo 1000 >/sys/kernel/mm/ksm/pages_to_scan
# A paravirtualized guest of Xen has no huge pages.
khugepaged=/sys/kernel/mm/transparent_hugepage/khugepaged
if [ -d $khugepaged ]; then
    echo 100 >$khugepaged/scan_sleep_millisecs
    echo 8192 >$khugepaged/pages_to_scan
fi
