//! When a thread gets SIGBUS for memory that the hardware has lost (`PR_MCE_KILL`), by the flags in
//! its `stat` file.

use std::io;

use super::stat;

/// The field of `stat` with the flags of a task, and those that are meant, as they are since Linux
/// 2.6.32.
const FLAGS_FIELD: usize = 9;
const PF_MCE_PROCESS: u64 = 0x80;
const PF_MCE_EARLY: u64 = 0x0800_0000;

/// When a thread gets SIGBUS for lost memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub enum MemoryFailureSignal {
    /// As the system decides (`vm.memory_failure_early_kill`).
    #[default]
    Default,
    /// When the loss is noticed.
    Early,
    /// When it reads the memory.
    Late,
}

impl MemoryFailureSignal {
    /// What a thread has chosen.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH`: there is no such thread.
    pub fn of_thread(thread: i32) -> io::Result<MemoryFailureSignal> {
        let text = super::read(thread, "stat")?;
        let flags = stat::number(&text, FLAGS_FIELD).ok_or(io::ErrorKind::InvalidData)?;
        Ok(match (flags & PF_MCE_PROCESS != 0, flags & PF_MCE_EARLY != 0) {
            (false, _) => MemoryFailureSignal::Default,
            (true, true) => MemoryFailureSignal::Early,
            (true, false) => MemoryFailureSignal::Late,
        })
    }

    /// The arguments of the `prctl` by which a thread chooses it.
    pub fn prctl_arguments(self) -> [u64; 6] {
        let set = |choice: libc::c_int| [libc::PR_MCE_KILL, libc::PR_MCE_KILL_SET, choice, 0, 0, 0];
        let arguments = match self {
            MemoryFailureSignal::Default => [libc::PR_MCE_KILL, libc::PR_MCE_KILL_CLEAR, 0, 0, 0, 0],
            MemoryFailureSignal::Early => set(libc::PR_MCE_KILL_EARLY),
            MemoryFailureSignal::Late => set(libc::PR_MCE_KILL_LATE),
        };
        arguments.map(|argument| argument as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_what_it_chooses() {
        let looks = std::thread::spawn(|| {
            let thread = nix::unistd::gettid().as_raw();
            let all = [MemoryFailureSignal::Early, MemoryFailureSignal::Late, MemoryFailureSignal::Default];
            for chosen in all {
                let [option, a, b, c, d, _] = chosen.prctl_arguments();
                // SAFETY: the call takes numbers, and concerns this thread alone.
                if unsafe { libc::prctl(option as libc::c_int, a, b, c, d) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                assert_eq!(MemoryFailureSignal::of_thread(thread).unwrap(), chosen);
            }
            Ok(())
        });
        if let Err(error) = looks.join().unwrap() {
            pagemark_testing::skipped(&format!("the kernel does not handle memory failures: {error}"));
        }
    }
}
