//! `pagemark export`: writes a checkpoint as a core file, as CRIU's images, or for QEMU alone.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::{Checkpoint, TargetKind};
use pagemark_process::files::OutputDirectory;
use pagemark_report::escape::printable;

use crate::failure::{Failure, Outcome};
use crate::output::print;
use crate::reference::{Reference, read_checkpoint};
use crate::repository::RepositoryOptions;

/// Write a checkpoint in a form that other programs read
#[derive(Args, Debug)]
pub struct Export {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    form: Form,
    /// With --core: which process of the checkpoint [default: the root of the tree]
    #[arg(long, value_name = "PID", requires = "core")]
    pid: Option<i32>,
    /// The checkpoint; the newest without a number
    #[arg(value_name = "JOB[@N]")]
    checkpoint: Reference,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Form {
    /// An ELF core file, which gdb opens with registers and threads; of a virtual machine, a dump
    /// of its physical memory as QEMU's `dump-guest-memory` writes it, which crash opens
    #[arg(long, value_name = "FILE")]
    core: Option<PathBuf>,
    /// A directory that plain `criu restore` takes
    #[arg(long, value_name = "DIR")]
    criu: Option<PathBuf>,
    /// A directory with a virtual machine for QEMU alone: a migration stream, images of the disks,
    /// and a script that starts QEMU with them
    #[arg(long, value_name = "DIR")]
    qemu: Option<PathBuf>,
}

impl Export {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let checkpoint = read_checkpoint(&repository, &self.checkpoint)?;
        match (&self.form.core, &self.form.criu, &self.form.qemu) {
            (Some(file), _, _) if checkpoint.manifest.kind == TargetKind::VirtualMachine => {
                self.machine_core(&checkpoint, file)
            }
            (Some(file), _, _) => self.core(&checkpoint, file),
            (None, Some(directory), _) => criu(&checkpoint, directory),
            (None, None, Some(directory)) => qemu(&checkpoint, directory),
            (None, None, None) => {
                Err(Failure::usage("it is not said what to export").help("--core FILE, --criu DIR or --qemu DIR"))
            }
        }
    }

    fn machine_core(&self, checkpoint: &Checkpoint, path: &Path) -> Outcome {
        if self.pid.is_some() {
            return Err(Failure::usage("a virtual machine has no process ids: --pid is for processes"));
        }
        let (place, name, file) = create(path)?;
        if let Err(error) = pagemark_vm::export_core(checkpoint, &file) {
            // A part of a core file is of no use.
            place.remove(name, &file);
            return Err(Failure::of(format!("cannot write a core of the machine to {}", path.display()), error));
        }
        print(&format!("{}: the machine's memory; open it with `crash VMLINUX {}`\n", shown(path), shown(path)));
        Ok(ExitCode::SUCCESS)
    }

    fn core(&self, checkpoint: &Checkpoint, path: &Path) -> Outcome {
        let manifest = &checkpoint.manifest;
        let pid = self.pid.or(manifest.pids().next()).unwrap_or(0);
        if manifest.process(pid).is_none() {
            let pids: Vec<_> = manifest.pids().map(|pid| pid.to_string()).collect();
            if pids.is_empty() {
                return Err(Failure::plain(format!("{}@{} holds no process", manifest.job, manifest.sequence))
                    .help("`pagemark show` lists what it holds"));
            }
            return Err(Failure::plain(format!("the checkpoint holds no process {pid}"))
                .help(format!("it holds {}", pids.join(", "))));
        }
        let (place, name, file) = create(path)?;
        let mut out = BufWriter::with_capacity(1 << 20, &file);
        let written = pagemark_process::core_file::export_core(&checkpoint.manifest, checkpoint, Some(pid), &mut out)
            .map_err(|error| {
                Failure::new(format!("cannot write a core of process {pid} to {}", path.display()), error)
                    .help("`pagemark verify` reports whether the checkpoint is damaged")
            });
        if let Err(failure) = written.and_then(|()| out.flush().map_err(|error| failed(path, error))) {
            // A part of a core file is of no use.
            place.remove(name, &file);
            return Err(failure);
        }
        print(&format!("{}: process {pid}; open it with `gdb PROGRAM {}`\n", shown(path), shown(path)));
        Ok(ExitCode::SUCCESS)
    }
}

fn failed(path: &Path, error: io::Error) -> Failure {
    Failure::new(format!("cannot write {}", path.display()), error)
}

/// Makes a file for the owner alone, because memory holds secrets. An existing file is not
/// overwritten. Returns the directory that has it, and its name there.
fn create(path: &Path) -> Result<(OutputDirectory, &OsStr, File), Failure> {
    let made = || {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::IsADirectory.into());
        };
        let place = OutputDirectory::open(above)?;
        let file = place.create(name)?;
        Ok((place, name, file))
    };
    made().map_err(|error| failed(path, error).help("name a file that does not exist yet, in a directory that does"))
}

/// Makes a directory that only the owner may enter, because memory holds secrets. One that is there
/// must be empty, and such that no other user can exchange what is written.
fn make_directory(directory: &Path, operation: impl Fn() -> String) -> Result<OutputDirectory, Failure> {
    let failed = |error| Failure::new(operation(), error).help("name a new directory");
    let place = OutputDirectory::open_or_make(directory).map_err(failed)?;
    if !place.is_own().map_err(failed)? {
        return Err(failed(io::Error::other("other users can change it, or it is a link")));
    }
    match fs::read_dir(place.held_path()).map_err(failed)?.next() {
        Some(_) => Err(Failure::plain(format!("{} is not empty", directory.display())).help("name a new directory")),
        None => Ok(place),
    }
}

fn qemu(checkpoint: &Checkpoint, directory: &Path) -> Outcome {
    if checkpoint.manifest.kind != TargetKind::VirtualMachine {
        return Err(Failure::usage("--qemu is for checkpoints of virtual machines").help("--core FILE or --criu DIR"));
    }
    let operation = || format!("cannot write a machine for QEMU into {}", directory.display());
    let place = make_directory(directory, operation)?;
    let written =
        pagemark_vm::export_qemu_to(checkpoint, place.as_fd()).map_err(|error| Failure::of(operation(), error))?;
    print(&format!("{} starts QEMU with the migration stream {}\n", shown(&written.script), shown(&written.stream)));
    for (disk, image) in &written.disks {
        print(&format!("its disk {} is {}\n", printable(disk), shown(image)));
    }
    Ok(ExitCode::SUCCESS)
}

fn criu(checkpoint: &Checkpoint, directory: &Path) -> Outcome {
    let operation = || format!("cannot write CRIU's images into {}", directory.display());
    pagemark_process::restore::check(&checkpoint.manifest).map_err(|error| Failure::new(operation(), error))?;
    let place = make_directory(directory, operation)?;
    let held = place.held_path();
    let mut arguments = pagemark_process::restore::export_criu(&checkpoint.manifest, checkpoint, &held)
        .map_err(|error| Failure::new(operation(), error))?;
    // By the path that stays.
    let named = arguments.iter_mut().filter(|argument| Path::new(argument.as_str()) == held);
    named.for_each(|argument| *argument = directory.display().to_string());
    print(&format!("{}: `criu {}` takes it\n", shown(directory), printable(&arguments.join(" "))));
    Ok(ExitCode::SUCCESS)
}

/// A path in a result.
fn shown(path: &Path) -> String {
    printable(&path.display().to_string())
}
