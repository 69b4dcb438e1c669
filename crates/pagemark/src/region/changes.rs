//! The content that a transaction changed: what a primary sends to its backup (HAC, section I), and
//! what an undo log holds.

use std::fmt;

use pagemark_linux::room;
use pagemark_linux::shared_bytes::SharedBytes;
use xxhash_rust::xxh3::xxh3_64;

use super::{Region, State};
use crate::error::Object;
use crate::snapshot::Snapshot;
use crate::{Address, AddressRangeExt, ByteCount, Error, ErrorKind, Range, RangeSet};

/// What is encoded, by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EncodedKind {
    Changes,
    /// A snapshot: its changes from a region of zeros.
    Snapshot,
}

/// The version of both encodings.
const VERSION: u64 = 1;
/// Numbers before the ranges: version, flags, length of the region, number of ranges.
const HEADER_NUMBERS: usize = 4;
/// The flag of changes that have the old content.
const HAS_OLD: u64 = 1;
const NUMBER_BYTES: usize = size_of::<u64>();

/// The content of the written ranges after a transaction, and before it if it is known.
///
/// A program that sends the changes of each transaction to another process, which applies them to a
/// region of the same length, has a replica there that is always at the end of a transaction.
/// Writes outside of transactions are in no changes: begin the next transaction before the next
/// write, or make the region without rollback, where a transaction begins where the previous one
/// ended.
///
/// ```
/// use pagemark::Region;
/// use pagemark::region::Changes;
/// let (primary, replica) = (Region::new(1 << 20)?, Region::new(1 << 20)?);
/// primary.begin()?;
/// primary.write(5000, b"sent")?;
/// let message = primary.commit_changes()?.without_old().to_bytes();
///
/// Changes::from_bytes(&message)?.apply(&replica)?;
/// let mut content = [0; 4];
/// replica.read(5000, &mut content)?;
/// assert_eq!(&content, b"sent");
/// # Ok::<(), pagemark::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Changes {
    region_bytes: ByteCount,
    offsets: RangeSet,
    /// The bytes at the offsets, in their order.
    new: Vec<u8>,
    /// The content before; its length is that of `new`.
    old: Option<Vec<u8>>,
}

/// The changed content of one range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Change<'changes> {
    /// The first byte, relative to the start of the region.
    pub offset: usize,
    /// The content after the transaction.
    pub new: &'changes [u8],
    /// The content before the transaction, as long as `new`. None where it is not known.
    pub old: Option<&'changes [u8]>,
}

impl Changes {
    /// No changes of a region of this length.
    pub(super) fn none(region_bytes: usize, with_old: bool) -> Changes {
        Changes {
            region_bytes: ByteCount::from(region_bytes),
            offsets: RangeSet::new(),
            new: Vec::new(),
            old: with_old.then(Vec::new),
        }
    }

    /// Adds the present content of a range of the region, which lies behind all others, unless it
    /// is the old content.
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`
    pub(super) fn add(&mut self, range: &Range, region: &SharedBytes<'_>, old: Option<&[u8]>) -> Result<(), Error> {
        let before = self.new.len();
        region.read(range.to_offsets().start, self.grow(range)?);
        if old == Some(&self.new[before..]) {
            self.new.truncate(before);
            return Ok(());
        }
        if let (Some(held), Some(old)) = (&mut self.old, old) {
            held.try_reserve(old.len()).map_err(|_| Error::no_memory_for_changes(room::none()))?;
            held.extend_from_slice(old);
        }
        self.offsets.insert(range.clone());
        Ok(())
    }

    /// Adds a range of a snapshot, which lies behind all others.
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`
    pub(super) fn add_from(&mut self, range: &Range, snapshot: &Snapshot) -> Result<(), Error> {
        snapshot.read_at(range.start, self.grow(range)?)?;
        self.offsets.insert(range.clone());
        Ok(())
    }

    /// Room for the new content of a range.
    fn grow(&mut self, range: &Range) -> Result<&mut [u8], Error> {
        let (before, bytes) = (self.new.len(), range.byte_count().to_usize());
        self.new.try_reserve(bytes).map_err(|_| Error::no_memory_for_changes(room::none()))?;
        self.new.resize(before + bytes, 0);
        Ok(&mut self.new[before..])
    }

    /// The offsets of the changes. Where the old content is known, pages that hold the same content
    /// as before are left out.
    pub fn offsets(&self) -> &RangeSet {
        &self.offsets
    }

    /// Length of the region that the changes are of.
    pub fn region_bytes(&self) -> ByteCount {
        self.region_bytes
    }

