//! The number of instructions in the state of a machine's devices, and how two states differ.

/// The section of the clocks, behind the length of its name.
const CLOCKS: &[u8] = b"\x05timer";

/// The header of a section behind its name: the number of the instance, and the version.
const HEADER_BYTES: usize = 8;

/// The clocks of the host in the section.
const HOST_CLOCK_BYTES: usize = 24;

/// The part of the section that has the counter, behind the length of its name. Then come its
/// version and two numbers: what idle time has added to the clock, and the counter.
const COUNTER: &[u8] = b"\x0ctimer/icount";

/// Kinds of sections: one that has several parts, and one that is written at once.
const SECTION_KINDS: [u8; 2] = [1, 4];

/// The number of instructions that the machine has executed since its start. None if it does not
/// count them.
pub(crate) fn instruction_count(devices: &[u8]) -> Option<u64> {
    let at = find(devices, COUNTER)? + COUNTER.len() + 4 + 8;
    u64::try_from(i64::from_be_bytes(devices.get(at..at + 8)?.try_into().ok()?)).ok()
}

/// The name of the section that has the first difference of two states. The clocks of the host,
/// which are part of the state, differ always, and do not count.
pub(crate) fn first_difference(one: &[u8], other: &[u8]) -> Option<String> {
    let clocks = find(one, CLOCKS).map_or(0..0, |at| {
        let start = at + CLOCKS.len() + HEADER_BYTES;
        start..start + HOST_CLOCK_BYTES
    });
    let length = one.len().min(other.len());
    let differs = |at: &usize| one[*at] != other[*at] && !clocks.contains(at);
    let at = (0..length).find(differs).or((one.len() != other.len()).then_some(length))?;
    Some(section(&one[..at]))
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The name of the section that the end of `bytes` is in. Sections say nothing of their length, so
/// the last bytes are taken that look like the begin of one.
fn section(bytes: &[u8]) -> String {
    let name = |at: usize| {
        let (kind, rest) = bytes[at..].split_first()?;
        // Behind the section's number.
        let (&length, name) = rest.get(4..)?.split_first()?;
        let name = name.get(..usize::from(length)).filter(|name| !name.is_empty())?;
        let is_name = SECTION_KINDS.contains(kind) && rest[..2] == [0, 0] && name.iter().all(u8::is_ascii_graphic);
        is_name.then(|| String::from_utf8_lossy(name).into_owned())
    };
    (0..bytes.len()).rev().find_map(name).unwrap_or_else(|| "header".to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state(host_clock: u8, count: u64, serial: u8) -> Vec<u8> {
        let section = |number: u8, name: &[u8]| [&[4, 0, 0, 0, number], name, &[0; 4], &[0, 0, 0, 2]].concat();
        let clocks = [section(1, CLOCKS), vec![host_clock; HOST_CLOCK_BYTES], vec![5]].concat();
        let counter = [COUNTER, &[0, 0, 0, 1], &7u64.to_be_bytes(), &count.to_be_bytes()].concat();
        [&b"QEVM\0\0\0\x03"[..], &clocks, &counter, &section(2, b"\x06serial"), &[serial; 9]].concat()
    }

    #[test]
    fn instructions_are_counted() {
        assert_eq!(instruction_count(&state(1, 123_456, 2)), Some(123_456));
        assert_eq!(instruction_count(b"QEVM"), None);
        assert_eq!(instruction_count(COUNTER), None);
    }

    #[test]
    fn the_first_difference_is_named() {
        let one = state(1, 2, 3);
        assert_eq!(first_difference(&one, &state(9, 2, 3)), None, "the clock of the host");
        assert_eq!(first_difference(&one, &state(1, 2, 4)).as_deref(), Some("serial"));
        assert_eq!(first_difference(&one, &state(1, 3, 3)).as_deref(), Some("timer"));
        assert_eq!(first_difference(&one, &one[..one.len() - 1]).as_deref(), Some("serial"));
        assert_eq!(first_difference(b"a", b"b").as_deref(), Some("header"));
    }

    proptest! {
        #[test]
        fn nothing_panics(one in prop::collection::vec(any::<u8>(), 0..99), other in prop::collection::vec(any::<u8>(), 0..99)) {
            prop_assert_eq!(first_difference(&one, &other).is_some(), one != other);
            prop_assert_eq!(instruction_count(&one), None);
        }
    }
}
