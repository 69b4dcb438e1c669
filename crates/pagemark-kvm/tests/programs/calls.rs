//! System calls that write to a region. The oracle is the content before and after.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use pagemark::region::{Region, RegionOptions};
use pagemark::track::{OwnMemory, Scope};
use pagemark::{Address, ErrorKind, Mechanism, PAGE_SIZE, RangeSet};
use pagemark_linux::own_memory::Mapping;
use pagemark_testing::assert_oracle_eq;

const PAGES: usize = 600;

struct Checked {
    region: Region,
    /// The page at whose start the next call writes, from before it.
    page: usize,
    calls: usize,
}

impl Checked {
    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.bytes()];
        self.region.read(0, &mut bytes).expect("the content");
        bytes
    }

    /// Asserts that all bytes that have changed are in `written`.
    fn compare(&self, name: &str, before: &[u8], written: &RangeSet) {
        let mechanism = self.region.mechanism();
        let after = self.content();
        let bytes = before.iter().zip(&after).enumerate();
        let changed: Vec<usize> = bytes.filter(|(_, (before, after))| before != after).map(|(byte, _)| byte).collect();
        assert!(!changed.is_empty(), "{mechanism}: {name} changed nothing");
        let missed = changed.iter().find(|byte| !written.contains(Address::new(**byte as u64)));
        assert_oracle_eq!(missed, None, "{mechanism}: {name}: a byte that was missed; {written:?} were found");
    }

    /// Has `call` write from 8 bytes before the next page on.
    fn of(&mut self, name: &str, call: impl FnOnce(*mut u8) -> i64) {
        self.page += 4;
        let at = self.region.as_ptr().wrapping_add(self.page * PAGE_SIZE - 8);
        self.region.begin().expect("a transaction");
        let before = self.content();
        let result = call(at);
        assert!(result >= 0, "{name}: {result} {}", std::io::Error::last_os_error());
        let written = self.region.commit().expect("the written pages");
        self.compare(name, &before, &written);
        self.calls += 1;
        // Nothing is written in between.
        self.region.begin().expect("a transaction");
        let written = self.region.commit().expect("no page");
        assert!(written.is_empty(), "{name}: {written:?} was written once more");
    }
}

macro_rules! call {
    ($number:ident $(, $argument:expr)*) => {
        // SAFETY: the kernel writes to the test's region, or to values that are borrowed.
        unsafe { libc::syscall(libc::$number $(, $argument)*) }
    };
}

#[test]
#[ignore = "is run by calls_that_write_to_regions, in the machine"]
fn calls() {
    for mechanism in [Mechanism::KvmLog, Mechanism::KvmRing, Mechanism::KvmScan, Mechanism::KvmEmulate] {
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        let region = match Region::with_options(PAGES * PAGE_SIZE, options) {
            // The machine keeps a log or rings.
            Err(error) if error.kind() == ErrorKind::Unavailable => continue,
            region => region.expect("a region"),
        };
        let mut checked = Checked { region, page: 0, calls: 0 };
        checked.region.write(0, &vec![0xee; PAGES * PAGE_SIZE]).expect("the region");
        files(&mut checked);
        sockets(&mut checked);
        waits(&mut checked);
        numbers(&mut checked);
        signals(&mut checked);
        blocked(&checked);
        at_any_time(mechanism);
        println!("{mechanism}: {} calls are found", checked.calls);
    }
}

