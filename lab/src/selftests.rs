//! The kernel's own selftests of memory management, run on two kernels, whose results are compared:
//! a difference is a failure.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use regex_lite::Regex;

use crate::kernel::{self, Kernel};
use crate::machine::{Machine, Outcome};
use crate::test_plan::Extent;
use crate::{Error, Result, cache, command, kernel_build, packages, progress};

/// The programs that lab/guest/selftests.sh runs.
const PROGRAMS: [&str; 18] = [
    "soft-dirty",
    "mremap_test",
    "mremap_dontunmap",
    "madv_populate",
    "mkdirty",
    "mlock2-tests",
    "ksm_functional_tests",
    "ksm_tests",
    "split_huge_page_test",
    "migration",
    "pagemap_ioctl",
    "hugetlb-madvise",
    "uffd-unit-tests",
    "uffd-stress",
    "gup_longterm",
    "cow",
    "khugepaged",
    "transhuge-stress",
];
/// What compiling them needs.
const PACKAGES: [&str; 5] = ["libc6-dev", "libcap-dev", "libnuma-dev", "liburing-dev", "rsync"];

/// The result of each test by its name, such as `cow: Basic COW` and `not ok`, and the exit status
/// of each program.
pub type Results = BTreeMap<String, String>;

/// Runs the selftests on both kernels and compares their results. Some of them depend on chance, so
/// that a difference counts only if a second run has the same one.
///
/// Returns whether the results are the same. What each test printed is kept below `output`.
///
/// # Errors
/// If the selftests cannot be built, or a machine fails.
pub fn compare_kernels(extent: Extent, unpatched: Kernel, patched: Kernel, output: &Path) -> Result<bool> {
    let programs = programs()?;
    let mut before = None;
    for attempt in 1..=2 {
        let first = run_on(unpatched, &programs, extent, output)?;
        let second = run_on(patched, &programs, extent, output)?;
        let comparison = compare(&first, &second, unpatched != Kernel::Stock);
        for difference in &comparison.differences {
            println!("{difference} ({unpatched}, {patched})");
        }
        println!(
            "selftests: {} results are the same on {unpatched} and on {patched}, {} are not",
            comparison.same,
            comparison.differences.len()
        );
        let comparison = match &before {
            None => comparison,
            Some(before) => comparison.repeated(before),
        };
        if comparison.are_equal() {
            return Ok(true);
        }
        if attempt == 1 {
            progress!("running the selftests again");
        }
        before = Some(comparison);
    }
    Ok(false)
}

/// Builds the programs from the kernel's source without the series, which adds a test and changes
/// none.
fn programs() -> Result<PathBuf> {
    let version = kernel_build::source_version()?;
    let key = kernel::key([version.as_slice(), kernel::words(&PROGRAMS).as_bytes()]);
    let directory = cache::lab().join(format!("selftests-{key}"));
    if directory.exists() {
        return Ok(directory);
    }
    packages::install(&PACKAGES)?;
    let _lock = cache::lock("building")?;
    if directory.exists() {
        return Ok(directory);
    }
    progress!("building the selftests (about 2 min)");
    cache::remove_abandoned(&cache::lab(), "selftests");
    let work = cache::lab().join(format!("selftests.{}", std::process::id()));
    let built =
        build(&work).and_then(|done| std::fs::rename(done, &directory).map_err(Error::file("rename", &directory)));
    cache::remove(&work)?;
    built.map(|()| directory)
}

fn build(work: &Path) -> Result<PathBuf> {
    let (source, headers, done) = (work.join("source"), work.join("build"), work.join("done"));
    for part in [&headers, &done] {
        cache::create(part)?;
    }
    kernel_build::unpack_source(&source, &["*/drivers", "*/sound", "*/net", "*/Documentation", "*/fs"])?;
    let log = work.join("log");
    let mut make = command::at_low_priority("make", 15);
    make.args(["-s", "-C"]).arg(&source).arg(format!("O={}", headers.display())).args(["ARCH=x86", "headers_install"]);
    command::logged(&mut make, &log, "installing the kernel's headers", "see above")?;
    let files: Vec<String> = PROGRAMS.iter().map(|program| done.join(program).display().to_string()).collect();
    let mut make = command::at_low_priority("make", 15);
    make.arg("-s").arg(format!("-j{}", kernel_build::processors())).arg("-C");
    make.arg(source.join("tools/testing/selftests/mm")).arg(format!("OUTPUT={}", done.display()));
    make.arg(format!("KHDR_INCLUDES=-isystem {}/usr/include", headers.display()));
    make.args(["TEST_PROGS=", "TEST_GEN_PROGS="]).arg(format!("TEST_GEN_FILES={}", files.join(" ")));
    command::logged(&mut make, &log, "building the selftests", "see above")?;
    Ok(done)
}

