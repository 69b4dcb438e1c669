//! A CRIU that is killed while it examines the kernel leaves no process. It has children then that
//! stop themselves, and that it would kill.

mod support;

use std::path::{Path, PathBuf};

use pagemark_process::criu::Criu;
use pagemark_process::restore::Stage;
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, criu, status_field};

/// A CRIU that is killed in `action`, beside a child of its that has stopped itself.
struct Killed {
    directory: tempfile::TempDir,
    path: PathBuf,
}

impl Killed {
    /// `when` is a condition of the shell for the kill.
    fn new(action: &str, when: &str, real: &Path) -> Killed {
        let directory = tempfile::tempdir().unwrap();
        let (path, list) = (directory.path().join("criu"), directory.path().join("children"));
        let text = format!(
            "#!/bin/sh\n[ \"$1\" = {action} ] || exec '{real}' \"$@\"\n\
             sh -c 'kill -STOP $$' \"$0\" \"$@\" &\n\
             until grep -q '^State:.T' /proc/$!/status && {when}; do sleep 0.01; done\n\
             echo $! >> '{list}'\nkill -KILL $$\n",
            real = real.display(),
            list = list.display(),
        );
        pagemark_testing::executable(&path, text.as_bytes());
        Killed { directory, path }
    }

    /// Waits until no child is left. There has been one.
    fn has_left_nobody(&self) {
        let list = std::fs::read_to_string(self.directory.path().join("children")).unwrap();
        assert_ne!(list, "");
        for child in list.lines().map(|line| line.parse().unwrap()) {
            let has_ended = || status_field(child, "State:").is_none_or(|state| state.starts_with(['Z', 'X']));
            wait_until("the child of CRIU to end", has_ended);
        }
    }
}

#[test]
fn no_child_of_a_killed_examination_is_waited_for() {
    let Some(criu) = criu() else { return };
    let killed = Killed::new("check", "true", criu.path());
    let path = killed.path.clone();
    // The child has the streams of the examination open.
    let thread = std::thread::spawn(move || Criu::at(&path).map(drop).unwrap_err());
    wait_until("the examination to end", || thread.is_finished());
    let error = thread.join().unwrap().to_string();
    assert!(error.contains("check`: signal: 9"), "{error}");
    killed.has_left_nobody();
}

#[test]
fn no_child_of_a_killed_dump_stays_stopped() {
    let Some(mut checkpoints) = Checkpoints::new() else { return };
    let killed = Killed::new("dump", "grep -q '^TracerPid:.[1-9]' /proc/$$/status", checkpoints.criu.path());
    checkpoints.criu = Criu::at(&killed.path).unwrap();
    let program = Program::counter("", "show(n)\ntime.sleep(0.005)");
    checkpoints.refusal(&program);
    killed.has_left_nobody();
    program.wait_until_count_exceeds(program.count() + 5);
}

#[test]
fn no_child_of_a_killed_restore_stays_stopped() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let killed = Killed::new("restore", "true", checkpoints.criu.path());
    let mut program = Program::counter("", "show(n)\ntime.sleep(0.005)");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let restore = checkpoints.restoring(&checkpoint, &Criu::at(&killed.path).unwrap());
    let failure = restore.run(&mut |_| {}).unwrap_err();
    assert_eq!(failure.stage, Stage::Processes, "{failure}");
    killed.has_left_nobody();
}
