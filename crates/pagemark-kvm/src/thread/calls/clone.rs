//! New threads and processes.

use std::sync::{Arc, Mutex, PoisonError, mpsc};

use crate::layout::USER_END;
use crate::machine::Machine;
use crate::machine::tracking::Announcer;
use crate::sys::birth::{Birth, Made};
use crate::sys::owned_lock::own_id;
use crate::sys::program_memory::{self, Fault};
use crate::sys::signals::{self, Slot};
use crate::sys::{child, descriptors};
use crate::thread::Thread;

use super::{Outcome, Refusal, files, os_error};

const CLONE_VM: u64 = libc::CLONE_VM as u64;
const CLONE_THREAD: u64 = libc::CLONE_THREAD as u64;
const CLONE_VFORK: u64 = libc::CLONE_VFORK as u64;
/// What the threads of a process share: all of it, as with the threads of C libraries.
const SHARED: u64 = CLONE_VM | CLONE_THREAD | (libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND) as u64;
/// Flags that only say where numbers are written, or do nothing more.
const NOTES: u64 = (libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID
    | libc::CLONE_SETTLS
    | libc::CLONE_SYSVSEM
    | libc::CLONE_DETACHED
    | libc::CLONE_PTRACE
    | libc::CLONE_UNTRACED) as u64;
/// Signal actions become the default in the child (`clone3`).
const CLONE_CLEAR_SIGHAND: u64 = 1 << 32;
/// Host stack of a thread or child. Nothing of the program lies on it.
const STACK_BYTES: usize = 512 << 10;

/// What `clone` and `clone3` say.
#[derive(Clone, Copy, Debug)]
pub struct Clone {
    flags: u64,
    exit_signal: u64,
    /// The child's stack pointer; 0 for that of the parent.
    stack: u64,
    parent_tid: u64,
    child_tid: u64,
    tls: u64,
    pidfd: u64,
}

impl Clone {
    /// The arguments of `clone`.
    pub fn of_clone([flags, stack, parent_tid, child_tid, tls, _]: [u64; 6]) -> Clone {
        // The place of the process descriptor is that of the parent's number.
        Clone {
            flags: flags & 0xffff_ff00,
            exit_signal: flags & 0xff,
            stack,
            parent_tid,
            child_tid,
            tls,
            pidfd: parent_tid,
        }
    }

    /// `fork`, or `vfork`.
    pub fn of_fork(shares: bool) -> Clone {
        let flags = if shares { CLONE_VM | CLONE_VFORK } else { 0 };
        Clone { flags, exit_signal: libc::SIGCHLD as u64, stack: 0, parent_tid: 0, child_tid: 0, tls: 0, pidfd: 0 }
    }

    /// The arguments of `clone3`: a structure.
    pub fn of_clone3(address: u64, size: u64) -> Result<Clone, Refusal> {
        if size < 64 {
            return Err(libc::EINVAL.into());
        }
        let words = program_memory::read_words(address, (size.min(88) / 8) as usize)?;
        let [flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls] = words[..8] else {
            return Err(libc::EINVAL.into());
        };
        if size > 88 || words[8..].iter().any(|word| *word != 0) {
            return Err(Refusal::lacking(libc::EINVAL, "numbers or a control group for the child"));
        }
        let stack = if stack == 0 { 0 } else { stack.wrapping_add(stack_size) };
        Ok(Clone { flags, exit_signal, stack, parent_tid, child_tid, tls, pidfd })
    }

    fn has(&self, flag: i32) -> bool {
        self.flags & flag as u32 as u64 != 0
    }

    /// Writes the child's number where the flags say, as far as it can be written.
    fn note(&self, thread: &Thread, is_child: bool, id: u32) {
        let bytes = id.to_le_bytes();
        if is_child && self.has(libc::CLONE_CHILD_SETTID) {
            let _: Result<(), Fault> = thread.write(self.child_tid, &bytes);
        }
        if !is_child && self.has(libc::CLONE_PARENT_SETTID) {
            let _: Result<(), Fault> = thread.write(self.parent_tid, &bytes);
        }
    }
}