fn run_on(kernel: Kernel, programs: &Path, extent: Extent, output: &Path) -> Result<Results> {
    let directory = output.join(kernel.name());
    cache::create(&directory)?;
    let mut copy = Command::new("cp");
    copy.arg("-rT").arg(programs).arg(&directory);
    command::run(&mut copy, "copying the selftests", "check the space on the disk")?;
    let mut machine = Machine::new(kernel);
    // Tests of mremap move a gigabyte and more.
    (machine.memory, machine.limit) = match extent {
        Extent::Quick => ("2G".to_owned(), Duration::from_secs(1800)),
        Extent::Full => ("4G".to_owned(), Duration::from_secs(3600)),
    };
    if kernel == Kernel::Stock {
        machine.processors = crate::test_plan::STOCK_PROCESSORS;
    }
    // Pages migrate where there are two nodes.
    machine.append = "numa=fake=2".to_owned();
    machine.shares = vec![output.to_owned()];
    let log = output.join(format!("{kernel}.output"));
    let file = File::create(&log).map_err(Error::file("create", &log))?;
    let script = crate::source_root().join("lab/guest/selftests.sh");
    let outcome = machine.run(&[script.into(), directory.clone().into(), extent.name().into()], Some(&file))?;
    if outcome != Outcome::Exited(0) {
        let text = std::fs::read(&log).unwrap_or_default();
        return Err(Error::unmet(
            format!("the selftests on {kernel} did not end: {outcome}\n{}", command::last_lines(&text, 10)),
            "see above",
        ));
    }
    let ended = directory.join("ended");
    let ended = std::fs::read_to_string(&ended).map_err(Error::file("read", &ended))?;
    let mut results = Results::new();
    let mut times = String::new();
    for line in ended.lines() {
        let [name, status, seconds] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        let log = directory.join(format!("{name}.log"));
        let log = std::fs::read(&log).map_err(Error::file("read", &log))?;
        results.extend(parse(name, &String::from_utf8_lossy(&log)));
        results.insert(name.to_owned(), format!("exit {status}"));
        let _ = write!(times, "{name} {seconds} s, ");
    }
    let count = |result: &str| results.values().filter(|value| *value == result).count();
    progress!("{kernel}: {} ok, {} not ok; {times}", count("ok"), count("not ok"));
    Ok(results)
}

/// The results in a program's output, named without what differs from run to run: addresses, times
/// and rates.
///
/// Lines of TAP are named by the test that was announced before, or by their own text; the programs
/// of userfaultfd and khugepaged have forms of their own.
pub fn parse(program: &str, log: &str) -> Results {
    let mut results = Results::new();
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    let mut announced: Option<String> = None;
    for line in log.lines() {
        let line = without_noise(line);
        let (name, result) = if let Some(name) = line.strip_prefix("# [RUN] ") {
            announced = Some(name.to_owned());
            continue;
        } else if let Some(found) = tap(&line) {
            (announced.take().filter(|name| !name.is_empty()).unwrap_or(found.0), found.1)
        } else if let Some(found) = userfaultfd(&line).or_else(|| khugepaged(&line)) {
            found
        } else {
            continue;
        };
        let name = format!("{program}: {name}");
        let count = counts.entry(name.clone()).or_default();
        *count += 1;
        results.insert(if *count == 1 { name } else { format!("{name} ({count})") }, result.to_owned());
    }
    results
}

