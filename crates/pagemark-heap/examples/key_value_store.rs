//! A key-value store in memory that survives its program: a hash table whose pointers are saved
//! with it. Once it is `ready`, it reads commands, a line each, and answers each with a line:
//!
//! ```text
//! set KEY VALUE     ok
//! get KEY           VALUE, or: none
//! delete KEY        ok, or: none
//! list              KEY VALUE for each key, in any order; then: end
//! save              saved NUMBER, once the checkpoint is on disk
//! ```
//!
//! Killed at any moment and started again, it has what the last `save` saved.
//!
//! `cargo run --release -p pagemark-heap --example key_value_store -- REPOSITORY`

use std::alloc::{GlobalAlloc, Layout};
use std::error::Error;
use std::io::{self, BufRead, Write};
use std::path::Path;
use std::ptr::null_mut;

use pagemark::ByteCount;
use pagemark::repository::Repository;
use pagemark_heap::{ErrorKind, HeapOptions, SavedHeap};

const JOB: &str = "key-value-store";

/// The root of the heap. It and all that it leads to are at the same addresses in each run.
#[repr(C)]
struct Table {
    entry_count: usize,
    bucket_count: usize,
    /// The first entry of each bucket, or null.
    buckets: *mut *mut Entry,
}

/// A key and its value, whose bytes are behind it.
#[repr(C)]
struct Entry {
    next: *mut Entry,
    key_bytes: usize,
    value_bytes: usize,
}

impl Entry {
    fn layout(key_bytes: usize, value_bytes: usize) -> Option<Layout> {
        let bytes = Layout::array::<u8>(key_bytes.checked_add(value_bytes)?).ok()?;
        Some(Layout::new::<Entry>().extend(bytes).ok()?.0)
    }

    /// # Safety
    /// The entry is live for `'a`.
    unsafe fn key<'a>(entry: *const Entry) -> &'a [u8] {
        // SAFETY: the key is behind the entry.
        unsafe { std::slice::from_raw_parts(entry.add(1).cast(), (*entry).key_bytes) }
    }

    /// # Safety
    /// The entry is live for `'a`.
    unsafe fn value<'a>(entry: *const Entry) -> &'a [u8] {
        // SAFETY: the value is behind the key.
        unsafe { std::slice::from_raw_parts(entry.add(1).cast::<u8>().add((*entry).key_bytes), (*entry).value_bytes) }
    }
}

/// The heap is full.
#[derive(Debug)]
struct Full;

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the heap is full")
    }
}

impl Error for Full {}

/// The table in a heap. All its pointers are those of live objects.
struct Store {
    heap: SavedHeap,
    table: *mut Table,
}

impl Store {
    /// Opens what was saved last, or makes an empty table.
    fn open(repository: &Repository) -> Result<Store, Box<dyn Error>> {
        let options = HeapOptions { capacity: ByteCount::new(4 << 30), version: 1, ..HeapOptions::default() };
        let heap = match SavedHeap::open(repository, JOB, options) {
            Err(error) if error.kind() == ErrorKind::NeverSaved => SavedHeap::create(repository, JOB, options)?,
            opened => opened?,
        };
        let mut store = Store { table: heap.root(), heap };
        if store.table.is_null() {
            store.table = store.object(Layout::new::<Table>())?.cast();
            let (buckets, bucket_count) = (store.buckets(64)?, 64);
            // SAFETY: the object was just made for it.
            unsafe { store.table.write(Table { entry_count: 0, bucket_count, buckets }) };
            store.heap.set_root(store.table)?;
        }
        Ok(store)
    }

    fn object(&self, layout: Layout) -> Result<*mut u8, Full> {
        // SAFETY: no layout here is empty.
        let object = unsafe { self.heap.alloc_zeroed(layout) };
        if object.is_null() { Err(Full) } else { Ok(object) }
    }

    fn buckets(&self, count: usize) -> Result<*mut *mut Entry, Full> {
        Ok(self.object(Layout::array::<*mut Entry>(count).map_err(|_| Full)?)?.cast())
    }

    fn table(&self) -> &Table {
        // SAFETY: the table is live, and is changed only by methods that borrow the store mutably.
        unsafe { &*self.table }
    }

    /// The place of the pointer to the entry of a key, or of the null behind the last entry of its
    /// bucket.
    fn place(&self, key: &[u8]) -> *mut *mut Entry {
        let table = self.table();
        // SAFETY: the bucket is one of the table, and the entries are live.
        unsafe {
            let mut place = table.buckets.add(hash(key) % table.bucket_count);
            while !(*place).is_null() && Entry::key(*place) != key {
                place = &raw mut (**place).next;
            }
            place
        }
    }

