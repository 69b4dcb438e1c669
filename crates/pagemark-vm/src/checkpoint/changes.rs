//! What Pagemark has changed in a QEMU, as the commands that undo it.
//!
//! Each change is made by one command and undone by one. The guard process knows the command that
//! undoes a change before the change is made.

use serde_json::json;

use crate::error::{Error, ErrorKind, Result};
use crate::qemu::command::{self, Command};
use crate::qemu::guard::{Guard, LAST_ID};
use crate::qemu::machine::Machine;
use crate::qemu::qmp::Reply;

/// What undoes a change.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Undo {
    command: Command,
    /// Executed before where it is not known whether the change was made, if the command alone
    /// would do harm then.
    if_uncertain: Option<Command>,
    /// The node of a device that the command replaces. If it has another, there is nothing to undo.
    replaces: Option<DeviceNode>,
}

/// A device, in QEMU's tree of objects, and a node.
#[derive(Clone, PartialEq, Debug)]
struct DeviceNode {
    device: String,
    node: String,
}

impl Undo {
    /// By a command that does no harm if the change was not made.
    pub(crate) fn by(command: Command) -> Undo {
        Undo { command, if_uncertain: None, replaces: None }
    }

    /// By a command that needs another before it if the change was perhaps not made.
    pub(crate) fn by_both(if_uncertain: Command, command: Command) -> Undo {
        Undo { command, if_uncertain: Some(if_uncertain), replaces: None }
    }

    /// Only if the device has the node. As long as a job of QEMU's works on disks, nothing is
    /// undone: the job may have put a node of its own before this one.
    pub(crate) fn while_used(self, device: &str, node: &str) -> Undo {
        Undo { replaces: Some(DeviceNode { device: device.to_owned(), node: node.to_owned() }), ..self }
    }

    /// Whether there is something to undo.
    fn is_needed(&self, machine: &mut Machine) -> Result<bool> {
        let Some(DeviceNode { device, node }) = &self.replaces else { return Ok(true) };
        Ok(machine.blocks_without_job()?.node_of(device).as_ref() == Some(node))
    }
}

/// The command that lets a stopped machine continue.
const CONTINUE: &str = "cont";

/// The changes in one QEMU.
#[derive(Debug)]
pub struct Changes {
    guard: Guard,
    /// Undo what lasts from one checkpoint to the next.
    lasting: Vec<Command>,
    /// Undo what a checkpoint changes, in the order of the changes.
    of_checkpoint: Vec<Undo>,
    /// It is not known which of the changes were made: QEMU has not replied to a command.
    is_uncertain: bool,
}

