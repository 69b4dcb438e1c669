//! Swap space for a test.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Swap space in compressed memory, until it is dropped. The tests of one program use it one after
/// the other.
pub struct Swap {
    is_ours: bool,
    _turn: MutexGuard<'static, ()>,
}

impl Swap {
    const DEVICE: &str = "/dev/zram0";

    /// Takes the swap space that the machine has in `/dev/zram0`, or makes 256 MiB of it there.
    /// None where there is no such device, or using it is not permitted.
    pub fn on() -> Option<Swap> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
