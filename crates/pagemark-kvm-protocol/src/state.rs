//! What a process has of its machine, and of each virtual CPU.

/// The value of [`Header::state`](crate::description::Header::state).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum MachineState {
    /// The machine is there.
    Running = 0,
    /// There is no machine. A thread that needs it waits.
    Parked = 1,
    /// There is no machine. A thread that needs it makes it.
    Released = 2,
    /// The machine is there, and is about to be given up: a thread that is to begin to use it
    /// otherwise than to run waits.
    Closing = 3,
    /// There is no machine, and none is made: each thread waits where it would enter it, until all
    /// do. Set in place of [`MachineState::Released`] before a restored process runs.
    Leaving = 4,
    /// All threads wait. One of them gives the process what the program has, and sets
    /// [`MachineState::Prepared`].
    Preparing = 5,
    /// The process has all that the program has. The monitor opens and maps nothing any more.
    Prepared = 6,
    /// The threads continue the program outside of the machine.
    Left = 7,
}

impl MachineState {
    const ALL: [MachineState; 8] = {
        use MachineState::{Closing, Leaving, Left, Parked, Prepared, Preparing, Released, Running};
        [Running, Parked, Released, Closing, Leaving, Preparing, Prepared, Left]
    };

    /// The state of that number. None if it has no state: the process itself may have written it.
    pub fn of(word: u32) -> Option<MachineState> {
        MachineState::ALL.into_iter().find(|state| state.word() == word)
    }

    /// Its number.
    pub const fn word(self) -> u32 {
        self as u32
    }

    /// True if the process continues without the machine, and makes none.
    pub fn leaves(self) -> bool {
        matches!(self, MachineState::Leaving | MachineState::Preparing | MachineState::Prepared | MachineState::Left)
    }

    /// The state of a process that is no longer to give up its machine. None if it is not to.
    pub fn released(self) -> Option<MachineState> {
        match self {
            MachineState::Parked => Some(MachineState::Released),
            // It has its machine still.
            MachineState::Closing => Some(MachineState::Running),
            _ => None,
        }
    }
}

/// The value of [`VcpuEntry::descriptor_state`](crate::description::VcpuEntry::descriptor_state).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum DescriptorState {
    /// The descriptor of the virtual CPU is closed.
    Closed = 0,
    /// The descriptor is that of the virtual CPU.
    Open = 1,
    /// The descriptor is another one of KVM, which keeps its number.
    Reserved = 2,
}

impl DescriptorState {
    /// Its number.
    pub const fn word(self) -> u32 {
        self as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_their_numbers() {
        for (number, state) in (0..).zip(MachineState::ALL) {
            assert_eq!((state.word(), MachineState::of(number)), (number, Some(state)));
        }
        assert_eq!(MachineState::of(8), None);
        assert_eq!(MachineState::Leaving.released(), None);
    }
}
