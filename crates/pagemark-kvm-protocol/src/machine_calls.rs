//! The system calls that the monitor of `pagemark-kvm` alone has, of a program in its machine.
//!
//! The monitor tells a program by the auxiliary vector that it is there, so no call is made
//! outside.

use std::io;

use pagemark_linux::machine_mark::is_there;
use pagemark_linux::{Address, PAGE_SIZE, Range};

/// The number of the system call. Its arguments are an operation, a [`Means`], and those that the
/// operation has. Linux has no call of this number.
pub const CALL: u64 = 0x504d_0000;

/// Operation: fails with `EOPNOTSUPP` if the machine does not have the means, and with `EBUSY` if
/// it keeps what excludes it: a log excludes rings.
pub const CHECK: u64 = 0;
/// Operation: begins to track the pages from the third argument to the fourth, none of which counts
/// as written. `EBUSY`: a part is tracked by the same means already.
pub const TRACK: u64 = 1;
/// Operation: writes the runs of pages (or words: [`Means::unit`]) from the third argument to the
/// fourth that were written since the last call, as [`Run`]s, to the fifth, which has room for as
/// many as the sixth says. Returns their number. If there is no room left, what lies behind the
/// last run remains for another call. `ESTALE`: a part is not tracked, or not any more as it was
/// mapped anew.
pub const COLLECT: u64 = 2;
/// Operation: ends the tracking of the pages from the third argument to the fourth.
pub const FORGET: u64 = 3;
/// Operation, for [`Means::Log`]: from the third argument to the fourth there are as many views of
/// one memory as the fifth says, one behind the other: shared mappings of the same part of a file.
/// Their pages can be arranged from now on, until one of them is mapped anew or the tracking of a
/// part ends. `EINVAL`: they are no such views.
pub const VIEWS: u64 = 4;
/// Operation: as [`COLLECT`], but the log stays as it is: what was written counts as written until
/// it is armed. A page whose arranged view was written is reported by the address at which its
/// memory is tracked ([`Move::to`]). The lowest bit of a start ([`LOGGED`]) is set if the log has
/// the pages of the run, and not set if only the kernel may have written to them. `ESTALE`: it is
/// no part of such views.
pub const READ: u64 = 5;
/// Operation: changes where pages of views are tracked, and then arms pages, which count as written
/// no more. The third argument has as many [`Move`]s as the fourth says, the fifth as many [`Run`]s
/// as the sixth says. Each list has [`MOST_ARRANGED`] entries at most. `EINVAL`: something else is
/// named than pages of such views; then nothing is changed.
pub const ARRANGE: u64 = 6;

/// Operation: writes what the monitor and KVM have counted to the fifth argument, which has room
/// for as many [`Run`]s as the sixth says: the words of [`Counts::words`]. The other arguments mean
/// nothing.
pub const COUNT: u64 = 7;

/// Set in the start of a run that the log has.
pub const LOGGED: u64 = 1;

/// Entries of each list of one [`ARRANGE`].
pub const MOST_ARRANGED: usize = 4096;

/// A page of a view is tracked at an address from now on.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Move {
    /// The page of a view.
    pub page: u64,
    /// The same page of that view or another one. Stores through the one count as written there.
    pub to: u64,
}

/// How the machine finds what the program's own instructions write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Means {
    /// KVM's log of dirty pages.
    Log = 0,
    /// The dirty bits of the guest's page tables.
    Scan = 1,
    /// Pages stay protected in the guest's page tables, and the monitor executes each store.
    Emulate = 2,
    /// KVM's rings of dirty pages.
    Ring = 3,
}

/// All means, in the order of their numbers.
pub const MEANS: [Means; 4] = [Means::Log, Means::Scan, Means::Emulate, Means::Ring];

impl Means {
    /// The unit in which writes are told, bytes.
    pub const fn unit(self) -> u64 {
        match self {
            Means::Log | Means::Ring | Means::Scan => PAGE_SIZE as u64,
            Means::Emulate => 8,
        }
    }
}

/// Addresses from `start` to `end`.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub struct Run {
    /// The first.
    pub start: u64,
    /// The one behind the last.
    pub end: u64,
}

/// What happened in the machine.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// System calls of the program.
    pub calls: u64,
    /// Exceptions that the monitor resolved, page faults above all.
    pub exceptions: u64,
    /// What KVM counts. None if it does not tell it.
    pub of_kvm: Option<CountsOfKvm>,
}

/// What KVM has counted since the machine was made, for all virtual CPUs together. A process that
/// was checkpointed has another machine.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct CountsOfKvm {
    /// Exits from the machine, those to the monitor among them.
    pub exits: u64,
    /// Page faults that KVM took.
    pub faults: u64,
    /// Flushes of translations.
    pub flushes: u64,
}

impl Counts {
    /// The words that [`COUNT`] writes.
    pub fn words(&self) -> [u64; 6] {
        let CountsOfKvm { exits, faults, flushes } = self.of_kvm.unwrap_or_default();
        [self.calls, self.exceptions, exits, faults, flushes, self.of_kvm.is_some().into()]
    }

    /// What [`Counts::words`] makes words of.
    fn of_words([calls, exceptions, exits, faults, flushes, is_known]: [u64; 6]) -> Counts {
        let of_kvm = (is_known != 0).then_some(CountsOfKvm { exits, faults, flushes });
        Counts { calls, exceptions, of_kvm }
    }
}

