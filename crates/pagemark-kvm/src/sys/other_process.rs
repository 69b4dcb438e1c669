//! Writes of the program to the memory of another process, whose machine does not see them.
//!
//! If that process runs in a machine too, its description gets a word ([`WRITTEN_BY_OTHERS`]). A
//! list of ranges would need a lock, which a process cannot take in the memory of another one.

use pagemark_kvm_protocol::description::{ADDRESS, MAGIC, WRITTEN_BY_OTHERS};

use super::execution::path_of;
use super::host_call;

/// Makes `call`, which writes to the memory of `process`, if that is one.
pub fn noting(process: Option<i32>, call: impl FnOnce() -> i64) -> i64 {
    let note = || process.into_iter().for_each(note_write);
    // A collect may come in the midst of the call, and has to come again then.
    note();
    let result = call();
    note();
    result
}

/// The process to whose memory a write to the file of `/proc` leads that is open as `fd`. None if
/// the file is no memory, or that of this process.
pub fn of_memory(fd: u64) -> Option<i32> {
    let path = std::fs::read_link(path_of(fd as i32)).ok()?;
    let mut parts = path.to_str()?.rsplit('/');
    // That of a thread is in the directory of the thread.
    let id: i32 = (parts.next()? == "mem").then(|| parts.next())??.parse().ok()?;
    (!host_call::is_of_this_process(id as u64)).then_some(id)
}

fn note_write(process: i32) {
    let mut magic = 0u64;
    let is_moved = |number, words: *const u64, count: usize, address: u64| {
        let len = count * size_of::<u64>();
        let here = libc::iovec { iov_base: words.cast_mut().cast(), iov_len: len };
        let there = libc::iovec { iov_base: address as *mut _, iov_len: len };
        let arguments = [process as u64, &raw const here as u64, 1, &raw const there as u64, 1, 0];
        // SAFETY: moves words between the callers' values and the description of a machine, which is
        // nothing else at that address.
        (unsafe { host_call::immediate(number, arguments) }) == len as i64
    };
    // A process that is gone, or that may not be written to, is not written to by the call either.
    if is_moved(libc::SYS_process_vm_readv, &raw mut magic, 1, ADDRESS) && magic == MAGIC {
        is_moved(libc::SYS_process_vm_writev, [1u64, 1].as_ptr(), 2, WRITTEN_BY_OTHERS);
    }
}
