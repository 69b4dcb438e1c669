//! What programs leave behind: mounts, control groups, network namespaces, shared memory, sockets,
//! and files in their temporary directory. Processes: see `contained`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::steps::lock;
use crate::{Error, Result, cache, command};

/// How long something may remain when all programs have ended: that of a process which ends.
pub const GRACE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(50);

/// What outlives the process that has made it, a line each.
pub fn present() -> BTreeSet<String> {
    let mut things = BTreeSet::new();
    let mounts = mounts();
    for (point, kind) in &mounts {
        things.insert(format!("mount {point}"));
        if kind.starts_with("cgroup") {
            control_groups(Path::new(point), &mut things);
        }
    }
    for (directory, kind) in [("/run/netns", "network namespace"), ("/dev/shm", "shared memory")] {
        things.extend(names(Path::new(directory)).into_iter().map(|name| format!("{kind} {directory}/{name}")));
    }
    for (file, kind) in
        [("shm", "System V shared memory"), ("sem", "System V semaphores"), ("msg", "System V messages")]
    {
        let text = fs::read_to_string(format!("/proc/sysvipc/{file}")).unwrap_or_default();
        let id = |line: &str| line.split_whitespace().nth(1).map(|id| format!("{kind} {id}"));
        things.extend(text.lines().skip(1).filter_map(id));
    }
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // Those with a name that is no file. Names that the kernel has chosen are numbers of five digits.
    let name = |line: &str| {
        line.split_whitespace().nth(7).filter(|name| name.starts_with('@') && name.len() > 6).map(str::to_owned)
    };
    things.extend(sockets.lines().skip(1).filter_map(name).map(|name| format!("socket {name}")));
    things
}

/// The mount points of this process, with the kinds of their file systems.
fn mounts() -> Vec<(String, String)> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = |line: &str| {
        let point = line.split(' ').nth(4)?.to_owned();
        Some((point, line.split_once(" - ")?.1.split(' ').next()?.to_owned()))
    };
    text.lines().filter_map(mount).collect()
}

/// The groups below a directory that have no processes: those of others have some.
fn control_groups(directory: &Path, things: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let path = entry.path();
            if fs::read_to_string(path.join("cgroup.procs")).is_ok_and(|processes| processes.is_empty()) {
                things.insert(format!("control group {}", path.display()));
            }
            control_groups(&path, things);
        }
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Finds out which of the programs that run side by side has left something.
pub struct Watch {
    before: BTreeSet<String>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: Vec<String>,
    /// What is new, with the programs that may have made it.
    new: BTreeMap<String, Vec<String>>,
}

impl Watch {
    /// What is there now belongs to no program.
    pub fn new() -> Watch {
        Watch { before: present(), state: Mutex::default() }
    }

    /// A program begins.
    pub fn begin(&self, name: &str) {
        lock(&self.state).running.push(name.to_owned());
    }

    /// A program has ended.
    pub fn end(&self, name: &str) {
        let mut state = lock(&self.state);
        let present = present();
        state.new.retain(|thing, _| present.contains(thing));
        let suspects = state.running.clone();
        for thing in present.difference(&self.before) {
            state.new.entry(thing.clone()).or_insert_with(|| suspects.clone());
        }
        if let Some(position) = state.running.iter().position(|running| running == name) {
            state.running.remove(position);
        }
    }

    /// What is left when all programs have ended, and remains for `grace`, by the programs that may
    /// have made it.
    pub fn left(&self, grace: Duration) -> BTreeMap<String, Vec<String>> {
        let end = Instant::now() + grace;
        let mut new = std::mem::take(&mut lock(&self.state).new);
        loop {
            let present = present();
            new.retain(|thing, _| present.contains(thing));
            if new.is_empty() || Instant::now() >= end {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        let mut left: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (thing, suspects) in new {
            suspects.into_iter().for_each(|name| left.entry(name).or_default().push(thing.clone()));
        }
        left
    }
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}

/// The names of temporary directories begin with it. The process that has made one follows.
const PREFIX: &str = "pm";

/// A temporary directory for one program, which every user can use as `/tmp`.
pub struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    /// A new one. Its path is short, because those of sockets have at most 107 bytes.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new() -> Result<TemporaryDirectory> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            // Of runs that were killed.
            cache::abandoned(&std::env::temp_dir(), PREFIX).iter().for_each(|path| discard(path));
        }
        let path = std::env::temp_dir().join(format!("{PREFIX}.{}.{number}", std::process::id()));
        cache::create(&path)?;
        fs::set_permissions(&path, PermissionsExt::from_mode(0o1777))
            .map_err(Error::file("change the mode of", &path))?;
        Ok(TemporaryDirectory(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The files that are in it, and when they were made, if the file system says it.
    pub fn files(&self) -> Vec<(PathBuf, Option<SystemTime>)> {
        let file = |name: String| {
            let path = self.0.join(name);
            let made = path.symlink_metadata().and_then(|found| found.created()).ok();
            (path, made)
        };
        names(&self.0).into_iter().map(file).collect()
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        discard(&self.0);
    }
}

/// Removes a directory with all in it, but nothing of what is mounted there.
fn discard(directory: &Path) {
    let is_below = |point: &str| Path::new(point).starts_with(directory);
    for (point, _) in mounts().iter().rev().filter(|(point, _)| is_below(point)) {
        command::succeeds(Command::new("umount").args(["--lazy", point]));
    }
    if !mounts().iter().any(|(point, _)| is_below(point)) {
        // Nothing can be done about a failure here.
        let _ = cache::remove(directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_leaves_is_found_with_its_name() {
        let watch = Watch::new();
        watch.begin("a");
        watch.begin("b");
        watch.end("a");
        watch.begin("c");
        let id = command::output(Command::new("ipcmk").args(["--shmem", "4096"]), "ipcmk", "").unwrap();
        let id = id.split_whitespace().last().unwrap().to_owned();
        watch.end("b");
        watch.end("c");
        let thing = format!("System V shared memory {id}");
        let left = watch.left(Duration::ZERO);
        command::output(Command::new("ipcrm").args(["--shmem-id", &id]), "ipcrm", "").unwrap();
        assert!(left["b"].contains(&thing) && left["c"].contains(&thing) && !left.contains_key("a"), "{left:?}");
        watch.begin("d");
        watch.end("d");
        assert!(!watch.left(Duration::ZERO).values().flatten().any(|left| *left == thing));
    }

    #[test]
    fn files_of_a_temporary_directory_are_found_and_removed() {
        let directory = TemporaryDirectory::new().unwrap();
        let path = directory.path().to_owned();
        assert!(directory.files().is_empty());
        fs::write(path.join("one"), "").unwrap();
        let files: Vec<_> = directory.files().into_iter().map(|(path, _)| path).collect();
        assert_eq!(files, [path.join("one")]);
        drop(directory);
        assert!(!path.exists());
    }
}
