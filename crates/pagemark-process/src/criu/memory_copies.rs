//! Copies of the memory of frozen processes, made through CRIU.
//!
//! When CRIU has saved the state, it still traces the threads, and no other process can. The guard,
//! which traces CRIU, has CRIU make the ptrace calls by which a thread forks a copy of its process
//! ([`memory_copy::fork`]).
//!
//! Pagemark writes the id of a process to a socket that it shares with the guard, and sends SIGURG
//! to CRIU. CRIU stops before that signal, and the guard reads the request.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use pagemark_linux::proc::{self, Process};
use pagemark_linux::ptrace::{self, Registers};
use pagemark_trace::error::Error;
use pagemark_trace::inject::memory_copy::{self, StoppedThread, cannot_copy};

/// The signal by which CRIU is stopped. CRIU ignores it if nobody traces CRIU.
pub(super) const REQUEST: i32 = libc::SIGURG;

/// How long a copy may take. Page tables are copied for it.
const LIMIT: Duration = Duration::from_secs(90);

/// The longest message of an error.
const MAX_TEXT: usize = 1024;

/// Bytes below the stack of CRIU that it may use.
const RED_ZONE: u64 = 128;

/// Bytes below that for what the kernel reads or writes for CRIU.
const SCRATCH: u64 = 1024;

/// Pagemark's side.
#[derive(Debug)]
pub(super) struct Copier {
    socket: OwnedFd,
}

/// Makes a socket for each side.
///
/// # Errors
/// There are no descriptors left.
pub(super) fn pair() -> io::Result<(Copier, OwnedFd)> {
    let (socket, guard) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    Ok((Copier { socket }, guard))
}

