//! `states DIRECTORY ROLE [saved-whole]`: threads that wait in different system calls, and one that
//! computes, which check that nothing disturbs them. The main thread has the role, others have the
//! others.
//!
//! No call may return EINTR, and none too early. Calls that the kernel ends with EINTR after any
//! stop (`epoll_wait`, `sigtimedwait`) report that in the file `interrupted` instead.

use std::arch::{asm, is_x86_feature_detected};
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use pagemark_testing::Report;

/// A thread that makes no progress for this long is stuck.
const STUCK: Duration = Duration::from_secs(120);

/// What a thread does again and again. Returns what is wrong.
type Role = fn() -> Result<(), String>;

const ROLES: [(&str, Role); 11] = [
    ("compute", compute_and_rest),
    ("sleep", sleep),
    ("futex", futex),
    ("wake", wake),
    ("epoll", epoll),
    ("read", read),
    ("write", write),
    ("sigwait", sigwait),
    ("sigsuspend", sigsuspend),
    ("stack", signal_stack),
    ("vfork", vfork),
];

/// Rounds of each role.
static ROUNDS: [AtomicU64; ROLES.len()] = [const { AtomicU64::new(0) }; ROLES.len()];
/// Threads of the roles.
static THREADS: [AtomicI32; ROLES.len()] = [const { AtomicI32::new(0) }; ROLES.len()];

static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();

fn main() {
    let mut report = Report::from_arguments();
    let _ = DIRECTORY.set(report.directory().to_owned());
    let role = std::env::args().nth(2).unwrap_or_default();
    IS_SAVED_WHOLE.store(std::env::args().nth(3).is_some_and(|option| option == "saved-whole"), SeqCst);
    let Some(own) = ROLES.iter().position(|(name, _)| *name == role) else {
        eprintln!("there is no role {role:?}");
        std::process::exit(2);
    };
    // Each thread takes the signals of its role alone.
    let blocked = set(&[libc::SIGUSR1, libc::SIGUSR2, libc::SIGRTMIN()]);
    // SAFETY: the sets live through the calls, and the handlers make only what handlers may.
    unsafe {
        libc::sigprocmask(libc::SIG_BLOCK, &raw const blocked, ptr::null_mut());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_flags = libc::SA_ONSTACK | libc::SA_RESTART;
        action.sa_sigaction = on_signal_stack as *const () as usize;
        libc::sigaction(libc::SIGUSR2, &raw const action, ptr::null_mut());
        action.sa_sigaction = counted as *const () as usize;
        libc::sigaction(libc::SIGRTMIN(), &raw const action, ptr::null_mut());
    }
    for number in (0..ROLES.len()).filter(|&number| number != own) {
        std::thread::spawn(move || repeat(number));
    }
    std::thread::spawn(send_signals);
    std::thread::spawn(move || {
        let mut last = [(0, Instant::now()); ROLES.len()];
        let mut reported = [0; ROLES.len()];
        loop {
            std::thread::sleep(Duration::from_millis(5));
            let mut have_all_gone_on = true;
            for (number, last) in last.iter_mut().enumerate() {
                let rounds = ROUNDS[number].load(SeqCst);
                if rounds != last.0 {
                    *last = (rounds, Instant::now());
                }
                have_all_gone_on &= rounds > reported[number];
                let name = ROLES[number].0;
                if last.1.elapsed() >= STUCK {
                    let problem = format!("{name} is stuck after {rounds} rounds: {}", thread_state(number));
                    report.require(false, problem);
                }
            }
            if have_all_gone_on {
                reported = last.map(|(rounds, _)| rounds);
                report.ok();
            }
        }
    });
    repeat(own)
}

/// Ends the program with exit code 99 when something is wrong.
fn repeat(number: usize) -> ! {
    THREADS[number].store(thread_id(), SeqCst);
    let before = mask();
    loop {
        let problem = match ROLES[number].1() {
            Ok(()) if mask() == before => None,
            Ok(()) => Some("other signals are blocked".to_owned()),
            Err(problem) => Some(problem),
        };
        if let Some(problem) = problem {
            let directory = DIRECTORY.get().expect("it was set");
            let message = format!("{}: {problem}\n", ROLES[number].0);
            eprint!("violated: {message}");
            let _ = std::fs::write(directory.join("violated"), message);
            std::process::exit(pagemark_testing::VIOLATED);
        }
        ROUNDS[number].fetch_add(1, SeqCst);
    }
}