fn files(checked: &mut Checked) {
    let file = super::file(20_000, 7);
    let fd = file.as_raw_fd();
    checked.of("read", |at| call!(SYS_read, fd, at, 5000));
    checked.of("pread64", |at| call!(SYS_pread64, fd, at, 5000, 10));
    let two = |at: *mut u8| [(at, 100usize), (at.wrapping_add(2 * PAGE_SIZE), 200)];
    checked.of("readv", |at| call!(SYS_readv, fd, two(at).as_ptr(), 2));
    checked.of("preadv", |at| call!(SYS_preadv, fd, two(at).as_ptr(), 2, 0, 0));
    checked.of("preadv2", |at| call!(SYS_preadv2, fd, two(at).as_ptr(), 2, 0, 0, 0usize));
    let many = |at: *mut u8| (0..20).map(|index| (at.wrapping_add(index), 1usize)).collect::<Vec<_>>();
    checked.of("readv of many", |at| call!(SYS_preadv, fd, many(at).as_ptr(), 20, 0, 0));
    let bytes = [5u8; 100];
    let here = (bytes.as_ptr(), bytes.len());
    checked.of("process_vm_readv", |at| {
        call!(SYS_process_vm_readv, std::process::id(), [(at, 100usize)].as_ptr(), 1, &raw const here, 1, 0usize)
    });
    checked.of("process_vm_writev", |at| {
        call!(SYS_process_vm_writev, std::process::id(), &raw const here, 1, [(at, 100usize)].as_ptr(), 1, 0usize)
    });
    let itself = std::process::id();
    checked.of("process_vm_writev by a child", |at| {
        by_child(|| call!(SYS_process_vm_writev, itself, &raw const here, 1, [(at, 100usize)].as_ptr(), 1, 0usize))
    });
    let memory = std::fs::File::options().write(true).open(format!("/proc/{itself}/mem")).expect("the memory");
    let to = memory.as_raw_fd();
    checked.of("pwrite64 by a child", |at| by_child(|| call!(SYS_pwrite64, to, [7u8; 100].as_ptr(), 100, at)));
    checked.of("pwritev by a child", |at| by_child(|| call!(SYS_pwritev, to, &raw const here, 1, at, 0)));
    checked.of("fstat", |at| call!(SYS_fstat, fd, at));
    checked.of("stat", |at| call!(SYS_stat, c"/".as_ptr(), at));
    checked.of("newfstatat", |at| call!(SYS_newfstatat, libc::AT_FDCWD, c"/".as_ptr(), at, 0));
    checked.of("statx", |at| call!(SYS_statx, libc::AT_FDCWD, c"/".as_ptr(), 0, libc::STATX_ALL, at));
    checked.of("statfs", |at| call!(SYS_statfs, c"/".as_ptr(), at));
    checked.of("getcwd", |at| call!(SYS_getcwd, at, 4096));
    checked.of("readlink", |at| call!(SYS_readlink, c"/proc/self/cwd".as_ptr(), at, 4096));
    checked.of("readlink of the program", |at| call!(SYS_readlink, c"/proc/self/exe".as_ptr(), at, 4096));
    let directory = std::fs::File::open("/").expect("the root");
    checked.of("getdents64", |at| call!(SYS_getdents64, directory.as_raw_fd(), at, 8192));
    checked.of("pipe2", |at| call!(SYS_pipe2, at, 0));
    checked.of("fcntl", |at| {
        // SAFETY: as a lock of the whole file.
        unsafe { at.cast::<libc::flock>().write_unaligned(std::mem::zeroed()) };
        call!(SYS_fcntl, fd, libc::F_GETLK, at)
    });
    let mut memory = std::fs::File::options().write(true).open("/proc/self/mem").expect("the memory");
    checked.of("write to the memory's file", |at| {
        std::io::Seek::seek(&mut memory, std::io::SeekFrom::Start(at as u64)).expect("an address");
        memory.write(&[3; 100]).expect("memory") as i64
    });
    checked.of("mincore", |at| {
        let page = at as usize / PAGE_SIZE * PAGE_SIZE;
        call!(SYS_mincore, page, PAGE_SIZE * 2, at)
    });
    checked.of("madvise", |at| {
        let page = at as usize / PAGE_SIZE * PAGE_SIZE;
        call!(SYS_madvise, page, PAGE_SIZE, libc::MADV_DONTNEED)
    });
}

