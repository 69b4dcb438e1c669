//! Dumps of machines: by QEMU, and compared.

use std::fs;
use std::path::Path;

use pagemark_testing::{TestMonitor, assert_oracle_eq};
use serde_json::json;

/// Has QEMU dump the machine.
pub fn dump_by_qemu(own: &mut TestMonitor, path: &Path) {
    let _ = fs::remove_file(path);
    own.run("dump-guest-memory", json!({"paging": false, "protocol": format!("file:{}", path.display())}));
}

/// What a dump says, but for where it is in the file.
struct Dump {
    content: Vec<u8>,
    /// The format, the kind of file and of processor.
    identity: [u8; 20],
    notes: Vec<u8>,
    /// Addresses, lengths, and the offset of the content.
    segments: Vec<([u64; 4], usize)>,
}

impl Dump {
    fn read(path: &Path) -> Dump {
        let content = fs::read(path).unwrap();
        let word = |at: usize| u64::from_le_bytes(content[at..at + 8].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes(content[at..at + 2].try_into().unwrap());
        assert_eq!(content[..6], *b"\x7fELF\x02\x01");
        let (headers, size, count) = (word(32) as usize, half(54) as usize, half(56) as usize);
        let (mut notes, mut segments) = (Vec::new(), Vec::new());
        for at in (0..count).map(|number| headers + number * size) {
            let (offset, length) = (word(at + 8) as usize, word(at + 32) as usize);
            match content[at] {
                4 => notes.extend_from_slice(&content[offset..offset + length]),
                1 => segments.push(([word(at + 16), word(at + 24), word(at + 32), word(at + 40)], offset)),
                other => panic!("a header of kind {other}"),
            }
        }
        Dump { identity: content[..20].try_into().unwrap(), notes, segments, content }
    }
}

/// Compares two dumps: kind, addresses, memory and notes.
pub fn assert_same_dump(ours: &Path, by_qemu: &Path) {
    let (ours, by_qemu) = (Dump::read(ours), Dump::read(by_qemu));
    assert_eq!(ours.identity, by_qemu.identity);
    let places = |dump: &Dump| dump.segments.iter().map(|(place, _)| *place).collect::<Vec<_>>();
    assert_eq!(places(&ours), places(&by_qemu));
    for ((place, our_offset), (_, offset)) in ours.segments.iter().zip(&by_qemu.segments) {
        let length = place[2] as usize;
        let parts =
            [(&ours, our_offset), (&by_qemu, offset)].map(|(dump, &at)| dump.content[at..at + length].chunks(4096));
        let [one, other] = parts;
        let differs = one.zip(other).position(|(one, other)| one != other);
        assert_oracle_eq!(differs, None, "a page behind address {:#x}", place[1]);
    }
    let differs = ours.notes.iter().zip(&by_qemu.notes).position(|(one, other)| one != other);
    assert_eq!((differs, ours.notes.len()), (None, by_qemu.notes.len()), "a byte of the notes");
    assert!(ours.notes.len() > 500 && ours.segments.len() >= 2, "there is something to compare");
}