impl Changes {
    /// None so far.
    pub fn new(machine: &Machine) -> Result<Changes> {
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
        self.inform_guard_before()?;
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

    /// Like [`Changes::make`], with commands of the monitor.
    pub(crate) fn execute(&mut self, machine: &mut Machine, command: Command, undo: Command) -> Result<()> {
        self.make(machine, Undo::by(undo), |machine| machine.execute(&command))
    }

    /// Executes commands one after the other, each with what undoes it, if anything. QEMU gets them
    /// all at once, so that a machine that one of them stops is stopped for a shorter time. Returns
    /// its replies.
    pub(crate) fn execute_all(
        &mut self,
        machine: &mut Machine,
        steps: Vec<(Command, Option<Undo>)>,
    ) -> Result<Vec<Reply>> {
        let (commands, undo): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
        self.of_checkpoint.extend(undo.into_iter().flatten());
        self.inform_guard_before()?;
        let done = machine.monitor.execute_all(&commands);
        // Some were executed, others not.
        self.is_uncertain |= done.is_err();
        done
    }

    /// The command that stops the machine until [`Changes::resume`].
    pub(crate) fn stop() -> (Command, Option<Undo>) {
        (Command::new("stop", json!({})), Some(Undo::by(Command::new(CONTINUE, json!({})))))
    }

    /// Lets a machine continue that was stopped. False if it has moved before, because somebody
    /// else let it continue, or reset it.
    pub(crate) fn resume(&mut self, machine: &mut Machine) -> Result<bool> {
        let Some(index) = self.of_checkpoint.iter().position(|undo| undo.command.name == CONTINUE) else {
            return machine.monitor.stood_still();
        };
        let stood_still = machine.monitor.resume()?;
        self.of_checkpoint.remove(index);
        Ok(stood_still)
    }

    /// Declares the commands that undo what will last until the next checkpoint.
    pub(crate) fn set_lasting(&mut self, lasting: Vec<Command>) -> Result<()> {
        self.lasting = lasting;
        self.inform_guard()
    }

    /// Undoes what the checkpoint changed: first of all, the machine continues.
    ///
    /// # Errors
    /// The first command that failed. What is not known to be undone, because QEMU did not reply,
    /// stays to be undone by a further call, or by the guard.
    pub fn end_checkpoint(&mut self, machine: &mut Machine) -> Result<()> {
        let is_stopped = self.of_checkpoint.iter().any(|undo| undo.command.name == CONTINUE);
        let mut done = if is_stopped { self.resume(machine).map(drop) } else { Ok(()) };
        while let Some(undo) = self.of_checkpoint.last() {
            match undo.is_needed(machine) {
                Ok(true) => {}
                Ok(false) => {
                    self.of_checkpoint.pop();
                    done = done.and(self.inform_guard());
                    continue;
                }
                Err(error) => return done.and(Err(error)),
            }
            let commands = undo.if_uncertain.iter().filter(|_| self.is_uncertain).chain([&undo.command]);
            let undone = commands.map(|command| machine.execute(command)).fold(Ok(()), Result::and);
            let has_reply = has_reply(&undone);
            done = done.and(undone);
            if !has_reply {
                self.is_uncertain = true;
                return done;
            }
            self.of_checkpoint.pop();
            // What undoes an earlier change can make this command harmful. Where the guard is gone, it sends none.
            done = done.and(self.inform_guard());
        }
        self.is_uncertain = false;
        done
    }

    /// Undoes everything.
    ///
    /// # Errors
    /// As those of [`Changes::end_checkpoint`].
    pub(crate) fn end(&mut self, machine: &mut Machine) -> Result<()> {
        let mut done = self.end_checkpoint(machine);
        while let Some(command) = self.lasting.last().filter(|_| self.of_checkpoint.is_empty()) {
            let undone = machine.execute(command);
            let has_reply = has_reply(&undone);
            done = done.and(undone);
            if !has_reply {
                return done;
            }
            self.lasting.pop();
        }
        done.and(self.inform_guard())
    }

    /// Informs the guard of changes that are about to be made. They are not made if that fails.
    fn inform_guard_before(&mut self) -> Result<()> {
        let informed = self.inform_guard();
        self.is_uncertain |= informed.is_err();
        informed
    }

    /// Gives the guard the commands that undo everything.
    fn inform_guard(&self) -> Result<()> {
        let (first, others): (Vec<_>, Vec<_>) =
            self.of_checkpoint.iter().rev().partition(|undo| undo.command.name == CONTINUE);
        let undo = first.into_iter().chain(others);
        let commands = undo.flat_map(|undo| undo.if_uncertain.iter().chain([&undo.command])).chain(&self.lasting);
        self.guard.hold(&script(commands))
    }
}

/// True if QEMU has executed a command, or has refused it.
fn has_reply(done: &Result<()>) -> bool {
    done.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Command)
}

