//! KVM's log of the pages that the machine writes, or its rings: the mechanisms `kvm-log` and
//! `kvm-ring` for machines.
//!
//! KVM allows the calls on a machine to QEMU alone. A library that is preloaded into QEMU
//! (`pagemark-kvm-preload`) makes them, and shares the log with QEMU. This is the other end of its
//! socket.
//!
//! The log has what the machine's processors write, and what KVM writes for them. What QEMU writes
//! for its devices goes through QEMU's own page table, and is found there: [`outside`] names the
//! mechanism. A page is written if either has it.

use std::ffi::OsStr;
use std::io;
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use pagemark::track::{self, Scope};
use pagemark::{Address, ByteCount, Mechanism, RangeSet};
use pagemark_kvm_log::kernel::{self, Keeping, Lack};
use pagemark_kvm_log::machine::{Refusal, Written};
use pagemark_kvm_log::protocol::{RINGS, Request, SOCKET, Status, receive_greeting, receive_reply};
use pagemark_linux::proc;

use crate::error::{Error, ErrorKind, Object, Result};

/// How long the library may take to answer. It waits for QEMU's own calls on slots.
const LIMIT: Duration = Duration::from_secs(10);

/// What else can be done.
const OTHER: &str = "start the machine with `pagemark vm run --mechanism kvm-log`, or use --mechanism pagemap-scan";

/// What happens where a reply was not received.
const LOST: &str = "the next checkpoint connects anew, and saves all of the memory";

/// The directory of a module of KVM that does not leave a machine whose ring is full, where it
/// emulates the machine's instructions.
const OVERWRITES: &str = "/sys/module/kvm_pvm";

const REACH: &str = "reach the library for KVM's log in";

/// The mechanisms that find what QEMU writes, the preferred one first. They must see each write,
/// also to a page that the machine writes all the time, and cost nothing where nothing is written.
const OUTSIDE: [Mechanism; 2] = [Mechanism::Ldt, Mechanism::PagemapScan];

/// The mechanism by which QEMU's own writes are found.
///
/// # Errors
/// `ErrorKind::Unavailable`: none of them works on this host.
pub(crate) fn outside(mechanism: Mechanism) -> Result<Mechanism, pagemark::Error> {
    OUTSIDE.into_iter().find(|&outside| track::check(outside, Scope::Process).is_ok()).ok_or_else(|| {
        let reason = "what QEMU's devices write is found by pagemap-scan, which needs Linux 6.7";
        pagemark::Error::unavailable(mechanism, reason)
    })
}

/// What KVM has to keep for a mechanism; None for one that does not read it.
pub(crate) fn keeping(mechanism: Mechanism) -> Option<Keeping> {
    match mechanism {
        Mechanism::KvmLog => Some(Keeping::Log),
        Mechanism::KvmRing => Some(Keeping::Rings),
        _ => None,
    }
}

/// Checks that a mechanism that reads what KVM keeps, `kvm-log` or `kvm-ring`, works for machines
/// that this host runs.
///
/// # Errors
/// `ErrorKind::Unavailable` says what is missing, and what would enable it.
pub fn check_kvm(mechanism: Mechanism) -> Result<(), pagemark::Error> {
    let unavailable = |reason: String| pagemark::Error::unavailable(mechanism, reason);
    let Some(keeping) = keeping(mechanism) else {
        return Err(unavailable("it does not read what KVM keeps of a machine's writes".to_owned()));
    };
    if keeping == Keeping::Rings && Path::new(OVERWRITES).exists() {
        let reason =
            "the module kvm_pvm does not leave a machine whose ring is full, and overwrites entries: use kvm-log";
        return Err(unavailable(reason.to_owned()));
    }
    kernel::check(keeping).map_err(|lack| {
        unavailable(match lack {
            Lack::Device(error) if error.kind() == io::ErrorKind::NotFound => {
                "there is no /dev/kvm: load the module kvm_intel or kvm_amd".to_owned()
            }
            Lack::Device(error) => format!("/dev/kvm: {error}; add the user to the group that owns it"),
            Lack::Machine(error) => format!("KVM makes no machine: {error}"),
            Lack::Rings => "KVM has no dirty rings, which Linux has since 5.11".to_owned(),
            Lack::Log => "KVM has no log with manual protection, which Linux has since 5.0".to_owned(),
        })
    })?;
    crate::memory::preloaded::library().map_err(|error| unavailable(error.to_string()))?;
    outside(mechanism).map(drop)
}

