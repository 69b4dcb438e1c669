//! Finds out which files the processes of a job write, create, rename and remove, open or closed.
//!
//! fanotify reports the changes of whole file systems, each with the process that made it. The
//! kernel's records of forks ([`forks`](pagemark_linux::forks)) say which processes belong to the
//! job, also those that are gone by the time their changes are read. Changes are reported before
//! the system call returns, so in a freeze all changes of the job are known: a file counts as
//! written when it is closed, and one that is open for writing is found by `/proc`.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark_linux::fanotify::{DirectoryHandle, Event, Events, Fanotify};
use pagemark_linux::forks::{Forks, Record, Records};
use pagemark_linux::proc::mounts::{Mount, MountChanges};
use pagemark_linux::proc::{self, tree};
use pagemark_trace::error::{Error, Object, Result};

use super::data_tree::DataTree;
use super::list::unix_ns;
use super::mounts::file_systems;
use super::users::Users;
use super::written::{WrittenFiles, WrittenPaths};

/// Time for which changes may wait to be read, so that many are read at once.
const GATHER: Duration = Duration::from_millis(20);

/// A file may get a time that is older than its change by the tick of the kernel's clock.
const TICK_NS: i64 = 20_000_000;

/// Watches the files that the processes of a job write.
///
/// It watches the file systems that are mounted when it is made, and those that are mounted later,
/// from a moment after that on. It holds none of them: each can be unmounted. Dropped, it ends.
#[derive(Debug)]
pub struct FileWatch {
    state: Arc<Mutex<State>>,
    /// The thread that reads ends when this is closed.
    stop: Option<OwnedFd>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    fanotify: Fanotify,
    mounts: MountChanges,
    forks: Forks,
    /// The process at the root of the job.
    root: Option<i32>,
    members: HashSet<i32>,
    /// Processes that had exited when changes were read last. Changes that they made just before
    /// their exit may have been reported since.
    exited: Vec<i32>,
    directories: HashMap<DirectoryHandle, Option<PathBuf>>,
    written: WrittenPaths,
    /// Before this time no change was missed, nanoseconds since 1970 UTC.
    complete_ns: i64,
    notices: Vec<String>,
    /// The notices about file systems.
    told: Vec<String>,
}

impl FileWatch {
    /// Begins to watch all file systems. The changes of a job that is started from now on will be
    /// known.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System): the kernel does not permit it; the error
    /// says what would enable it.
    pub fn new() -> Result<FileWatch> {
        let mut fanotify = Fanotify::new().map_err(|error| {
            Error::system("watch files (fanotify)", Object::None)(error)
                .help("this needs Linux 5.9 and CAP_SYS_ADMIN; `--data DIR` does without")
        })?;
        let mounts = MountChanges::new().map_err(list_mounts())?;
        let notices = mark_all(&mut fanotify)?;
        if !fanotify.has_marks() {
            let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(Error::system("watch any file system (fanotify)", Object::None)(error)
                .help("`--data DIR` does without"));
        }
        let forks = Forks::new().map_err(|error| {
            Error::system("record the forks of processes (perf_event_open)", Object::None)(error)
                .help("this needs CAP_PERFMON or CAP_SYS_ADMIN; `--data DIR` does without")
        })?;
        let state = State {
            fanotify,
            mounts,
            forks,
            root: None,
            members: HashSet::new(),
            exited: Vec::new(),
            directories: HashMap::new(),
            written: WrittenPaths::default(),
            complete_ns: unix_ns(SystemTime::now()) - TICK_NS,
            told: notices.clone(),
            notices,
        };
        Ok(FileWatch { state: Arc::new(Mutex::new(state)), stop: None, reader: None })
    }

