//! What tells a process from all others, now and after a restore.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::{Status, path, read};

/// The auxiliary vector's entry with the address of 16 random bytes, which the kernel makes for
/// each program that is executed.
const AT_RANDOM: u64 = libc::AT_RANDOM;

/// How often the auxiliary vector is read until it is there, a millisecond apart.
const ATTEMPTS: u32 = 50;

/// The boot of the machine, a text that each boot makes anew.
///
/// # Errors
/// The kernel does not say it.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// A hash of the random bytes that a process got when it executed its program, and of its id: 16
/// hexadecimal digits. A process that was restored has the same ones; a forked child has another
/// id. None if the process has lost the bytes.
///
/// # Errors
/// There is no such process, or its memory may not be read.
pub fn birth(pid: i32) -> io::Result<Option<String>> {
    let Some(address) = random_at(pid)? else { return Ok(None) };
    let mut random = [0; 16];
    File::open(path(pid, "mem"))?.read_exact_at(&mut random, address)?;
    let own_id = Status::read(pid)?.namespace_ids.last().copied().unwrap_or(pid);
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"pagemark birth of a process").update(&random).update(&own_id.to_le_bytes());
    Ok(Some(hasher.finalize().to_hex()[..16].to_owned()))
}

/// The address of a process's random bytes. A process that is about to execute its program does not
/// have it yet, and is waited for.
fn random_at(pid: i32) -> io::Result<Option<u64>> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    for _ in 0..ATTEMPTS {
        let auxv = read(pid, "auxv")?;
        let mut entries = auxv.chunks_exact(16).map(|entry| (word(&entry[..8]), word(&entry[8..])));
        if let Some((_, address)) = entries.find(|&(key, _)| key == AT_RANDOM) {
            return Ok(Some(address));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_execution_of_a_program_has_its_own_birth() {
        let own = birth(std::process::id() as i32).unwrap();
        assert!(own.as_ref().is_some_and(|birth| birth.len() == 16));
        assert_eq!(birth(std::process::id() as i32).unwrap(), own);
        let mut births = vec![own];
        for _ in 0..2 {
            let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
            births.push(birth(child.id() as i32).unwrap());
            child.kill().unwrap();
            child.wait().unwrap();
        }
        births.sort();
        births.dedup();
        assert_eq!(births.len(), 3);
        assert!(birth(i32::MAX).is_err());
    }
}
