//! A hostile user who swaps files for others while root works, and root's things that he is after.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::{self, Permissions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, mkfifo, setfsgid, setfsuid};
use pagemark_testing::SplitMix;

/// What root's files contain, and no file of the user's.
const SECRET: &[u8] = b"this is root's alone";

/// The names below the user's directory that also exist below root's directories, so that a path
/// leads to something there, too.
const NAMES: [&str; 3] = ["log", "a/log", "a/b/log"];

/// The name of asides, which root may be led to remove.
pub const ASIDES: &str = "box@1-20260101T000000";

/// An inode, by device and number.
type Inode = (u64, u64);

/// Things of root's that a user may want to read, to change, or to have.
pub struct Roots {
    directory: PathBuf,
    /// The socket is a live one.
    _listener: UnixListener,
    before: BTreeMap<PathBuf, String>,
}

impl Roots {
    /// Makes them in a new directory, which every user can enter.
    pub fn make(directory: &Path) -> Roots {
        let at = |name: &str| directory.join(name);
        for (name, mode) in [("open", 0o755), ("private", 0o700)] {
            fs::create_dir_all(at(name).join("a/b")).expect("a directory");
            fs::create_dir(at(name).join("root")).expect("a directory");
            fs::create_dir(at(name).join("a").join(ASIDES)).expect("a directory");
            for file in NAMES {
                let file = at(name).join(file);
                fs::write(&file, SECRET).expect("a file");
                fs::set_permissions(&file, Permissions::from_mode(mode & 0o644)).expect("its mode");
            }
            fs::set_permissions(at(name), Permissions::from_mode(mode)).expect("its mode");
        }
        fs::copy("/bin/true", at("program")).expect("a program");
        mkfifo(&at("fifo"), Mode::from_bits_truncate(0o600)).expect("a FIFO");
        let listener = UnixListener::bind(at("socket")).expect("a socket");
        fs::set_permissions(directory, Permissions::from_mode(0o755)).expect("its mode");
        let before = state(directory);
        Roots { directory: directory.to_owned(), _listener: listener, before }
    }

    /// What has changed, a line each.
    pub fn changes(&self) -> Vec<String> {
        let after = state(&self.directory);
        let paths: BTreeSet<&PathBuf> = self.before.keys().chain(after.keys()).collect();
        let changed = paths.into_iter().filter(|&path| self.before.get(path) != after.get(path));
        changed
            .map(|path| format!("{}: {:?}, before {:?}", path.display(), after.get(path), self.before.get(path)))
            .collect()
    }

    fn inodes(&self) -> BTreeSet<Inode> {
        self.before.keys().filter_map(|path| fs::symlink_metadata(path).ok()).map(|found| inode(&found)).collect()
    }

    /// What of root's processes have open, mapped, mounted, or as a directory, a line each.
    pub fn reached_by(&self, pids: &[i32]) -> Vec<String> {
        let inodes = self.inodes();
        let mut reached = Vec::new();
        for &pid in pids {
            let process = PathBuf::from(format!("/proc/{pid}"));
            let mut paths: Vec<PathBuf> = ["cwd", "root", "exe"].map(|name| process.join(name)).into();
            for directory in ["fd", "map_files"] {
                let entries = fs::read_dir(process.join(directory)).into_iter().flatten().flatten();
                paths.extend(entries.map(|entry| entry.path()));
            }
            let mounts = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
            let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
            paths.extend(points.map(|point| process.join("root").join(point.trim_start_matches('/'))));
            let is_roots = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| inodes.contains(&inode(&found)));
            reached.extend(paths.into_iter().filter(is_roots).map(|path| path.display().to_string()));
        }
        reached
    }
}

fn inode(found: &fs::Metadata) -> Inode {
    (found.dev(), found.ino())
}

/// What is below a directory, itself included, with all that a change would show.
fn state(directory: &Path) -> BTreeMap<PathBuf, String> {
    let describe = |path: PathBuf| {
        let found = fs::symlink_metadata(&path).expect("it is there");
        let content = if found.is_file() { fs::read(&path).expect("root reads it") } else { Vec::new() };
        let times = (found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec());
        let rights = (found.mode(), found.uid(), found.gid(), found.nlink());
        let kept = if content == SECRET { "root's content" } else { "another content" };
        (path, format!("{:?} {rights:?} {times:?} {} {kept}", inode(&found), content.len()))
    };
    let mut paths = below(directory);
    paths.push(directory.to_owned());
    paths.into_iter().map(describe).collect()
}

