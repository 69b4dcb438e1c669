//! System calls on files whose arguments name descriptors of the monitor, or hold addresses.

use std::os::fd::RawFd;

use crate::layout::{PROGRAM_END, USER_END};
use crate::sys::host_call::{self, Call};
use crate::sys::{descriptors, other_process, program_memory};
use crate::thread::Thread;
use crate::writes::Writes;

use super::{Refusal, writes};

/// Entries of a list of buffers, as for Linux (`UIO_MAXIOV`).
const MOST_BUFFERS: u64 = 1024;
/// Bytes of control data of a message that is sent. Linux allows fewer (`optmem_max`).
const MOST_CONTROL: u64 = 1 << 20;
/// Bytes of `struct cmsghdr`: a length, a level and a type.
const CONTROL_HEADER_BYTES: usize = 16;

/// Whether `address` is one that the program must not name: an address of the monitor.
pub fn is_monitor(address: u64) -> bool {
    (PROGRAM_END..USER_END).contains(&address)
}

/// A copy of a list of `struct iovec`.
fn listed(list: u64, count: u64) -> Result<Vec<u64>, Refusal> {
    if count > MOST_BUFFERS {
        return Err(libc::EINVAL.into());
    }
    Ok(program_memory::read_words(list, count as usize * 2)?)
}

/// Like [`listed`], with all addresses checked.
pub fn buffers(list: u64, count: u64) -> Result<Vec<u64>, Refusal> {
    let words = listed(list, count)?;
    if words.chunks_exact(2).any(|buffer| is_monitor(buffer[0])) {
        return Err(libc::EFAULT.into());
    }
    Ok(words)
}

impl Thread {
    /// `readv` and its like: a call whose second and third argument are a list of buffers.
    pub(super) fn with_buffers(&self, mut call: Call) -> Result<i64, Refusal> {
        let [fd, list, count, ..] = call.arguments;
        descriptor(fd)?;
        let words = buffers(list, count)?;
        let only_reads = [libc::SYS_writev, libc::SYS_pwritev, libc::SYS_pwritev2].contains(&(call.number as i64));
        let mut other = None;
        let writes = match only_reads {
            true if writes::is_of_proc(fd) => {
                other = other_process::of_memory(fd);
                Writes::anywhere()
            }
            true => Writes::NONE,
            false => written(Writes::NONE, &words),
        };
        call.arguments[1] = words.as_ptr() as u64;
        Ok(other_process::noting(other, || self.interruptible(&call, writes)))
    }

    /// `process_vm_readv` and `process_vm_writev`: a process, and two lists of buffers. The second
    /// has addresses of that process.
    pub(super) fn between_processes(&self, mut call: Call) -> Result<i64, Refusal> {
        let [process, local, locals, remote, remotes, _] = call.arguments;
        let local = buffers(local, locals)?;
        let is_own = host_call::is_of_this_process(process);
        let remote = if is_own { buffers(remote, remotes)? } else { listed(remote, remotes)? };
        let reads = call.number == libc::SYS_process_vm_readv as u64;
        // A process may share this memory, so that nothing is left out.
        let writes = written(Writes::NONE, if reads { &local } else { &remote });
        let other = (!is_own && !reads).then_some(process as i32);
        (call.arguments[1], call.arguments[3]) = (local.as_ptr() as u64, remote.as_ptr() as u64);
        Ok(other_process::noting(other, || self.interruptible(&call, writes)))
    }

    /// `sendmsg` and `recvmsg`: a call whose second argument is a `struct msghdr`.
    pub(super) fn with_message(&self, mut call: Call) -> Result<i64, Refusal> {
        let [fd, message, ..] = call.arguments;
        descriptor(fd)?;
        let (mut words, buffers) = message_at(message)?;
        let receives = call.number == libc::SYS_recvmsg as u64;
        let writes = if receives { received(Writes::NONE, &words, &buffers) } else { Writes::NONE };
        let list = words[2];
        words[2] = buffers.as_ptr() as u64;
        let control = if receives { None } else { Some(control_data(&words)?) };
        if let Some(control) = &control {
            words[4] = control.as_ptr() as u64;
        }
        call.arguments[1] = words.as_mut_ptr() as u64;
        let result = self.interruptible(&call, writes);
        if receives && result >= 0 {
            words[2] = list;
            self.write_words(message, &words)?;
        }
        Ok(result)
    }

    /// `sendmmsg` and `recvmmsg`: a list of messages, each with the number of its bytes behind it.
    pub(super) fn with_messages(&self, mut call: Call) -> Result<i64, Refusal> {
        let [fd, list, count, _, timeout, _] = call.arguments;
        descriptor(fd)?;
        let receives = call.number == libc::SYS_recvmmsg as u64;
        if receives && is_monitor(timeout) {
            return Err(libc::EFAULT.into());
        }
        let mut writes = if receives { Writes::NONE.and_structure(timeout) } else { Writes::NONE };
        let (mut messages, mut lists, mut controls) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..u64::from(count as u32).min(MOST_BUFFERS) {
            let at = list.wrapping_add(index * MESSAGE_BYTES);
            let message = message_at(at).and_then(|(words, buffers)| {
                let control = if receives { Vec::new() } else { control_data(&words)? };
                Ok((words, buffers, control))
            });
            match message {
                Ok((mut words, buffers, control)) => {
                    if receives {
                        writes = received(writes, &words, &buffers);
                    } else {
                        words[4] = control.as_ptr() as u64;
                    }
                    lists.push((at, words[2], buffers));
                    controls.push(control);
                    messages.extend(words);
                    messages.push(0);
                }
                Err(refusal) if index == 0 => return Err(refusal),
                // Those before it are sent, or received.
                Err(_) => break,
            }
        }
        for (message, (_, _, buffers)) in messages.chunks_exact_mut(MESSAGE_BYTES as usize / 8).zip(&lists) {
            message[2] = buffers.as_ptr() as u64;
        }
        (call.arguments[1], call.arguments[2]) = (messages.as_mut_ptr() as u64, lists.len() as u64);
        let result = self.interruptible(&call, writes);
        let done = messages.chunks_exact_mut(MESSAGE_BYTES as usize / 8).zip(&lists).take(result.max(0) as usize);
        for (message, (at, buffers, _)) in done {
            if receives {
                message[2] = *buffers;
                self.write_words(*at, &message[..7])?;
            }
            self.write(at + 56, &(message[7] as u32).to_le_bytes())?;
        }
        Ok(result)
    }
}

