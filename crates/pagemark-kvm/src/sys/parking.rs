//! The description of what this process has of KVM, for those who save its state; see
//! [`pagemark_kvm_protocol::description`].

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_vcpu_events, kvm_xsave};
use pagemark_kvm_protocol::description::{
    ADDRESS, BYTES, DEVICE_WORDS, Header, MAGIC, MOST_VCPUS, MOST_WRITTEN, VcpuEntry, WRITTEN_ADDRESS, Words,
    copy_address, vcpu_address, vector_state_address,
};
use pagemark_kvm_protocol::state::{DescriptorState, MachineState};

use crate::layout::{PAGE, PROGRAM_END, Physical};
use crate::sys::host_call;
use crate::sys::noted_writes::NotedWrites;
use crate::write_list::WriteList;

/// How long a thread waits until the process is released, if it cannot be known whether the process
/// that parked it still exists.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

/// Pause between two looks at whether the process is released.
const POLL: Duration = Duration::from_millis(1);

thread_local! {
    /// How often this thread uses KVM. A child made by `vfork` has the storage of the thread that
    /// waits for it, which uses KVM then, and counts nothing in the memory that both share: it
    /// could be killed before it is done.
    static USES: Cell<u32> = const { Cell::new(0) };
}

/// The description, at its address for the rest of this process.
#[derive(Clone, Copy, Debug)]
pub struct Parking {
    header: &'static Header,
}

/// This thread uses KVM otherwise than to run: the process is not parked as long as this exists.
#[derive(Debug)]
pub struct InUse {
    header: &'static Header,
    /// The count is that of the thread.
    not_send: PhantomData<*const ()>,
}

/// What was saved of a virtual CPU.
pub struct Saved {
    /// The vector state.
    pub vector: Box<kvm_xsave>,
    /// Exceptions and interrupts that are on their way.
    pub events: kvm_vcpu_events,
}

impl Parking {
    /// The description of this process, which is made if there is none.
    ///
    /// # Errors
    /// The address is taken.
    pub fn of_this_process() -> io::Result<Parking> {
        static MADE: Mutex<Option<Parking>> = Mutex::new(None);
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        match *made {
            Some(parking) => Ok(parking),
            None => Ok(*made.insert(Parking::new()?)),
        }
    }

