//! Gives the machine what comes from outside, at times of its own clock that are written down, and
//! gives it the same at the same times when it runs again.
//!
//! The clock counts instructions, and QEMU calls a timer of it between two of them, at the same
//! ones in each run. So what is given there is given at the same instruction.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_void};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::devices::{Devices, Timer};
use crate::inputs::{CONSOLE, Input, Way};

/// How long the machine's clock goes on from one look for input to the next, in nanoseconds.
const PERIOD: u64 = 1_000_000;

/// When the looks are in their periods: at no round time, at which timers of the machine may be
/// due.
const OFFSET: u64 = 137_041;

/// The most that is given at once.
const MAX_BYTES: usize = 4096;

/// Bytes before each packet.
const PACKET_HEADER_BYTES: u64 = 4;

/// The most bytes of a packet: more than any has.
const MAX_PACKET_BYTES: u32 = 1 << 18;

/// The most bytes of packets that wait for the card. A network loses what comes to a card that
/// takes nothing.
const MAX_WAITING_BYTES: u64 = 16 << 20;

/// How much of the packets is given back at once.
const GIVEN_BACK_BYTES: u64 = 1 << 20;

/// The standard input of QEMU's process.
const STANDARD_INPUT: libc::c_int = 0;

static DELIVERY: Mutex<Option<Delivery>> = Mutex::new(None);

struct Delivery {
    devices: Devices,
    timer: &'static mut Timer,
    console: CString,
    source: Source,
}

/// Where input comes from.
enum Source {
    Outside(Outside),
    /// What was written down.
    Written(VecDeque<Input>),
}

/// What comes from outside, and the list that it is written to.
struct Outside {
    list: File,
    /// True while standard input is a console, and has not ended.
    has_console: bool,
    packets: Option<Packets>,
    /// When input was looked for last, and the machine's time then.
    last: (Instant, u64),
}

/// Packets for the machine, which QEMU writes to a file, each behind its length: 4 bytes,
/// big-endian.
struct Packets {
    file: File,
    /// What is before is read, and no longer in the file up to the second.
    read: u64,
    given_back: u64,
}

/// What is recorded, or repeated.
pub(crate) enum Recording<'a> {
    /// What comes by standard input, if that is a console, and the file of packets.
    Record { has_console: bool, packets: Option<&'a Path> },
    /// What the list says, from the machine's state on.
    Repeat,
}

/// Begins to give input to the machine, which has not run yet.
///
/// # Errors
/// What is wrong, in words.
pub(crate) fn begin(list: &Path, recording: Recording<'_>) -> Result<(), String> {
    let failed = |path: &Path, error: &dyn std::fmt::Display| {
        format!("cannot open {}, which has inputs of the machine: {error}", path.display())
    };
    let source = match recording {
        Recording::Repeat => {
            let bytes = fs::read(list).map_err(|error| failed(list, &error))?;
            Source::Written(Input::read_all(&bytes).map_err(|error| failed(list, &error))?.into())
        }
        Recording::Record { has_console, packets } => {
            let packets = packets.map(|path| {
                let file = File::options().read(true).write(true).open(path).map_err(|error| failed(path, &error))?;
                Ok::<_, String>(Packets { file, read: 0, given_back: 0 })
            });
            let packets = packets.transpose()?;
            let list = File::options().append(true).open(list).map_err(|error| failed(list, &error))?;
            Source::Outside(Outside { list, has_console, packets, last: (Instant::now(), 0) })
        }
    };
    let devices = Devices::find()
        .map_err(|name| format!("this QEMU exports no function {name}, so input from outside cannot be recorded"))?;
    let console = CString::new(CONSOLE).map_err(|error| error.to_string())?;
    let mut delivery = Delivery { devices, timer: devices.timer(on_time), console, source };
    delivery.set_timer();
    *DELIVERY.lock().unwrap_or_else(PoisonError::into_inner) = Some(delivery);
    Ok(())
}

/// Called by QEMU, whose devices may be used then.
extern "C" fn on_time(_: *mut c_void) {
    if let Some(delivery) = &mut *DELIVERY.lock().unwrap_or_else(PoisonError::into_inner) {
        delivery.deliver();
        delivery.set_timer();
    }
}

impl Delivery {
    fn set_timer(&mut self) {
        self.devices.set(self.timer, next_look(self.devices.now()));
    }

    fn deliver(&mut self) {
        let Delivery { devices, console, source, .. } = self;
        let now = devices.now();
        match source {
            Source::Outside(outside) => {
                if let Err(error) = outside.deliver(devices, console, now) {
                    // It ends there, as for a machine whose terminal and cable are gone.
                    let _ = writeln!(io::stderr(), "pagemark-simulate: input from outside ends: {error}");
                    (outside.has_console, outside.packets) = (false, None);
                }
            }
            Source::Written(inputs) => {
                let due = inputs.iter().take_while(|input| input.time <= now).count();
                for Input { way, bytes, .. } in inputs.drain(..due) {
                    match way {
                        // A machine that takes less is not the one that ran, which its end shows.
                        Way::Console => devices.give(console, &bytes[..bytes.len().min(devices.room(console))]),
                        Way::Network => devices.give_packet(&bytes),
                    }
                }
            }
        }
    }
}

