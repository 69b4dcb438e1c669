//! What confines a thread and is in no file of `/proc`: its domain of Landlock, its dispatch of
//! system calls to itself, and the keyrings that are its own.
//!
//! A BPF program of type `iter/task` writes what the kernel has of each thread of a process.
//! Nothing of it runs in the process. Where the kernel keeps a field is taken from its BTF, but for
//! two places that BTF does not have: which bit stands for the dispatch, and where Landlock has its
//! part of the credentials. A thread of this process therefore confines itself when the program is
//! loaded, and what changes then shows both.

use std::io::{self, Read};
use std::sync::OnceLock;

use nix::errno::Errno;

use super::at_fork::made_once;
use super::bpf::{Instruction, Iterator, Register};
use super::btf::Btf;
use super::interface::{Interface, kernel_version};

/// The view of what confines threads.
pub static VIEW: Interface = Interface::new(
    "BPF iterator task",
    "6.1",
    "Pagemark cannot see Landlock, syscall user dispatch and keyrings, and saves a program that has them without; the \
     view needs CAP_BPF, CAP_PERFMON and a kernel with BTF",
    || loaded().map(drop),
);

/// The first version of Linux that lists the threads of one process.
const FIRST_VERSION: (u32, u32) = (6, 1);

/// Words of the credentials' part for security modules that are read.
const SECURITY_WORDS: usize = 16;

/// Words that the program writes for a thread: see [`Record`].
const WORDS: usize = 7 + SECURITY_WORDS;

const RECORD_BYTES: usize = WORDS * 8;

/// Bytes of a read.
const READ_BYTES: usize = 64 << 10;

/// How often the place of Landlock is looked for, until one alone is left.
const TRIES: u32 = 8;

/// What confines a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Confinement {
    /// It is in a domain of Landlock.
    pub has_landlock: bool,
    /// Its system calls may be turned into signals (`PR_SET_SYSCALL_USER_DISPATCH`).
    pub dispatches_calls: bool,
    /// The keyring of the session that it has joined. None if it has joined none.
    pub session_keyring: Option<Keyring>,
    /// The keyring of its process.
    pub process_keyring: Option<Keyring>,
    /// The keyring of the thread itself.
    pub thread_keyring: Option<Keyring>,
}

/// A keyring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keyring {
    /// The kernel's number of it.
    pub serial: i32,
    /// How many keys and keyrings it holds.
    pub held: u64,
}

/// What confines the threads of a process. Empty if it has just ended.
///
/// # Errors
/// The kernel does not show it, or it is not permitted: see [`VIEW`].
pub fn of_process(pid: i32) -> io::Result<Vec<Confinement>> {
    let view = loaded()?;
    Ok(view.records(view.program.of_process(pid))?.iter().map(|record| view.read(record)).collect())
}

/// What confines a thread. None if it has just ended.
///
/// # Errors
/// Those of [`of_process`].
pub fn of_thread(thread: i32) -> io::Result<Option<Confinement>> {
    let view = loaded()?;
    Ok(view.records(view.program.of_thread(thread))?.first().map(|record| view.read(record)))
}

/// What the kernel has of a thread; zeros where it has nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Record([u64; WORDS]);

impl Record {
    /// The flags for the entry of system calls.
    fn entry_flags(&self) -> u64 {
        self.0[0]
    }

    /// The keyring in these two words: its number in the lower half of the first.
    fn keyring(&self, word: usize) -> Option<Keyring> {
        let serial = self.0[word] as i32;
        (serial != 0).then_some(Keyring { serial, held: self.0[word + 1] })
    }

    /// What security modules have of the credentials.
    fn security(&self) -> &[u64] {
        &self.0[7..]
    }
}

/// The loaded program, and what its records mean.
#[derive(Debug)]
struct View {
    program: Iterator,
    /// The flag of threads that dispatch their system calls. None if the kernel has no dispatch.
    dispatch_flag: Option<u64>,
    /// The word of the security modules' part that leads to the domain. None without Landlock.
    domain_word: Option<usize>,
}