/// Makes a call in a child.
fn by_child(call: impl FnOnce() -> i64) -> i64 {
    // SAFETY: the child makes the call, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(i32::from(call() < 0));
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        -i64::from(status)
    }
}

fn sockets(checked: &mut Checked) {
    let (one, other) = UnixDatagram::pair().expect("two sockets");
    let fd = one.as_raw_fd();
    let send = || other.send(&[9; 300]).expect("room for it");
    send();
    checked.of("ioctl", |at| call!(SYS_ioctl, fd, libc::FIONREAD, at));
    checked.of("recvfrom", |at| call!(SYS_recvfrom, fd, at, 300, 0, 0, 0usize));
    send();
    checked.of("recvmsg", |at| {
        let buffer = (at, 300usize);
        // SAFETY: all fields may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = ((&raw const buffer).cast_mut().cast(), 1);
        call!(SYS_recvmsg, fd, &raw mut message, 0)
    });
    send();
    send();
    checked.of("recvmmsg", |at| {
        let buffers = [(at, 300usize), (at.wrapping_add(2 * PAGE_SIZE), 300)];
        // SAFETY: all fields may be zero.
        let mut messages: [libc::mmsghdr; 2] = unsafe { std::mem::zeroed() };
        for (message, buffer) in messages.iter_mut().zip(&buffers) {
            (message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) = (std::ptr::from_ref(buffer).cast_mut().cast(), 1);
        }
        call!(SYS_recvmmsg, fd, messages.as_mut_ptr(), 2, 0, 0)
    });
    send();
    checked.of("recvmsg's message", |at| {
        let mut bytes = [0u8; 300];
        let buffer = (bytes.as_mut_ptr(), 300usize);
        // SAFETY: all fields may be zero; the place is in the region.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = ((&raw const buffer).cast_mut().cast(), 1);
            (message.msg_flags, message.msg_controllen) = (77, 5);
            at.cast::<libc::msghdr>().write_unaligned(message);
        }
        call!(SYS_recvmsg, fd, at, 0)
    });
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let len = 16u32;
    checked.of("getsockname", |at| call!(SYS_getsockname, listener.as_raw_fd(), at, &raw const len));
    let len = 4u32;
    checked.of("getsockopt", |at| call!(SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_TYPE, at, &raw const len));
    checked.of("getsockopt of IP", |at| {
        call!(SYS_getsockopt, listener.as_raw_fd(), libc::IPPROTO_IP, libc::IP_TTL, at, &raw const len)
    });
    checked.of("socketpair", |at| call!(SYS_socketpair, libc::AF_UNIX, libc::SOCK_STREAM, 0, at));
}

fn waits(checked: &mut Checked) {
    let (one, other) = UnixDatagram::pair().expect("two sockets");
    other.send(&[1]).expect("room for it");
    let fd = one.as_raw_fd();
    let waited = |at: *mut u8| {
        // SAFETY: in the region.
        unsafe { at.cast::<libc::pollfd>().write_unaligned(libc::pollfd { fd, events: libc::POLLIN, revents: 0 }) };
        at
    };
    checked.of("poll", |at| call!(SYS_poll, waited(at), 1, 100));
    checked.of("ppoll", |at| call!(SYS_ppoll, waited(at), 1, 0, 0, 8));
    checked.of("select", |at| {
        // SAFETY: in the region.
        unsafe { at.cast::<[u64; 16]>().write_unaligned([0; 16]) };
        call!(SYS_select, 1024, 0, at, 0, [0u64; 2].as_ptr())
    });
    // SAFETY: makes a descriptor.
    let poll = unsafe { libc::epoll_create1(0) };
    let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 5 };
    assert_eq!(call!(SYS_epoll_ctl, poll, libc::EPOLL_CTL_ADD, fd, &raw const event), 0);
    checked.of("epoll_wait", |at| call!(SYS_epoll_wait, poll, at, 4, 100));
    checked.of("wait4", |at| {
        let mut child = std::process::Command::new("sh").args(["-c", "exit 3"]).spawn().expect("a shell");
        let waited = call!(SYS_wait4, child.id(), at, 0, 0);
        assert!(child.wait().is_err(), "it was waited for");
        waited
    });
    let (word, more) = (0u32, (8 + 3) << 12);
    checked.of("futex", |at| {
        // To the second word, or with 3 (`FUTEX_OP_OR`): it must be aligned.
        let to = at as usize + 8;
        call!(SYS_futex, &raw const word, libc::FUTEX_WAKE_OP, 1, 0, to, 2 << 28 | more)
    });
}

