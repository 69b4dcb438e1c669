//! The ids of users and groups in `/proc/PID/status`.

use std::io;

use super::Fields;

/// The users and groups of a process or thread, as the namespace of users of this process has them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Credentials {
    /// The real, the effective, the saved and the file system's user id.
    pub uids: [u32; 4],
    /// The real, the effective, the saved and the file system's group id.
    pub gids: [u32; 4],
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// The effective capabilities, one bit each.
    pub capabilities: u64,
}

impl Credentials {
    /// Reads the ids of a process, or of a thread by its id.
    ///
    /// # Errors
    /// `NotFound`, or ESRCH: there is no such process (any more). `InvalidData`: the kernel gives
    /// no ids.
    pub fn read(pid: i32) -> io::Result<Credentials> {
        let text = super::read(pid, "status")?;
        Credentials::parse(text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its status has no ids"))
    }

    /// Parses the content of a `status` file. None if it lacks the ids.
    pub fn parse(text: Vec<u8>) -> Option<Credentials> {
        let fields = Fields::parse(text);
        let numbers = |name: &str| -> Option<Vec<u32>> {
            fields.get(name)?.split_ascii_whitespace().map(|id| id.parse().ok()).collect()
        };
        Some(Credentials {
            uids: numbers("Uid")?.try_into().ok()?,
            gids: numbers("Gid")?.try_into().ok()?,
            groups: numbers("Groups")?,
            capabilities: fields.in_base("CapEff", 16).unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_parsed(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Credentials::parse([b"Uid:\t", &bytes[..], b"\nGid:\t0 0 0 0\nGroups: ", &bytes[..]].concat());
        }
    }

    #[test]
    fn ids_are_found() {
        let text = b"Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \nCapEff:\t0000000001000002\n";
        let expected =
            Credentials { uids: [1, 2, 3, 4], gids: [5, 6, 7, 8], groups: vec![9, 10], capabilities: 1 << 24 | 2 };
        assert_eq!(Credentials::parse(text.to_vec()), Some(expected));
        let none = b"Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t \n";
        assert_eq!(Credentials::parse(none.to_vec()), Some(Credentials::default()));
        assert_eq!(Credentials::parse(b"Uid:\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t\n".to_vec()), None);
        let own = Credentials::read(std::process::id() as i32).unwrap();
        assert_eq!(own.uids[1], nix::unistd::geteuid().as_raw());
    }
}
