//! Answers system calls of another program in place of the kernel: a thin layer over seccomp's user
//! notification.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::descriptors::{receive_descriptor, send_descriptor};

/// The number of PAGEMAP_SCAN: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u32 = 0xc060_6610;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// Offset of the lower half of an argument; the upper half follows it.
const fn argument(index: u32) -> u32 {
    ARGUMENTS + 8 * index
}
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// A system call that waits for an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    id: u64,
    /// Its number.
    pub number: i64,
    /// The thread that makes it.
    pub pid: u32,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// The answer to a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// The kernel carries it out.
    Continue,
    /// The call returns this value; the kernel does nothing else.
    Return(i64),
    /// It has been given by [`Listener::answer_by_descriptor`].
    Given,
}

/// The calls that [`filter`] hands over besides `ioctl(PAGEMAP_SCAN)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct SubmittedCalls {
    /// Each `prlimit` that queries another process.
    pub limits: bool,
    /// Each `openat` of a path, not relative to a directory's descriptor, with the flags
    /// [`READING`] or [`CREATING`] and no others, and each `rename`.
    pub files: bool,
    /// Each `openat` of a path relative to a directory's descriptor, with the flags [`READING`] and
    /// no others.
    pub mappings: bool,
    /// Each `ptrace` that reads the blocked signals or the vector registers of a thread, and each
    /// `prlimit` that queries the first of the limits of another process.
    pub registers: bool,
    /// Each `lseek` to the next data of a file.
    pub data: bool,
    /// Each `ptrace` that attaches to a thread (PTRACE_SEIZE), but for those that are left out, or
    /// releases one, and each `kill` by SIGSTOP or SIGTSTP.
    pub stops: bool,
}

/// Requests of `ptrace`, and the set of registers.
pub(super) const SEIZE: u32 = 0x4206;
pub(super) const DETACH: u32 = libc::PTRACE_DETACH;
pub(super) const GET_SIGNAL_MASK: u32 = 0x420a;
const GET_REGISTER_SET: u32 = 0x4204;
const VECTOR_REGISTERS: u32 = 0x202;

/// The first of the resource limits: RLIMIT_CPU.
const FIRST_LIMIT: u32 = 0;

/// Flags by which a file is opened for reading.
pub(super) const READING: u32 = libc::O_RDONLY as u32;
/// Flags by which a file is created that must not exist.
pub(super) const CREATING: u32 = (libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL) as u32;

/// Receives the calls of a program.
#[derive(Debug)]
pub(super) struct Listener(OwnedFd);

/// Statements that a filter of the kernel may have.
const MAX_STATEMENTS: usize = 4096;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Loads a word of the call.
fn load(offset: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

/// Ends the filter.
fn answer(answer: u32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, answer)
}

/// The statement `from`, which goes on at one of two others: the kernel counts the statements that
/// a jump leaves out.
fn jump(from: usize, k: u32, equal: usize, other: usize) -> libc::sock_filter {
    libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: (equal - from - 1) as u8,
        jf: (other - from - 1) as u8,
        k,
    }
}

/// The filter that hands over each `ioctl(PAGEMAP_SCAN)`, and what `submitted` has, but not the
/// attaching to one of these `threads`. Where they are too many, that to some is handed over.
pub(super) fn filter(submitted: SubmittedCalls, threads: &[i32]) -> Vec<libc::sock_filter> {
    let mut filter = filter_of_calls(submitted);
    let room = (MAX_STATEMENTS - filter.len() - 1) / 2;
    for &thread in threads.iter().take(room) {
        let at = filter.len();
        filter.push(jump(at, thread as u32, at + 1, at + 2));
        filter.push(answer(libc::SECCOMP_RET_ALLOW));
    }
    filter.push(answer(libc::SECCOMP_RET_USER_NOTIF));
    filter
}

