//! System calls of the program: which the kernel carries out as they are, and which the monitor.

use pagemark_kvm_protocol::machine_calls;

use crate::layout::is_program;
use crate::loader;
use crate::machine::Machine;
use crate::sys::host_call::{self, Call};
use crate::sys::program_memory::{self, Fault};
use crate::sys::{execution, other_process};
use crate::thread::Thread;
use crate::writes::Writes;

pub mod clone;
pub mod exec;
pub mod files;
pub mod memory;
mod populate;
pub mod process;
pub mod signal;
mod structure;
pub mod track;
pub mod userfault;
mod writes;

use crate::call_table::{self, Kind};
use clone::Clone;
use structure::Structure;

/// How a call is refused: with an errno, and with what the machine lacks if Linux would carry it
/// out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The errno.
    pub errno: i32,
    /// What the machine cannot do.
    pub lacking: Option<String>,
}

impl Refusal {
    /// The machine cannot do `what`.
    pub fn lacking(errno: i32, what: impl Into<String>) -> Refusal {
        Refusal { errno, lacking: Some(what.into()) }
    }

    /// The process leaves its machine: outside, the call is made again.
    pub fn while_leaving(machine: &Machine) -> Result<(), Refusal> {
        if machine.is_leaving() { Err(Refusal::from(-host_call::RESTART as i32)) } else { Ok(()) }
    }
}

impl From<i32> for Refusal {
    fn from(errno: i32) -> Refusal {
        Refusal { errno, lacking: None }
    }
}

impl From<Fault> for Refusal {
    fn from(_: Fault) -> Refusal {
        libc::EFAULT.into()
    }
}

/// The refusal of a call of which a part has failed so.
fn os_error(error: &std::io::Error) -> Refusal {
    error.raw_os_error().unwrap_or(libc::EAGAIN).into()
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With this result.
    Return(i64),
    /// A signal came first: the call is to be made again after it.
    Restart,
    /// The registers are set already.
    Resume,
    /// The thread is to end.
    EndThread,
}

impl From<i64> for Outcome {
    fn from(result: i64) -> Outcome {
        if result == host_call::RESTART { Outcome::Restart } else { Outcome::Return(result) }
    }
}

/// Whether the number of a process, as a call has it, is that of the caller.
fn is_own_process(process: u64) -> bool {
    process as u32 == 0 || host_call::is_of_this_process(process)
}

/// Whether a call stops at a link as that to the program is: the kernel then sees to it.
fn stops_at_links(call: &Call) -> bool {
    const NO_LINKS: u64 = libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS;
    let is_refused = |words: Vec<u64>| words.get(2).is_some_and(|resolve| resolve & NO_LINKS != 0);
    let [_, _, third, fourth, ..] = call.arguments;
    match call.number as i64 {
        libc::SYS_openat2 => program_memory::read_words(third, 3).is_ok_and(is_refused),
        libc::SYS_newfstatat => fourth & libc::AT_SYMLINK_NOFOLLOW as u64 != 0,
        libc::SYS_statx => third & libc::AT_SYMLINK_NOFOLLOW as u64 != 0,
        _ => false,
    }
}

impl Thread {
    /// Carries out the system call that the registers state.
    pub(crate) fn call(&mut self, call: Call) -> Outcome {
        match self.carry_out(call) {
            Ok(outcome) => outcome,
            Err(Refusal { errno, lacking }) => {
                if let Some(what) = lacking {
                    self.process.report_call(call.number, &what, errno);
                }
                Outcome::from(-i64::from(errno))
            }
        }
    }

