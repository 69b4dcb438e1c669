//! A program in which something fails, or that is killed, at a chosen system call.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// What happens at a system call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The program is killed before it makes the call.
    Killed,
    /// The call is not made, and fails with this error. Only calls that use a file, a socket or a
    /// process fail, because no program survives a failed `futex`.
    Fails(Errno),
    /// Another process is killed before the program makes the call.
    Kills(i32),
}

/// How a program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Its exit status; none if a signal ended it.
    pub code: Option<i32>,
    /// The number of its system calls at which the fault could have come.
    pub calls: u64,
    /// True if the fault came.
    pub came: bool,
}

/// Calls that can fail without making the program's memory or its threads unusable.
const FAILING: [libc::c_long; 28] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_writev,
    libc::SYS_ioctl,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_flock,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    libc::SYS_process_vm_readv,
    libc::SYS_pidfd_open,
];

/// Runs `command` to its end. At call `at` of it, counted from 1 over all its threads from its
/// first instruction on, `fault` comes. What the program forks is left alone. The caller's thread
/// must wait for no other child meanwhile.
///
/// # Errors
/// The program could not be started or traced.
pub fn run_with_fault(command: &mut Command, fault: Fault, at: u64) -> io::Result<Ended> {
    // SAFETY: between fork and exec this makes one system call.
    unsafe {
        command.pre_exec(|| Ok(ptrace::traceme()?));
    }
    let child = command.spawn()?;
    let program = Pid::from_raw(child.id() as i32);
    // The stop after exec.
    waitpid(program, None)?;
    ptrace::setoptions(
        program,
        Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL,
    )?;
    resume(program, None);
    let mut ended = Ended { code: None, calls: 0, came: false };
    // The threads that are in a call, and whether it is to fail.
    let mut in_call = BTreeMap::new();
    loop {
        // Children of other threads are not this one's concern.
        let status = match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
            Err(Errno::EINTR) => continue,
            status => status?,
        };
        match status {
            WaitStatus::Exited(pid, code) if pid == program => return Ok(Ended { code: Some(code), ..ended }),
            WaitStatus::Signaled(pid, ..) if pid == program => return Ok(ended),
            WaitStatus::PtraceSyscall(thread) => {
                match in_call.remove(&thread) {
                    Some(Some(error)) => set_result(thread, error),
                    Some(None) => {}
                    None => {
                        let failing = enter(thread, program, fault, at, &mut ended);
                        in_call.insert(thread, failing);
                    }
                }
                resume(thread, None);
            }
            WaitStatus::PtraceEvent(thread, ..) => resume(thread, None),
            WaitStatus::Stopped(thread, Signal::SIGSTOP | Signal::SIGTRAP) => resume(thread, None),
            WaitStatus::Stopped(thread, signal) => resume(thread, Some(signal)),
            _ => {}
        }
    }
}

/// A thread is about to make a call. Returns the error with which the call is to fail.
fn enter(thread: Pid, program: Pid, fault: Fault, at: u64, ended: &mut Ended) -> Option<Errno> {
    // A thread that was killed has no registers any more.
    let mut registers = ptrace::getregs(thread).ok()?;
    let number = registers.orig_rax as libc::c_long;
    if matches!(fault, Fault::Fails(_)) && !FAILING.contains(&number) {
        return None;
    }
    ended.calls += 1;
    if ended.calls != at {
        return None;
    }
    ended.came = true;
    match fault {
        Fault::Killed => {
            let _ = kill(program, Signal::SIGKILL);
            None
        }
        Fault::Kills(pid) => {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            None
        }
        Fault::Fails(error) => {
            registers.orig_rax = u64::MAX;
            ptrace::setregs(thread, registers).ok().map(|()| error)
        }
    }
}

fn set_result(thread: Pid, error: Errno) {
    if let Ok(mut registers) = ptrace::getregs(thread) {
        registers.rax = -i64::from(error as i32) as u64;
        let _ = ptrace::setregs(thread, registers);
    }
}

/// Lets a thread go on to the next entry or exit of a call. A thread that was killed does not.
fn resume(thread: Pid, signal: Option<Signal>) {
    let _ = ptrace::syscall(thread, signal);
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    fn read_nothing(fault: Fault, at: u64) -> Ended {
        let mut command = Command::new("cat");
        command.arg("/dev/null").stdin(Stdio::null()).stderr(Stdio::null());
        run_with_fault(&mut command, fault, at).unwrap()
    }

    #[test]
    fn a_fault_comes_at_its_call() {
        let whole = read_nothing(Fault::Killed, u64::MAX);
        assert!(whole.code == Some(0) && whole.calls > 20 && !whole.came, "{whole:?}");
        assert_eq!(read_nothing(Fault::Killed, whole.calls), Ended { code: None, came: true, ..whole });
        let failing = read_nothing(Fault::Fails(Errno::EIO), u64::MAX);
        assert!(failing.code == Some(0) && failing.calls < whole.calls, "{failing:?}");
        // The libraries cannot be opened, or the file cannot be read.
        let refused = (1..=failing.calls).filter(|&at| read_nothing(Fault::Fails(Errno::EIO), at).code != Some(0));
        assert!(refused.count() > 2);
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let ended = read_nothing(Fault::Kills(other.id() as i32), 5);
        assert_eq!(ended.code, Some(0));
        // It may have been waited for already, as a child of this thread.
        assert!(other.wait().map_or(true, |status| !status.success()));
    }
}