// Where the parts of the filter begin.
const PRLIMIT: usize = 12;
const OPENAT: usize = 20;
const OPENAT_RELATIVE: usize = 25;
const PTRACE: usize = 27;
const LSEEK: usize = 34;
const KILL: usize = 36;
const SUBMIT: usize = 39;
const ALLOW: usize = 40;
const SEIZE_THREAD: usize = 41;

/// The filter without the threads. Its last statement loads the thread that CRIU attaches to.
fn filter_of_calls(submitted: SubmittedCalls) -> Vec<libc::sock_filter> {
    // No system call has the other number.
    let number = |number: i64, is_submitted: bool| if is_submitted { number as u32 } else { u32::MAX };
    let SubmittedCalls { limits, files, mappings, registers, data, stops } = submitted;
    let submit_if = |is_submitted: bool| if is_submitted { SUBMIT } else { ALLOW };
    vec![
        load(ARCHITECTURE),
        jump(1, AUDIT_ARCH_X86_64, 2, ALLOW),
        load(NUMBER),
        jump(3, number(libc::SYS_prlimit64, limits || registers), PRLIMIT, 4),
        jump(4, number(libc::SYS_openat, files || mappings), OPENAT, 5),
        jump(5, number(libc::SYS_rename, files), SUBMIT, 6),
        jump(6, number(libc::SYS_ptrace, registers || stops), PTRACE, 7),
        jump(7, number(libc::SYS_lseek, data), LSEEK, 8),
        jump(8, number(libc::SYS_kill, stops), KILL, 9),
        jump(9, libc::SYS_ioctl as u32, 10, ALLOW),
        load(argument(1)),
        jump(11, PAGEMAP_SCAN, SUBMIT, ALLOW),
        // `prlimit`: the process 0 is the caller.
        load(argument(0)),
        jump(13, 0, ALLOW, 14),
        // The new limit; without an address the call is a query.
        load(argument(2)),
        jump(15, 0, 16, ALLOW),
        load(argument(2) + 4),
        jump(17, 0, if limits { SUBMIT } else { 18 }, ALLOW),
        load(argument(1)),
        jump(19, FIRST_LIMIT, SUBMIT, ALLOW),
        // `openat`
        load(argument(0)),
        jump(21, libc::AT_FDCWD as u32, if files { 22 } else { ALLOW }, if mappings { OPENAT_RELATIVE } else { ALLOW }),
        load(argument(2)),
        jump(23, READING, SUBMIT, 24),
        jump(24, CREATING, SUBMIT, ALLOW),
        load(argument(2)),
        jump(26, READING, SUBMIT, ALLOW),
        // `ptrace`
        load(argument(0)),
        jump(28, SEIZE, if stops { SEIZE_THREAD } else { ALLOW }, 29),
        jump(29, DETACH, submit_if(stops), 30),
        jump(30, GET_SIGNAL_MASK, submit_if(registers), 31),
        jump(31, GET_REGISTER_SET, 32, ALLOW),
        load(argument(2)),
        jump(33, VECTOR_REGISTERS, submit_if(registers), ALLOW),
        // `lseek`
        load(argument(2)),
        jump(35, libc::SEEK_DATA as u32, SUBMIT, ALLOW),
        // `kill`
        load(argument(1)),
        jump(37, libc::SIGSTOP as u32, SUBMIT, 38),
        jump(38, libc::SIGTSTP as u32, SUBMIT, ALLOW),
        answer(libc::SECCOMP_RET_USER_NOTIF),
        answer(libc::SECCOMP_RET_ALLOW),
        // `ptrace(PTRACE_SEIZE)`
        load(argument(1)),
    ]
}

/// Between fork and exec: from now on each call of this process that `filter` hands over waits for
/// an answer through the descriptor that is sent to `socket`. When no process has that descriptor
/// open any more, the calls fail. Where somebody listens to calls of this process already, or the
/// kernel has no listeners, nothing is sent, and the kernel carries all calls out. Makes only
/// system calls.
pub(super) fn submit(socket: RawFd, filter: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives through the call, which copies it, and affects only this process.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    if listener < 0 {
        let error = io::Error::last_os_error();
        // A container runtime (LXD, among others) listens already, and there can be one listener; or the
        // kernel is older than 5.0, and has none.
        return if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EINVAL)) { Ok(()) } else { Err(error) };
    }
    send_descriptor(socket, listener as RawFd)
}

