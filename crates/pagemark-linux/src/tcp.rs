//! The length of the segments in which a TCP connection sends.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Bytes of IP options that a socket can have at most.
const MAX_IP_OPTIONS_BYTES: usize = 40;

/// Has the kernel compute the length of segments again, from what it knows of the path and of the
/// peer.
///
/// The kernel computes it when a connection is made, when the path changes, and when the peer's
/// window is larger than ever. A connection that is made by repair (`TCP_REPAIR`) gets the peer's
/// limit after it is made, and sends in segments of 536 bytes with their options until one of the
/// others happens. Setting the socket's options of IP to what they are is the one call after which
/// the kernel always computes it; sockets of IPv6 take that call, too.
///
/// # Errors
/// `socket` is no socket of TCP, or the system refuses it.
pub fn compute_segment_length_again(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd().as_raw_fd();
    let mut options = [0_u8; MAX_IP_OPTIONS_BYTES];
    let mut length = options.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which `options` has, and into `length`.
    let result = unsafe {
        libc::getsockopt(socket, libc::IPPROTO_IP, libc::IP_OPTIONS, options.as_mut_ptr().cast(), &raw mut length)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel reads `length` bytes of `options`, as many as it has just written.
    let result =
        unsafe { libc::setsockopt(socket, libc::IPPROTO_IP, libc::IP_OPTIONS, options.as_ptr().cast(), length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
