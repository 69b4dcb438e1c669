//! A saved heap is loaded from a repository that may be damaged.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark::PAGE_SIZE;
use pagemark_heap::fuzzing::{header, saved_heap};

/// The pages that were used, the entries of pages, their bitmaps, a length, and the first page.
type Input<'a> = (u64, Vec<u32>, Vec<(u16, u8, u64)>, u64, &'a [u8]);

fuzz_target!(|input: Input| {
    let (used_pages, entries, bitmaps, bytes, first_page) = input;
    let mut page = [0; PAGE_SIZE];
    let length = first_page.len().min(PAGE_SIZE);
    page[..length].copy_from_slice(&first_page[..length]);
    header(&page, bytes);
    // A heap of 2 MiB has 512 pages. Half of the numbers are of entries that exist.
    let entries: Vec<u32> = entries.iter().map(|entry| if entry & 1 == 0 { entry >> 1 & 31 } else { entry >> 1 }).collect();
    let entries: Vec<u32> = entries.iter().map(|entry| if entry & 64 == 0 { *entry } else { 1 << 31 | entry & 63 }).collect();
    saved_heap(used_pages % 600, &entries, &bitmaps);
});
