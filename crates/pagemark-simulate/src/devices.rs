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

/// An end of a connection in QEMU's network.
#[repr(C)]
pub(crate) struct NetClient {
    _opaque: [u8; 0],
}

pub(crate) type OnTime = extern "C" fn(*mut c_void);

/// QEMU's number of the machine's clock.
const MACHINE_CLOCK: c_int = 1;
/// Times are nanoseconds.
const NANOSECONDS: c_int = 1;
const NO_ATTRIBUTES: c_int = 0;

/// QEMU's numbers of kinds of ends of connections: none has the first, a network card the second.
const NO_KIND: c_int = 0;
const NETWORK_CARD: c_int = 1;

/// The most ends of connections.
const MAX_CLIENTS: usize = 16;

/// The functions.
#[derive(Clone, Copy)]
pub(crate) struct Devices {
    prepare_timer: extern "C" fn(*mut Timer, *mut c_void, c_int, c_int, c_int, OnTime, *mut c_void),
    set_timer: extern "C" fn(*mut Timer, i64),
    time: extern "C" fn(c_int) -> i64,
    find_chardev: extern "C" fn(*const c_char) -> *mut Chardev,
    chardev_room: extern "C" fn(*mut Chardev) -> c_int,
    give_to_chardev: extern "C" fn(*mut Chardev, *const u8, c_int),
    find_clients_but: extern "C" fn(*const c_char, *mut *mut NetClient, c_int, c_int) -> c_int,
    takes_packet: extern "C" fn(*mut NetClient) -> c_int,
    give_packet: extern "C" fn(*mut NetClient, *const u8, c_int) -> isize,
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
            find_clients_but: function!("qemu_find_net_clients_except"),
            takes_packet: function!("qemu_can_receive_packet"),
            give_packet: function!("qemu_receive_packet"),
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

    /// True if the machine's network card takes a packet now.
    pub(crate) fn takes_packet(&self) -> bool {
        self.network_card().is_some_and(|card| (self.takes_packet)(card) & 0xff != 0)
    }

    /// Gives the network card a packet, which it loses if it takes none.
    pub(crate) fn give_packet(&self, packet: &[u8]) {
        if let (Some(card), Ok(count)) = (self.network_card(), c_int::try_from(packet.len())) {
            (self.give_packet)(card, packet.as_ptr(), count);
        }
    }

    /// The machine's network card, if it has one.
    fn network_card(&self) -> Option<*mut NetClient> {
        let clients_but = |kind| {
            let mut clients = [std::ptr::null_mut(); MAX_CLIENTS];
            let count = (self.find_clients_but)(std::ptr::null(), clients.as_mut_ptr(), kind, MAX_CLIENTS as c_int);
            (clients, usize::try_from(count).unwrap_or(0).min(MAX_CLIENTS))
        };
        let ((all, all_count), (others, others_count)) = (clients_but(NO_KIND), clients_but(NETWORK_CARD));
        all[..all_count].iter().copied().find(|client| !others[..others_count].contains(client))
    }

    fn chardev(&self, name: &CStr) -> Option<*mut Chardev> {
        let found = (self.find_chardev)(name.as_ptr());
        (!found.is_null()).then_some(found)
    }
}
