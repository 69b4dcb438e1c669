//! What only a thread itself can change: its personality, and when it gets SIGBUS for memory that
//! the hardware has lost. A thread that has others after a restore is made to change them.

use std::io;

use pagemark_linux::proc::memory_failure::MemoryFailureSignal;
use pagemark_linux::proc::{Process, Status, is_gone, personality};
use pagemark_trace::inject::{self, Call};
use pagemark_trace::{PidsHere, RecordedPid};

use super::name;

/// What threads have in common.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct ThreadSettings {
    /// Their ids in the images.
    threads: Vec<RecordedPid>,
    /// As personality(2) has it.
    personality: u32,
    memory_failure: MemoryFailureSignal,
}

/// Observes threads that are frozen.
pub(super) fn observe(threads: &[i32], image_pid: fn(i32) -> RecordedPid) -> Vec<ThreadSettings> {
    let mut all: Vec<ThreadSettings> = Vec::new();
    for &thread in threads {
        // A thread that was killed meanwhile has none.
        let Ok((personality, memory_failure)) = read(thread) else { continue };
        match all.iter_mut().find(|known| (known.personality, known.memory_failure) == (personality, memory_failure)) {
            Some(known) => known.threads.push(image_pid(thread)),
            None => all.push(ThreadSettings { threads: vec![image_pid(thread)], personality, memory_failure }),
        }
    }
    all
}

impl ThreadSettings {
    /// Gives them to the threads, and adds to `missing` which of them do not have them then.
    pub(super) fn give_back(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let mut refused = Vec::new();
        let mut reason = None;
        for &thread in &self.threads {
            match here.get(thread).map_or(Ok(()), |thread_here| self.give(thread_here)) {
                Ok(()) => {}
                // It has ended, as the threads of a machine that a program has left.
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    refused.push(thread);
                    reason.get_or_insert(error);
                }
            }
        }
        if let Some(reason) = reason {
            missing.push(format!(
                "{} lost the personality {:#x} or the choice of SIGBUS for lost memory ({:?}): {reason}",
                name("thread", &refused),
                self.personality,
                self.memory_failure
            ));
        }
    }

    fn give(&self, thread: i32) -> io::Result<()> {
        let wanted = (self.personality, self.memory_failure);
        let before = read(thread)?;
        let mut calls = Vec::new();
        if before.0 != self.personality {
            let arguments = [self.personality.into(), 0, 0, 0, 0, 0];
            calls.push(Call { number: libc::SYS_personality, arguments });
        }
        if before.1 != self.memory_failure {
            calls.push(Call { number: libc::SYS_prctl, arguments: self.memory_failure.prctl_arguments() });
        }
        if calls.is_empty() {
            return Ok(());
        }
        let process = Process::find(Status::read(thread)?.process_id)?;
        inject::system_calls_of_thread(process, thread, calls).map_err(io::Error::other)?;
        match read(thread)? {
            after if after == wanted => Ok(()),
            after => Err(io::Error::other(format!("it has {:#x} and {:?}", after.0, after.1))),
        }
    }
}

fn read(thread: i32) -> io::Result<(u32, MemoryFailureSignal)> {
    Ok((personality::read(thread)?, MemoryFailureSignal::of_thread(thread)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_back_what_it_had() {
        let mut child = super::super::tests::sleeping();
        let pid = child.id() as i32;
        let before = observe(&[pid], RecordedPid::new);
        let other = match before[0].memory_failure {
            MemoryFailureSignal::Early => MemoryFailureSignal::Late,
            _ => MemoryFailureSignal::Early,
        };
        let changed = ThreadSettings {
            personality: before[0].personality ^ libc::ADDR_NO_RANDOMIZE as u32,
            memory_failure: other,
            ..before[0].clone()
        };
        for wanted in [changed, before[0].clone()] {
            let mut missing = Vec::new();
            wanted.give_back(&PidsHere::as_recorded(), &mut missing);
            assert_eq!((observe(&[pid], RecordedPid::new), missing), (vec![wanted], vec![]));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // One that has ended is no loss.
        let mut missing = Vec::new();
        before[0].give_back(&PidsHere::as_recorded(), &mut missing);
        assert_eq!(missing, Vec::<String>::new());
    }

    #[test]
    fn what_a_thread_does_not_get_is_named() {
        let mut child = super::super::tests::sleeping();
        let pid = child.id() as i32;
        // The kernel takes no such number, but for the question what it is.
        let wanted = ThreadSettings { personality: u32::MAX, ..observe(&[pid], RecordedPid::new)[0].clone() };
        let mut missing = Vec::new();
        wanted.give_back(&PidsHere::as_recorded(), &mut missing);
        let expected = format!("thread {pid} lost the personality 0xffffffff");
        assert!(missing.len() == 1 && missing[0].starts_with(&expected), "{missing:?}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