impl Outside {
    fn deliver(&mut self, devices: &Devices, console: &CStr, now: u64) -> io::Result<()> {
        if !self.has_console && self.packets.is_none() {
            return Ok(());
        }
        let room = if self.has_console { devices.room(console).min(MAX_BYTES) } else { 0 };
        // A person, and a program that answers, need a machine whose clock is not ahead of theirs.
        let passed = Duration::from_nanos(now.saturating_sub(self.last.1).min(PERIOD));
        let bytes = wait_and_read(room, passed.saturating_sub(self.last.0.elapsed()))?;
        self.last = (Instant::now(), now);
        match bytes {
            None => self.has_console = false,
            Some(bytes) if !bytes.is_empty() => {
                record(&mut self.list, now, Way::Console, &bytes)?;
                devices.give(console, &bytes);
            }
            Some(_) => {}
        }
        let Some(packets) = &mut self.packets else { return Ok(()) };
        packets.lose_oldest(MAX_WAITING_BYTES)?;
        while devices.takes_packet()
            && let Some(packet) = packets.next()?
        {
            record(&mut self.list, now, Way::Network, &packet)?;
            devices.give_packet(&packet);
        }
        Ok(())
    }
}

/// Writes an input down. What could not be repeated must not come to the machine.
fn record(list: &mut File, time: u64, way: Way, bytes: &[u8]) -> io::Result<()> {
    let mut written = Vec::new();
    Input { time, way, bytes: bytes.to_vec() }.append_to(&mut written);
    list.write_all(&written)
}

impl Packets {
    /// The next packet, if there is one.
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let all = self.file.metadata()?.len();
        if all < self.read + PACKET_HEADER_BYTES {
            return Ok(None);
        }
        let mut length = [0; PACKET_HEADER_BYTES as usize];
        self.file.read_exact_at(&mut length, self.read)?;
        let length = u32::from_be_bytes(length);
        let next = self.read + PACKET_HEADER_BYTES + u64::from(length);
        if length > MAX_PACKET_BYTES || next > all {
            return Err(io::Error::new(ErrorKind::InvalidData, "what should be a packet for the machine is none"));
        }
        let mut packet = vec![0; length as usize];
        self.file.read_exact_at(&mut packet, self.read + PACKET_HEADER_BYTES)?;
        self.read = next;
        self.give_back()?;
        Ok(Some(packet))
    }

    /// Loses packets until no more than `limit` bytes wait.
    fn lose_oldest(&mut self, limit: u64) -> io::Result<()> {
        while self.file.metadata()?.len() - self.read > limit {
            self.next()?;
        }
        Ok(())
    }

    /// Gives back the memory of what is read.
    fn give_back(&mut self) -> io::Result<()> {
        let count = (self.read - self.given_back) / GIVEN_BACK_BYTES * GIVEN_BACK_BYTES;
        if count == 0 {
            return Ok(());
        }
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is open, and the call writes to no memory of this process.
        let done = unsafe { libc::fallocate(self.file.as_raw_fd(), punch, self.given_back as i64, count as i64) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        self.given_back += count;
        Ok(())
    }
}

/// When input is looked for next.
fn next_look(now: u64) -> u64 {
    (now.saturating_sub(OFFSET) / PERIOD + u64::from(now >= OFFSET)) * PERIOD + OFFSET
}

/// Waits so long for input if some can be taken. None if there comes no more.
fn wait_and_read(room: usize, limit: Duration) -> io::Result<Option<Vec<u8>>> {
    if room == 0 {
        std::thread::sleep(limit);
        return Ok(Some(Vec::new()));
    }
    let mut wanted = libc::pollfd { fd: STANDARD_INPUT, events: libc::POLLIN, revents: 0 };
    let limit = libc::timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
    let mut bytes = vec![0; room];
    // SAFETY: the structures and the buffer live through the calls; the signals are not changed.
    let result = unsafe {
        match libc::ppoll(&raw mut wanted, 1, &raw const limit, std::ptr::null()) {
            0 => return Ok(Some(Vec::new())),
            1 => libc::read(STANDARD_INPUT, bytes.as_mut_ptr().cast(), room),
            _ => -1,
        }
    };
    match usize::try_from(result) {
        Ok(0) => Ok(None),
        Ok(count) => {
            bytes.truncate(count);
            Ok(Some(bytes))
        }
        Err(_) => match io::Error::last_os_error() {
            error if [ErrorKind::Interrupted, ErrorKind::WouldBlock].contains(&error.kind()) => Ok(Some(Vec::new())),
            error => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_when_they_are_there() {
        let file = tempfile::tempfile().unwrap();
        let write = |bytes: &[u8]| (&file).write_all(bytes).unwrap();
        let mut packets = Packets { file: file.try_clone().unwrap(), read: 0, given_back: 0 };
        assert_eq!(packets.next().unwrap(), None);
        write(&[0, 0, 0, 2, 7, 8, 0, 1]);
        assert_eq!(packets.next().unwrap(), Some(vec![7, 8]));
        assert_eq!(packets.next().unwrap(), None);
        write(&[0, 0]);
        write(&vec![5; 1 << 16]);
        assert_eq!(packets.next().unwrap().unwrap().len(), 1 << 16);
        (1..4).for_each(|byte| write(&[0, 0, 0, 1, byte]));
        packets.lose_oldest(11).unwrap();
        assert_eq!(packets.next().unwrap(), Some(vec![2]));
        assert_eq!(packets.next().unwrap(), Some(vec![3]));
        write(&[0xff; 4]);
        assert!(packets.next().is_err());
    }

    #[test]
    fn looks_are_at_the_same_times_in_each_run() {
        assert_eq!(next_look(0), OFFSET);
        assert_eq!(next_look(OFFSET - 1), OFFSET);
        assert_eq!(next_look(OFFSET), OFFSET + PERIOD);
        assert_eq!(next_look(OFFSET + PERIOD + 3), OFFSET + 2 * PERIOD);
    }
}
