//! The call by which the library in the program uses the machine's trackers
//! (`pagemark_kvm_protocol::machine_calls`).

use pagemark_kvm_protocol::machine_calls::{
    ARRANGE, CHECK, COLLECT, COUNT, FORGET, MEANS, MOST_ARRANGED, Means, Move, READ, Run, TRACK, VIEWS,
};

use crate::layout::{PAGE, is_program};
use crate::sys::program_memory;
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
        if matches!(operation, VIEWS | READ | ARRANGE) && means != Means::Log {
            return Err(libc::EOPNOTSUPP.into());
        }
        if operation == ARRANGE {
            // The arguments are two lists, and their lengths.
            return self.arrange((start, end), (to, len));
        }
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
            VIEWS => self.machine.declare_views(start, end, to)?,
            READ => {
                let runs = self.machine.read_views(start, end, len.min(MOST_RUNS) as usize)?;
                let words: Vec<u64> = runs.iter().flat_map(|Run { start, end }| [*start, *end]).collect();
                if self.write_words(to, &words).is_err() {
                    self.machine.put_back_views(&runs);
                    return Err(libc::EFAULT.into());
                }
                return Ok(runs.len() as i64);
            }
            _ => return Err(libc::EINVAL.into()),
        }
        Ok(0)
    }

    fn arrange(&self, moves: (u64, u64), armed: (u64, u64)) -> Result<i64, Refusal> {
        let pairs = |(at, len): (u64, u64)| -> Result<Vec<[u64; 2]>, Refusal> {
            if len > MOST_ARRANGED as u64 {
                return Err(libc::EINVAL.into());
            }
            let words = program_memory::read_words(at, 2 * len as usize)?;
            Ok(words.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect())
        };
        let moves: Vec<Move> = pairs(moves)?.into_iter().map(|[page, to]| Move { page, to }).collect();
        let armed: Vec<Run> = pairs(armed)?.into_iter().map(|[start, end]| Run { start, end }).collect();
        self.machine.arrange(&moves, &armed)?;
        Ok(0)
    }
}
