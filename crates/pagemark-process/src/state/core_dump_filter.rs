//! Which kinds of memory the kernel writes into a core file of a process
//! (`/proc/PID/coredump_filter`).

use std::io;

use pagemark_linux::proc;
use pagemark_linux::proc::core_dump_filter::{read, write};
use pagemark_trace::{PidsHere, RecordedPid};

use super::name;

/// The filter that processes have.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct CoreDumpFilter {
    /// Their ids in the images.
    pids: Vec<RecordedPid>,
    /// A bit for each kind of memory, as core(5) numbers them.
    kinds: u32,
}

/// Observes processes that are frozen.
pub(super) fn observe(pids: &[i32], image_pid: fn(i32) -> RecordedPid) -> Vec<CoreDumpFilter> {
    let mut all: Vec<CoreDumpFilter> = Vec::new();
    for &pid in pids {
        // The kernel may have been built without core files, and a process may just have been killed.
        let Ok(kinds) = read(pid) else { continue };
        match all.iter_mut().find(|known| known.kinds == kinds) {
            Some(known) => known.pids.push(image_pid(pid)),
            None => all.push(CoreDumpFilter { pids: vec![image_pid(pid)], kinds }),
        }
    }
    all
}

impl CoreDumpFilter {
    /// Gives it to the processes, and adds to `missing` which of them do not have it then.
    pub(super) fn give_back(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let mut refused = Vec::new();
        let mut reason = None;
        for &pid in &self.pids {
            match here.get(pid).map_or(Ok(()), |pid_here| give(pid_here, self.kinds)) {
                Ok(()) => {}
                Err(error) if proc::is_gone(&error) => {}
                Err(error) => {
                    refused.push(pid);
                    reason.get_or_insert(error);
                }
            }
        }
        if let Some(reason) = reason {
            let processes = name("process", &refused);
            missing.push(format!("{processes} lost the core dump filter {:#x}: {reason}", self.kinds));
        }
    }
}

fn give(pid: i32, kinds: u32) -> io::Result<()> {
    if read(pid)? != kinds {
        write(pid, kinds)?;
    }
    match read(pid)? {
        after if after == kinds => Ok(()),
        after => Err(io::Error::other(format!("it is {after:#x}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gets_back_what_it_had() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let Ok(before) = read(pid) else {
            child.kill().unwrap();
            child.wait().unwrap();
            pagemark_testing::skipped("the kernel writes no core files");
            return;
        };
        give(pid, before ^ 0x40).unwrap();
        let noted = observe(&[pid], RecordedPid::new);
        assert_eq!(noted, [CoreDumpFilter { pids: vec![RecordedPid::new(pid)], kinds: before ^ 0x40 }]);
        give(pid, before).unwrap();
        let mut missing = Vec::new();
        noted[0].give_back(&PidsHere::as_recorded(), &mut missing);
        assert_eq!((read(pid).unwrap(), missing), (before ^ 0x40, vec![]));
        child.kill().unwrap();
        child.wait().unwrap();
        // One that has ended is no loss.
        let mut missing = Vec::new();
        noted[0].give_back(&PidsHere::as_recorded(), &mut missing);
        assert_eq!(missing, Vec::<String>::new());
    }
}
