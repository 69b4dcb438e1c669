//! Whose rights count for a file.

use std::io;

use pagemark_trace::identity::Identity;

/// The user of a process, as far as files are concerned.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct User {
    /// User and groups, as they are here.
    pub identity: Identity,
    /// It may do here what root may.
    pub is_root: bool,
    /// The user is root of its own user namespace.
    pub is_root_inside: bool,
}

impl User {
    /// Does something with the rights that this user has for files.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        if self.is_root { Ok(work()) } else { self.identity.run(work) }
    }
}
