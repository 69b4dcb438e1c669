//! What a thread does that does not come on, for an error.

use std::time::Duration;

use super::call::{kernel_functions, wait_function};
use super::stat::{number, ticks_per_s};
use super::{Stat, read, ticks_since_boot};

/// How many of the kernel's functions are named.
const FUNCTIONS_SHOWN: usize = 4;

/// Fields of `/proc/PID/stat`, as proc(5) counts.
const USER_TICKS: usize = 14;
const SYSTEM_TICKS: usize = 15;

/// What a thread does, for an error: its state, the kernel's functions in which it is, as far as
/// they may be read, and for one that could run its processor time. `None` if there is no such
/// thread.
///
/// ```
/// let activity = pagemark_linux::proc::activity(std::process::id() as i32).unwrap();
/// assert!(activity.starts_with("state "));
/// ```
pub fn activity(thread: i32) -> Option<String> {
    let text = read(thread, "stat").ok()?;
    let stat = Stat::parse(&text)?;
    let mut activity = format!("state {}", stat.state);
    if let Some(function) = wait_function(thread) {
        activity += &format!(" in {function}");
    }
    let functions: Vec<String> = kernel_functions(thread).into_iter().take(FUNCTIONS_SHOWN).collect();
    if !functions.is_empty() {
        activity += &format!(", in the kernel's functions {}", functions.join(" < "));
    }
    if stat.state == 'R' {
        // Tells one that computes from one that gets no processor.
        let time = |ticks: u64| Duration::from_millis(ticks * 1000 / ticks_per_s()).as_secs_f64();
        let spent = |field| time(number(&text, field).unwrap_or(0));
        let age = time(ticks_since_boot().saturating_sub(stat.start_ticks));
        activity += &format!(
            ", {:.2} s in user mode and {:.2} s in the kernel since it began {age:.2} s ago",
            spent(USER_TICKS),
            spent(SYSTEM_TICKS),
        );
    }
    Some(activity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_could_run_shows_its_time() {
        // The calling thread runs: it reads its own files.
        let own = nix::unistd::gettid().as_raw();
        let activity = activity(own).unwrap();
        assert!(activity.starts_with("state R"), "{activity}");
        assert!(activity.contains(" s in user mode and ") && activity.contains(" s in the kernel since"), "{activity}");
    }

    #[test]
    fn a_thread_that_sleeps_shows_where() {
        let mut sleep = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = sleep.id() as i32;
        let sleeps = || {
            activity(pid).is_some_and(|activity| activity.contains("state S in ") && !activity.contains("user mode"))
        };
        pagemark_testing::wait_until("the program sleeps", sleeps);
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        assert_eq!(activity(i32::MAX), None);
    }
}
