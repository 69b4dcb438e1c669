//! Hex dumps.

use std::fmt::Write;

/// Bytes in one line of a dump.
pub const LINE_BYTES: usize = 16;

/// The lines in which `before` and `after` differ, both of which begin at `address`.
///
/// Each such line is there twice: with `-` as it was before, and with `+` as it is after. Bytes
/// that only one of the two has are left out.
pub fn difference(address: u64, before: &[u8], after: &[u8]) -> String {
    let mut out = String::new();
    for (index, (old, new)) in before.chunks(LINE_BYTES).zip(after.chunks(LINE_BYTES)).enumerate() {
        if old != new {
            let address = address.wrapping_add((index * LINE_BYTES) as u64);
            line(&mut out, address, '-', old);
            line(&mut out, address, '+', new);
        }
    }
    out
}

/// `000000001010 + 00 41  .A`: address, sign, each byte in hexadecimal, and the bytes that are
/// ASCII.
fn line(out: &mut String, address: u64, sign: char, bytes: &[u8]) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{address:012x} {sign} ");
    for byte in bytes {
        let _ = write!(out, "{byte:02x} ");
    }
    out.push(' ');
    out.extend(bytes.iter().map(|&byte| if (0x20..0x7f).contains(&byte) { char::from(byte) } else { '.' }));
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_differ_are_printed() {
        let before = [0u8; 64];
        let mut after = before;
        after[17] = b'A';
        let zeros = vec!["00"; 16].join(" ");
        assert_eq!(
            difference(0x1000, &before, &after),
            format!(
                "000000001010 - {zeros}  ................\n000000001010 + 00 41 {}  .A..............\n",
                vec!["00"; 14].join(" ")
            )
        );
        assert_eq!(difference(0, &before, &before), "");
        assert_eq!(difference(0, b"a", b"b"), "000000000000 - 61  a\n000000000000 + 62  b\n");
    }
}
