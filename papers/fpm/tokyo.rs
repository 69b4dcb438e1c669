//! Tokyo Cabinet, a database library, with its hash table in memory: as Debian packages it. It uses
//! `malloc`, and is preloaded with another one.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::transmute;
use std::ptr::NonNull;

use super::Size;
use super::monitor::Monitor;
use crate::BenchError;

const LIBRARY: &CStr = c"libtokyocabinet.so.9";
const PROGRAM: &str = "Tokyo Cabinet";

/// The functions of the library, by its `tcutil.h`.
struct Library {
    handle: NonNull<c_void>,
}

type New = unsafe extern "C" fn() -> *mut c_void;
type Put = unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *const c_char, c_int);
type Get = unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut c_int) -> *mut c_void;
type Delete = unsafe extern "C" fn(*mut c_void);

/// A database.
struct Database {
    data: *mut c_void,
    put: Put,
    get: Get,
    delete: Delete,
}

/// True if the library is installed.
pub(super) fn is_installed() -> bool {
    Library::open().is_ok()
}

/// Inserts records, `records` in full size, of a key of 8 bytes and a value of the rest of
/// `record_bytes`, and reads all of them.
pub(super) fn run(monitor: &Monitor<'_>, size: Size, records: u64, record_bytes: usize) -> Result<(), BenchError> {
    let database = Library::open()?.database()?;
    let records = size.of(records);
    let mut value = vec![0; record_bytes - 8];
    for record in 0..records {
        fill(&mut value, record);
        database.put(&record.to_be_bytes(), &value);
        monitor.step()?;
    }
    monitor.finish()?;
    for record in 0..records {
        fill(&mut value, record);
        if !database.holds(&record.to_be_bytes(), &value) {
            return Err(BenchError::wrong_result(PROGRAM, format!("record {record} is not as it was inserted")));
        }
    }
    Ok(())
}

/// The value of a record.
fn fill(value: &mut [u8], record: u64) {
    value.iter_mut().zip((record.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes().into_iter().cycle()).for_each(
        |(byte, of_record)| {
            *byte = of_record;
        },
    );
}

impl Library {
    fn open() -> Result<Library, BenchError> {
        // SAFETY: a library of Debian's, whose initializers only set its tables.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
        let missing =
            || io::Error::new(io::ErrorKind::NotFound, "libtokyocabinet.so.9 is missing: install libtokyocabinet9");
        let handle = NonNull::new(handle).ok_or_else(|| BenchError::on("load Tokyo Cabinet")(missing()))?;
        Ok(Library { handle })
    }

    fn function(&self, name: &CStr) -> Result<*mut c_void, BenchError> {
        // SAFETY: the handle is that of a library, and the name is a string.
        let function = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("it has no {}", name.to_string_lossy()));
        if function.is_null() { Err(BenchError::on("use Tokyo Cabinet")(missing())) } else { Ok(function) }
    }

    fn database(&self) -> Result<Database, BenchError> {
        let (new, put) = (self.function(c"tcmdbnew")?, self.function(c"tcmdbput")?);
        let (get, delete) = (self.function(c"tcmdbget")?, self.function(c"tcmdbdel")?);
        // SAFETY: the library's header declares the functions so. The library stays loaded.
        unsafe {
            Ok(Database {
                data: transmute::<*mut c_void, New>(new)(),
                put: transmute::<*mut c_void, Put>(put),
                get: transmute::<*mut c_void, Get>(get),
                delete: transmute::<*mut c_void, Delete>(delete),
            })
        }
    }
}

impl Database {
    fn put(&self, key: &[u8], value: &[u8]) {
        let (key_bytes, value_bytes) = (key.len() as c_int, value.len() as c_int);
        // SAFETY: key and value have these lengths. The database copies them.
        unsafe { (self.put)(self.data, key.as_ptr().cast(), key_bytes, value.as_ptr().cast(), value_bytes) }
    }

    fn holds(&self, key: &[u8], value: &[u8]) -> bool {
        let mut bytes = 0;
        // SAFETY: the key has this length. What is returned has `bytes` bytes, and is the caller's
        // to free.
        unsafe {
            let found = (self.get)(self.data, key.as_ptr().cast(), key.len() as c_int, &mut bytes);
            if found.is_null() {
                return false;
            }
            let is_same = std::slice::from_raw_parts(found.cast::<u8>(), bytes as usize) == value;
            libc::free(found);
            is_same
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: the database is not used again.
        unsafe { (self.delete)(self.data) }
    }
}
