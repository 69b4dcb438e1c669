//! The call by which the library in the program uses the machine's trackers
//! (`pagemark::sys::own_machine`).

use pagemark::sys::own_machine::{CHECK, COLLECT, COUNT, FORGET, MEANS, Run, TRACK};

use crate::layout::{PAGE, is_program};
use crate::thread::Thread;

use super::Refusal;

/// Most runs that one call returns.
const MOST_RUNS: u64 = 4096;

impl Thread {
    /// The machine's own call.
    pub(super) fn track(&self, [operation, means, start, end, to, len]: [u64; 6]) -> Result<i64, Refusal> {
        if operation == COUNT {
            let words = self.machine.counts().words();
            if len.saturating_mul(2) < words.len() as u64 {
                return Err(libc::EINVAL.into());
            }
            self.write_words(to, &words)?;
            return Ok(0);
        }
        let means = *MEANS.get(means as usize).ok_or(libc::EOPNOTSUPP)?;
        // A collect may go on at a word.
        let unit = if operation == COLLECT { means.unit() } else { PAGE };
        let is_pages = start.is_multiple_of(unit) && end.is_multiple_of(PAGE) && start < end;
        if operation != CHECK && (!is_pages || !is_program(start, end - start)) {
            return Err(libc::EINVAL.into());
        }
        match operation {
            CHECK => self.machine.check_means(means)?,
            TRACK => self.machine.track(means, start, end)?,
            FORGET => self.machine.forget(means, start, end),
            COLLECT => {
                let runs = self.machine.collect(means, start, end, len.min(MOST_RUNS) as usize)?;
                let words: Vec<u64> = runs.iter().flat_map(|Run { start, end }| [*start, *end]).collect();
                if self.write_words(to, &words).is_err() {
                    self.machine.put_back(means, &runs);
                    return Err(libc::EFAULT.into());
                }
                return Ok(runs.len() as i64);
            }
            _ => return Err(libc::EINVAL.into()),
        }
        Ok(0)
    }
}
