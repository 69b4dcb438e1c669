//! Runs a command as on an older kernel: `as_linux VERSION COMMAND …`.
//!
//! Interfaces that are newer than that version fail for the command and its descendants as they
//! fail there: a system call that does not exist yet with `ENOSYS`, an unknown ioctl with `ENOTTY`,
//! an unknown flag or feature with `EINVAL`. A seccomp filter does that. The features of
//! userfaultfd are in memory, which a filter cannot read: a process of its own answers those calls.
//!
//! In all other respects the running kernel behaves as it does. Exit status 125: the command could
//! not be run this way.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// A version of Linux.
type Version = (u32, u32);

/// The versions that can be imitated, and the highest number of a system call that each has on
/// x86-64.
const VERSIONS: [(Version, i64); 3] = [((4, 18), 334), ((5, 10), 440), ((6, 1), 450)];

/// Arguments of a system call that a version does not know: the version that brought them, the
/// call, the index of the argument, how it is compared, and the error.
struct Novelty {
    since: Version,
    call: i64,
    argument: u32,
    is: Comparison,
    errno: i32,
}

/// How an argument is recognized, by its lower 32 bits.
#[derive(Clone, Copy)]
enum Comparison {
    /// It has this value.
    Equals(u32),
    /// It has at least one of these bits.
    Has(u32),
}

use Comparison::{Equals, Has};

const PAGEMAP_SCAN: u32 = 0xc060_6610;
const PROCMAP_QUERY: u32 = 0xc068_6611;
const UFFDIO_API: u32 = 0xc018_aa3f;

const NOVELTIES: [Novelty; 25] = [
    novelty((6, 11), libc::SYS_ioctl, 1, Equals(PROCMAP_QUERY), libc::ENOTTY),
    novelty((6, 7), libc::SYS_ioctl, 1, Equals(PAGEMAP_SCAN), libc::ENOTTY),
    // UFFD_USER_MODE_ONLY
    novelty((5, 11), libc::SYS_userfaultfd, 0, Has(1), libc::EINVAL),
    // BPF_LINK_CREATE; the lists of one process are newer than the call.
    novelty((6, 1), libc::SYS_bpf, 0, Equals(28), libc::EINVAL),
    // MADV_COLD, MADV_PAGEOUT, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_DONTNEED_LOCKED,
    // MADV_COLLAPSE, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE
    novelty((5, 4), libc::SYS_madvise, 2, Equals(20), libc::EINVAL),
    novelty((5, 4), libc::SYS_madvise, 2, Equals(21), libc::EINVAL),
    novelty((5, 14), libc::SYS_madvise, 2, Equals(22), libc::EINVAL),
    novelty((5, 14), libc::SYS_madvise, 2, Equals(23), libc::EINVAL),
    novelty((5, 18), libc::SYS_madvise, 2, Equals(24), libc::EINVAL),
    novelty((6, 1), libc::SYS_madvise, 2, Equals(25), libc::EINVAL),
    novelty((6, 13), libc::SYS_madvise, 2, Equals(102), libc::EINVAL),
    novelty((6, 13), libc::SYS_madvise, 2, Equals(103), libc::EINVAL),
    // MFD_NOEXEC_SEAL, MFD_EXEC
    novelty((6, 3), libc::SYS_memfd_create, 1, Has(0x18), libc::EINVAL),
    // MREMAP_DONTUNMAP
    novelty((5, 7), libc::SYS_mremap, 3, Has(4), libc::EINVAL),
    // PIDFD_THREAD
    novelty((6, 9), libc::SYS_pidfd_open, 1, Has(libc::O_EXCL as u32), libc::EINVAL),
    // SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
    novelty((5, 0), libc::SYS_seccomp, 1, Has(8), libc::EINVAL),
    novelty((5, 19), libc::SYS_seccomp, 1, Has(32), libc::EINVAL),
    // PTRACE_GET_SYSCALL_INFO, PTRACE_GET_RSEQ_CONFIGURATION,
    // PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG
    novelty((5, 3), libc::SYS_ptrace, 0, Equals(0x420e), libc::EIO),
    novelty((5, 13), libc::SYS_ptrace, 0, Equals(0x420f), libc::EIO),
    novelty((6, 4), libc::SYS_ptrace, 0, Equals(0x4211), libc::EIO),
    // FAN_REPORT_FID; FAN_REPORT_DIR_FID and FAN_REPORT_NAME; FAN_REPORT_PIDFD; FAN_REPORT_TARGET_FID
    novelty((5, 1), libc::SYS_fanotify_init, 0, Has(0x200), libc::EINVAL),
    novelty((5, 9), libc::SYS_fanotify_init, 0, Has(0xc00), libc::EINVAL),
    novelty((5, 15), libc::SYS_fanotify_init, 0, Has(0x80), libc::EINVAL),
    novelty((5, 17), libc::SYS_fanotify_init, 0, Has(0x1000), libc::EINVAL),
    // FAN_MARK_FILESYSTEM
    novelty((4, 20), libc::SYS_fanotify_mark, 1, Has(0x100), libc::EINVAL),
];