    fn carry_out(&mut self, call: Call) -> Result<Outcome, Refusal> {
        let Call { number, arguments } = call;
        let [a, b, c, ..] = arguments;
        let done = Outcome::Return;
        match number as i64 {
            libc::SYS_mmap => self.machine.mmap(arguments).map(done),
            libc::SYS_munmap => self.machine.munmap(a, b).map(done),
            libc::SYS_mprotect => self.machine.mprotect(a, b, c).map(done),
            // As on a processor without protection keys.
            libc::SYS_pkey_mprotect if arguments[3] as i32 == -1 => self.machine.mprotect(a, b, c).map(done),
            libc::SYS_pkey_mprotect | libc::SYS_pkey_alloc | libc::SYS_pkey_free => Err(libc::EINVAL.into()),
            libc::SYS_mremap => self.machine.mremap(arguments).map(done),
            libc::SYS_shmat => self.machine.shmat(arguments).map(done),
            libc::SYS_shmdt => self.machine.shmdt(a).map(done),
            libc::SYS_brk => self.machine.brk(a).map(done),
            libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_vmsplice => self.with_buffers(call).map(Outcome::from),
            libc::SYS_sendmsg | libc::SYS_recvmsg => self.with_message(call).map(Outcome::from),
            libc::SYS_sendmmsg | libc::SYS_recvmmsg => self.with_messages(call).map(Outcome::from),
            libc::SYS_process_vm_readv | libc::SYS_process_vm_writev => self.between_processes(call).map(Outcome::from),
            libc::SYS_close => {
                files::descriptor(a)?;
                Ok(self.interruptible(&call, Writes::NONE).into())
            }
            libc::SYS_dup2 | libc::SYS_dup3 => {
                files::descriptor(a)?;
                files::descriptor(b)?;
                Ok(self.interruptible(&call, Writes::NONE).into())
            }
            libc::SYS_close_range => self.close_range(call),
            libc::SYS_readlink => self.readlink(call, a, b, c),
            libc::SYS_readlinkat => self.readlink(call, b, c, arguments[3]),
            libc::SYS_arch_prctl => self.arch_prctl(a, b).map(done),
            libc::SYS_prctl => self.prctl(call),
            libc::SYS_set_tid_address => Ok(done(self.set_tid_address(a))),
            libc::SYS_clone => self.clone(Clone::of_clone(arguments)),
            libc::SYS_clone3 => self.clone(Clone::of_clone3(a, b)?),
            libc::SYS_fork => self.clone(Clone::of_fork(false)),
            libc::SYS_vfork => self.clone(Clone::of_fork(true)),
            libc::SYS_execve => self.execve(a, b, c),
            libc::SYS_execveat => self.execveat(arguments),
            libc::SYS_exit => {
                self.status = a as i32;
                Ok(Outcome::EndThread)
            }
            libc::SYS_exit_group => self.process.exit(a as i32),
            libc::SYS_rt_sigaction => self.rt_sigaction(arguments).map(done),
            libc::SYS_rt_sigreturn => Ok(self.rt_sigreturn()),
            libc::SYS_sigaltstack => self.sigaltstack(a, b).map(done),
            // There is no call to restart: those that the kernel would restart so return `EINTR`.
            libc::SYS_restart_syscall => Err(libc::EINTR.into()),
            // The kernel could not stop a sequence of the program. C libraries do without, and libraries for input
            // and output without rings: kernels may have neither. A report would be in each program's output.
            libc::SYS_rseq | libc::SYS_io_uring_setup => Err(libc::ENOSYS.into()),
            // Those two need their address, and the kernel says so.
            libc::SYS_getrlimit if a as u32 == libc::RLIMIT_AS && b != 0 => self.limit_addresses(0, b).map(done),
            libc::SYS_setrlimit if a as u32 == libc::RLIMIT_AS && b != 0 => self.limit_addresses(b, 0).map(done),
            libc::SYS_prlimit64 if b as u32 == libc::RLIMIT_AS && is_own_process(a) => {
                self.limit_addresses(c, arguments[3]).map(done)
            }
            libc::SYS_userfaultfd => self.pass(userfault::open(call)),
            libc::SYS_ioctl => self.pass(userfault::ioctl(call)),
            _ if number == machine_calls::CALL => self.track(arguments).map(done),
            _ => self.pass(call),
        }
    }

