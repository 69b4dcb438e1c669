//! `/proc/PID/syscall` and `wchan`: what a thread waits for.

use std::io;

/// The system call in which a thread waits, with its registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// Number of the call.
    pub number: i64,
    /// The six arguments, whether the call has them or not.
    pub arguments: [u64; 6],
    /// The stack pointer.
    pub rsp: u64,
    /// The instruction pointer, behind the instruction that made the call.
    pub rip: u64,
}

impl Call {
    /// The call of a thread. None if it runs, or waits outside of a call.
    ///
    /// # Errors
    /// There is no such thread, or tracing it is not permitted.
    pub fn of_thread(thread: i32) -> io::Result<Option<Call>> {
        super::read(thread, "syscall").map(|text| Call::parse(&text))
    }

    /// The content of `/proc/PID/syscall`. None if it has no call.
    pub fn parse(text: &[u8]) -> Option<Call> {
        let mut fields = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
        let number = fields.next()?.parse().ok()?;
        let mut words = fields.map_while(|field| u64::from_str_radix(field.strip_prefix("0x")?, 16).ok());
        let mut arguments = [0; 6];
        for argument in &mut arguments {
            *argument = words.next()?;
        }
        Some(Call { number, arguments, rsp: words.next()?, rip: words.next()? })
    }
}

/// The kernel's function in which a thread waits. None if it runs, or the kernel does not say.
pub fn wait_function(thread: i32) -> Option<String> {
    let function = String::from_utf8(super::read(thread, "wchan").ok()?).ok()?;
    (!["", "0"].contains(&function.as_str())).then_some(function)
}

/// The kernel's functions in which a thread is, the innermost first. Empty if it executes its
/// program, or the kernel does not say, which it does to root alone.
pub fn kernel_functions(thread: i32) -> Vec<String> {
    parse_stack(&super::read(thread, "stack").unwrap_or_default())
}

fn parse_stack(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let functions = text.lines().filter_map(|line| line.split_once("] ")?.1.split('+').next().map(str::to_owned));
    functions.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_a_stack_are_parsed() {
        let text = b"[<0>] do_poll.constprop.0+0x1f2/0x3a0\n[<0>] do_syscall_64+0x5d/0x90\ngarbled\n";
        assert_eq!(parse_stack(text), ["do_poll.constprop.0", "do_syscall_64"]);
        assert_eq!(parse_stack(b""), Vec::<String>::new());
    }

    #[test]
    fn calls_are_parsed() {
        let call = Call::parse(b"202 0x7f10 0x80 0x0 0xffffffffffffffff 0x5 0x6 0x7ffd 0x401000\n");
        let arguments = [0x7f10, 0x80, 0, u64::MAX, 5, 6];
        assert_eq!(call, Some(Call { number: 202, arguments, rsp: 0x7ffd, rip: 0x40_1000 }));
    }

    #[test]
    fn a_thread_without_a_call_has_none() {
        for text in ["running\n", "-1 0x7ffd 0x401000\n", "", "202 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffd"] {
            assert_eq!(Call::parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_in_a_call() {
        let mut sleep = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = sleep.id() as i32;
        let is_asleep = || {
            let call = Call::of_thread(pid).unwrap();
            call.is_some_and(|call| [libc::SYS_nanosleep, libc::SYS_clock_nanosleep].contains(&call.number))
        };
        pagemark_testing::wait_until("the program sleeps", is_asleep);
        assert!(wait_function(pid).is_none_or(|function| function.contains("sleep")));
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        assert!(super::super::is_gone(&Call::of_thread(i32::MAX).unwrap_err()));
        assert_eq!(wait_function(i32::MAX), None);
    }
}
