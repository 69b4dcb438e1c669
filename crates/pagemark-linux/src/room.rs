//! Memory for tables that grow with what they are of, and for which there may be no room.
//!
//! Other allocations are small. Where there is no memory for them either, the program ends, as all
//! Rust programs do.

use std::io;
use std::mem::MaybeUninit;

use bytemuck::Zeroable;

use super::own_memory::{self, Access, Mapping};
use crate::ByteCount;

/// A table of `count` zeros, which takes memory only where it is changed.
///
/// # Errors
/// `ENOMEM`
pub fn zeros<T: Zeroable>(count: usize) -> io::Result<Box<[T]>> {
    bytemuck::allocation::try_zeroed_slice_box(count).map_err(|()| none())
}

/// An empty vector with room for `count` values.
///
/// # Errors
/// `ENOMEM`
pub fn vector<T>(count: usize) -> io::Result<Vec<T>> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(count).map_err(|_| none())?;
    Ok(vector)
}

/// Room for `more` values in a vector that may be long, which grows by an eighth at least.
///
/// # Errors
/// `ENOMEM`
pub fn reserve<T>(vector: &mut Vec<T>, more: usize) -> io::Result<()> {
    if vector.capacity() - vector.len() >= more {
        return Ok(());
    }
    let gentle = (vector.len() / 8).max(16);
    vector.try_reserve_exact(more.max(gentle)).map_err(|_| none())
}

/// The most values of a table whose length is that of stored data, which may be anyone's: the table
/// takes an eighth of the machine's memory. The kernel promises more than it has, and ends programs
/// that use it.
///
/// # Errors
/// The kernel does not say how much memory there is.
pub fn most_values<T>() -> io::Result<usize> {
    let mut info = MaybeUninit::<libc::sysinfo>::uninit();
    // SAFETY: the kernel fills the structure.
    if unsafe { libc::sysinfo(info.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded.
    let info = unsafe { info.assume_init() };
    let bytes = (info.totalram as usize).saturating_mul(info.mem_unit as usize);
    Ok(bytes / 8 / size_of::<T>().max(1))
}

/// Mappings that a thread takes: its stack and its stack for signals, with their guard pages, and a
/// heap of the allocator.
const MAPPINGS_OF_THREAD: usize = 8;
/// Address space that a thread takes at least.
const BYTES_OF_THREAD: usize = 9 << 18;

/// Fails if the process has no room for the stacks of `threads` more threads. Without this check, a
/// thread of Rust's standard library that finds no memory for its stacks ends the process.
///
/// # Errors
/// `ENOMEM`
pub fn for_threads(threads: usize) -> io::Result<()> {
    let Some(bytes) = threads.checked_mul(BYTES_OF_THREAD).filter(|&bytes| bytes > 0) else { return Ok(()) };
    let place = Mapping::new(bytes)?;
    let page = |index: usize| place.range().start + ByteCount::of_pages(index as u64);
    // Each other page becomes a mapping by itself.
    for index in (0..threads * MAPPINGS_OF_THREAD).step_by(2) {
        // SAFETY: nobody uses the memory.
        unsafe { own_memory::set_access(&(page(index)..page(index + 1)), Access::Read)? };
    }
    Ok(())
}

/// The error of the kernel where it has no memory.
pub fn none() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

/// True for errors that say nothing about the kernel or the process's rights: too little is left of
/// something, and later there may be more.
pub fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN | libc::EINTR))
}
