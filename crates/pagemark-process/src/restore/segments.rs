//! Has restored TCP connections send segments as long as the path and the peer allow. CRIU makes
//! them by `TCP_REPAIR`, and the kernel does not compute that length again then: a connection that
//! has been restored sends in segments of 524 bytes, for ever if the peer's window does not grow.
//! So short, segments fill the peer's buffer with less than the window that was announced.

use std::io;
use std::path::Path;

use pagemark_linux::{pidfd, tcp};
use pagemark_trace::PidsHere;
use pagemark_trace::error::Result;

use super::holders::{Holder, Holders, Purpose};
use super::surroundings::is_connection;
use crate::criu::images::schema::FileEntry;
use crate::criu::images::{ImageKind, read_all};

/// What a connection answers that a process has closed since, or that has ended with it: where no
/// gate can be made, the processes run already.
const IS_GONE: [i32; 4] = [libc::ESRCH, libc::EBADF, libc::ENOTSOCK, libc::EOPNOTSUPP];

/// Computes the length of segments of the connections that processes have open that CRIU has
/// restored from the images in `directory`. Returns for how many that failed, with the first
/// reason.
pub(super) fn lengthen(directory: &Path, here: &PidsHere) -> Option<String> {
    let descriptors = match connections(directory, here) {
        Ok(descriptors) => descriptors,
        Err(error) => return Some(format!("length of segments of TCP connections (they send slowly): {error}")),
    };
    let lengthen_one = |(pid, number): (i32, i32)| {
        let result = pidfd::duplicate(pid, number).and_then(tcp::compute_segment_length_again);
        result.err().filter(|error| !error.raw_os_error().is_some_and(|code| IS_GONE.contains(&code)))
    };
    let failures: Vec<io::Error> = descriptors.into_iter().filter_map(lengthen_one).collect();
    let first = failures.first()?;
    Some(format!("length of segments of {} TCP connections (they send slowly): {first}", failures.len()))
}

/// A process here and its descriptor, for each connection. One that waits in the queue of another
/// socket has none.
fn connections(directory: &Path, here: &PidsHere) -> Result<Vec<(i32, i32)>> {
    let entries: Vec<FileEntry> = read_all(&directory.join("files.img"), ImageKind::Files)?;
    let is_one = |entry: &&FileEntry| entry.isk.as_ref().is_some_and(is_connection);
    let connections: Vec<u32> = entries.iter().filter(is_one).map(|entry| entry.id).collect();
    if connections.is_empty() {
        return Ok(Vec::new());
    }
    let holders = Holders::read(directory, &entries)?;
    let descriptor = |holder: &Holder| match holder.purpose {
        Purpose::Descriptor(number) => Some((here.get(holder.pid)?, number as i32)),
        _ => None,
    };
    Ok(connections.into_iter().filter_map(|id| holders.of(id).iter().find_map(descriptor)).collect())
}
