//! Swap space for a test.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Swap space in compressed memory, while this lives. Tests of one program take turns with it.
pub struct Swap {
    is_ours: bool,
    _turn: MutexGuard<'static, ()>,
}

impl Swap {
    const DEVICE: &str = "/dev/zram0";

    /// Takes the swap space that the machine has in `/dev/zram0`, or makes it, of 256 MiB. None where there is no such device or no
    /// right to use it.
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

/// How much of a process is swapped out, bytes; 0 for one that is gone.
pub fn swapped_bytes(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSwap:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10
}
