//! The merging of equal pages by the kernel (KSM), for a test.

use std::fs;
use std::path::PathBuf;

use crate::patience::wait_until;

/// The kernel merges equal pages of processes that permit it, as fast as it can, until this is
/// dropped.
pub struct Merging {
    before: Vec<(PathBuf, String)>,
}

impl Merging {
    /// Starts it. None where the kernel cannot, or starting it is not permitted.
    pub fn start() -> Option<Merging> {
        let mut merging = Merging { before: Vec::new() };
        for (setting, value) in [("pages_to_scan", "10000"), ("sleep_millisecs", "1"), ("run", "1")] {
            let path = Merging::file(setting);
            merging.before.push((path.clone(), fs::read_to_string(&path).ok()?));
            fs::write(path, value).ok()?;
        }
        Some(merging)
    }

    /// Waits until the kernel has looked at all such pages several times, after which those are
    /// merged that were equal and not written meanwhile.
    pub fn wait(&self) {
        let scans = || fs::read_to_string(Merging::file("full_scans")).unwrap().trim().parse::<u64>().unwrap();
        let begin = scans();
        wait_until("the kernel has looked at all pages", || scans() >= begin + 8);
    }

    fn file(name: &str) -> PathBuf {
        ["/sys/kernel/mm/ksm", name].iter().collect()
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        for (setting, value) in self.before.iter().rev() {
            let _ = fs::write(setting, value);
        }
    }
}
