//! A client of QEMU's block server, by the NBD protocol: reads the parts of a disk that hold data
//! or were written, and writes a new image.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pagemark::{Address, ByteCount};

/// How long QEMU may take for a reply.
const REPLY_LIMIT: Duration = Duration::from_secs(60);

/// Bytes that one request reads.
pub(crate) const REQUEST_BYTES: u64 = 1 << 20;

/// Requests to read that are under way at a time.
const REQUESTS: usize = 4;

/// Bytes of which one request asks for the status, or which it fills with zeros.
const STATUS_BYTES: u64 = 1 << 30;

/// Longest disk: offsets of files have a sign.
const MAX_DISK_BYTES: u64 = i64::MAX as u64;

/// Longest reply that is accepted.
const MAX_REPLY_BYTES: u32 = 32 << 20;

pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Options of the negotiation.
pub(crate) const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;
const SET_META_CONTEXT: u32 = 10;

/// Types of replies to options; an error has [`OPTION_ERROR`].
pub(crate) const ACKNOWLEDGED: u32 = 1;
pub(crate) const INFORMATION: u32 = 3;
const CONTEXT: u32 = 4;
pub(crate) const OPTION_ERROR: u32 = 1 << 31;

/// Requests.
pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

/// Types of chunks; an error has [`CHUNK_ERROR`].
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 1 << 15;
const CHUNK_IS_LAST: u16 = 1;

/// The context whose flag [`READS_ZEROS`] says that a part holds zeros.
const ALLOCATION: &str = "base:allocation";
const READS_ZEROS: u32 = 2;

/// The only flag of the context of a dirty bitmap.
const WRITTEN: u32 = 1;

/// A part of a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// Offsets in the disk.
    pub(crate) range: pagemark::Range,
    /// The part reads as zeros.
    pub(crate) is_zero: bool,
    /// The dirty bitmap has the part; true if there is no bitmap.
    pub(crate) is_written: bool,
}

/// Takes the offset of a part of the disk, and its content.
pub(crate) type VisitPart<'a, E> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), E>;

/// A connection to one export of a server.
#[derive(Debug)]
pub(crate) struct Client {
    reader: BufReader<UnixStream>,
    bytes: ByteCount,
    allocation: Option<u32>,
    bitmap: Option<u32>,
    last_cookie: u64,
}

/// A chunk of a reply, without its payload.
struct Chunk {
    cookie: u64,
    kind: u16,
    is_last: bool,
    bytes: u32,
}

/// A request to read that is under way.
struct Reading {
    cookie: u64,
    range: Range<u64>,
    content: Vec<u8>,
    filled_bytes: usize,
    is_done: bool,
}

impl Client {
    /// Opens the export `name` over a connection to the server. `bitmap` is a dirty bitmap of the
    /// export.
    ///
    /// # Errors
    /// The server does not have them, or breaks the protocol.
    pub(crate) fn open(stream: UnixStream, name: &str, bitmap: Option<&str>) -> io::Result<Client> {
        stream.set_read_timeout(Some(REPLY_LIMIT))?;
        stream.set_write_timeout(Some(REPLY_LIMIT))?;
        let mut client = Client {
            reader: BufReader::with_capacity(64 << 10, stream),
            bytes: ByteCount::ZERO,
            allocation: None,
            bitmap: None,
            last_cookie: 0,
        };
        if client.array()? != *b"NBDMAGIC" || client.array()? != OPTION_MAGIC.to_be_bytes() {
            return Err(broken("it does not greet as a block server does"));
        }
        let flags = client.u16()?;
        if flags & 1 == 0 {
            return Err(broken("it negotiates in an old way"));
        }
        // Both sides leave padding out if the server offers it.
        client.send(&u32::from(flags & 3).to_be_bytes())?;
        client.option(STRUCTURED_REPLY, &[], |_, _| ())?;
        client.set_contexts(name, bitmap)?;
        let mut request = counted(name);
        request.extend(0u16.to_be_bytes());
        let mut bytes = None;
        client.option(GO, &request, |kind, reply| {
            // Of the export itself; other information is of no use here.
            if let (INFORMATION, Some((&[0, 0], rest))) = (kind, reply.split_first_chunk::<2>()) {
                bytes = rest.first_chunk().map(|size| u64::from_be_bytes(*size));
            }
        })?;
        let bytes = bytes.ok_or_else(|| broken("it does not say how long the disk is"))?;
        if bytes > MAX_DISK_BYTES {
            return Err(broken("it has a disk that is longer than any file"));
        }
        client.bytes = ByteCount::new(bytes);
        Ok(client)
    }

