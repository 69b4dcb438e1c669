//! The name of stored content: a keyed hash of it.

pub(crate) mod pages;

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Number of a space: part of a target, or of a checkpoint, whose content has addresses. In a
/// running target each new address space gets a new number. A process id that is reused, or a
/// process that executes another program, is therefore another space.
pub type SpaceId = u64;

/// The name under which a store holds content: the first 16 bytes of its keyed BLAKE3 hash.
///
/// The key belongs to the store, so that content prepared by a hostile target cannot collide on
/// purpose. [`ContentId::ZERO`] is reserved: it names a page of zeros (and the empty tree) and is
/// never stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ContentId(pub [u8; 16]);

impl ContentId {
    /// The page of zeros, and the tree without pages.
    pub const ZERO: ContentId = ContentId([0; 16]);

    /// True for the page of zeros and the empty tree.
    pub fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    /// The id of `content` under `key`. The caller must recognize content of zeros.
    pub fn of(key: &[u8; 32], content: &[u8]) -> ContentId {
        let hash = blake3::keyed_hash(key, content);
        let mut id = [0; 16];
        id.copy_from_slice(&hash.as_bytes()[..16]);
        ContentId(id)
    }

    /// Reads 32 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<ContentId> {
        from_hex(text).map(ContentId)
    }
}

/// Formats bytes as hexadecimal digits, two lower-case digits for each byte.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses hexadecimal digits in either case. `None` unless `text` has exactly two digits for each
/// of `BYTES` bytes.
pub(crate) fn from_hex<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    // `from_str_radix` accepts a sign.
    if text.len() != 2 * BYTES || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; BYTES];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentId({self})")
    }
}

impl Serialize for ContentId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ContentId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        ContentId::from_hex(&text).ok_or_else(|| serde::de::Error::custom("a content id is 32 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_read_as_written() {
        let id = ContentId::of(&[7; 32], b"content");
        assert_eq!(ContentId::from_hex(&id.to_string()), Some(id));
        assert_eq!(ContentId::from_hex("12"), None);
        assert_eq!(ContentId::from_hex(&"é".repeat(16)), None);
        assert_eq!(ContentId::from_hex(&"+f".repeat(16)), None);
    }

    #[test]
    fn the_key_changes_the_id() {
        assert_ne!(ContentId::of(&[1; 32], b"x"), ContentId::of(&[2; 32], b"x"));
    }
}