impl Thread {
    /// A new thread or process.
    pub(super) fn clone(&mut self, clone: Clone) -> Result<Outcome, Refusal> {
        if [clone.parent_tid, clone.child_tid, clone.stack].into_iter().any(files::is_monitor) {
            return Err(libc::EFAULT.into());
        }
        let is_thread = clone.flags & CLONE_THREAD != 0;
        let shares = clone.flags & CLONE_VM != 0;
        let allowed = NOTES
            | match (is_thread, shares) {
                (true, _) => SHARED,
                (false, true) => CLONE_VM | CLONE_VFORK | CLONE_CLEAR_SIGHAND | libc::CLONE_PIDFD as u64,
                (false, false) => CLONE_VFORK | CLONE_CLEAR_SIGHAND | libc::CLONE_PIDFD as u64,
            };
        if clone.flags & !allowed != 0 {
            return Err(Refusal::lacking(libc::EINVAL, format!("flags {:#x}", clone.flags & !allowed)));
        }
        if is_thread && clone.flags & SHARED != SHARED {
            return Err(Refusal::lacking(libc::EINVAL, "threads that do not share everything"));
        }
        if !is_thread && shares && clone.flags & CLONE_VFORK == 0 {
            return Err(Refusal::lacking(libc::EINVAL, "processes that share memory and run at the same time"));
        }
        if clone.exit_signal > 64 {
            return Err(libc::EINVAL.into());
        }
        if clone.has(libc::CLONE_SETTLS) && clone.tls >= USER_END {
            return Err(libc::EPERM.into());
        }
        if !is_thread && !shares && clone.exit_signal != libc::SIGCHLD as u64 {
            return Err(Refusal::lacking(libc::EINVAL, format!("the exit signal {}", clone.exit_signal)));
        }
        // No signal may come between here and the child's first step.
        let mask = signals::mask(Some(u64::MAX));
        if self.slot.waits() {
            return Ok(Outcome::Restart);
        }
        let result = if is_thread {
            self.new_thread(&clone, mask)
        } else if shares {
            self.new_sharing(&clone, mask)
        } else {
            self.new_process(&clone)
        };
        signals::mask(Some(mask));
        Ok(Outcome::Return(i64::from(result?)))
    }

    /// Gives the program a descriptor of the child `id`, which has not begun, if it asks for one.
    fn give_descriptor(&self, clone: &Clone, id: u32) -> Result<(), Refusal> {
        if !clone.has(libc::CLONE_PIDFD) {
            return Ok(());
        }
        // SAFETY: makes a descriptor for the program.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, id, 0) } as i32;
        if fd < 0 {
            return Err(os_error(&std::io::Error::last_os_error()));
        }
        self.write(clone.pidfd, &fd.to_le_bytes()).map_err(|fault| {
            // SAFETY: made above, and not known to the program.
            unsafe { libc::close(fd) };
            fault.into()
        })
    }

    /// A thread of the program with a virtual CPU whose state is that of this one. It is not
    /// running.
    fn copy(&mut self, clone: &Clone) -> Result<Thread, Refusal> {
        let _in_use = self.use_kvm();
        Refusal::while_leaving(&self.machine)?;
        let copied = Thread::with(self.machine.clone(), self.process.clone()).and_then(|mut thread| {
            match thread.vcpu.copy_state(&mut self.vcpu) {
                Ok(()) => Ok(thread),
                Err(error) => {
                    thread.give_back();
                    Err(error)
                }
            }
        });
        let mut thread = copied.map_err(|error| Refusal::lacking(libc::EAGAIN, error.to_string()))?;
        thread.become_child(clone);
        thread.vcpu.commit();
        Ok(thread)
    }

    /// The registers of a child: those of its parent, but for what the call says.
    fn become_child(&mut self, clone: &Clone) {
        self.vcpu.registers().rax = 0;
        if clone.stack != 0 {
            self.vcpu.registers().rsp = clone.stack;
        }
        if clone.has(libc::CLONE_SETTLS) {
            *self.vcpu.bases().0 = clone.tls;
        }
        self.clear_tid = if clone.has(libc::CLONE_CHILD_CLEARTID) { clone.child_tid } else { 0 };
    }

    /// The thread has ended, or does not begin: another one may have its virtual CPU.
    fn give_back(self) {
        let Thread { machine, vcpu, announcer, .. } = self;
        // It announces at the place of the virtual CPU.
        drop(announcer);
        machine.put_vcpu(vcpu);
    }

    fn new_thread(&mut self, clone: &Clone, mask: u64) -> Result<u32, Refusal> {
        // If there is no thread of the host for it, it is taken back.
        let thread = Arc::new(Mutex::new(Some(self.copy(clone)?)));
        let take = |from: &Mutex<Option<Thread>>| from.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (send, receive) = mpsc::sync_channel(1);
        let (clone, passed) = (*clone, thread.clone());
        let body = move || {
            let Some(mut thread) = take(&passed) else { return };
            // Before another thread of the program can send this one a signal.
            thread.process.keep_actions();
            let id = own_id();
            clone.note(&thread, true, id);
            clone.note(&thread, false, id);
            let _ = send.send(id);
            // All signals are blocked until the thread has its slot.
            thread.run_with_mask(mask);
            thread.give_back();
        };
        self.process.add_thread();
        let builder = std::thread::Builder::new().stack_size(STACK_BYTES);
        if let Err(error) = builder.spawn(body) {
            self.process.end_thread(false, 0);
            take(&thread).into_iter().for_each(Thread::give_back);
            return Err(os_error(&error));
        }
        receive.recv().map_err(|_| Refusal::from(libc::EAGAIN))
    }