/// The state, the signals, the system call and the stack of a thread, by the number of its role.
fn thread_state(number: usize) -> String {
    let thread = THREADS[number].load(SeqCst);
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/task/{thread}/{name}")).unwrap_or_default();
    let is_told = |line: &&str| ["State", "Tracer", "Sig", "Shd"].iter().any(|name| line.starts_with(name));
    let status = read("status").lines().filter(is_told).collect::<Vec<&str>>().join(", ");
    format!("{status}; in the call {}; {}", read("syscall").trim_end(), read("stack").replace('\n', " "))
}

fn thread_id() -> i32 {
    // SAFETY: only asks.
    unsafe { libc::gettid() }
}

fn set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: zeros are a valid set, which the calls change.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
}

fn mask() -> u64 {
    let mut mask = 0u64;
    // SAFETY: the kernel writes 8 bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, 0, 0, &raw mut mask, 8) };
    mask
}

/// A system call, and the number of its error.
fn call(number: i64, arguments: [u64; 6]) -> Result<i64, i32> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: each caller passes addresses of its own values, which live through the call.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result < 0 { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { Ok(result) }
}

/// Reports that a call was interrupted, which the kernel's documentation allows for a few calls.
fn interrupted(name: &str) {
    let path = DIRECTORY.get().expect("it was set").join("interrupted");
    let file = OpenOptions::new().append(true).create(true).open(path);
    let _ = file.and_then(|mut file| writeln!(file, "{name}"));
}

/// Leaves something of the processor to others.
fn compute_and_rest() -> Result<(), String> {
    (0..4).try_for_each(|_| compute())?;
    std::thread::sleep(Duration::from_millis(2));
    Ok(())
}

fn compute() -> Result<(), String> {
    static PATTERN: [u8; 32] = *b"these are the vector registers..";
    let has_avx2 = u64::from(is_x86_feature_detected!("avx2"));
    let wrong: u64;
    // SAFETY: all registers that are changed are listed or put back. Below the stack pointer, only the red
    // zone is written, which is this code's own after the two pushes.
    unsafe {
        asm!(
            "push rbx", "push rbp",
            "mov rbp, 20000",
            "mov rbx, 0x11111102", "mov rcx, 0x11111103", "mov rdx, 0x11111104", "mov rdi, 0x11111106",
            "mov r8, -8", "mov r9, -9", "mov r10, -10", "mov r11, -11", "mov r12, -12", "mov r13, -13",
            "mov qword ptr [rsp - 8], 0x22222201", "mov qword ptr [rsp - 64], 0x22222202",
            "mov qword ptr [rsp - 120], 0x22222203", "mov qword ptr [rsp - 128], 0x22222204",
            "test r14, r14", "jz 2f",
            "vmovdqu ymm1, ymmword ptr [rsi]", "vmovdqu ymm14, ymmword ptr [rsi]",
            "2:",
            "mov rax, 0x11111101",
            "stc",
            "nop", "nop", "nop", "nop",
            "jnc 3f",
            "cmp rax, 0x11111101", "jne 3f", "cmp rbx, 0x11111102", "jne 3f", "cmp rcx, 0x11111103", "jne 3f",
            "cmp rdx, 0x11111104", "jne 3f", "cmp rdi, 0x11111106", "jne 3f", "cmp r8, -8", "jne 3f",
            "cmp r9, -9", "jne 3f", "cmp r10, -10", "jne 3f", "cmp r11, -11", "jne 3f", "cmp r12, -12", "jne 3f",
            "cmp r13, -13", "jne 3f",
            "cmp qword ptr [rsp - 8], 0x22222201", "jne 3f", "cmp qword ptr [rsp - 64], 0x22222202", "jne 3f",
            "cmp qword ptr [rsp - 120], 0x22222203", "jne 3f", "cmp qword ptr [rsp - 128], 0x22222204", "jne 3f",
            "test r14, r14", "jz 4f",
            "vpcmpeqb ymm3, ymm1, ymmword ptr [rsi]", "vpmovmskb eax, ymm3", "cmp eax, -1", "jne 3f",
            "vpcmpeqb ymm3, ymm14, ymmword ptr [rsi]", "vpmovmskb eax, ymm3", "cmp eax, -1", "jne 3f",
            "4:",
            "dec rbp", "jnz 2b",
            "xor eax, eax", "jmp 5f",
            "3:",
            "mov eax, 1",
            "5:",
            "pop rbp", "pop rbx",
            out("rax") wrong, inout("rsi") PATTERN.as_ptr() => _, inout("r14") has_avx2 => _,
            out("rcx") _, out("rdx") _, out("rdi") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("ymm1") _, out("ymm3") _, out("ymm14") _,
        );
    }
    if wrong == 0 { Ok(()) } else { Err("a register or the red zone has changed".into()) }
}

