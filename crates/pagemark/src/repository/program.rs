//! Which program a checkpoint is of, so that a job stays with its program.

use serde::{Deserialize, Serialize};

/// What tells the program of a checkpoint from others.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProgramRecord {
    /// The command line: as it was given to Pagemark, or else that of the process.
    pub command: Vec<String>,
    /// The directory in which the program was started, or else that of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The name that its user gave it, other than by the command line: a machine's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Which of several equal programs it is, where a batch system has numbered them:
    /// `NAME=NUMBER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// The process at its root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessRecord>,
}

/// What tells a process from all others.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// The process id.
    pub pid: i32,
    /// When the process was started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The boot of the machine.
    pub boot: String,
    /// A hash of what the process has had since it executed its program, and has after a restore
    /// too. None where that could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub birth: Option<String>,
}

impl ProcessRecord {
    /// True if both are of one process, or one is of the process as which the other was restored.
    pub fn is_same(&self, other: &ProcessRecord) -> bool {
        let is_one = (self.pid, self.start_ticks, &self.boot) == (other.pid, other.start_ticks, &other.boot);
        is_one || (self.birth.is_some() && self.birth == other.birth)
    }
}

impl ProgramRecord {
    /// True if both are of one process, or one is of the process as which the other was restored.
    pub fn is_same_process(&self, other: &ProgramRecord) -> bool {
        matches!((&self.process, &other.process), (Some(one), Some(other)) if one.is_same(other))
    }

    /// True if one is the other, started again: the same command in the same directory, or the same
    /// machine.
    pub fn is_started_again(&self, other: &ProgramRecord) -> bool {
        let is_named = self.name.is_some() && self.name == other.name;
        self.directory == other.directory
            && self.task == other.task
            && (is_named || (self.name == other.name && self.command == other.command))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, start_ticks: u64, birth: Option<&str>) -> Option<ProcessRecord> {
        Some(ProcessRecord { pid, start_ticks, boot: "today".into(), birth: birth.map(Into::into) })
    }

    fn program(command: &[&str], directory: &str) -> ProgramRecord {
        let command = command.iter().map(|word| (*word).into()).collect();
        ProgramRecord { command, directory: Some(directory.into()), ..ProgramRecord::default() }
    }

    #[test]
    fn a_program_is_known_by_its_process_and_that_as_which_it_was_restored() {
        let of = |process| ProgramRecord { process, ..program(&["web"], "/srv") };
        let first = of(process(7, 100, Some("a")));
        assert!(first.is_same_process(&of(process(7, 100, None))));
        assert!(first.is_same_process(&of(process(7, 900, Some("a")))), "it was restored");
        assert!(!first.is_same_process(&of(process(7, 900, Some("b")))), "the id was reused");
        assert!(!first.is_same_process(&of(process(7, 900, None))));
        assert!(!first.is_same_process(&of(None)) && !of(None).is_same_process(&of(None)));
    }

    #[test]
    fn a_program_is_started_again_by_the_same_command_in_the_same_place() {
        let first = program(&["python3", "a.py"], "/srv");
        assert!(first.is_started_again(&first.clone()));
        assert!(!first.is_started_again(&program(&["python3", "b.py"], "/srv")));
        assert!(!first.is_started_again(&program(&["python3", "a.py"], "/srv/2")));
        let task = |number: &str| ProgramRecord { task: Some(format!("TASK={number}")), ..first.clone() };
        assert!(task("1").is_started_again(&task("1")) && !task("1").is_started_again(&task("2")));
        let machine = |name: &str, word: &str| ProgramRecord { name: Some(name.into()), ..program(&[word], "/vm") };
        assert!(machine("web", "qemu").is_started_again(&machine("web", "qemu -incoming defer")));
        assert!(!machine("web", "qemu").is_started_again(&machine("db", "qemu")));
    }
}
