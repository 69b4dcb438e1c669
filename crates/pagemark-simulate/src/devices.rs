//! Functions of QEMU that are not part of its interface for plugins: its timers, and what gives a
//! device something from outside. A QEMU that loads modules exports them.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::interface::function;

/// A timer of QEMU's.
#[repr(C, align(16))]
pub(crate) struct Timer {
    /// More than it has in any version: 48 bytes.
    _content: [u8; 256],
}

/// A chardev.
#[repr(C)]
pub(crate) struct Chardev {
    _opaque: [u8; 0],
}

pub(crate) type OnTime = extern "C" fn(*mut c_void);

/// QEMU's number of the machine's clock.
const MACHINE_CLOCK: c_int = 1;
/// Times are nanoseconds.
const NANOSECONDS: c_int = 1;
const NO_ATTRIBUTES: c_int = 0;

/// The functions.
#[derive(Clone, Copy)]
pub(crate) struct Devices {
    prepare_timer: extern "C" fn(*mut Timer, *mut c_void, c_int, c_int, c_int, OnTime, *mut c_void),
    set_timer: extern "C" fn(*mut Timer, i64),
    time: extern "C" fn(c_int) -> i64,
    find_chardev: extern "C" fn(*const c_char) -> *mut Chardev,
    chardev_room: extern "C" fn(*mut Chardev) -> c_int,
    give_to_chardev: extern "C" fn(*mut Chardev, *const u8, c_int),
}

impl Devices {
    /// The functions of the QEMU that this process is.
    ///
    /// # Errors
    /// The name of a function that there is not.
    #[allow(clippy::missing_transmute_annotations, reason = "the fields have the types")]
    pub(crate) fn find() -> Result<Devices, &'static str> {
        Ok(Devices {
            prepare_timer: function!("timer_init_full"),
            set_timer: function!("timer_mod_ns"),
            time: function!("qemu_clock_get_ns"),
            find_chardev: function!("qemu_chr_find"),
            chardev_room: function!("qemu_chr_be_can_write"),
            give_to_chardev: function!("qemu_chr_be_write"),
        })
    }

    /// A timer of the machine's clock, which stays for the rest of the process's life.
    pub(crate) fn timer(&self, callback: OnTime) -> &'static mut Timer {
        let timer = Box::leak(Box::new(Timer { _content: [0; 256] }));
        let no_group = std::ptr::null_mut();
        let no_argument = std::ptr::null_mut();
        (self.prepare_timer)(timer, no_group, MACHINE_CLOCK, NANOSECONDS, NO_ATTRIBUTES, callback, no_argument);
        timer
    }

    /// Has the timer's callback called at a time of the machine's clock.
    pub(crate) fn set(&self, timer: &mut Timer, at: u64) {
        (self.set_timer)(timer, i64::try_from(at).unwrap_or(i64::MAX));
    }

    /// The machine's clock.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from((self.time)(MACHINE_CLOCK)).unwrap_or(0)
    }

    /// How many bytes the device behind a chardev takes now.
    pub(crate) fn room(&self, chardev: &CStr) -> usize {
        match self.chardev(chardev) {
            Some(chardev) => usize::try_from((self.chardev_room)(chardev)).unwrap_or(0),
            None => 0,
        }
    }

    /// Gives the device behind a chardev as many bytes as it takes, or fewer.
    pub(crate) fn give(&self, chardev: &CStr, bytes: &[u8]) {
        if let (Some(chardev), Ok(count)) = (self.chardev(chardev), c_int::try_from(bytes.len())) {
            (self.give_to_chardev)(chardev, bytes.as_ptr(), count);
        }
    }

    fn chardev(&self, name: &CStr) -> Option<*mut Chardev> {
        let found = (self.find_chardev)(name.as_ptr());
        (!found.is_null()).then_some(found)
    }
}
