//! What the tasks of a machine wait for that does not end.
//!
//! Nobody can enter such a machine. An interrupt that no kernel expects (NMI) has its kernel panic,
//! and a panic writes where each task is into the kernel's log.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::{Error, Result};

/// The socket by which QEMU is controlled, in the directory of the run.
pub const SOCKET: &str = "control";

/// Has the kernel panic at such an interrupt. A panic writes all tasks (1), all timers (4) and the
/// stacks of all processors (64).
pub const KERNEL_PARAMETERS: &str = "unknown_nmi_panic panic_print=69";

/// For how long an emulated machine writes that at most.
pub const REPORT_LIMIT: Duration = Duration::from_secs(60);

/// How the kernel's log begins the state of a task.
const TASK: &str = "task:";

/// Has the machine's kernel write its tasks into its log, and end.
///
/// # Errors
/// QEMU cannot be reached.
pub fn report_tasks(directory: &Path) -> Result<()> {
    let path = directory.join(SOCKET);
    interrupt(&path).map_err(Error::file("control QEMU by", &path))
}

fn interrupt(path: &Path) -> std::io::Result<()> {
    let mut control = UnixStream::connect(path)?;
    control.set_read_timeout(Some(REPORT_LIMIT))?;
    let mut answers = BufReader::new(control.try_clone()?);
    // Its greeting, and an answer to each command.
    answers.read_line(&mut String::new())?;
    for command in ["qmp_capabilities", "inject-nmi"] {
        writeln!(control, "{{\"execute\": \"{command}\"}}")?;
        answers.read_line(&mut String::new())?;
    }
    Ok(())
}

/// Divides a kernel's log where a panic begins to write what its tasks wait for.
pub fn divide(log: &str) -> (&str, &str) {
    match log.lines().find(|line| message(line).starts_with(TASK)) {
        Some(first) => log.split_at(first.as_ptr() as usize - log.as_ptr() as usize),
        None => (log, ""),
    }
}

/// A line of the log without its time.
fn message(line: &str) -> &str {
    line.split_once("] ").map_or(line, |(_, message)| message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const LOG: &str = "\
[   10.0] Run /init as init process
[   20.0] Kernel panic - not syncing: NMI: Not continuing
[   20.0]  dump_stack
[   20.1] task:init            state:S stack:0     pid:1
[   20.1]  do_wait+0x54/0xe0
[   20.2] task:oracle          state:D stack:0     pid:184
[   20.2]  __read_swap_cache_async+0x11f/0x200
[   20.3] task:oracle          state:S stack:0     pid:185
[   20.3]  futex_wait+0x61/0x120
";

    #[test]
    fn the_tasks_are_told_from_the_rest() {
        let (before, tasks) = divide(LOG);
        assert!(before.ends_with(" dump_stack\n") && tasks.starts_with("[   20.1] task:init"), "{before}\n{tasks}");
        for other in ["[   10.0] Run /init as init process\n", ""] {
            assert_eq!(divide(other), (other, ""));
        }
    }

    #[test]
    fn the_interrupt_is_the_second_command() {
        let directory = tempfile::tempdir().unwrap();
        assert!(report_tasks(directory.path()).is_err());
        let listener = UnixListener::bind(directory.path().join(SOCKET)).unwrap();
        let qemu = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut commands = BufReader::new(socket.try_clone().unwrap()).lines();
            writeln!(socket, "{{\"QMP\": {{}}}}").unwrap();
            [(); 2].map(|()| {
                let command = commands.next().unwrap().unwrap();
                writeln!(socket, "{{\"return\": {{}}}}").unwrap();
                command
            })
        });
        report_tasks(directory.path()).unwrap();
        let commands = qemu.join().unwrap();
        assert_eq!(commands, ["{\"execute\": \"qmp_capabilities\"}", "{\"execute\": \"inject-nmi\"}"]);
    }
}
