//! A checkpoint as a stream of QEMU's migration: what QEMU with `-incoming` reads.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use pagemark::{ContentId, PAGE_SIZE, PageNumber, PageTree};

use crate::error::{Error, Result};
use crate::memory::registers::SECTION_FOOTER;
use crate::restore::Restore;
use crate::restore::images::copy_pages;

/// What a stream begins with, and its version.
const MAGIC: [u8; 8] = *b"QEVM\0\0\0\x03";

/// Kinds of sections.
const END_OF_STREAM: u8 = 0;
const SECTION_START: u8 = 1;
const SECTION_END: u8 = 3;
const DESCRIPTION: u8 = 6;
const CONFIGURATION: u8 = 7;

/// The number of the section of the memory. The devices have small numbers.
const RAM_SECTION: u32 = 0x706d_0000;
const RAM_VERSION: u32 = 4;

/// What a word of the memory's section says besides an address.
const ZERO_PAGE: u64 = 0x02;
const LENGTHS: u64 = 0x04;
const WHOLE_PAGE: u64 = 0x08;
const END_OF_PART: u64 = 0x10;
const SAME_BLOCK: u64 = 0x20;

/// How many pages are read at once.
const BATCH_PAGES: u64 = 4096;

/// Writes the stream of a machine of this type, with its memory and devices.
pub(crate) fn write(restore: &Restore<'_>, machine: &str, out: &mut dyn Write) -> Result<()> {
    let devices = restore.devices()?;
    let devices = devices.strip_prefix(&MAGIC).ok_or_else(|| Error::damaged("its devices have no known form"))?;
    let parts = Parts { has_footers: has_footers(devices) };
    let failed = || Error::system("write the migration stream");
    let mut head = MAGIC.to_vec();
    // Machines of the versions without footers have no configuration either.
    if parts.has_footers {
        head.push(CONFIGURATION);
        long_text(&mut head, machine);
    }
    let spaces = restore.ram_spaces()?;
    head.push(SECTION_START);
    head.extend(RAM_SECTION.to_be_bytes());
    short_text(&mut head, "ram")?;
    head.extend(0u32.to_be_bytes());
    head.extend(RAM_VERSION.to_be_bytes());
    let all: u64 = spaces.iter().map(|(_, bytes)| bytes.get()).sum();
    head.extend((all | LENGTHS).to_be_bytes());
    for (space, bytes) in &spaces {
        short_text(&mut head, &space.label)?;
        head.extend(bytes.get().to_be_bytes());
    }
    head.extend(END_OF_PART.to_be_bytes());
    parts.end(&mut head);
    head.push(SECTION_END);
    head.extend(RAM_SECTION.to_be_bytes());
    out.write_all(&head).map_err(failed())?;
    for (space, bytes) in &spaces {
        let tree = PageTree::load(space.root, restore.store())?;
        write_block(restore, &tree, &space.label, bytes.pages_rounded_up(), out)?;
    }
    let mut tail = END_OF_PART.to_be_bytes().to_vec();
    parts.end(&mut tail);
    tail.extend(devices);
    // What describes the devices for people is expected, and may be empty.
    tail.push(DESCRIPTION);
    long_text(&mut tail, "{}");
    out.write_all(&tail).map_err(failed())
}

/// True if each section has a footer: then there is one before the end of the stream.
fn has_footers(devices: &[u8]) -> bool {
    devices.len() > 6 && devices[devices.len() - 6] == SECTION_FOOTER && devices.ends_with(&[END_OF_STREAM])
}

struct Parts {
    has_footers: bool,
}

impl Parts {
    /// Ends a section of the memory.
    fn end(&self, bytes: &mut Vec<u8>) {
        if self.has_footers {
            bytes.push(SECTION_FOOTER);
            bytes.extend(RAM_SECTION.to_be_bytes());
        }
    }
}

/// Adds a text behind its length, which is a byte.
fn short_text(bytes: &mut Vec<u8>, text: &str) -> Result<()> {
    bytes.push(u8::try_from(text.len()).map_err(|_| Error::damaged(format!("the name {text} is too long")))?);
    bytes.extend(text.as_bytes());
    Ok(())
}

/// Adds a text behind its length, which is a word.
fn long_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u32).to_be_bytes());
    bytes.extend(text.as_bytes());
}

/// Writes all pages of a block, also those of zeros: QEMU itself fills parts of new memory.
fn write_block(restore: &Restore<'_>, tree: &PageTree, name: &str, pages: u64, out: &mut dyn Write) -> Result<()> {
    let mut named = Vec::new();
    short_text(&mut named, name)?;
    let mut content = vec![0; BATCH_PAGES as usize * PAGE_SIZE];
    let mut words = Vec::new();
    for first in (0..pages).step_by(BATCH_PAGES as usize) {
        let last = pages.min(first + BATCH_PAGES);
        let range = PageNumber::new(first)..PageNumber::new(last);
        let (held, ids): (Vec<PageNumber>, Vec<ContentId>) = tree.range(range).unzip();
        read(restore, first, &held, &ids, &mut content)?;
        words.clear();
        let mut held = held.iter().peekable();
        for page in first..last {
            let is_held = held.next_if(|next| next.get() == page).is_some();
            let mut word = PageNumber::new(page).address().get() | if is_held { WHOLE_PAGE } else { ZERO_PAGE };
            if page > 0 {
                word |= SAME_BLOCK;
            }
            words.extend(word.to_be_bytes());
            if page == 0 {
                words.extend(&named);
            }
            match is_held {
                true => {
                    let at = (page - first) as usize * PAGE_SIZE;
                    words.extend(&content[at..at + PAGE_SIZE]);
                }
                // The byte that the page is filled with.
                false => words.push(0),
            }
        }
        out.write_all(&words).map_err(Error::system("write the migration stream"))?;
    }
    Ok(())
}

/// Reads pages into `content`, which begins with the page `first`.
fn read(restore: &Restore<'_>, first: u64, pages: &[PageNumber], ids: &[ContentId], content: &mut [u8]) -> Result<()> {
    let content = Mutex::new(content);
    let copied = copy_pages(restore.store(), ids, pages, &|page, bytes| {
        let at = (page.get() - first) as usize * PAGE_SIZE;
        let mut content = content.lock().unwrap_or_else(PoisonError::into_inner);
        let place = content.get_mut(at..at + bytes.len()).ok_or(io::ErrorKind::InvalidData)?;
        place.copy_from_slice(bytes);
        Ok(())
    });
    copied?.map_err(Error::system("read the memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn footers_are_recognized_at_the_end() {
        assert!(has_footers(b"..\x7e\0\0\0\x2f\0"));
        assert!(!has_footers(b"\x7e\0\0\0\x2f\0"));
        assert!(!has_footers(b"........\0") && !has_footers(b"..\x7e\0\0\0\x2f\x01") && !has_footers(b""));
        assert!(short_text(&mut Vec::new(), &"x".repeat(256)).is_err());
    }
}
