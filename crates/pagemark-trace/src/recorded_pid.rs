//! The ids that a checkpoint has for processes and threads, and those that they have here.
//!
//! A checkpoint of a container has the ids inside of it; here its processes have others. Such an id
//! belongs to any process here, or to none, so it is a type of its own: it becomes an id here by
//! [`PidsHere`] alone.

use std::collections::HashMap;
use std::fmt;

use pagemark_linux::proc::{self, Process, Status, tree};
use serde::{Deserialize, Serialize};

use crate::attach;
use crate::error::{Error, ErrorKind, Object, Result};

/// The id of a process or thread in a checkpoint, and in CRIU's images.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RecordedPid(i32);

impl RecordedPid {
    /// An id that a checkpoint has.
    pub const fn new(number: i32) -> RecordedPid {
        RecordedPid(number)
    }

    /// The id that CRIU's images have for a process or thread with this id here: that in its own
    /// namespace of process ids.
    pub fn in_images(id: i32) -> RecordedPid {
        RecordedPid(Status::read(id).ok().and_then(|status| status.innermost_id()).unwrap_or(id))
    }

    /// The number, as the checkpoint has it.
    pub const fn get(self) -> i32 {
        self.0
    }
}

/// CRIU's images have ids without a sign.
impl From<u32> for RecordedPid {
    fn from(number: u32) -> RecordedPid {
        RecordedPid(number.cast_signed())
    }
}

impl fmt::Display for RecordedPid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The ids here of the processes and threads of a tree that was restored.
#[derive(Clone, Debug)]
pub struct PidsHere(Option<HashMap<RecordedPid, i32>>);

impl PidsHere {
    /// Those of a tree outside of containers: the recorded ones.
    pub fn as_recorded() -> PidsHere {
        PidsHere(None)
    }

    /// Those of a container with this first process, as it is now.
    pub fn of_container(first: Process) -> PidsHere {
        let members = tree::members(first.pid).unwrap_or_default();
        let threads = members.iter().flat_map(|member| proc::threads(member.process.pid).unwrap_or_default());
        PidsHere(Some(threads.map(|thread| (RecordedPid::in_images(thread), thread)).collect()))
    }

    /// Those of a container whose first process is not known: none.
    pub fn unknown() -> PidsHere {
        PidsHere(Some(HashMap::new()))
    }

    /// The id here of a process or thread. None if the container has it no more.
    pub fn get(&self, id: RecordedPid) -> Option<i32> {
        self.0.as_ref().map_or(Some(id.get()), |ids| ids.get(&id).copied())
    }

    /// The process that has the id.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`]
    pub fn find(&self, id: RecordedPid) -> Result<Process> {
        let gone = || Error::about(ErrorKind::Gone, Object::None, format!("process {id} of the container has ended"));
        attach::find(self.get(id).ok_or_else(gone)?)
    }

    /// The ids here of all processes and threads of a container.
    pub fn of_all(&self) -> impl Iterator<Item = i32> {
        self.0.iter().flat_map(|ids| ids.values().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_one_here_where_it_is_known_to_be() {
        let own = std::process::id() as i32;
        let recorded = RecordedPid::in_images(own);
        assert_eq!(PidsHere::as_recorded().get(RecordedPid::from(7)), Some(7));
        let container = PidsHere::of_container(Process::find(own).unwrap());
        assert_eq!(container.get(recorded), Some(own));
        assert_eq!(container.find(recorded).unwrap(), Process::find(own).unwrap());
        assert!(container.of_all().any(|id| id == own));
        assert_eq!(PidsHere::unknown().get(recorded), None);
        let gone = RecordedPid::new(i32::MAX);
        assert_eq!(container.get(gone), None);
        let error = container.find(gone).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Gone);
        assert_eq!(error.to_string(), "process 2147483647 of the container has ended");
    }

    #[test]
    fn a_checkpoint_has_the_number_alone() {
        let ids: HashMap<RecordedPid, RecordedPid> = serde_json::from_str(r#"{"7":8}"#).unwrap();
        assert_eq!(ids, HashMap::from([(RecordedPid::new(7), RecordedPid::new(8))]));
        assert_eq!(serde_json::to_string(&ids).unwrap(), r#"{"7":8}"#);
    }
}
