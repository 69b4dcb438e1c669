//! A small run of the comparison of deltas with whole pages.

use std::process::Command;

use pagemark_process::criu::Criu;
use pagemark_testing::skip;

#[test]
fn deltas_of_a_process_take_less_than_half_of_the_bytes() {
    if let Err(error) = Criu::find() {
        skip!("{error}");
    }
    let words = "process --mib 8 --percent 50 --every-ms 20 --checkpoints 2 --mechanism compare --deltas 2 --json";
    let output = Command::new(env!("CARGO_BIN_EXE_pagemark-bench")).args(words.split(' ')).output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let ratios = rows[0][1]["bytes_ratio"].as_array().expect("a sample a turn");
    let ratios: Vec<f64> = ratios.iter().filter_map(serde_json::Value::as_f64).collect();
    assert!(ratios.len() == 2 && ratios.iter().all(|&ratio| ratio > 0.0 && ratio < 0.5), "{rows:#}");
}