fn numbers(checked: &mut Checked) {
    checked.of("getrandom", |at| call!(SYS_getrandom, at, 5000, 0));
    checked.of("clock_gettime", |at| call!(SYS_clock_gettime, libc::CLOCK_MONOTONIC, at));
    checked.of("gettimeofday", |at| call!(SYS_gettimeofday, at, 0));
    checked.of("uname", |at| call!(SYS_uname, at));
    checked.of("sysinfo", |at| call!(SYS_sysinfo, at));
    checked.of("times", |at| call!(SYS_times, at));
    checked.of("getrusage", |at| call!(SYS_getrusage, 0, at));
    checked.of("prlimit64", |at| call!(SYS_prlimit64, 0, libc::RLIMIT_CORE, 0, at));
    checked.of("sched_getaffinity", |at| call!(SYS_sched_getaffinity, 0, 128, at));
    checked.of("getresuid", |at| call!(SYS_getresuid, at, at.wrapping_add(100), at.wrapping_add(2 * PAGE_SIZE)));
    checked.of("getgroups", |at| {
        let groups = call!(SYS_getgroups, 100, at);
        // There may be none.
        // SAFETY: in the region.
        unsafe { at.write(1) };
        groups
    });
    checked.of("prctl", |at| call!(SYS_prctl, libc::PR_GET_NAME, at));
    checked.of("arch_prctl", |at| call!(SYS_arch_prctl, 0x1003, at));
    checked.of("getitimer", |at| call!(SYS_getitimer, libc::ITIMER_REAL, at));
    checked.of("timer_create", |at| call!(SYS_timer_create, libc::CLOCK_MONOTONIC, 0, at));
    checked.of("getcpu", |at| call!(SYS_getcpu, at, 0, 0));
}

static CAME: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(number: libc::c_int) {
    CAME.store(number, Ordering::Relaxed);
}

fn signals(checked: &mut Checked) {
    checked.of("rt_sigprocmask", |at| call!(SYS_rt_sigprocmask, 0, 0, at, 8));
    checked.of("rt_sigpending", |at| call!(SYS_rt_sigpending, at, 8));
    checked.of("rt_sigaction", |at| call!(SYS_rt_sigaction, libc::SIGUSR1, 0, at, 8));
    checked.of("sigaltstack", |at| call!(SYS_sigaltstack, 0, at));
    // A frame on an alternate stack in the region.
    let size = 16 * PAGE_SIZE;
    let stack = libc::stack_t {
        ss_sp: checked.region.as_ptr().wrapping_add(500 * PAGE_SIZE).cast(),
        ss_flags: 0,
        ss_size: size,
    };
    // SAFETY: the handler stores a number; nothing else uses that part of the region.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (on_signal as extern "C" fn(_) as usize, libc::SA_ONSTACK);
        assert_eq!(libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut()), 0);
        let mut before = std::mem::zeroed();
        assert_eq!(libc::sigaltstack(&stack, &mut before), 0);
        checked.of("a signal's frame", |_| i64::from(libc::raise(libc::SIGUSR2)));
        assert_eq!(libc::sigaltstack(&before, std::ptr::null_mut()), 0);
    }
    assert_eq!(CAME.load(Ordering::Relaxed), libc::SIGUSR2);
}