    /// Length of the disk.
    pub(crate) fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// Which parts hold zeros and which were written, in ascending order.
    pub(crate) fn extents(&mut self) -> io::Result<Vec<Extent>> {
        let contexts = [self.allocation, self.bitmap];
        let mut found: [Vec<(Range<u64>, u32)>; 2] = Default::default();
        let end = self.bytes.get();
        for (id, found) in contexts.into_iter().zip(&mut found) {
            let Some(id) = id else { continue };
            let mut at = 0;
            while at < end {
                for (bytes, flags) in self.status(at..(at + STATUS_BYTES).min(end), id)? {
                    let next = (at + u64::from(bytes)).min(end);
                    match found.last_mut() {
                        Some((last, last_flags)) if *last_flags == flags => last.end = next,
                        _ => found.push((at..next, flags)),
                    }
                    at = next;
                }
            }
        }
        Ok(combine(&found[0], &found[1], end))
    }

    /// The status of a prefix of a part: lengths and flags, never empty.
    fn status(&mut self, range: Range<u64>, context: u32) -> io::Result<Vec<(u32, u32)>> {
        let cookie = self.request(BLOCK_STATUS, &range)?;
        let mut found = Vec::new();
        self.replies(cookie, |kind, payload| {
            let mut numbers = payload.as_chunks::<4>().0.iter().map(|bytes| u32::from_be_bytes(*bytes));
            if kind == CHUNK_STATUS && numbers.next() == Some(context) {
                while let (Some(bytes), Some(flags)) = (numbers.next(), numbers.next()) {
                    found.push((bytes, flags));
                }
            }
        })?;
        if found.is_empty() || found.iter().any(|&(bytes, _)| bytes == 0) {
            return Err(broken("it does not report the status of a part of the disk"));
        }
        Ok(found)
    }

    /// Reads parts of the disk, which are in ascending order, each at most [`REQUEST_BYTES`] long.
    /// Calls `visit` with the offset and the content of each, in that order.
    pub(crate) fn read<E: From<io::Error>>(
        &mut self,
        parts: impl IntoIterator<Item = Range<u64>>,
        visit: VisitPart<'_, E>,
    ) -> Result<(), E> {
        let mut parts = parts.into_iter();
        let mut under_way: VecDeque<Reading> = VecDeque::new();
        let mut spare: Vec<Vec<u8>> = Vec::new();
        loop {
            while under_way.len() < REQUESTS
                && let Some(range) = parts.next()
            {
                let mut content = spare.pop().unwrap_or_default();
                content.resize((range.end - range.start) as usize, 0);
                let cookie = self.request(READ, &range)?;
                under_way.push_back(Reading { cookie, range, content, filled_bytes: 0, is_done: false });
            }
            match under_way.front() {
                None => return Ok(()),
                Some(reading) if reading.is_done => {
                    visit(reading.range.start, &reading.content)?;
                    spare.extend(under_way.pop_front().map(|reading| reading.content));
                }
                Some(_) => self.receive(&mut under_way)?,
            }
        }
    }