/// Bytes of `struct mmsghdr`.
const MESSAGE_BYTES: u64 = 64;

/// The `struct msghdr` at `address` (name, its length, buffers, their number, control data, its
/// length, flags), and its buffers, with all addresses checked.
fn message_at(address: u64) -> Result<(Vec<u64>, Vec<u64>), Refusal> {
    let words = program_memory::read_words(address, 7)?;
    if is_monitor(words[0]) || is_monitor(words[4]) {
        return Err(libc::EFAULT.into());
    }
    if words[3] > MOST_BUFFERS {
        return Err(libc::EMSGSIZE.into());
    }
    let buffers = buffers(words[2], words[3])?;
    Ok((words, buffers))
}

/// A copy of the control data of a message that is sent, whose descriptors are all the program's.
fn control_data(message: &[u64]) -> Result<Vec<u8>, Refusal> {
    let [_, _, _, _, at, len, _] = message[..] else { return Err(libc::EFAULT.into()) };
    if len > MOST_CONTROL {
        return Err(libc::ENOBUFS.into());
    }
    let mut control = vec![0; len as usize];
    program_memory::read(at, &mut control)?;
    sent_descriptors(&control).into_iter().try_for_each(|fd| descriptor(fd as u64).map(drop))?;
    Ok(control)
}

/// The descriptors that control data sends. What follows data that the kernel refuses is left out.
fn sent_descriptors(control: &[u8]) -> Vec<RawFd> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, i32::from_le_bytes);
    let mut found = Vec::new();
    let mut rest = control;
    while let Some((header, _)) = rest.split_at_checked(CONTROL_HEADER_BYTES) {
        let len = header[..8].try_into().map_or(0, u64::from_le_bytes) as usize;
        let Some(data) = rest.get(CONTROL_HEADER_BYTES..len) else { break };
        if [number(&header[8..12]), number(&header[12..])] == [libc::SOL_SOCKET, libc::SCM_RIGHTS] {
            found.extend(data.chunks_exact(size_of::<RawFd>()).map(number));
        }
        rest = rest.get(len.next_multiple_of(size_of::<u64>())..).unwrap_or_default();
    }
    found
}

/// These writes, and those of a message that is received.
fn received(writes: Writes, words: &[u64], buffers: &[u64]) -> Writes {
    written(writes.and_structure(words[0]).and(words[4], words[5]), buffers)
}

/// These writes, and those to a list of buffers.
fn written(writes: Writes, buffers: &[u64]) -> Writes {
    buffers.chunks_exact(2).fold(writes, |writes, buffer| writes.and(buffer[0], buffer[1]))
}

/// `EBADF` if the descriptor is of the monitor.
pub fn descriptor(fd: u64) -> Result<RawFd, Refusal> {
    let fd = fd as RawFd;
    if descriptors::is_ours(fd) { Err(libc::EBADF.into()) } else { Ok(fd) }
}

/// The parts of `first..=last` that are not descriptors of the monitor, for `close_range`.
pub fn ranges_of_program(first: u32, last: u32) -> Vec<(u32, u32)> {
    let mut ranges = Vec::new();
    let mut from = u64::from(first);
    for fd in descriptors::within(first, last) {
        let fd = fd as u64;
        if from < fd {
            ranges.push((from as u32, fd as u32 - 1));
        }
        from = fd + 1;
    }
    if from <= u64::from(last) {
        ranges.push((from as u32, last));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(level: i32, kind: i32, numbers: &[i32]) -> Vec<u8> {
        let len = CONTROL_HEADER_BYTES + 4 * numbers.len();
        let mut bytes = (len as u64).to_le_bytes().to_vec();
        bytes.extend([level, kind].iter().chain(numbers).flat_map(|number| number.to_le_bytes()));
        bytes.resize(len.next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn descriptors_are_found_in_all_control_data() {
        let rights = |numbers| control(libc::SOL_SOCKET, libc::SCM_RIGHTS, numbers);
        let other = control(libc::SOL_SOCKET, libc::SCM_CREDENTIALS, &[1, 2, 3]);
        let all = [rights(&[4, 5, 6]), other, rights(&[7]), rights(&[])].concat();
        assert_eq!(sent_descriptors(&all), [4, 5, 6, 7]);
        // The last one need not be filled up, and none may be longer than the data.
        assert_eq!(sent_descriptors(&rights(&[8])[..20]), [8]);
        assert_eq!(sent_descriptors(&rights(&[8, 9])[..20]), [0; 0]);
        for len in [0u64, 15, u64::MAX] {
            let damaged = [len.to_le_bytes().as_slice(), &rights(&[8])[8..]].concat();
            assert_eq!(sent_descriptors(&damaged), [0; 0]);
        }
        assert_eq!(sent_descriptors(&[]), [0; 0]);
    }
}
