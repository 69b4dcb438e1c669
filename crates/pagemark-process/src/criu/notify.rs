//! Answering another program's system calls in the kernel's place: the thin layer over seccomp's user notification.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// The number of PAGEMAP_SCAN: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u32 = 0xc060_6610;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const SECOND_ARGUMENT: u32 = 24;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// A system call that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    id: u64,
    /// Who makes it.
    pub pid: u32,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// What becomes of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// The kernel carries it out.
    Continue,
    /// It returns this without the kernel doing anything.
    Return(i64),
}

/// Receives the calls of a program.
#[derive(Debug)]
pub(super) struct Listener(OwnedFd);

/// For the time between fork and exec: from now on each `ioctl(PAGEMAP_SCAN)` of this process waits for an answer by whoever gets the
/// descriptor that is sent to `socket`. When nobody has that descriptor any more, the calls fail. Makes system calls only.
pub(super) fn submit(socket: RawFd) -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let unless = |k: u32, skip: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: skip,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let give = libc::BPF_RET | libc::BPF_K;
    let mut filter = [
        statement(load, ARCHITECTURE),
        unless(AUDIT_ARCH_X86_64, 5),
        statement(load, NUMBER),
        unless(libc::SYS_ioctl as u32, 3),
        statement(load, SECOND_ARGUMENT),
        unless(PAGEMAP_SCAN, 1),
        statement(give, libc::SECCOMP_RET_USER_NOTIF),
        statement(give, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives over the call, which copies it; it concerns this process alone.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    send_descriptor(socket, listener as RawFd)
}

/// Room for one descriptor in a message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 24]);

fn send_descriptor(socket: RawFd, descriptor: RawFd) -> io::Result<()> {
    let mut control = Control([0; 24]);
    let mut byte = [0_u8; 1];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: a message header of zeros is an empty one; every pointer put into it lives over the call; the control buffer is as
    // large as CMSG_SPACE of one descriptor, so that the header's macros stay within it.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<Control>();
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor);
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Listener {
    /// Takes the descriptor that [`submit`] sent, without waiting for it.
    pub fn receive(socket: &UnixStream) -> io::Result<Listener> {
        let mut control = Control([0; 24]);
        let mut byte = [0_u8; 1];
        let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        // SAFETY: as in `send_descriptor`; the kernel writes at most `msg_controllen` bytes into the control buffer.
        let descriptor = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut vector;
            message.msg_iovlen = 1;
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = size_of::<Control>();
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            if libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) < 0 {
                return Err(io::Error::last_os_error());
            }
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
            libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()
        };
        // SAFETY: the kernel has just made the descriptor for this process, and nothing else owns it.
        Ok(Listener(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// The descriptor: readable when a call waits, hung up when the program has ended.
    pub fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }

    /// The next call. None if the one that waited was interrupted.
    pub fn next(&self) -> io::Result<Option<Call>> {
        // SAFETY: a notification is plain data, and the kernel wants it to be zeros.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one notification.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), RECEIVE, &raw mut call) };
        if result == 0 {
            return Ok(Some(Call { id: call.id, pid: call.pid, arguments: call.data.args }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::EINTR) => Ok(None),
            _ => Err(error),
        }
    }

    /// True if the call still waits, so that what was read from its maker's memory is this call's.
    pub fn is_valid(&self, call: &Call) -> bool {
        // SAFETY: the kernel reads a number of 64 bits.
        unsafe { libc::ioctl(self.0.as_raw_fd(), IS_VALID, &raw const call.id) == 0 }
    }

    /// Answers a call. One that waits no longer needs none.
    pub fn answer(&self, call: &Call, answer: Answer) -> io::Result<()> {
        let (val, flags) = match answer {
            Answer::Continue => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Answer::Return(value) => (value, 0),
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
/// `SECCOMP_IOCTL_NOTIF_ID_VALID`: `_IOW('!', 2, __u64)`.
const IS_VALID: libc::c_ulong = 0x4008_2102;
