//! The library that `pagemark vm run --mechanism kvm-log` preloads into QEMU:
//!
//! ```text
//! PAGEMARK_KVM_LOG=SOCKET LD_PRELOAD=libpagemark_kvm_preload.so qemu-system-x86_64 -accel kvm …
//! ```
//!
//! It stands between the program and `ioctl`, and knows the memory slots of each machine of KVM
//! that the program makes. Once there is a machine, a thread of the library listens on the socket,
//! and reads KVM's log for Pagemark, which shares it with the program. Calls that have nothing to
//! do with slots and logs, among them those that run the machine, are passed on at once.
//!
//! Nothing of the library ends the program: what fails is refused to Pagemark, or answered by the
//! kernel alone.

use std::ffi::{c_int, c_ulong};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pagemark_kvm_log::kernel::{
    self, CAP_MANUAL_PROTECT, CAP_RING, CAP_RING_ACQUIRE, RawCapability, RawClear, RawGet, RawRegion,
};
use pagemark_kvm_log::slot_log::words_of;

mod machines;
mod processors;
mod server;
mod views;

use machines::{OwnMachine, of_descriptor};

/// `ioctl(2)`.
///
/// # Safety
/// As of `ioctl`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    // Some programs have the number in a signed type, whose sign the kernel leaves out.
    let request = request as u32;
    // SAFETY: the caller's own call.
    let pass = || unsafe { kernel::call(fd, request, argument) };
    let result = match request {
        kernel::CREATE_VM => pass().inspect(|&made| _ = catch_unwind(|| machines::add(made))),
        kernel::CREATE_PROCESSOR => pass().and_then(|made| add_processor(fd, made)),
        kernel::RUN => processors::run(fd, pass),
        kernel::SET_REGION
        | kernel::SET_REGION2
        | kernel::GET_DIRTY_LOG
        | kernel::CLEAR_DIRTY_LOG
        | kernel::ENABLE_CAP
            if argument != 0 =>
        {
            let answered = || match of_descriptor(fd) {
                // SAFETY: the arguments are those of the request, by the contract of this function.
                Some(machine) => unsafe { answer(&machine, request, argument) },
                None => pass(),
            };
            // A defect of the library must not end the program.
            catch_unwind(AssertUnwindSafe(answered)).unwrap_or(Err(libc::EIO))
        }
        kernel::USERFAULT_REGISTER if argument != 0 => {
            // SAFETY: the argument begins with an address and a length, by the contract of this function.
            let [start, bytes] = unsafe { (argument as *const [u64; 2]).read_unaligned() };
            // What the machine writes by a view would not be seen there: a refusal is an answer that programs know.
            match catch_unwind(|| machines::have_view(start, start.saturating_add(bytes))) {
                Ok(true) => Err(libc::EOPNOTSUPP),
                _ => pass(),
            }
        }
        _ => pass(),
    };
    result.unwrap_or_else(|error| {
        // SAFETY: the address is that of this thread's number.
        unsafe { *libc::__errno_location() = error };
        -1
    })
}

/// Takes note of a new virtual CPU. One whose ring cannot be read is closed again.
fn add_processor(machine: c_int, made: c_int) -> Result<c_int, c_int> {
    let added = catch_unwind(|| match of_descriptor(machine).filter(|machine| machine.lock().has_rings()) {
        Some(machine) => processors::add(machine, made),
        None => Ok(()),
    });
    added.unwrap_or(Err(libc::EIO)).map(|()| made).inspect_err(|_| {
        // SAFETY: the descriptor is new, and known to nobody.
        unsafe { libc::close(made) };
    })
}