    /// Receives a chunk of one of the requests.
    fn receive(&mut self, under_way: &mut VecDeque<Reading>) -> io::Result<()> {
        let chunk = self.chunk()?;
        let reading = under_way.iter_mut().find(|reading| reading.cookie == chunk.cookie && !reading.is_done);
        let reading = reading.ok_or_else(|| broken("it replies to what was not asked"))?;
        let outside = || broken("it sends another part of the disk than was asked for");
        match chunk.kind {
            CHUNK_DATA | CHUNK_HOLE => {
                let offset = self.u64()?;
                let bytes = match chunk.kind {
                    CHUNK_DATA => chunk.bytes.checked_sub(8).ok_or_else(outside)? as usize,
                    _ => self.u32()? as usize,
                };
                let start = offset.checked_sub(reading.range.start).ok_or_else(outside)? as usize;
                let end = start.checked_add(bytes).ok_or_else(outside)?;
                let part = reading.content.get_mut(start..end).ok_or_else(outside)?;
                match chunk.kind {
                    CHUNK_DATA => self.reader.read_exact(part)?,
                    _ => part.fill(0),
                }
                reading.filled_bytes += bytes;
            }
            _ => {
                self.payload(&chunk)?;
            }
        }
        reading.is_done = chunk.is_last;
        if reading.is_done && reading.filled_bytes != reading.content.len() {
            return Err(broken("it sends less of the disk than was asked for"));
        }
        Ok(())
    }

    /// Writes to the disk.
    pub(crate) fn write(&mut self, offset: u64, content: &[u8]) -> io::Result<()> {
        for (part, at) in content.chunks(REQUEST_BYTES as usize).zip((offset..).step_by(REQUEST_BYTES as usize)) {
            let cookie = self.request(WRITE, &(at..at + part.len() as u64))?;
            self.reader.get_mut().write_all(part)?;
            self.replies(cookie, |_, _| ())?;
        }
        Ok(())
    }

    /// Fills the disk with zeros.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        let end = self.bytes.get();
        for at in (0..end).step_by(STATUS_BYTES as usize) {
            let cookie = self.request(WRITE_ZEROES, &(at..(at + STATUS_BYTES).min(end)))?;
            self.replies(cookie, |_, _| ())?;
        }
        Ok(())
    }

    /// Has the server bring to disk what was written, and ends the connection.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let cookie = self.request(FLUSH, &(0..0))?;
        self.replies(cookie, |_, _| ())
    }

    /// Receives all chunks of the reply to the only request that is under way. Calls `visit` with
    /// the type and the payload of each.
    fn replies(&mut self, cookie: u64, mut visit: impl FnMut(u16, &[u8])) -> io::Result<()> {
        loop {
            let chunk = self.chunk()?;
            if chunk.cookie != cookie {
                return Err(broken("it replies to what was not asked"));
            }
            visit(chunk.kind, &self.payload(&chunk)?);
            if chunk.is_last {
                return Ok(());
            }
        }
    }

    fn set_contexts(&mut self, name: &str, bitmap: Option<&str>) -> io::Result<()> {
        let bitmap = bitmap.map(|bitmap| format!("qemu:dirty-bitmap:{bitmap}"));
        let names: Vec<&str> = [Some(ALLOCATION), bitmap.as_deref()].into_iter().flatten().collect();
        let mut request = counted(name);
        request.extend((names.len() as u32).to_be_bytes());
        names.iter().for_each(|name| request.extend(counted(name)));
        let (mut allocation_id, mut bitmap_id) = (None, None);
        self.option(SET_META_CONTEXT, &request, |kind, reply| {
            if let (CONTEXT, Some((id, name))) = (kind, reply.split_first_chunk::<4>()) {
                let id = Some(u32::from_be_bytes(*id));
                match name == ALLOCATION.as_bytes() {
                    true => allocation_id = id,
                    false => bitmap_id = id,
                }
            }
        })?;
        if allocation_id.is_none() || bitmap.is_some() && bitmap_id.is_none() {
            return Err(broken("it does not report what was written"));
        }
        (self.allocation, self.bitmap) = (allocation_id, bitmap_id);
        Ok(())
    }

    /// Negotiates an option. Calls `visit` with the type and content of each reply before the last.
    fn option(&mut self, option: u32, request: &[u8], mut visit: impl FnMut(u32, &[u8])) -> io::Result<()> {
        let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend((request.len() as u32).to_be_bytes());
        message.extend(request);
        self.send(&message)?;
        loop {
            if self.u64()? != OPTION_REPLY_MAGIC || self.u32()? != option {
                return Err(broken("it does not negotiate as a block server does"));
            }
            let (kind, bytes) = (self.u32()?, self.u32()?);
            let reply = self.bytes_of(bytes)?;
            match kind {
                ACKNOWLEDGED => return Ok(()),
                kind if kind & OPTION_ERROR != 0 => {
                    let words = String::from_utf8_lossy(&reply).escape_debug().to_string();
                    return Err(io::Error::other(format!("the block server refuses option {option}: {words}")));
                }
                kind => visit(kind, &reply),
            }
        }
    }

    /// Sends a request, without what is written. Returns its cookie.
    fn request(&mut self, kind: u16, range: &Range<u64>) -> io::Result<u64> {
        self.last_cookie += 1;
        let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
        message.extend(0u16.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend(self.last_cookie.to_be_bytes());
        message.extend(range.start.to_be_bytes());
        message.extend(((range.end - range.start) as u32).to_be_bytes());
        self.send(&message)?;
        Ok(self.last_cookie)
    }

    /// Receives the head of a chunk. A reply without chunks is a chunk that is the last.
    fn chunk(&mut self) -> io::Result<Chunk> {
        match self.u32()? {
            CHUNK_MAGIC => {
                let (flags, kind) = (self.u16()?, self.u16()?);
                let (cookie, bytes) = (self.u64()?, self.u32()?);
                Ok(Chunk { cookie, kind, is_last: flags & CHUNK_IS_LAST != 0, bytes })
            }
            SIMPLE_REPLY_MAGIC => match self.u32()? {
                0 => Ok(Chunk { cookie: self.u64()?, kind: 0, is_last: true, bytes: 0 }),
                number => Err(failed(number)),
            },
            _ => Err(broken("a reply has another form")),
        }
    }

    /// Receives the payload of a chunk; an error if it reports one.
    fn payload(&mut self, chunk: &Chunk) -> io::Result<Vec<u8>> {
        let payload = self.bytes_of(chunk.bytes)?;
        match chunk.kind & CHUNK_ERROR {
            0 => Ok(payload),
            _ => Err(failed(payload.first_chunk().map_or(0, |number| u32::from_be_bytes(*number)))),
        }
    }

    fn bytes_of(&mut self, bytes: u32) -> io::Result<Vec<u8>> {
        if bytes > MAX_REPLY_BYTES {
            return Err(broken("a reply is longer than 32 MiB"));
        }
        let mut content = vec![0; bytes as usize];
        self.reader.read_exact(&mut content)?;
        Ok(content)
    }

    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.reader.get_mut().write_all(message)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u16(&mut self) -> io::Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Without it QEMU reports a lost connection.
        let _ = self.request(DISCONNECT, &(0..0));
    }
}