    /// True if the changes have the content before the transaction: those of a region that was made
    /// with rollback.
    pub fn has_old(&self) -> bool {
        self.old.is_some()
    }

    /// The changes, in ascending order of their offsets.
    pub fn iter(&self) -> impl Iterator<Item = Change<'_>> {
        let mut end = 0;
        self.offsets.iter().map(move |range| {
            let held = end..end + range.byte_count().to_usize();
            end = held.end;
            let old = self.old.as_ref().map(|old| &old[held.clone()]);
            Change { offset: range.to_offsets().start, new: &self.new[held], old }
        })
    }

    /// The same changes without the content before the transaction, which a replica does not need.
    #[must_use]
    pub fn without_old(mut self) -> Changes {
        self.forget_old();
        self
    }

    /// Like [`Changes::without_old`], in place.
    pub fn forget_old(&mut self) {
        self.old = None;
    }

    /// Writes the new content to a region, which then counts as written there. Another thread that
    /// commits or takes a snapshot of that region has all of the changes or none.
    ///
    /// # Errors
    /// `ErrorKind::LengthDiffers`, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// or the mechanism failed. After an error the content is unchanged.
    pub fn apply(&self, region: &Region) -> Result<(), Error> {
        region.write_changes(self, self.iter().map(|change| (change.offset, change.new)))
    }

    /// Writes the old content to a region: undoes the changes if they are the last that were made.
    ///
    /// # Errors
    /// Those of [`Changes::apply`], and `ErrorKind::NoRollback` if the old content is not known.
    pub fn revert(&self, region: &Region) -> Result<(), Error> {
        if self.old.is_none() {
            return Err(Error::no_old_content());
        }
        region.write_changes(self, self.iter().filter_map(|change| Some((change.offset, change.old?))))
    }

    /// The changes as bytes, for another process or a file. They end with a checksum. Without
    /// memory for them the program ends: see [`Changes::try_to_bytes`].
    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode(EncodedKind::Changes, Vec::with_capacity(self.encoded_bytes()))
    }

    /// Like [`Changes::to_bytes`].
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`
    pub fn try_to_bytes(&self) -> Result<Vec<u8>, Error> {
        self.try_encode(EncodedKind::Changes)
    }

    pub(super) fn try_encode(&self, as_what: EncodedKind) -> Result<Vec<u8>, Error> {
        let bytes = room::vector(self.encoded_bytes()).map_err(Error::no_memory_for_changes)?;
        Ok(self.encode(as_what, bytes))
    }

    /// Encodes into an empty vector.
    fn encode(&self, as_what: EncodedKind, mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.extend(as_what.magic());
        let flags = if self.has_old() { HAS_OLD } else { 0 };
        let header = [VERSION, flags, self.region_bytes.get(), self.offsets.range_count() as u64];
        let ranges = self.offsets.iter().flat_map(|range| [range.start.get(), range.end.get()]);
        bytes.extend(header.into_iter().chain(ranges).flat_map(u64::to_le_bytes));
        bytes.extend(&self.new);
        bytes.extend(self.old.iter().flatten());
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Length of what [`Changes::to_bytes`] returns.
    pub fn encoded_bytes(&self) -> usize {
        let numbers = HEADER_NUMBERS + 2 * self.offsets.range_count() + 1;
        EncodedKind::Changes.magic().len()
            + NUMBER_BYTES * numbers
            + self.new.len()
            + self.old.as_ref().map_or(0, Vec::len)
    }

    /// The changes that [`Changes::to_bytes`] has encoded. Any bytes are examined safely; the
    /// checksum shows accidents, and not what somebody has forged.
    ///
    /// # Errors
    /// `ErrorKind::Damaged`, `ErrorKind::NewerFormat`, `ErrorKind::NoMemory`
    pub fn from_bytes(bytes: &[u8]) -> Result<Changes, Error> {
        Changes::decode(bytes, EncodedKind::Changes)
    }

    pub(super) fn decode(bytes: &[u8], as_what: EncodedKind) -> Result<Changes, Error> {
        let damaged = |check| as_what.damaged(check);
        let (content, checksum) = bytes.split_last_chunk().ok_or_else(|| damaged("it is too short"))?;
        let first = content.strip_prefix(&as_what.magic());
        let mut left = first.ok_or_else(|| damaged("its first bytes are others"))?;
        let mut number = || {
            let (first, rest) = left.split_first_chunk().ok_or_else(|| damaged("it is too short"))?;
            left = rest;
            Ok::<u64, Error>(u64::from_le_bytes(*first))
        };
        let version = number()?;
        if version != VERSION {
            return Err(as_what.newer(version));
        }
        if xxh3_64(content) != u64::from_le_bytes(*checksum) {
            return Err(damaged("the checksum does not match"));
        }
        let (flags, region_bytes, range_count) = (number()?, number()?, number()?);
        if flags > HAS_OLD {
            return Err(damaged("a flag is unknown"));
        }
        let (mut offsets, mut end) = (RangeSet::new(), 0);
        for index in 0..range_count {
            let (start, stop) = (number()?, number()?);
            let is_behind = index == 0 || start > end;
            if !is_behind || start >= stop || stop > region_bytes {
                return Err(damaged("the ranges are not in order"));
            }
            offsets.insert(Address::new(start)..Address::new(stop));
            end = stop;
        }
        // Ranges that are disjoint and below a number have a length that fits.
        let new_bytes = offsets.total_bytes().to_usize();
        let (new, old) = left.split_at_checked(new_bytes).ok_or_else(|| damaged("it is too short"))?;
        let has_old = flags == HAS_OLD;
        if old.len() != if has_old { new_bytes } else { 0 } {
            return Err(damaged("its length does not fit the ranges"));
        }
        let old = has_old.then(|| copy(old)).transpose()?;
        Ok(Changes { region_bytes: ByteCount::new(region_bytes), offsets, new: copy(new)?, old })
    }
}

/// # Errors
/// `ErrorKind::NoMemory`
fn copy(content: &[u8]) -> Result<Vec<u8>, Error> {
    let mut copy = room::vector(content.len()).map_err(Error::no_memory_for_changes)?;
    copy.extend(content);
    Ok(copy)
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes")
            .field("offsets", &self.offsets)
            .field("has_old", &self.has_old())
            .finish_non_exhaustive()
    }
}

impl EncodedKind {
    fn magic(self) -> [u8; 8] {
        match self {
            EncodedKind::Changes => *b"PMCHANGE",
            EncodedKind::Snapshot => *b"PMSNAPSH",
        }
    }

    fn object(self) -> Object {
        match self {
            EncodedKind::Changes => Object::Other("the encoding of changes".into()),
            EncodedKind::Snapshot => Object::Other("the encoding of a snapshot".into()),
        }
    }

    pub fn damaged(self, check: &str) -> Error {
        Error::damaged(ErrorKind::Damaged, self.object(), check)
    }

    fn newer(self, found: u64) -> Error {
        let kind = ErrorKind::NewerFormat { found, known: VERSION };
        let reason = format!("is of version {found}, and this version of Pagemark knows version {VERSION}");
        Error::about(kind, self.object(), reason)
    }
}

impl Region {
    /// Like [`Region::commit`], and returns the written content too, as it is after the transaction
    /// and, unless the region was made without rollback, as it was before it.
    ///
    /// The content that other threads write during the call is in these changes, and counts as
    /// written again afterwards.
    ///
    /// # Errors
    /// Those of [`Region::commit`], and `ErrorKind::NoMemory` if there is no memory for the
    /// content.
    pub fn commit_changes(&self) -> Result<Changes, Error> {
        self.check()?;
        let mut state = self.lock();
        if !state.is_open {
            return Err(Error::no_transaction());
        }
        state.collect()?;
        let changes = state.written_content(&self.shared_bytes())?;
        state.is_open = false;
        state.written.clear();
        Ok(changes)
    }

    /// Writes the parts of `changes`.
    fn write_changes<'content>(
        &self,
        changes: &Changes,
        parts: impl Iterator<Item = (usize, &'content [u8])>,
    ) -> Result<(), Error> {
        self.check()?;
        let bytes = ByteCount::from(self.bytes());
        if changes.region_bytes != bytes {
            return Err(Error::changes_of_another_length(changes.region_bytes, bytes));
        }
        let mut state = self.lock();
        let pinned = state.pin(&changes.offsets)?;
        for (offset, content) in parts {
            self.shared_bytes().write(offset, content);
        }
        state.unpin(&pinned);
        // Also where the content was the same.
        state.discarded.extend(&changes.offsets);
        Ok(())
    }
}

impl State {
    /// The content at the written offsets.
    fn written_content(&self, area: &SharedBytes<'_>) -> Result<Changes, Error> {
        let mut changes = Changes::none(area.bytes(), self.base.is_some());
        match &self.base {
            None => self.written.iter().try_for_each(|range| changes.add(&range, area, None))?,
            Some(base) => base.each_differing(
                area,
                &self.written,
                |offsets| self.holding(offsets),
                |range, old| changes.add(&range, area, Some(old)),
            )?,
        }
        Ok(changes)
    }
}
