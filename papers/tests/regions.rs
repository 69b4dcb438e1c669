//! `pagemark-bench region`, `peers`, `store` and `explore`, with the smallest sizes: their output
//! is complete, also if mechanisms are left out.

use std::process::{Command, Stdio};

/// Runs a benchmark and returns its output.
#[track_caller]
fn bench(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark-bench"));
    let output = command.args(arguments).stdin(Stdio::null()).output().expect("pagemark-bench starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(!text.contains("NaN") && !text.contains("inf"), "a number that is none:\n{text}");
    text
}

const REGION: [&str; 12] =
    ["region", "--mib", "1", "--rounds", "1", "--tcount", "3", "--wpp", "4", "--ppt", "1", "--ppt=64"];

#[test]
fn regions_are_measured_by_all_mechanisms_or_by_some() {
    let all = bench(&REGION);
    for line in
        ["untracked ", "mprotect ", "emulate ", "break-even of emulate and mprotect: ", "emulate to mprotect, a page: "]
    {
        assert!(all.lines().any(|text| text.starts_with(line)), "no {line}:\n{all}");
    }

    let some = bench(&[&REGION[..], &["--mechanism", "compare", "--rollback"]].concat());
    assert!(some.contains("\ncompare "), "{some}");
    for missing in ["mprotect", "emulate", "adaptive", "break-even"] {
        assert!(!some.contains(missing), "{missing}:\n{some}");
    }
}

#[test]
fn snapshots_and_transactions_are_measured_beside_their_peers() {
    let arguments = ["peers", "--mib", "4", "--cycles", "2", "--series", "1"];
    let text = bench(&arguments);
    for line in
        ["first snapshot: ", "cycle of a snapshot: ", "begin and rollback: ", "memory besides the content, MiB: "]
    {
        assert!(text.lines().any(|found| found.starts_with(line)), "no {line}:\n{text}");
    }
    let numbers: serde_json::Value =
        serde_json::from_str(&bench(&[&arguments[..], &["--json"]].concat())).expect("JSON");
    // libsigsegv need not be installed.
    let rows = numbers["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().filter(|row| row["subject"] != "libsigsegv").count(), 9, "{numbers}");
}

#[test]
fn the_store_is_measured() {
    let text = bench(&["store", "--mib", "4", "--snapshots", "2", "--rounds", "1"]);
    for word in ["insert", "look", "restore", "overhead", "page store, ns"] {
        assert!(text.contains(word), "no {word}:\n{text}");
    }
    let numbers: serde_json::Value =
        serde_json::from_str(&bench(&["store", "--mib", "4", "--snapshots", "2", "--rounds", "1", "--json"]))
            .expect("JSON");
    assert!(numbers.as_array().is_some_and(|rows| !rows.is_empty()) || numbers.is_object(), "{numbers}");
}

#[test]
fn exploration_is_measured_by_each_way_to_keep_states() {
    let text = bench(&["explore", "--program", "queue", "--rounds", "1", "--data-kib", "16"]);
    for word in ["copies", "compare", "less memory than copies"] {
        assert!(text.contains(word), "no {word}:\n{text}");
    }
}
