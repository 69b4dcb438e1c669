//! Whether memory may be written now.

use crate::Address;

/// True if a write to the four aligned bytes at `address` would succeed now. Changes no content,
/// whatever other threads write there. Async-signal-safe.
///
/// The kernel applies an atomic operation that changes nothing (`| 0`) to the four bytes, as part
/// of `FUTEX_WAKE_OP`. A page that is not present is faulted in as by a write.
pub fn is_writable(address: Address) -> bool {
    const OPERATION_OR: libc::c_int = 2;
    const COMPARE_EQUAL: libc::c_int = 0;
    // A thread that waits at `address` is woken if the value there equals this number, -2048. A
    // futex wait may end without a reason, so that its caller checks the value anyway.
    const UNLIKELY: libc::c_int = 0x800;
    let operation = OPERATION_OR << 28 | COMPARE_EQUAL << 24 | UNLIKELY;
    let nobody_waits_here = 0_u32;
    let address: *mut u32 = Address::new(address.get() & !3).as_mut_ptr();
    // SAFETY: the kernel checks both addresses, and writes back the value that it reads, in one
    // atomic step.
    let result = unsafe {
        libc::syscall(
            libc::SYS_futex,
            &raw const nobody_waits_here,
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            0,
            address,
            operation,
        )
    };
    result >= 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::ByteCount;
    use crate::scratch::Scratch;

    #[test]
    fn memory_that_may_be_written_is_found() {
        let scratch = Scratch::new(4);
        scratch.write(0, 7);
        scratch.write(1, 7);
        scratch.protect(1, 1, libc::PROT_READ);
        scratch.take_out(2, 1);
        let is_writable =
            |page| [0, 3, 4092, 4095].map(|byte| is_writable(scratch.address(page) + ByteCount::new(byte)));
        assert_eq!(is_writable(0), [true; 4]);
        assert_eq!(is_writable(1), [false; 4]);
        assert_eq!(is_writable(2), [false; 4]);
        // Never populated.
        assert_eq!(is_writable(3), [true; 4]);
        assert_eq!([0, 1, 3].map(|page| scratch.read(page)), [7, 7, 0]);
        assert!(!super::is_writable(Address::new(0)));
    }

    #[test]
    fn no_write_of_another_thread_is_lost() {
        let number = AtomicU32::new(0);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    assert!(is_writable(Address::of(&raw const number)));
                }
            });
            (0..200_000).for_each(|_| _ = number.fetch_add(1, Ordering::Relaxed));
            is_done.store(true, Ordering::Relaxed);
        });
        assert_eq!(number.into_inner(), 200_000);
    }
}
