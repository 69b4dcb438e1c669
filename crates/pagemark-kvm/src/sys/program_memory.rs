//! Reads and writes of the program's memory by the monitor.

use super::host_call;
use crate::layout::{PAGE, is_program, page_floor};

/// The program's memory cannot be accessed there: for the program, `EFAULT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

fn transfer(number: i64, local: *const u8, len: usize, address: u64) -> Result<(), Fault> {
    if len == 0 {
        return Ok(());
    }
    if !is_program(address, len as u64) {
        return Err(Fault);
    }
    let here = libc::iovec { iov_base: local as *mut _, iov_len: len };
    let there = libc::iovec { iov_base: address as *mut _, iov_len: len };
    // That of the process has no memory once its first thread has ended. A child that shares this
    // memory has another id, so it is asked for each time.
    // SAFETY: has no effect.
    let process = unsafe { libc::syscall(libc::SYS_gettid) };
    // SAFETY: `local` is valid for `len` bytes by the callers below, and the other side is memory
    // of the program.
    let result = unsafe {
        host_call::immediate(number, [process as u64, &raw const here as u64, 1, &raw const there as u64, 1, 0])
    };
    if result == len as i64 { Ok(()) } else { Err(Fault) }
}

/// Fills `buffer` with the program's memory at `address`.
pub fn read(address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
    transfer(libc::SYS_process_vm_readv, buffer.as_mut_ptr(), buffer.len(), address)
}

/// Copies `bytes` to the program's memory at `address`.
pub fn write(address: u64, bytes: &[u8]) -> Result<(), Fault> {
    transfer(libc::SYS_process_vm_writev, bytes.as_ptr(), bytes.len(), address)
}

/// Whether the host has memory for an access to the mapped page of `address`, or can get it.
pub fn has_page(address: u64, writes: bool) -> bool {
    let page = page_floor(address);
    if !is_program(page, PAGE) {
        return false;
    }
    if writes {
        // SAFETY: a page of the program is made, as its own access would.
        let result =
            unsafe { host_call::immediate(libc::SYS_madvise, [page, PAGE, libc::MADV_POPULATE_WRITE as u64, 0, 0, 0]) };
        match host_call::errno(result) {
            None => return true,
            Some(libc::EFAULT | libc::EHWPOISON) => return false,
            // Before Linux 5.14, or a mapping of a device.
            Some(_) => {}
        }
    }
    read(address, &mut [0]).is_ok()
}

/// `count` words of eight bytes from `address` on.
pub fn read_words(address: u64, count: usize) -> Result<Vec<u64>, Fault> {
    let mut bytes = vec![0; count.checked_mul(8).ok_or(Fault)?];
    read(address, &mut bytes)?;
    Ok(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
}

/// The string at `address` up to its zero, which is not part of the result. At most `limit` bytes;
/// `None` if there is no zero within them.
pub fn read_string(address: u64, limit: usize) -> Result<Option<Vec<u8>>, Fault> {
    let mut text = Vec::new();
    while text.len() < limit {
        let at = address.checked_add(text.len() as u64).ok_or(Fault)?;
        // Up to the end of the page: the next may not be mapped.
        let len = (4096 - at as usize % 4096).min(limit - text.len());
        let mut part = vec![0; len];
        read(at, &mut part)?;
        if let Some(zero) = part.iter().position(|&byte| byte == 0) {
            text.extend_from_slice(&part[..zero]);
            return Ok(Some(text));
        }
        text.extend_from_slice(&part);
    }
    Ok(None)
}