fn loaded() -> io::Result<&'static View> {
    static LOADED: OnceLock<Result<View, i32>> = OnceLock::new();
    let load = || View::load().map_err(|error| error.raw_os_error().unwrap_or(libc::EOPNOTSUPP));
    made_once(&LOADED, load).as_ref().map_err(|&number| io::Error::from_raw_os_error(number))
}

impl View {
    fn load() -> io::Result<View> {
        // Before, the kernel would list the threads of all processes, and no error would say so.
        if kernel_version()? < FIRST_VERSION {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let btf = Btf::of_kernel()?;
        let has_keyrings = btf.field_offset("cred", "session_keyring").is_some();
        let mut view = View { program: load_program(&btf)?, dispatch_flag: None, domain_word: None };
        // What it does to itself ends with the thread.
        let sample = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, || view.sample(has_keyrings))?;
            thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
        })?;
        (view.dispatch_flag, view.domain_word) = sample;
        Ok(view)
    }

    /// The records of a list of threads. None if the process or thread has ended.
    fn records(&self, list: io::Result<std::fs::File>) -> io::Result<Vec<Record>> {
        let mut list = match list {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(Vec::new()),
            list => list?,
        };
        let mut records = Vec::new();
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let bytes = list.read(&mut buffer)?;
            let (found, _) = buffer[..bytes].as_chunks::<RECORD_BYTES>();
            if found.is_empty() {
                return Ok(records);
            }
            records.extend(found.iter().map(|record| {
                let (words, _) = record.as_chunks::<8>();
                let mut numbers = [0; WORDS];
                numbers.iter_mut().zip(words).for_each(|(number, word)| *number = u64::from_ne_bytes(*word));
                Record(numbers)
            }));
        }
    }

    fn read(&self, record: &Record) -> Confinement {
        Confinement {
            has_landlock: self.domain_word.is_some_and(|word| record.security()[word] != 0),
            dispatches_calls: self.dispatch_flag.is_some_and(|flag| record.entry_flags() & flag != 0),
            session_keyring: record.keyring(1),
            process_keyring: record.keyring(3),
            thread_keyring: record.keyring(5),
        }
    }

    /// The record of this thread.
    fn own(&self) -> io::Result<Record> {
        let records = self.records(self.program.of_thread(nix::unistd::gettid().as_raw()))?;
        records.first().copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Confines this thread for ever, and finds what that changes: the flag of the dispatch, and
    /// the word of the domain.
    fn sample(&self, has_keyrings: bool) -> io::Result<(Option<u64>, Option<usize>)> {
        let garbled = || io::Error::from(io::ErrorKind::InvalidData);
        let before = self.own()?;
        let dispatch_flag = match dispatch_own_calls() {
            // The kernel has none.
            Err(Errno::EINVAL) => None,
            Err(error) => return Err(error.into()),
            Ok(()) => {
                let flag = self.own()?.entry_flags() & !before.entry_flags();
                Some(flag).filter(|flag| flag.is_power_of_two()).map(Some).ok_or_else(garbled)?
            }
        };
        if has_keyrings {
            let keyring = hold_own_key()?;
            let found = self.own()?.keyring(5);
            if found != Some(Keyring { serial: keyring, held: 1 }) {
                return Err(garbled());
            }
        }
        let mut places: Vec<usize> = (0..SECURITY_WORDS).filter(|&word| before.security()[word] == 0).collect();
        let mut last = before;
        for _ in 0..TRIES {
            match restrict_own_files() {
                Err(Errno::ENOSYS | Errno::EOPNOTSUPP) => return Ok((dispatch_flag, None)),
                restricted => restricted?,
            }
            let now = self.own()?;
            // Each domain is another object of the kernel's.
            let has_changed = |word: usize| {
                let address = now.security()[word];
                is_kernel_address(address) && address != last.security()[word]
            };
            places.retain(|&word| has_changed(word));
            last = now;
            if let [_, _, ..] = places[..] {
                continue;
            }
            break;
        }
        match places[..] {
            [place] => Ok((dispatch_flag, Some(place))),
            _ => Err(garbled()),
        }
    }
}

