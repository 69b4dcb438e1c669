//! What observes a machine that runs again: for a run, and for one of its intervals.

use std::path::{Path, PathBuf};

use pagemark_simulate::Kind;

/// What observes the machine in an interval.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Observer {
    /// A simulator of Pagemark's, other than [`Kind::Trace`].
    Simulator(Kind),
    /// The simulator [`Kind::Trace`], which writes to this file. Its content is replaced.
    Trace(PathBuf),
    /// A plugin of QEMU: the value of its option `-plugin`.
    Plugin(String),
}

/// What observes all intervals of a run: a simulator of Pagemark's, or a plugin of QEMU with its
/// options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ObserverChoice {
    /// A simulator of Pagemark's.
    Simulator {
        /// Which.
        kind: Kind,
        /// How many intervals before its own are simulated for each interval.
        warm_up: u32,
    },
    /// A plugin of QEMU.
    Plugin {
        /// Its file.
        path: PathBuf,
        /// Its options, where `{}` stands for the interval's first checkpoint.
        options: String,
    },
}

impl ObserverChoice {
    /// The observer of the interval that begins at a checkpoint. A trace is written to `trace`.
    pub fn observer(&self, from: u64, trace: Option<&Path>) -> Observer {
        match self {
            ObserverChoice::Simulator { kind: Kind::Trace, .. } => {
                Observer::Trace(trace.map(Path::to_owned).unwrap_or_default())
            }
            ObserverChoice::Simulator { kind, .. } => Observer::Simulator(*kind),
            ObserverChoice::Plugin { path, options } => {
                let path = path.display().to_string().replace(',', ",,");
                let separator = if options.is_empty() { "" } else { "," };
                Observer::Plugin(format!("{path}{separator}{}", options.replace("{}", &from.to_string())))
            }
        }
    }

    /// True if it writes a file for each interval.
    pub fn is_trace(&self) -> bool {
        matches!(self, ObserverChoice::Simulator { kind: Kind::Trace, .. })
    }

    /// How many intervals before its own are simulated for each interval.
    pub fn warm_up(&self) -> u32 {
        match self {
            ObserverChoice::Simulator { warm_up, .. } => *warm_up,
            ObserverChoice::Plugin { .. } => 0,
        }
    }

    /// A name for directories: that of the simulator, or the plugin's file.
    pub fn name(&self) -> String {
        match self {
            ObserverChoice::Simulator { kind, warm_up: 0 } => kind.to_string(),
            ObserverChoice::Simulator { kind, warm_up } => format!("{kind}-warm-up-{warm_up}"),
            ObserverChoice::Plugin { path, .. } => {
                path.file_stem().map_or_else(|| "plugin".to_owned(), |stem| stem.to_string_lossy().into_owned())
            }
        }
    }

    /// What a command line says to choose it.
    pub fn argument(&self) -> String {
        match self {
            ObserverChoice::Simulator { kind, warm_up: 0 } => kind.to_string(),
            ObserverChoice::Simulator { kind, warm_up } => format!("{kind},warm-up={warm_up}"),
            ObserverChoice::Plugin { path, options } if options.is_empty() => path.display().to_string(),
            ObserverChoice::Plugin { path, options } => format!("{},{options}", path.display()),
        }
    }
}
