//! State of processes that CRIU does not save: one kind a file. Each kind is observed in the
//! freeze, noted beside CRIU's images, given back before the restored processes run, and observed
//! again: what differs then is named. What cannot be given back is refused before a checkpoint, or
//! noted and named after the restore.

pub(crate) mod confinement;
mod core_dump_filter;
pub(crate) mod descriptors;
mod ksm;
mod memberships;
mod scheduling;
mod socket_options;
mod sockets;
mod thread_settings;

use std::thread::JoinHandle;

use confinement::Confined;
use core_dump_filter::CoreDumpFilter;
use ksm::Merged;
use memberships::Memberships;
use pagemark_linux::proc;
use pagemark_linux::socket_options::SocketKind;
use pagemark_trace::{PidsHere, RecordedPid};
use scheduling::Scheduling;
use socket_options::SocketOptions;
use sockets::UnreadSockets;
use thread_settings::ThreadSettings;

/// The noted state of a tree, by the ids in the images.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub(crate) struct State {
    scheduling: Vec<Scheduling>,
    thread_settings: Vec<ThreadSettings>,
    merged: Merged,
    core_dump_filters: Vec<CoreDumpFilter>,
    confined: Vec<Confined>,
    socket_options: Vec<SocketOptions>,
    memberships: Vec<Memberships>,
    unread_sockets: Option<UnreadSockets>,
}

impl State {
    /// Observes processes that are frozen. `image_pid` gives the id in the images of a process or
    /// thread.
    pub(crate) fn observe(pids: &[i32], image_pid: fn(i32) -> RecordedPid) -> State {
        let of_process = |&pid: &i32| proc::threads(pid).unwrap_or_default();
        let threads: Vec<i32> = pids.iter().flat_map(of_process).collect();
        let mut socket_options = socket_options::Observation::default();
        let mut memberships = memberships::Observation::default();
        let unread_sockets = sockets::for_each(pids, image_pid, |place, pid, socket| {
            let kind = SocketKind::of(&socket)?;
            socket_options.add(place, kind, &socket);
            memberships.add(place, pid, kind, &socket)
        });
        State {
            scheduling: scheduling::observe(&threads, image_pid),
            thread_settings: thread_settings::observe(&threads, image_pid),
            merged: ksm::observe(pids, image_pid),
            core_dump_filters: core_dump_filter::observe(pids, image_pid),
            confined: confinement::observe(pids, image_pid),
            socket_options: socket_options.finish(),
            memberships: memberships.finish(),
            unread_sockets,
        }
    }

    /// Gives it to the restored processes. Returns what did not come back, each with the reason.
    pub(crate) fn give_back(&self, here: &PidsHere) -> Vec<String> {
        let mut missing = Vec::new();
        self.scheduling.iter().for_each(|kind| kind.give_back(here, &mut missing));
        self.thread_settings.iter().for_each(|kind| kind.give_back(here, &mut missing));
        self.merged.give_back(here, &mut missing);
        self.core_dump_filters.iter().for_each(|kind| kind.give_back(here, &mut missing));
        self.socket_options.iter().for_each(|kind| kind.give_back(here, &mut missing));
        self.memberships.iter().for_each(|kind| kind.give_back(here, &mut missing));
        self.unread_sockets.iter().for_each(|kind| kind.report(&mut missing));
        self.confined.iter().for_each(|kind| kind.report(here, &mut missing));
        missing
    }
}

/// An observation of processes that are frozen, beside the copy of their memory. Dropped, it is
/// waited for.
#[derive(Debug)]
pub(crate) struct Observing {
    pids: Vec<i32>,
    image_pid: fn(i32) -> RecordedPid,
    /// None where none could be started.
    thread: Option<JoinHandle<State>>,
}

impl Observing {
    /// Begins it. The arguments are those of [`State::observe`].
    pub fn start(pids: Vec<i32>, image_pid: fn(i32) -> RecordedPid) -> Observing {
        let observed = pids.clone();
        let thread = std::thread::Builder::new().name("pagemark-state".into());
        let thread = thread.spawn(move || State::observe(&observed, image_pid)).ok();
        Observing { pids, image_pid, thread }
    }

    /// Waits for the state.
    pub fn finish(mut self) -> State {
        let observed = self.thread.take().and_then(|thread| thread.join().ok());
        observed.unwrap_or_else(|| State::observe(&self.pids, self.image_pid))
    }
}

impl Drop for Observing {
    fn drop(&mut self) {
        // What it has found is of no use.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Names processes or threads: the first ids, and how many more there are.
fn name(what: &str, ids: &[RecordedPid]) -> String {
    const SHOWN: usize = 3;
    let shown = ids.iter().take(SHOWN).map(RecordedPid::to_string).collect::<Vec<_>>().join(", ");
    let plural = if ids.len() == 1 { "" } else { if what.ends_with('s') { "es" } else { "s" } };
    match ids.len().saturating_sub(SHOWN) {
        0 => format!("{what}{plural} {shown}"),
        more => format!("{what}{plural} {shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A process that sleeps, once it has executed its program.
    pub(super) fn sleeping() -> Child {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let calls = || {
            proc::Call::of_thread(pid)
                .is_ok_and(|call| call.is_some_and(|call| call.number == libc::SYS_clock_nanosleep))
        };
        pagemark_testing::wait_until("the process sleeps", calls);
        child
    }

    #[test]
    fn processes_and_threads_are_named() {
        let ids = [7, 8, 9, 10, 11].map(RecordedPid::new);
        assert_eq!(name("thread", &ids[..1]), "thread 7");
        assert_eq!(name("thread", &ids[..3]), "threads 7, 8, 9");
        assert_eq!(name("process", &ids), "processes 7, 8, 9 and 2 more");
    }

    #[test]
    fn notes_of_earlier_versions_have_none() {
        assert_eq!(serde_json::from_str::<State>("{}").unwrap(), State::default());
        assert_eq!(State::default().give_back(&PidsHere::as_recorded()), Vec::<String>::new());
    }
}
