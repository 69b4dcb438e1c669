//! The tests of Redis, from Debian's source package, outside and inside of [`Surroundings`]: the
//! servers run inside, and the test program does not.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::installed_source::InstalledSource;
use crate::surroundings::{Surroundings, Verdicts};
use crate::{Error, Result, cache, command, packages};

const SERVER: &str = "/usr/bin/redis-server";
/// The program that runs the tests, in the source.
const TEST_PROGRAM: &str = "tests/test_helper.tcl";
const SOURCE: InstalledSource = InstalledSource {
    name: "redis",
    title: "Redis",
    package: "redis-server",
    has: TEST_PROGRAM,
    complete: TEST_PROGRAM,
};
/// What the tests start beside the server.
const OTHERS: [&str; 4] = ["redis-cli", "redis-benchmark", "redis-check-aof", "redis-check-rdb"];
/// The units that run if none are named: those that neither take long nor measure time and memory.
const UNITS: [&str; 22] = [
    "unit/auth",
    "unit/bitops",
    "unit/dump",
    "unit/expire",
    "unit/geo",
    "unit/hyperloglog",
    "unit/introspection",
    "unit/keyspace",
    "unit/multi",
    "unit/other",
    "unit/protocol",
    "unit/pubsub",
    "unit/scan",
    "unit/scripting",
    "unit/sort",
    "unit/type/hash",
    "unit/type/list",
    "unit/type/set",
    "unit/type/stream",
    "unit/type/string",
    "integration/aof",
    "integration/rdb",
];
/// The longest time of a unit.
const LIMIT: Duration = Duration::from_secs(1800);

/// Runs the tests of `units`, or those that are meant if there are none. What they print is kept
/// below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list of exceptions says.
///
/// # Errors
/// If Redis or its tests cannot be had, or nothing of a unit runs outside.
pub fn run(within: Surroundings, units: &[String], logs: &Path) -> Result<(Vec<String>, bool)> {
    packages::install(&["redis-server", "redis-tools", "tcl"])?;
    let source = SOURCE.directory(|_, _| Ok(()))?;
    cache::remove(logs)?;
    cache::create(logs)?;
    let (outside, inside) = (logs.join("outside"), logs.join("inside"));
    prepare(&source, &outside, &[])?;
    prepare(&source, &inside, &within.prefix()?)?;
    within.compare_groups(units, &UNITS, logs, |unit| Ok([verdicts(&outside, unit)?, verdicts(&inside, unit)?]))
}

/// Makes a directory from which the tests start the installed server, with `prefix` before it.
fn prepare(source: &Path, directory: &Path, prefix: &[String]) -> Result<()> {
    let programs = directory.join("src");
    cache::create(&programs)?;
    let mut copy = Command::new("cp");
    copy.arg("-a").args(["tests", "redis.conf", "sentinel.conf"].map(|name| source.join(name))).arg(directory);
    command::run(&mut copy, "copying the tests of Redis", "see above")?;
    for name in OTHERS {
        let link = programs.join(name);
        std::os::unix::fs::symlink(Path::new("/usr/bin").join(name), &link).map_err(Error::file("create", &link))?;
    }
    let server = programs.join("redis-server");
    let words = prefix.iter().map(String::as_str).chain([SERVER]);
    let script = format!("#!/bin/sh\nexec {} \"$@\"\n", command::shell_words(words).to_string_lossy());
    std::fs::write(&server, script).map_err(Error::file("write", &server))?;
    std::fs::set_permissions(&server, std::fs::Permissions::from_mode(0o755)).map_err(Error::file("change", &server))
}

/// Runs the tests of a unit. Those that a run that did not end had passed count.
fn verdicts(directory: &Path, unit: &str) -> Result<Verdicts> {
    let log = directory.join(format!("{}.log", unit.replace('/', "-")));
    let mut tests = Command::new("tclsh");
    // Tests of a debugger of Lua scripts and of modules need what Debian does not package.
    tests.args([TEST_PROGRAM, "--single", unit, "--clients", "1", "--timeout", "600", "--no-latency"]);
    tests.args(["--tags", "-needs:debug -large-memory"]).current_dir(directory);
    Ok(parse(unit, &command::printed_within(&mut tests, &log, LIMIT)?))
}

/// The verdicts in what the tests print. A test of a name that comes several times has passed if
/// all of them have.
fn parse(unit: &str, output: &str) -> Verdicts {
    let mut verdicts = Verdicts::new();
    for line in output.lines() {
        // The test program colours its words.
        let line: String = line
            .split('\u{1b}')
            .enumerate()
            .map(|(index, part)| match index {
                0 => part,
                _ => part.split_once('m').map_or("", |(_, text)| text),
            })
            .collect();
        let (passed, rest) = match line.split_once("]: ") {
            Some(("[ok", rest)) => (true, rest),
            Some(("[err", rest)) => (false, rest),
            _ => continue,
        };
        // The time, and the file of a failure, follow the name.
        let name = rest.rsplit_once(" (").map_or(rest, |(name, _)| name);
        let name = name.rsplit_once(" in tests/").map_or(name, |(name, _)| name);
        *verdicts.entry(format!("{unit}: {name}")).or_insert(true) &= passed;
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read() {
        let output = "Starting test server\n\u{1b}[0;32m[ok]\u{1b}[0m: SET and GET (2 ms)\n[ok]: a (b) c (10 ms)\n\
            [err]: EXPIRE in tests/unit/expire.tcl\nExpected '1' to be '2'\n[ok]: SET and GET (2 ms)\n\
            [err]: twice in tests/x.tcl\n[ok]: twice (0 ms)\n[ignore]: large (1 ms)\n";
        let verdicts = parse("unit/expire", output);
        let expected = [("EXPIRE", false), ("SET and GET", true), ("a (b) c", true), ("twice", false)];
        let expected = expected.map(|(name, passed)| (format!("unit/expire: {name}"), passed));
        assert_eq!(verdicts, Verdicts::from(expected));
        assert!(parse("unit/expire", "").is_empty());
    }
}
