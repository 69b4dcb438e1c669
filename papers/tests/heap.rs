//! `pagemark-bench heap`, with the smallest sizes. Each program checks its own result, and the
//! checkpoints are searched for the objects that are live at its end.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagemark-bench"))
        .args(["heap", "--scale", "1024", "--rounds", "1", "--interval-ms", "4", "--verify"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("pagemark-bench starts")
}

#[track_caller]
fn printed(out: &Path, arguments: &[&str]) -> String {
    let out = out.to_str().expect("a name in UTF-8");
    let output = bench(&[&["--out", out], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Rows of a figure's numbers, without the head.
fn rows(out: &Path, name: &str) -> usize {
    fs::read_to_string(out.join(name).with_extension("csv")).expect("the figure's numbers").lines().count() - 1
}

#[test]
fn programs_with_objects_run_with_parts_and_lose_none() {
    let out = TempDir::new().expect("a directory");
    if let Err(error) = pagemark::track::check(pagemark::Mechanism::PagemapScan, pagemark::track::Scope::OwnMemory) {
        pagemark_testing::skip!("{error}");
    }
    let programs = "bayes,intruder,vacation,genome";
    let text = printed(out.path(), &["--program", programs, "--parts", "4", "--figure", "6,8,9,10"]);
    for word in
        ["14 990 453", "1.34 GB", "base", "pagemap-scan", "adaptive", "static-4", "dynamic-4", "cost-1", "cost-4"]
    {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
    // Two allocators and two numbers of views.
    assert_eq!(rows(out.path(), "figure-8"), 4 * 3);
    for name in ["figure-9", "figure-9-faults", "figure-10-time", "figure-10-volume"] {
        assert_eq!(rows(out.path(), name), 4 * 7, "{name}");
        assert!(out.path().join(name).with_extension("svg").exists());
    }
}

#[test]
fn the_interval_is_varied_on_genome() {
    let out = TempDir::new().expect("a directory");
    if let Err(error) = pagemark::track::check(pagemark::Mechanism::PagemapScan, pagemark::track::Scope::OwnMemory) {
        pagemark_testing::skip!("{error}");
    }
    printed(out.path(), &["--figure", "11"]);
    assert_eq!((rows(out.path(), "figure-11-time"), rows(out.path(), "figure-11-volume")), (6 * 8, 6 * 8));
}

#[test]
fn tokyo_cabinet_runs_with_the_preloaded_heap() {
    if !Path::new("/usr/lib/x86_64-linux-gnu/libtokyocabinet.so.9").exists() {
        pagemark_testing::skip!("no Tokyo Cabinet");
    }
    if let Err(error) = pagemark::track::check(pagemark::Mechanism::PagemapScan, pagemark::track::Scope::OwnMemory) {
        pagemark_testing::skip!("{error}");
    }
    let out = TempDir::new().expect("a directory");
    let text = printed(out.path(), &["--program", "tokyo64,tokyo128,tokyo1024", "--parts", "4", "--figure", "7,10"]);
    assert!(text.contains("10M @ 64B"), "{text}");
    // Its heap cannot be tracked by signals.
    let volume = fs::read_to_string(out.path().join("figure-10-volume.csv")).expect("the figure's numbers");
    assert!(volume.contains("base,tokyo 64 B,\"written, MiB\",,,,0,"), "{volume}");
    assert_eq!(volume.lines().filter(|line| line.starts_with("figure-10-volume,static-4")).count(), 3);
}

#[test]
fn redis_and_python_run_with_the_preloaded_heap() {
    let is_there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !is_there("redis-server") || !is_there("python3") {
        pagemark_testing::skip!("no Redis or no Python");
    }
    if let Err(error) = pagemark::track::check(pagemark::Mechanism::PagemapScan, pagemark::track::Scope::OwnMemory) {
        pagemark_testing::skip!("{error}");
    }
    let out = TempDir::new().expect("a directory");
    let text = printed(out.path(), &["--program", "redis,python", "--parts", "4", "--figure", "6,8,10"]);
    assert!(text.contains("views-4") && text.contains("cost-4"), "{text}");
    let volume = fs::read_to_string(out.path().join("figure-10-volume.csv")).expect("the figure's numbers");
    let of = |variant: &str, program: &str| -> f64 {
        let start = format!("figure-10-volume,{variant},{program},\"written, MiB\",");
        let line = volume.lines().find(|line| line.starts_with(&start)).expect("a line for each variant and program");
        line[start.len()..].split(',').next().and_then(|median| median.parse().ok()).expect("a number")
    };
    for program in ["redis", "python"] {
        for variant in ["pagemap-scan", "static-4", "dynamic-4", "cost-4"] {
            assert!(of(variant, program) > 0.0, "{variant} {program}: {volume}");
        }
    }
}

#[test]
fn a_number_of_parts_that_a_page_cannot_have_is_refused() {
    let output = bench(&["--parts", "3"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("2, 4 or 8"));
}
