//! The terminal of a person who types to a machine that is recorded.

use std::io::{self, IsTerminal};

use nix::sys::termios::{InputFlags, LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

use crate::failure::Failure;

/// A terminal at standard input that gives each key at once, and shows none: the machine does. The
/// keys that end or stop a program still do. Dropped, it is as before.
pub struct MachineTerminal {
    before: Termios,
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
        Ok(Some(MachineTerminal { before }))
    }
}

impl Drop for MachineTerminal {
    fn drop(&mut self) {
        // If it is gone, there is nothing to put back.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.before);
    }
}