    /// The job is this process and its descendants, also those that it will have.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`](crate::ErrorKind::Gone). [`ErrorKind::System`](crate::ErrorKind::System):
    /// no thread or pipe can be made.
    pub fn follow(&mut self, root_pid: i32) -> Result<()> {
        let failed = || Error::system("start the thread that watches files", Object::None);
        {
            let mut state = lock(&self.state);
            state.root = Some(root_pid);
            state.members.insert(root_pid);
            state.list_members();
        }
        let (stopped, stop) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|e| failed()(e.into()))?;
        let state = self.state.clone();
        let read = move || read_until(&stopped, &state);
        let reader = std::thread::Builder::new().name("file-watch".into()).spawn(read).map_err(failed())?;
        (self.stop, self.reader) = (Some(stop), Some(reader));
        Ok(())
    }

    /// What the job has written until now: its regular files as they are, and the rest. What is in
    /// `data` is left out. With the job frozen, this is complete.
    pub(crate) fn list(&self, data: &[DataTree], users: &Users) -> Result<WrittenFiles> {
        let mut state = lock(&self.state);
        state.read()?;
        state.written.list(data, users)
    }

    /// What a user should know and was not told yet: files that others write too, changes that were
    /// missed.
    pub fn take_notices(&self) -> Vec<String> {
        let mut state = lock(&self.state);
        let mut notices = std::mem::take(&mut state.notices);
        notices.extend(state.written.take_notices());
        notices
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        self.stop = None;
        // A thread that panicked has nothing left to say.
        let _ = self.reader.take().map(JoinHandle::join);
    }
}

fn list_mounts() -> impl FnOnce(io::Error) -> Error {
    super::io("list the mounts in", proc::own_path("mountinfo"))
}

/// Watches all mounted file systems. Returns notices about those that cannot be watched.
fn mark_all(fanotify: &mut Fanotify) -> Result<Vec<String>> {
    let mut notices = Vec::new();
    for Mount { point: path, file_system, .. } in file_systems().map_err(list_mounts())? {
        match fanotify.mark(&path) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                return Err(Error::system("watch the file system at", Object::File(path))(error)
                    .help("this needs CAP_SYS_ADMIN; `--data DIR` does without"));
            }
            Err(error) => notices.push(format!(
                "files on {} ({file_system}) belong to checkpoints only while they are open, or in --data directories: \
                 the file system cannot be watched ({error})",
                path.display()
            )),
        }
    }
    Ok(notices)
}

/// What a thread that panicked has left is as good as before: each event is handled for itself.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads changes as they come, until the other end of `stopped` is closed.
fn read_until(stopped: &OwnedFd, state: &Mutex<State>) {
    // The descriptors stay the same.
    let Ok(descriptors) = lock(state).descriptors() else { return };
    // Where there are no notices of mounts, they are seen at the next changes of files.
    let mounts = MountChanges::new().ok();
    let mut failure = None;
    loop {
        let mut polled = vec![PollFd::new(stopped.as_fd(), PollFlags::empty())];
        polled.extend(mounts.iter().map(|mounts| PollFd::new(mounts.as_fd(), PollFlags::POLLPRI)));
        polled.extend(descriptors.iter().map(|descriptor| PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)));
        let _ = poll(&mut polled, PollTimeout::NONE);
        if polled[0].any() == Some(true) {
            return;
        }
        let is_mount = mounts.is_some() && polled[1].any() == Some(true);
        if !is_mount {
            std::thread::sleep(GATHER);
        }
        let mut state = lock(state);
        if let Err(error) = state.read()
            && failure.replace(error.to_string()).is_none()
        {
            state.notices.push(format!("changes of files cannot be read: {error}"));
        }
    }
}

