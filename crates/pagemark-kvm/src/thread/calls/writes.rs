//! What the kernel may write to the program's memory in the calls that it carries out as they are.
//!
//! Where a structure says so itself, the kernel gets the copy that was read. What a device writes
//! by itself later is not known here, nor to a mechanism of the host.

use crate::call_table::{KernelCall, Kind, Target};
use crate::sys::descriptors;
use crate::sys::host_call::Call;
use crate::writes::Writes;

use super::structure::Structure;

/// Bytes of the largest element of a list that the kernel fills: `struct epoll_event`, or `pollfd`.
const ELEMENT_BYTES: u64 = 16;

/// `ioctl`s that fill the structure at their argument, or none: of terminals, files, sockets and
/// userfaultfd.
const PLAIN: [u64; 19] = [
    0x5401,
    0x5402,
    0x5403,
    0x5404,
    0x540b,
    0x540f,
    0x5410,
    0x5413,
    0x5414,
    0x541b,
    0x5421,
    0x5450,
    0x5451,
    0x5452,
    0x8004_5430,
    0x4004_5431,
    0xc020_aa00,
    0x8010_aa01,
    0xc018_aa06,
];

const TCP_ZEROCOPY_RECEIVE: u64 = 35;
/// Options of IP from this number on are those of the packet filter.
const FIRST_FILTER_OPTION: u64 = 64;

/// The writes of `call`, whose arguments `passed` describes, and whose `structure` the kernel gets.
pub fn of(call: &Call, passed: &KernelCall, structure: Option<&Structure>) -> Writes {
    let arguments = call.arguments;
    match (call.number as i64, structure) {
        (libc::SYS_getsockopt, Some(len)) => return of_getsockopt(arguments, len.length()),
        (_, Some(structure)) => return structure.writes(),
        (libc::SYS_ioctl, None) => return of_ioctl(arguments[1] & 0xffff_ffff, arguments[2]),
        (libc::SYS_setsockopt, None) => return of_setsockopt(arguments),
        _ => {}
    }
    if file_written_by(call).is_some_and(is_of_proc) {
        return Writes::anywhere();
    }
    let mut writes = Writes::NONE;
    for (index, kind) in passed.kinds.iter().enumerate() {
        let (at, next) = (arguments[index], arguments.get(index + 1).copied().unwrap_or_default());
        if at == 0 {
            continue;
        }
        writes = match kind {
            Kind::Pointer(Target::Unknown) => return Writes::anywhere(),
            Kind::Pointer(Target::Structure) => writes.and_structure(at),
            Kind::Pointer(Target::Buffer) | Kind::Advised => writes.and(at, next),
            Kind::Pointer(Target::Elements) => writes.and(at, next.saturating_mul(ELEMENT_BYTES)),
            Kind::Pointer(Target::Set) => writes.and(at, u64::from(arguments[0] as u32) / 8 + 8),
            Kind::Pointer(Target::Read) | Kind::Value | Kind::Descriptor | Kind::Path | Kind::Range => writes,
        };
    }
    writes
}

/// The file to which a call writes that does nothing else with it.
fn file_written_by(call: &Call) -> Option<u64> {
    match call.number as i64 {
        libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendfile => Some(call.arguments[0]),
        libc::SYS_splice | libc::SYS_copy_file_range => Some(call.arguments[2]),
        _ => None,
    }
}

/// The file of `/proc` to which a call with these `writes` writes.
pub fn to_proc(call: &Call, writes: &Writes) -> Option<u64> {
    // Otherwise it is no such file.
    file_written_by(call).filter(|_| *writes == Writes::anywhere())
}

/// Whether `fd` is a file of `/proc`: a write to `mem` there writes to memory.
pub fn is_of_proc(fd: u64) -> bool {
    descriptors::is_of_proc(fd as i32)
}

fn of_ioctl(request: u64, at: u64) -> Writes {
    if PLAIN.contains(&request) { Writes::NONE.and_structure(at) } else { Writes::anywhere() }
}

fn of_getsockopt([_, level, option, value, ..]: [u64; 6], len: Option<u64>) -> Writes {
    let is_plain = match level as i32 {
        libc::SOL_SOCKET => true,
        libc::IPPROTO_TCP => option & 0xffff_ffff != TCP_ZEROCOPY_RECEIVE,
        _ => false,
    };
    match len {
        Some(len) if is_plain => Writes::NONE.and(value, len),
        Some(_) => Writes::anywhere(),
        None => Writes::NONE,
    }
}

fn of_setsockopt([_, level, option, ..]: [u64; 6]) -> Writes {
    match level as i32 {
        libc::SOL_SOCKET | libc::IPPROTO_TCP => Writes::NONE,
        libc::IPPROTO_IP | libc::IPPROTO_IPV6 if option & 0xffff_ffff < FIRST_FILTER_OPTION => Writes::NONE,
        _ => Writes::anywhere(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call_table::passed;
    use crate::layout::{PAGE, PROGRAM_BASE, PROGRAM_END};

    fn ranges(number: i64, arguments: [u64; 6]) -> Vec<(u64, u64)> {
        let call = Call { number: number as u64, arguments };
        of(&call, passed(call.number).expect("in the table"), Structure::of(&call).as_ref()).iter().collect()
    }

    #[test]
    fn calls_write_where_their_arguments_say() {
        let at = PROGRAM_BASE;
        let none = u64::from(u32::MAX);
        assert_eq!(ranges(libc::SYS_read, [none, at, 10, 0, 0, 0]), [(at, at + 10)]);
        assert_eq!(ranges(libc::SYS_write, [none, at, 10, 0, 0, 0]), []);
        assert_eq!(ranges(libc::SYS_fstat, [none, at, 0, 0, 0, 0]), [(at, at + PAGE)]);
        assert_eq!(ranges(libc::SYS_poll, [at, 3, 0, 0, 0, 0]), [(at, at + 48)]);
        assert_eq!(ranges(libc::SYS_select, [64, 0, at, 0, 0, 0]), [(at, at + 16)]);
        assert_eq!(ranges(libc::SYS_wait4, [0, at, 0, 0, 0, 0]), [(at, at + PAGE)]);
        assert_eq!(ranges(libc::SYS_madvise, [at, PAGE, 4, 0, 0, 0]), [(at, at + PAGE)]);
        let anywhere = [(0, PROGRAM_END)];
        assert_eq!(ranges(libc::SYS_keyctl, [0, at, 0, 0, 0, 0]), anywhere);
        assert_eq!(ranges(libc::SYS_ioctl, [none, 0x1234, at, 0, 0, 0]), anywhere);
        assert_eq!(ranges(libc::SYS_ioctl, [none, 0x5413, at, 0, 0, 0]), [(at, at + PAGE)]);
        assert_eq!(ranges(libc::SYS_setsockopt, [none, 0, 64, at, 8, 0]), anywhere);
        assert_eq!(ranges(libc::SYS_setsockopt, [none, 1, 2, at, 8, 0]), []);
    }

    #[test]
    fn files_of_proc_are_known() {
        use std::os::fd::AsRawFd;
        let memory = std::fs::File::open("/proc/self/maps").expect("/proc");
        let other = std::fs::File::open("/dev/null").expect("/dev");
        assert_eq!(ranges(libc::SYS_write, [memory.as_raw_fd() as u64, 1, 1, 0, 0, 0]), [(0, PROGRAM_END)]);
        assert_eq!(ranges(libc::SYS_write, [other.as_raw_fd() as u64, 1, 1, 0, 0, 0]), []);
    }
}
