//! Programs that are checkpointed apart from the test that starts them.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// The program will lead a session of its own. A process whose session was begun outside of the pid
/// namespace of the tests cannot be saved, and a test runner in a container is in such a session.
pub fn in_own_session(command: &mut Command) -> &mut Command {
    // SAFETY: `setsid` alone is called between fork and exec, which is allowed there.
    unsafe { command.pre_exec(|| Ok(nix::unistd::setsid().map(drop)?)) }
}
