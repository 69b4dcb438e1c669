//! What Pagemark has changed in a QEMU, as the commands that undo it.
//!
//! Each change is made by one command and undone by one. The guard process knows the command that
//! undoes a change before the change is made.

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::guard::{Guard, LAST_ID};
use crate::machine::Machine;

/// A command of the monitor, with its arguments.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Command {
    pub(crate) name: &'static str,
    pub(crate) arguments: Value,
}

impl Command {
    pub(crate) fn new(name: &'static str, arguments: Value) -> Command {
        Command { name, arguments }
    }
}

/// What undoes a change.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Undo {
    command: Command,
    /// Executed before where it is not known whether the change was made, if the command alone
    /// would do harm then.
    if_uncertain: Option<Command>,
}

impl Undo {
    /// By a command that does no harm if the change was not made.
    pub(crate) fn by(command: Command) -> Undo {
        Undo { command, if_uncertain: None }
    }

    /// By a command that needs another before it if the change was perhaps not made.
    pub(crate) fn by_both(if_uncertain: Command, command: Command) -> Undo {
        Undo { command, if_uncertain: Some(if_uncertain) }
    }
}

/// The command that lets a stopped machine continue.
const CONTINUE: &str = "cont";

/// The changes in one QEMU.
#[derive(Debug)]
pub(crate) struct Changes {
    guard: Guard,
    /// Undo what lasts from one checkpoint to the next.
    lasting: Vec<Command>,
    /// Undo what a checkpoint changes, in the order of the changes.
    of_checkpoint: Vec<Undo>,
    /// QEMU has not replied to a command: it is not known what was done.
    is_uncertain: bool,
}

impl Changes {
    /// None so far.
    pub(crate) fn new(machine: &Machine) -> Result<Changes> {
        let guard = Guard::start(machine.monitor.descriptor())?;
        Ok(Changes { guard, lasting: Vec::new(), of_checkpoint: Vec::new(), is_uncertain: false })
    }

    /// Makes a change for the time of a checkpoint: `make` makes it, `undo` undoes it.
    pub(crate) fn make<T>(
        &mut self,
        machine: &mut Machine,
        undo: Undo,
        make: impl FnOnce(&mut Machine) -> Result<T>,
    ) -> Result<T> {
        self.of_checkpoint.push(undo);
        self.inform_guard()?;
        let made = make(machine);
        match made.as_ref().map_err(Error::kind) {
            Ok(_) => {}
            // A command that QEMU refused has changed nothing.
            Err(ErrorKind::Command) => {
                self.of_checkpoint.pop();
                self.inform_guard()?;
            }
            Err(_) => self.is_uncertain = true,
        }
        made
    }

    /// As [`Changes::make`], with commands of the monitor.
    pub(crate) fn execute(&mut self, machine: &mut Machine, command: Command, undo: Command) -> Result<()> {
        self.make(machine, Undo::by(undo), |machine| machine.execute(&command))
    }

    /// Executes commands one after the other, each with what undoes it, if anything. QEMU gets them
    /// all at once, so that a machine that one of them stops is stopped for a shorter time.
    pub(crate) fn execute_all(&mut self, machine: &mut Machine, steps: Vec<(Command, Option<Undo>)>) -> Result<()> {
        let (commands, undo): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
        self.of_checkpoint.extend(undo.into_iter().flatten());
        self.inform_guard()?;
        let done = machine.monitor.execute_all(&commands);
        // Some were executed, others not.
        self.is_uncertain |= done.is_err();
        done
    }

    /// The command that stops the machine until [`Changes::resume`].
    pub(crate) fn stop() -> (Command, Option<Undo>) {
        (Command::new("stop", json!({})), Some(Undo::by(Command::new(CONTINUE, json!({})))))
    }

    /// Lets a machine continue that was stopped.
    pub(crate) fn resume(&mut self, machine: &mut Machine) -> Result<()> {
        if let Some(index) = self.of_checkpoint.iter().position(|undo| undo.command.name == CONTINUE) {
            machine.execute(&self.of_checkpoint[index].command)?;
            self.of_checkpoint.remove(index);
        }
        Ok(())
    }

    /// Declares the commands that undo what will last until the next checkpoint.
    pub(crate) fn set_lasting(&mut self, lasting: Vec<Command>) -> Result<()> {
        self.lasting = lasting;
        self.inform_guard()
    }

    /// Undoes what the checkpoint changed: first of all, the machine continues.
    ///
    /// # Errors
    /// The first command that failed. The others were sent all the same.
    pub(crate) fn end_checkpoint(&mut self, machine: &mut Machine) -> Result<()> {
        let resumed = self.resume(machine);
        let is_uncertain = std::mem::take(&mut self.is_uncertain);
        let mut done = resumed;
        while let Some(undo) = self.of_checkpoint.last() {
            let commands = undo.if_uncertain.iter().filter(|_| is_uncertain).chain([&undo.command]);
            done = commands.map(|command| machine.execute(command)).fold(done, Result::and);
            self.of_checkpoint.pop();
            // What undoes an earlier change can make this command harmful.
            done = done.and(self.inform_guard());
        }
        done
    }

    /// Undoes everything.
    pub(crate) fn end(&mut self, machine: &mut Machine) -> Result<()> {
        let ended = self.end_checkpoint(machine);
        let commands = std::mem::take(&mut self.lasting).into_iter();
        let done = commands.map(|command| machine.execute(&command)).fold(ended, Result::and);
        done.and(self.inform_guard())
    }

    /// Gives the guard the commands that undo everything.
    fn inform_guard(&self) -> Result<()> {
        let (first, others): (Vec<_>, Vec<_>) =
            self.of_checkpoint.iter().rev().partition(|undo| undo.command.name == CONTINUE);
        let undo = first.into_iter().chain(others);
        let commands = undo.flat_map(|undo| undo.if_uncertain.iter().chain([&undo.command])).chain(&self.lasting);
        self.guard.hold(&script(commands)?)
    }
}

/// The commands as lines, the last with [`LAST_ID`].
fn script<'a>(commands: impl Iterator<Item = &'a Command>) -> Result<String> {
    let mut lines: Vec<Value> =
        commands.map(|command| json!({"execute": command.name, "arguments": command.arguments})).collect();
    if let Some(last) = lines.last_mut().and_then(Value::as_object_mut) {
        last.insert("id".into(), LAST_ID.into());
    }
    let lines: Result<Vec<String>, serde_json::Error> = lines.iter().map(serde_json::to_string).collect();
    let lines = lines.map_err(|error| Error::of(ErrorKind::System, "write commands", Object::None, error))?;
    Ok(lines.into_iter().map(|line| line + "\n").collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_lines_of_json_whose_last_has_the_id() {
        let commands = [Command::new("cont", json!({})), Command::new("remove-fd", json!({"fdset-id": 7}))];
        let script = script(commands.iter()).unwrap();
        let lines: Vec<Value> = script.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0], json!({"execute": "cont", "arguments": {}}));
        assert_eq!(lines[1], json!({"execute": "remove-fd", "arguments": {"fdset-id": 7}, "id": LAST_ID}));
        assert!(script.ends_with('\n') && super::script([].iter()).unwrap().is_empty());
    }
}
