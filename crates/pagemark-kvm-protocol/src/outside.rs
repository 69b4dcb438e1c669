//! The description of a machine, read and changed from outside of its process.

use std::io;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;

use pagemark_linux::{Address, proc};

use crate::description::{ADDRESS, Header, MAGIC};
use crate::state::MachineState;

/// The description in the memory of a process.
#[derive(Clone, Copy, Debug)]
pub struct ProcessDescription {
    pid: i32,
}

impl ProcessDescription {
    /// That of a process, which may have none.
    pub fn of(pid: i32) -> ProcessDescription {
        ProcessDescription { pid }
    }

    /// True if the process runs in a machine.
    pub fn is_there(self) -> bool {
        self.both(offset_of!(Header, magic)).is_ok_and(|word| word == MAGIC)
    }

    /// Where the file of the program has its first instruction. None if there is no machine, or no
    /// program in it yet.
    pub fn program_entry(self) -> Option<Address> {
        if !self.is_there() {
            return None;
        }
        self.both(offset_of!(Header, program_entry)).ok().filter(|&entry| entry != 0).map(Address::new)
    }

    /// The end of the program's addresses. What lies behind is the monitor's.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn program_end(self) -> io::Result<u64> {
        self.both(offset_of!(Header, program_end))
    }

    /// What the process has of its machine. None if it says what no monitor says.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn state(self) -> io::Result<Option<MachineState>> {
        self.word(offset_of!(Header, state)).map(MachineState::of)
    }

    /// Sets the state.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn set_state(self, state: MachineState) -> io::Result<()> {
        self.set_word(offset_of!(Header, state), state.word())
    }

    /// The process is no longer to give up its machine, or may make it again.
    ///
    /// # Errors
    /// The memory cannot be accessed.
    pub fn release(self) -> io::Result<()> {
        // A process that could not be parked has its machine.
        self.state()?.and_then(MachineState::released).map_or(Ok(()), |state| self.set_state(state))
    }

    /// Marks a released process, which does not run: it leaves its machine. `parker` is the id
    /// there of this process, or 0.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn begin_leaving(self, parker: i32) -> io::Result<()> {
        self.set_word(offset_of!(Header, parker), parker.cast_unsigned())?;
        for offset in [offset_of!(Header, waiting), offset_of!(Header, left)] {
            self.set_word(offset, 0)?;
        }
        self.set_state(MachineState::Leaving)
    }

    /// How many threads wait to continue outside of the machine.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn waiting(self) -> io::Result<u32> {
        self.word(offset_of!(Header, waiting))
    }

    /// How many of them need the monitor no more.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn left(self) -> io::Result<u32> {
        self.word(offset_of!(Header, left))
    }

    /// Where a thread of the monitor makes a call that may block, and where it goes on instead.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn blocking_call(self) -> io::Result<[u64; 2]> {
        let at = offset_of!(Header, blocking_call);
        Ok([self.both(at)?, self.both(at + 8)?])
    }

    fn word(self, offset: usize) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes).map(|()| u32::from_ne_bytes(bytes))
    }

    /// The word and the next one, as one number.
    fn both(self, offset: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes).map(|()| u64::from_ne_bytes(bytes))
    }

    fn read(self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        proc::open_memory(self.pid)?.read_exact_at(bytes, ADDRESS + offset as u64)
    }

    fn set_word(self, offset: usize, word: u32) -> io::Result<()> {
        proc::open_memory_for_writing(self.pid)?.write_all_at(&word.to_ne_bytes(), ADDRESS + offset as u64)
    }
}