/// KVM's log or rings of one machine. Dropped, they are not read any longer.
#[derive(Debug)]
pub(crate) struct KvmLog {
    pid: i32,
    stream: UnixStream,
    /// True once a reply was not received: what it would have said is lost.
    is_lost: bool,
}

impl KvmLog {
    /// Connects to the library in QEMU. Nothing is read yet.
    ///
    /// # Errors
    /// [`ErrorKind::KvmLog`]; QEMU is unchanged.
    pub(crate) fn connect(pid: i32, keeping: Keeping) -> Result<KvmLog> {
        let path = socket_of(pid, keeping)?;
        let stream = UnixStream::connect(&path).map_err(|error| {
            let help = "the library is in a QEMU that is linked dynamically, has no more rights than its user, and has \
                        made a machine with -accel kvm";
            of(REACH, pid)(error).help(help)
        })?;
        let peer = getsockopt(&stream, sockopt::PeerCredentials);
        let peer = peer.map_err(|error| of(REACH, pid)(error.into()))?.pid();
        if peer != pid {
            let reason = format!("has left the socket of its library to another program, process {peer}");
            return Err(Error::about(ErrorKind::KvmLog, Object::Process(pid), reason).help(OTHER));
        }
        KvmLog::over(pid, stream)
    }

    fn over(pid: i32, mut stream: UnixStream) -> Result<KvmLog> {
        let refused = |error| of(REACH, pid)(error).help(OTHER);
        stream.set_read_timeout(Some(LIMIT)).and_then(|()| stream.set_write_timeout(Some(LIMIT))).map_err(refused)?;
        let status = receive_greeting(&mut stream).map_err(refused)?;
        done(pid, status).map(|()| KvmLog { pid, stream, is_lost: false })
    }

    /// Begins to read the log: what is written from now on is collected.
    ///
    /// # Errors
    /// [`ErrorKind::KvmLog`]; the log is not read.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.ask(Request::Begin).map(drop)
    }

    /// Adds what was written since the last call to `written`. The next interval begins before this
    /// returns.
    ///
    /// # Errors
    /// [`ErrorKind::KvmLog`]; nothing is lost, unless the library is: then each call fails.
    pub(crate) fn collect(&mut self, written: &mut RangeSet) -> Result<()> {
        for part in self.ask(Request::Collect)? {
            insert(&part, written);
        }
        Ok(())
    }

    /// Has no mapping made for the machine alone until [`KvmLog::release_views`]: all that there
    /// are can be found.
    ///
    /// # Errors
    /// [`ErrorKind::KvmLog`]
    pub(crate) fn keep_views(&mut self) -> Result<()> {
        self.ask(Request::KeepViews).map(drop)
    }

    /// Lets the machine have mappings of its own again.
    ///
    /// # Errors
    /// [`ErrorKind::KvmLog`]
    pub(crate) fn release_views(&mut self) -> Result<()> {
        self.ask(Request::ReleaseViews).map(drop)
    }

    /// True if what was written is not known any longer, and each call fails.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn ask(&mut self, request: Request) -> Result<Vec<Written>> {
        if self.is_lost {
            let reason = "has a library for KVM's log that no longer answers: what was written since is not known";
            return Err(Error::about(ErrorKind::KvmLog, Object::Process(self.pid), reason).help(LOST));
        }
        let reply = request.send(&mut self.stream).and_then(|()| receive_reply(&mut self.stream));
        let (status, parts) = reply.map_err(|error| {
            self.is_lost = true;
            // The library serves another connection only then.
            let _ = self.stream.shutdown(Shutdown::Both);
            match proc::live_thread(self.pid) {
                None => Error::about(ErrorKind::Gone, Object::Process(self.pid), "has ended"),
                Some(_) => of("read KVM's log in", self.pid)(error).help(LOST),
            }
        })?;
        done(self.pid, status).map(|()| parts)
    }
}

fn of(operation: &'static str, pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::of(ErrorKind::KvmLog, operation, Object::Process(pid), error)
}

