//! `pagemark export`: writes a checkpoint as a core file, as CRIU's images, or for QEMU alone.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::{Checkpoint, TargetKind};
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
        let file = create(path)?;
        if let Err(error) = pagemark_vm::export_core(checkpoint, &file) {
            // The file was created above, and a part of a core file is of no use.
            let _ = fs::remove_file(path);
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
        let mut out = BufWriter::with_capacity(1 << 20, create(path)?);
        let written = pagemark_process::core_file::export_core(&checkpoint.manifest, checkpoint, Some(pid), &mut out)
            .map_err(|error| {
                Failure::new(format!("cannot write a core of process {pid} to {}", path.display()), error)
                    .help("`pagemark verify` reports whether the checkpoint is damaged")
            });
        if let Err(failure) = written.and_then(|()| out.flush().map_err(|error| failed(path, error))) {
            // The file was created above, and a part of a core file is of no use.
            let _ = fs::remove_file(path);
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
/// overwritten.
fn create(path: &Path) -> Result<File, Failure> {
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    created.map_err(|error| failed(path, error).help("name a file that does not exist yet, in a directory that does"))
}

fn check_empty(directory: &Path) -> Result<(), Failure> {
    match fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) {
        true => Err(Failure::plain(format!("{} is not empty", directory.display())).help("name a new directory")),
        false => Ok(()),
    }
}

/// Makes a directory that only the owner may enter, because memory holds secrets. One that is there
/// must be such that no other user can exchange what is written.
fn create_directory(directory: &Path, operation: String) -> Result<(), Failure> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    match created.and_then(|()| fs::symlink_metadata(directory)) {
        Err(error) => Err(Failure::new(operation, error)),
        Ok(held) if held.is_dir() && held.uid() == nix::unistd::geteuid().as_raw() && held.mode() & 0o022 == 0 => {
            Ok(())
        }
        Ok(_) => {
            let reason = "other users can change it, or it is a link";
            Err(Failure::new(operation, reason).help("name a new directory"))
        }
    }
}

fn qemu(checkpoint: &Checkpoint, directory: &Path) -> Outcome {
    if checkpoint.manifest.kind != TargetKind::VirtualMachine {
        return Err(Failure::usage("--qemu is for checkpoints of virtual machines").help("--core FILE or --criu DIR"));
    }
    check_empty(directory)?;
    let operation = || format!("cannot write a machine for QEMU into {}", directory.display());
    create_directory(directory, operation())?;
    let written = pagemark_vm::export_qemu(checkpoint, directory).map_err(|error| Failure::of(operation(), error))?;
    print(&format!("{} starts QEMU with the migration stream {}\n", shown(&written.script), shown(&written.stream)));
    for (disk, image) in &written.disks {
        print(&format!("its disk {} is {}\n", printable(disk), shown(image)));
    }
    Ok(ExitCode::SUCCESS)
}

fn criu(checkpoint: &Checkpoint, directory: &Path) -> Outcome {
    check_empty(directory)?;
    let operation = || format!("cannot write CRIU's images into {}", directory.display());
    pagemark_process::restore::check(&checkpoint.manifest).map_err(|error| Failure::new(operation(), error))?;
    create_directory(directory, operation())?;
    let arguments = pagemark_process::restore::export_criu(&checkpoint.manifest, checkpoint, directory)
        .map_err(|error| Failure::new(operation(), error))?;
    print(&format!("{}: `criu {}` takes it\n", shown(directory), printable(&arguments.join(" "))));
    Ok(ExitCode::SUCCESS)
}

/// A path in a result.
fn shown(path: &Path) -> String {
    printable(&path.display().to_string())
}
