//! Pages that a call of `mmap` asks for (`MAP_POPULATE`). They are made once the mappings are
//! unlocked: a thread of the program that serves them, as of a file system, may need the lock.

use super::memory::host;
use crate::layout::PROGRAM_BASE;

/// What `mmap` leaves for later.
#[derive(Clone, Copy, Debug)]
pub struct Populate {
    len: u64,
    /// The pages are made as for a write.
    writes: bool,
}

impl Populate {
    /// What a call of `mmap` with these arguments leaves for later, and the flags of the call
    /// without that. Locked memory has its pages from the call itself, and so has all memory before
    /// Linux 5.14.
    pub fn of(len: u64, protection: u64, flags: u64) -> (Option<Populate>, u64) {
        let has = |flag: i32| flags & flag as u64 != 0;
        let is_asked = has(libc::MAP_POPULATE) && !has(libc::MAP_NONBLOCK) && !has(libc::MAP_LOCKED);
        // No bytes: whether the kernel knows the advice.
        if !is_asked || host(libc::SYS_madvise, [PROGRAM_BASE, 0, libc::MADV_POPULATE_READ as u64, 0, 0, 0]).is_err() {
            return (None, flags);
        }
        let is_private = flags & libc::MAP_TYPE as u64 == libc::MAP_PRIVATE as u64;
        let writes = is_private && protection & libc::PROT_WRITE as u64 != 0;
        (Some(Populate { len, writes }), flags & !(libc::MAP_POPULATE as u64))
    }

    /// Makes the pages of the mapping at `start`. As with `mmap`, what cannot be made is left.
    pub fn make(self, start: i64) {
        let advice = if self.writes { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        let _: Result<i64, i32> = host(libc::SYS_madvise, [start as u64, self.len, advice as u64, 0, 0, 0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_wait_is_left_for_later() {
        let later = |flags: i32| Populate::of(1, libc::PROT_WRITE as u64, flags as u64);
        let (populate, private) = (libc::MAP_POPULATE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let (left, flags) = later(populate | private);
        if left.is_none() {
            pagemark_testing::skip!("this kernel has no MADV_POPULATE_READ, which Linux 5.14 has");
        }
        assert!(left.is_some_and(|left| left.writes) && flags == private as u64);
        assert!(later(populate | libc::MAP_SHARED).0.is_some_and(|left| !left.writes));
        for flags in [private, private | populate | libc::MAP_LOCKED, private | populate | libc::MAP_NONBLOCK] {
            let (left, kept) = later(flags);
            assert!(left.is_none() && kept == flags as u64);
        }
    }
}
