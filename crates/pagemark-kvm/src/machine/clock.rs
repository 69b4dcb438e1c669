//! The program tells the time without system calls: it has the vDSO, and before it the kernel's
//! data, which stands behind a memory slot of its own.
//!
//! In the host's address space the library is a copy in private memory, and zeros are where the
//! program sees the data. Whatever changes these mappings ends the use of the data: the functions
//! of the library then make system calls.

use std::ops::Range;

use super::{FaultOutcome, Machine, Space};
use crate::error::Error;
use crate::layout::{PAGE, Physical, TABLE_SPAN};
use crate::mappings::Protection;
use crate::sys::{host_call, host_vdso, program_memory};
use crate::vcpu::{Exception, Exit, Vcpu};
use crate::vdso::Vdso;

const READ: u64 = libc::PROT_READ as u64;
const WRITE: u64 = READ | libc::PROT_WRITE as u64;
const EXECUTE: u64 = READ | libc::PROT_EXEC as u64;

/// By what the program tells the time.
pub struct Clock {
    /// Where the program sees the kernel's data. The library lies directly behind.
    data: Range<u64>,
    /// Where this process has the data.
    host_data: u64,
    vdso: Vdso,
}

impl Clock {
    /// Where the program sees the kernel's data.
    pub fn data(&self) -> Range<u64> {
        self.data.clone()
    }

    /// Where the program has the library.
    fn image(&self) -> Range<u64> {
        self.data.end..self.data.end + self.vdso.bytes().len() as u64
    }
}

/// Makes a call that maps memory of the program or changes its protection.
fn change(number: i64, arguments: [u64; 6]) -> Option<()> {
    // SAFETY: the callers pass ranges of the program's addresses, where no value of the monitor lies.
    let result = unsafe { host_call::immediate(number, arguments) };
    host_call::errno(result).is_none().then_some(())
}

/// Maps zeros where the program has nothing.
fn map(space: &mut Space, range: &Range<u64>, protection: u64) -> Option<()> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    change(libc::SYS_mmap, [range.start, range.end - range.start, protection, flags, u64::MAX, 0])?;
    space.mappings.insert(range.start, range.end, Protection::new(protection));
    Some(())
}

/// Writes the library, which the program can execute.
fn write(range: &Range<u64>, text: &[u8]) -> Option<()> {
    let protect = |protection| change(libc::SYS_mprotect, [range.start, range.end - range.start, protection, 0, 0, 0]);
    protect(WRITE)?;
    let written = program_memory::write(range.start, text);
    protect(EXECUTE)?;
    written.ok()
}

impl Machine {
    /// The memory slot of the kernel's data.
    pub(super) fn clock_slot(&self) -> u32 {
        self.most_slots - 1
    }

    /// Gives the program, which is not loaded yet, what tells the time. Returns the address of the
    /// library; none where it would not work, which is tried.
    pub fn begin_clock(&self) -> Option<u64> {
        let host = host_vdso::find().ok()??;
        let vdso = Vdso::of(host.image)?;
        // All have the host's time if one has.
        let mut vcpu = self.take_vcpu().ok()?;
        let image = if vcpu.has_host_time() { self.map_clock(host.data, vdso) } else { None };
        let works = image.is_some_and(|image| self.tells_time(&mut vcpu, image) == Some(true));
        self.put_vcpu(vcpu);
        if !works {
            self.remove_clock();
            return None;
        }
        image
    }

    /// Unmaps what tells the time.
    pub fn remove_clock(&self) {
        let of_it = |clock: &Clock| clock.data.start..clock.image().end;
        let range = self.space().clock.as_ref().map(of_it);
        if let Some(range) = range {
            let _ = self.munmap(range.start, range.end - range.start);
        }
    }

    /// Maps all that there is of it. Returns the address of the library.
    fn map_clock(&self, host: Range<u64>, vdso: Vdso) -> Option<u64> {
        let mut space = self.space();
        let bytes = host.end - host.start;
        let start = space.mappings.place_aligned(bytes + vdso.bytes().len() as u64, PAGE)?;
        let clock = Clock { data: start..start + bytes, host_data: host.start, vdso };
        let image = clock.image();
        map(&mut space, &clock.data, READ)?;
        map(&mut space, &image, EXECUTE)?;
        write(&image, &clock.vdso.text(true))?;
        space.clock = Some(clock);
        if self.add_clock_slot(&space).is_err() {
            self.end_clock(&mut space);
            return None;
        }
        Some(image.start)
    }

