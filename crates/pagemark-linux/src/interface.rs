//! Interfaces of the kernel that are newer than Linux 4.18, the oldest kernel that Pagemark
//! supports.
//!
//! The file of each interface has a constant of type [`Interface`], and the code that does without
//! it. Whether the kernel has an interface is probed when it is first needed, once in the life of
//! the program.

use std::io;
use std::sync::OnceLock;

use super::at_fork::hold_off;
use super::{
    access, confinement, fanotify, forks, mapping_flags, own_mappings, pagemap, pidfd, populate, room, userfaultfd,
};

/// An interface of the kernel that not every kernel has.
#[derive(Debug)]
pub struct Interface {
    /// Its name in the kernel's documentation.
    pub name: &'static str,
    /// The first version of Linux that has it: `6.7`.
    pub since: &'static str,
    /// What is slower, or not possible, on a kernel that lacks it: a sentence without a full stop.
    pub without: &'static str,
    probe: fn() -> io::Result<()>,
    /// The error number of the probe, or 0. Empty until a probe has an answer.
    found: OnceLock<i32>,
}

impl Interface {
    /// An interface that is there if `probe` succeeds.
    pub(super) const fn new(
        name: &'static str,
        since: &'static str,
        without: &'static str,
        probe: fn() -> io::Result<()>,
    ) -> Interface {
        Interface { name, since, without, probe, found: OnceLock::new() }
    }

    /// True if this process may use the interface.
    pub fn is_there(&self) -> bool {
        self.error_number() == 0
    }

    /// Why this process may not use the interface: the kernel lacks it, or a seccomp filter or a
    /// missing privilege refuses it. `None` if it may.
    pub fn refusal(&self) -> Option<io::Error> {
        Some(self.error_number()).filter(|&number| number != 0).map(io::Error::from_raw_os_error)
    }

    /// The error number of the probe, or 0.
    fn error_number(&self) -> i32 {
        if let Some(&number) = self.found.get() {
            return number;
        }
        let _forks = hold_off();
        let error = (self.probe)().err();
        let number = error.as_ref().map_or(0, |error| error.raw_os_error().unwrap_or(libc::ENOSYS));
        if error.as_ref().is_some_and(room::is_passing) {
            return number;
        }
        *self.found.get_or_init(|| number)
    }
}

/// Major and minor number of the kernel's version.
pub(super) fn kernel_version() -> io::Result<(u32, u32)> {
    let release = nix::sys::utsname::uname()?.release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    Ok((numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
}

/// Every interface, the newest first.
pub static ALL: [&Interface; 15] = [
    &own_mappings::QUERY,
    &pagemap::SCAN,
    &userfaultfd::WRITE_PROTECT_ASYNC,
    &userfaultfd::WRITE_PROTECT_UNPOPULATED,
    &mapping_flags::LIST,
    &confinement::VIEW,
    &userfaultfd::WRITE_PROTECT_SHARED,
    &populate::POPULATE,
    &pidfd::MADVISE,
    &fanotify::NAMES,
    &access::FACCESSAT2,
    &userfaultfd::WRITE_PROTECT,
    &pidfd::GET_DESCRIPTOR,
    &pidfd::OPEN,
    &forks::RECORDS,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_described_and_probed() {
        let version = |interface: &Interface| -> (u32, u32) {
            let (major, minor) = interface.since.split_once('.').unwrap();
            (major.parse().unwrap(), minor.parse().unwrap())
        };
        assert!(ALL.is_sorted_by_key(|interface| std::cmp::Reverse(version(interface))));
        let kernel = kernel_version().unwrap();
        for interface in ALL {
            assert!(!interface.without.is_empty() && !interface.without.ends_with('.'), "{}", interface.name);
            assert_eq!(interface.is_there(), interface.refusal().is_none());
            // A kernel of that version has it, unless the process is denied its use.
            if interface.is_there() {
                assert!(kernel >= version(interface), "{} on Linux {kernel:?}", interface.name);
            }
        }
    }
}
