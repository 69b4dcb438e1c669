//! What a dump saves.

use pagemark_trace::cgroups::Cgroups;

/// What to save, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DumpOptions {
    /// Saves established TCP connections too. Without it they are restored closed, and never
    /// disturbed by the dump.
    pub keep_connections: bool,
    /// What becomes of control groups.
    pub cgroups: Cgroups,
    /// Saves the interfaces, addresses, routes, rules and settings of the network, if the tree has
    /// one of its own. CRIU executes some ten programs for it in the freeze.
    pub save_network: bool,
    /// Saves a program that confines itself, or has keys of its own, in a way that no restore gives
    /// back. Without it, such a program is refused.
    pub without_sandbox: bool,
}