impl Listener {
    /// Takes the descriptor that [`submit`] sent, without waiting for it. None if it sent none.
    pub fn receive(socket: &UnixStream) -> io::Result<Option<Listener>> {
        match receive_descriptor(socket, libc::MSG_DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            received => received.map(|descriptor| Some(Listener(descriptor))),
        }
    }

    /// The descriptor for `poll`: readable when a call waits, hung up when the program has ended.
    pub fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }

    /// Receives the next call. None if the waiting call was interrupted.
    pub fn next(&self) -> io::Result<Option<Call>> {
        // SAFETY: a notification is plain data, and the kernel requires zeros.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one notification.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), RECEIVE, &raw mut call) };
        if result == 0 {
            let number = i64::from(call.data.nr);
            return Ok(Some(Call { id: call.id, number, pid: call.pid, arguments: call.data.args }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::EINTR) => Ok(None),
            _ => Err(error),
        }
    }

    /// True if the call still waits, so that memory of the caller that was read before belongs to
    /// this call.
    pub fn is_valid(&self, call: &Call) -> bool {
        // SAFETY: the kernel reads a number of 64 bits.
        unsafe { libc::ioctl(self.0.as_raw_fd(), IS_VALID, &raw const call.id) == 0 }
    }

    /// Answers a call by a copy of a descriptor of this process.
    ///
    /// # Errors
    /// The call does not wait any more, or the kernel is older than Linux 5.14.
    pub fn answer_by_descriptor(&self, call: &Call, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let source = descriptor.as_raw_fd().cast_unsigned();
        let answer = AddedDescriptor { id: call.id, flags: ADD_AND_ANSWER, source, number: 0, flags_there: 0 };
        // SAFETY: the kernel reads one structure.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), ADD_DESCRIPTOR, &raw const answer) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Answers a call. Succeeds also if the call does not wait any more.
    pub fn answer(&self, call: &Call, answer: Answer) -> io::Result<()> {
        let (val, flags) = match answer {
            Answer::Continue => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Answer::Return(value) => (value, 0),
            Answer::Given => return Ok(()),
        };
        let response = libc::seccomp_notif_resp { id: call.id, val, error: 0, flags };
        // SAFETY: the kernel reads one response.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), SEND, &raw const response) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ENOENT) { Ok(()) } else { Err(error) }
    }
}

/// `SECCOMP_IOCTL_NOTIF_RECV`: `_IOWR('!', 0, struct seccomp_notif)`.
const RECEIVE: libc::c_ulong = 0xc050_2100;
/// `SECCOMP_IOCTL_NOTIF_SEND`: `_IOWR('!', 1, struct seccomp_notif_resp)`.
const SEND: libc::c_ulong = 0xc018_2101;
/// `struct seccomp_notif_addfd`
#[repr(C)]
struct AddedDescriptor {
    id: u64,
    flags: u32,
    source: u32,
    /// Not used without a flag: the kernel chooses the number.
    number: u32,
    flags_there: u32,
}

/// `SECCOMP_ADDFD_FLAG_SEND`: the number of the new descriptor is the result of the call.
const ADD_AND_ANSWER: u32 = 1 << 1;
/// `SECCOMP_IOCTL_NOTIF_ADDFD`: `_IOW('!', 3, struct seccomp_notif_addfd)`.
const ADD_DESCRIPTOR: libc::c_ulong = 0x4018_2103;
/// `SECCOMP_IOCTL_NOTIF_ID_VALID`: `_IOW('!', 2, __u64)`.
const IS_VALID: libc::c_ulong = 0x4008_2102;