/// Whole checkpoints are taken: CRIU lets a sleep that has lasted longer than its limit fail.
static IS_SAVED_WHOLE: AtomicBool = AtomicBool::new(false);

fn sleep() -> Result<(), String> {
    for ms in [1, 10] {
        let time = libc::timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
        let (number, begin) = (libc::SYS_nanosleep, Instant::now());
        let slept = call(number, [(&raw const time) as u64, 0, 0, 0, 0, 0]);
        let passed = begin.elapsed();
        let is_late = slept == Err(libc::EINTR) && IS_SAVED_WHOLE.load(SeqCst);
        if slept != Ok(0) && !is_late || passed < Duration::from_millis(ms as u64) {
            return Err(format!("nanosleep: {slept:?} after {passed:?} of {ms} ms"));
        }
    }
    Ok(())
}

static WORD: AtomicU32 = AtomicU32::new(0);

fn futex() -> Result<(), String> {
    let seen = WORD.load(SeqCst);
    let address = WORD.as_ptr() as u64;
    let waited = call(libc::SYS_futex, [address, libc::FUTEX_WAIT as u64, seen.into(), 0, 0, 0]);
    match waited {
        Ok(0) | Err(libc::EAGAIN) => Ok(()),
        other => Err(format!("futex: {other:?}")),
    }
}

fn wake() -> Result<(), String> {
    WORD.fetch_add(1, SeqCst);
    let woken = call(libc::SYS_futex, [WORD.as_ptr() as u64, libc::FUTEX_WAKE as u64, 1, 0, 0, 0]);
    let time = libc::timespec { tv_sec: 0, tv_nsec: 1_500_000 };
    let no_fds = 0;
    let slept = call(libc::SYS_ppoll, [no_fds, 0, (&raw const time) as u64, 0, 0, 0]);
    match (woken, slept) {
        (Ok(0..=1), Ok(0)) => Ok(()),
        other => Err(format!("futex and ppoll: {other:?}")),
    }
}

fn epoll() -> Result<(), String> {
    static POLLER: OnceLock<i32> = OnceLock::new();
    // SAFETY: takes a number.
    let poller = *POLLER.get_or_init(|| unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) });
    let mut event = [0u64; 2];
    let begin = Instant::now();
    match call(libc::SYS_epoll_wait, [poller as u64, event.as_mut_ptr() as u64, 1, 2, 0, 0]) {
        Ok(0) if begin.elapsed() >= Duration::from_millis(2) => {}
        Err(libc::EINTR) => interrupted("epoll_wait"),
        other => return Err(format!("epoll_wait: {other:?} after {:?}", begin.elapsed())),
    }
    Ok(())
}

/// A pipe, and what was written and read.
struct Pipe {
    reader: std::io::PipeReader,
    writer: std::io::PipeWriter,
    written: AtomicU64,
    read: AtomicU64,
}

fn pipe() -> &'static Pipe {
    static PIPE: OnceLock<Pipe> = OnceLock::new();
    PIPE.get_or_init(|| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        Pipe { reader, writer, written: AtomicU64::new(0), read: AtomicU64::new(0) }
    })
}

fn read() -> Result<(), String> {
    let mut bytes = [0; 8];
    let length = (&pipe().reader).read(&mut bytes).map_err(|error| format!("read: {error}"))?;
    let expected = pipe().read.fetch_add(1, SeqCst);
    if length == 8 && u64::from_le_bytes(bytes) == expected { Ok(()) } else { Err(format!("read: {bytes:?}")) }
}

fn write() -> Result<(), String> {
    let next = pipe().written.fetch_add(1, SeqCst);
    let length = (&pipe().writer).write(&next.to_le_bytes()).map_err(|error| format!("write: {error}"))?;
    std::thread::sleep(Duration::from_millis(1));
    if length == 8 { Ok(()) } else { Err(format!("write: {length}")) }
}

fn sigwait() -> Result<(), String> {
    let signals = 1u64 << (libc::SIGUSR1 - 1);
    match call(libc::SYS_rt_sigtimedwait, [(&raw const signals) as u64, 0, 0, 8, 0, 0]) {
        Ok(signal) if signal == i64::from(libc::SIGUSR1) => {}
        Err(libc::EINTR) => interrupted("sigtimedwait"),
        other => return Err(format!("rt_sigtimedwait: {other:?}")),
    }
    Ok(())
}

