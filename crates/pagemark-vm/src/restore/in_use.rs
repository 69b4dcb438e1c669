//! What of a machine's command line another process has: a restore beside the original would take
//! its sockets, and write to its files, among them the file of its memory.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use pagemark_linux::proc;
use pagemark_linux::proc::descriptors::Descriptor;

use crate::error::{Error, ErrorKind, Object, Result, printable};
use crate::qemu::command_line::{named_paths, served_paths};
use crate::qemu::machine::Startup;
use crate::qemu::user_files::{self, FileId, SharedFile};

/// How long the end of a process that was killed is waited for. The kernel gives much memory back
/// before the files.
const END_LIMIT: Duration = Duration::from_secs(60);
const END_POLL: Duration = Duration::from_millis(2);

/// Options for disks. QEMU locks images, and a restored machine writes to none but its own.
const DISKS: [&str; 14] = [
    "", "blockdev", "drive", "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "mtdblock", "pflash", "sd", "snapshot",
];

/// Refuses a restore beside a machine whose sockets the new QEMU, started with `arguments`, would
/// replace.
///
/// # Errors
/// [`ErrorKind::Start`] names the socket.
pub(crate) fn refuse_if_served(startup: &Startup, arguments: &[String]) -> Result<()> {
    let owner = startup.owner_for_root()?;
    for path in served_paths(arguments) {
        let path = startup.directory.join(path);
        // A process that accepts no more connections has a full queue after some, and is that of before.
        let mut known = None;
        let find = || {
            known = user_files::listener(owner, &path).ok()?.or(known);
            Some(((), known))
        };
        if let Some(((), pid)) = living(find, proc::is_ending) {
            let by = pid.map_or_else(|| "another process".to_owned(), name);
            let error = Error::about(ErrorKind::Start, Object::File(path), format!("is in use by {by}"));
            return Err(error.help("end the machine that runs first"));
        }
    }
    Ok(())
}

/// Refuses a restore whose QEMU, started with `arguments`, would write to a file to which another
/// process writes: the memory of the original, or its log; or would take what comes through a FIFO
/// to another QEMU. Processes of other users are seen by root alone.
///
/// # Errors
/// [`ErrorKind::Start`] names the file and the process.
pub(crate) fn refuse_if_written(startup: &Startup, arguments: &[String]) -> Result<()> {
    let owner = startup.owner_for_root()?;
    let named = named_paths(arguments).into_iter().filter(|named| !DISKS.contains(&named.option));
    // QEMU makes a pipe of two FIFOs if there are these.
    let paths = named.flat_map(|named| ["", ".in", ".out"].map(|end| format!("{}{end}", named.path)));
    let paths = paths.map(|path| startup.directory.join(path));
    let files = paths.filter_map(|path| {
        let (id, kind) = user_files::shared_file(owner, &path)?;
        Some((id, NamedFile { path, kind }))
    });
    let files = Files { program: &startup.program, named: files.collect() };
    // To look at all processes takes a while.
    if files.named.is_empty() {
        return Ok(());
    }
    let find = || writer(&files).map(|(path, pid)| (path, Some(pid)));
    let Some((path, Some(pid))) = living(find, proc::is_ending) else { return Ok(()) };
    let reason = format!("is in use by {}, which writes to it", name(pid));
    let error = Error::about(ErrorKind::Start, Object::File(path.to_owned()), reason);
    Err(error.help("end the machine that runs first"))
}

/// The files that a QEMU of this program would write to.
struct Files<'a> {
    program: &'a Path,
    named: HashMap<FileId, NamedFile>,
}

struct NamedFile {
    path: PathBuf,
    kind: SharedFile,
}

/// What is found together with the process that has it. None if nothing is: a process that was
/// killed, and has its files for a while, is waited for.
fn living<T>(
    mut find: impl FnMut() -> Option<(T, Option<i32>)>,
    is_ending: impl Fn(i32) -> bool,
) -> Option<(T, Option<i32>)> {
    let deadline = Instant::now() + END_LIMIT;
    loop {
        let (_, pid) = find()?;
        if !pid.is_some_and(&is_ending) {
            // It may have ended since.
            let found = find()?;
            if found.1 == pid {
                return Some(found);
            }
        } else if Instant::now() >= deadline {
            return find();
        }
        sleep(END_POLL);
    }
}