impl Copier {
    /// Has the guard of CRIU make a copy of a process. The copy ends within seconds, unless it is
    /// stopped.
    ///
    /// # Errors
    /// Why it could not be made. The process is as it was.
    pub fn copy(&self, criu_pid: i32, pid: i32) -> Result<Process, Error> {
        let failed = |error: io::Error| cannot_copy(pid, "the guard of CRIU does not answer").caused_by(error);
        send(self.socket.as_raw_fd(), &pid.to_ne_bytes(), MsgFlags::MSG_NOSIGNAL)
            .map_err(|error| failed(error.into()))?;
        // SAFETY: a signal to a child of this process, which nobody has waited for.
        if unsafe { libc::kill(criu_pid, REQUEST) } < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        let mut answered = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(LIMIT).unwrap_or(PollTimeout::MAX);
        if poll(&mut answered, timeout).map_err(|error| failed(error.into()))? == 0 {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        let mut answer = [0; MAX_TEXT];
        let length = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty());
        let length = length.map_err(|error| failed(error.into()))?;
        match Answer::decode(&answer[..length]) {
            Some(Answer::Copied(copy)) => Ok(copy),
            Some(Answer::Gone) => Err(Error::no_process(pid)),
            Some(Answer::Failed(reason)) => Err(cannot_copy(pid, reason)),
            None => Err(failed(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

/// What the guard answers.
#[derive(PartialEq, Eq, Debug)]
enum Answer {
    Copied(Process),
    Gone,
    /// For this reason.
    Failed(String),
}

impl Answer {
    fn encode(&self) -> Vec<u8> {
        match self {
            Answer::Copied(Process { pid, start_ticks }) => {
                [&[0][..], &pid.to_ne_bytes(), &start_ticks.to_ne_bytes()].concat()
            }
            Answer::Gone => vec![1],
            Answer::Failed(reason) => {
                let bytes = reason.as_bytes();
                [&[2], &bytes[..bytes.len().min(MAX_TEXT - 1)]].concat()
            }
        }
    }

    fn decode(bytes: &[u8]) -> Option<Answer> {
        match bytes.split_first()? {
            (0, copy) => {
                let (pid, start_ticks) = copy.split_first_chunk()?;
                let start_ticks = u64::from_ne_bytes(start_ticks.try_into().ok()?);
                Some(Answer::Copied(Process { pid: i32::from_ne_bytes(*pid), start_ticks }))
            }
            (1, _) => Some(Answer::Gone),
            (2, reason) => Some(Answer::Failed(String::from_utf8_lossy(reason).into_owned())),
            _ => None,
        }
    }
}

/// The guard's side.
#[derive(Debug)]
pub(super) struct Copies {
    socket: OwnedFd,
    /// The threads whose stops CRIU does not expect.
    copied: Vec<i32>,
}

impl Copies {
    /// # Safety
    /// The descriptor is open, and nothing else owns it.
    pub unsafe fn new(socket: RawFd) -> Copies {
        // SAFETY: by the contract of this function.
        Copies { socket: unsafe { OwnedFd::from_raw_fd(socket) }, copied: Vec::new() }
    }

    /// Carries out what is asked for. CRIU is stopped before a signal, and does not get that signal
    /// if this returns true.
    pub fn take_signal(&mut self, criu_pid: i32, signal: i32) -> bool {
        match signal {
            REQUEST => self.answer(criu_pid),
            libc::SIGCHLD => self.is_of_copied(criu_pid),
            _ => false,
        }
    }

    /// True if the signal tells CRIU of a stop on the way of a thread that has forked a copy.
    fn is_of_copied(&self, criu_pid: i32) -> bool {
        let Ok(info) = ptrace::signal_info(criu_pid) else { return false };
        // SAFETY: the kernel has filled in a SIGCHLD.
        let thread = unsafe { info.si_pid() };
        info.si_code == libc::CLD_TRAPPED && self.copied.contains(&thread)
    }

    fn answer(&mut self, criu_pid: i32) -> bool {
        let mut request = [0; 4];
        let received = recv(self.socket.as_raw_fd(), &mut request, MsgFlags::MSG_DONTWAIT);
        if received != Ok(request.len()) {
            return false;
        }
        let pid = i32::from_ne_bytes(request);
        self.copied.push(pid);
        let made = Traced::begin(criu_pid, pid).map_err(|errno| {
            cannot_copy(pid, "CRIU cannot make system calls now").caused_by(io::Error::from_raw_os_error(errno))
        });
        let made = made.and_then(|mut thread| {
            let made = memory_copy::fork(&mut thread);
            thread.end();
            made
        });
        let answer = match made {
            Ok(copy) => Answer::Copied(copy),
            Err(error) if error.is_gone() => Answer::Gone,
            Err(error) => Answer::Failed(error.reason()),
        };
        // Pagemark may be gone; then the copy ends by itself.
        let _ = send(self.socket.as_raw_fd(), &answer.encode(), MsgFlags::MSG_NOSIGNAL);
        true
    }
}

/// A thread that CRIU traces. CRIU is stopped, and makes system calls for the guard until
/// [`Traced::end`].
struct Traced {
    criu_pid: i32,
    thread: i32,
    /// The address of an instruction `syscall` of CRIU's.
    instruction: u64,
    registers: Registers,
    mask: u64,
    memory: File,
    /// Memory of CRIU's for what the kernel reads or writes.
    scratch: u64,
}

/// Options of ptrace: marks stops at system calls.
const OPTIONS: u64 = ptrace::TRACE_SYSGOOD as u64;

impl Traced {
    /// `thread` is stopped, and CRIU, too, before a signal in a system call.
    fn begin(criu_pid: i32, thread: i32) -> Result<Traced, i32> {
        let registers = ptrace::registers(criu_pid)?;
        let instruction = registers.rip.wrapping_sub(ptrace::SYSCALL_BYTES);
        if !ptrace::is_system_call(criu_pid, instruction)? {
            return Err(libc::EBUSY);
        }
        let memory = proc::open_memory_for_writing(criu_pid).map_err(errno_of)?;
        let mask = ptrace::signal_mask(criu_pid)?;
        ptrace::set_signal_mask(criu_pid, u64::MAX)?;
        let scratch = (registers.rsp - RED_ZONE - SCRATCH) & !0xf;
        let mut traced = Traced { criu_pid, thread, instruction, registers, mask, memory, scratch };
        match traced.ptrace(libc::PTRACE_SETOPTIONS, 0, OPTIONS) {
            Ok(_) => Ok(traced),
            Err(errno) => {
                traced.end();
                Err(errno)
            }
        }
    }

    /// CRIU is stopped in the call in which it was.
    fn end(&mut self) {
        let _ = ptrace::restore(self.criu_pid, &self.registers, self.mask);
    }

    /// Has CRIU make a system call.
    fn call(&mut self, number: i64, arguments: [u64; 6]) -> Result<i64, i32> {
        let made = ptrace::system_call(self.criu_pid, self.instruction, &self.registers, number, arguments)?;
        match made.ok_or(libc::ESRCH)? {
            result if result < 0 => Err(result.unsigned_abs() as i32),
            result => Ok(result),
        }
    }

    fn ptrace(&mut self, request: u32, address: u64, data: u64) -> Result<i64, i32> {
        self.call(libc::SYS_ptrace, [u64::from(request), self.thread as u64, address, data, 0, 0])
    }

    fn read<const BYTES: usize>(&self) -> Result<[u8; BYTES], i32> {
        let mut bytes = [0; BYTES];
        self.memory.read_exact_at(&mut bytes, self.scratch).map_err(errno_of)?;
        Ok(bytes)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), i32> {
        self.memory.write_all_at(bytes, self.scratch).map_err(errno_of)
    }

    /// Resumes the thread, with a signal unless that is 0, and waits until it stops. Returns the
    /// status of the stop.
    fn resume(&mut self, request: u32, signal: i32) -> Result<i32, i32> {
        self.ptrace(request, 0, signal as u64)?;
        let arguments = [self.thread as u64, self.scratch, libc::__WALL as u64, 0, 0, 0];
        self.call(libc::SYS_wait4, arguments)?;
        let status = i32::from_ne_bytes(self.read()?);
        if libc::WIFSTOPPED(status) { Ok(status) } else { Err(libc::ESRCH) }
    }

    /// Resumes the thread until it stops in this way. Signals that cannot be blocked are delivered.
    fn resume_until(&mut self, request: u32, is_meant: impl Fn(i32) -> bool) -> Result<(), i32> {
        let mut signal = 0;
        loop {
            let status = self.resume(request, signal)?;
            if is_meant(status) {
                return Ok(());
            }
            signal = if status >> 16 == 0 { libc::WSTOPSIG(status) } else { 0 };
        }
    }
}

fn errno_of(error: io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

const REGISTER_BYTES: usize = size_of::<Registers>();

impl StoppedThread for Traced {
    fn id(&self) -> i32 {
        self.thread
    }

    fn registers(&mut self) -> Result<Registers, i32> {
        self.ptrace(libc::PTRACE_GETREGS, 0, self.scratch)?;
        let bytes: [u8; REGISTER_BYTES] = self.read()?;
        // SAFETY: the structure consists of numbers, for which every bit pattern is valid, and the array
        // has its length.
        Ok(unsafe { bytes.as_ptr().cast::<Registers>().read_unaligned() })
    }

    fn set_registers(&mut self, registers: &Registers) -> Result<(), i32> {
        let mut bytes = [0_u8; REGISTER_BYTES];
        // SAFETY: the structure consists of numbers without padding, and the array has its length.
        unsafe {
            std::ptr::copy_nonoverlapping(std::ptr::from_ref(registers).cast(), bytes.as_mut_ptr(), REGISTER_BYTES)
        };
        self.write(&bytes)?;
        self.ptrace(libc::PTRACE_SETREGS, 0, self.scratch).map(drop)
    }

    fn signal_mask(&mut self) -> Result<u64, i32> {
        self.ptrace(ptrace::GET_SIGNAL_MASK, size_of::<u64>() as u64, self.scratch)?;
        self.read().map(u64::from_ne_bytes)
    }

    fn set_signal_mask(&mut self, mask: u64) -> Result<(), i32> {
        self.write(&mask.to_ne_bytes())?;
        self.ptrace(ptrace::SET_SIGNAL_MASK, size_of::<u64>() as u64, self.scratch).map(drop)
    }

    fn dispatches_system_calls(&mut self) -> Result<bool, i32> {
        const BYTES: usize = 32;
        // Before Linux 6.4 the request is unknown.
        let asked = self.ptrace(ptrace::GET_SYSCALL_USER_DISPATCH_CONFIG, BYTES as u64, self.scratch);
        let configuration: [u8; BYTES] = self.read()?;
        Ok(asked.is_ok() && configuration[..8] != [0; 8])
    }

    fn run_to_system_call(&mut self) -> Result<(), i32> {
        let is_meant = |status: i32| status >> 16 == 0 && libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80;
        self.resume_until(libc::PTRACE_SYSCALL, is_meant)
    }

    fn put_back(&mut self, registers: &Registers, mask: u64) -> Result<(), i32> {
        // First, for the case that CRIU dies before the end: the code puts back all else.
        self.set_signal_mask(mask)?;
        self.set_registers(registers)?;
        // After a stop of this kind, unlike a stop at a system call, the kernel restarts an interrupted call.
        self.ptrace(libc::PTRACE_INTERRUPT, 0, 0)?;
        self.resume_until(libc::PTRACE_CONT, |status| status >> 16 == libc::PTRACE_EVENT_STOP)?;
        self.set_registers(registers)?;
        self.set_signal_mask(mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_decoded_as_they_were_encoded() {
        let copied = Answer::Copied(Process { pid: 7, start_ticks: 1 << 40 });
        for answer in [copied, Answer::Gone, Answer::Failed("no memory".to_owned())] {
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(Answer::decode(&[]), None);
        assert_eq!(Answer::decode(&[0, 1, 2]), None);
    }
}
