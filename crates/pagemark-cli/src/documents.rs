//! `pagemark completions` and `pagemark man`, which describe the command line as it is parsed.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::failure::{Failure, Outcome};
use crate::output::print;

/// Print a completion script for a shell
///
/// For bash: pagemark completions bash > /etc/bash_completion.d/pagemark
#[derive(Args, Debug)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Write the manual pages into a directory
///
/// For example: pagemark man /usr/local/share/man/man1
#[derive(Args, Debug)]
pub struct Man {
    /// The directory; made if it does not exist
    directory: PathBuf,
}

impl Completions {
    pub fn run(self, mut command: Command) -> Outcome {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "pagemark", &mut script);
        print(&String::from_utf8_lossy(&script));
        Ok(ExitCode::SUCCESS)
    }
}

impl Man {
    pub fn run(self, command: Command) -> Outcome {
        let failed =
            |error| Failure::new(format!("cannot write manual pages into {}", self.directory.display()), error);
        fs::create_dir_all(&self.directory).map_err(failed)?;
        clap_mangen::generate_to(command, &self.directory).map_err(failed)?;
        Ok(ExitCode::SUCCESS)
    }
}
