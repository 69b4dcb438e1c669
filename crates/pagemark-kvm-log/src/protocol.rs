//! What Pagemark and the library in the machine's process say to each other, over a socket.
//!
//! The library greets with [`MAGIC`] and [`VERSION`], and a [`Status`]: `Busy` if another Pagemark
//! is connected, which ends the connection. Then Pagemark sends a [`Request`], and reads a reply:
//! a status and the number of entries. An entry is an address, a number of words, and these: a bit
//! for each page from the address on. All numbers are of 64 bits, of this processor's order. When
//! the connection ends, the log is no longer read.

use std::ffi::CStr;
use std::io::{self, Read, Write};

use crate::machine::{Refusal, Written};

/// The variable that names the socket, in the environment that the process of the machine was
/// started with.
pub const SOCKET: &str = "PAGEMARK_KVM_LOG";

/// The variable that has machines keep rings in place of the log: how many entries a ring has.
pub const RINGS: &str = "PAGEMARK_KVM_RINGS";

/// The file name of the library.
pub const LIBRARY: &str = "libpagemark_kvm_preload.so";

/// The name of the file in memory that reserves addresses for the machine's own mappings.
pub const VIEWS: &CStr = c"pagemark-views";

/// The first number of the greeting.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PMKVMLOG");

/// The version of the protocol.
pub const VERSION: u64 = 3;

/// The most entries of a reply: KVM has fewer slots.
const MAX_ENTRIES: u64 = 1 << 17;

/// The most words of an entry: the log of 16 TiB.
const MAX_WORDS: u64 = 1 << 26;

/// What Pagemark asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Begin to read the log.
    Begin,
    /// What was written since the last request.
    Collect,
    /// No slot gets a view from now on: all that there are can be found in the process's mappings.
    KeepViews,
    /// New slots over shared memory get views again.
    ReleaseViews,
}

