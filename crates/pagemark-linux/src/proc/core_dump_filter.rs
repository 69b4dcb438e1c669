//! `/proc/PID/coredump_filter`: which kinds of memory a core file of a process has, a bit for each,
//! as core(5) numbers them.

use std::io;

/// The kinds of a process.
///
/// # Errors
/// `ENOENT` or `ESRCH`: there is no such process, or the kernel writes no core files.
/// `InvalidData`: it has ended.
pub fn read(pid: i32) -> io::Result<u32> {
    parse(&super::read(pid, "coredump_filter")?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse(text: &[u8]) -> Option<u32> {
    u32::from_str_radix(std::str::from_utf8(text).ok()?.trim(), 16).ok()
}

/// Sets the kinds of a process.
///
/// # Errors
/// Those of [`read`]; `EACCES`: the process is another user's.
pub fn write(pid: i32, kinds: u32) -> io::Result<()> {
    std::fs::write(super::path(pid, "coredump_filter"), format!("{kinds:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kinds_are_parsed() {
        assert_eq!(parse(b"00000033\n"), Some(0x33));
        for text in [&b""[..], b"\n", b"xyz", b"\xff", b"1234567890"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_process_has_the_kinds_that_it_was_given() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        match read(pid) {
            Ok(before) => {
                write(pid, before ^ 0x40).unwrap();
                assert_eq!(read(pid).unwrap(), before ^ 0x40);
            }
            Err(error) => pagemark_testing::skipped(&format!("the kernel writes no core files: {error}")),
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(super::super::is_gone(&read(pid).unwrap_err()));
    }
}
