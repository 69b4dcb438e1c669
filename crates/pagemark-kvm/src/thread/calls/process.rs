//! System calls on the process and its threads.

use crate::layout::{PROGRAM_END, is_program};
use crate::sys::host_call::Call;
use crate::sys::{limits, program_memory};
use crate::thread::Thread;
use crate::writes::Writes;

use super::{Outcome, Refusal, files, os_error};

const ARCH_SET_GS: u64 = 0x1001;
const ARCH_SET_FS: u64 = 0x1002;
const ARCH_GET_FS: u64 = 0x1003;
const ARCH_GET_GS: u64 = 0x1004;

const PR_SET_VMA: u64 = 0x5356_4d41;
const PR_GET_TID_ADDRESS: u64 = 40;
/// Operations of `prctl` that concern the process alone, and whose second argument is a number.
const PRCTL_VALUES: [u64; 24] =
    [1, 3, 4, 7, 8, 15, 21, 23, 24, 27, 28, 29, 30, 31, 32, 33, 34, 36, 38, 39, 41, 42, 47, 0x5961_6d61];
/// Operations whose second argument is an address to which the kernel writes.
const PRCTL_POINTERS: [u64; 4] = [2, 16, 25, 37];

/// The most that the kernel writes for one of them: the name of the thread.
const NAME_BYTES: u64 = 16;

impl Thread {
    /// `arch_prctl`.
    pub(super) fn arch_prctl(&mut self, operation: u64, value: u64) -> Result<i64, Refusal> {
        let (fs, gs) = self.vcpu.bases();
        let (mut get, mut set) = (None, None);
        match operation {
            ARCH_SET_FS => set = Some(fs),
            ARCH_SET_GS => set = Some(gs),
            ARCH_GET_FS => get = Some(*fs),
            ARCH_GET_GS => get = Some(*gs),
            // Features that C libraries ask for, such as shadow stacks: there are none here.
            _ => return Err(libc::EINVAL.into()),
        }
        if let Some(base) = set {
            if value >= crate::layout::USER_END {
                return Err(libc::EPERM.into());
            }
            *base = value;
        }
        if let Some(base) = get {
            self.write(value, &base.to_le_bytes())?;
        }
        Ok(0)
    }

    /// `prctl`.
    pub(super) fn prctl(&mut self, call: Call) -> Result<Outcome, Refusal> {
        let [operation, a, b, c, d, _] = call.arguments;
        match operation {
            PR_GET_TID_ADDRESS => {
                self.write(a, &self.clear_tid.to_le_bytes())?;
                Ok(Outcome::Return(0))
            }
            // The name of anonymous memory: its range, and the text.
            PR_SET_VMA if a == 0 => {
                if !is_program(b, c) || d >= PROGRAM_END {
                    return Err(libc::EINVAL.into());
                }
                Ok(self.interruptible(&call, Writes::NONE).into())
            }
            _ if PRCTL_POINTERS.contains(&operation) || PRCTL_VALUES.contains(&operation) => {
                if files::is_monitor(a) {
                    return Err(libc::EFAULT.into());
                }
                let writes = if PRCTL_POINTERS.contains(&operation) { Writes::to(a, NAME_BYTES) } else { Writes::NONE };
                Ok(self.interruptible(&call, writes).into())
            }
            _ => Err(Refusal::lacking(libc::EINVAL, format!("operation {operation}"))),
        }
    }

    /// Changes the limit of the address space, and says what it was.
    pub(super) fn limit_addresses(&mut self, new: u64, old: u64) -> Result<i64, Refusal> {
        if files::is_monitor(new) || files::is_monitor(old) {
            return Err(libc::EFAULT.into());
        }
        let limit = match new {
            0 => None,
            new => program_memory::read_words(new, 2)?.try_into().ok(),
        };
        let before = limits::change(limit).map_err(|error| os_error(&error))?;
        if old != 0 {
            self.write_words(old, &before)?;
        }
        Ok(0)
    }

    /// `set_tid_address`.
    pub(super) fn set_tid_address(&mut self, address: u64) -> i64 {
        self.clear_tid = address;
        // SAFETY: only asks.
        i64::from(unsafe { libc::gettid() })
    }
}
