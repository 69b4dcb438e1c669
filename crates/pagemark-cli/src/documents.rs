//! `pagemark completions` and `pagemark man`, which describe the command line as it is parsed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

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
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            name_examples(&entry.map_err(failed)?.path()).map_err(failed)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Gives the section of the examples its usual name in a manual page of the command. Other files
/// stay as they are.
fn name_examples(page: &Path) -> io::Result<()> {
    let name = page.file_name().unwrap_or_default().to_string_lossy();
    if !name.starts_with("pagemark") || !name.ends_with(".1") {
        return Ok(());
    }
    let text = fs::read_to_string(page)?;
    let named = text.replace(".SH EXTRA\nExamples:\n", ".SH EXAMPLES\n");
    if named == text { Ok(()) } else { fs::write(page, named) }
}

#[cfg(test)]
mod tests;
