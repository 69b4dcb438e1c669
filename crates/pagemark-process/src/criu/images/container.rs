//! The container of CRIU's images: two magic numbers, then messages, each preceded by its length.

use std::path::Path;

use pagemark_trace::error::Error;
use prost::Message;

use super::schema::PacketEntry;

/// First magic number of every image except the inventory.
const COMMON_MAGIC: u32 = 0x5456_4319;

/// Limit of the size of an image, bytes. The largest images describe memory, with about ten bytes
/// for a run of pages.
const LARGEST_IMAGE: u64 = 1 << 30;

/// The kind of an image, by the objects it describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageKind {
    /// `pagemap-PID.img`: the saved pages.
    Pagemap,
    /// `pstree.img`: the processes.
    Pstree,
    /// `core-TID.img`: a thread's registers; for the first thread of a process also the process.
    Core,
    /// `mm-PID.img`: the mappings.
    Mm,
    /// `files.img`: the open files.
    Files,
    /// `fdinfo-N.img`: the descriptors of one table, with the ids of their open files.
    Descriptors,
    /// `tty-info.img`: the terminals.
    Terminals,
    /// `netns-N.img`: a network namespace.
    Network,
    /// `netdev-N.img`: the interfaces of a network namespace.
    Interfaces,
    /// `mountpoints-N.img`: the mounts of a mount namespace.
    Mounts,
    /// `remap-fpath.img`: the files whose paths did not lead to them.
    Remaps,
    /// `fs-PID.img`: the directories of a process.
    Directories,
    /// `ids-PID.img`: what a process shares with others.
    Ids,
    /// `userns-N.img`: a user namespace.
    UserNamespace,
    /// `ghost-file-N.img`: a file without a name. Its content follows the first message.
    Ghost,
    /// `sk-queues.img`: what waits in sockets. The bytes of each follow its message.
    Queues,
}

impl ImageKind {
    /// Second magic number, as in CRIU's `magic.h`.
    fn magic(self) -> u32 {
        match self {
            ImageKind::Pagemap => 0x5608_4025,
            ImageKind::Pstree => 0x5027_3030,
            ImageKind::Core => 0x5505_3847,
            ImageKind::Mm => 0x5749_2820,
            ImageKind::Files => 0x5630_3138,
            ImageKind::Descriptors => 0x5621_3732,
            ImageKind::Terminals => 0x5945_3036,
            ImageKind::Network => 0x5593_3752,
            ImageKind::Interfaces => 0x5737_3951,
            ImageKind::Mounts => 0x5556_3928,
            ImageKind::Remaps => 0x5913_3954,
            ImageKind::Directories => 0x5140_3912,
            ImageKind::Ids => 0x5443_2030,
            ImageKind::UserNamespace => 0x5547_4906,
            ImageKind::Ghost => 0x5258_3605,
            ImageKind::Queues => 0x5626_4026,
        }
    }
}

/// An image as it was read, its messages undecoded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    kind: ImageKind,
    /// The encoded messages.
    pub messages: Vec<Vec<u8>>,
}

impl Image {
    /// An image without messages.
    pub fn new(kind: ImageKind) -> Image {
        Image { kind, messages: Vec::new() }
    }

    /// Reads an image.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read, is damaged or is of another kind.
    pub fn read(path: &Path, kind: ImageKind) -> Result<Image, Error> {
        let error = |reason: String| Error::image(path, reason);
        let size = path.metadata().map_err(|e| error(e.to_string()))?.len();
        if size > LARGEST_IMAGE {
            return Err(error(format!("it has {size} bytes, which is too many")));
        }
        let bytes = std::fs::read(path).map_err(|e| error(e.to_string()))?;
        Image::decode(&bytes, kind).map_err(error)
    }

    /// Decodes the content of an image file into messages.
    ///
    /// # Errors
    /// The reason why it is no image of this kind.
    pub fn decode(bytes: &[u8], kind: ImageKind) -> Result<Image, String> {
        let mut rest = content_of(bytes, kind)?;
        let mut messages = Vec::new();
        while !rest.is_empty() {
            messages.push(next_message(&mut rest)?.to_vec());
        }
        Ok(Image { kind, messages })
    }

