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
    /// by lines of code), cache (two levels of caches for data; cache,warm-up=N fills them by the N
    /// intervals before), trace (all instructions and accesses, in files), or a plugin of QEMU:
    /// FILE[,OPTION=VALUE], where {} stands for the interval's first checkpoint
    #[arg(long, value_name = "PLUGIN")]
    pub plugin: String,
}

impl ObserverOptions {
    /// What is observed, in a form that does not depend on the working directory.
    pub fn chosen(&self) -> Result<Chosen, Failure> {
        let (file, options) = self.plugin.split_once(',').unwrap_or((&self.plugin, ""));
        match file.parse::<Kind>() {
            Ok(kind) => Ok(Chosen::Simulator { kind, warm_up: warm_up(kind, options)? }),
            Err(reason) => {
                let path = Path::new(file).canonicalize().map_err(|_| {
                    Failure::usage(format!("{file} is no file; {reason}"))
                        .help("name a simulator or the file of a plugin")
                })?;
                Ok(Chosen::Plugin { path, options: options.to_owned() })
            }
        }
    }
}

/// How many intervals before its own a simulator runs, for the state that it begins with.
fn warm_up(kind: Kind, options: &str) -> Result<u32, Failure> {
    if options.is_empty() {
        return Ok(0);
    }
    let is_wrong = |reason: String| Err(Failure::usage(reason).help("cache,warm-up=1 runs the interval before, too"));
    let Some(count) = options.strip_prefix("warm-up=").and_then(|count| count.parse().ok()) else {
        return is_wrong(format!("{kind} has no option {options}"));
    };
    match kind.has_warm_up() || count == 0 {
        true => Ok(count),
        false => is_wrong(format!("{kind} keeps nothing that a warm-up could improve")),
    }
}

/// A simulator of Pagemark's, or a plugin of QEMU with its options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chosen {
    Simulator { kind: Kind, warm_up: u32 },
    Plugin { path: PathBuf, options: String },
}

impl Chosen {
    /// The observer of the interval that begins at a checkpoint. A trace is written to `trace`.
    pub fn observer(&self, from: u64, trace: Option<&Path>) -> Observer {
        match self {
            Chosen::Simulator { kind: Kind::Trace, .. } => {
                Observer::Trace(trace.map(Path::to_owned).unwrap_or_default())
            }
            Chosen::Simulator { kind, .. } => Observer::Simulator(*kind),
            Chosen::Plugin { path, options } => {
                let path = path.display().to_string().replace(',', ",,");
                let separator = if options.is_empty() { "" } else { "," };
                Observer::Plugin(format!("{path}{separator}{}", options.replace("{}", &from.to_string())))
            }
        }
    }

    /// True if it writes a file for each interval.
    pub fn is_trace(&self) -> bool {
        matches!(self, Chosen::Simulator { kind: Kind::Trace, .. })
    }

    /// How many intervals before its own are simulated for each interval.
    pub fn warm_up(&self) -> u32 {
        match self {
            Chosen::Simulator { warm_up, .. } => *warm_up,
            Chosen::Plugin { .. } => 0,
        }
    }

    /// A name for directories: that of the simulator, or the plugin's file.
    pub fn name(&self) -> String {
        match self {
            Chosen::Simulator { kind, warm_up: 0 } => kind.to_string(),
            Chosen::Simulator { kind, warm_up } => format!("{kind}-warm-up-{warm_up}"),
            Chosen::Plugin { path, .. } => {
                path.file_stem().map_or_else(|| "plugin".to_owned(), |stem| stem.to_string_lossy().into_owned())
            }
        }
    }

    /// What a command line says to choose it.
    pub fn argument(&self) -> String {
        match self {
            Chosen::Simulator { kind, warm_up: 0 } => kind.to_string(),
            Chosen::Simulator { kind, warm_up } => format!("{kind},warm-up={warm_up}"),
            Chosen::Plugin { path, options } if options.is_empty() => path.display().to_string(),
            Chosen::Plugin { path, options } => format!("{},{options}", path.display()),
        }
    }
}
