//! `pagemark export`: writes a checkpoint as a core file or as CRIU's images.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::Checkpoint;

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
    /// An ELF core file, which gdb opens with registers and threads
    #[arg(long, value_name = "FILE")]
    core: Option<PathBuf>,
    /// A directory that plain `criu restore` takes
    #[arg(long, value_name = "DIR")]
    criu: Option<PathBuf>,
}

impl Export {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let checkpoint = read_checkpoint(&repository, &self.checkpoint)?;
        match (&self.form.core, &self.form.criu) {
            (Some(file), _) => self.core(&checkpoint, file),
            (None, Some(directory)) => criu(&checkpoint, directory),
            (None, None) => Err(Failure::usage("it is not said what to export").help("--core FILE or --criu DIR")),
        }
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
        let failed = |error| Failure::new(format!("cannot write {}", path.display()), error);
        // Memory holds secrets, so only the owner may read the file. An existing file is not
        // overwritten.
        let file: File = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed(error).help("name a file that does not exist yet, in a directory that does"))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let written = pagemark_process::core_file::export_core(&checkpoint.manifest, checkpoint, Some(pid), &mut out)
            .map_err(|error| {
                Failure::new(format!("cannot write a core of process {pid} to {}", path.display()), error)
                    .help("`pagemark verify` reports whether the checkpoint is damaged")
            });
        if let Err(failure) = written.and_then(|()| out.flush().map_err(failed)) {
            // The file was created above, and a part of a core file is of no use.
            let _ = fs::remove_file(path);
            return Err(failure);
        }
        print(&format!("{}: process {pid}; open it with `gdb PROGRAM {}`\n", path.display(), path.display()));
        Ok(ExitCode::SUCCESS)
    }
}

fn criu(checkpoint: &Checkpoint, directory: &Path) -> Outcome {
    if fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Failure::plain(format!("{} is not empty", directory.display())).help("name a new directory"));
    }
    let operation = || format!("cannot write CRIU's images into {}", directory.display());
    pagemark_process::restore::check(&checkpoint.manifest).map_err(|error| Failure::new(operation(), error))?;
    // Memory holds secrets, so only the owner may enter the directory.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|error| Failure::new(operation(), error))?;
    let arguments = pagemark_process::restore::export_criu(&checkpoint.manifest, checkpoint, directory)
        .map_err(|error| Failure::new(operation(), error))?;
    print(&format!("{}: `criu {}` takes it\n", directory.display(), arguments.join(" ")));
    Ok(ExitCode::SUCCESS)
}
