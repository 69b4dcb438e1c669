//! Time limits of tests.

use std::fs;
use std::time::{Duration, Instant};

/// True on an emulated machine of the lab, which sets `$PAGEMARK_LAB`. Programs take ten times as
/// long there.
pub fn is_emulated() -> bool {
    std::env::var_os("PAGEMARK_LAB").is_some()
}

/// The time limit of a wait. It is longer than any event that a test waits for takes, so that only
/// a missing event fails the test.
pub fn patience() -> Duration {
    Duration::from_secs(if is_emulated() { 1200 } else { 600 })
}

/// Waits until `condition` returns a value. `event` describes it in the message of a panic.
///
/// # Panics
/// If it returns none within [`patience`]. A list of all processes is printed then.
#[track_caller]
pub fn wait_for<T>(event: &str, condition: impl FnMut() -> Option<T>) -> T {
    wait_for_described(|| event.to_owned(), condition)
}

/// Like [`wait_for`], for an event that is best described by what there is instead of it when the
/// wait ends.
///
/// # Panics
/// Those of [`wait_for`].
#[track_caller]
pub fn wait_for_described<T>(event: impl FnOnce() -> String, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        if Instant::now() >= deadline {
            panic!("waited too long: {}; the processes:\n{}", event(), processes());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `condition` is true. `event` describes it in the message of a panic.
///
/// # Panics
/// If it is false for longer than [`patience`].
#[track_caller]
pub fn wait_until(event: &str, mut condition: impl FnMut() -> bool) {
    wait_for(event, || condition().then_some(()));
}

/// Waits until a process that was just started has its arguments, of which `argument` is one, and
/// its environment: the kernel lets the parent continue before.
///
/// # Panics
/// Those of [`wait_until`].
#[track_caller]
pub fn wait_until_it_has(pid: u32, argument: &str) {
    let words = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let has_argument = || words("cmdline").split(|&byte| byte == 0).any(|word| word == argument.as_bytes());
    wait_until("the program has its arguments", || has_argument() && !words("environ").is_empty());
}

/// All processes but the kernel's, a line each: what they wait for may show why a test does.
fn processes() -> String {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let describe = |pid: u32| {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let (status, arguments) = (read("status"), read("cmdline").replace('\0', " "));
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        let names = ["PPid", "TracerPid", "State", "SigPnd", "ShdPnd", "SigBlk", "SigIgn"];
        let fields = names.map(|name| format!("{name} {}", field(name)));
        // Behind the name and the state: the parent, the group, the session, the terminal, its group in the foreground.
        let stat = read("stat");
        let numbers: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let group = |position: usize| numbers.get(position).copied().unwrap_or_default();
        let groups = format!("group {}, in the foreground {}", group(2), group(5));
        let is_of_the_kernel = arguments.is_empty() && field("VmSize").is_empty() && !field("State").starts_with('Z');
        let waits_in = read("wchan");
        let name = if arguments.is_empty() { field("Name") } else { arguments.chars().take(120).collect() };
        (!is_of_the_kernel).then(|| format!("  {pid}: {}, {groups}, in {waits_in}: {name}", fields.join(", ")))
    };
    let pids = entries.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok());
    pids.filter_map(describe).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn processes_are_listed_with_their_commands() {
        let own = format!("  {}: ", std::process::id());
        let list = super::processes();
        let line = list.lines().find(|line| line.starts_with(&own)).unwrap_or_default();
        let program = std::env::args().next().unwrap_or_default();
        assert!(line.contains("State R") || line.contains("State S"), "{list}");
        assert!(line.contains(&program.chars().take(40).collect::<String>()), "{list}");
    }
}
