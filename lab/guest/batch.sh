#!/bin/bash
# Runs tests one after the other in a machine of the lab, each for a limited time.
#
#   batch.sh TESTS RESULTS
#
# A line of TESTS is NAME|SECONDS|COMMAND. RESULTS gets a line NAME|STATUS|SECONDS for each test that has ended; the host
# counts a test without a line as failed.
while IFS='|' read -r name limit command <&3; do
    if [ -z "$name" ]; then continue; fi
    printf '\n-- %s\n' "$name"
    start=$SECONDS
    timeout -k 10 "$limit" bash -c "$command" </dev/null 2>&1
    status=$?
    took=$((SECONDS - start))
    if [ $status != 0 ]; then printf 'failed: %s (exit %s)\n' "$name" $status; fi
    echo "$name|$status|$took" >>"$2"
done 3<"$1"