/// All paths below a directory; links are not followed.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut next = vec![directory.to_owned()];
    while let Some(directory) = next.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                next.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found
}

/// The directory of a user who attacks.
pub struct UsersDirectory {
    path: PathBuf,
    traps: PathBuf,
    user: u32,
    /// What is there when the attack begins, with what must not change without the user.
    before: BTreeMap<PathBuf, (Inode, u32)>,
    /// The inodes of root's there.
    of_root: BTreeSet<Inode>,
}

impl UsersDirectory {
    /// The directory `path`, in which a program of `user` has run. Makes the traps in the new
    /// directory `traps` beside it.
    pub fn new(path: &Path, traps: &Path, user: u32, roots: &Roots) -> UsersDirectory {
        let give = |path: &Path| lchown(path, Some(user), Some(user)).expect("root gives it away");
        fs::create_dir(traps).expect("a directory");
        give(traps);
        for name in ["open", "private", "private/log", "private/a/b", "open/log", "program", "fifo", "socket"] {
            let link = traps.join(name.replace('/', "-"));
            symlink(roots.directory.join(name), &link).expect("a link");
            give(&link);
        }
        for (name, target) in [("above", ".."), ("far", "../../.."), ("slash", "/")] {
            symlink(target, traps.join(name)).expect("a link");
            give(&traps.join(name));
        }
        let directory = traps.join("directory");
        fs::create_dir_all(directory.join("a/b")).expect("a directory");
        ["", "a", "a/b"].iter().for_each(|name| give(&directory.join(name)));
        fs::write(traps.join("file"), "the user's").expect("a file");
        mkfifo(&traps.join("pipe"), Mode::from_bits_truncate(0o666)).expect("a FIFO");
        for name in ["file", "pipe"] {
            chown(traps.join(name), Some(user), Some(user)).expect("root gives it away");
        }
        let before: BTreeMap<_, _> = below(path).into_iter().filter_map(described).collect();
        let of_root = before.values().filter(|(_, owner)| *owner == 0).map(|(inode, _)| *inode).collect();
        UsersDirectory { path: path.to_owned(), traps: traps.to_owned(), user, before, of_root }
    }

    /// The harm that root has done there, a line each.
    pub fn harm(&self) -> Vec<String> {
        let mut harm = self.leaks();
        for path in self.all() {
            let Ok(found) = fs::symlink_metadata(&path) else { continue };
            if found.uid() == 0 && !self.of_root.contains(&inode(&found)) {
                harm.push(format!("{} is root's, with mode {:o}", path.display(), found.mode()));
            }
        }
        harm
    }

    /// The harm where root may make files of its own there.
    pub fn leaks(&self) -> Vec<String> {
        let is_leak = |path: &PathBuf| {
            let is_file = fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
            is_file && fs::read(path).is_ok_and(|content| holds_secret(&content))
        };
        let leaks = self.all().filter(is_leak);
        leaks.map(|path| format!("{} has the content of root's file", path.display())).collect()
    }

    fn all(&self) -> impl Iterator<Item = PathBuf> {
        below(&self.path).into_iter().chain(below(&self.traps))
    }

    /// Whether everything has its place again. Otherwise nothing more can be learned of it.
    pub fn is_whole(&self) -> bool {
        let is_there = |(path, before): (&PathBuf, &(Inode, u32))| {
            let Some((_, (_, owner))) = described(path.clone()) else { return false };
            let kind = |path: &Path| fs::symlink_metadata(path).map(|found| found.file_type());
            owner == before.1 && kind(path).is_ok_and(|kind| !kind.is_symlink())
        };
        self.before.iter().all(is_there)
    }

    /// Begins an attack.
    pub fn attack(&self, seed: u64) -> Attack {
        let stop = Arc::new(AtomicBool::new(false));
        let (path, traps, user) = (self.path.clone(), self.traps.clone(), self.user);
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || swap_until(&stop, &path, &traps, user, SplitMix(seed))
        });
        Attack { stop, thread: Some(thread) }
    }
}

fn described(path: PathBuf) -> Option<(PathBuf, (Inode, u32))> {
    let found = fs::symlink_metadata(&path).ok()?;
    // A socket is bound anew.
    let is_lasting = !found.file_type().is_socket();
    is_lasting.then(|| (path, (inode(&found), found.uid())))
}