    fn new() -> io::Result<Parking> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE,
        );
        // SAFETY: a new mapping where nothing is mapped.
        let at = unsafe { libc::mmap(ADDRESS as *mut libc::c_void, BYTES as usize, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if at as u64 != ADDRESS {
            // SAFETY: the mapping that was just made. The kernel is older than 4.17.
            unsafe { libc::munmap(at, BYTES as usize) };
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        // It is nothing of the program's core file.
        // SAFETY: the mapping that was just made.
        unsafe { libc::madvise(at, BYTES as usize, libc::MADV_DONTDUMP) };
        // SAFETY: the mapping begins with zeros, for which a header is valid, and is never unmapped.
        let parking = Parking { header: unsafe { &*(ADDRESS as *const Header) } };
        for (word, part) in parking.header.device_path.iter().zip(DEVICE_WORDS) {
            word.store(part, Ordering::Relaxed);
        }
        Ok(parking)
    }

    /// The list of what is written without a trace in the guest's page tables.
    pub fn listed(&self) -> WriteList {
        // SAFETY: within the mapping, which is never unmapped, and zeros are valid words.
        let ranges = unsafe { std::slice::from_raw_parts(WRITTEN_ADDRESS as *const Words, MOST_WRITTEN) };
        WriteList::new(self.header, ranges)
    }

    /// Describes the guest's page tables, of which `root` is the highest, in memory at `tables`.
    pub fn describe_tables(&self, tables: u64, root: Physical) {
        self.header.root.store(root.get(), Ordering::Relaxed);
        self.header.program_end.store(PROGRAM_END, Ordering::Relaxed);
        self.header.tables.store(tables, Ordering::Relaxed);
    }

    /// What KVM notes of the program's writes, for whoever tracks it from outside.
    pub fn noted(&self) -> NotedWrites {
        NotedWrites::new(self.header)
    }

    /// Describes a new machine without virtual CPUs.
    pub fn describe(&self, device: RawFd, machine: RawFd, shared_bytes: usize) {
        let header = self.header;
        header.device.store(device, Ordering::Relaxed);
        header.machine.store(machine, Ordering::Relaxed);
        header.shared_bytes.store(shared_bytes as u32, Ordering::Relaxed);
        for (word, place) in header.blocking_call.iter().zip(host_call::blocking()) {
            word.store(place, Ordering::Relaxed);
        }
        header.magic.store(MAGIC, Ordering::Release);
    }

    /// Describes the program's file by where it has its first instruction.
    pub fn describe_program(&self, entry: u64) {
        self.header.program_entry.store(entry, Ordering::Relaxed);
    }

    /// In a child made by `fork`, whose description is a copy of the parent's: there are no virtual
    /// CPUs, and no other thread uses KVM.
    pub fn begin_child(&self, _: &InUse) {
        self.header.users.store(1, Ordering::Relaxed);
        self.header.vcpus.store(0, Ordering::Relaxed);
        // Whoever is about to park the parent does not know of this process, and would not release it.
        let _ = replace_state(self.header, MachineState::Closing, MachineState::Running, Ordering::SeqCst);
    }

    /// Begins to use KVM, or what is left of the machine if the process leaves it. None if there is
    /// no machine.
    pub fn enter(&self) -> Option<InUse> {
        self.enter_in(|state| state == MachineState::Running || state.leaves())
    }

    /// Begins to make the machine again. None if it is there, or the process is parked.
    pub fn begin_renewal(&self) -> Option<InUse> {
        self.enter_in(|state| state == MachineState::Released)
    }

    fn enter_in(&self, is_right: impl Fn(MachineState) -> bool) -> Option<InUse> {
        let in_use = InUse { header: self.header, not_send: PhantomData };
        USES.set(USES.get() + 1);
        if USES.get() > 1 {
            return Some(in_use);
        }
        self.header.users.fetch_add(1, Ordering::SeqCst);
        // A process is parked only while nobody uses KVM.
        state(self.header, Ordering::SeqCst).is_some_and(is_right).then_some(in_use)
    }

    /// True if the process continues without the machine, and makes none.
    pub fn is_leaving(&self) -> bool {
        state(self.header, Ordering::Acquire).is_some_and(MachineState::leaves)
    }

    /// Waits until all threads wait here, and one of them has made the process ready by `prepare`.
    ///
    /// # Errors
    /// Of `prepare`, or whoever restored the process is gone.
    pub fn wait_to_leave(&self, prepare: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut prepare = (self.header.waiting.fetch_add(1, Ordering::AcqRel) == 0).then_some(prepare);
        let since = Instant::now();
        loop {
            match state(self.header, Ordering::Acquire) {
                Some(MachineState::Left) => return Ok(()),
                Some(MachineState::Preparing) if prepare.is_some() => {
                    prepare.take().map_or(Ok(()), |prepare| prepare())?;
                    self.header.state.store(MachineState::Prepared.word(), Ordering::Release);
                }
                _ if self.is_abandoned(since) => {
                    return Err(io::Error::other("whoever restored the process without its machine is gone"));
                }
                _ => std::thread::sleep(POLL),
            }
        }
    }

    /// How many threads need the monitor no more.
    pub fn left(&self) -> &'static AtomicU32 {
        &self.header.left
    }

    /// Waits until the process is neither parked nor about to be.
    pub fn wait(&self) {
        let since = Instant::now();
        loop {
            let Some(now) = state(self.header, Ordering::Acquire) else { return };
            let Some(next) = now.released() else { return };
            if self.is_abandoned(since) {
                let _ = replace_state(self.header, now, next, Ordering::AcqRel);
            } else {
                std::thread::sleep(POLL);
            }
        }
    }

    /// True if nobody will release the process.
    fn is_abandoned(&self, since: Instant) -> bool {
        match self.header.parker.load(Ordering::Acquire) {
            parker if parker > 0 => !process_exists(parker),
            _ => since.elapsed() > RELEASE_LIMIT,
        }
    }

    /// There is a machine again.
    pub fn set_running(&self) {
        self.header.state.store(MachineState::Running.word(), Ordering::SeqCst);
    }

    /// Describes the virtual CPU `number`.
    pub fn set_vcpu(&self, number: usize, descriptor: RawFd, shared: u64) {
        let Some(entry) = self.entry(number) else { return };
        entry.descriptor.store(descriptor, Ordering::Relaxed);
        for (words, address) in [(&entry.shared, shared), (&entry.copy, copy_address(number))] {
            words[0].store(address, Ordering::Relaxed);
            words[1].store(PAGE, Ordering::Relaxed);
        }
        entry.descriptor_state.store(DescriptorState::Open.word(), Ordering::Release);
        self.header.vcpus.fetch_max(number as u32 + 1, Ordering::AcqRel);
    }

    /// The descriptors of virtual CPUs that are closed. `reserve` makes others of their numbers.
    ///
    /// # Errors
    /// The first of `reserve`.
    pub fn reserve_closed<E>(&self, reserve: impl Fn(RawFd) -> Result<(), E>) -> Result<(), E> {
        let entries = (0..self.header.vcpus.load(Ordering::Acquire) as usize).filter_map(|number| self.entry(number));
        for entry in
            entries.filter(|entry| entry.descriptor_state.load(Ordering::Acquire) == DescriptorState::Closed.word())
        {
            reserve(entry.descriptor.load(Ordering::Relaxed))?;
            entry.descriptor_state.store(DescriptorState::Reserved.word(), Ordering::Release);
        }
        Ok(())
    }

    /// The descriptors of the virtual CPUs that the machine has.
    pub fn open_vcpus(&self) -> impl Iterator<Item = RawFd> {
        let entries = (0..self.header.vcpus.load(Ordering::Acquire) as usize).filter_map(|number| self.entry(number));
        let open =
            entries.filter(|entry| entry.descriptor_state.load(Ordering::Acquire) == DescriptorState::Open.word());
        open.map(|entry| entry.descriptor.load(Ordering::Relaxed))
    }

    /// What was saved of the virtual CPU `number` when the process was parked. None if it is not
    /// described.
    pub fn saved(&self, number: usize) -> Option<Saved> {
        let entry = self.entry(number)?;
        let mut saved = Saved { vector: Box::default(), events: kvm_vcpu_events::default() };
        let (vector, events) = (vector_state_address(number), entry.events.as_ptr());
        // SAFETY: the page is within the mapping, and longer than the state; both consist of numbers.
        // Nobody writes to them: they are written only while all threads are stopped.
        unsafe {
            std::ptr::copy_nonoverlapping(vector as *const kvm_xsave, &raw mut *saved.vector, 1);
            saved.events = events.cast::<kvm_vcpu_events>().read_unaligned();
        }
        Some(saved)
    }

    /// The description of the virtual CPU `number`. None if there is no room for it.
    pub fn entry(&self, number: usize) -> Option<&'static VcpuEntry> {
        // SAFETY: within the mapping, which is never unmapped, and zeros are a valid entry.
        (number < MOST_VCPUS).then(|| unsafe { &*(vcpu_address(number) as *const VcpuEntry) })
    }
}

