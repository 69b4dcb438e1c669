//! Descriptors that are passed over sockets.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Control buffer of a message with one descriptor, aligned as the kernel requires.
#[repr(C, align(8))]
struct Control([u8; 24]);

/// Sends a descriptor with a byte. Makes only system calls.
pub(crate) fn send_descriptor(socket: RawFd, descriptor: RawFd) -> io::Result<()> {
    let mut control = Control([0; 24]);
    let mut byte = [0_u8; 1];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: a message header of zeros is an empty one; every pointer in it lives through the call;
    // the control buffer is as large as CMSG_SPACE of one descriptor, so that the macros stay
    // within it.
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

/// Takes a descriptor that was sent with a byte. Waits for it, unless `flags` has `MSG_DONTWAIT`.
///
/// # Errors
/// `UnexpectedEof` if the byte came without a descriptor, or the socket was closed.
pub(crate) fn receive_descriptor(socket: &UnixStream, flags: libc::c_int) -> io::Result<OwnedFd> {
    let mut control = Control([0; 24]);
    let mut byte = [0_u8; 1];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: as in `send_descriptor`; the kernel writes at most `msg_controllen` bytes into the
    // control buffer.
    let descriptor = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<Control>();
        if libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) < 0 {
            return Err(io::Error::last_os_error());
        }
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()
    };
    // SAFETY: the kernel has just made the descriptor for this process, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