/// Handled and sent signals of the thread that waits in `sigsuspend`.
static HANDLED: AtomicU64 = AtomicU64::new(0);
static SENT: AtomicU64 = AtomicU64::new(0);

extern "C" fn counted(_: i32) {
    HANDLED.fetch_add(1, SeqCst);
}

fn sigsuspend() -> Result<(), String> {
    let before = HANDLED.load(SeqCst);
    let none = set(&[libc::SIGUSR1, libc::SIGUSR2]);
    // SAFETY: the set lives through the call.
    unsafe { libc::sigsuspend(&raw const none) };
    let handled = HANDLED.load(SeqCst);
    if handled > before { Ok(()) } else { Err(format!("sigsuspend returned after {handled} signals")) }
}

/// Rounds in the handler on the signal stack.
static ON_STACK: AtomicU64 = AtomicU64::new(0);
const STACK: usize = 64 << 10;

extern "C" fn on_signal_stack(_: i32) {
    let mut is_right = true;
    for _ in 0..4 {
        is_right &= compute().is_ok();
    }
    ON_STACK.fetch_add(if is_right { 1 } else { 1 << 40 }, SeqCst);
}

/// Computes on a signal stack, at whose end is other memory.
fn signal_stack() -> Result<(), String> {
    static MEMORY: OnceLock<usize> = OnceLock::new();
    let memory = *MEMORY.get_or_init(|| {
        let memory = Box::leak(vec![0xa5u8; 2 * STACK].into_boxed_slice()).as_mut_ptr();
        // SAFETY: the stack is leaked memory.
        unsafe {
            let stack = libc::stack_t { ss_sp: memory.add(STACK).cast(), ss_flags: 0, ss_size: STACK };
            libc::sigaltstack(&raw const stack, ptr::null_mut());
        }
        memory as usize
    });
    let before = ON_STACK.load(SeqCst);
    let none = set(&[libc::SIGUSR1, libc::SIGRTMIN()]);
    // SAFETY: the set lives through the call.
    unsafe { libc::sigsuspend(&raw const none) };
    // SAFETY: nobody else has this memory.
    let below = unsafe { std::slice::from_raw_parts(memory as *const u8, STACK) };
    let rounds = ON_STACK.load(SeqCst);
    if rounds > before && rounds < 1 << 40 && below.iter().all(|&byte| byte == 0xa5) {
        Ok(())
    } else {
        Err("the handler has not run, or registers or memory have changed".into())
    }
}

fn vfork() -> Result<(), String> {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 300_000 };
    let mut child: i64 = libc::SYS_vfork;
    // SAFETY: the child uses neither stack nor memory but `time`, and ends in the code. The kernel changes
    // the registers that are listed.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax", "jnz 2f",
            "mov eax, 35", "xor esi, esi", "syscall",
            "mov eax, 231", "mov edi, 7", "syscall",
            "2:",
            inout("rax") child, inout("rdi") &raw const time => _, out("rsi") _, out("rcx") _, out("r11") _,
        );
    }
    let mut status = 0;
    let waited = call(libc::SYS_wait4, [child as u64, (&raw mut status) as u64, 0, 0, 0, 0]);
    if waited == Ok(child) && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7 {
        Ok(())
    } else {
        Err(format!("vfork: {child}, then {waited:?} with status {status}"))
    }
}

/// Sends each signal again when the last one was taken.
fn send_signals() {
    let of = |name| {
        let number = ROLES.iter().position(|(role, _)| *role == name).expect("a role");
        (&THREADS[number], &ROUNDS[number])
    };
    let send = |thread: &AtomicI32, signal: i32| {
        // SAFETY: takes numbers. A thread that is not there yet gets none.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.load(SeqCst), signal) };
    };
    let ((waits, _), (suspends, _), (stack, on_stack)) = (of("sigwait"), of("sigsuspend"), of("stack"));
    let mut stack_rounds = u64::MAX;
    loop {
        std::thread::sleep(Duration::from_millis(1));
        send(waits, libc::SIGUSR1);
        if suspends.load(SeqCst) != 0 && SENT.load(SeqCst) == HANDLED.load(SeqCst) {
            SENT.fetch_add(1, SeqCst);
            send(suspends, libc::SIGRTMIN());
        }
        let rounds = on_stack.load(SeqCst);
        if stack.load(SeqCst) != 0 && stack_rounds != rounds {
            stack_rounds = rounds;
            send(stack, libc::SIGUSR2);
        }
    }
}