    /// Lets the kernel carry out a call that it can, after its arguments were checked.
    fn pass(&mut self, mut call: Call) -> Result<Outcome, Refusal> {
        let passed = call_table::passed(call.number).ok_or_else(|| Refusal::lacking(libc::ENOSYS, ""))?;
        let mut structure = Structure::of(&call);
        let writes = writes::of(&call, passed, structure.as_ref());
        let mut own_path = None;
        for (index, kind) in passed.kinds.iter().enumerate() {
            let argument = call.arguments[index];
            match kind {
                Kind::Value => {}
                Kind::Descriptor => {
                    files::descriptor(argument)?;
                }
                Kind::Pointer(_) if files::is_monitor(argument) => return Err(libc::EFAULT.into()),
                Kind::Pointer(_) => {}
                Kind::Range | Kind::Advised => {
                    let len = call.arguments.get(index + 1).copied().unwrap_or_default();
                    if argument != 0 && !is_program(argument, len) {
                        return Err(libc::ENOMEM.into());
                    }
                }
                Kind::Path => {
                    if files::is_monitor(argument) {
                        return Err(libc::EFAULT.into());
                    }
                    if self.names_own_program(argument) && !stops_at_links(&call) {
                        let path = own_path.insert(self.process.path_of_file());
                        call.arguments[index] = path.as_ptr() as u64;
                    }
                }
            }
        }
        let other = writes::to_proc(&call, &writes).and_then(other_process::of_memory);
        if let Some(structure) = &mut structure {
            structure.give(&mut call)?;
        }
        let result = other_process::noting(other, || self.interruptible(&call, writes));
        if let Some(structure) = structure {
            structure.take_back(self)?;
        }
        if result == -i64::from(libc::EINTR) && self.slot.waits() {
            self.call_mask = signal::mask_of(&call);
        }
        if result == 0 {
            self.note_change(&call);
        }
        Ok(result.into())
    }

    /// The kernel has carried out a call which may concern what the monitor does for the program.
    fn note_change(&self, call: &Call) {
        let [first, second, third, ..] = call.arguments;
        let own_limit = match call.number as i64 {
            libc::SYS_landlock_restrict_self => return execution::note_rules(),
            libc::SYS_setrlimit => first,
            libc::SYS_prlimit64 if third != 0 && is_own_process(first) => second,
            _ => return,
        };
        if own_limit as u32 == libc::RLIMIT_STACK {
            loader::grow_stack(&self.machine);
        }
    }

    /// Makes a call whose arguments were checked, and in which the kernel may write as `writes`
    /// says.
    pub(crate) fn interruptible(&self, call: &Call, writes: Writes) -> i64 {
        let _announced = self.announcer.announce(&self.machine, writes);
        // SAFETY: descriptors of the monitor and addresses of its memory were refused, so that the
        // call concerns the program's memory and descriptors, or buffers of the caller.
        unsafe { host_call::interruptible(call, self.slot.flag()) }
    }

    /// Whether the program's string at `address` is the link to its own program in `/proc`, which
    /// leads to the monitor.
    pub(crate) fn names_own_program(&self, address: u64) -> bool {
        let mut start = [0; 6];
        if program_memory::read(address, &mut start).is_err() || start != *b"/proc/" {
            return false;
        }
        let Ok(Some(path)) = program_memory::read_string(address, 64) else { return false };
        let Some(of) = path.strip_prefix(b"/proc/").and_then(|rest| rest.strip_suffix(b"/exe")) else { return false };
        of == b"self" || of == b"thread-self" || of == std::process::id().to_string().as_bytes()
    }

    fn readlink(&mut self, call: Call, path: u64, buffer: u64, len: u64) -> Result<Outcome, Refusal> {
        if self.names_own_program(path) {
            let target = self.process.program().to_bytes();
            let len = (len as i32).max(0) as usize;
            if len == 0 {
                return Err(libc::EINVAL.into());
            }
            let target = &target[..target.len().min(len)];
            self.write(buffer, target)?;
            return Ok(Outcome::Return(target.len() as i64));
        }
        if files::is_monitor(path) || files::is_monitor(buffer) {
            return Err(libc::EFAULT.into());
        }
        if call.number == libc::SYS_readlinkat as u64 {
            files::descriptor(call.arguments[0])?;
        }
        Ok(self.interruptible(&call, Writes::to(buffer, len)).into())
    }

    fn close_range(&mut self, call: Call) -> Result<Outcome, Refusal> {
        let [first, last, flags, ..] = call.arguments;
        if first as u32 > last as u32 {
            return Err(libc::EINVAL.into());
        }
        for (first, last) in files::ranges_of_program(first as u32, last as u32) {
            let part = Call { arguments: [u64::from(first), u64::from(last), flags, 0, 0, 0], ..call };
            let result = self.interruptible(&part, Writes::NONE);
            if result != 0 {
                return Ok(result.into());
            }
        }
        Ok(Outcome::Return(0))
    }
}
