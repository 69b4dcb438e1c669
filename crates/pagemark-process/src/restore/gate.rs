//! The gate in which CRIU waits, before the restored processes run, until their memory is complete.
//!
//! CRIU executes its action script at each stage of a restore. At the stage `post-restore` every
//! process has its mappings, and none runs. The script waits there for a line from the restoring
//! process. If it gets another line or the end of the pipe, because the restoring process has died
//! or the memory is not complete, the script fails, and CRIU kills the processes.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark_linux::proc::Process;

/// The program that executes the script.
pub(super) const SHELL: &str = "/bin/sh";

/// The line that opens the gate.
const COMPLETE: &str = "complete";

/// A gate for one restore. Dropped before it was opened, it makes CRIU fail.
pub(super) struct Gate {
    /// The script, a file in memory: directories for temporary files are often mounted `noexec`.
    script: File,
    /// The script writes into it when it is reached.
    reached: (PipeReader, PipeWriter),
    /// The script reads from it.
    opened: (PipeReader, PipeWriter),
}

impl Gate {
    /// Makes a gate.
    ///
    /// # Errors
    /// The system refuses executable files in memory (`vm.memfd_noexec`), or `EMFILE`.
    pub(super) fn new() -> io::Result<Gate> {
        Gate::at(&["post-restore"])
    }

    /// Makes a gate in which CRIU waits at each of these stages.
    ///
    /// # Errors
    /// Those of [`Gate::new`].
    pub(super) fn at(stages: &[&str]) -> io::Result<Gate> {
        let gate = Gate { script: executable_in_memory()?, reached: io::pipe()?, opened: io::pipe()? };
        // The paths lead to descriptors of this process: if it has died, they cannot be opened.
        let text = format!(
            "#!{SHELL}\n\
             case \"$CRTOOLS_SCRIPT_ACTION\" in {stages}) ;; *) exit 0 ;; esac\n\
             exec 3<{opened} 4>{reached} || exit 1\n\
             echo \"$CRTOOLS_INIT_PID\" >&4\n\
             read -r word <&3 && [ \"$word\" = {COMPLETE} ]\n",
            stages = stages.join("|"),
            opened = path_of(&gate.opened.0),
            reached = path_of(&gate.reached.1),
        );
        (&gate.script).write_all(text.as_bytes())?;
        Ok(gate)
    }

    /// The path of the script.
    pub(super) fn path(&self) -> String {
        path_of(&self.script)
    }

    /// A descriptor that is readable when CRIU waits in the gate.
    pub(super) fn reached(&self) -> BorrowedFd<'_> {
        self.reached.0.as_fd()
    }

    /// Takes the notice that CRIU waits. Blocks until it does. Returns the root process, if CRIU
    /// reports it and it is there.
    pub(super) fn take_root(&mut self) -> io::Result<Option<Process>> {
        Ok(self.take_notice()?.and_then(|pid| Process::find(pid).ok()))
    }

    /// The same with the id here of the root process, as CRIU reports it.
    fn take_notice(&mut self) -> io::Result<Option<i32>> {
        let mut notice = [0; 64];
        let length = self.reached.0.read(&mut notice)?;
        Ok(std::str::from_utf8(&notice[..length]).ok().and_then(|text| text.trim().parse().ok()))
    }

    /// Lets CRIU pass at one stage of several.
    pub(super) fn let_pass(&mut self) -> io::Result<()> {
        self.opened.1.write_all(format!("{COMPLETE}\n").as_bytes())
    }

    /// Lets the processes run.
    pub(super) fn open(mut self) -> io::Result<()> {
        self.let_pass()
    }
}

fn path_of(descriptor: &impl AsRawFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), descriptor.as_raw_fd())
}

/// An empty file in memory that may be executed.
fn executable_in_memory() -> io::Result<File> {
    let create = |flags: MFdFlags| memfd_create(c"pagemark-gate", flags).map(File::from);
    match create(MFdFlags::MFD_CLOEXEC | MFdFlags::from_bits_retain(libc::MFD_EXEC)) {
        // Before Linux 6.3 the flag is unknown, and every file in memory may be executed.
        Err(Errno::EINVAL) => Ok(create(MFdFlags::MFD_CLOEXEC)?),
        created => Ok(created?),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn script(gate: &Gate, stage: &str) -> Command {
        let mut command = Command::new(gate.path());
        command.env("CRTOOLS_SCRIPT_ACTION", stage);
        command
    }

    #[test]
    fn the_script_waits_only_before_the_processes_run() {
        let gate = Gate::new().unwrap();
        assert!(script(&gate, "pre-restore").status().unwrap().success());
        assert!(script(&gate, "post-resume").status().unwrap().success());
    }

    #[test]
    fn an_opened_gate_succeeds_and_a_dropped_one_fails() {
        for (is_opened, root_pid) in [(true, Some(7)), (false, None)] {
            let mut gate = Gate::new().unwrap();
            let mut waiting = script(&gate, "post-restore");
            waiting.envs(root_pid.map(|pid: i32| ("CRTOOLS_INIT_PID", pid.to_string())));
            let mut waiting = waiting.spawn().unwrap();
            assert_eq!(gate.take_notice().unwrap(), root_pid);
            assert!(waiting.try_wait().unwrap().is_none());
            if is_opened {
                gate.open().unwrap()
            } else {
                drop(gate)
            }
            assert_eq!(waiting.wait().unwrap().success(), is_opened);
        }
    }
}
