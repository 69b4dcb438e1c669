//! Which of its system calls CRIU submits to Pagemark in a dump.

use std::collections::HashSet;
use std::io;
use std::os::unix::net::UnixStream;

use pagemark_linux::proc::{self, Status};
use pagemark_linux::{pagemap, pidfd};
use pagemark_trace::objects::ObjectId;
use pagemark_trace::parked;

use super::late_sockets::LateSockets;
use super::machines::Machines;
use super::notify::{self, SubmittedCalls};
use super::outside_sockets::ConnectedSockets;
use super::withhold::Withholding;
use super::{CAP_SYS_RESOURCE, Criu, has_capability, kernel_data, smaps, sysv_memory};

/// The calls that are submitted, and what their answers take.
#[derive(Debug)]
pub(super) struct Submission {
    pub calls: SubmittedCalls,
    /// Any is submitted.
    pub is_needed: bool,
    /// Memory can be withheld from CRIU.
    pub may_withhold: bool,
    /// Processes have System V shared memory attached that CRIU is not to learn of.
    pub has_segments: bool,
    /// Processes that run in machines, or may, where somebody can say when CRIU attaches.
    machines: Option<Machines>,
    /// Sockets whose names CRIU gets when it reads the registers of the first thread.
    pub late_sockets: Option<LateSockets>,
}

impl Submission {
    /// For the dump of these processes below `pid`, of which these sockets lead outside.
    /// `has_objects` if the content of shared memory is to be withheld.
    pub fn of_tree(criu: &Criu, pid: i32, tree: &[i32], sockets: ConnectedSockets, has_objects: bool) -> Submission {
        let limits = !has_capability(CAP_SYS_RESOURCE);
        let may_withhold = may_withhold(tree);
        let has_segments = sysv_memory::is_used(tree);
        let mappings = may_withhold && (has_segments || smaps::pays(tree));
        // The calls that are left to the kernel need Linux 5.5; the interface is as old as 5.6.
        let registers = pidfd::GET_DESCRIPTOR.is_there();
        let has_late = registers && may_withhold && sockets.has_sockets();
        let late_sockets = has_late.then(|| LateSockets::new(pid, sockets));
        // Without the interface, nobody says when CRIU attaches.
        let has_machines = registers || tree.iter().any(|&pid| parked::may_have_machine(pid));
        let machines = has_machines.then(|| Machines::new(pid, &criu.interrupted));
        let stops = registers || machines.is_some();
        let files = kernel_data::is_needed();
        let calls = SubmittedCalls { limits, files, mappings, registers, data: has_objects, stops };
        // Without PAGEMAP_SCAN, CRIU reads pagemap itself.
        let has_any = pagemap::SCAN.is_there() || limits || mappings || registers || has_objects || stops;
        Submission { calls, is_needed: has_any && may_withhold, may_withhold, has_segments, machines, late_sockets }
    }

    /// The filter by which CRIU submits them.
    pub fn filter(&self, tree: &[i32]) -> Vec<libc::sock_filter> {
        // What matters of a process shows at its first thread.
        let others =
            tree.iter().flat_map(|&pid| proc::threads(pid).unwrap_or_default().into_iter().filter(move |&t| t != pid));
        notify::filter(self.calls, &others.collect::<Vec<i32>>())
    }

    /// Answers the calls of a CRIU that has just been started, whose listener comes by the socket,
    /// from now on. Returns who does, and the machines of the tree.
    ///
    /// # Errors
    /// The listener did not come, or there can be no thread.
    pub fn answer(
        &mut self,
        receiver: &UnixStream,
        objects: &HashSet<ObjectId>,
        criu: &Criu,
    ) -> io::Result<(Option<Withholding>, Option<Machines>)> {
        let (machines, late_sockets) = (self.machines.take(), self.late_sockets.take());
        let withholding = self
            .is_needed
            .then(|| Withholding::start(receiver, objects, criu, self.calls, machines.clone(), late_sockets))
            .transpose()?
            .flatten();
        if let (None, Some(machines)) = (&withholding, &machines) {
            // CRIU does not report when it attaches, so the processes wait while it starts. The dump reports errors.
            machines.park();
        }
        Ok((withholding, machines))
    }
}

/// True if memory of a tree of these processes can be withheld from CRIU. A filtered process may
/// not suspend the filters of another, which CRIU has to if the tree has any.
pub(crate) fn may_withhold(pids: &[i32]) -> bool {
    !pids.iter().any(|pid| has_seccomp(*pid))
}

/// True if a process or one of its threads is under a seccomp filter.
fn has_seccomp(pid: i32) -> bool {
    let threads = proc::threads(pid).unwrap_or_default();
    threads.into_iter().any(|thread| Status::read(thread).is_ok_and(|status| status.seccomp_mode != 0))
}
