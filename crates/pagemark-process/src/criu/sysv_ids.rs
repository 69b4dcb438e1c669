//! System V objects that a restore makes anew with the ids and keys that they had.

use std::fs;
use std::io;

use pagemark_trace::error::{Error, ErrorKind, Object};

/// The bits of an object's mode that are its permissions.
pub(super) const PERMISSIONS: u32 = 0o777;

/// A kind of object.
pub(super) struct Objects {
    /// What errors call an object of this kind.
    pub name: &'static str,
    /// The help of an error about an object that is in the way.
    pub help: &'static str,
    /// The file with the id that the next object gets.
    pub next_id: &'static str,
    /// Returns the id of the object that has a key, or a negative number.
    pub find: fn(i32) -> i32,
    /// Removes the object with an id.
    pub remove: fn(i32),
}

impl Objects {
    /// For `map_err`: an operation on an object has failed.
    pub fn failed(&self, operation: &str, id: i32) -> impl FnOnce(io::Error) -> Error {
        Error::system(format!("{operation} the {} {id} of", self.name), Object::None)
    }

    /// The error of an object that is not as a restore needs it.
    pub fn in_the_way(&self, id: i32, reason: &str) -> Error {
        let reason = format!("{} {id} {reason}", self.name);
        Error::about(ErrorKind::InTheWay, Object::None, reason).help(self.help)
    }

    /// Checks that no other object has the key of one that is gone.
    ///
    /// # Errors
    /// [`ErrorKind::InTheWay`]
    pub fn check_key(&self, id: i32, key: i32) -> Result<(), Error> {
        let other = if key == libc::IPC_PRIVATE { -1 } else { (self.find)(key) };
        match other {
            ..0 => Ok(()),
            _ => Err(self.in_the_way(id, &format!("is gone, and {} {other} has its key {key:#x} now", self.name))),
        }
    }

    /// Makes an object with an id that no other has. `get` is the call that makes one with these
    /// flags.
    ///
    /// # Errors
    /// [`ErrorKind::System`], [`ErrorKind::InTheWay`]: the kernel makes none, or gives it another
    /// id.
    pub fn make(&self, id: i32, mode: u32, get: impl FnOnce(i32) -> i32) -> Result<(), Error> {
        fs::write(self.next_id, id.to_string()).map_err(|error| {
            let operation = format!("set the id of the next {} in", self.name);
            Error::system(operation, Object::File(self.next_id.into()))(error)
        })?;
        let made = get((mode & PERMISSIONS) as i32 | libc::IPC_CREAT | libc::IPC_EXCL);
        if made < 0 {
            let error = io::Error::last_os_error();
            // The next object of any program would get the id.
            let _ = fs::write(self.next_id, "-1");
            return Err(self.failed("make", id)(error));
        }
        if made != id {
            (self.remove)(made);
            let reason = format!("the kernel gave {} {id} the id {made}", self.name);
            return Err(Error::about(ErrorKind::InTheWay, Object::None, reason));
        }
        Ok(())
    }
}
