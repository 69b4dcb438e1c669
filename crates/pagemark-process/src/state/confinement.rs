//! What confines threads, or belongs to them alone, and cannot be given back: Landlock, the
//! dispatch of system calls to themselves, and keyrings. A checkpoint of such a program is refused,
//! unless it is to be saved without.

use std::collections::HashMap;
use std::io;

use pagemark_linux::confinement::{self, Confinement, Keyring};
use pagemark_linux::{keyrings, proc};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use pagemark_trace::identity::Identity;
use pagemark_trace::{PidsHere, RecordedPid};

use super::name;

/// The option of the command that saves a program without.
const OPTION: &str = "--without-sandbox";

/// What threads have that they lose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// Rules of Landlock.
    Landlock,
    /// Their system calls are turned into signals.
    SyscallUserDispatch,
    /// A keyring of the thread with keys.
    ThreadKeyring,
    /// A keyring of the process with keys.
    ProcessKeyring,
    /// A keyring of a session that this command does not belong to, with keys.
    SessionKeyring,
    /// The same without keys, not even the keyring of the user, as a login makes it.
    EmptySession,
}

/// Threads that lose the same.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Confined {
    kind: Kind,
    /// Their ids in the images.
    threads: Vec<RecordedPid>,
}

/// Checks that a restore of these processes gives all threads the confinement that they have. What
/// the kernel does not show is not checked: see [`confinement::VIEW`].
///
/// # Errors
/// [`ErrorKind::Confined`]
pub(crate) fn check(pids: &[i32]) -> Result<()> {
    for found in find(pids) {
        let what = match found.kind {
            Kind::Landlock => "is under Landlock, whose rules a restore cannot give back".to_owned(),
            Kind::SyscallUserDispatch => {
                "dispatches its system calls to itself (PR_SET_SYSCALL_USER_DISPATCH), which a restore cannot give back"
                    .to_owned()
            }
            Kind::ThreadKeyring => keys("of its own", found.keys),
            Kind::ProcessKeyring => keys("of its process", found.keys),
            Kind::SessionKeyring => keys("of its session", found.keys),
            Kind::EmptySession => continue,
        };
        let help = format!("{OPTION} saves the program all the same; the restored program runs without");
        return Err(
            Error::about(ErrorKind::Confined, Object::Thread { tid: found.thread, pid: found.pid }, what).help(help)
        );
    }
    Ok(())
}

fn keys(whose: &str, count: u64) -> String {
    let count = if count == 1 { "a key".to_owned() } else { format!("{count} keys") };
    format!("has a keyring {whose} that holds {count}, which a restore cannot give back")
}

/// Observes processes that are frozen.
pub(super) fn observe(pids: &[i32], image_pid: fn(i32) -> RecordedPid) -> Vec<Confined> {
    let mut all: Vec<Confined> = Vec::new();
    for found in find(pids) {
        let thread = image_pid(found.thread);
        match all.iter_mut().find(|known| known.kind == found.kind) {
            Some(known) => known.threads.push(thread),
            None => all.push(Confined { kind: found.kind, threads: vec![thread] }),
        }
    }
    all
}

impl Confined {
    /// Adds to `missing` what the threads have lost.
    pub(super) fn report(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let threads: Vec<RecordedPid> =
            self.threads.iter().copied().filter(|&thread| here.get(thread).is_some()).collect();
        if threads.is_empty() {
            return;
        }
        let what = match self.kind {
            Kind::Landlock => "the rules of Landlock: saved with --without-sandbox",
            Kind::SyscallUserDispatch => {
                "the dispatch of system calls (PR_SET_SYSCALL_USER_DISPATCH): saved with \
                 --without-sandbox"
            }
            Kind::ThreadKeyring => "the keys of the thread's keyring: saved with --without-sandbox",
            Kind::ProcessKeyring => "the keys of the process's keyring: saved with --without-sandbox",
            Kind::SessionKeyring => "the keys of the session's keyring: saved with --without-sandbox",
            Kind::EmptySession => "the keyring of the session, which held no key, and have that of the restore",
        };
        missing.push(format!("{} lost {what}", name("thread", &threads)));
    }
}

/// Something that a thread has.
struct Found {
    pid: i32,
    thread: i32,
    kind: Kind,
    /// How many keys it loses.
    keys: u64,
}

