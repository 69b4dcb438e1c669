//! A QEMU that ends while it should carry out a command of the monitor.
//!
//! At its end, QEMU waits until its monitor has no command left. If a command has come in that
//! moment, QEMU 7.2 can miss it and wait without end: nothing wakes its main thread any more, and
//! its user sees a program that ignores Ctrl-C. Its disks are closed then. Any signal to end wakes
//! it, and changes nothing else, because QEMU is ending already.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pagemark_linux::{pidfd, proc};
use serde_json::Value;

use crate::qemu::command::text;
use crate::qemu::command_line::option_name;

/// How long QEMU may send nothing, once it has reported that it ends.
const PATIENCE: Duration = Duration::from_secs(3);

/// After these reasons of a shutdown QEMU ends, whatever its options are.
const ALWAYS_ENDING: [&str; 3] = ["host-signal", "host-qmp-quit", "host-ui"];

/// The process of a monitor, and whether it ends.
#[derive(Debug)]
pub(crate) struct Ending {
    process: OwnedFd,
    /// After a shutdown of the guest QEMU stays, or may stay.
    may_stay: bool,
    /// When it last reported its end or was woken. None as long as it does not end.
    since: Option<Instant>,
}

impl Ending {
    /// For the QEMU whose process is `pid`. None if the kernel is older than Linux 5.3, or there is
    /// no such process.
    pub(crate) fn of(pid: i32) -> Option<Ending> {
        let process = pidfd::open(pid, 0).ok()?;
        let decides = |argument: &Vec<u8>| {
            matches!(option_name(&String::from_utf8_lossy(argument)), Some("no-shutdown" | "action"))
        };
        let may_stay = proc::arguments(pid).ok()?.iter().any(decides);
        Some(Ending { process, may_stay, since: None })
    }

    /// Takes note of an event.
    pub(crate) fn observe(&mut self, event: &Value) {
        if event.get("event").and_then(Value::as_str) == Some("SHUTDOWN") {
            let reason = event.get("data").map_or(String::new(), |data| text(data, "reason"));
            let ends = ALWAYS_ENDING.contains(&&*reason) || (reason == "guest-shutdown" && !self.may_stay);
            self.since = ends.then(Instant::now);
        }
    }

    /// How long to wait for a message before [`Ending::wake`] is called. None if it need not be.
    pub(crate) fn patience(&self) -> Option<Duration> {
        self.since.map(|since| PATIENCE.saturating_sub(since.elapsed()).max(Duration::from_millis(1)))
    }

    /// Wakes QEMU, if it ends and has sent nothing for too long.
    pub(crate) fn wake(&mut self) {
        if self.since.is_some_and(|since| since.elapsed() >= PATIENCE) {
            // If it has ended, its monitor is closed, which the next read finds.
            let _ = pidfd::send_signal(&self.process, libc::SIGTERM);
            self.since = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use serde_json::json;

    use super::*;

    fn shutdown(reason: &str) -> Value {
        json!({"event": "SHUTDOWN", "data": {"guest": false, "reason": reason}})
    }

    #[test]
    fn only_a_qemu_that_ends_is_woken() {
        // The shell's arguments stand for those of QEMU.
        for (options, reason, ends) in [
            ("-S", "host-signal", true),
            ("-no-shutdown", "host-qmp-quit", true),
            ("-S", "guest-shutdown", true),
            ("-no-shutdown", "guest-shutdown", false),
            ("--action", "guest-shutdown", false),
            ("-S", "host-error", false),
        ] {
            let mut child =
                Command::new("sh").args(["-c", "read line", options]).stdin(Stdio::piped()).spawn().unwrap();
            pagemark_testing::wait_until_it_has(child.id(), options);
            let pid = child.id() as i32;
            let mut ending = Ending::of(pid).unwrap();
            ending.observe(&json!({"event": "STOP"}));
            assert_eq!(ending.patience(), None);
            ending.observe(&shutdown(reason));
            assert_eq!(ending.patience().is_some(), ends, "{options} {reason}");
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }

    #[test]
    fn it_is_woken_after_a_while_and_not_at_once() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut ending = Ending::of(child.id() as i32).unwrap();
        ending.observe(&shutdown("host-signal"));
        ending.wake();
        assert!(child.try_wait().unwrap().is_none());
        ending.since = Some(Instant::now() - PATIENCE);
        ending.wake();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
        assert!(ending.patience().unwrap() > PATIENCE / 2);
    }
}