/// The features of userfaultfd, and the version that brought each.
const FEATURES: [(Version, u64); 10] = [
    ((5, 7), 1 << 0),
    ((5, 13), 1 << 9),
    ((5, 14), 1 << 10),
    ((5, 18), 1 << 11),
    ((5, 19), 1 << 12),
    ((6, 4), 1 << 13),
    ((6, 6), 1 << 14),
    ((6, 7), 1 << 15),
    ((6, 8), 1 << 16),
    // Bits that no kernel has yet.
    ((99, 0), !0 << 17),
];

const fn novelty(since: Version, call: i64, argument: u32, is: Comparison, errno: i32) -> Novelty {
    Novelty { since, call, argument, is, errno }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let version = arguments.next().and_then(|version| parse(version.to_str()?));
    let (Some(version), Some(program)) = (version, arguments.next()) else {
        eprintln!("usage: as_linux 4.18|5.10|6.1 COMMAND …");
        return ExitCode::from(125);
    };
    if let Err(error) = imitate(version) {
        eprintln!("as_linux: a seccomp filter: {error}");
        return ExitCode::from(125);
    }
    let error = Command::new(&program).args(arguments).exec();
    eprintln!("as_linux: {}: {error}", program.display());
    ExitCode::from(125)
}

fn parse(text: &str) -> Option<(Version, i64)> {
    let (major, minor) = text.split_once('.')?;
    let version = (major.parse().ok()?, minor.parse().ok()?);
    VERSIONS.into_iter().find(|(known, _)| *known == version)
}

/// Puts this process under the filter, and starts the process that answers for it.
fn imitate((version, highest_call): (Version, i64)) -> io::Result<()> {
    let (here, there) = UnixStream::pair()?;
    // SAFETY: this program has one thread, so that the child may do whatever the parent may.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    if child == 0 {
        drop(here);
        // The command may wait for all its children. The grandchild is none of them.
        // SAFETY: as above.
        if unsafe { libc::fork() } == 0 {
            let listener = receive(&there);
            drop(there);
            if let Ok(listener) = listener {
                answer(&listener, version);
            }
        }
        std::process::exit(0);
    }
    // SAFETY: the child is ours; its status does not matter.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    drop(there);
    let listener = install(&filter(version, highest_call))?;
    let byte = [IoSlice::new(&[0])];
    sendmsg::<()>(
        here.as_raw_fd(),
        &byte,
        &[ControlMessage::ScmRights(&[listener.as_raw_fd()])],
        MsgFlags::empty(),
        None,
    )?;
    Ok(())
}

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