impl Request {
    /// Sends it.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn send(self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&(self as u64).to_ne_bytes())
    }

    /// Receives one.
    ///
    /// # Errors
    /// Those of the connection, or `InvalidData`.
    pub fn receive(from: &mut impl Read) -> io::Result<Request> {
        match number(from)? {
            0 => Ok(Request::Begin),
            1 => Ok(Request::Collect),
            2 => Ok(Request::KeepViews),
            3 => Ok(Request::ReleaseViews),
            other => Err(invalid(format!("there is no request {other}"))),
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// As it was asked for.
    Done,
    /// Another Pagemark reads the log.
    Busy,
    /// The process has no machine.
    NoMachine,
    /// It was refused.
    Refused(Refusal),
}

impl Status {
    fn numbers(self) -> [u64; 2] {
        match self {
            Status::Done => [0, 0],
            Status::Busy => [1, 0],
            Status::NoMachine => [2, 0],
            Status::Refused(Refusal::NoLog) => [3, 0],
            Status::Refused(Refusal::Ring) => [4, 0],
            Status::Refused(Refusal::GuestMemory) => [5, 0],
            Status::Refused(Refusal::NotBegun) => [6, 0],
            Status::Refused(Refusal::Call(error)) => [7, u64::from(error.unsigned_abs())],
            Status::Refused(Refusal::NoRings) => [8, 0],
            Status::Refused(Refusal::Overwritten) => [9, 0],
        }
    }

    fn receive(from: &mut impl Read) -> io::Result<Status> {
        let (code, error) = (number(from)?, number(from)?);
        Ok(match code {
            0 => Status::Done,
            1 => Status::Busy,
            2 => Status::NoMachine,
            3 => Status::Refused(Refusal::NoLog),
            4 => Status::Refused(Refusal::Ring),
            5 => Status::Refused(Refusal::GuestMemory),
            6 => Status::Refused(Refusal::NotBegun),
            7 => Status::Refused(Refusal::Call(i32::try_from(error).unwrap_or(libc::EIO))),
            8 => Status::Refused(Refusal::NoRings),
            9 => Status::Refused(Refusal::Overwritten),
            other => return Err(invalid(format!("there is no status {other}"))),
        })
    }
}

/// Greets a new connection.
///
/// # Errors
/// Those of the connection.
pub fn greet(to: &mut impl Write, status: Status) -> io::Result<()> {
    let [code, error] = status.numbers();
    to.write_all(&[MAGIC, VERSION, code, error].map(u64::to_ne_bytes).concat())
}

/// Receives the greeting.
///
/// # Errors
/// Those of the connection, or `InvalidData` if the other side is no library of this version.
pub fn receive_greeting(from: &mut impl Read) -> io::Result<Status> {
    let (magic, version) = (number(from)?, number(from)?);
    if magic != MAGIC {
        return Err(invalid("it does not greet as Pagemark's library does".to_owned()));
    }
    if version != VERSION {
        return Err(invalid(format!("Pagemark's library has version {version} of the protocol, not {VERSION}")));
    }
    Status::receive(from)
}

/// Sends a reply.
///
/// # Errors
/// Those of the connection.
pub fn send_reply(to: &mut impl Write, status: Status, entries: &[Written]) -> io::Result<()> {
    let [code, error] = status.numbers();
    let mut message = [code, error, entries.len() as u64].map(u64::to_ne_bytes).concat();
    for entry in entries {
        message.extend([entry.host_address, entry.pages.len() as u64].map(u64::to_ne_bytes).as_flattened());
        message.extend(entry.pages.iter().flat_map(|word| word.to_ne_bytes()));
    }
    to.write_all(&message)
}

/// Receives a reply.
///
/// # Errors
/// Those of the connection, or `InvalidData`.
pub fn receive_reply(from: &mut impl Read) -> io::Result<(Status, Vec<Written>)> {
    let status = Status::receive(from)?;
    let count = number(from)?;
    if count > MAX_ENTRIES {
        return Err(invalid(format!("a reply with {count} entries")));
    }
    let entry = |_| {
        let (host_address, words) = (number(from)?, number(from)?);
        if words > MAX_WORDS {
            return Err(invalid(format!("an entry of {words} words")));
        }
        // Room is made for what comes, and not for what is announced.
        let mut bytes = Vec::new();
        from.by_ref().take(words * 8).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != words * 8 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let pages = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        Ok(Written { host_address, pages })
    };
    let entries: io::Result<Vec<Written>> = (0..count).map(entry).collect();
    Ok((status, entries?))
}

fn number(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STATUSES: [Status; 9] = [
        Status::Done,
        Status::Busy,
        Status::NoMachine,
        Status::Refused(Refusal::NoLog),
        Status::Refused(Refusal::Ring),
        Status::Refused(Refusal::GuestMemory),
        Status::Refused(Refusal::NotBegun),
        Status::Refused(Refusal::Call(libc::ENOENT)),
        Status::Refused(Refusal::NoRings),
    ];

    #[test]
    fn what_is_sent_is_received() {
        for status in STATUSES {
            let mut bytes = Vec::new();
            greet(&mut bytes, status).unwrap();
            assert_eq!(receive_greeting(&mut bytes.as_slice()).unwrap(), status);
            for length in 0..bytes.len() {
                assert!(receive_greeting(&mut &bytes[..length]).is_err());
            }
        }
        for request in [Request::Begin, Request::Collect, Request::KeepViews, Request::ReleaseViews] {
            let mut bytes = Vec::new();
            request.send(&mut bytes).unwrap();
            assert_eq!(Request::receive(&mut bytes.as_slice()).unwrap(), request);
        }
        assert!(Request::receive(&mut [9u8; 8].as_slice()).is_err());
        let mut other = Vec::new();
        greet(&mut other, Status::Done).unwrap();
        other[8] = 77;
        assert!(receive_greeting(&mut other.as_slice()).unwrap_err().to_string().contains("version 77"));
        other[0] = 0;
        assert!(receive_greeting(&mut other.as_slice()).unwrap_err().to_string().contains("greet"));
    }

    proptest! {
        #[test]
        fn a_reply_is_received_as_it_was_sent_or_refused(
            entries in prop::collection::vec((any::<u64>(), prop::collection::vec(any::<u64>(), 0..5)), 0..5),
            cut in any::<prop::sample::Index>(),
            change in (any::<prop::sample::Index>(), any::<u8>()),
        ) {
            let written = |(host_address, pages)| Written { host_address, pages };
            let entries: Vec<Written> = entries.into_iter().map(written).collect();
            let mut bytes = Vec::new();
            send_reply(&mut bytes, Status::Done, &entries).unwrap();
            prop_assert_eq!(receive_reply(&mut bytes.as_slice()).unwrap(), (Status::Done, entries));
            let length = cut.index(bytes.len());
            prop_assert!(receive_reply(&mut &bytes[..length]).is_err());
            // Whatever comes, it is read or refused.
            bytes[change.0.index(length.max(1))] = change.1;
            let _ = receive_reply(&mut bytes.as_slice());
        }
    }
}
