//! Gives the machine what comes from outside, at times of its own clock that are written down, and
//! gives it the same at the same times when it runs again.
//!
//! The clock counts instructions, and QEMU calls a timer of it between two of them, at the same
//! ones in each run. So what is given there is given at the same instruction.

use std::collections::VecDeque;
use std::ffi::{CString, c_void};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
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
    /// Standard input, until it ends.
    Outside { list: File, is_open: bool, last: (Instant, u64) },
    /// What was written down.
    Written(VecDeque<Input>),
}

/// Begins to give input to the machine, which has not run yet. With `repeats`, `list` is what was
/// written down, from the machine's state on; otherwise it is written.
///
/// # Errors
/// What is wrong, in words.
pub(crate) fn begin(list: &Path, repeats: bool) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot open the list of inputs {}: {error}", list.display());
    let source = match repeats {
        true => {
            let bytes = fs::read(list).map_err(|error| failed(&error))?;
            Source::Written(Input::read_all(&bytes).map_err(|error| failed(&error))?.into())
        }
        false => {
            let list = File::options().append(true).open(list).map_err(|error| failed(&error))?;
            Source::Outside { list, is_open: true, last: (Instant::now(), 0) }
        }
    };
    let devices = Devices::find()
        .map_err(|name| format!("this QEMU exports no function {name}, so input from outside cannot be recorded"))?;
    let console = CString::new(CONSOLE).map_err(|error| failed(&error))?;
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
            Source::Outside { list, is_open, last } if *is_open => {
                let room = devices.room(console).min(MAX_BYTES);
                // A person, and a program that answers, need a machine whose clock is not ahead of theirs.
                let ahead = Duration::from_nanos((now - last.1).min(PERIOD)).saturating_sub(last.0.elapsed());
                let bytes = match wait_and_read(room, ahead) {
                    Ok(Some(bytes)) => bytes,
                    Ok(None) => {
                        *is_open = false;
                        Vec::new()
                    }
                    Err(error) => {
                        // It ends there, as for a machine whose terminal is gone.
                        let _ = writeln!(io::stderr(), "pagemark-simulate: cannot read input: {error}");
                        *is_open = false;
                        Vec::new()
                    }
                };
                *last = (Instant::now(), now);
                if bytes.is_empty() {
                    return;
                }
                let mut written = Vec::new();
                let input = Input { time: now, way: Way::Console, bytes };
                input.append_to(&mut written);
                // What could not be repeated does not come to the machine.
                if let Err(error) = list.write_all(&written) {
                    let _ = writeln!(io::stderr(), "pagemark-simulate: cannot record input, which ends: {error}");
                    *is_open = false;
                    return;
                }
                devices.give(console, &input.bytes);
            }
            Source::Outside { .. } => {}
            Source::Written(inputs) => {
                let due = inputs.iter().take_while(|input| input.time <= now).count();
                for input in inputs.drain(..due) {
                    // A machine that takes less is not the one that ran, which its end shows.
                    let count = input.bytes.len().min(devices.room(console));
                    devices.give(console, &input.bytes[..count]);
                }
            }
        }
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
    fn looks_are_at_the_same_times_in_each_run() {
        assert_eq!(next_look(0), OFFSET);
        assert_eq!(next_look(OFFSET - 1), OFFSET);
        assert_eq!(next_look(OFFSET), OFFSET + PERIOD);
        assert_eq!(next_look(OFFSET + PERIOD + 3), OFFSET + 2 * PERIOD);
    }
}
