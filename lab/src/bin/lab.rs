//! The program `lab`: kernels that the host does not run, and tests on them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use pagemark_lab::batch::TestResult;
use pagemark_lab::kernel::Kernel;
use pagemark_lab::machine::{self, Machine};
use pagemark_lab::run_log::RunLog;
use pagemark_lab::test_plan::{Extent, Part, Programs};
use pagemark_lab::test_programs::TestBinaries;
use pagemark_lab::{Error, Result, cache, kernel_build, packages, progress};

/// The exit status when the lab itself failed.
const LAB_FAILED: u8 = 125;

/// Boots Linux kernels in QEMU on the host's files, and runs commands and tests there.
///
/// KERNEL is ldt (with the patches of kernel/ldt), plain (the same without them), stock (Debian's
/// cloud kernel of the same version), hypervisor (the same with KVM), debian-12 (Linux 6.1),
/// debian-11 (Linux 5.10), ldt-distribution or plain-distribution (with Xen and DAX), ldt-debug or
/// plain-debug (which check themselves: DEBUG_VM, PAGE_TABLE_CHECK, lockdep, KASAN). A kernel is
/// built or fetched when it is first used, and is then in the cache,
/// ${XDG_CACHE_HOME:-~/.cache}/pagemark/lab. Everything but `build` and `source` needs root.
#[derive(Parser)]
#[command(name = "lab")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what the lab needs, and find out whether KVM works; build the kernels that are named
    Setup { kernels: Vec<Kernel> },
    /// Build a kernel, unless it is in the cache, and print its path
    Build { kernel: Kernel },
    /// Run a command in a machine, on the host's files
    ///
    /// The exit status is the command's; 124 after the time limit, 70 when the kernel reported an
    /// error, 125 when the lab itself failed. PAGEMARK_LAB_ACCEL=kvm or tcg decides about the
    /// accelerator.
    Run(Run),
    /// Run the tests of the lab: ldt, stock, debian-12, debian-11, plain, debug, redis, kvm-log,
    /// svm, vmx, migration, selftests, series, xen, dax, combined
    ///
    /// `quick` runs ldt, stock and debian-12 unless parts are named, in some minutes; `full` runs
    /// all of them with more seeds, in an hour or two of emulation.
    Test {
        /// quick or full
        #[arg(default_value = "quick")]
        extent: Extent,
        /// The parts to run
        parts: Vec<Part>,
        /// Leave out what cargo builds
        #[arg(long)]
        no_cargo: bool,
    },
    /// Install packages of the distribution, unless they are there
    Install { packages: Vec<String> },
    /// Fetch the kernel's source, unless it is in the cache, and print its path
    Source,
    /// Remove the cache
    Clean,
}

#[derive(Args)]
struct Run {
    /// The kernel to boot
    #[arg(long, default_value = "ldt")]
    kernel: Kernel,
    /// Memory of the machine, as QEMU reads it
    #[arg(long, default_value = "2G", value_name = "SIZE")]
    memory: String,
    /// Number of processors
    #[arg(long, default_value_t = 2, value_name = "N")]
    smp: u32,
    /// Boot the kernel as the first guest of Xen, a paravirtualized one; ldt-distribution and
    /// plain-distribution can
    #[arg(long)]
    xen: bool,
    /// Emulate one processor with VMX, EPT and page-modification logging, by Bochs. The machine has
    /// none of the host's files but those of `--file` and `--share`
    #[arg(long, conflicts_with_all = ["xen", "icount", "smp"])]
    bochs: bool,
    /// A file that a machine on Bochs has, with the libraries that it loads; may be repeated
    #[arg(long, value_name = "FILE", requires = "bochs")]
    file: Vec<PathBuf>,
    /// Emulate one processor that takes a nanosecond for each instruction, so that times are counts
    /// of instructions; the command has PAGEMARK_CLOCK=instructions in its environment
    #[arg(long)]
    icount: bool,
    /// A directory of the host that the command can change; may be repeated. Its other changes are
    /// lost
    #[arg(long, value_name = "DIR")]
    share: Vec<PathBuf>,
    /// Limit of the whole run
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,
    /// More words for the kernel's command line
    #[arg(long, default_value = "", value_name = "WORDS", allow_hyphen_values = true)]
    append: String,
    /// Where to copy the kernel's log
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Do not fail when the kernel reported an error
    #[arg(long)]
    allow_warnings: bool,
    /// The command
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            progress!("{error}");
            ExitCode::from(LAB_FAILED)
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Setup { kernels } => {
            let start = Instant::now();
            machine::set_up()?;
            let missing = kernels.iter().filter(|kernel| !kernel_build::is_there(**kernel));
            let minutes: u32 = missing.map(|kernel| kernel.minutes()).sum();
            if minutes > 0 {
                progress!("the kernels that are not in the cache take about {minutes} min");
            }
            for &kernel in &kernels {
                kernel_build::image(kernel)?;
            }
            match kernels.first() {
                Some(&kernel) => {
                    machine::accelerator(kernel)?;
                }
                None => progress!("no kernel was built: name those that you want, as in `lab/lab setup ldt stock`"),
            }
            progress!("ready after {} s", start.elapsed().as_secs());
        }
        Command::Build { kernel } => {
            machine::set_up()?;
            println!("{}", kernel_build::image(kernel)?.path().display());
        }
        Command::Run(run) => {
            let machine = Machine {
                memory: run.memory,
                processors: run.smp,
                on_xen: run.xen,
                on_bochs: run.bochs,
                files: run.file,
                counts_instructions: run.icount,
                shares: run.share,
                limit: Duration::from_secs(run.timeout),
                append: run.append,
                log: run.log,
                allows_warnings: run.allow_warnings,
                ..Machine::new(run.kernel)
            };
            let outcome = machine.run(&run.command, None)?;
            return Ok(ExitCode::from(u8::try_from(outcome.exit_code()).unwrap_or(u8::MAX)));
        }
        Command::Test { extent, parts, no_cargo } => return test(extent, parts, no_cargo),
        Command::Install { packages } => packages::install(&packages)?,
        Command::Source => {
            machine::set_up()?;
            println!("{}", kernel_build::source()?.display());
        }
        Command::Clean => cache::remove(&cache::lab())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn test(extent: Extent, parts: Vec<Part>, no_cargo: bool) -> Result<ExitCode> {
    let start = Instant::now();
    let parts = if parts.is_empty() { Part::of(extent).to_vec() } else { parts };
    let is_built = !no_cargo && parts.iter().any(|part| part.needs_binaries());
    let binaries = if is_built { Some(TestBinaries::build()?) } else { None };
    let program = std::env::current_exe().map_err(|source| Error::Start { program: "lab".to_owned(), source })?;
    let log = RunLog::new(program.parent().unwrap_or(Path::new(".")), "lab-test")?;
    progress!("the output of the tests is in {}", log.path().display());
    let programs = Programs::build(binaries)?;
    let mut results = Vec::new();
    for part in parts {
        let found = programs.run(part, extent, &[], 0, log.path()).unwrap_or_else(|error| {
            // The other parts may still pass.
            vec![TestResult::new(part.name(), Some(error.to_string()), None)]
        });
        found.iter().for_each(|result| println!("{}", result.line()));
        results.extend(found);
    }
    println!("\n== all, in {} s", start.elapsed().as_secs());
    results.iter().for_each(|result| println!("{}", result.line()));
    let passed = results.iter().all(|result| result.failure.is_none());
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
