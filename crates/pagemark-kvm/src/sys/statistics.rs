//! KVM's statistics of virtual CPUs, which Linux 5.14 and newer give by a file.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::FileExt;

use pagemark_kvm_protocol::machine_calls::CountsOfKvm;

use super::descriptors;

/// `KVM_GET_STATS_FD`.
const GET_FILE: libc::c_ulong = 0xaece;
/// Bytes of `struct kvm_stats_header`, and of `struct kvm_stats_desc` without the name.
const HEADER_BYTES: usize = 24;
const DESCRIPTION_BYTES: usize = 16;
/// More descriptions, or longer names, than KVM has.
const MOST: u32 = 1 << 12;

/// What KVM has counted for the virtual CPU of a descriptor.
///
/// # Errors
/// KVM gives no statistics, or in a form that is not known.
pub fn of_vcpu(descriptor: RawFd) -> io::Result<CountsOfKvm> {
    let fd = descriptors::above_limit(|_| {
        // SAFETY: makes a descriptor. No child begins meanwhile.
        let fd = unsafe { libc::ioctl(descriptor, GET_FILE, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the new descriptor; no program that is executed is to have it.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        Ok(fd)
    })??;
    // SAFETY: made above, and owned by nothing else.
    let file = unsafe { File::from_raw_fd(fd) };
    parse(&|bytes, offset| file.read_exact_at(bytes, offset))
}

/// Reads the counts from a file that `read` reads.
fn parse(read: &dyn Fn(&mut [u8], u64) -> io::Result<()>) -> io::Result<CountsOfKvm> {
    let word = |bytes: &[u8], at: usize| u32::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    let unknown = || io::Error::new(io::ErrorKind::InvalidData, "the statistics are of an unknown form");
    let mut header = [0; HEADER_BYTES];
    read(&mut header, 0)?;
    let [name_bytes, count] = [4, 8].map(|at| word(&header, at));
    let [descriptions, data] = [16, 20].map(|at| u64::from(word(&header, at)));
    if name_bytes > MOST || count > MOST {
        return Err(unknown());
    }
    let mut description = vec![0; DESCRIPTION_BYTES + name_bytes as usize];
    let mut counts = CountsOfKvm::default();
    let mut found = 0;
    for index in 0..u64::from(count) {
        let at = descriptions + index * description.len() as u64;
        read(&mut description, at)?;
        let name = description[DESCRIPTION_BYTES..].split(|byte| *byte == 0).next();
        let place = match name {
            Some(b"exits") => &mut counts.exits,
            Some(b"pf_taken") => &mut counts.faults,
            Some(b"tlb_flush") => &mut counts.flushes,
            _ => continue,
        };
        let mut value = [0; 8];
        read(&mut value, data + u64::from(word(&description, 8)))?;
        *place = u64::from_ne_bytes(value);
        found += 1;
    }
    if found == 3 { Ok(counts) } else { Err(unknown()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with these counts.
    fn file(counts: &[(&str, u64)]) -> Vec<u8> {
        let (names, data) = (HEADER_BYTES + 8, HEADER_BYTES + 8 + counts.len() * 48);
        let mut bytes = Vec::new();
        for word in [0, 32, counts.len(), HEADER_BYTES, names, data] {
            bytes.extend((word as u32).to_ne_bytes());
        }
        bytes.extend([0; 8]);
        for (index, (name, _)) in counts.iter().enumerate() {
            for word in [0, 1 << 16, index * 8, 0] {
                bytes.extend((word as u32).to_ne_bytes());
            }
            let mut padded = name.as_bytes().to_vec();
            padded.resize(32, 0);
            bytes.extend(padded);
        }
        counts.iter().for_each(|(_, count)| bytes.extend(count.to_ne_bytes()));
        bytes
    }

    fn parse_bytes(bytes: &[u8]) -> io::Result<CountsOfKvm> {
        parse(&|to, offset| {
            let from = bytes.get(offset as usize..offset as usize + to.len());
            to.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        })
    }

    #[test]
    fn counts_are_found_by_their_names() {
        let all = [("pf_fixed", 9), ("pf_taken", 4), ("exits", 3), ("tlb_flush", 5), ("exits_of_others", 7)];
        assert_eq!(parse_bytes(&file(&all)).unwrap(), CountsOfKvm { exits: 3, faults: 4, flushes: 5 });
        assert!(parse_bytes(&file(&all[..2])).is_err());
        assert!(parse_bytes(&[]).is_err());
        assert!(parse_bytes(&[0xff; 400]).is_err());
    }
}
