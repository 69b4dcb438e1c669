//! The tests of Go's own packages, outside and inside of [`Surroundings`].

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::surroundings::{Surroundings, Verdicts};
use crate::{Result, cache, command, packages};

/// The packages whose tests run if none are named: those of threads, memory, signals, children,
/// files, time and connections.
const NAMES: [&str; 9] = ["net", "net/http", "os", "os/exec", "os/signal", "runtime/pprof", "sync", "syscall", "time"];
/// The longest time of the tests of a package.
const LIMIT: Duration = Duration::from_secs(1800);

/// Runs the tests of the packages `names`, or of those that are meant if there are none. What they
/// print is kept below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list of exceptions says.
///
/// # Errors
/// If there is no Go and it cannot be installed, or tests do not compile, or nothing of a package
/// runs outside.
pub fn run(within: Surroundings, names: &[String], logs: &Path) -> Result<(Vec<String>, bool)> {
    if !command::is_in_path("go") {
        packages::install(&["golang-go"])?;
    }
    cache::remove(logs)?;
    cache::create(logs)?;
    within.compare_groups(names, &NAMES, logs, |name| {
        let log = |side: &str| logs.join(format!("{}.{side}", name.replace('/', "-")));
        let program = log("test");
        let mut compiler = Command::new("go");
        compiler.args(["test", "-c", "-o"]).arg(&program).arg(name);
        command::logged(&mut compiler, &log("build"), "compiling Go's tests", "see above")?;
        let list = &mut Command::new("go");
        list.args(["list", "-f", "{{.Dir}}", name]);
        let source = command::output(list, "finding the source of Go's tests", "name a package of Go")?;
        let source = Path::new(source.trim());
        let outside = verdicts(Command::new(&program), name, source, &log("outside"))?;
        let inside = within.command(&program.to_string_lossy())?;
        Ok([outside, verdicts(inside, name, source, &log("inside"))?])
    })
}

/// Runs the tests of a package in the directory of its source, as Go does.
fn verdicts(mut program: Command, name: &str, directory: &Path, log: &Path) -> Result<Verdicts> {
    program.args(["-test.short", "-test.v"]).current_dir(directory);
    Ok(parse(name, &command::printed_within(&mut program, log, LIMIT)?))
}

/// The verdicts in what the tests print. A test of a name that comes several times has passed if
/// all of them have.
fn parse(package: &str, output: &str) -> Verdicts {
    let mut verdicts = Verdicts::new();
    for line in output.lines() {
        let Some((verdict, rest)) = line.trim_start().strip_prefix("--- ").and_then(|line| line.split_once(": "))
        else {
            continue;
        };
        let Some((test, _)) = rest.rsplit_once(" (") else { continue };
        *verdicts.entry(format!("{package}.{test}")).or_insert(true) &= verdict != "FAIL";
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read() {
        let output = "=== RUN   TestA\n--- PASS: TestA (0.01s)\n    --- FAIL: TestB/a (b) (0.00s)\n--- FAIL: TestB (0.02s)\n\
            --- SKIP: TestC (0.00s)\n--- PASS: TestB/a (b) (0.00s)\nPASS\n";
        let expected = [("TestA", true), ("TestB", false), ("TestB/a (b)", false), ("TestC", true)];
        let expected = expected.map(|(name, passed)| (format!("os.{name}"), passed));
        assert_eq!(parse("os", output), Verdicts::from(expected));
        assert!(parse("os", "").is_empty());
    }
}