    /// `vfork`: a process that shares this memory, and that this thread waits for until it executes
    /// a program or ends. It runs on another virtual CPU of the same machine.
    fn new_sharing(&mut self, clone: &Clone, mask: u64) -> Result<u32, Refusal> {
        // The child is not counted as a user of KVM: it could be killed before it is done.
        let in_use = self.use_kvm();
        let mut thread = self.copy(clone)?;
        thread.process = Arc::new(self.process.copy());
        thread.alternate = self.alternate;
        let clone = *clone;
        let mut limit = Some(descriptors::keep_limit());
        let mut body = || {
            drop(limit.take());
            clone.note(&thread, true, own_id());
            if clone.flags & CLONE_CLEAR_SIGHAND != 0 {
                thread.process.clear_actions();
            }
            thread.run_with_mask(mask);
        };
        let mut pidfd = -1;
        let wanted = clone.has(libc::CLONE_PIDFD).then_some(&mut pidfd);
        let result = child::sharing_memory(&mut body, STACK_BYTES, clone.exit_signal as i32, wanted);
        in_use.child_has_ended();
        drop(limit.take());
        // The child has taken this thread's place in the thread-local storage that both have.
        // SAFETY: as in `run`.
        unsafe { self.slot.make_current() };
        let id = result.map_err(|error| os_error(&error))?;
        // The child may have been killed at any instant.
        if let Err(error) = self.machine.take_over(id) {
            self.fail(&error.to_string());
        }
        let cleared = thread.clear_tid;
        thread.give_back();
        clone.note(self, false, id);
        // The kernel does so when the child gives up the memory, however it does.
        if cleared != 0 && self.write(cleared, &[0; 4]).is_ok() {
            self.wake(cleared);
        }
        if clone.has(libc::CLONE_PIDFD) {
            self.write(clone.pidfd, &pidfd.to_le_bytes())?;
        }
        Ok(id)
    }

    /// `fork`: the child's memory is a copy, and it makes a machine of its own. Without one, the
    /// call fails in the parent.
    fn new_process(&mut self, clone: &Clone) -> Result<u32, Refusal> {
        let in_use = self.use_kvm();
        Refusal::while_leaving(&self.machine)?;
        let state = self.vcpu.state();
        let vector = self.vcpu.vector_state().map_err(|error| Refusal::lacking(libc::EAGAIN, error.to_string()))?;
        let birth = Birth::new().map_err(|error| os_error(&error))?;
        let machine = self.machine.clone();
        let process = self.process.clone();
        let space = machine.space();
        let locks = process.lock_for_fork();
        let kept = [machine.device(), process.monitor(), process.program_file()];
        let tracker = machine.tracker();
        let limit = descriptors::keep_limit();
        let id = child::fork().map_err(|error| os_error(&error))?;
        if id != 0 {
            drop((limit, space, locks));
            self.wait_for_child(clone, &birth, id)?;
            clone.note(self, false, id);
            return Ok(id);
        }
        // SAFETY: what used the descriptors is forgotten below.
        unsafe { descriptors::close_all_but(&kept) };
        machine.begin_child(&in_use, tracker);
        drop((limit, space, locks));
        let renewed = self.renew(&machine, &state, &vector);
        drop(in_use);
        if let Err(error) = renewed {
            birth.fail(&format!("a child has no machine: {error}"));
        }
        birth.has_machine(clone.has(libc::CLONE_PIDFD));
        // The parent's machine: its descriptors are closed, and its virtual CPUs not mapped here.
        std::mem::forget(machine);
        self.become_child(clone);
        if clone.flags & CLONE_CLEAR_SIGHAND != 0 {
            self.process.clear_actions();
        }
        clone.note(self, true, own_id());
        Ok(0)
    }

    /// Waits until the child `id` has a machine.
    fn wait_for_child(&self, clone: &Clone, birth: &Birth, id: u32) -> Result<(), Refusal> {
        match birth.wait_for_machine(id) {
            Made::Ready => {}
            Made::Failed(reason) => return Err(Refusal::lacking(libc::EAGAIN, reason)),
            // By a signal, as it can be at any time.
            Made::Ended => return self.give_descriptor(clone, id),
        }
        let given = self.give_descriptor(clone, id);
        if clone.has(libc::CLONE_PIDFD) {
            birth.decide(id, given.is_ok());
        }
        given
    }

    /// In a child made by `fork`: a machine and a virtual CPU of its own.
    fn renew(
        &mut self,
        parent: &Machine,
        state: &(kvm_bindings::kvm_regs, u64, u64),
        vector: &kvm_bindings::kvm_xsave,
    ) -> Result<(), crate::error::Error> {
        self.process.has_one_thread();
        // SAFETY: the parent's machine is forgotten below, and by the caller.
        let machine = unsafe { Machine::after_fork(parent) }?;
        let mut vcpu = machine.take_vcpu()?;
        machine.try_vcpu(&mut vcpu)?;
        vcpu.set_state(state, vector)?;
        let slot = Slot::new(vcpu.immediate_exit());
        // SAFETY: as in `run`; all signals are blocked.
        unsafe { slot.make_current() };
        self.slot = slot;
        let announcer = Announcer::new(&machine, vcpu.number());
        // The parent's, which may be of the same number: the new machine knows nothing of it.
        std::mem::forget(std::mem::replace(&mut self.announcer, announcer));
        std::mem::forget(std::mem::replace(&mut self.machine, machine));
        std::mem::forget(std::mem::replace(&mut self.vcpu, vcpu));
        Ok(())
    }
}