fn holds_secret(content: &[u8]) -> bool {
    content.windows(SECRET.len()).any(|window| window == SECRET)
}

/// An attack that goes on until it is ended.
pub struct Attack {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Attack {
    /// Ends it, with each file in its place, and returns the number of swaps.
    pub fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("it is ended once").join().expect("the attacker does not panic")
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// How the attacker chooses his moments.
#[derive(Clone, Copy)]
enum Manner {
    /// Any file, for any time.
    AtRandom,
    /// One file, as fast as possible.
    Fast,
    /// When a file is opened, made or moved: this file, or a directory above it.
    OnEvents,
}

/// Swaps files until it ends. Each is in its place then, where root has moved none.
fn swap_until(stop: &AtomicBool, path: &Path, traps: &Path, user: u32, mut random: SplitMix) -> u64 {
    // Of this thread alone; it loses root's rights for files, too.
    setfsgid(Gid::from_raw(user));
    setfsuid(Uid::from_raw(user));
    let traps: Vec<PathBuf> = fs::read_dir(traps).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let manner = [Manner::AtRandom, Manner::Fast, Manner::OnEvents][random.below(3) as usize];
    // A restore that meets fewer swaps goes further.
    let pause = Duration::from_millis([0, 5, 50][random.below(3) as usize]);
    let events = Events::of(path);
    let mut pick = |from: &[PathBuf]| from.get(random.below(from.len().max(1) as u64) as usize).cloned();
    let (fixed, fixed_trap) = (pick(&below(path)), pick(&traps));
    let mut swaps = 0;
    while !stop.load(Ordering::Relaxed) {
        let chosen = match manner {
            Manner::AtRandom => pick(&below(path)).zip(pick(&traps)),
            Manner::Fast => fixed.clone().zip(fixed_trap.clone()),
            Manner::OnEvents => events.next().and_then(|found| {
                let above: Vec<PathBuf> =
                    found.ancestors().take_while(|above| *above != path).map(Path::to_owned).collect();
                pick(&above).zip(pick(&traps))
            }),
        };
        let Some((file, trap)) = chosen else { continue };
        if !exchange(&file, &trap) {
            continue;
        }
        swaps += 1;
        let end = Instant::now() + Duration::from_micros(swaps * 37 % 3000);
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        exchange(&file, &trap);
        let end = Instant::now() + pause;
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    swaps
}

fn exchange(one: &Path, other: &Path) -> bool {
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE).is_ok()
}

/// What inotify reports of a directory and of those below it.
struct Events {
    inotify: Option<OwnedFd>,
    /// The directories, by the numbers of their watches.
    directories: BTreeMap<i32, PathBuf>,
}

impl Events {
    fn of(path: &Path) -> Events {
        // SAFETY: the call takes no memory.
        let descriptor = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
        // SAFETY: the descriptor is new, and belongs to nothing else.
        let inotify = (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) });
        let mut directories = BTreeMap::new();
        let all = below(path).into_iter().chain([path.to_owned()]).filter(|path| path.is_dir());
        for directory in all {
            let name = CString::new(directory.as_os_str().as_bytes()).expect("paths have no zeros");
            let mask = libc::IN_OPEN | libc::IN_CREATE | libc::IN_MOVED_TO | libc::IN_ATTRIB | libc::IN_DELETE;
            // SAFETY: the name ends with a zero, and the kernel only reads it.
            let watch = unsafe { libc::inotify_add_watch(descriptor, name.as_ptr(), mask) };
            directories.insert(watch, directory);
        }
        Events { inotify, directories }
    }

    /// The path of the next event. None if there is none yet.
    fn next(&self) -> Option<PathBuf> {
        let mut buffer = [0_u8; 4096];
        // SAFETY: the kernel writes at most as many bytes as the buffer has.
        let read = unsafe { libc::read(self.inotify.as_ref()?.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        let events = &buffer[..usize::try_from(read).ok()?];
        let number = |at: usize| events.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes);
        // The attacker sees his own exchanges, too.
        let directory = self.directories.get(&number(0)?)?;
        let name = events.get(16..16 + number(12)? as usize)?;
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Some(directory.join(std::ffi::OsStr::from_bytes(&name[..length])))
    }
}