fn find(pids: &[i32]) -> Vec<Found> {
    let mut all = Vec::new();
    let mut sessions = Sessions::default();
    for &pid in pids {
        // Where the kernel does not show it, nothing is found.
        let Ok(threads) = confinement::of_process(pid) else { return Vec::new() };
        let kinds = |sessions: &mut Sessions, found: &Confinement| lost(found, pid, sessions);
        if threads.iter().all(|found| kinds(&mut sessions, found).is_empty()) {
            continue;
        }
        for thread in proc::threads(pid).unwrap_or_default() {
            let Ok(Some(found)) = confinement::of_thread(thread) else { continue };
            let kinds = kinds(&mut sessions, &found).into_iter();
            all.extend(kinds.map(|(kind, keys)| Found { pid, thread, kind, keys }));
        }
    }
    all
}

/// What a thread of a process loses, and how many keys.
fn lost(found: &Confinement, pid: i32, sessions: &mut Sessions) -> Vec<(Kind, u64)> {
    let held = |keyring: Option<Keyring>| keyring.map_or(0, |keyring| keyring.held);
    let kinds = [
        (found.has_landlock, Kind::Landlock, 0),
        (found.dispatches_calls, Kind::SyscallUserDispatch, 0),
        (held(found.thread_keyring) > 0, Kind::ThreadKeyring, held(found.thread_keyring)),
        (held(found.process_keyring) > 0, Kind::ProcessKeyring, held(found.process_keyring)),
    ];
    let mut lost: Vec<(Kind, u64)> =
        kinds.into_iter().filter(|(is_lost, ..)| *is_lost).map(|(_, kind, keys)| (kind, keys)).collect();
    lost.extend(found.session_keyring.and_then(|keyring| sessions.lost(keyring, pid)));
    lost
}

/// The keyrings of sessions that were found, and what is lost with each. The threads of a program
/// mostly have one, so that each is read once.
#[derive(Default)]
struct Sessions {
    /// The keyring of the session of this command, once it was asked for.
    own: Option<Option<i32>>,
    known: HashMap<i32, Option<(Kind, u64)>>,
}

impl Sessions {
    fn lost(&mut self, keyring: Keyring, pid: i32) -> Option<(Kind, u64)> {
        if *self.own.get_or_insert_with(session_of_this_command) == Some(keyring.serial) {
            return None;
        }
        *self.known.entry(keyring.serial).or_insert_with(|| match keyring.held {
            0 => Some((Kind::EmptySession, 0)),
            // What its user may not read counts whole.
            held => match own_keys(pid, keyring.serial).unwrap_or(held) {
                0 => None,
                keys => Some((Kind::SessionKeyring, keys)),
            },
        })
    }
}

/// The keyring of the session of this command.
fn session_of_this_command() -> Option<i32> {
    let own = confinement::of_thread(nix::unistd::gettid().as_raw()).ok().flatten()?;
    own.session_keyring.map(|keyring| keyring.serial)
}

/// How many keys of its own a keyring holds, as the user of a process may see them.
fn own_keys(pid: i32, keyring: i32) -> io::Result<u64> {
    let user = Identity::of_process(pid)?;
    let held = user.run(|| keyrings::held(keyring))??;
    // What a service manager puts there is root's.
    let left: Vec<i32> = held.into_iter().filter(|&key| !keyrings::is_of_each_session(key)).collect();
    user.run(|| left.iter().filter(|&&key| !keyrings::is_of_each_session(key)).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_named_once_for_all_threads() {
        let threads = vec![RecordedPid::new(7), RecordedPid::new(8)];
        let confined = Confined { kind: Kind::Landlock, threads };
        let text = serde_json::to_string(&confined).unwrap();
        assert_eq!(text, r#"{"kind":"landlock","threads":[7,8]}"#);
        let confined: Confined = serde_json::from_str(&text).unwrap();
        let mut missing = Vec::new();
        confined.report(&PidsHere::as_recorded(), &mut missing);
        assert_eq!(missing, ["threads 7, 8 lost the rules of Landlock: saved with --without-sandbox"]);
        // Processes that are not there have lost nothing.
        missing.clear();
        confined.report(&PidsHere::unknown(), &mut missing);
        assert!(missing.is_empty());
    }
}
