//! What observes a machine that is simulated.

use std::path::{Path, PathBuf};

use clap::Args;
use pagemark_simulate::Kind;
use pagemark_vm::Observer;

use crate::failure::Failure;

/// What observes the machine.
#[derive(Args, Debug, Clone)]
pub struct ObserverOptions {
    /// What observes the machine: mix (instructions by kind, accesses to memory), hot (instructions
    /// by lines of code), cache (two levels of caches for data), or a plugin of QEMU:
    /// FILE[,OPTION=VALUE], where {} stands for the interval's first checkpoint
    #[arg(long, value_name = "PLUGIN")]
    pub plugin: String,
}

impl ObserverOptions {
    /// What is observed, in a form that does not depend on the working directory.
    pub fn chosen(&self) -> Result<Chosen, Failure> {
        match self.plugin.parse::<Kind>() {
            Ok(kind) => Ok(Chosen::Simulator(kind)),
            Err(reason) => {
                let (file, options) = self.plugin.split_once(',').unwrap_or((&self.plugin, ""));
                let path = Path::new(file).canonicalize().map_err(|_| {
                    Failure::usage(format!("{file} is no file; {reason}"))
                        .help("name a simulator or the file of a plugin")
                })?;
                Ok(Chosen::Plugin { path, options: options.to_owned() })
            }
        }
    }
}

/// A simulator of Pagemark's, or a plugin of QEMU with its options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chosen {
    Simulator(Kind),
    Plugin { path: PathBuf, options: String },
}

impl Chosen {
    /// The observer of the interval that begins at a checkpoint.
    pub fn observer(&self, from: u64) -> Observer {
        match self {
            Chosen::Simulator(kind) => Observer::Simulator(*kind),
            Chosen::Plugin { path, options } => {
                let path = path.display().to_string().replace(',', ",,");
                let separator = if options.is_empty() { "" } else { "," };
                Observer::Plugin(format!("{path}{separator}{}", options.replace("{}", &from.to_string())))
            }
        }
    }

    /// A name for directories: that of the simulator, or the plugin's file.
    pub fn name(&self) -> String {
        match self {
            Chosen::Simulator(kind) => kind.to_string(),
            Chosen::Plugin { path, .. } => {
                path.file_stem().map_or_else(|| "plugin".to_owned(), |stem| stem.to_string_lossy().into_owned())
            }
        }
    }

    /// What a command line says to choose it.
    pub fn argument(&self) -> String {
        match self {
            Chosen::Simulator(kind) => kind.to_string(),
            Chosen::Plugin { path, options } if options.is_empty() => path.display().to_string(),
            Chosen::Plugin { path, options } => format!("{},{options}", path.display()),
        }
    }
}