impl State {
    /// Copies of the descriptors that become readable with changes.
    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let forks = self.forks.descriptors().map(|descriptor| descriptor.try_clone_to_owned());
        std::iter::once(self.fanotify.as_fd().try_clone_to_owned()).chain(forks).collect()
    }

    /// Adds the processes of the job that are there now.
    fn list_members(&mut self) {
        // A root that is gone has no descendants.
        let members = self.root.and_then(|root| tree::members(root).ok()).unwrap_or_default();
        self.members.extend(members.iter().map(|member| member.process.pid));
    }

    /// Reads and handles all changes that were made before.
    fn read(&mut self) -> Result<()> {
        let now_ns = unix_ns(SystemTime::now());
        if self.mounts.have_come() {
            // A file system that was unmounted and mounted again has lost its mark.
            self.directories.clear();
            let notices = mark_all(&mut self.fanotify)?;
            let new = notices.into_iter().filter(|notice| !self.told.contains(notice)).collect::<Vec<_>>();
            self.told.extend_from_slice(&new);
            self.notices.extend(new);
        }
        let Events { events, overflowed } =
            self.fanotify.read().map_err(Error::system("read the changes of files", Object::None))?;
        // The fork of a process is recorded before its changes are.
        let Records { records, is_incomplete } = self.forks.read();
        let exited = self.follow_processes(&records);
        if is_incomplete {
            self.list_members();
        }
        for event in &events {
            self.handle(event)?;
        }
        for pid in std::mem::replace(&mut self.exited, exited) {
            // The other threads of a process may outlive its main thread.
            if !proc::exists(pid) {
                self.members.remove(&pid);
            }
        }
        if overflowed || is_incomplete {
            let members: Vec<i32> = self.members.iter().copied().collect();
            let users = Users::of_tree(self.root.unwrap_or(0), &members);
            let found = users.map_or(0, |users| self.written.search(self.complete_ns, &users));
            let notice = format!(
                "more files changed at once than the kernel reports (fs.fanotify.max_queued_events); {found} more files that \
                 changed in the directories where the program writes now belong to its checkpoints"
            );
            // On a busy machine this happens before each checkpoint.
            let is_new = !self.told.contains(&notice);
            if is_new {
                self.told.push(notice.clone());
            }
            if is_new || found > 0 {
                self.notices.push(notice);
            }
        }
        self.complete_ns = now_ns - TICK_NS;
        Ok(())
    }

    /// Keeps the processes of the job up to date. Returns those whose main thread exited.
    fn follow_processes(&mut self, records: &[Record]) -> Vec<i32> {
        let mut exited = Vec::new();
        for record in records {
            match *record {
                Record::Fork { parent, child } if self.members.contains(&parent) => {
                    self.members.insert(child);
                }
                // The id is that of another process now.
                Record::Fork { child, .. } if Some(child) != self.root => {
                    self.members.remove(&child);
                }
                Record::Exit(pid) if self.members.contains(&pid) => exited.push(pid),
                Record::Fork { .. } | Record::Exit(_) => {}
            }
        }
        exited
    }

    fn handle(&mut self, event: &Event) -> Result<()> {
        let is_own = event.pid == std::process::id() as i32;
        if event.is_directory && (event.is_gone || event.is_renamed_to) {
            self.directories.clear();
        }
        // The directory itself: that is reported under its name in the directory above, too.
        if is_own || event.name == *"." {
            return Ok(());
        }
        let is_member = self.members.contains(&event.pid);
        if !is_member && self.written.is_empty() {
            return Ok(());
        }
        let Some(directory) = self.directory(&event.directory)? else { return Ok(()) };
        let path = directory.join(&event.name);
        if is_member {
            self.written.add(path, event);
        } else if !event.is_gone {
            self.written.add_other_writer(&path, event.pid);
        }
        Ok(())
    }

    fn directory(&mut self, handle: &DirectoryHandle) -> Result<Option<PathBuf>> {
        if let Some(path) = self.directories.get(handle) {
            return Ok(path.clone());
        }
        let path = self.fanotify.path(handle).map_err(|error| {
            Error::system("find the directory of a change (open_by_handle_at)", Object::None)(error)
                .help("this needs CAP_DAC_READ_SEARCH; `--data DIR` does without")
        })?;
        let path = path.filter(|path| path != Path::new("/proc") && !path.starts_with("/proc/"));
        self.directories.insert(handle.clone(), path.clone());
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Child, Command, Stdio};

    use pagemark_linux::{fanotify, forks};
    use pagemark_testing::{skip, wait_until};

    use super::super::data_tree::Origin;
    use super::super::decode_path;
    use super::*;

    /// A shell that carries out the lines of its input, below a directory of its own.
    struct Shell {
        child: Child,
        directory: tempfile::TempDir,
        lines: u32,
    }

    impl Shell {
        /// None where files cannot be watched.
        fn start() -> Option<(Shell, FileWatch)> {
            if let Some(error) = fanotify::NAMES.refusal().or(forks::RECORDS.refusal()) {
                eprintln!("no watch: {error}");
                return None;
            }
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("old"), b"before the job").unwrap();
            let mut watch = FileWatch::new().unwrap();
            let mut command = Command::new("sh");
            command.stdin(Stdio::piped()).current_dir(directory.path());
            let child = command.spawn().unwrap();
            watch.follow(child.id() as i32).unwrap();
            Some((Shell { child, directory, lines: 0 }, watch))
        }

        fn at(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn carry_out(&mut self, line: &str) {
            use std::io::Write;
            self.lines += 1;
            let done = self.at("done");
            let input = self.child.stdin.as_mut().unwrap();
            writeln!(input, "{line}\necho {} > done", self.lines).unwrap();
            let number = self.lines.to_string();
            wait_until("the line", || fs::read_to_string(&done).is_ok_and(|text| text.trim() == number));
        }

        /// The files and the other paths that the watch lists, but for `done`.
        fn listed(&self, watch: &FileWatch) -> (Vec<String>, Vec<(String, Origin)>) {
            let name = |path: &Path| path.strip_prefix(self.directory.path()).unwrap().to_str().unwrap().to_owned();
            let listed = watch.list(&[], &Users::this_process()).unwrap();
            let is_ours = |path: &Path| path.starts_with(self.directory.path()) && !path.ends_with("done");
            let mut files: Vec<_> =
                listed.files.iter().filter(|file| is_ours(&file.path)).map(|file| name(&file.path)).collect();
            files.sort();
            let trees = listed.trees.iter().map(|tree| (decode_path(&tree.path).unwrap(), tree.origin));
            let mut trees: Vec<_> =
                trees.filter(|(path, _)| is_ours(path)).map(|(path, origin)| (name(&path), origin)).collect();
            trees.sort_by(|a, b| a.0.cmp(&b.0));
            (files, trees)
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn text(list: &[(&str, Origin)]) -> Vec<(String, Origin)> {
        list.iter().map(|(name, origin)| ((*name).to_owned(), *origin)).collect()
    }

    #[test]
    fn closed_files_of_short_processes_are_found_and_those_of_others_are_not() {
        let Some((mut shell, watch)) = Shell::start() else { skip!("files cannot be watched") };
        fs::write(shell.at("foreign"), b"by this test").unwrap();
        assert_eq!(shell.listed(&watch), (vec![], vec![]));
        shell.carry_out("sh -c 'echo new > new; (echo more >> old)'; mkdir made; echo in > made/in; ln -s old link");
        let expected =
            [("link", Origin::Made), ("made", Origin::Made), ("new", Origin::Made), ("old", Origin::Written)];
        assert_eq!(shell.listed(&watch), (vec!["made/in".into(), "new".into(), "old".into()], text(&expected)));
        shell.carry_out("rm new; mv old renamed; : >> foreign; mv made moved; echo 2 > moved/in2");
        let (files, trees) = shell.listed(&watch);
        assert_eq!(files, ["foreign", "moved/in", "moved/in2", "renamed"]);
        let names: Vec<_> = trees.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["foreign", "link", "made", "moved", "new", "old", "renamed"]);
        // What has a name of --data is not listed twice.
        let data = DataTree::new(&shell.at("moved")).unwrap();
        let listed = watch.list(&[data], &Users::this_process()).unwrap();
        assert!(!listed.files.iter().any(|file| file.path.starts_with(shell.at("moved"))), "{:?}", listed.files);
    }

    /// A file system that is mounted; unmounted when dropped. None where that is not permitted.
    struct Mounted(PathBuf);

    impl Mounted {
        fn new(point: PathBuf) -> Option<Mounted> {
            let mut command = Command::new("mount");
            command.args(["-t", "tmpfs", "pagemark-test"]).arg(&point);
            command.output().is_ok_and(|output| output.status.success()).then_some(Mounted(point))
        }

        fn unmount(self) -> Result<(), String> {
            let output = Command::new("umount").arg(&self.0).output().unwrap();
            if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            // It may be unmounted already.
            let _ = Command::new("umount").arg(&self.0).output();
        }
    }

    #[test]
    fn a_file_system_can_be_unmounted_while_it_is_watched_and_is_watched_when_it_is_back() {
        let parent = tempfile::tempdir().unwrap();
        let Some(mounted) = Mounted::new(parent.path().to_owned()) else { skip!("nothing can be mounted") };
        let Some((mut shell, watch)) = Shell::start() else { skip!("files cannot be watched") };
        let there = parent.path().display();
        shell.carry_out(&format!("echo first > {there}/first; echo here > here"));
        let is_listed = |name: &str| {
            let path = parent.path().join(name);
            watch.list(&[], &Users::this_process()).unwrap().files.iter().any(|file| file.path == path)
        };
        assert!(is_listed("first"), "{:?}", watch.list(&[], &Users::this_process()).unwrap().files);
        assert_eq!(mounted.unmount(), Ok(()));
        // It is another one, or the same again.
        let mounted = Mounted::new(parent.path().to_owned()).unwrap();
        let changes = || lock(&watch.state).read();
        changes().unwrap();
        shell.carry_out(&format!("echo second > {there}/second; echo here too > here-too"));
        assert!(is_listed("second"), "{:?}", watch.list(&[], &Users::this_process()).unwrap().files);
        let (files, _) = shell.listed(&watch);
        assert_eq!(files, ["here", "here-too"]);
        assert_eq!(mounted.unmount(), Ok(()));
    }

    #[test]
    fn a_file_that_another_process_writes_too_is_reported_and_marked() {
        let Some((mut shell, watch)) = Shell::start() else { skip!("files cannot be watched") };
        shell.carry_out("echo line >> log; echo mine > mine");
        assert_eq!(watch.take_notices(), Vec::<String>::new());
        let log = shell.at("log");
        let status = Command::new("sh").arg("-c").arg(format!("echo other >> {}", log.display())).status().unwrap();
        assert!(status.success());
        let listed = watch.list(&[], &Users::this_process()).unwrap();
        let of = |path: &Path| listed.files.iter().find(|file| file.path == path).unwrap().has_other_writer;
        assert_eq!((of(&log), of(&shell.at("mine"))), (true, false));
        let notices = watch.take_notices();
        assert!(notices.len() == 1 && notices[0].contains(&*log.to_string_lossy()), "{notices:?}");
        assert_eq!(watch.take_notices(), Vec::<String>::new());
    }

    #[test]
    fn after_an_overflow_the_directories_are_searched() {
        let Some((mut shell, watch)) = Shell::start() else { skip!("files cannot be watched") };
        shell.carry_out("echo first > first");
        // Held, the thread reads nothing, and the queue of the kernel becomes full.
        let limit = proc::system::setting("fs/fanotify/max_queued_events");
        let limit: u32 = limit.and_then(|text| text.parse().ok()).unwrap_or(16384);
        let overflow = |shell: &mut Shell| {
            let _held = lock(&watch.state);
            shell.carry_out(&format!("i=0; while [ $i -le {limit} ]; do i=$((i+1)); : > f$i; done; echo last > last"));
        };
        overflow(&mut shell);
        let (files, _) = shell.listed(&watch);
        assert!(files.contains(&"first".to_owned()) && files.contains(&"last".to_owned()), "{} files", files.len());
        assert!(files.len() > limit as usize, "{} files", files.len());
        let notices = watch.take_notices();
        assert!(notices.iter().any(|notice| notice.contains("max_queued_events")), "{notices:?}");
        // That nothing was missed is reported once.
        for expected in [1, 0] {
            overflow(&mut shell);
            shell.listed(&watch);
            let notices = watch.take_notices();
            let count = notices.iter().filter(|notice| notice.contains("; 0 more files")).count();
            assert_eq!((count, notices.len()), (expected, expected), "{notices:?}");
        }
    }
}
