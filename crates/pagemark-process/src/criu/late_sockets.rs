//! Names for CRIU of the Unix sockets that a tree has connected since CRIU was started.
//!
//! CRIU saves a connection to a process outside only if its socket is named in CRIU's arguments. A
//! server that accepts connections all the time has another one in each freeze. So the arguments
//! have spare names, which CRIU copies to its heap. When the tree is frozen, and before CRIU looks
//! at sockets, Pagemark replaces spare names there by those of the sockets that are new.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::fs::FileExt;

use pagemark_linux::proc::{self, maps, tree};

use super::outside_sockets::ConnectedSockets;

/// The number of spare names. CRIU compares the name of each open file with them, so that more
/// would take time in the freeze. If these are too few, the dump fails and is repeated.
const SPARES: usize = 256;

/// The begin of a spare name. It is longer than the name of a socket.
const SPARE: &str = "unix[spare name ";

/// The digits of the number that ends a spare name.
const DIGITS: usize = 5;

/// The memory of CRIU that is searched ends here, bytes.
const MOST_BYTES: usize = 64 << 20;

/// CRIU's arguments: the spare names.
pub(super) fn dump_arguments() -> impl Iterator<Item = OsString> {
    (0..SPARES).flat_map(|number| ["--external".into(), format!("{SPARE}{number:0DIGITS$}").into()])
}

/// The sockets of a tree that CRIU knows.
#[derive(Debug)]
pub(super) struct LateSockets {
    root_pid: i32,
    known: ConnectedSockets,
}

impl LateSockets {
    /// `known` are the sockets that CRIU's arguments name.
    pub fn new(root_pid: i32, known: ConnectedSockets) -> LateSockets {
        LateSockets { root_pid, known }
    }

    /// Names to CRIU, which waits for an answer, the sockets that are new. The tree is frozen. What
    /// is not named makes the dump fail.
    pub fn name(self, criu_pid: i32) {
        let members = tree::members(self.root_pid).unwrap_or_default();
        let new = self.known.new_of(&members.iter().map(|member| member.process.pid).collect::<Vec<i32>>());
        if !new.is_empty() {
            let _ = rename(criu_pid, &new);
        }
    }
}

/// Replaces spare names in the memory of CRIU.
fn rename(criu_pid: i32, names: &[String]) -> std::io::Result<()> {
    let heap = maps::read(criu_pid)?.into_iter().find(|mapping| mapping.name == b"[heap]");
    let Some(heap) = heap else { return Ok(()) };
    let start = heap.start.get();
    let length = usize::try_from(heap.end.get() - start).unwrap_or(MOST_BYTES).min(MOST_BYTES);
    let mut content = vec![0; length];
    let memory = proc::open_memory_for_writing(criu_pid)?;
    memory.read_exact_at(&mut content, start)?;
    let mut places: HashMap<usize, Vec<usize>> = HashMap::new();
    for (at, number) in spares(&content) {
        places.entry(number).or_default().push(at);
    }
    for (name, places) in names.iter().zip(places.values()) {
        for at in places {
            memory.write_all_at(format!("{name}\0").as_bytes(), start + *at as u64)?;
        }
    }
    Ok(())
}

/// The spare names in memory: where each begins, and its number.
fn spares(memory: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    const LENGTH: usize = SPARE.len() + DIGITS;
    memory.windows(LENGTH + 1).enumerate().filter_map(|(at, window)| {
        let text = window.strip_prefix(SPARE.as_bytes())?.strip_suffix(&[0])?;
        Some((at, std::str::from_utf8(text).ok()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_names_are_found_and_have_room_for_that_of_any_socket() {
        let names: Vec<String> = dump_arguments().filter_map(|name| name.into_string().ok()).collect();
        let names: Vec<&String> = names.iter().filter(|name| name.starts_with(SPARE)).collect();
        assert!(names.iter().all(|name| name.len() > format!("unix[{}]", u32::MAX).len()));
        let memory = names.iter().map(|name| format!("\u{1}{name}\0")).collect::<String>();
        let found: Vec<(usize, usize)> = spares(memory.as_bytes()).collect();
        let step = names[0].len() + 2;
        assert_eq!(found, (0..SPARES).map(|number| (1 + number * step, number)).collect::<Vec<_>>());
        let other = format!("{SPARE}0000x\0{SPARE}00001 {SPARE}00");
        assert_eq!(spares(other.as_bytes()).next(), None);
        assert_eq!(spares(b"").next(), None);
    }
}