/// The socket that QEMU's environment names, of a machine that keeps this.
fn socket_of(pid: i32, keeping: Keeping) -> Result<PathBuf> {
    let environment = std::fs::read(proc::path(pid, "environ")).map_err(of("read the environment of", pid))?;
    let variable = |name: &str| {
        let prefix = format!("{name}=");
        environment.split(|&byte| byte == 0).find_map(|variable| variable.strip_prefix(prefix.as_bytes()))
    };
    let refused = |reason| Error::about(ErrorKind::KvmLog, Object::Process(pid), reason);
    let Some(path) = variable(SOCKET) else {
        return Err(refused("was started without the library that reads KVM's log").help(OTHER));
    };
    match (keeping, variable(RINGS).is_some()) {
        (Keeping::Log, true) => {
            Err(refused("was started for kvm-ring: KVM has no log of its machine").help("use --mechanism kvm-ring"))
        }
        (Keeping::Rings, false) => Err(refused("was started for kvm-log: KVM keeps no rings for its machine")
            .help("use --mechanism kvm-log, or start it with `pagemark vm run --mechanism kvm-ring`")),
        _ => Ok(PathBuf::from(OsStr::from_bytes(path))),
    }
}

/// The error that the library reports.
fn done(pid: i32, status: Status) -> Result<()> {
    let (reason, help) = match status {
        Status::Done => return Ok(()),
        Status::Busy => ("has a log of KVM's that another Pagemark reads", "end the other one"),
        Status::NoMachine => ("has no machine of KVM's", "start it with -accel kvm, or use another mechanism"),
        Status::Refused(Refusal::NoLog) => {
            ("runs under a KVM that has no log with manual protection", "Linux has it since 5.0; or use pagemap-scan")
        }
        Status::Refused(Refusal::Ring) => {
            ("uses a dirty ring in place of KVM's log", "leave dirty-ring-size out of its -accel kvm")
        }
        Status::Refused(Refusal::NoRings) => {
            ("runs under a KVM that has no dirty rings", "Linux has them since 5.11; or use kvm-log")
        }
        Status::Refused(Refusal::Overwritten) => (
            "runs under a KVM that has overwritten entries of its rings, so that written pages are not known",
            "start it with `pagemark vm run --mechanism kvm-log`",
        ),
        Status::Refused(Refusal::GuestMemory) => {
            ("has memory of a confidential machine, which it cannot read", "no checkpoint can hold such a machine")
        }
        Status::Refused(Refusal::NotBegun) => ("has a log of KVM's that is not read", "attach anew"),
        Status::Refused(Refusal::Call(error)) => {
            return Err(of("read KVM's log in", pid)(io::Error::from_raw_os_error(error)));
        }
    };
    Err(Error::about(ErrorKind::KvmLog, Object::Process(pid), reason).help(help))
}

