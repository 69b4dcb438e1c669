//! The columns of a block.

use super::{CODE_SLOTS, PAGE_SLOTS, TraceBlock, TracedAccess};
use crate::access::Access;

/// The parts of the third column's bytes.
const SHIFT: u8 = 31;
const STORE: u8 = 32;
const DEVICE: u8 = 64;

const COLUMNS: usize = 5;

/// What the next numbers of a block are expected to be.
struct Prediction {
    /// The address of the last instruction.
    code: u64,
    /// Virtual addresses of accesses, by the instruction.
    addresses: Vec<u64>,
    /// Physical less virtual addresses, by the page.
    offsets: Vec<u64>,
}

impl Prediction {
    fn new() -> Prediction {
        Prediction { code: 0, addresses: vec![0; CODE_SLOTS], offsets: vec![0; PAGE_SLOTS] }
    }

    /// The slot of the instruction at `code`.
    fn address(&mut self, code: u64) -> &mut u64 {
        &mut self.addresses[(code ^ (code >> 12)) as usize % CODE_SLOTS]
    }

    /// The slot of a virtual address.
    fn offset(&mut self, address: u64) -> &mut u64 {
        &mut self.offsets[(address >> 12) as usize % PAGE_SLOTS]
    }
}

/// Appends a number, as a varint.
fn put(column: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        column.push(number as u8 | 0x80);
        number >>= 7;
    }
    column.push(number as u8);
}

/// Appends the difference of a number to the expected one, which it becomes.
fn put_difference(column: &mut Vec<u8>, expected: &mut u64, number: u64) {
    let difference = number.wrapping_sub(*expected) as i64;
    put(column, ((difference << 1) ^ (difference >> 63)) as u64);
    *expected = number;
}

/// Takes a number from the begin of a column.
fn take(column: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = column.split_first()?;
        *column = rest;
        let bits = u64::from(byte & 0x7f);
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return (bits << shift >> shift == bits).then_some(number);
        }
    }
    None
}

fn take_difference(column: &mut &[u8], expected: &mut u64) -> Option<u64> {
    let number = take(column)?;
    let difference = (number >> 1) as i64 ^ -((number & 1) as i64);
    *expected = expected.wrapping_add(difference as u64);
    Some(*expected)
}

/// Makes the columns of a block.
pub(super) struct Encoder {
    columns: [Vec<u8>; COLUMNS],
    expected: Prediction,
    pub(super) instructions: u32,
    pub(super) accesses: u32,
    /// Instructions since the last access.
    since: u64,
}

impl Encoder {
    pub(super) fn new() -> Encoder {
        Encoder { columns: Default::default(), expected: Prediction::new(), instructions: 0, accesses: 0, since: 0 }
    }

    /// An instruction begins.
    pub(super) fn begin(&mut self, address: u64) {
        put_difference(&mut self.columns[0], &mut self.expected.code, address);
        self.instructions += 1;
        self.since += 1;
    }

    /// The instruction that began last accesses memory.
    pub(super) fn access(&mut self, access: Access) {
        let [_, gaps, kinds, addresses, offsets] = &mut self.columns;
        put(gaps, self.since);
        self.since = 0;
        self.accesses += 1;
        let store = if access.is_store { STORE } else { 0 };
        let device = if access.physical.is_none() { DEVICE } else { 0 };
        kinds.push(access.bytes.max(1).ilog2() as u8 | store | device);
        let code = self.expected.code;
        put_difference(addresses, self.expected.address(code), access.address);
        if let Some(physical) = access.physical {
            let offset = physical.wrapping_sub(access.address);
            put_difference(offsets, self.expected.offset(access.address), offset);
        }
    }

    /// The columns as they are compressed. The encoder begins the next block.
    pub(super) fn take(&mut self) -> Vec<u8> {
        let mut raw = Vec::with_capacity(self.columns.iter().map(|column| column.len() + 4).sum());
        for column in &mut self.columns {
            raw.extend((column.len() as u32).to_le_bytes());
            raw.append(column);
        }
        self.expected = Prediction::new();
        (self.instructions, self.accesses, self.since) = (0, 0, 0);
        raw
    }
}

/// Reads the columns of a block. None if they contradict themselves.
pub(super) fn decode(mut raw: &[u8], first: u64, instructions: u32, accesses: u32) -> Option<TraceBlock> {
    let mut columns: [&[u8]; COLUMNS] = Default::default();
    for column in &mut columns {
        let (length, rest) = raw.split_first_chunk()?;
        (*column, raw) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    }
    let [codes, gaps, kinds, addresses, offsets] = &mut columns;
    // Each number is a byte or more, so what is reserved is as long as what was read, or a part of it.
    if codes.len() < instructions as usize || kinds.len() != accesses as usize || !raw.is_empty() {
        return None;
    }
    let mut expected = Prediction::new();
    let mut block = TraceBlock {
        first,
        instructions: Vec::with_capacity(instructions as usize),
        accesses: Vec::with_capacity(accesses as usize),
    };
    for _ in 0..instructions {
        block.instructions.push(take_difference(codes, &mut expected.code)?);
    }
    // Instructions up to the one of the access.
    let mut begun: u64 = 0;
    for &kind in *kinds {
        begun = begun.checked_add(take(gaps)?)?;
        let at = begun.checked_sub(1)?;
        let code = *block.instructions.get(usize::try_from(at).ok()?)?;
        let virtual_address = take_difference(addresses, expected.address(code))?;
        let physical_address = match kind & DEVICE {
            0 => {
                let offset = take_difference(offsets, expected.offset(virtual_address))?;
                Some(virtual_address.wrapping_add(offset))
            }
            _ => None,
        };
        block.accesses.push(TracedAccess {
            instruction: first.checked_add(at)?,
            bytes: 1 << (kind & SHIFT),
            is_store: kind & STORE != 0,
            virtual_address,
            physical_address,
        });
    }
    [codes, gaps, addresses, offsets].iter().all(|column| column.is_empty()).then_some(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_form_each() {
        for number in [0, 1, 0x7f, 0x80, 0x3fff, 0x4000, u64::MAX >> 1, u64::MAX] {
            let mut column = Vec::new();
            put(&mut column, number);
            assert_eq!((take(&mut &column[..]), take(&mut &column[..column.len() - 1])), (Some(number), None));
        }
        assert_eq!(take(&mut &[0xff; 9][..]), None);
        // A 65th bit.
        assert_eq!(take(&mut &[[0xff; 9].as_slice(), &[2]].concat()[..]), None);
        let (mut expected, mut read, mut column) = (0, 0, Vec::new());
        let numbers = [5, 4, u64::MAX, 0, 1 << 63, 0];
        numbers.iter().for_each(|&number| put_difference(&mut column, &mut expected, number));
        let mut rest = &column[..];
        assert_eq!(numbers.map(|_| take_difference(&mut rest, &mut read).unwrap()), numbers);
        assert_eq!(column[..2], [10, 1]);
    }
}