/// The commands as lines, the last with [`LAST_ID`].
fn script<'a>(commands: impl Iterator<Item = &'a Command>) -> String {
    let commands: Vec<&Command> = commands.collect();
    let Some((last, others)) = commands.split_last() else { return String::new() };
    let line = |command: &Command, id| command::line(command.name, &command.arguments, id);
    others.iter().map(|command| line(command, None)).chain([line(last, Some(LAST_ID.into()))]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    use serde_json::Value;

    use super::*;
    use crate::qemu::qmp::Monitor;

    /// What a QEMU has.
    #[derive(PartialEq, Debug, Default)]
    struct Served {
        is_stopped: bool,
        nodes: BTreeSet<String>,
    }

    impl Served {
        /// Executes a command; false if it refuses it.
        fn execute(&mut self, command: &Value) -> bool {
            let node = command["arguments"]["node"].as_str().unwrap_or_default();
            match command["execute"].as_str().unwrap() {
                "add" => self.nodes.insert(node.to_owned()),
                "remove" => self.nodes.remove(node),
                "query-status" => true,
                word => {
                    self.is_stopped = word == "stop";
                    true
                }
            }
        }
    }

    /// Serves a monitor until it is closed. To the command of the number `fault` it gives no proper
    /// reply, and executes it or not. Returns what is left, and how many commands came.
    fn serve(stream: UnixStream, fault: usize, executes: bool) -> (Served, usize) {
        let mut served = Served::default();
        let mut count = 0;
        let mut replies = stream.try_clone().unwrap();
        replies.write_all(b"{\"QMP\": {}}\n").unwrap();
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let command: Value = serde_json::from_str(&line).unwrap();
            let is_fault = count == fault;
            let done = if is_fault && !executes { true } else { served.execute(&command) };
            let reply = match (is_fault, done) {
                (true, _) => "nonsense".to_owned(),
                (false, true) => json!({"return": {}, "id": command["id"]}).to_string(),
                (false, false) => json!({"error": {"desc": "no"}, "id": command["id"]}).to_string(),
            };
            // The guard reads only the last of its replies.
            let _ = replies.write_all((reply + "\n").as_bytes());
            count += 1;
        }
        (served, count)
    }

    fn add(node: &str) -> Command {
        Command::new("add", json!({ "node": node }))
    }

    fn remove(node: &str) -> Command {
        Command::new("remove", json!({ "node": node }))
    }

    #[test]
    fn without_its_guard_everything_is_undone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let qemu = std::thread::spawn(move || serve(theirs, usize::MAX, true));
        let mut machine = Machine::of(Monitor::over(ours).unwrap(), 1).unwrap();
        let mut changes = Changes::new(&machine).unwrap();
        let steps = ["a", "b", "c"].map(|node| (add(node), Some(Undo::by(remove(node)))));
        changes.execute_all(&mut machine, steps.into_iter().chain([Changes::stop()]).collect()).unwrap();
        changes.guard.kill();
        assert!(changes.end(&mut machine).is_err(), "the guard is missed");
        drop((changes, machine));
        assert_eq!(qemu.join().unwrap().0, Served::default());
    }

    fn checkpoint(changes: &mut Changes, machine: &mut Machine) -> Result<()> {
        changes.execute(machine, add("a"), remove("a"))?;
        changes.set_lasting(vec![remove("lasting")])?;
        machine.execute(&add("lasting"))?;
        changes.execute_all(machine, vec![Changes::stop(), (add("b"), Some(Undo::by(remove("b"))))])?;
        changes.resume(machine)?;
        changes.execute(machine, add("c"), remove("c"))
    }

    #[test]
    fn nothing_is_left_whichever_reply_is_missing() {
        // Behind the first command, which begins the connection, until no command has that number.
        let (mut fault, mut came) = (1, true);
        while came {
            for executes in [false, true] {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let server = std::thread::spawn(move || serve(theirs, fault, executes));
                let mut machine = Machine::of(Monitor::over(ours).unwrap(), 1).unwrap();
                let mut changes = Changes::new(&machine).unwrap();
                let _ = checkpoint(&mut changes, &mut machine);
                let _ = changes.end_checkpoint(&mut machine);
                let _ = changes.end(&mut machine);
                drop(changes);
                drop(machine);
                let (left, count) = server.join().unwrap();
                assert_eq!(left, Served::default(), "no reply to command {fault}, executed: {executes}");
                came = fault < count;
            }
            fault += 1;
        }
        assert!(fault > 10, "{fault}");
    }

    #[test]
    fn a_script_is_lines_of_json_whose_last_has_the_id() {
        let commands = [Command::new("cont", json!({})), Command::new("remove-fd", json!({"fdset-id": 7}))];
        let script = script(commands.iter());
        let lines: Vec<Value> = script.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0], json!({"execute": "cont"}));
        assert_eq!(lines[1], json!({"execute": "remove-fd", "arguments": {"fdset-id": 7}, "id": LAST_ID}));
        assert!(script.ends_with('\n') && super::script([].iter()).is_empty());
    }
}
