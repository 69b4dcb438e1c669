//! The programs that check themselves run, and notice damage.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use pagemark_testing::{VIOLATED, assert_oracle, assert_unviolated, rounds, trackee, violation, wait_until};
use tempfile::TempDir;

/// A running program, which is killed in the end.
struct Running {
    child: Child,
    directory: TempDir,
}

impl Running {
    fn start(name: &str) -> Running {
        let directory = TempDir::new().unwrap();
        let child = Command::new(trackee(name)).arg(directory.path()).spawn().unwrap();
        let mut running = Running { child, directory };
        running.await_rounds(20);
        running
    }

    /// Waits until the program has completed `more` further rounds.
    fn await_rounds(&mut self, more: u64) {
        let wanted = rounds(self.path()) + more;
        wait_until("the program gets on", || {
            assert_unviolated(self.directory.path());
            assert_oracle!(self.child.try_wait().unwrap().is_none(), "it ended");
            rounds(self.directory.path()) >= wanted
        });
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the call sends a signal to a child that is not reaped yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn ends_violated(&mut self) -> String {
        let mut code = None;
        wait_until("the program ends", || {
            code = self.child.try_wait().unwrap();
            code.is_some()
        });
        assert_eq!(code.unwrap().code(), Some(VIOLATED));
        violation(self.path()).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn children(pid: u32) -> Vec<i32> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn torture_runs_and_guards_its_report() {
    let mut torture = Running::start("torture");
    let threads = fs::read_dir(format!("/proc/{}/task", torture.child.id())).unwrap().count();
    assert_eq!(threads, 8);
    OpenOptions::new().append(true).open(torture.path().join("progress")).unwrap().write_all(b"x").unwrap();
    assert!(torture.ends_violated().contains("progress"));
}

#[test]
fn torture_keeps_a_signal_pending() {
    let mut torture = Running::start("torture");
    let pid = torture.child.id();
    let waiting = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let pending = waiting.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap().trim();
    assert_ne!(u64::from_str_radix(pending, 16).unwrap() & (1 << (libc::SIGUSR1 - 1)), 0);
    torture.await_rounds(5);
}

#[test]
fn pages_changes_and_forks_on_request() {
    let mut pages = Running::start("pages");
    let done = |pages: &Running| fs::read_to_string(pages.path().join("done")).unwrap_or_default();
    for (signal, expected) in [(libc::SIGUSR1, "changed\n"), (libc::SIGUSR2, "changed\nforked\n")] {
        pages.signal(signal);
        wait_until("it does as told", || done(&pages) == expected);
    }
    let [child] = children(pages.child.id())[..] else { panic!("one child was forked") };
    let progress: PathBuf = pages.path().join(format!("progress.{child}"));
    wait_until("the child gets on", || fs::metadata(&progress).is_ok_and(|file| file.len() > 100));
    pages.await_rounds(10);
    // SAFETY: a child of our child, which does not reap it.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
}

#[test]
fn pages_notices_a_damaged_page() {
    let mut pages = Running::start("pages");
    let shared = OpenOptions::new().write(true).open(pages.path().join("mapped-shared")).unwrap();
    // The program itself writes only the first word of each page.
    std::os::unix::fs::FileExt::write_all_at(&shared, &[0], 8).unwrap();
    assert!(pages.ends_violated().contains("region 3"));
}

#[test]
fn family_notices_a_lost_child() {
    let mut family = Running::start("family");
    let all = children(family.child.id());
    assert_eq!(all.len(), 3);
    // SAFETY: a child of our child, which does not reap it.
    assert_eq!(unsafe { libc::kill(all[1], libc::SIGKILL) }, 0);
    assert!(family.ends_violated().contains("answered"));
}
