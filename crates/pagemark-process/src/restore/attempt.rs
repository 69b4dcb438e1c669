//! A run of `criu restore`, from its start to its end, and what is undone if it fails or is given
//! up.

use std::fs::File;
use std::time::{Duration, Instant};

use pagemark_linux::proc::{Process, Status};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object};

use super::images::Prepared;
use super::inside::Inside;
use super::io;
use super::opened::HandedFiles;
use super::running::{Begun, Running, below, end_examiners, kill_all, kill_with_descendants, wait_for_end, wait_of};
use crate::container::MissedEnd;
use crate::criu::errors_in_log;

/// CRIU's log in the images directory.
pub(super) const LOG: &str = "restore.log";

/// How many processes an error about a CRIU that takes too long names.
const SHOWN_PROCESSES: usize = 4;

/// How far CRIU has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reached {
    /// It waits in the gate.
    Gate,
    /// It has restored the tree.
    End,
}

/// A CRIU that was started.
pub(super) struct StartedCriu {
    pub(super) running: Running,
    /// What it may have begun.
    pub(super) begun: Begun,
    /// When it was started, and how long it may take.
    pub(super) begin: Instant,
    pub(super) limit: Duration,
    /// Keeps the images from being swept away.
    pub(super) _held: File,
}

/// CRIU, and the processes that it restores. Dropped before CRIU has ended, they are killed.
pub(super) struct Attempt {
    pub(super) prepared: Prepared,
    criu: StartedCriu,
    /// The root process by its id in the images.
    pub(super) root_pid: RecordedPid,
    /// CRIU has ended. If it failed, nothing of the tree is left.
    is_over: bool,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.is_over {
            self.kill();
        }
    }
}

impl Attempt {
    pub(super) fn new(prepared: Prepared, criu: StartedCriu, root_pid: RecordedPid) -> Attempt {
        Attempt { prepared, criu, root_pid, is_over: false }
    }

    /// Waits until CRIU has restored the tree, or until `meanwhile`, which is called again and
    /// again, says that CRIU waits in the gate.
    ///
    /// # Errors
    /// CRIU failed, takes too long, or was killed, or `meanwhile` failed: the processes that CRIU
    /// began are ended.
    pub(super) fn wait(
        &mut self,
        opened: &mut HandedFiles,
        meanwhile: &mut dyn FnMut() -> Result<bool, Error>,
    ) -> Result<Reached, Error> {
        let mut end = MissedEnd::default();
        let mut refused = None;
        let reason = loop {
            match self.criu.running.try_wait().map_err(io("wait for CRIU"))? {
                Some(true) => {
                    self.is_over = true;
                    return Ok(Reached::End);
                }
                Some(false) => break errors_in_log(&self.prepared.directory.join(LOG)),
                None if self.criu.begin.elapsed() > self.criu.limit => return Err(self.end_late()),
                None if end.is_there(|| self.root_begun()) => break "the process was killed meanwhile".to_owned(),
                None => {
                    if let Some(Err(error)) = opened.inside.as_mut().map(Inside::step) {
                        // CRIU fails at the gate, which goes, and kills the processes.
                        refused = Some(error);
                        opened.inside = None;
                    }
                    if meanwhile().inspect_err(|_| self.kill())? {
                        return Ok(Reached::Gate);
                    }
                }
            }
        };
        // CRIU kills what it has begun, unless it was killed itself, and leaves the root to its parent.
        self.is_over = true;
        self.criu.running.end();
        self.criu.begun.end();
        end_examiners(&self.prepared.directory);
        self.wait_for_end();
        Err(refused.unwrap_or_else(|| failed(self.root_pid, reason)))
    }

    /// The child of this process that is the leader of the tree's session, if there is one.
    pub(super) fn leader(&mut self) -> Option<i32> {
        self.criu.running.leader()
    }

    /// Ends a restored tree that cannot run.
    pub(super) fn undo(&mut self, processes: &[Process]) {
        kill_all(processes);
        self.criu.running.end();
        self.criu.begun.end();
        wait_for_end(processes);
    }

    /// Waits until the processes of a failed restore run no more.
    fn wait_for_end(&self) {
        // Those of a container end with its first process.
        if let Some(pids) = self.prepared.pids_here() {
            wait_for_end(&Process::find_all(&pids));
        }
    }

