//! `pagemark-bench ldt`, with the smallest sizes.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// Runs the benchmark and returns its output.
#[track_caller]
fn bench(out: &Path, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_pagemark-bench"))
        .args(["ldt", "--memory", "1M", "--rounds", "1", "--seconds", "0.2", "--out"])
        .arg(out)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("pagemark-bench starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Series, x label and median of each point of a figure.
fn points(out: &Path, name: &str) -> Vec<(String, String, Option<f64>)> {
    let mut reader = csv::Reader::from_path(out.join(name).with_extension("csv")).expect("the figure's numbers");
    let headers = reader.headers().expect("a head").clone();
    let column = |name| headers.iter().position(|header| header == name).expect("a column");
    let (series, x, median) = (column("series"), column("x"), column("median"));
    let rows = reader.records().map(|row| row.expect("a row"));
    rows.map(|row| (row[series].to_owned(), row[x].to_owned(), row[median].parse().ok())).collect()
}

/// X labels and medians of a series.
fn of_series(points: &[(String, String, Option<f64>)], name: &str) -> Vec<(String, Option<f64>)> {
    points.iter().filter(|point| point.0 == name).map(|point| (point.1.clone(), point.2)).collect()
}

#[test]
fn page_faults_are_one_a_page_or_none() {
    let out = TempDir::new().expect("a directory");
    let printed = bench(out.path(), &["--figure", "3,6"]);
    let faults = points(out.path(), "figure-6");
    let at = |count: f64| vec![("1 MiB".to_owned(), Some(count))];
    assert_eq!(of_series(&faults, "untracked"), at(0.0));
    for (mechanism, count) in [("pagemap-scan", 256.0), ("ldt", 0.0)] {
        if printed.contains(&format!("{mechanism}: -, because")) {
            assert_eq!(of_series(&faults, mechanism), [("1 MiB".to_owned(), None)]);
        } else {
            assert_eq!(of_series(&faults, mechanism), at(count), "{mechanism}");
        }
    }
    let times = points(out.path(), "figure-3");
    assert_eq!(times.len(), 5);
    assert!(of_series(&times, "untracked")[0].1 > Some(0.0));
    assert!(!out.path().join("figure-5.csv").exists(), "it was not asked for");
}

#[test]
fn each_figure_has_its_table_its_numbers_and_its_picture() {
    let out = TempDir::new().expect("a directory");
    let printed = bench(&out.path().join("new"), &["--figure", "3,5,6,7,8,9,11,helpers"]);
    let names = [
        "figure-3",
        "figure-5",
        "figure-6",
        "figure-7a",
        "figure-7b",
        "figure-7c",
        "figure-8a",
        "figure-8b",
        "figure-8c",
        "figure-9a-time",
        "figure-9b-time",
        "figure-9c-time",
        "figure-9a-overhead",
        "figure-9b-overhead",
        "figure-9c-overhead",
        "figure-11a",
        "figure-11b",
        "figure-11a-restart",
        "figure-11b-restart",
        "helpers",
    ];
    for name in names {
        let file = out.path().join("new").join(name);
        let picture = fs::read_to_string(file.with_extension("svg")).expect("a picture");
        assert!(picture.contains("<svg") && picture.ends_with("</svg>\n"), "{name}");
        assert!(!points(&out.path().join("new"), name).is_empty(), "{name}");
    }
    for title in ["Figure 3:", "Figure 5:", "Figure 6:", "Figure 7b:", "Figure 8c:", "Figure 9a:", "Figure 11b:"] {
        assert!(printed.contains(title), "{title} is not in {printed}");
    }
    assert_eq!(fs::read_dir(out.path().join("new")).expect("the directory").count(), 2 * names.len());
}

#[test]
fn redis_is_measured_by_mechanism() {
    let finds_server = Command::new("redis-server").arg("--version").stdout(Stdio::null()).status();
    if !finds_server.is_ok_and(|status| status.success()) {
        pagemark_testing::skip!("no redis-server");
    }
    if !nix::unistd::geteuid().is_root() {
        pagemark_testing::skip!("tracking another process needs root");
    }
    let out = TempDir::new().expect("a directory");
    let printed = bench(out.path(), &["--figure", "10"]);
    for name in ["figure-10a", "figure-10b", "table-3a", "table-3b"] {
        let points = points(out.path(), name);
        assert_eq!(points.len(), 15, "{name}");
        for (series, interval, median) in points {
            let works = !printed.contains(&format!("{series}: -, because"));
            assert_eq!(works, median > Some(0.0), "{name}: {series} at {interval}");
        }
    }
}

#[test]
fn another_kernels_numbers_stand_beside_this_ones() {
    let out = TempDir::new().expect("a directory");
    let (first, second) = (out.path().join("first"), out.path().join("second"));
    bench(&first, &["--figure", "helpers"]);
    let before = points(&first, "helpers");
    let against = first.join("helpers.csv");
    bench(&second, &["--figure", "helpers", "--against", against.to_str().expect("a path")]);
    let both = points(&second, "helpers");
    assert_eq!(both.len(), 2 * before.len());
    assert_eq!(both[..before.len()], before[..]);

    let wrong = out.path().join("wrong.csv");
    fs::write(&wrong, "a,b\n1,2\n").expect("a file");
    let output = Command::new(env!("CARGO_BIN_EXE_pagemark-bench"))
        .args(["ldt", "--memory", "1M", "--rounds", "1", "--figure", "helpers", "--against"])
        .arg(&wrong)
        .output()
        .expect("pagemark-bench starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("--against"), "{output:?}");
}