fn without_noise(line: &str) -> String {
    static NOISE: LazyLock<[(Regex, &str); 4]> = LazyLock::new(|| {
        [
            (r"\x1b\[[0-9;]*m", ""),
            (r"0x[0-9a-f]+", "ADDRESS"),
            (r"[0-9]+(\.[0-9]+)?( ?(ns|us|ms|s|MiB/s)\b|%)", "N"),
            (r"Extra pages .*", "Extra pages"),
        ]
        .map(|(pattern, replacement)| (Regex::new(pattern).expect("a constant pattern"), replacement))
    });
    let mut line = line.to_owned();
    for (pattern, replacement) in NOISE.iter() {
        line = pattern.replace_all(&line, *replacement).into_owned();
    }
    line
}

/// `ok 3 NAME`, `not ok 3 NAME`, `ok 3 NAME # SKIP`.
fn tap(line: &str) -> Option<(String, &'static str)> {
    let (rest, passed) =
        line.strip_prefix("not ok ").map(|rest| (rest, false)).or(line.strip_prefix("ok ").map(|rest| (rest, true)))?;
    let result = match () {
        () if !passed => "not ok",
        () if line.contains("# SKIP") => "skip",
        () if line.contains("# XFAIL") => "xfail",
        () => "ok",
    };
    let without_number = rest.trim_start_matches(|character: char| character.is_ascii_digit());
    let name = if without_number.len() < rest.len() {
        without_number.strip_prefix(' ').unwrap_or(without_number)
    } else {
        line
    };
    Some((name.to_owned(), result))
}

/// `Testing NAME... done`.
fn userfaultfd(line: &str) -> Option<(String, &'static str)> {
    if !line.starts_with("Testing ") {
        return None;
    }
    let result = if line.contains("skipped") {
        "skip"
    } else if line.contains("done") {
        "ok"
    } else if line.contains("failed") {
        "not ok"
    } else {
        return None;
    };
    Some((line.split("... ").next().unwrap_or(line).to_owned(), result))
}

/// `NAME...   OK`.
fn khugepaged(line: &str) -> Option<(String, &'static str)> {
    static FORM: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\.\.\. *(OK|Fail|Skip)").expect("a constant pattern"));
    if !FORM.is_match(line) {
        return None;
    }
    let result = if line.contains("OK") {
        "ok"
    } else if line.contains("Skip") {
        "skip"
    } else {
        "not ok"
    };
    Some((line.split("...").next().unwrap_or(line).to_owned(), result))
}

/// What two kernels' results have in common.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// The number of tests with the same result.
    pub same: usize,
    /// A line for each test whose results differ.
    pub differences: Vec<String>,
}

impl Comparison {
    /// Whether there are results, and none differs.
    pub fn are_equal(&self) -> bool {
        self.same > 0 && self.differences.is_empty()
    }

    /// The differences that the comparison of an earlier run has, too.
    pub fn repeated(mut self, before: &Comparison) -> Comparison {
        self.differences.retain(|difference| before.differences.contains(difference));
        self
    }
}