/// Answers a call on a machine.
///
/// # Safety
/// `argument` is that of the request. As with the kernel's answer, memory that it points to is
/// readable, and writable where the call writes.
unsafe fn answer(machine: &OwnMachine, request: u32, argument: usize) -> Result<c_int, c_int> {
    let kernel = machine.kernel();
    let fd = kernel.fd();
    // SAFETY: the caller's own call, with what it has given.
    let pass = |argument: usize| unsafe { kernel::call(fd, request, argument) };
    let mut known = machine.lock();
    match request {
        kernel::SET_REGION | kernel::SET_REGION2 => {
            // Both have a region at their begin, and differ in what follows.
            // SAFETY: the argument is readable.
            let region = unsafe { (argument as *const RawRegion).read_unaligned() };
            let (had, is_new) = (known.view(&region), !known.has(region.slot));
            let made =
                (is_new && known.may_have_new_view()).then(|| views::make(region.host_address, region.bytes)).flatten();
            let view = had.or(made);
            let set = known.set_region(kernel, &region, view, |flags| {
                let bytes = if request == kernel::SET_REGION { size_of::<RawRegion>() } else { REGION2_BYTES };
                let mut copy = [0u64; REGION2_BYTES / 8];
                // SAFETY: the argument is readable, of that length, and the copy is not shorter.
                unsafe { std::ptr::copy_nonoverlapping(argument as *const u8, copy.as_mut_ptr().cast(), bytes) };
                let host_address = view.filter(|_| region.bytes != 0).unwrap_or(region.host_address);
                let region = RawRegion { flags, host_address, ..region };
                // SAFETY: a region is shorter than the copy, which is aligned for it.
                unsafe { copy.as_mut_ptr().cast::<RawRegion>().write(region) };
                pass((&raw const copy) as usize).map(drop)
            });
            let unused = if set.is_err() { made } else { had.filter(|_| region.bytes == 0) };
            unused.into_iter().for_each(views::remove);
            set.map(|()| 0)
        }
        kernel::GET_DIRTY_LOG => {
            // SAFETY: the argument is readable.
            let wanted = unsafe { (argument as *const RawGet).read_unaligned() };
            match known.dirty_log(kernel, wanted.slot) {
                Some(found) => {
                    let found = found?;
                    let (bits, bytes) = (found.as_ptr().cast::<u8>(), found.len() * 8);
                    // SAFETY: the caller has room for a bit of each page of the slot, as the kernel demands.
                    unsafe { std::ptr::copy_nonoverlapping(bits, wanted.bits.cast(), bytes) };
                    Ok(0)
                }
                None => pass(argument),
            }
        }
        kernel::CLEAR_DIRTY_LOG => {
            // SAFETY: the argument is readable.
            let wanted = unsafe { (argument as *const RawClear).read_unaligned() };
            match known.words_to_clear(wanted.slot, wanted.first, wanted.pages) {
                Some(words) => {
                    let mut bits = vec![0u64; words];
                    debug_assert_eq!(words, words_of(wanted.pages.into()));
                    // SAFETY: the caller has a bit for each page that is cleared, in whole bytes.
                    unsafe {
                        let bytes = wanted.pages.div_ceil(8) as usize;
                        std::ptr::copy_nonoverlapping(wanted.bits.cast::<u8>(), bits.as_mut_ptr().cast(), bytes);
                    }
                    known.clear(kernel, wanted.slot, wanted.first, &bits).map(|()| 0)
                }
                None => known.refusal_to_clear(wanted.slot).map_or_else(|| pass(argument), Err),
            }
        }
        kernel::ENABLE_CAP => {
            // SAFETY: the argument is readable.
            let wanted = unsafe { (argument as *const RawCapability).read_unaligned() };
            match wanted.capability {
                CAP_MANUAL_PROTECT => {
                    known.set_owner_options(wanted.arguments[0], |options| {
                        let changed = RawCapability { arguments: [options, 0, 0, 0], ..wanted };
                        pass((&raw const changed) as usize).map(drop)
                    })?;
                    Ok(0)
                }
                CAP_RING | CAP_RING_ACQUIRE => pass(argument).inspect(|_| known.set_ring()),
                _ => pass(argument),
            }
        }
        _ => pass(argument),
    }
}

/// The length of the argument of `KVM_SET_USER_MEMORY_REGION2`.
const REGION2_BYTES: usize = 160;
