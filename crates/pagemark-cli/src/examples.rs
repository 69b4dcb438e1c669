//! The examples at the end of `--help` and of the manual pages.

use clap::Command;

/// Each example, and what it does. Examples belong to the command that they begin with.
const EXAMPLES: &str = "\
pagemark run --every 10s -- ./simulate --steps 1000000
    Start a program and checkpoint it every ten seconds.
pagemark run --data /var/lib/db -- postgres -D /var/lib/db
    Make a database's directory part of each checkpoint.
pagemark run --every auto --overhead 3% --keep-last 10 -- ./simulate
    Choose the interval by its cost, and keep ten checkpoints.
pagemark attach 4711 --every 1m
    Keep a running program checkpointed. Ctrl-C ends Pagemark; the program keeps running.
pagemark attach 4711 --job web --every 5s
    File the checkpoints under a name.
pagemark checkpoint 4711
    Take one checkpoint of a program and its children.
pagemark checkpoint --json --job web 4711
    The same for a script.
pagemark restore simulate
    Continue from the newest checkpoint, on this terminal.
pagemark restore simulate@12 --detach
    Continue from an older one, and return at once.
pagemark restore --lazy vm1
    Let a virtual machine run before all of its memory is there.
pagemark fork vm1@12 --count 3
    Start three virtual machines that share memory.
pagemark fork vm1 --count 3 --replace tcp::2222- tcp::222{}-
    Give each machine a port of its own.
pagemark log
    List the jobs.
pagemark log simulate
    List the checkpoints of a job, and what each cost.
pagemark show simulate@12
    Show the processes, mappings and files of a checkpoint.
pagemark diff simulate@11 simulate@12
    Show which memory was written between two checkpoints.
pagemark diff simulate@11 simulate@12 --hex
    Show the bytes, too.
pagemark verify
    Read all that the repository holds, and check it.
pagemark prune --keep-last 10
    Keep the ten newest checkpoints of each job.
pagemark prune --keep-last 1 simulate
    Keep one checkpoint of one job.
pagemark asides
    List what files held before restores changed them.
pagemark asides --remove-all
    Remove all of it.
pagemark export simulate@12 --core core
    Write a core file for gdb.
pagemark export simulate@12 --criu images
    Write images for plain `criu restore`.
pagemark export vm1@12 --qemu out
    Write a virtual machine for QEMU alone.
pagemark top 4711
    Show where a process writes, live.
pagemark advise 4711
    Observe a program for some seconds, and show what intervals would cost.
pagemark vm run --every 1s -- qemu-system-x86_64 -m 2G -name vm1
    Start a virtual machine and checkpoint it every second.
pagemark vm attach vm1.qmp --every 1s
    Keep a running machine checkpointed, by its monitor socket.
pagemark vm checkpoint vm1.qmp
    Take one checkpoint.
pagemark vm checkpoint --pid 4711
    The same, by QEMU's process id.
pagemark vm advise vm1.qmp
    Show what intervals would cost.
pagemark simulate record --every 100M --job vm1 -- qemu-system-x86_64 -nodefaults -m 256
    Record a run, with a checkpoint every 100 million instructions.
pagemark simulate list vm1
    List the intervals of a recorded run.
pagemark simulate interval vm1@3 --plugin cache --results results
    Simulate one interval, watched by a plugin.
pagemark simulate plan vm1 --plugin cache --results results
    List the intervals that have no result yet.
pagemark simulate run vm1 --plugin cache --results results
    Simulate all intervals in parallel, and add their results.
pagemark simulate merge vm1 --plugin cache --results results
    Add the results that earlier simulations have kept.
pagemark simulate report vm1 --plugin cache --results results --html report.html
    Show what the simulation has gained.
pagemark simulate trace vm1 --results results --from 5000000 --count 100
    Print accesses of a trace.
pagemark simulate debug vm1 --at 1234567890
    Stop the recorded machine at an instruction, for gdb.
pagemark doctor
    Show what works on this machine, and what would enable the rest.
pagemark completions bash > /etc/bash_completion.d/pagemark
    Complete commands and options in bash.
pagemark man /usr/local/share/man/man1
    Install the manual pages.
";

/// Adds the examples to a command and to all commands in it.
pub fn added_to(command: Command) -> Command {
    let name = command.get_name().to_owned();
    added_at(command, &name)
}

/// Adds the examples to the command that `path` calls.
fn added_at(command: Command, path: &str) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    if names.is_empty() {
        return match text_of(path) {
            Some(text) => command.after_long_help(text),
            None => command,
        };
    }
    let added = |command: Command, name: &String| {
        command.mut_subcommand(name, |inner| added_at(inner, &format!("{path} {name}")))
    };
    names.iter().fold(command, added)
}

/// The examples of a command, as they are printed. None if it has none.
fn text_of(path: &str) -> Option<String> {
    let (mut text, mut is_of_command) = (String::new(), false);
    for line in EXAMPLES.lines() {
        if line.starts_with("pagemark ") {
            is_of_command = line.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '));
        }
        if is_of_command {
            text = text + "\n  " + line;
        }
    }
    (!text.is_empty()).then(|| "Examples:".to_owned() + &text)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Pagemark;

    /// The commands that do something, each with what its manual page has at its end.
    fn ends(command: &Command, path: &str) -> Vec<(String, String)> {
        let inner: Vec<&Command> = command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
        if inner.is_empty() {
            return vec![(path.to_owned(), command.get_after_long_help().map(ToString::to_string).unwrap_or_default())];
        }
        inner.into_iter().flat_map(|command| ends(command, &format!("{path} {}", command.get_name()))).collect()
    }

    #[test]
    fn each_command_has_examples_of_itself() {
        let ends = ends(&added_to(Pagemark::command()), "pagemark");
        let mut shown = 0;
        for (path, end) in &ends {
            let examples: Vec<&str> = end.lines().filter(|line| line.starts_with("  pagemark ")).collect();
            assert!(!examples.is_empty(), "{path}");
            assert!(examples.iter().all(|example| example.starts_with(&format!("  {path}"))), "{path}: {examples:?}");
            shown += examples.len();
        }
        let all = EXAMPLES.lines().filter(|line| line.starts_with("pagemark ")).count();
        assert_eq!(shown, all, "each example belongs to one command");
    }
}
