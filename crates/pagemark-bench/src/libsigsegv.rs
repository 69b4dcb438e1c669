//! Transactions by libsigsegv, the library with which programs handle page faults themselves: its
//! handler copies a page before the first write to it, and a rollback copies the pages back.
//!
//! The library is loaded while the program runs, so that building needs no package (Debian's
//! `libsigsegv2` for the measurement).

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use pagemark::PAGE_SIZE;
use pagemark::sys::own_memory::Mapping;

/// `sigsegv_handler_t`.
type Handler = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;

/// The functions of the library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    install: unsafe extern "C" fn(Handler) -> c_int,
    deinstall: unsafe extern "C" fn(),
}

impl Library {
    /// Loads the library; `None` where it is not installed.
    pub fn load() -> Option<Library> {
        // SAFETY: the library has no initializer that needs anything. It is never unloaded.
        let library = unsafe { libc::dlopen(c"libsigsegv.so.2".as_ptr(), libc::RTLD_NOW) };
        let library = NonNull::new(library)?;
        // SAFETY: the handle is that of the library, and the name is a C string.
        let symbol = |name: &CStr| NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) });
        let (install, deinstall) = (symbol(c"sigsegv_install_handler")?, symbol(c"sigsegv_deinstall_handler")?);
        // SAFETY: these are the types that the header of the library gives the functions.
        Some(unsafe {
            Library {
                install: std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(Handler) -> c_int>(install),
                deinstall: std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn()>(deinstall),
            }
        })
    }
}

/// Memory whose writes can be undone.
#[derive(Debug)]
pub(crate) struct UndoneMemory {
    memory: Mapping,
    log: Box<Log>,
    library: Library,
}

/// The pages that were written in a transaction, and their earlier content.
#[derive(Debug)]
struct Log {
    start: NonNull<u8>,
    bytes: usize,
    /// As long as the memory; only the parts in use take memory.
    copies: Mapping,
    pages: Vec<usize>,
}

/// The log that the handler writes.
static LOG: AtomicPtr<Log> = AtomicPtr::new(std::ptr::null_mut());

/// Copies the page of a fault to the log, and opens the page.
///
/// # Safety
/// Only the thread that writes the memory raises faults, and it uses the log at no other time.
unsafe extern "C" fn handle(address: *mut c_void, _serious: c_int) -> c_int {
    // SAFETY: the log lives until the handler is removed, and its owner waits for the write that
    // has caused this fault.
    let Some(log) = (unsafe { LOG.load(Ordering::Relaxed).as_mut() }) else { return 0 };
    let offset = address.addr().wrapping_sub(log.start.addr().get());
    if offset >= log.bytes {
        return 0;
    }
    let page = offset / PAGE_SIZE;
    let place = log.pages.len() * PAGE_SIZE;
    // SAFETY: the page lies in the memory, and the log has a place for each page.
    unsafe {
        let from = log.start.add(page * PAGE_SIZE);
        std::ptr::copy_nonoverlapping(from.as_ptr(), log.copies.start().add(place).as_ptr(), PAGE_SIZE);
        if libc::mprotect(from.as_ptr().cast(), PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            return 0;
        }
    }
    // There is room for all pages, so that this allocates nothing.
    log.pages.push(page);
    1
}

impl UndoneMemory {
    /// Maps memory and installs the handler. One can exist at a time.
    ///
    /// # Errors
    /// There is no room, or the library refuses the handler.
    pub fn new(library: Library, pages: usize) -> io::Result<UndoneMemory> {
        let bytes = pages * PAGE_SIZE;
        let memory = Mapping::new(bytes)?;
        let log = Log { start: memory.start(), bytes, copies: Mapping::new(bytes)?, pages: Vec::with_capacity(pages) };
        let mut undone = UndoneMemory { memory, log: Box::new(log), library };
        LOG.store(&raw mut *undone.log, Ordering::Relaxed);
        // SAFETY: the handler follows the rules of the library, and is removed before its log is.
        if unsafe { (library.install)(handle) } != 0 {
            return Err(io::Error::other("libsigsegv refuses a handler"));
        }
        Ok(undone)
    }

    /// The memory.
    pub fn start(&self) -> NonNull<u8> {
        self.memory.start()
    }

    /// Begins a transaction: protects all pages.
    ///
    /// # Errors
    /// Those of `mprotect`.
    pub fn begin(&mut self) -> io::Result<()> {
        self.log.pages.clear();
        self.set_access(libc::PROT_READ)
    }

    /// Copies the written pages back and opens the memory. Returns their number.
    ///
    /// # Errors
    /// Those of `mprotect`.
    pub fn roll_back(&mut self) -> io::Result<usize> {
        for (index, &page) in self.log.pages.iter().enumerate() {
            // SAFETY: the page is open, lies in the memory, and the log holds its content.
            unsafe {
                let from = self.log.copies.start().add(index * PAGE_SIZE);
                let to = self.memory.start().add(page * PAGE_SIZE);
                std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), PAGE_SIZE);
            }
        }
        self.set_access(libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(self.log.pages.len())
    }

    fn set_access(&self, access: c_int) -> io::Result<()> {
        // SAFETY: the memory is ours; its writes wait for the handler.
        let result = unsafe { libc::mprotect(self.memory.start().as_ptr().cast(), self.memory.bytes(), access) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for UndoneMemory {
    fn drop(&mut self) {
        // SAFETY: nobody writes protected memory any more.
        unsafe { (self.library.deinstall)() };
        LOG.store(std::ptr::null_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_in_a_transaction_is_undone() {
        let Some(library) = Library::load() else { pagemark_testing::skip!("libsigsegv is not installed") };
        let mut memory = UndoneMemory::new(library, 10).unwrap();
        // SAFETY: the bytes lie in the memory, which only this test uses.
        let (load, store) = unsafe {
            let at = memory.start();
            (
                move |offset: usize| at.add(offset).as_ptr().read_volatile(),
                move |offset: usize, value| at.add(offset).as_ptr().write_volatile(value),
            )
        };
        store(3 * PAGE_SIZE, 1);
        for _ in 0..2 {
            memory.begin().unwrap();
            [3 * PAGE_SIZE, 3 * PAGE_SIZE + 1, 9 * PAGE_SIZE].into_iter().for_each(|offset| store(offset, 7));
            assert_eq!(load(3 * PAGE_SIZE), 7);
            assert_eq!(memory.roll_back().unwrap(), 2);
            assert_eq!([3 * PAGE_SIZE, 3 * PAGE_SIZE + 1, 9 * PAGE_SIZE].map(load), [1, 0, 0]);
        }
    }
}
