//! The locks of files, from `/proc/locks`.

use std::io;

/// A lease that opening the file breaks, even for reading (`fcntl` with `F_SETLEASE` and
/// `F_WRLCK`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteLease {
    /// The process that has set it.
    pub pid: i32,
    /// Device of the file system, which may be another one than `stat` says for the file.
    pub device: u64,
    /// Inode of the file.
    pub inode: u64,
}

/// The leases of all processes that this process may know of.
///
/// # Errors
/// The list cannot be read.
pub fn write_leases() -> io::Result<Vec<WriteLease>> {
    Ok(std::fs::read_to_string("/proc/locks")?.lines().filter_map(parse).collect())
}

/// Reads a line such as `1: LEASE  ACTIVE    WRITE 1234 08:01:4711 0 EOF`. None for other locks.
fn parse(line: &str) -> Option<WriteLease> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (kind, _, access) = (words.next()?, words.next()?, words.next()?);
    if kind != "LEASE" || access != "WRITE" {
        return None;
    }
    let pid = words.next()?.parse().ok()?;
    let mut file = words.next()?.split(':');
    let mut number = || u32::from_str_radix(file.next()?, 16).ok();
    let device = libc::makedev(number()?, number()?);
    Some(WriteLease { pid, device, inode: file.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_read_and_other_locks_are_not() {
        let lease = WriteLease { pid: 1234, device: libc::makedev(8, 0x1f), inode: 4711 };
        assert_eq!(parse("1: LEASE  ACTIVE    WRITE 1234 08:1f:4711 0 EOF"), Some(lease.clone()));
        assert_eq!(parse("27: LEASE  BREAKER   WRITE 1234 08:1f:4711 0 EOF"), Some(lease));
        for other in [
            "1: LEASE  ACTIVE    READ 1234 08:1f:4711 0 EOF",
            "2: POSIX  ADVISORY  WRITE 1234 08:1f:4711 0 EOF",
            "3: -> FLOCK  ADVISORY  WRITE 7 00:2a:1 0 EOF",
            "1: LEASE  ACTIVE    WRITE 1234 08:1f",
            "1: LEASE  ACTIVE    WRITE x 08:1f:1 0 EOF",
            "",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
