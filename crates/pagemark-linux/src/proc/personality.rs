//! `/proc/PID/personality`: how the kernel behaves towards a thread, as personality(2) has it.

use std::io;

/// The personality of a thread: its domain, and a bit for each deviation.
///
/// # Errors
/// `ENOENT` or `ESRCH`: there is no such thread. `EPERM` or `EACCES`: it may not be traced.
/// `InvalidData`: it has ended.
pub fn read(thread: i32) -> io::Result<u32> {
    parse(&super::read(thread, "personality")?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse(text: &[u8]) -> Option<u32> {
    u32::from_str_radix(std::str::from_utf8(text).ok()?.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_the_personality_that_it_gives_itself() {
        let changed = std::thread::spawn(|| {
            // SAFETY: the call takes a number, and concerns this thread alone.
            let before = unsafe { libc::personality(0xffff_ffff) } as u32;
            let thread = nix::unistd::gettid().as_raw();
            assert_eq!(read(thread).unwrap(), before);
            let wanted = before ^ libc::ADDR_NO_RANDOMIZE as u32 ^ 0x0020_0000;
            // SAFETY: as above.
            unsafe { libc::personality(wanted.into()) };
            (read(thread).unwrap(), wanted)
        });
        let (seen, wanted) = changed.join().unwrap();
        assert_eq!(seen, wanted);
        assert_eq!((parse(b"00040000\n"), parse(b""), parse(b"x")), (Some(0x40000), None, None));
    }
}