fn is_kernel_address(word: u64) -> bool {
    word >> 56 == 0xff && word < u64::MAX - 4096
}

/// The program that writes a record for each thread.
fn load_program(btf: &Btf) -> io::Result<Iterator> {
    use Register::{R0, R1, R2, R3, R6, R7, R8, R10};
    let lacks = || io::Error::from_raw_os_error(libc::ENOSYS);
    let field = |structure, name| {
        let offset = btf.field_offset(structure, name).and_then(|offset| i16::try_from(offset).ok());
        offset.ok_or_else(lacks)
    };
    let credentials = field("task_struct", "real_cred")?;
    let own = field("task_struct", "thread_info")?;
    // What a kernel lacks stays zero.
    let optional = |structure, name| field(structure, name).ok();
    let (serial, keys) = (optional("key", "serial"), optional("key", "keys"));
    let held = keys.zip(optional("assoc_array", "nr_leaves_on_tree")).map(|(keys, count)| keys + count);
    // For each word of the record: the fields that lead to it, from the thread.
    let mut ways = vec![optional("thread_info", "syscall_work").map(|flags| vec![own + flags])];
    for name in ["session_keyring", "process_keyring", "thread_keyring"] {
        let keyring = optional("cred", name);
        ways.extend([serial, held].map(|inner| Some(vec![credentials, keyring?, inner?])));
    }
    let security = optional("cred", "security");

    let record = -(RECORD_BYTES as i16);
    let mut body = Vec::new();
    // `R8` has the address of an object of the kernel's.
    let read = |body: &mut Vec<Instruction>, place: i16, bytes: usize, offset: i16| {
        body.extend([
            Instruction::copy(R1, R10),
            Instruction::add(R1, place.into()),
            Instruction::set(R2, bytes as i32),
            Instruction::copy(R3, R8),
            Instruction::add(R3, offset.into()),
            // Where there is no such object, it writes zeros.
            Instruction::call_probe_read(),
        ]);
    };
    let mut place = record;
    for way in ways {
        match way {
            None => body.extend([Instruction::set(R1, 0), Instruction::store(R10, place, R1)]),
            Some(offsets) => {
                body.push(Instruction::copy(R8, R7));
                for offset in offsets {
                    read(&mut body, place, 8, offset);
                    body.push(Instruction::load(R8, R10, place));
                }
            }
        }
        place += 8;
    }
    match security {
        None => {
            body.push(Instruction::set(R1, 0));
            body.extend((0..SECURITY_WORDS as i16).map(|word| Instruction::store(R10, place + word * 8, R1)));
        }
        Some(security) => {
            body.push(Instruction::copy(R8, R7));
            for offset in [credentials, security] {
                read(&mut body, place, 8, offset);
                body.push(Instruction::load(R8, R10, place));
            }
            read(&mut body, place, SECURITY_WORDS * 8, 0);
        }
    }
    let context = "bpf_iter__task";
    body.extend([
        Instruction::load(R1, R6, field(context, "meta")?),
        Instruction::load(R1, R1, field("bpf_iter_meta", "seq")?),
        Instruction::copy(R2, R10),
        Instruction::add(R2, record.into()),
        Instruction::set(R3, RECORD_BYTES as i32),
        Instruction::call_seq_write(),
    ]);
    let mut instructions = vec![
        Instruction::copy(R6, R1),
        Instruction::load(R7, R6, field(context, "task")?),
        // After the last thread there is none.
        Instruction::skip_if_zero(R7, body.len() as i16),
    ];
    instructions.extend(body);
    instructions.extend([Instruction::set(R0, 0), Instruction::exit()]);
    let list = btf.function("bpf_iter_task").ok_or_else(lacks)?;
    Iterator::load(&instructions, list, "pagemark_task")
}

