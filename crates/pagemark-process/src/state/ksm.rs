//! Whether the kernel merges equal pages of all private memory of a process
//! (`PR_SET_MEMORY_MERGE`). What `MADV_MERGEABLE` has marked is in CRIU's images.

use std::io;

use pagemark_linux::proc::ksm::merges_all;
use pagemark_linux::proc::{Process, is_gone};
use pagemark_trace::inject::{self, Call};
use pagemark_trace::{PidsHere, RecordedPid};

use super::name;

/// The number of the call `PR_SET_MEMORY_MERGE` of `prctl(2)`.
const PR_SET_MEMORY_MERGE: u64 = 67;

/// Processes whose memory is merged, by their ids in the images.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Merged(Vec<RecordedPid>);

/// Observes processes that are frozen.
pub(super) fn observe(pids: &[i32], image_pid: fn(i32) -> RecordedPid) -> Merged {
    // One that was killed meanwhile is none.
    let is_merged = |&&pid: &&i32| merges_all(pid).is_ok_and(|merges| merges == Some(true));
    Merged(pids.iter().filter(is_merged).map(|&pid| image_pid(pid)).collect())
}

impl Merged {
    /// Has the kernel merge the memory of the processes, and adds to `missing` where it does not.
    pub(super) fn give_back(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let mut refused = Vec::new();
        let mut reason = None;
        for &pid in &self.0 {
            match here.get(pid).map_or(Ok(()), merge) {
                Ok(()) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    refused.push(pid);
                    reason.get_or_insert(error);
                }
            }
        }
        if let Some(reason) = reason {
            let processes = name("process", &refused);
            missing.push(format!("{processes} lost the merging of equal pages: {reason}"));
        }
    }
}

fn merge(pid: i32) -> io::Result<()> {
    if merges_all(pid)? == Some(true) {
        return Ok(());
    }
    let call = Call { number: libc::SYS_prctl, arguments: [PR_SET_MEMORY_MERGE, 1, 0, 0, 0, 0] };
    inject::system_calls(Process::find(pid)?, vec![call]).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_process_is_merged_again() {
        let mut child = super::super::tests::sleeping();
        let pid = child.id() as i32;
        if merges_all(pid).unwrap().is_none() {
            pagemark_testing::skipped("the kernel does not say whether it merges memory");
        } else {
            assert_eq!(observe(&[pid], RecordedPid::new), Merged::default());
            let noted = Merged(vec![RecordedPid::new(pid)]);
            let mut missing = Vec::new();
            noted.give_back(&PidsHere::as_recorded(), &mut missing);
            assert_eq!((observe(&[pid], RecordedPid::new), missing), (noted, vec![]));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
