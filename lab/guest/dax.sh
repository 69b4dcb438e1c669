#!/bin/bash
# Runs a test on memory of devices that files and programs map (DAX). The kernel's command line has reserved it.
#
#   dax.sh TEST REGION                a file system with the option dax, on the whole region
#   dax.sh TEST REGION ALIGNMENT      a device whose page table entries map so much
#
# TEST gets the arguments `dax` and the path of the file system or device. What it skips is a failure.
set -e
test=$1 region=$2 alignment=$3
if [ -z "$alignment" ]; then
    path=/mnt/dax
    # Huge pages need aligned extents.
    mkfs.ext4 -q -F -b 4096 -E stride=512,stripe-width=512 /dev/pmem$region
    mkdir -p $path
    mount -t ext4 -o dax=always /dev/pmem$region $path
else
    path=/dev/dax$region.0
    echo namespace$region.0 >/sys/bus/nd/drivers/nd_pmem/unbind
    cd /sys/bus/nd/devices/dax$region.0
    cat /proc/sys/kernel/random/uuid >uuid
    echo ram >mode
    echo "$alignment" >align
    echo namespace$region.0 >namespace
    echo dax$region.0 >/sys/bus/nd/drivers/dax_pmem/bind
    cd /
fi
"$test" dax "$path" >/tmp/results || status=$?
cat /tmp/results
if [ -n "$status" ] || grep -q 'SKIP' /tmp/results; then exit 1; fi