/// A call that blocks over several transactions counts as written in each, until it has ended.
fn blocked(checked: &Checked) {
    let (mut to, from) = {
        let mut ends = [0; 2];
        // SAFETY: makes two descriptors, which the files own.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            (std::fs::File::from_raw_fd(ends[1]), std::fs::File::from_raw_fd(ends[0]))
        }
    };
    let page = PAGES - 10;
    let at = checked.region.as_ptr() as usize + page * PAGE_SIZE;
    let is_found = |written: &RangeSet| written.contains(Address::new((page * PAGE_SIZE) as u64));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| call!(SYS_read, from.as_raw_fd(), at, 100));
        let deadline = std::time::Instant::now() + pagemark_testing::patience();
        for found in 0..3 {
            loop {
                checked.region.begin().expect("a transaction");
                if is_found(&checked.region.commit().expect("the written pages")) {
                    break;
                }
                assert!(found == 0 && std::time::Instant::now() < deadline, "{found}");
                std::thread::yield_now();
            }
        }
        checked.region.begin().expect("a transaction");
        let before = checked.content();
        to.write_all(&[1; 100]).expect("a reader");
        assert_eq!(reader.join().expect("no panic"), 100);
        checked.compare("a read that waited", &before, &checked.region.commit().expect("the written pages"));
    });
    checked.region.begin().expect("a transaction");
    assert!(checked.region.commit().expect("no page").is_empty());
}

/// Threads have the kernel write all the time. A copy that has only what each collect reports is
/// equal in the end.
fn at_any_time(mechanism: Mechanism) {
    const ROUNDS: usize = 150;
    let mapping = Mapping::new(PAGES * PAGE_SIZE).expect("room for it");
    // SAFETY: private memory that lives longer than the tracker, and whose mapping stays.
    let memory = unsafe { OwnMemory::new(mapping.range()) }.expect("a mapping");
    let mut tracker = mechanism.tracker(Scope::OwnMemory, &memory).expect("the machine has it");
    let (base, all) = (mapping.start().as_ptr() as usize, RangeSet::from(mapping.range()));
    let mut copy = vec![0u8; mapping.bytes()];
    let mut update = || {
        let mut written = RangeSet::new();
        tracker.collect(&all, &mut written).expect("the written pages");
        for range in written.iter() {
            let (start, len) = (range.start.get() as usize, (range.end.get() - range.start.get()) as usize);
            // SAFETY: within both. Only the kernel writes meanwhile; the next collect has it too.
            unsafe { (start as *const u8).copy_to(copy.as_mut_ptr().add(start - base), len) };
        }
    };
    let ends = AtomicBool::new(false);
    update();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let ends = &ends;
            scope.spawn(move || {
                let mut at = thread * 7919;
                while !ends.load(Ordering::Relaxed) {
                    at = (at * 31 + 12_345) % (PAGES * PAGE_SIZE - 9000);
                    let (to, from) = ([(base + at, 3000usize), (base + at + 4000, 10)], [(base, 3010usize)]);
                    let id = std::process::id();
                    let result = match at % 3 {
                        0 => call!(SYS_getrandom, base + at, 9000, 0),
                        1 => call!(SYS_process_vm_readv, id, to.as_ptr(), 2, from.as_ptr(), 1, 0usize),
                        _ => call!(SYS_uname, base + at),
                    };
                    assert!(result >= 0, "{}", std::io::Error::last_os_error());
                }
            });
        }
        (0..ROUNDS).for_each(|_| update());
        ends.store(true, Ordering::Relaxed);
    });
    update();
    let lost = mapping.content().chunks(PAGE_SIZE).zip(copy.chunks(PAGE_SIZE)).position(|(now, then)| now != then);
    assert_oracle_eq!(lost, None, "{mechanism}: a byte that was missed");
    assert!(copy.iter().any(|byte| *byte != 0), "{mechanism}");
}
