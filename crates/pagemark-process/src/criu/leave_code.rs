//! Lets a thread that CRIU has left in its code end that code.
//!
//! CRIU's code in a process serves requests by a socket. When CRIU is gone, the code restores the
//! registers and the blocked signals of the thread by itself. But if it answers a request then, its
//! write to the closed socket makes SIGPIPE pending, which would end the program as soon as the
//! signal is no longer blocked.

use std::time::{Duration, Instant};

use pagemark_linux::proc::{self, Fields};
use pagemark_linux::ptrace::{self, Stop, Until};

use super::injected::{bit, code_of_criu};

/// How long a thread runs before it is stopped and looked at.
const SLICE: Duration = Duration::from_micros(200);

/// Lets the first thread of a process, which this process traces and has stopped, execute CRIU's
/// code to its end, and drops the SIGPIPE that the code gets. The thread is left stopped behind the
/// code, unless it has exited or stays in the code for [`ptrace::STOP_LIMIT`].
pub(super) fn leave_code(pid: i32) {
    let deadline = ptrace::deadline(ptrace::STOP_LIMIT);
    while Instant::now() < deadline {
        if has_left(pid) || ptrace::resume(pid, Until::Event, 0).is_err() {
            return;
        }
        std::thread::sleep(SLICE);
        let _ = ptrace::interrupt(pid);
        if !stops(pid, deadline) {
            return;
        }
    }
}

/// Waits until an interrupted thread has stopped. Delivers the signals that come first, but drops
/// a SIGPIPE that the thread has made itself. False if the thread has exited, or does not stop.
fn stops(pid: i32, deadline: Instant) -> bool {
    loop {
        let signal = match ptrace::wait(pid, Some(deadline)) {
            Ok(Stop::Trap) => return true,
            Ok(Stop::Signal(libc::SIGPIPE)) if is_own(pid) => 0,
            Ok(Stop::Signal(signal)) => signal,
            Ok(Stop::SystemCall | Stop::Event) => 0,
            Ok(Stop::Exiting | Stop::Exited) | Err(_) => return false,
        };
        if ptrace::resume(pid, Until::Event, signal).is_err() {
            return false;
        }
    }
}

/// True if the process itself has caused the signal before which it has stopped.
fn is_own(pid: i32) -> bool {
    // SAFETY: a signal whose code is SI_USER has a sender.
    ptrace::signal_info(pid).is_ok_and(|info| info.si_code == libc::SI_USER && unsafe { info.si_pid() } == pid)
}

/// True if a stopped thread is behind CRIU's code, and no SIGPIPE is on its way to it.
fn has_left(pid: i32) -> bool {
    let Ok(registers) = ptrace::registers(pid) else { return true };
    if code_of_criu(pid).iter().any(|code| code.contains(&registers.rip)) {
        return false;
    }
    let status = Fields::read(proc::path(pid, &format!("task/{pid}/status"))).ok();
    let signals = |name| status.as_ref().and_then(|status| status.in_base(name, 16)).unwrap_or(0);
    signals("SigPnd") & !signals("SigBlk") & bit(libc::SIGPIPE) == 0
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use pagemark_testing::{skip, wait_until};

    use super::*;

    /// Executes code in a file with the name of CRIU's: it reads a byte from descriptor 0, writes
    /// one to descriptor 30, which nobody reads, and restores the blocked signals.
    const PROGRAM: &str = r#"
        #define _GNU_SOURCE
        #include <signal.h>
        #include <stdio.h>
        #include <string.h>
        #include <sys/mman.h>
        #include <unistd.h>
        static const unsigned char code[] = {
            0xb8, 0, 0, 0, 0, 0xbf, 0, 0, 0, 0, 0x4c, 0x89, 0xe6, 0xba, 1, 0, 0, 0, 0x0f, 0x05,
            0xb8, 1, 0, 0, 0, 0xbf, 30, 0, 0, 0, 0x4c, 0x89, 0xe6, 0xba, 1, 0, 0, 0, 0x0f, 0x05,
            0xb8, 14, 0, 0, 0, 0xbf, 2, 0, 0, 0, 0x48, 0x89, 0xde, 0x31, 0xd2, 0x41, 0xba, 8, 0, 0, 0, 0x0f, 0x05,
            0xc3 };
        int main(void) {
            int ends[2], file = memfd_create("CRIUMFD", 0);
            if (pipe(ends) || dup2(ends[1], 30) < 0 || write(file, code, sizeof code) < 0) return 2;
            close(ends[0]);
            close(ends[1]);
            void *mapped = mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
            sigset_t all, before;
            sigfillset(&all);
            sigprocmask(SIG_SETMASK, &all, &before);
            char byte;
            register void *mask __asm__("rbx") = &before;
            register void *buffer __asm__("r12") = &byte;
            __asm__ volatile("call *%[code]" : : [code] "r"(mapped), "r"(mask), "r"(buffer)
                             : "rax", "rdi", "rsi", "rdx", "r10", "rcx", "r11", "memory");
            puts("done");
            fflush(stdout);
            pause();
        }"#;

    #[test]
    fn a_write_of_the_code_to_a_closed_socket_does_not_end_the_program() {
        let directory = tempfile::tempdir().unwrap();
        let (source, program) = (directory.path().join("program.c"), directory.path().join("program"));
        std::fs::write(&source, PROGRAM).unwrap();
        let Ok(compiled) = Command::new("cc").arg("-o").args([&program, &source]).status() else {
            skip!("no C compiler")
        };
        assert!(compiled.success());
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        let in_code = || {
            let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
            let at = call.split_whitespace().last().and_then(|at| u64::from_str_radix(at.strip_prefix("0x")?, 16).ok());
            at.is_some_and(|at| code_of_criu(pid).iter().any(|code| code.contains(&at)))
        };
        wait_until("it executes the code", in_code);
        // The thread of the test traces.
        ptrace::seize(pid, 0).unwrap();
        ptrace::interrupt(pid).unwrap();
        assert!(stops(pid, ptrace::deadline(ptrace::STOP_LIMIT)));
        assert!(!has_left(pid));
        child.stdin.take().unwrap().write_all(b"x").unwrap();
        leave_code(pid);
        assert!(has_left(pid));
        ptrace::detach(pid).unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!((line.as_str(), child.try_wait().unwrap()), ("done\n", None));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
