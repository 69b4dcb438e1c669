//! The vDSO of this process, and the kernel's data that its functions read.

use std::io;
use std::ops::Range;

use pagemark_linux::proc::maps;

/// The name of the library's mapping, and how those of its data begin.
const IMAGE: &[u8] = b"[vdso]";
const DATA: &[u8] = b"[vvar";

/// What the kernel has mapped for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostVdso {
    /// The addresses of the data. The library lies directly behind.
    pub data: Range<u64>,
    /// The content of the library.
    pub image: Vec<u8>,
}

/// Looks for it. None if the kernel maps none, or its data elsewhere.
///
/// # Errors
/// The mappings of this process cannot be read.
pub fn find() -> io::Result<Option<HostVdso>> {
    let all = maps::of_this_process()?;
    let Some(index) = all.iter().position(|mapping| mapping.name == IMAGE && mapping.readable) else {
        return Ok(None);
    };
    let (start, end) = (all[index].start.get(), all[index].end.get());
    let mut data = start..start;
    for mapping in all[..index].iter().rev() {
        if mapping.end.get() != data.start || !mapping.name.starts_with(DATA) {
            break;
        }
        data.start = mapping.start.get();
    }
    // SAFETY: a mapping of the kernel, readable, whose content does not change, and that nothing
    // unmaps.
    let image = unsafe { std::slice::from_raw_parts(start as *const u8, (end - start) as usize) }.to_vec();
    Ok((!data.is_empty()).then_some(HostVdso { data, image }))
}

#[cfg(test)]
pub mod tests {
    /// Memory with code.
    pub struct Executable {
        base: *mut libc::c_void,
        len: usize,
    }

    impl Executable {
        /// Memory that begins with `code`.
        pub fn new(code: &[u8]) -> Executable {
            let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping.
            let base = unsafe { libc::mmap(std::ptr::null_mut(), code.len(), protection, flags, -1, 0) };
            assert_ne!(base, libc::MAP_FAILED);
            // SAFETY: as long as the mapping.
            unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), base.cast(), code.len()) };
            Executable { base, len: code.len() }
        }

        /// Calls the function that is `at` bytes behind the begin.
        pub fn call(&self, at: u64, [a, b, c, d, e]: [u64; 5]) -> i64 {
            assert!((at as usize) < self.len);
            // SAFETY: the code is a function that takes up to five numbers or addresses of the test.
            let function: extern "C" fn(u64, u64, u64, u64, u64) -> i64 =
                unsafe { std::mem::transmute(self.base.byte_add(at as usize)) };
            function(a, b, c, d, e)
        }
    }

    impl Drop for Executable {
        fn drop(&mut self) {
            // SAFETY: the mapping of `new`.
            unsafe { libc::munmap(self.base, self.len) };
        }
    }
}