    /// The messages of an image that was read from `path`, and whose messages are all of one type.
    ///
    /// # Errors
    /// [`Error`]: one cannot be decoded.
    pub(crate) fn decoded<M: Message + Default>(&self, path: &Path) -> Result<Vec<M>, Error> {
        let decode = |message: &Vec<u8>| M::decode(message.as_slice());
        let error = |e: prost::DecodeError| Error::image(path, e.to_string());
        self.messages.iter().map(decode).collect::<Result<_, _>>().map_err(error)
    }

    /// Encodes the image as the content of a file.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(COMMON_MAGIC.to_le_bytes());
        bytes.extend(self.kind.magic().to_le_bytes());
        for message in &self.messages {
            bytes.extend((message.len() as u32).to_le_bytes());
            bytes.extend(message);
        }
        bytes
    }
}

/// What follows the magic numbers of an image.
fn content_of(bytes: &[u8], kind: ImageKind) -> Result<&[u8], String> {
    let content = bytes.strip_prefix(&COMMON_MAGIC.to_le_bytes());
    let content = content.and_then(|rest| rest.strip_prefix(&kind.magic().to_le_bytes()));
    content.ok_or_else(|| format!("it does not begin as a {kind:?} image does"))
}

fn next_message<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], String> {
    let (length, tail) = rest.split_first_chunk().ok_or("it ends within a length")?;
    let length = u32::from_le_bytes(*length) as usize;
    let message = tail.get(..length).ok_or("it ends within a message")?;
    *rest = &tail[length..];
    Ok(message)
}

/// Decodes the content of `sk-queues.img` into what waits in sockets, in its order, with the bytes
/// of each.
///
/// # Errors
/// The reason why it is no such image.
pub fn decode_queues(bytes: &[u8]) -> Result<Vec<(PacketEntry, &[u8])>, String> {
    let mut rest = content_of(bytes, ImageKind::Queues)?;
    let mut packets = Vec::new();
    while !rest.is_empty() {
        let packet = PacketEntry::decode(next_message(&mut rest)?).map_err(|error| error.to_string())?;
        let content = rest.get(..packet.length as usize).ok_or("it ends within a packet")?;
        rest = &rest[content.len()..];
        packets.push((packet, content));
    }
    Ok(packets)
}

/// Reads the first message of an image.
///
/// # Errors
/// [`Error`]: the image cannot be read or decoded.
pub fn read_first<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<M, Error> {
    let image = Image::read(path, kind)?;
    let error = |reason: String| Error::image(path, reason);
    let message = image.messages.first().ok_or_else(|| error("it has no message".into()))?;
    M::decode(message.as_slice()).map_err(|e| error(e.to_string()))
}

/// Reads the messages of an image, which are all of one type.
///
/// # Errors
/// [`Error`]: the image cannot be read or decoded.
pub fn read_all<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<Vec<M>, Error> {
    Image::read(path, kind)?.decoded(path)
}

/// Returns an encoded message with one field of varint type replaced. All other fields, also
/// undeclared ones, are kept.
pub(crate) fn with_varint(message: &[u8], field: u32, value: u64) -> Vec<u8> {
    use prost::encoding::{WireType, encode_key, encode_varint};
    let mut output = without(message, field);
    encode_key(field, WireType::Varint, &mut output);
    encode_varint(value, &mut output);
    output
}

/// Returns an encoded message with one field of message type replaced. All other fields, also
/// undeclared ones, are kept.
pub(crate) fn with_bytes(message: &[u8], field: u32, value: &[u8]) -> Vec<u8> {
    use prost::encoding::{WireType, encode_key, encode_varint};
    let mut output = without(message, field);
    encode_key(field, WireType::LengthDelimited, &mut output);
    encode_varint(value.len() as u64, &mut output);
    output.extend_from_slice(value);
    output
}