    /// The root process that CRIU restores, as soon as there is one.
    fn root_begun(&mut self) -> Vec<i32> {
        let is_root = |pid: &i32| match self.prepared.pids_here() {
            Some(pids) => pids.first() == Some(pid),
            None => Status::read(*pid).is_ok_and(|status| status.is_first_of_container()),
        };
        // Its parent is CRIU or this process.
        let begun = self.criu.running.below_child().into_iter().chain(self.criu.begun.child());
        begun.map(|process| process.pid).filter(is_root).collect()
    }

    /// CRIU, or the leader of the session, and all that it has begun.
    fn begun(&mut self) -> Vec<Process> {
        self.criu.running.below_child().into_iter().chain(self.criu.begun.below_child()).collect()
    }

    /// Kills CRIU and the processes that it has begun to restore.
    fn kill(&mut self) {
        self.is_over = true;
        let criu = self.criu.running.process();
        let list = || criu.into_iter().flat_map(below).chain(self.criu.begun.below_child()).collect();
        let all = kill_with_descendants(list);
        self.criu.running.end();
        self.criu.begun.end();
        end_examiners(&self.prepared.directory);
        wait_for_end(&all);
        self.wait_for_end();
    }

    /// Ends a CRIU that takes too long, with the processes that it has begun to restore, and says
    /// what they waited for.
    fn end_late(&mut self) -> Error {
        let begun = self.begun();
        let mut reason: Vec<String> = begun.iter().take(SHOWN_PROCESSES).copied().filter_map(wait_of).collect();
        reason.push(errors_in_log(&self.prepared.directory.join(LOG)));
        self.kill();
        let (root_pid, limit_s) = (self.root_pid, self.criu.limit.as_secs());
        let operation = format!("CRIU did not restore process {root_pid} within {limit_s} s, and was ended");
        Error::of(ErrorKind::Criu, operation, Object::None, reason.join("; "))
    }
}

/// CRIU could not restore the tree of `root_pid`, as its log says.
fn failed(root_pid: RecordedPid, reason: String) -> Error {
    let what = format!("restore process {root_pid}");
    let Some(help) = help_if_taken(&reason) else { return Error::criu_failed(what, reason) };
    let operation = format!("CRIU could not {what}: others got its process ids");
    Error::of(ErrorKind::PidTaken, operation, Object::None, reason).help(help)
}

/// What helps if a process that began, or one that has just ended, has an id of the tree. None if
/// CRIU failed for another reason.
fn help_if_taken(reason: &str) -> Option<&'static str> {
    // Before Linux 5.5, CRIU tells the kernel which id the next process gets.
    const OTHER_ID: [&str; 2] = ["do not match expected", "Thread pid mismatch"];
    if OTHER_ID.iter().any(|taken| reason.contains(taken)) {
        return Some(
            "Linux 5.5 and later can give a process its id at once; on an older one, restore while few processes begin",
        );
    }
    // Since Linux 6.15, the id of a process or thread is free a moment after that is no longer seen.
    let is_in_use = reason.contains("Can't fork for ") && reason.contains(": File exists")
        || reason.contains("Unable to create a thread: -17;");
    is_in_use.then_some("restore again when the process or thread that has the id has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_another_process_got_is_told_from_other_failures() {
        let kind = |reason: &str| failed(RecordedPid::new(7), reason.to_owned()).kind();
        let taken = "Pid 28721 do not match expected 28715; 28721 exited, status=1; Restoring FAILED.";
        assert_eq!(kind(taken), ErrorKind::PidTaken);
        assert_eq!(kind("Thread pid mismatch 81/80; Restoring FAILED."), ErrorKind::PidTaken);
        assert_eq!(kind("Can't fork for 81: File exists; Restoring FAILED."), ErrorKind::PidTaken);
        assert_eq!(kind("Can't fork for 81: Cannot allocate memory"), ErrorKind::Criu);
        let thread = |errno| format!("Unable to create a thread: {errno}; Restorer fail 81; Restoring FAILED.");
        assert_eq!(kind(&thread(-17)), ErrorKind::PidTaken);
        assert_eq!(kind(&thread(-22)), ErrorKind::Criu);
        assert_eq!(kind("Waited pid mismatch (pid: 5): Success"), ErrorKind::Criu);
    }
}
