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

/// Parts of the section of a serial port, behind the lengths of their names: its queues, which are
/// there while they hold something. Each has its version, the places of its bytes, the place of the
/// first one, and how many there are.
const QUEUES: [&[u8]; 2] = [b"\x10serial/recv_fifo", b"\x10serial/xmit_fifo"];

/// The section of a network by `-netdev user`, behind the length of its name. It is of the host,
/// which a machine that is simulated does not reach.
const USER_NETWORK: &[u8] = b"\x05slirp";

/// The byte behind the content of a section. The number of the section follows.
const SECTION_FOOTER: u8 = 0x7e;

/// The places of a queue.
const QUEUE_BYTES: usize = 16;

/// Kinds of sections: one that has several parts, and one that is written at once.
const SECTION_KINDS: [u8; 2] = [1, 4];

/// The number of instructions that the machine has executed since its start. None if it does not
/// count them.
pub(crate) fn instruction_count(devices: &[u8]) -> Option<u64> {
    let at = find(devices, COUNTER)? + COUNTER.len() + 4 + 8;
    u64::try_from(i64::from_be_bytes(devices.get(at..at + 8)?.try_into().ok()?)).ok()
}

/// The name of the section that has the first difference of two states. The clocks of the host,
/// which are part of the state, differ always, and do not count. Neither does what `-netdev user`
/// has on the host, nor do the places of bytes in a queue, which a restored machine begins at the
/// first: the state has none of an empty queue.
pub(crate) fn first_difference(one: &[u8], other: &[u8]) -> Option<String> {
    let (mut one, mut other) = (one.to_vec(), other.to_vec());
    for state in [&mut one, &mut other] {
        align_queues(state);
        remove_user_network(state);
    }
    let (one, other) = (&one[..], &other[..]);
    let clocks = find(one, CLOCKS).map_or(0..0, |at| {
        let start = at + CLOCKS.len() + HEADER_BYTES;
        start..start + HOST_CLOCK_BYTES
    });
    let length = one.len().min(other.len());
    let differs = |at: &usize| one[*at] != other[*at] && !clocks.contains(at);
    let at = (0..length).find(differs).or((one.len() != other.len()).then_some(length))?;
    Some(section(&one[..at]))
}

/// Moves the bytes of the queues to their first places.
fn align_queues(devices: &mut [u8]) {
    for name in QUEUES {
        let mut from = 0;
        while let Some(at) = find(&devices[from..], name) {
            from += at + name.len();
            // Behind the version.
            let Some(queue) = devices[from..].get_mut(4..4 + QUEUE_BYTES + 8) else { return };
            let (places, numbers) = queue.split_at_mut(QUEUE_BYTES);
            let [first, count] = [0, 4].map(|at| numbers[at..].first_chunk().map_or(0, |&n| u32::from_be_bytes(n)));
            places.rotate_left(first as usize % QUEUE_BYTES);
            places[(count as usize).min(QUEUE_BYTES)..].fill(0);
            numbers[..4].fill(0);
        }
    }
}

/// Removes what the section of a network by `-netdev user` holds.
fn remove_user_network(devices: &mut Vec<u8>) {
    const NUMBER_BYTES: usize = 4;
    let Some(name) = find(devices, USER_NETWORK).filter(|&at| at > NUMBER_BYTES) else { return };
    let start = name + USER_NETWORK.len() + HEADER_BYTES;
    let number = &devices[name - NUMBER_BYTES..name];
    let footer = [&[SECTION_FOOTER], number].concat();
    let is_section = SECTION_KINDS.contains(&devices[name - NUMBER_BYTES - 1]);
    // Without a footer, where the machine is of an old type, it is compared.
    let Some(length) = devices.get(start..).and_then(|rest| find(rest, &footer)).filter(|_| is_section) else { return };
    devices.drain(start..start + length);
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

    #[test]
    fn queues_with_the_same_bytes_are_the_same() {
        let queue = |bytes: &[u8; QUEUE_BYTES], first: u32, count: u32| {
            [QUEUES[0], &[0, 0, 0, 1], bytes, &first.to_be_bytes(), &count.to_be_bytes(), &[9]].concat()
        };
        let one = queue(b"yABCxxxxxxxxxxxx", 1, 3);
        assert_eq!(first_difference(&one, &queue(b"BCzzzzzzzzzzzzzA", 15, 3)), None);
        assert!(first_difference(&one, &queue(b"BDzzzzzzzzzzzzzA", 15, 3)).is_some());
        assert!(first_difference(&one, &queue(b"BCzzzzzzzzzzzzzA", 15, 2)).is_some());
        let odd = queue(&[1; QUEUE_BYTES], u32::MAX, u32::MAX);
        assert_eq!(first_difference(&odd, &odd), None, "and nothing panics");
    }

    #[test]
    fn what_a_user_network_has_on_the_host_is_not_compared() {
        let network = |number: u8, content: &[u8]| {
            let header = [&[4, 0, 0, 0, number], USER_NETWORK, &[0; 4], &[0, 0, 0, 4]].concat();
            [&header, content, &[SECTION_FOOTER, 0, 0, 0, number]].concat()
        };
        let state = |content: &[u8], serial| [network(7, content), state(1, 2, serial)].concat();
        let one = state(&[1, 2, 3], 5);
        assert_eq!(first_difference(&one, &state(&[9; 20], 5)), None);
        assert_eq!(first_difference(&one, &state(&[9; 20], 6)).as_deref(), Some("serial"));
        let without_footer = &network(7, &[1])[..23];
        assert_eq!(first_difference(without_footer, &network(7, &[2])[..23]).as_deref(), Some("slirp"));
    }

    proptest! {
        #[test]
        fn nothing_panics(one in prop::collection::vec(any::<u8>(), 0..99), other in prop::collection::vec(any::<u8>(), 0..99)) {
            prop_assert_eq!(first_difference(&one, &other).is_some(), one != other);
            prop_assert_eq!(instruction_count(&one), None);
        }
    }
}