/// Has the kernel dispatch the system calls of this thread, but those made anywhere in its memory.
fn dispatch_own_calls() -> nix::Result<()> {
    const SET_DISPATCH: libc::c_int = 59;
    const ON: u64 = 1;
    let (no_selector, first, length) = (0u64, 0u64, u64::MAX);
    // SAFETY: the call takes numbers alone; there is no selector that the kernel would read.
    Errno::result(unsafe { libc::prctl(SET_DISPATCH, ON, first, length, no_selector) }).map(drop)
}

/// Gives this thread a keyring with a key. Returns the keyring's number.
fn hold_own_key() -> nix::Result<i32> {
    const OF_THREAD: i32 = -1;
    const GET_ID: i32 = 0;
    // SAFETY: the call reads two names that end with a zero and one byte; all outlive it.
    Errno::result(unsafe {
        libc::syscall(libc::SYS_add_key, c"user".as_ptr(), c"pagemark".as_ptr(), c"x".as_ptr(), 1usize, OF_THREAD)
    })?;
    // SAFETY: the call takes numbers alone.
    Errno::result(unsafe { libc::syscall(libc::SYS_keyctl, GET_ID, OF_THREAD, 0) }).map(|serial| serial as i32)
}

/// Puts this thread into a domain of Landlock in which it may execute no file.
fn restrict_own_files() -> nix::Result<()> {
    const CREATE_RULESET: libc::c_long = 444;
    const RESTRICT_SELF: libc::c_long = 446;
    const EXECUTE: u64 = 1;
    // SAFETY: the call takes numbers alone.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    let handled = EXECUTE;
    // SAFETY: the call reads as many bytes as it is told, which `handled` has.
    let rules = unsafe { libc::syscall(CREATE_RULESET, &raw const handled, size_of::<u64>(), 0) };
    let rules = Errno::result(rules)? as i32;
    // SAFETY: the call takes numbers alone.
    let restricted = Errno::result(unsafe { libc::syscall(RESTRICT_SELF, rules, 0) });
    // SAFETY: the descriptor was just made and nothing else owns it.
    unsafe { libc::close(rules) };
    restricted.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// What confines a thread of this process that has done `what` to itself.
    fn after(what: fn()) -> Confinement {
        let (ready, is_ready) = mpsc::channel();
        let (end, is_ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            what();
            ready.send(nix::unistd::gettid().as_raw()).unwrap();
            let _ = is_ended.recv();
        });
        let id = is_ready.recv().unwrap();
        let found = of_thread(id).unwrap().unwrap();
        let of_all = of_process(std::process::id() as i32).unwrap();
        assert!(of_all.contains(&found), "{of_all:?}");
        drop(end);
        thread.join().unwrap();
        found
    }

    #[test]
    fn what_confines_a_thread_is_seen() {
        if let Some(error) = VIEW.refusal() {
            pagemark_testing::skip!("the kernel does not show what confines threads: {error}");
        }
        let free = after(|| {});
        assert!(!free.has_landlock && !free.dispatches_calls, "{free:?}");
        assert_eq!(free.thread_keyring, None);
        if loaded().unwrap().domain_word.is_some() {
            let found = after(|| restrict_own_files().unwrap());
            assert_eq!(found, Confinement { has_landlock: true, ..free });
        }
        if loaded().unwrap().dispatch_flag.is_some() {
            let found = after(|| dispatch_own_calls().unwrap());
            assert_eq!(found, Confinement { dispatches_calls: true, ..free });
        }
        let found = after(|| assert!(hold_own_key().is_ok()));
        assert_eq!(found.thread_keyring.map(|keyring| keyring.held), Some(1), "{found:?}");
    }

    #[test]
    fn a_process_that_is_gone_has_nothing() {
        if VIEW.is_there() {
            assert_eq!(of_process(i32::MAX).unwrap(), []);
            assert_eq!(of_thread(i32::MAX).unwrap(), None);
        }
    }
}
