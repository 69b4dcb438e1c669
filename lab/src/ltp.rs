//! The tests of system calls of the Linux Test Project, outside and inside of [`Surroundings`].
//!
//! The project is no package of Debian's: it is built and installed by hand, and its directory
//! named. What passes or is left out outside must end inside with the same exit status, and with
//! the same numbers of checks that passed, failed and were left out.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::surroundings::{Surroundings, Verdicts};
use crate::{Error, Result, cache, command};

/// The list of commands, in the directory of the project.
const LIST: &str = "runtest/syscalls";
/// Where the programs are, in the directory of the project.
const PROGRAMS: &str = "testcases/bin";
/// The beginnings of the names of commands that run only if they are named: they change settings of
/// the system, mount, load modules, or need devices.
const LEFT_OUT: [&str; 28] = [
    "acct",
    "add_key",
    "adjtimex",
    "clock_adjtime",
    "clock_settime",
    "delete_module",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "init_module",
    "iopl",
    "ioperm",
    "kexec",
    "migrate_pages",
    "mount",
    "move_mount",
    "pivot_root",
    "quotactl",
    "reboot",
    "setdomainname",
    "sethostname",
    "settimeofday",
    "stime",
    "swapo",
    "syslog",
    "umount",
];
/// The exit status of a test of which nothing could run.
const LEFT_OUT_STATUS: i32 = 32;
/// The longest time of a command.
const LIMIT: Duration = Duration::from_secs(90);

/// Runs the commands of those names, or all that are meant if there are none, of the project in
/// `root`. What they print is kept below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list of exceptions says.
///
/// # Errors
/// If the project is not there, or nothing runs outside.
pub fn run(within: Surroundings, root: &Path, names: &[String], logs: &Path) -> Result<(Vec<String>, bool)> {
    let list = root.join(LIST);
    let list = std::fs::read_to_string(&list).map_err(|error| {
        let help = "build the Linux Test Project and install it there: make autotools, ./configure --prefix \
                    DIRECTORY, make, make install";
        Error::unmet(format!("{}: {error}", list.display()), help)
    })?;
    let commands = commands(&list, names)?;
    cache::remove(logs)?;
    cache::create(logs)?;
    within.compare_groups(&[], &["the commands"], logs, |_| {
        let (mut outside, mut inside) = (Verdicts::new(), Verdicts::new());
        for (name, words) in &commands {
            let log = logs.join(format!("{name}.outside"));
            let expected = outcome(&[], root, words, &log)?;
            let found = outcome(&within.prefix()?, root, words, &log.with_extension("inside"))?;
            outside.insert(format!("ltp {name}"), expected.is_good());
            inside.insert(format!("ltp {name}"), found == expected);
        }
        Ok([outside, inside])
    })
}

/// The commands of a list, of these names or those that are meant: names and words for a shell.
fn commands<'l>(list: &'l str, names: &[String]) -> Result<BTreeMap<&'l str, &'l str>> {
    let lines = list.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let all: BTreeMap<_, _> = lines.filter_map(|line| line.split_once(char::is_whitespace)).collect();
    if let Some(unknown) = names.iter().find(|name| !all.contains_key(name.as_str())) {
        return Err(Error::unmet(format!("there is no command {unknown}"), format!("{LIST} lists them")));
    }
    let is_meant = |name: &str| match names {
        [] => !LEFT_OUT.iter().any(|start| name.starts_with(start)),
        names => names.iter().any(|wanted| wanted == name),
    };
    Ok(all.into_iter().filter(|(name, _)| is_meant(name)).map(|(name, words)| (name, words.trim())).collect())
}

/// How a command ended: its exit status, none if it took too long, and the numbers of its checks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome {
    status: Option<i32>,
    checks: BTreeMap<String, u64>,
}

impl Outcome {
    fn is_good(&self) -> bool {
        matches!(self.status, Some(0 | LEFT_OUT_STATUS))
    }
}

/// Runs a command in a directory of its own, with `prefix` before the shell that starts it.
fn outcome(prefix: &[String], root: &Path, words: &str, log: &Path) -> Result<Outcome> {
    let work = log.with_extension("work");
    cache::create(&work)?;
    let shell = ["/bin/sh", "-c", words].map(str::to_owned);
    let line = [prefix, &shell].concat();
    let file = File::create(log).map_err(Error::file("create", log))?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut test = Command::new(&line[0]);
    // Tests send signals to their process group.
    test.args(&line[1..]).current_dir(&work).env("TMPDIR", &work).env("LTPROOT", root).process_group(0);
    test.env("PATH", format!("{}:{path}", root.join(PROGRAMS).display()));
    command::redirect(&mut test, file, log)?;
    let status = command::wait_for(&mut command::start(&mut test)?, LIMIT)?.map(command::exit_code);
    // A test may leave mounts or files that only root removes: they are no reason to end.
    let _ = cache::remove(&work);
    Ok(Outcome { status, checks: checks(&String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default())) })
}

/// The numbers of checks in what a command prints. Those of several programs are added.
fn checks(output: &str) -> BTreeMap<String, u64> {
    let mut checks = BTreeMap::new();
    let mut words = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    while words.by_ref().any(|line| line == ["Summary:"]) {
        for line in words.by_ref().take(5) {
            if let [what @ ("passed" | "failed" | "broken" | "skipped"), number] = line[..] {
                *checks.entry(what.to_owned()).or_default() += number.parse::<u64>().unwrap_or_default();
            }
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_that_are_meant_or_named() {
        let list = "# comment\nbrk01 brk01\n\nmount01 mount01\nclone02 ulimit -c 0 && clone02 -x\n";
        let meant = commands(list, &[]).unwrap();
        assert_eq!(
            meant.into_iter().collect::<Vec<_>>(),
            [("brk01", "brk01"), ("clone02", "ulimit -c 0 && clone02 -x")]
        );
        let named = commands(list, &["mount01".to_owned()]).unwrap();
        assert_eq!(named.into_iter().collect::<Vec<_>>(), [("mount01", "mount01")]);
        assert!(commands(list, &["brk02".to_owned()]).is_err());
    }

    #[test]
    fn checks_are_counted() {
        let output = "x.c:1: TPASS: brk\n\nSummary:\npassed   33\nfailed   0\nbroken   1\nskipped  2\nwarnings 0\n";
        let counts = |output: &str| checks(output).into_iter().collect::<Vec<_>>();
        let expected = [("broken", 1), ("failed", 0), ("passed", 33), ("skipped", 2)];
        assert_eq!(counts(output), expected.map(|(what, number)| (what.to_owned(), number)));
        assert_eq!(checks(&output.repeat(2))["passed"], 66);
        assert_eq!(counts("passed 3\n"), []);
    }
}
