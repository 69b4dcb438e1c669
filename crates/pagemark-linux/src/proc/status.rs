//! `/proc/PID/status`: who a process or thread belongs to, who traces it, and how much memory it
//! has.

use std::io;

use super::Fields;
use super::stat::is_dead;

/// Fields of `/proc/PID/status`. A number that the kernel does not give is 0.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Status {
    /// The process that the thread belongs to.
    pub process_id: i32,
    /// Ids of the thread in the namespaces of process ids that it is in, from that of `/proc` to
    /// its own.
    pub namespace_ids: Vec<i32>,
    /// State, one letter, as in [`Stat::state`](super::Stat::state).
    pub state: char,
    /// The thread that traces it with ptrace; 0 if none does.
    pub tracer_pid: i32,
    /// 0: no seccomp; 1: strict; 2: a filter.
    pub seccomp_mode: u32,
    /// The effective user id.
    pub effective_uid: u32,
    /// The effective capabilities, one bit each.
    pub capabilities: u64,
    /// Private memory that is swapped out, bytes.
    pub swapped_bytes: u64,
    /// Largest size of the memory in RAM so far, bytes.
    pub peak_resident_bytes: u64,
    /// Memory of the page tables, bytes.
    pub page_table_bytes: u64,
    /// Blocked signals, one bit each.
    pub blocked_signals: u64,
    /// Signals that are pending for the thread or for its process, one bit each.
    pub pending_signals: u64,
}

impl Status {
    /// Reads the fields of a process, or of a thread by its id.
    ///
    /// # Errors
    /// `NotFound`, or ESRCH: there is no such process (any more).
    pub fn read(pid: i32) -> io::Result<Status> {
        super::read(pid, "status").map(Status::parse)
    }

    /// Reads the fields of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> io::Result<Status> {
        std::fs::read(super::own_path("status")).map(Status::parse)
    }

    /// Parses the content of a `status` file.
    pub fn parse(text: Vec<u8>) -> Status {
        let fields = Fields::parse(text);
        Status {
            process_id: fields.number("Tgid").unwrap_or(0),
            namespace_ids: fields
                .get("NSpid")
                .map(|ids| ids.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect())
                .unwrap_or_default(),
            state: fields.get("State").and_then(|state| state.chars().next()).unwrap_or_default(),
            tracer_pid: fields.number("TracerPid").unwrap_or(0),
            seccomp_mode: fields.number("Seccomp").unwrap_or(0),
            // The real, the effective, the saved and the file system's user id.
            effective_uid: fields
                .get("Uid")
                .and_then(|ids| ids.split_ascii_whitespace().nth(1)?.parse().ok())
                .unwrap_or(0),
            capabilities: fields.in_base("CapEff", 16).unwrap_or(0),
            swapped_bytes: fields.bytes("VmSwap").unwrap_or(0),
            peak_resident_bytes: fields.bytes("VmHWM").unwrap_or(0),
            page_table_bytes: fields.bytes("VmPTE").unwrap_or(0),
            blocked_signals: fields.in_base("SigBlk", 16).unwrap_or(0),
            pending_signals: fields.in_base("SigPnd", 16).unwrap_or(0) | fields.in_base("ShdPnd", 16).unwrap_or(0),
        }
    }

    /// The id of the thread in its own namespace of process ids.
    pub fn innermost_id(&self) -> Option<i32> {
        self.namespace_ids.last().copied()
    }

    /// True if the thread is the first process of a namespace of process ids that is directly below
    /// that of `/proc`, as the first process of a container is.
    pub fn is_first_of_container(&self) -> bool {
        matches!(self.namespace_ids[..], [_, 1])
    }

    /// True if the thread is the first process of a namespace of process ids that is anywhere below
    /// that of `/proc`.
    pub fn is_first_of_namespace(&self) -> bool {
        matches!(self.namespace_ids[..], [_, .., 1])
    }

    /// True if the process or thread has exited, waited for or not.
    pub fn is_dead(&self) -> bool {
        is_dead(self.state)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_status(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Status::parse([b"Uid:\t", &bytes[..], b"\nVmSwap: ", &bytes[..]].concat());
        }
    }

    #[test]
    fn fields_are_found() {
        let text =
            b"Name:\tTgid:\\n1\nState:\tZ (zombie)\nTgid:\t20\nTracerPid:\t7\nNSpid:\t20\t1\nUid:\t1\t2\t3\t4\nVmHWM:\t  9 kB\n\
                     VmPTE:\t  3 kB\nVmSwap:\t  5 kB\nSigPnd:\t0000000000000001\nShdPnd:\t0000000000004000\nSigBlk:\t0000000000000800\nCapEff:\t0000000001000002\nSeccomp:\t2\n";
        let status = Status::parse(text.to_vec());
        let expected = Status {
            process_id: 20,
            namespace_ids: vec![20, 1],
            state: 'Z',
            tracer_pid: 7,
            seccomp_mode: 2,
            effective_uid: 2,
            capabilities: 1 << 24 | 2,
            swapped_bytes: 5 << 10,
            peak_resident_bytes: 9 << 10,
            page_table_bytes: 3 << 10,
            blocked_signals: 0x800,
            pending_signals: 0x4001,
        };
        assert_eq!(status, expected);
        assert!(status.is_dead() && status.is_first_of_container());
        assert_eq!(Status::of_this_process().unwrap().process_id, std::process::id() as i32);
    }
}
