//! Swap space for a test.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

/// Swap space in compressed memory, until it is dropped. The tests of a host use it one after the
/// other: one that is removed must not be that of another test.
pub struct Swap {
    is_ours: bool,
    /// Locked.
    _turn: File,
}

impl Swap {
    const DEVICE: &str = "/dev/zram0";

    /// Takes the swap space that the machine has in `/dev/zram0`, or makes 256 MiB of it there.
    /// None where there is no such device, or using it is not permitted.
    pub fn on() -> Option<Swap> {
        let turn = File::open(Swap::DEVICE).ok()?;
        turn.lock().ok()?;
        if fs::read_to_string("/proc/swaps").ok()?.contains(Swap::DEVICE) {
            return Some(Swap { is_ours: false, _turn: turn });
        }
        let setting = Path::new("/sys/block/zram0/disksize");
        if fs::read_to_string(setting).ok()?.trim() == "0" {
            fs::write(setting, "256M").ok()?;
        }
        let run = |command: &str| {
            let status = Command::new(command).arg(Swap::DEVICE).stdout(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        (run("mkswap") && run("swapon")).then_some(Swap { is_ours: true, _turn: turn })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = Command::new("swapoff").arg(Swap::DEVICE).status();
        }
    }
}