/// The first of the files to which another process writes, and the process.
fn writer<'f>(files: &'f Files<'_>) -> Option<(&'f Path, i32)> {
    let own = std::process::id() as i32;
    let processes = proc::processes().unwrap_or_default();
    processes.into_iter().filter(|&pid| pid != own).find_map(|pid| {
        // The other end of a pipe is that of another program.
        let is_other_end = |file: &NamedFile| {
            file.kind == SharedFile::Fifo && proc::executable(pid).ok().as_deref() != Some(files.program)
        };
        let mut found = descriptors_of(pid).into_iter().filter_map(|descriptor| written(&descriptor, &files.named));
        Some((found.find(|file| !is_other_end(file))?.path.as_path(), pid))
    })
}

/// The descriptors of a process; none of one that cannot be looked at. Where the first thread has
/// ended, another one has them.
fn descriptors_of(pid: i32) -> Vec<Descriptor> {
    let found = proc::descriptors(pid).unwrap_or_default();
    if !found.is_empty() {
        return found;
    }
    let others = proc::threads(pid).unwrap_or_default().into_iter().filter(|&thread| thread != pid);
    others.filter_map(|thread| proc::descriptors(thread).ok()).find(|found| !found.is_empty()).unwrap_or_default()
}

/// The file to which a descriptor writes, if it is one of `files`.
fn written<'f>(descriptor: &Descriptor, files: &'f HashMap<FileId, NamedFile>) -> Option<&'f NamedFile> {
    // Others are no files; those of devices may hang.
    if !descriptor.link.starts_with(b"/") || descriptor.link.starts_with(b"/dev/pts/") {
        return None;
    }
    let found = fs::metadata(descriptor.path()).ok()?;
    let file = files.get(&(found.dev(), found.ino()))?;
    let flags = descriptor.flags().ok()??;
    (flags & libc::O_ACCMODE != libc::O_RDONLY).then_some(file)
}

/// A process, for people.
fn name(pid: i32) -> String {
    match proc::Stat::read(pid) {
        Ok(stat) => format!("process {pid} ({})", printable(&stat.command)),
        Err(_) => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn the_end_of_a_killed_holder_is_waited_for() {
        // It has the socket three times more.
        let left = Cell::new(3);
        assert_eq!(living(find_of(&left), |pid| pid == 7), None);
        // One that ends between the two looks.
        let left = Cell::new(1);
        assert_eq!(living(find_of(&left), |_| false), None);
        // One that lives, and one that nobody knows.
        assert_eq!(living(|| Some(((), Some(7))), |_| false), Some(((), Some(7))));
        assert_eq!(living(|| Some(((), None)), |_| true), Some(((), None)));
        // Another one has taken its place.
        let first = Cell::new(true);
        let find = || Some(((), Some(if first.replace(false) { 7 } else { 8 })));
        assert_eq!(living(find, |pid| pid == 7), Some(((), Some(8))));
    }

    fn find_of(left: &Cell<i32>) -> impl FnMut() -> Option<((), Option<i32>)> + '_ {
        || {
            left.set(left.get() - 1);
            (left.get() >= 0).then_some(((), Some(7)))
        }
    }

    #[test]
    fn only_files_that_others_write_to_are_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let own = fs::File::create(&path).unwrap();
        let id = own.metadata().map(|found| (found.dev(), found.ino())).unwrap();
        let named = HashMap::from([(id, NamedFile { path: path.clone(), kind: SharedFile::Regular })]);
        let files = Files { program: Path::new("/qemu"), named };
        assert_eq!(writer(&files), None);
        let sleeper = |descriptor: fs::File| {
            let child = std::process::Command::new("sleep").arg("1000").stdout(descriptor).spawn().unwrap();
            pagemark_testing::wait_until_it_has(child.id(), "1000");
            child
        };
        let mut reader = sleeper(fs::File::open(&path).unwrap());
        assert_eq!(writer(&files), None);
        let mut other = sleeper(own);
        assert_eq!(writer(&files), Some((path.as_path(), other.id() as i32)));
        for child in [&mut reader, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(writer(&files), None);
    }
}