    fn get(&self, key: &[u8]) -> Option<&[u8]> {
        // SAFETY: the place holds an entry or null, and the value lives until the store is changed.
        unsafe {
            let entry = *self.place(key);
            (!entry.is_null()).then(|| Entry::value(entry))
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Full> {
        if self.table().entry_count >= self.table().bucket_count {
            self.grow()?;
        }
        let entry = self.object(Entry::layout(key.len(), value.len()).ok_or(Full)?)?.cast::<Entry>();
        // SAFETY: the object has room for the entry, the key and the value.
        unsafe {
            entry.write(Entry { next: null_mut(), key_bytes: key.len(), value_bytes: value.len() });
            let bytes = entry.add(1).cast::<u8>();
            bytes.copy_from_nonoverlapping(key.as_ptr(), key.len());
            bytes.add(key.len()).copy_from_nonoverlapping(value.as_ptr(), value.len());
        }
        self.delete(key);
        let place = self.place(key);
        // SAFETY: the place is that of the null at the end of the bucket.
        unsafe {
            *place = entry;
            (*self.table).entry_count += 1;
        }
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let place = self.place(key);
        // SAFETY: the entry, if there is one, is live, and nobody uses it any more.
        unsafe {
            let entry = *place;
            if entry.is_null() {
                return false;
            }
            *place = (*entry).next;
            (*self.table).entry_count -= 1;
            if let Some(layout) = Entry::layout((*entry).key_bytes, (*entry).value_bytes) {
                self.heap.dealloc(entry.cast(), layout);
            }
        }
        true
    }

    /// Doubles the number of buckets.
    fn grow(&mut self) -> Result<(), Full> {
        let Table { bucket_count, buckets, .. } = *self.table();
        let doubled = self.buckets(2 * bucket_count)?;
        // SAFETY: both arrays are live, and each entry is in one list at a time.
        unsafe {
            for bucket in 0..bucket_count {
                let mut entry = *buckets.add(bucket);
                while !entry.is_null() {
                    let next = (*entry).next;
                    let place = doubled.add(hash(Entry::key(entry)) % (2 * bucket_count));
                    (*entry).next = *place;
                    *place = entry;
                    entry = next;
                }
            }
            (*self.table).buckets = doubled;
            (*self.table).bucket_count = 2 * bucket_count;
            if let Ok(layout) = Layout::array::<*mut Entry>(bucket_count) {
                self.heap.dealloc(buckets.cast(), layout);
            }
        }
        Ok(())
    }

    /// Calls `each` with all keys and values.
    fn list(&self, mut each: impl FnMut(&[u8], &[u8]) -> io::Result<()>) -> io::Result<()> {
        let table = self.table();
        for bucket in 0..table.bucket_count {
            // SAFETY: the buckets and the entries are live.
            unsafe {
                let mut entry = *table.buckets.add(bucket);
                while !entry.is_null() {
                    each(Entry::key(entry), Entry::value(entry))?;
                    entry = (*entry).next;
                }
            }
        }
        Ok(())
    }
}

/// FNV-1a. The hashes of the standard library may be others in the next version.
fn hash(key: &[u8]) -> usize {
    key.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
        as usize
}

/// Serves until the input ends.
pub fn serve(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut store = Store::open(&Repository::open_or_create(path)?)?;
    let mut output = io::stdout().lock();
    writeln!(output, "ready")?;
    output.flush()?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let (key, value) = rest.split_once(' ').unwrap_or((rest, ""));
        let (key, value) = (key.as_bytes(), value.as_bytes());
        match command {
            "set" => {
                store.set(key, value)?;
                writeln!(output, "ok")?;
            }
            "get" => writeln!(output, "{}", store.get(key).map_or("none".into(), String::from_utf8_lossy))?,
            "delete" => writeln!(output, "{}", if store.delete(key) { "ok" } else { "none" })?,
            "list" => {
                let text = String::from_utf8_lossy;
                store.list(|key, value| writeln!(output, "{} {}", text(key), text(value)))?;
                writeln!(output, "end")?;
            }
            "save" => writeln!(output, "saved {}", store.heap.checkpoint()?.sequence)?,
            _ => writeln!(output, "unknown command")?,
        }
        output.flush()?;
    }
    Ok(())
}

#[allow(dead_code, reason = "a test serves by itself")]
fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: key_value_store REPOSITORY")?;
    serve(Path::new(&path))
}