    /// Whether the library at `image` tells the time of the host, executed by `vcpu`.
    fn tells_time(&self, vcpu: &mut Vcpu, image: u64) -> Option<bool> {
        let (function, back) = {
            let space = self.space();
            let vdso = &space.clock.as_ref()?.vdso;
            (vdso.function(libc::SYS_clock_gettime)?, vdso.function(libc::SYS_getcpu)?)
        };
        let page = {
            let mut space = self.space();
            let start = space.mappings.place_aligned(PAGE, PAGE)?;
            map(&mut space, &(start..start + PAGE), WRITE)?;
            start
        };
        // The function returns to the one that makes a system call.
        let stack = page + PAGE - 64;
        let result = program_memory::write(stack, &(image + back).to_le_bytes()).ok().and_then(|()| {
            let registers = vcpu.registers();
            (registers.rip, registers.rsp) = (image + function, stack);
            (registers.rdi, registers.rsi) = (libc::CLOCK_MONOTONIC as u64, page);
            vcpu.commit();
            let before = monotonic();
            self.run_to_call(vcpu)?;
            let [seconds, nanoseconds] = program_memory::read_words(page, 2).ok()?[..] else { return None };
            let registers = vcpu.registers();
            let returned = registers.rax == libc::SYS_getcpu as u64 && registers.rsp == stack + 8;
            Some(returned && (before..=monotonic()).contains(&(seconds, nanoseconds)))
        });
        self.munmap(page, PAGE).ok()?;
        result
    }

    /// Runs `vcpu` until it makes a system call. None if it does something else.
    fn run_to_call(&self, vcpu: &mut Vcpu) -> Option<()> {
        // A few pages, and whatever interrupts.
        for _ in 0..1000 {
            match vcpu.run().ok()? {
                Exit::Call => return Some(()),
                Exit::Interrupted => {}
                Exit::RingFull => self.take_rings().ok()?,
                Exit::Exception(Exception { vector: 14, code, address }) => {
                    match self.resolve(address, code & 2 != 0, code & 16 != 0, TABLE_SPAN) {
                        Ok(FaultOutcome::Mapped) => vcpu.commit(),
                        _ => return None,
                    }
                }
                _ => return None,
            }
        }
        None
    }

    /// Makes the memory slot of the kernel's data, if there is a clock.
    pub(super) fn add_clock_slot(&self, space: &Space) -> Result<(), Error> {
        let Some(clock) = &space.clock else { return Ok(()) };
        let (slot, bytes) = (self.clock_slot(), clock.data.end - clock.data.start);
        // The program cannot write there.
        self.make_slot(slot, 0, Physical::of_slot(slot), bytes, clock.host_data)
    }

    /// In a process that was restored: the kernel may be another, and have another library.
    pub(super) fn renew_clock(&self, space: &mut Space) {
        let Some(clock) = &mut space.clock else { return };
        let host = host_vdso::find().ok().flatten();
        let bytes = clock.data.end - clock.data.start;
        let same = host.filter(|host| host.image == clock.vdso.bytes() && host.data.end - host.data.start == bytes);
        match same {
            Some(host) => clock.host_data = host.data.start,
            None => self.end_clock(space),
        }
    }

    /// Without the host's time in a virtual CPU, no clock.
    pub(super) fn check_time_of(&self, vcpu: &Vcpu) {
        if !vcpu.has_host_time() {
            self.end_clock(&mut self.space());
        }
    }

    /// The program's mappings change in `start..end`: what tells the time is not whole any more.
    pub(super) fn leave_clock(&self, space: &mut Space, start: u64, end: u64) {
        let is_of_it = |clock: &Clock| start < clock.image().end && clock.data.start < end;
        if space.clock.as_ref().is_some_and(is_of_it) {
            self.end_clock(space);
        }
    }

    /// Outside of the machine, the functions of the library are those of the kernel's.
    pub(crate) fn take_clock_outside(&self) {
        let mut space = self.space();
        let Some(clock) = &space.clock else { return };
        let host = host_vdso::find().ok().flatten().filter(|host| host.image == clock.vdso.bytes());
        let text = host.map(|host| clock.vdso.text_leading_to(host.data.end));
        self.end_clock_with(&mut space, text);
    }

    /// From now on the library makes system calls.
    fn end_clock(&self, space: &mut Space) {
        self.end_clock_with(space, None);
    }

    /// From now on the library is `text`, or makes system calls.
    fn end_clock_with(&self, space: &mut Space, text: Option<Vec<u8>>) {
        let Some(clock) = space.clock.take() else { return };
        let image = clock.image();
        // If it is not what was written there, the program has something else.
        let mut found = vec![0; clock.vdso.bytes().len()];
        if program_memory::read(image.start, &mut found).is_ok() && found == clock.vdso.text(true) {
            // Without a right to change it nothing can be done: the functions then find no time in the
            // zeros that are there, and the finer clocks make system calls.
            let _ = write(&image, &text.unwrap_or_else(|| clock.vdso.text(false)));
        }
        self.clear_entries(space, clock.data.start, clock.data.end);
        // A slot that does not exist cannot be removed.
        let _ = self.set_slot(self.clock_slot(), 0, Physical::of_slot(self.clock_slot()), 0, 0);
    }
}

/// The monotonic clock: seconds and nanoseconds.
fn monotonic() -> (u64, u64) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the value.
    unsafe { libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64, time.tv_nsec as u64)
}
