//! What observes a machine that is simulated, as an option.

use std::path::Path;

use clap::Args;
use pagemark_replay::ObserverChoice;
use pagemark_simulate::Kind;

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
    pub fn choice(&self) -> Result<ObserverChoice, Failure> {
        let (file, options) = self.plugin.split_once(',').unwrap_or((&self.plugin, ""));
        match file.parse::<Kind>() {
            Ok(kind) => Ok(ObserverChoice::Simulator { kind, warm_up: warm_up(kind, options)? }),
            Err(reason) => {
                let path = Path::new(file).canonicalize().map_err(|_| {
                    Failure::usage(format!("{file} is no file; {reason}"))
                        .help("name a simulator or the file of a plugin")
                })?;
                Ok(ObserverChoice::Plugin { path, options: options.to_owned() })
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
