//! The program `suite`: sets a host up, and runs all tests of the project.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use pagemark_lab::suite::{self, Options};
use pagemark_lab::surroundings::Surroundings;
use pagemark_lab::test_plan::Extent;
use pagemark_lab::zdtm::{self, Flavor, Mode, Selection};
use pagemark_lab::{Result, contained, load, progress, repeat, setup};

/// Sets a host up, and runs all tests of the project.
///
/// PAGEMARK_FUZZ_SECONDS is how long test-full runs each fuzz target; 0 leaves fuzzing out.
/// PAGEMARK_LAB=0 leaves out what runs on other kernels. With CI=true, only the skips that
/// scripts/ci-skips.txt allows are accepted.
#[derive(Parser)]
#[command(name = "suite")]
struct Arguments {
    /// This process and all that it starts are contained already
    #[arg(long, hide = true)]
    contained: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what building and testing needs: packages, programs, criu, rust, fuzz, c, musl,
    /// semver, book, python, demo or all
    Setup {
        #[arg(default_value = "all")]
        part: setup::Part,
    },
    /// Format, lints and unit tests: no root, and no network once everything is built
    Check,
    /// The tests of every change, after the set-up. Needs root; without, much is skipped
    Test,
    /// The tests of every change and those that take long: all kernels, Miri, sanitizers, long
    /// fuzzing
    TestFull,
    /// CRIU's own tests: each is saved, killed and restored, by plain CRIU and by Pagemark, which
    /// must pass what plain CRIU passes. Needs root
    Zdtm {
        /// How tests are saved and restored: criu, checkpoint, attach, lazy [default: all]
        #[arg(long)]
        mode: Vec<Mode>,
        /// In which namespaces they run: those of the host (h), their own (ns), also a user
        /// namespace (uns) [default: h]
        #[arg(long)]
        flavor: Vec<Flavor>,
        /// Names of tests, such as static/pipe00 or ns/static/pipe00 [default: all that can run
        /// here]
        tests: Vec<String>,
    },
    /// CPython's own tests: what passes outside must pass within the machine of a process
    /// (`pagemark-kvm`), or with the heap in place of `malloc`
    Cpython {
        within: Surroundings,
        /// Modules, such as test_signal [default: those of system calls, memory, signals, threads
        /// and children]
        modules: Vec<String>,
    },
    /// Redis's own tests: what passes outside must pass when the server runs in the machine of a
    /// process, or with the heap in place of `malloc`
    Redis {
        within: Surroundings,
        /// Units, such as unit/type/hash [default: those that neither take long nor measure time
        /// and memory]
        units: Vec<String>,
    },
    /// The tests of Go's own packages: what passes outside must pass within the machine of a
    /// process, or with the heap in place of `malloc`
    Go {
        within: Surroundings,
        /// Packages, such as os/signal [default: those of threads, memory, signals, children,
        /// files, time and connections]
        packages: Vec<String>,
    },
    /// SQLite's own tests: what passes outside must pass when the program with SQLite runs in the
    /// machine of a process, or with the heap in place of `malloc`
    Sqlite {
        within: Surroundings,
        /// Files of tests, such as wal or crash [default: those of statements, transactions, locks,
        /// memory and threads]
        files: Vec<String>,
    },
    /// The Linux Test Project's tests of system calls: what passes outside must end with the same
    /// status and numbers of checks within the machine of a process, or with the heap in place of
    /// `malloc`. Needs root
    Ltp {
        within: Surroundings,
        /// Where the project is installed
        #[arg(long, default_value = "/opt/ltp")]
        root: PathBuf,
        /// Names of commands, such as brk01 [default: those of runtest/syscalls that change no
        /// settings of the system]
        commands: Vec<String>,
    },
    /// The tests of virtual machines with the QEMU of Debian's backports in place of the host's.
    /// Needs root
    NewestQemu {
        /// Arguments of the tests, such as --include-ignored, or a part of the names of tests
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Run a test again and again, alone or beside a load, and print how often which assertion
    /// failed
    Repeat {
        /// A name as a run prints it, or a part of the names of tests
        name: String,
        /// How often
        #[arg(long, default_value_t = 1)]
        times: u32,
        /// Beside a load: both processors busy, a writer on the disk, memory under pressure, and
        /// the tests stopped for 100 ms at a time
        #[arg(long)]
        load: bool,
    },
    /// The tests that failed in a run and passed alone, by commit
    Flaky,
    /// Run a program with all that it starts, and leave no process of it
    #[command(hide = true)]
    Contained {
        limit_s: u64,
        /// Stop it for 100 ms at a time
        #[arg(long)]
        stalls: bool,
        report: PathBuf,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
    /// A part of the load beside tests, for ever
    #[command(hide = true)]
    Load { part: load::Part },
    /// A test of CRIU in a mode, as the first process of a PID namespace
    #[command(hide = true)]
    ZdtmTrial {
        test: String,
        mode: Mode,
        tree: PathBuf,
        work: PathBuf,
        criu: PathBuf,
        pagemark: PathBuf,
        verdict: PathBuf,
    },
}

impl Command {
    /// Whether it runs tests, of which no process is left when this one ends, however it ends.
    fn runs_tests(&self) -> bool {
        !matches!(
            self,
            Command::Setup { .. }
                | Command::Flaky
                | Command::Contained { .. }
                | Command::Load { .. }
                | Command::ZdtmTrial { .. }
        )
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let status = if arguments.command.runs_tests() && !arguments.contained {
        contained::run_this_program("--contained").map(|status| u8::try_from(status).unwrap_or(u8::MAX))
    } else {
        run(arguments.command)
    };
    match status {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            progress!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the exit status.
fn run(command: Command) -> Result<u8> {
    let passed = match command {
        Command::Setup { part } => setup::set_up(part).map(|()| true),
        Command::Check => suite::check(),
        Command::Test => suite::test(&Options::from_environment(Extent::Quick)?),
        Command::TestFull => suite::test(&Options::from_environment(Extent::Full)?),
        Command::Zdtm { mode, flavor, tests } => suite::zdtm(&Selection { tests, flavors: flavor, modes: mode }),
        Command::Cpython { within, modules } => suite::cpython(within, &modules),
        Command::Redis { within, units } => suite::redis(within, &units),
        Command::Go { within, packages } => suite::go(within, &packages),
        Command::Sqlite { within, files } => suite::sqlite(within, &files),
        Command::Ltp { within, root, commands } => suite::ltp(within, &root, &commands),
        Command::NewestQemu { arguments } => suite::newest_qemu(&arguments),
        Command::Repeat { name, times, load } => repeat::repeat(&name, times, load),
        Command::Flaky => suite::flaky(),
        Command::Contained { limit_s, stalls, report, program } => {
            let limit = Some(Duration::from_secs(limit_s));
            let manner = contained::Manner { limit, stalls, ends_with_parent: true, own_session: true };
            let ended = contained::run(manner, &program)?;
            contained::write_report(&report, &ended)?;
            return Ok(u8::try_from(ended.status).unwrap_or(u8::MAX));
        }
        Command::Load { part } => load::run(part).map(|()| true),
        Command::ZdtmTrial { test, mode, tree, work, criu, pagemark, verdict } => {
            zdtm::run_trial(&test, mode, &tree, &work, &criu, &pagemark, &verdict).map(|()| true)
        }
    }?;
    Ok(if passed { 0 } else { 1 })
}
