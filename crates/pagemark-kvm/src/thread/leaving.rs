//! A restored process continues without its machine: each thread takes the program's registers, and
//! the kernel gets what the monitor has kept for the program. See
//! [`pagemark_kvm_protocol::description`].

use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pagemark_linux::proc::maps;

use super::Thread;
use super::calls::signal::{Frame, save_state};
use crate::layout::PROGRAM_START;
use crate::sys::arguments::{self, ProgramMap};
use crate::sys::signals::INFO_BYTES;
use crate::sys::{descriptors, leaving, limits, program_memory};

/// The vector state begins at a multiple of it.
const STATE_ALIGN: usize = 64;

impl Thread {
    /// Continues the program outside of the machine, with the signal mask `mask`. All signals are
    /// blocked, and none waits.
    pub(super) fn leave(&mut self, mask: u64) -> ! {
        drop(self.use_kvm());
        let state = match save_state(&self.vcpu) {
            Ok(state) => state,
            Err(error) => self.fail(&error.to_string()),
        };
        let (registers, fs, gs) = self.vcpu.state();
        // Whoever has restored the process unmaps it.
        let room = Vec::leak(vec![0; STATE_ALIGN + state.len() + Frame::BYTES]);
        let (_, room) = room.split_at_mut(room.as_ptr().align_offset(STATE_ALIGN));
        let (state_place, frame_place) = room.split_at_mut(state.len());
        state_place.copy_from_slice(&state);
        let state_at = state_place.as_ptr() as u64;
        let frame = Frame { registers, mask, alternate: self.alternate, state_at };
        frame_place[..Frame::BYTES].copy_from_slice(&frame.bytes(0, self.last_fault, &[0; INFO_BYTES]));
        if let Err(error) = leaving::forget_monitor(self.clear_tid) {
            self.fail(&format!("the kernel still uses memory of the monitor (rseq): {error}"));
        }
        let parking = *self.machine.parking();
        // From here on, what this thread has mapped is found, and nothing is mapped any more.
        if let Err(error) = parking.wait_to_leave(|| self.prepare_to_leave()) {
            self.fail(&format!("the program cannot go on outside: {error}"));
        }
        // SAFETY: the frame is complete, and stays. All that the thread has in this process is
        // abandoned.
        unsafe { leaving::go_on(frame_place.as_ptr() as u64, fs, gs, parking.left()) }
    }

    /// The kernel gets the process's part of what the monitor has kept. No other thread does
    /// anything.
    fn prepare_to_leave(&self) -> io::Result<()> {
        self.machine.take_clock_outside();
        let heap = {
            let space = self.machine.space();
            space.heap_start..space.heap_end
        };
        let stack = self.process.stack();
        let path = Path::new(std::ffi::OsStr::from_bytes(self.process.program().to_bytes()));
        let [code, data] = parts_of(path)?;
        let auxiliary = auxiliary_vector(stack).unwrap_or_default();
        // Without this right of the kernel's (CONFIG_CHECKPOINT_RESTORE) the heap does not grow any more,
        // which programs can handle.
        let _ = arguments::leave_to_program(&ProgramMap { code, data, heap, stack, auxiliary });
        // SAFETY: the descriptors of KVM are closed already, and nothing of the monitor goes on.
        unsafe { descriptors::close_all_but(&[]) };
        limits::end();
        self.process.leave_actions().map_err(io::Error::from_raw_os_error)
    }
}

/// Where the code and the data of the file at `path` are mapped. Where it is not mapped, what the
/// kernel accepts.
fn parts_of(path: &Path) -> io::Result<[Range<u64>; 2]> {
    let mut parts = [PROGRAM_START..PROGRAM_START + 1, PROGRAM_START..PROGRAM_START + 1];
    let all = maps::of_this_process()?;
    let of_file = all.iter().filter(|mapping| mapping.name == path.as_os_str().as_bytes());
    for mapping in of_file {
        let part = if mapping.executable {
            &mut parts[0]
        } else if mapping.writable {
            &mut parts[1]
        } else {
            continue;
        };
        *part = mapping.start.get()..mapping.end.get();
    }
    Ok(parts)
}

/// The auxiliary vector behind the arguments and the environment at `stack`, where the program
/// began. None if it is not there any more.
fn auxiliary_vector(stack: u64) -> Option<Vec<u64>> {
    const MOST_WORDS: usize = 1 << 20;
    const MOST_ENTRIES: usize = 40;
    let word = |index: usize| Some(program_memory::read_words(stack + 8 * index as u64, 1).ok()?[0]);
    let count = usize::try_from(word(0)?).ok().filter(|count| *count < MOST_WORDS)?;
    // Zeros end the arguments, and the environment.
    let end_of_environment = (count + 2..MOST_WORDS).find(|&index| word(index).is_none_or(|word| word == 0))?;
    let first = end_of_environment + 1;
    let mut vector = Vec::new();
    for entry in 0..MOST_ENTRIES {
        let pair = [word(first + 2 * entry)?, word(first + 2 * entry + 1)?];
        vector.extend(pair);
        if pair[0] == libc::AT_NULL {
            return Some(vector);
        }
    }
    None
}
