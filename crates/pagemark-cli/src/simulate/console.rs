//! The terminal of a person who types to a machine that is recorded.

use std::io::{self, IsTerminal};

use nix::sys::termios::{InputFlags, LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};

use crate::failure::Failure;

/// A terminal at standard input that gives each key at once, and shows none: the machine does. The
/// keys that end or stop a program still do. Dropped, it is as before.
pub struct MachineTerminal {
    mode: Mode,
}

/// The modes of the terminal: before, and for a machine.
#[derive(Clone, Copy)]
pub struct Mode {
    before: libc::termios,
    machine: libc::termios,
}

impl MachineTerminal {
    /// None if standard input is no terminal.
    pub fn new() -> Result<Option<MachineTerminal>, Failure> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let failed = |error: nix::errno::Errno| Failure::new("cannot set the mode of the terminal", error);
        let before = tcgetattr(&stdin).map_err(failed)?;
        let mut mode = before.clone();
        mode.local_flags.remove(LocalFlags::ECHO | LocalFlags::ECHONL | LocalFlags::ICANON | LocalFlags::IEXTEN);
        mode.input_flags.remove(InputFlags::ICRNL | InputFlags::INLCR | InputFlags::IGNCR | InputFlags::IXON);
        tcsetattr(&stdin, SetArg::TCSADRAIN, &mode).map_err(failed)?;
        Ok(Some(MachineTerminal { mode: Mode { before: before.into(), machine: mode.into() } }))
    }

    /// What sets its mode while the command is stopped and continued.
    pub fn mode(&self) -> Mode {
        self.mode
    }
}

impl Drop for MachineTerminal {
    fn drop(&mut self) {
        self.mode.set(true);
    }
}

impl Mode {
    /// Gives the terminal back as it was, or has it for the machine again: a shell has used it
    /// meanwhile. In the background it is another program's, and the kernel would stop this one.
    pub fn set(self, is_back: bool) {
        let stdin = io::stdin();
        // Where there is no job control, nobody else has it.
        if tcgetpgrp(&stdin).is_ok_and(|group| group != getpgrp()) {
            return;
        }
        let mode = if is_back { self.before } else { self.machine };
        // If it is gone, there is nothing to set.
        let _ = tcsetattr(stdin, SetArg::TCSADRAIN, &Termios::from(mode));
    }
}
