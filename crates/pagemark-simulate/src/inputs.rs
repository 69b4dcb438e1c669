//! What came to a machine from outside while it was recorded, and when: a list that grows, as
//! bytes.
//!
//! Each input is the machine's time (8 bytes, in nanoseconds), the number of what it came by (4
//! bytes), the number of its bytes (4 bytes), and these bytes. Numbers are little-endian.

use crate::error::Error;

/// The chardev of the console whose input is recorded.
pub const CONSOLE: &str = "pagemark-console";

/// Bytes of an input besides its own.
const HEADER_BYTES: usize = 16;

/// What an input comes by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Way {
    /// The serial port that is the machine's console.
    Console,
    /// The network card; each input is a packet.
    Network,
}

impl Way {
    fn number(self) -> u32 {
        match self {
            Way::Console => 0,
            Way::Network => 1,
        }
    }

    fn of_number(number: u32) -> Option<Way> {
        [Way::Console, Way::Network].into_iter().find(|way| way.number() == number)
    }
}

/// Something that came to the machine at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Input {
    /// The machine's time, in nanoseconds.
    pub time: u64,
    /// What it came by.
    pub way: Way,
    /// What came.
    pub bytes: Vec<u8>,
}

impl Input {
    /// Appends it to a list.
    pub fn append_to(&self, list: &mut Vec<u8>) {
        list.extend(self.time.to_le_bytes());
        list.extend(self.way.number().to_le_bytes());
        // What comes at once is a part of a buffer, and much shorter.
        list.extend(u32::try_from(self.bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        list.extend(&self.bytes);
    }

    /// The inputs of a list.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`](crate::ErrorKind::Damaged) if it is not one.
    ///
    /// ```
    /// use pagemark_simulate::inputs::{Input, Way};
    ///
    /// let mut list = Vec::new();
    /// let input = Input { time: 1_000_000, way: Way::Console, bytes: b"ls\r".to_vec() };
    /// input.append_to(&mut list);
    /// assert_eq!(Input::read_all(&list)?, [input]);
    /// # Ok::<(), pagemark_simulate::Error>(())
    /// ```
    pub fn read_all(mut list: &[u8]) -> Result<Vec<Input>, Error> {
        let mut inputs: Vec<Input> = Vec::new();
        while !list.is_empty() {
            let input = split_first(&mut list)?;
            if inputs.last().is_some_and(|last| last.time > input.time) {
                return Err(Error::damaged_inputs("one comes before the one that precedes it"));
            }
            inputs.push(input);
        }
        Ok(inputs)
    }
}

fn split_first(list: &mut &[u8]) -> Result<Input, Error> {
    let ended = || Error::damaged_inputs("the last one is not complete");
    let (header, rest) = list.split_first_chunk::<HEADER_BYTES>().ok_or_else(ended)?;
    let [time, numbers] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte])));
    let (way, length) = (numbers as u32, (numbers >> 32) as usize);
    let way = Way::of_number(way).ok_or_else(|| Error::damaged_inputs("one came by an unknown way"))?;
    let (bytes, rest) = rest.split_at_checked(length).ok_or_else(ended)?;
    *list = rest;
    Ok(Input { time, way, bytes: bytes.to_vec() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_list_is_refused() {
        let input = |time| Input { time, way: Way::Console, bytes: vec![1, 2, 3] };
        let mut list = Vec::new();
        input(7).append_to(&mut list);
        input(7).append_to(&mut list);
        assert_eq!(Input::read_all(&list).unwrap(), [input(7), input(7)]);
        let reason = |list: &[u8]| Input::read_all(list).unwrap_err().to_string();
        assert!(reason(&list[..list.len() - 1]).contains("not complete"));
        assert!(reason(&list[..20]).contains("not complete"));
        let mut later = list.clone();
        input(6).append_to(&mut later);
        assert!(reason(&later).contains("precedes"));
        list[8] = 9;
        assert!(reason(&list).contains("unknown way"));
    }

    proptest! {
        #[test]
        fn inputs_are_read_as_they_were_written(
            parts in prop::collection::vec((0..9u64, prop::collection::vec(any::<u8>(), 0..40)), 0..9)
        ) {
            let mut time = 0;
            let inputs: Vec<Input> = parts.into_iter().map(|(more, bytes)| {
                time += more;
                Input { time, way: Way::Console, bytes }
            }).collect();
            let mut list = Vec::new();
            inputs.iter().for_each(|input| input.append_to(&mut list));
            prop_assert_eq!(Input::read_all(&list).unwrap(), inputs);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..99)) {
            let _ = Input::read_all(&bytes);
        }
    }
}