/// Compares the results of two kernels. If `exact` is false, the kernels are configured
/// differently, so that tests that one of them lacks or skips do not count.
pub fn compare(first: &Results, second: &Results, exact: bool) -> Comparison {
    const MISSING: &str = "nothing";
    let mut comparison = Comparison::default();
    for name in first.keys().chain(second.keys().filter(|name| !first.contains_key(*name))) {
        let result = |results: &Results| results.get(name).map_or(MISSING, String::as_str).to_owned();
        let (one, other) = (result(first), result(second));
        if one == other {
            comparison.same += 1;
        } else if exact || [&one, &other].iter().all(|result| *result != MISSING && *result != "skip") {
            comparison.differences.push(format!("{name}: {one}, {other}"));
        }
    }
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(pairs: &[(&str, &str)]) -> Results {
        pairs.iter().map(|&(name, result)| (name.to_owned(), result.to_owned())).collect()
    }

    #[test]
    fn results_are_named_by_announcements_or_their_own_text() {
        let log = "TAP version 13\n1..5\nok 1 Test test_simple\nnot ok 2 madvise 0x7f12ab failed after 12.5 ms\n\
                   # [RUN] Basic COW ... with swap\nok 3 No leak\nok 4 dirty bit # SKIP no hugetlb\nok 5 x # XFAIL y\n";
        let expected = [
            ("cow: Basic COW ... with swap", "ok"),
            ("cow: Test test_simple", "ok"),
            ("cow: dirty bit # SKIP no hugetlb", "skip"),
            ("cow: madvise ADDRESS failed after N", "not ok"),
            ("cow: x # XFAIL y", "xfail"),
        ];
        assert_eq!(parse("cow", log), results(&expected));
    }

    #[test]
    fn repeated_names_are_numbered() {
        let expected = [("p: same", "ok"), ("p: same (2)", "not ok"), ("p: same (3)", "ok")];
        assert_eq!(parse("p", "ok 1 same\nnot ok 2 same\nok 3 same\n"), results(&expected));
    }

    #[test]
    fn an_announcement_names_one_result() {
        let expected = [("p: announced", "ok"), ("p: second", "ok")];
        assert_eq!(parse("p", "# [RUN] announced\nok 1 first\nok 2 second\n"), results(&expected));
    }

    #[test]
    fn other_programs_have_their_own_forms() {
        let log = "Testing move on anon... \x1b[32mdone\x1b[0m\nTesting wp on shmem... skipped [reason: no]\n\
                   Testing poison on hugetlb... failed [reason: x]\nCollapse full of ...      OK\nSplit ... Fail\nelse\n";
        let expected = [
            ("p: Collapse full of ", "ok"),
            ("p: Split ", "not ok"),
            ("p: Testing move on anon", "ok"),
            ("p: Testing poison on hugetlb", "not ok"),
            ("p: Testing wp on shmem", "skip"),
        ];
        assert_eq!(parse("p", log), results(&expected));
    }

    #[test]
    fn rates_and_times_are_not_part_of_a_name() {
        let [first, second] =
            ["ok 1 took 3 s, 12%, 100.5 MiB/s", "ok 1 took 4 s, 99%, 7 MiB/s"].map(|log| parse("p", log));
        assert_eq!(first, second);
        assert_ne!(parse("p", "ok 1 size 4096"), parse("p", "ok 1 size 8192"));
    }

    #[test]
    fn kernels_that_differ_by_the_series_must_agree_in_everything() {
        let first = results(&[("a", "ok"), ("b", "ok"), ("c", "skip"), ("d", "ok")]);
        let second = results(&[("a", "ok"), ("b", "not ok"), ("c", "ok"), ("e", "ok")]);
        let comparison = compare(&first, &second, true);
        assert_eq!(comparison.same, 1);
        assert_eq!(comparison.differences, ["b: ok, not ok", "c: skip, ok", "d: ok, nothing", "e: nothing, ok"]);
    }

    #[test]
    fn kernels_with_other_settings_must_agree_in_what_both_run() {
        let first = results(&[("a", "ok"), ("b", "ok"), ("c", "skip"), ("d", "ok")]);
        let second = results(&[("a", "ok"), ("b", "not ok"), ("c", "ok"), ("e", "ok")]);
        assert_eq!(compare(&first, &second, false).differences, ["b: ok, not ok"]);
        assert!(!compare(&first, &second, false).are_equal());
        assert!(compare(&results(&[("a", "ok")]), &results(&[("a", "ok"), ("c", "ok")]), false).are_equal());
        assert!(!compare(&Results::new(), &Results::new(), false).are_equal(), "no result is no success");
    }

    #[test]
    fn a_difference_counts_if_it_is_repeated() {
        let run =
            |one, other| compare(&results(&[("a", one), ("b", "ok")]), &results(&[("a", other), ("b", "ok")]), true);
        assert!(run("ok", "not ok").repeated(&run("not ok", "ok")).are_equal());
        assert!(run("ok", "not ok").repeated(&run("ok", "ok")).are_equal());
        assert!(!run("ok", "not ok").repeated(&run("ok", "not ok")).are_equal());
        let no_result = compare(&Results::new(), &Results::new(), true);
        assert!(!no_result.repeated(&run("ok", "not ok")).are_equal());
    }
}
