//! Transactions by libsigsegv, the library with which programs handle page faults themselves: its
//! handler copies a page before the first write to it.
//!
//! The library is loaded while the program runs, so that building needs no package (Debian's
//! `libsigsegv2` for the measurement).

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use pagemark::PAGE_SIZE;

use super::undo_log::{UndoLog, UndoneMemory};

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

/// Memory whose writes a handler of the library records.
#[derive(Debug)]
pub(crate) struct HandledMemory {
    log: Box<UndoLog>,
    library: Library,
}

/// The log that the handler writes.
static LOG: AtomicPtr<UndoLog> = AtomicPtr::new(std::ptr::null_mut());

/// Copies the page of a fault to the log, and opens the page.
///
/// # Safety
/// Only the thread that writes the memory raises faults, and it uses the log at no other time.
unsafe extern "C" fn handle(address: *mut c_void, _serious: c_int) -> c_int {
    // SAFETY: the log lives until the handler is removed, and its owner waits for the write that
    // has caused this fault.
    let Some(log) = (unsafe { LOG.load(Ordering::Relaxed).as_mut() }) else { return 0 };
    let Some(page) = log.record(address.addr()) else { return 0 };
    // SAFETY: the page belongs to the memory of the log.
    let opened = unsafe { libc::mprotect(page.as_ptr().cast(), PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE) };
    c_int::from(opened == 0)
}

impl HandledMemory {
    /// Maps memory and installs the handler. One can exist at a time.
    ///
    /// # Errors
    /// There is no room, or the library refuses the handler.
    pub fn new(library: Library, pages: usize) -> io::Result<HandledMemory> {
        let mut handled = HandledMemory { log: Box::new(UndoLog::new(pages)?), library };
        LOG.store(&raw mut *handled.log, Ordering::Relaxed);
        // SAFETY: the handler follows the rules of the library, and is removed before its log is.
        if unsafe { (library.install)(handle) } != 0 {
            return Err(io::Error::other("libsigsegv refuses a handler"));
        }
        Ok(handled)
    }

    fn set_access(&self, access: c_int) -> io::Result<()> {
        let memory = self.log.memory();
        // SAFETY: the memory is ours; its writes wait for the handler.
        let result = unsafe { libc::mprotect(memory.start().as_ptr().cast(), memory.bytes(), access) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl UndoneMemory for HandledMemory {
    fn start(&self) -> NonNull<u8> {
        self.log.memory().start()
    }

    fn begin(&mut self) -> io::Result<()> {
        self.log.clear();
        self.set_access(libc::PROT_READ)
    }

    fn roll_back(&mut self) -> io::Result<usize> {
        // SAFETY: the handler has opened the pages, and `&mut self` shows that nobody writes them.
        let pages = unsafe { self.log.put_back() };
        self.set_access(libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(pages)
    }
}

impl Drop for HandledMemory {
    fn drop(&mut self) {
        // SAFETY: nobody writes protected memory any more.
        unsafe { (self.library.deinstall)() };
        LOG.store(std::ptr::null_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::undo_log::tests::undoes_what_a_transaction_writes;
    use super::*;

    #[test]
    fn what_is_written_in_a_transaction_is_undone() {
        let Some(library) = Library::load() else { pagemark_testing::skip!("libsigsegv is not installed") };
        undoes_what_a_transaction_writes(&mut HandledMemory::new(library, 10).unwrap());
    }
}
