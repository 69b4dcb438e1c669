//! `pagemark export`: a checkpoint for other programs.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::Checkpoint;

use crate::failure::{Failure, Outcome};
use crate::output::print;
use crate::place::{Place, Reference, read};

/// Write a checkpoint in a form that other programs read
#[derive(Args, Debug)]
pub struct Export {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    form: Form,
    /// The checkpoint; the newest without a number
    #[arg(value_name = "JOB[@N]")]
    checkpoint: Reference,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Form {
    /// A directory that plain `criu restore` takes
    #[arg(long, value_name = "DIR")]
    criu: Option<PathBuf>,
}

impl Export {
    pub fn run(self) -> Outcome {
        let repository = self.place.open()?;
        let checkpoint = read(&repository, &self.checkpoint)?;
        match &self.form.criu {
            Some(directory) => criu(&checkpoint, directory),
            None => Err(Failure::usage("it is not said what to export").help("--criu DIR")),
        }
    }
}

fn criu(checkpoint: &Checkpoint, directory: &Path) -> Outcome {
    if fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Failure::plain(format!("{} is not empty", directory.display())).help("name a new directory"));
    }
    let what = || format!("cannot write CRIU's images into {}", directory.display());
    // Memory holds secrets: the directory is its owner's alone.
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(|error| Failure::new(what(), error))?;
    let arguments = pagemark_process::restore::export_criu(&checkpoint.manifest, checkpoint, directory)
        .map_err(|error| Failure::new(what(), error))?;
    print(&format!("{}: `criu {}` takes it\n", directory.display(), arguments.join(" ")));
    Ok(ExitCode::SUCCESS)
}
