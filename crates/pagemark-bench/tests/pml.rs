//! `pagemark-bench pml` for a fraction of a second of its guest.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::{Command, Stdio};

use pagemark_report::chart::read_csv;
use pagemark_testing::skip;

const INTERVALS: [&str; 2] = ["20", "40"];

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
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Table 3.1") && text.contains("Figure 5.3"), "{text}");

    let mut numbers = BTreeMap::new();
    for entry in fs::read_dir(out.path()).expect("figures").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "csv") {
            for point in read_csv(File::open(&path).expect("it was written")).expect("numbers") {
                numbers.insert((point.chart, point.series, point.x), point.median);
            }
        }
    }
    let number = |chart: &str, series: &str, interval: &str| -> f64 {
        let key = (format!("pml-{chart}"), series.to_owned(), interval.to_owned());
        numbers.get(&key).copied().flatten().unwrap_or_else(|| panic!("{key:?} is missing: {text}"))
    };
    for interval in INTERVALS {
        // 16 exits of the guest's own, one in 5 ms.
        assert_eq!(number("table-3-1-exits", "no logging", interval), 16.0);
        // Each dirty page is a fault, and is told by the log instead.
        let dirty = number("pages", "dirty", interval);
        assert!(dirty > 1000.0, "{text}");
        assert_eq!(number("table-3-1-exits", "write-protection", interval), 16.0 + dirty);
        assert_eq!(number("pages", "PML", interval), dirty);
        let full = number("table-3-1-full", "PML", interval);
        assert!(full > 0.0 && full * 512.0 <= dirty, "{text}");
        assert_eq!(number("table-3-1-exits", "PML", interval), 16.0 + full);
        // With copies, a page is found by one of the two, and the earlier the log is active, the more by it.
        assert_eq!(number("table-5-2-faults", "write-protection", interval), dirty);
        for (name, full) in [("late PML", "late PML"), ("early PML", "early PML")] {
            let faults = number("table-5-2-faults", name, interval);
            assert_eq!(faults + number("pages", name, interval), dirty, "{name}: {text}");
            let exits = number("table-5-2-exits", name, interval);
            assert_eq!(exits, 16.0 + faults + number("table-5-2-full", full, interval), "{name}: {text}");
        }
        let early = number("table-5-2-faults", "early PML", interval);
        let late = number("table-5-2-faults", "late PML", interval);
        assert!(early < late && late <= dirty, "{text}");
        // What early activation leaves to faults is what must be copied before it is written.
        assert_eq!(number("copies", "copied before a write", interval), early, "{text}");
    }
    assert_eq!(number("figure-5-3", "early PML", "20"), 4.0);
}