/// Runs that one call returns at most.
const RUNS: usize = 256;

/// # Safety
/// The last two arguments are 0, or name memory that the monitor may write.
unsafe fn call(operation: u64, means: Means, range: &Range, to: *mut Run, len: usize) -> io::Result<usize> {
    if !is_there() {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    let number = CALL as libc::c_long;
    // SAFETY: the monitor writes nothing but `len` runs, by the contract of this function.
    let result = unsafe { libc::syscall(number, operation, means as u64, range.start.get(), range.end.get(), to, len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

fn plain(operation: u64, means: Means, range: &Range) -> io::Result<()> {
    // SAFETY: these operations write nothing.
    unsafe { call(operation, means, range, std::ptr::null_mut(), 0) }.map(drop)
}

/// Whether the machine has the means.
///
/// # Errors
/// `ENOSYS`: the program does not run in a machine. `EBUSY`: the machine keeps what excludes the
/// means. `EOPNOTSUPP`: the machine lacks it.
pub fn check(means: Means) -> io::Result<()> {
    plain(CHECK, means, &(Address::MIN..Address::MIN))
}

/// What the monitor and KVM have counted.
///
/// # Errors
/// `ENOSYS`: the program does not run in a machine. `EOPNOTSUPP` or `EINVAL`: its monitor is older.
pub fn counts() -> io::Result<Counts> {
    let mut runs = [Run::default(); 3];
    // SAFETY: the monitor writes to `runs`, and no more than it has room for.
    unsafe { call(COUNT, Means::Log, &(Address::MIN..Address::MIN), runs.as_mut_ptr(), runs.len()) }?;
    let [first, second, third] = runs.map(|run| [run.start, run.end]);
    Ok(Counts::of_words([first[0], first[1], second[0], second[1], third[0], third[1]]))
}

/// Begins to track whole pages; see [`TRACK`].
///
/// # Errors
/// Those of the call.
pub fn track(means: Means, range: &Range) -> io::Result<()> {
    plain(TRACK, means, range)
}

/// Declares views; see [`VIEWS`].
///
/// # Errors
/// Those of the call.
pub fn declare_views(range: &Range, count: usize) -> io::Result<()> {
    // SAFETY: the operation writes nothing: the fifth argument is a number.
    unsafe { call(VIEWS, Means::Log, range, std::ptr::without_provenance_mut(count), 0) }.map(drop)
}

/// Calls `each` for the runs of pages of `range`, part of a view, that were written since they were
/// armed, in ascending order, and whether the log has them; see [`READ`].
///
/// # Errors
/// Those of the call. What `each` was called for without the log is not reported again.
pub fn read_view(range: &Range, mut each: impl FnMut(Range, bool)) -> io::Result<()> {
    of_runs(READ, Means::Log, range, |run| {
        each(Address::new(run.start & !LOGGED)..Address::new(run.end), run.start & LOGGED != 0);
    })
}

/// Moves pages of views, and arms pages; see [`ARRANGE`]. More than one call can take is done by
/// several: all moves come first.
///
/// # Errors
/// Those of the call.
pub fn arrange(moves: &[Move], armed: &[Run]) -> io::Result<()> {
    let mut moves = moves.chunks(MOST_ARRANGED).peekable();
    let mut armed = armed.chunks(MOST_ARRANGED);
    loop {
        let now = moves.next().unwrap_or_default();
        let runs = if moves.peek().is_some() { None } else { armed.next() }.unwrap_or_default();
        if now.is_empty() && runs.is_empty() {
            return Ok(());
        }
        // The two lists take the place of a range and of a buffer.
        let list = Address::of(now.as_ptr())..Address::new(now.len() as u64);
        // SAFETY: the operation only reads the lists.
        unsafe { call(ARRANGE, Means::Log, &list, runs.as_ptr().cast_mut(), runs.len()) }?;
    }
}

/// Ends [`track`].
///
/// # Errors
/// Those of the call.
pub fn forget(means: Means, range: &Range) -> io::Result<()> {
    plain(FORGET, means, range)
}

/// Calls `each` for the runs of pages or words of `range` that were written since the last collect,
/// in ascending order; see [`COLLECT`].
///
/// # Errors
/// Those of the call. What `each` was called for is not reported again.
pub fn collect(means: Means, range: &Range, mut each: impl FnMut(Range)) -> io::Result<()> {
    of_runs(COLLECT, means, range, |run| each(Address::new(run.start)..Address::new(run.end)))
}

/// Calls `each` for all runs that an operation returns for `range`.
fn of_runs(operation: u64, means: Means, range: &Range, mut each: impl FnMut(&Run)) -> io::Result<()> {
    let mut runs = [Run::default(); RUNS];
    let mut rest = range.clone();
    loop {
        // SAFETY: the monitor writes to `runs`, and no more than it has room for.
        let count = unsafe { call(operation, means, &rest, runs.as_mut_ptr(), runs.len()) }?;
        let found = &runs[..count.min(RUNS)];
        found.iter().for_each(&mut each);
        match found.last() {
            Some(last) if found.len() == RUNS && last.end < range.end.get() => rest.start = Address::new(last.end),
            _ => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_pass_as_words() {
        for of_kvm in [None, Some(CountsOfKvm { exits: 3, faults: 4, flushes: 5 })] {
            let counts = Counts { calls: 1, exceptions: 2, of_kvm };
            assert_eq!(Counts::of_words(counts.words()), counts);
        }
    }
}