/// Adds the addresses of written pages. What cannot be an address is left out.
fn insert(part: &Written, written: &mut RangeSet) {
    let Some(start) = Some(Address::new(part.host_address)).filter(|start| start.is_page_aligned()) else { return };
    for (index, &word) in part.pages.iter().enumerate() {
        let mut rest = word;
        let mut at = 0u32;
        while rest != 0 {
            let skipped = rest.trailing_zeros();
            rest >>= skipped;
            let length = (!rest).trailing_zeros();
            let first = start.checked_add(ByteCount::of_pages(index as u64 * 64 + u64::from(at + skipped)));
            let end = first.and_then(|first| first.checked_add(ByteCount::of_pages(length.into())));
            if let (Some(first), Some(end)) = (first, end) {
                written.insert(first..end);
            }
            at += skipped + length;
            rest = rest.checked_shr(length).unwrap_or(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pagemark_kvm_log::protocol::{greet, send_reply};
    use proptest::prelude::*;

    use super::*;

    /// A log whose library is this test, in a process that runs.
    fn library(greeting: Status) -> (Result<KvmLog>, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        greet(&mut theirs, greeting).unwrap();
        (KvmLog::over(std::process::id() as i32, ours), theirs)
    }

    #[test]
    fn what_the_library_refuses_is_named_with_what_to_do() {
        use Refusal::{Call, GuestMemory, NoLog, NoRings, NotBegun, Overwritten, Ring};
        for (status, expected) in [
            (Status::Busy, "another Pagemark"),
            (Status::NoMachine, "no machine"),
            (Status::Refused(NoLog), "manual protection"),
            (Status::Refused(Ring), "ring"),
            (Status::Refused(NoRings), "rings"),
            (Status::Refused(Overwritten), "overwritten"),
            (Status::Refused(GuestMemory), "confidential"),
            (Status::Refused(NotBegun), "not read"),
        ] {
            let error = library(status).0.unwrap_err();
            assert!(error.kind() == ErrorKind::KvmLog && error.to_string().contains(expected), "{error}");
            assert!(!error.advice().is_empty(), "{error}");
        }
        let (log, mut theirs) = library(Status::Done);
        let mut log = log.unwrap();
        send_reply(&mut theirs, Status::Refused(Call(libc::ENOMEM)), &[]).unwrap();
        let error = log.begin().unwrap_err();
        assert!(error.to_string().contains("Cannot allocate memory"), "{error}");
        // A refusal is not the end of the connection.
        send_reply(&mut theirs, Status::Done, &[Written { host_address: 0x1000, pages: vec![0b101] }]).unwrap();
        let mut written = RangeSet::new();
        log.collect(&mut written).unwrap();
        assert_eq!((written.page_count(), written.range_count()), (2, 2));
    }

    #[test]
    fn a_library_that_is_lost_fails_each_collect_from_then_on() {
        let mut half = Vec::new();
        send_reply(&mut half, Status::Done, &[Written { host_address: 0, pages: vec![1, 2] }]).unwrap();
        half.truncate(half.len() - 3);
        for end in [&[][..], &half, &[0xff; 64]] {
            let (log, mut theirs) = library(Status::Done);
            let mut log = log.unwrap();
            std::io::Write::write_all(&mut theirs, end).unwrap();
            drop(theirs);
            let mut written = RangeSet::new();
            let first = log.collect(&mut written).unwrap_err();
            assert!(first.kind() == ErrorKind::KvmLog && written.is_empty(), "{first}");
            let second = log.collect(&mut written).unwrap_err();
            assert!(second.to_string().contains("no longer answers"), "{second}");
            assert!(second.advice().contains("all of the memory") && log.is_lost());
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(KvmLog::over(1, ours).unwrap_err().kind(), ErrorKind::KvmLog);
    }

    proptest! {
        #[test]
        fn bits_become_addresses(
            pages in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 0..5),
        ) {
            let part = Written { host_address: 0x7000, pages: pages.clone() };
            let mut written = RangeSet::new();
            insert(&part, &mut written);
            let expected: BTreeSet<u64> = (0..pages.len() as u64 * 64)
                .filter(|page| pages[(page / 64) as usize] & 1 << (page % 64) != 0)
                .map(|page| 7 + page)
                .collect();
            let found: BTreeSet<u64> =
                written.iter().flat_map(|range| range.start.page().get()..range.end.page().get()).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn no_report_causes_a_panic(host_address in any::<u64>(), pages in prop::collection::vec(any::<u64>(), 0..3)) {
            insert(&Written { host_address, pages }, &mut RangeSet::new());
        }
    }

    #[test]
    fn a_process_without_the_library_is_refused() {
        let refused = |keeping, variables: &[(&str, &str)], expected: &str, advice: &str| {
            let mut command = std::process::Command::new("sleep");
            command.arg("600").env_remove(SOCKET).env_remove(RINGS).envs(variables.iter().copied());
            let mut child = command.spawn().unwrap();
            pagemark_testing::wait_until_it_has(child.id(), "600");
            let error = KvmLog::connect(child.id() as i32, keeping).unwrap_err();
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(error.kind(), ErrorKind::KvmLog);
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.advice().contains(advice), "{}", error.advice());
        };
        let (socket, rings) = ((SOCKET, "/no/such/socket"), (RINGS, "4096"));
        for keeping in [Keeping::Log, Keeping::Rings] {
            refused(keeping, &[], "without the library", "vm run");
            refused(keeping, &[rings], "without the library", "vm run");
        }
        refused(Keeping::Log, &[socket, rings], "for kvm-ring", "--mechanism kvm-ring");
        refused(Keeping::Rings, &[socket], "for kvm-log", "--mechanism kvm-log");
        refused(Keeping::Log, &[socket], "reach the library", "linked dynamically");
        refused(Keeping::Rings, &[socket, rings], "reach the library", "linked dynamically");
    }
}
