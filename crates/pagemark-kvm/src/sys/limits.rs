//! The limit of the program's address space (`RLIMIT_AS`). The kernel compares it with all that the
//! process has mapped, and so has the program's limit and room for the monitor. A monitor that the
//! program executes finds that limit again.

use std::io;

use pagemark_kvm_protocol::description;

use crate::layout::TABLE_MEMORY;

/// As much does the monitor map at most: tables, the description of the machine, and its code,
/// stacks and allocations.
const MONITOR_BYTES: u64 = TABLE_MEMORY + description::BYTES + (1 << 30);

/// The limit that holds, and the highest that it may be raised to.
pub type Limit = [u64; 2];

fn with_monitor(bytes: u64) -> u64 {
    match bytes {
        libc::RLIM_INFINITY => bytes,
        bytes => bytes.saturating_add(MONITOR_BYTES).min(libc::RLIM_INFINITY - 1),
    }
}

fn without_monitor(bytes: u64) -> u64 {
    match bytes {
        libc::RLIM_INFINITY => bytes,
        bytes => bytes.saturating_sub(MONITOR_BYTES),
    }
}

fn of_process() -> io::Result<Limit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the value.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    if result == 0 { Ok([limit.rlim_cur, limit.rlim_max]) } else { Err(io::Error::last_os_error()) }
}

fn set_of_process([rlim_cur, rlim_max]: Limit) -> io::Result<()> {
    // SAFETY: reads the value.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_AS, &libc::rlimit { rlim_cur, rlim_max }) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The process gets room for the monitor beside that for the program. Who may not raise limits gets
/// what is there: the program's limit is lower then.
pub fn begin() {
    let Ok(limit) = of_process() else { return };
    let [raised, most] = limit.map(with_monitor);
    if set_of_process([raised, most]).is_err() {
        let _ = set_of_process([raised.min(limit[1]), limit[1]]);
    }
}

/// The process has no monitor any more.
pub fn end() {
    let _ = of_process().and_then(|limit| set_of_process(limit.map(without_monitor)));
}

/// The program's limit, in bytes.
pub fn of_program() -> u64 {
    of_process().map_or(libc::RLIM_INFINITY, |[limit, _]| without_monitor(limit))
}

/// Changes the program's limit to `new`, if that is something. Returns the one that it had.
pub fn change(new: Option<Limit>) -> io::Result<Limit> {
    let before = of_process()?;
    if let Some(new) = new {
        if new[0] > new[1] {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        set_of_process(new.map(with_monitor))?;
    }
    Ok(before.map(without_monitor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_come_back() {
        for bytes in [0, 4096, 512 << 20, 1 << 46, libc::RLIM_INFINITY] {
            assert_eq!(without_monitor(with_monitor(bytes)), bytes);
        }
        assert_ne!(with_monitor(libc::RLIM_INFINITY - 1), libc::RLIM_INFINITY);
        assert_eq!(without_monitor(4096), 0, "there was no room for the monitor");
    }
}