fn filter(version: Version, highest_call: i64) -> Vec<libc::sock_filter> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let end = |action| statement(libc::BPF_RET | libc::BPF_K, action);
    let jump = |test: u32, k: u32, if_true: u8, if_false: u8| libc::sock_filter {
        code: (libc::BPF_JMP | test | libc::BPF_K) as u16,
        jt: if_true,
        jf: if_false,
        k,
    };
    let fail = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
    let mut filter = vec![
        load(ARCHITECTURE),
        jump(libc::BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0),
        end(libc::SECCOMP_RET_ALLOW),
        load(NUMBER),
        jump(libc::BPF_JGT, highest_call as u32, 0, 1),
        end(fail(libc::ENOSYS)),
    ];
    let mut add = |call: i64, argument: u32, is: Comparison, action: u32| {
        let test = match is {
            Equals(value) => jump(libc::BPF_JEQ, value, 0, 1),
            Has(bits) => jump(libc::BPF_JSET, bits, 0, 1),
        };
        filter.extend([
            load(NUMBER),
            jump(libc::BPF_JEQ, call as u32, 0, 3),
            load(ARGUMENTS + 8 * argument),
            test,
            end(action),
        ]);
    };
    for novelty in NOVELTIES.iter().filter(|novelty| novelty.since > version) {
        add(novelty.call, novelty.argument, novelty.is, fail(novelty.errno));
    }
    add(libc::SYS_ioctl, 1, Equals(UFFDIO_API), libc::SECCOMP_RET_USER_NOTIF);
    filter.push(end(libc::SECCOMP_RET_ALLOW));
    filter
}

fn install(filter: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    let install = || {
        // SAFETY: the program lives through the call, which copies it.
        unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
                &raw const program,
            )
        }
    };
    let mut listener = install();
    if listener < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EACCES) {
        // SAFETY: the call takes numbers only.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        listener = install();
    }
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(listener as RawFd) })
}

fn receive(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut vector = [IoSliceMut::new(&mut byte)];
    let mut control = nix::cmsg_space!(RawFd);
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut vector, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC)?;
    for message in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = message
            && let [descriptor] = descriptors[..]
        {
            // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
            return Ok(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// `SECCOMP_IOCTL_NOTIF_RECV`: `_IOWR('!', 0, struct seccomp_notif)`.
const RECEIVE: libc::c_ulong = 0xc050_2100;
/// `SECCOMP_IOCTL_NOTIF_SEND`: `_IOWR('!', 1, struct seccomp_notif_resp)`.
const SEND: libc::c_ulong = 0xc018_2101;

/// Answers the calls `ioctl(UFFDIO_API)` until no process is left that is under the filter.
fn answer(listener: &OwnedFd, version: Version) {
    // A program that started the command may wait until the output of the command is closed.
    for descriptor in 0..3 {
        // SAFETY: nothing uses these descriptors in this process.
        unsafe { libc::close(descriptor) };
    }
    // SAFETY: the calls take numbers, or a string that lives through the call.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"as_linux-answer".as_ptr());
    }
    let unknown: u64 =
        FEATURES.iter().filter(|(since, _)| *since > version).map(|(_, bits)| bits).fold(0, |all, bits| all | bits);
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure is passed, which lives through the call.
        let ready = unsafe { libc::poll(&mut poll, 1, -1) };
        if ready > 0 && poll.revents & libc::POLLIN == 0 {
            return;
        }
        // SAFETY: a notification is plain data, and the kernel requires zeros.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one notification.
        if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) } != 0 {
            continue;
        }
        let refused = features(call.pid as i32, call.data.args[2]).is_some_and(|features| features & unknown != 0);
        let response = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: if refused { -libc::EINVAL } else { 0 },
            flags: if refused { 0 } else { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 },
        };
        // SAFETY: the kernel reads one response. The error of an interrupted call needs no handling.
        unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw const response) };
    }
}

/// The field `features` of the `struct uffdio_api` at an address of a process.
fn features(pid: i32, address: u64) -> Option<u64> {
    let mut words = [0_u64; 2];
    let local = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: size_of_val(&words) };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: size_of_val(&words) };
    // SAFETY: the local vector is `words`; the kernel checks the remote address.
    let length = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    (length == size_of_val(&words) as isize).then_some(words[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_versions_know_more() {
        let lengths: Vec<_> = VERSIONS.iter().map(|&(version, calls)| filter(version, calls).len()).collect();
        assert!(lengths.is_sorted_by(|before, after| before > after), "{lengths:?}");
        assert_eq!(parse("5.10"), Some(((5, 10), 440)));
        assert_eq!(parse("5.11"), None);
    }
}
