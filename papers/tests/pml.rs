//! `pagemark-bench pml` for a fraction of a second of its guest.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::{Command, Stdio};

use pagemark_report::chart::read_csv;
use pagemark_testing::skip;

const INTERVALS: [&str; 2] = ["20", "40"];

/// A row of the counts.
#[derive(serde::Deserialize)]
struct Counts {
    processors: u32,
    mode: String,
    interval_ms: u32,
    intervals: u32,
    exits: u64,
    faults: u64,
    full: u64,
    logged: u64,
    flushes: u64,
    dirty: u64,
    cow: u64,
    handling: u64,
    stopped: u64,
}

#[test]
fn events_of_logging_by_protection_and_by_the_processor_are_counted() {
    let is_there =
        |program: &str| Command::new(program).arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if is_there("bochs").is_err() || is_there("cc").is_err() {
        skip!("no Bochs, or no compiler for its machine");
    }
    let out = tempfile::tempdir().expect("a temporary directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark-bench"));
    command.args(["pml", "--time", "80", "--interval", &INTERVALS.join(","), "--out"]).arg(out.path());
    // A buffer that a checkpoint fills more than once.
    command.args(["--buffer", "1000", "--processors", "1,2", "--checkpoints", "2"]);
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let parts = ["3.1", "3.2", "3.3", "5.1", "5.2"].map(|table| format!("Table {table}: ")).into_iter();
    let pictures = ["3.1", "3.3", "3.4", "3.5", "3.6", "3.7", "3.8", "3.11", "3.12", "5.1", "5.2", "5.3"];
    for part in parts.chain(pictures.map(|figure| format!("Figure {figure}: "))) {
        assert!(text.contains(&part), "{part} is missing: {text}");
    }

    let mut counts = csv::Reader::from_path(out.path().join("pml-counts.csv")).expect("counts");
    let counts: Vec<Counts> = counts.deserialize().map(|row| row.expect("a row")).collect();
    let find = |processors: u32, mode: &str, interval_ms: u32| {
        let is_same = |counts: &&Counts| {
            (counts.processors, counts.mode.as_str(), counts.interval_ms) == (processors, mode, interval_ms)
        };
        counts.iter().find(is_same).unwrap_or_else(|| panic!("{mode} of {interval_ms} ms is missing: {text}"))
    };
    assert_eq!(find(1, "native", 10).exits, 8);
    for (processors, interval_ms, checkpoints) in [(1, 20, 4), (1, 40, 2), (2, 20, 2), (2, 40, 2)] {
        let find = |mode| find(processors, mode, interval_ms);
        // The guest's own exits, one in 10 ms for each processor.
        let own = u64::from(processors * interval_ms / 10 * checkpoints);
        let protect = find("log-protect");
        assert_eq!(protect.intervals, checkpoints, "{text}");
        // Each dirty page is a fault, and is told by the log instead.
        let dirty = protect.dirty;
        assert!(dirty > 4000, "{text}");
        assert_eq!(protect.exits, own + protect.faults, "{text}");
        let pml = find("log-pml");
        assert_eq!((pml.exits, pml.faults), (own + pml.full, 0), "{text}");
        assert!(pml.full > 0 && pml.full * 512 <= pml.logged, "{text}");
        // Less is done for a page in the log than for a fault.
        assert!(pml.handling < protect.handling, "{text}");
        for mode in ["copy-protect", "copy-late", "copy-early", "copy-buffers", "copy-last"] {
            let copy = find(mode);
            assert_eq!(copy.exits, own + copy.faults + copy.full, "{mode}: {text}");
            assert_eq!(copy.dirty, dirty, "{mode}: {text}");
            // A page is found by a fault or by the log, and of two processors by both at times.
            let found = copy.faults + copy.logged;
            let twice = if processors == 1 { 0 } else { dirty / 100 };
            assert!((dirty..=dirty + twice).contains(&found), "{mode}: {text}");
            let early = find("copy-early");
            assert!(early.faults <= copy.faults && copy.faults <= dirty + twice, "{mode}: {text}");
        }
        // The earlier the log is active, the more it finds.
        let [late, early, buffers, last] = ["copy-late", "copy-early", "copy-buffers", "copy-last"].map(&find);
        assert!(early.faults < buffers.faults && buffers.faults < last.faults, "{text}");
        assert!(early.faults < late.faults && last.faults < dirty, "{text}");
        // Late activation does something in the stop that the others do not.
        let stops = [find("copy-protect"), early, late].map(|counts| counts.stopped);
        assert!(processors > 1 || stops[0] == stops[1], "{text}");
        assert!(stops[1] < stops[2], "{text}");
        // What early activation leaves to faults is what must be copied before it is written.
        assert!(processors > 1 || early.cow == early.faults, "{text}");
        // A flush for each checkpoint, and for each buffer: more than two have more pages than two buffers.
        assert_eq!([late, early].map(|counts| counts.flushes), [u64::from(checkpoints); 2], "{text}");
        assert!(buffers.flushes > 2 * u64::from(checkpoints), "{text}");
        assert_eq!(buffers.flushes, last.flushes, "{text}");
    }

    // The figures have these numbers, and the paper's.
    let mut numbers = BTreeMap::new();
    for entry in fs::read_dir(out.path()).expect("figures").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "svg") {
            let csv = File::open(path.with_extension("csv")).expect("each picture has its numbers");
            for point in read_csv(csv).expect("numbers") {
                numbers.insert((point.chart, point.series, point.x), point.median);
            }
        }
    }
    let number = |chart: &str, series: &str, interval: &str| -> f64 {
        let key = (format!("pml-{chart}"), series.to_owned(), interval.to_owned());
        numbers.get(&key).copied().flatten().unwrap_or_else(|| panic!("{key:?} is missing: {text}"))
    };
    let ratio = find(1, "log-protect", 20).faults as f64 / find(1, "log-pml", 20).full as f64;
    assert_eq!(number("figure-3-5", "PML (counted)", "20"), ratio);
    assert_eq!(number("table-3-1-full", "PML (paper)", "20"), 42594.0);
    let scaled = number("table-5-2-faults", "early PML (counted)", "40");
    let shares = scaled / number("table-5-2-faults", "write-protection (counted)", "40");
    let exact = find(1, "copy-early", 40).faults as f64 / find(1, "copy-protect", 40).faults as f64;
    assert!((shares - exact).abs() < 1e-9, "{text}");
    assert!(number("table-5-1", "late PML, instructions (counted)", "2") > 0.0);
}