/// A text with its length before it.
fn counted(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Parts with the flags of both contexts. A context that was not asked for is empty.
fn combine(allocation: &[(Range<u64>, u32)], bitmap: &[(Range<u64>, u32)], end: u64) -> Vec<Extent> {
    let mut extents = Vec::new();
    let (mut allocation, mut bitmap) = (allocation.iter().peekable(), bitmap.iter().peekable());
    let mut at = 0;
    while at < end {
        while allocation.next_if(|(range, _)| range.end <= at).is_some() {}
        while bitmap.next_if(|(range, _)| range.end <= at).is_some() {}
        let ends = [allocation.peek(), bitmap.peek()].into_iter().flatten().map(|(range, _)| range.end);
        let next = ends.min().unwrap_or(end).min(end);
        extents.push(Extent {
            range: Address::new(at)..Address::new(next),
            is_zero: allocation.peek().is_some_and(|(_, flags)| flags & READS_ZEROS != 0),
            is_written: bitmap.peek().is_none_or(|(_, flags)| flags & WRITTEN != 0),
        });
        at = next;
    }
    extents
}

fn broken(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the block server breaks the protocol: {reason}"))
}

/// The error of a request that the server could not carry out, by the protocol's number, which is
/// that of Linux.
fn failed(number: u32) -> io::Error {
    io::Error::from_raw_os_error(number as i32)
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use proptest::prelude::*;

    use super::*;

    const DISK_BYTES: u64 = 8192;

    fn reply_to_option(option: u32, kind: u32, content: &[u8]) -> Vec<u8> {
        let numbers = [option, kind, content.len() as u32].map(u32::to_be_bytes).concat();
        [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, content].concat()
    }

    fn chunk(kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let head = [&CHUNK_MAGIC.to_be_bytes()[..], &CHUNK_IS_LAST.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&head[..], &cookie.to_be_bytes(), &(payload.len() as u32).to_be_bytes(), payload].concat()
    }

    /// All that a server sends for a disk of `bytes` bytes, whose second half was written and holds
    /// letters.
    fn conversation(bytes: u64) -> Vec<u8> {
        let context = |id: u32, name: &str| [&id.to_be_bytes()[..], name.as_bytes()].concat();
        let parts = |context: u32, flags: [u32; 2]| {
            let half = (DISK_BYTES / 2) as u32;
            [context, half, flags[0], half, flags[1]].map(u32::to_be_bytes).concat()
        };
        let letters = [&(DISK_BYTES / 2).to_be_bytes()[..], &[b'a'; DISK_BYTES as usize / 2]].concat();
        [
            b"NBDMAGIC".to_vec(),
            OPTION_MAGIC.to_be_bytes().to_vec(),
            3u16.to_be_bytes().to_vec(),
            reply_to_option(STRUCTURED_REPLY, ACKNOWLEDGED, &[]),
            reply_to_option(SET_META_CONTEXT, CONTEXT, &context(1, ALLOCATION)),
            reply_to_option(SET_META_CONTEXT, CONTEXT, &context(2, "qemu:dirty-bitmap:written")),
            reply_to_option(SET_META_CONTEXT, ACKNOWLEDGED, &[]),
            reply_to_option(GO, INFORMATION, &[&[0, 0][..], &bytes.to_be_bytes(), &[0, 0]].concat()),
            reply_to_option(GO, ACKNOWLEDGED, &[]),
            chunk(CHUNK_STATUS, 1, &parts(1, [READS_ZEROS, 0])),
            chunk(CHUNK_STATUS, 2, &parts(2, [0, WRITTEN])),
            chunk(CHUNK_DATA, 3, &letters),
        ]
        .concat()
    }

    /// What a client finds and reads, of a server that sends this and ends.
    fn converse(bytes: &[u8]) -> io::Result<(Vec<Extent>, Vec<u8>)> {
        let (ours, mut theirs) = UnixStream::pair()?;
        theirs.write_all(bytes)?;
        theirs.shutdown(Shutdown::Write)?;
        let mut client = Client::open(ours, "disk", Some("written"))?;
        let extents = client.extents()?;
        let data = extents.iter().filter(|extent| extent.is_written && !extent.is_zero);
        let parts: Vec<Range<u64>> = data.map(|extent| extent.range.start.get()..extent.range.end.get()).collect();
        let parts = parts.into_iter().map(|part| part.start..part.end.min(part.start + REQUEST_BYTES));
        let mut content = Vec::new();
        client.read(parts, &mut |_, part| -> io::Result<()> {
            content.extend(part);
            Ok(())
        })?;
        Ok((extents, content))
    }

    #[test]
    fn what_is_written_and_holds_data_is_read() {
        let (extents, content) = converse(&conversation(DISK_BYTES)).unwrap();
        let flags: Vec<_> = extents.iter().map(|extent| (extent.is_zero, extent.is_written)).collect();
        assert_eq!(flags, [(true, false), (false, true)]);
        assert_eq!(content, [b'a'; DISK_BYTES as usize / 2]);
        for bytes in [u64::MAX, u64::MAX - STATUS_BYTES / 2, MAX_DISK_BYTES + 1] {
            let error = converse(&conversation(bytes)).unwrap_err();
            assert!(error.to_string().contains("longer than any file"), "{error}");
        }
        assert!(converse(&conversation(MAX_DISK_BYTES)).is_err());
    }

    proptest! {
        #[test]
        fn a_server_that_sends_anything_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(converse(&bytes).is_err());
        }

        #[test]
        fn a_server_that_sends_something_else_causes_no_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in any::<prop::sample::Index>(),
            is_cut in any::<bool>(),
        ) {
            let mut bytes = conversation(DISK_BYTES);
            // The letters are as good as any others.
            let length = bytes.len() - DISK_BYTES as usize / 2;
            for (index, byte) in changes {
                bytes[index.index(length)] = byte;
            }
            if is_cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            let _ = converse(&bytes);
        }
    }
}