/// What the process has of its machine. None if the word says nothing.
fn state(header: &Header, order: Ordering) -> Option<MachineState> {
    MachineState::of(header.state.load(order))
}

/// Sets the state `next` in place of `now`. Nothing is set if it has changed meanwhile.
fn replace_state(header: &Header, now: MachineState, next: MachineState, order: Ordering) -> Result<u32, u32> {
    header.state.compare_exchange(now.word(), next.word(), order, Ordering::Relaxed)
}

fn process_exists(pid: i32) -> bool {
    // SAFETY: only asks; signal 0 is none. The file system may not show the processes of others.
    let found = unsafe { libc::kill(pid, 0) };
    found == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

const _: () = assert!(size_of::<kvm_xsave>() <= PAGE as usize && size_of::<kvm_vcpu_events>() <= 64);

impl InUse {
    /// The child made by `vfork` that used this thread's storage has ended.
    pub fn child_has_ended(&self) {
        USES.set(1);
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        USES.set(USES.get().saturating_sub(1));
        if USES.get() == 0 {
            self.header.users.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_who_was_about_to_park_its_parent() {
        let parking = Parking { header: Box::leak(Box::default()) };
        let in_use = parking.enter().expect("there is a machine");
        // This process will not end while the test waits.
        parking.header.parker.store(std::process::id() as i32, Ordering::Relaxed);
        parking.header.state.store(MachineState::Closing.word(), Ordering::Relaxed);
        parking.begin_child(&in_use);
        assert_eq!(state(parking.header, Ordering::Relaxed), Some(MachineState::Running));
        parking.wait();
        drop(in_use);
        assert!(parking.enter().is_some());
    }
}