/// The content of a field of message or string type, without its length. If the field is there more
/// than once, of the last. The message must have been decoded successfully before.
pub(crate) fn bytes_of(message: &[u8], field: u32) -> Option<&[u8]> {
    use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
    let (mut rest, mut found) = (message, None);
    while !rest.is_empty() {
        let (tag, wire_type) = decode_key(&mut rest).ok()?;
        if tag == field && wire_type == WireType::LengthDelimited {
            let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
            found = Some(rest.get(..length)?);
            rest = &rest[length..];
        } else {
            skip_field(wire_type, tag, &mut rest, DecodeContext::default()).ok()?;
        }
    }
    found
}

/// Returns an encoded message without one of its fields. The message must have been decoded
/// successfully before.
pub(crate) fn without(message: &[u8], field: u32) -> Vec<u8> {
    use prost::encoding::{DecodeContext, decode_key, skip_field};
    let mut output = Vec::with_capacity(message.len() + 2);
    let mut rest = message;
    while !rest.is_empty() {
        let begin = rest;
        let Ok((tag, wire_type)) = decode_key(&mut rest) else { break };
        if skip_field(wire_type, tag, &mut rest, DecodeContext::default()).is_err() {
            break;
        }
        if tag != field {
            output.extend_from_slice(&begin[..begin.len() - rest.len()]);
        }
    }
    output
}

/// Returns an encoded message in which `change` has replaced each field of message type with this
/// number, in its place, where it returns the contents of others. The message must have been
/// decoded successfully before.
pub(crate) fn with_each(message: &[u8], field: u32, mut change: impl FnMut(&[u8]) -> Option<Vec<Vec<u8>>>) -> Vec<u8> {
    use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field};
    let mut output = Vec::with_capacity(message.len() + 64);
    let mut rest = message;
    while !rest.is_empty() {
        let begin = rest;
        let Ok((tag, wire_type)) = decode_key(&mut rest) else { break };
        let mut after_key = rest;
        if skip_field(wire_type, tag, &mut rest, DecodeContext::default()).is_err() {
            break;
        }
        let changed = if tag == field && wire_type == WireType::LengthDelimited {
            let _ = decode_varint(&mut after_key);
            change(&after_key[..after_key.len() - rest.len()])
        } else {
            None
        };
        match changed {
            Some(contents) => {
                for content in contents {
                    encode_key(field, WireType::LengthDelimited, &mut output);
                    encode_varint(content.len() as u64, &mut output);
                    output.extend_from_slice(&content);
                }
            }
            None => output.extend_from_slice(&begin[..begin.len() - rest.len()]),
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::schema::{PAGE_LAZY, PAGE_PRESENT, PagemapEntry};
    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), field in 0_u32..20) {
            let _ = Image::decode(&bytes, ImageKind::Core);
            let _ = without(&bytes, field);
            let _ = decode_queues(&bytes);
            let _ = bytes_of(&bytes, field);
            let _ = with_each(&bytes, field, |content| Some(vec![content.to_vec()]));
            let magics = [COMMON_MAGIC.to_le_bytes(), ImageKind::Core.magic().to_le_bytes()].concat();
            if let Ok(image) = Image::decode(&[magics, bytes].concat(), ImageKind::Core) {
                prop_assert_eq!(Image::decode(&image.encode(), ImageKind::Core), Ok(image));
            }
        }
    }

    #[test]
    fn unknown_fields_are_kept() {
        let entry = PagemapEntry { vaddr: 4096, nr_pages: Some(1), flags: Some(PAGE_LAZY), ..Default::default() };
        // Field 99, a string.
        let unknown = [0x9a, 0x06, 0x03, b'a', b'b', b'c'];
        let message = [entry.encode_to_vec(), unknown.to_vec()].concat();
        let changed = with_varint(&message, PagemapEntry::FLAGS, u64::from(PAGE_PRESENT));
        assert!(changed.windows(unknown.len()).any(|window| window == unknown));
        assert_eq!(PagemapEntry::decode(changed.as_slice()).unwrap().flags, Some(PAGE_PRESENT));
    }
}
