//! `pagemark-bench vm` on a small machine.

use std::process::Command;

use pagemark_testing::{guest_program, skip};
use serde_json::Value;

#[test]
fn checkpoints_and_the_ways_of_qemu_are_measured() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark-bench"));
    command.args(["vm", "--json", "--mib", "16", "--pages", "64", "--every-ms", "50"]);
    let output = command.args(["--turns", "1", "--peers", "1", "--checkpoints", "3"]).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let measured: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = measured["rows"].as_array().expect("rows");
    let strategies: Vec<_> = rows.iter().map(|row| &row["strategy"]).collect();
    assert_eq!(strategies, ["pre-copy", "stop-and-copy", "copy-on-write"], "{measured}");
    for row in rows {
        // QEMU reports a pause for each checkpoint. One has the pages that the machine writes in a pass if the machine
        // gets that far in the interval, which it does in most, but not in each on a busy host.
        let mut dirty: Vec<f64> =
            row["dirty_pages"].as_array().expect("pages").iter().map(|pages| pages.as_f64().expect("pages")).collect();
        dirty.sort_by(f64::total_cmp);
        let checkpoints = dirty.len();
        assert!(checkpoints >= 3 && dirty[checkpoints / 2] >= 64.0, "{row}");
        assert_eq!(row["paused_us"].as_array().map(Vec::len), Some(checkpoints), "{row}");
        let times = |part: &str| row[part].as_array().expect("times").iter().filter_map(Value::as_f64).sum::<f64>();
        let parts: f64 = ["stop_us", "disks_us", "devices_us", "memory_downtime_us"].map(times).iter().sum();
        assert!(parts > 0.0 && parts <= times("downtime_us"), "{row}");
        assert!(row["predicted"]["downtime_us"].as_f64().is_some_and(|downtime_us| downtime_us > 0.0), "{row}");
    }
    let peers = measured["peers"].as_array().expect("peers");
    assert_eq!(peers.len(), 4, "{measured}");
    for peer in peers {
        let paused = peer["paused_us"][0].as_f64().expect("a time");
        assert!(paused > 0.0 && paused <= peer["total_us"][0].as_f64().expect("a time"), "{peer}");
    }
}
