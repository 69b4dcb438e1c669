//! The merging of equal pages by the kernel (KSM), for a test.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::memory::FilledMapping;
use crate::patience::wait_until;

const PAGE: usize = 4096;
/// The settings are those of the whole machine.
const SETTINGS: [(&str, &str); 3] = [("pages_to_scan", "10000"), ("sleep_millisecs", "1"), ("run", "1")];

/// The kernel merges equal pages of processes that permit it, as fast as it can, until this is
/// dropped. One test at a time can have that; others wait.
pub struct Merging {
    /// A shell that puts the settings back when it reads a line, or this process is killed.
    keeper: Child,
    /// The kernel rests while no process has memory that may be merged.
    _mergeable: FilledMapping,
}

impl Merging {
    /// Starts it. None where the kernel cannot, or starting it is not permitted.
    pub fn start() -> Option<Merging> {
        let mergeable = FilledMapping::map(PAGE, 0, None, false).ok()?;
        mergeable.advise(libc::MADV_MERGEABLE).ok()?;
        let lock = File::open(file("run")).ok()?;
        lock.lock().ok()?;
        let before: Result<Vec<String>, _> = SETTINGS.iter().map(|(setting, _)| read(setting)).collect();
        let before = before.ok()?;
        let mut put_back = "read -r line; ".to_owned();
        for ((setting, _), value) in SETTINGS.iter().zip(&before).rev() {
            put_back += &format!("echo {value} >{}; ", file(setting));
        }
        // The shell has the lock as its output: it has nothing to write.
        let mut command = Command::new("sh");
        command.args(["-c", &put_back]).stdin(Stdio::piped()).stdout(lock).process_group(0);
        let merging = Merging { keeper: command.spawn().ok()?, _mergeable: mergeable };
        for (setting, value) in SETTINGS {
            fs::write(file(setting), value).ok()?;
        }
        Some(merging)
    }

    /// Waits until the kernel has looked at all such pages several times, after which those are
    /// merged that were equal and not written meanwhile.
    pub fn wait(&self) {
        let scans = || read("full_scans").unwrap().parse::<u64>().unwrap();
        let begin = scans();
        wait_until("the kernel has looked at all pages", || scans() >= begin + 8);
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        // The end of its input would not do: a forked process may have the pipe, too.
        if let Some(mut input) = self.keeper.stdin.take() {
            let _ = input.write_all(b"\n");
        }
        let _ = self.keeper.wait();
    }
}

fn read(setting: &str) -> io::Result<String> {
    Ok(fs::read_to_string(file(setting))?.trim().to_owned())
}

fn file(setting: &str) -> String {
    format!("/sys/kernel/mm/ksm/{setting}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip;

    #[test]
    fn the_settings_are_put_back() {
        let Some(mut merging) = Merging::start() else { skip!("equal pages cannot be merged here") };
        let is_merging = || SETTINGS.iter().all(|(setting, value)| read(setting).unwrap() == *value);
        assert!(is_merging());
        // As if this process were killed.
        drop(merging.keeper.stdin.take());
        assert!(merging.keeper.wait().unwrap().success());
        // Another test may have begun at once.
        wait_until("the settings", || !is_merging());
    }
}
