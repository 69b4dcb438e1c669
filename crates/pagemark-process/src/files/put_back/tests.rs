use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use pagemark::{Blob, ByteCount, ContentId, MemoryStore, PageNumber, PageTree};
use pagemark_testing::assert_oracle;

use super::super::asides::{self, RestoreState};
use super::super::encode_path;
use super::*;

/// A record of `content` at `path`, owned by whoever runs the test.
fn record(path: &Path, content: &[u8], store: &mut MemoryStore) -> FileRecord {
    FileRecord {
        path: encode_path(path),
        content: Blob::write(store, &mut &*content).unwrap(),
        mode: 0o640,
        uid: nix::unistd::geteuid().as_raw(),
        gid: nix::unistd::getegid().as_raw(),
        modified_unix_ns: 1_234_567_890_123_456_789,
        is_shared: false,
    }
}

/// A directory of files, and one for asides.
struct Directories {
    directory: tempfile::TempDir,
    asides: tempfile::TempDir,
}

impl Directories {
    fn new() -> Directories {
        Directories { directory: tempfile::tempdir().unwrap(), asides: tempfile::tempdir().unwrap() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn change(&self, records: &[FileRecord], store: &MemoryStore) -> Result<ChangedFiles> {
        put_back(records, &[], store, "job@7", self.asides.path())
    }

    fn put_back(&self, records: &[FileRecord], store: &MemoryStore) -> Vec<PutBack> {
        self.change(records, store).unwrap().keep().unwrap()
    }

    /// Every name below the directory of files, with content or target and the attributes.
    fn state(&self) -> Vec<String> {
        let mut state = Vec::new();
        let mut directories = vec![self.directory.path().to_path_buf()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let metadata = fs::symlink_metadata(&path).unwrap();
                let content = match metadata.file_type() {
                    kind if kind.is_file() => format!("{:?}", fs::read(&path).unwrap()),
                    kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path).unwrap()),
                    _ => {
                        directories.push(path.clone());
                        String::new()
                    }
                };
                let time = if metadata.is_file() { metadata.modified().ok() } else { None };
                state.push(format!("{path:?} {} {:o} {time:?} {content}", metadata.ino(), metadata.mode()));
            }
        }
        state.sort();
        state
    }

    fn asides(&self) -> Vec<RestoreState> {
        asides::list(self.asides.path()).unwrap().iter().map(|found| found.state).collect()
    }
}

#[test]
fn a_file_is_put_back_in_place_and_its_present_content_is_kept() {
    let place = Directories::new();
    let path = place.at("file");
    let mut store = MemoryStore::new();
    fs::write(&path, b"").unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    for content in [&b"first"[..], b"second"] {
        fs::write(&path, content).unwrap();
        let then = record(&path, b"then", &mut store);
        let done = place.put_back(&[then], &store);
        let aside = done[0].set_aside.clone().unwrap();
        assert!(aside.starts_with(place.asides.path()) && aside.ends_with("1-file"), "{aside:?}");
        assert_eq!((done[0].action, fs::read(aside).unwrap()), (FileAction::Rewritten, content.to_vec()));
        assert_eq!(fs::read(&path).unwrap(), b"then");
    }
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!(
        (metadata.ino(), metadata.mode() & 0o7777, metadata.mtime(), metadata.mtime_nsec()),
        (inode, 0o640, 1_234_567_890, 123_456_789)
    );
    assert_eq!(place.state().len(), 1, "nothing else is in the directory");
    assert_eq!(place.asides(), [RestoreState::Complete; 2]);

    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let then = [record(&path, b"then", &mut store)];
    assert_eq!(place.put_back(&then, &store)[0].action, FileAction::Permissions);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    assert_eq!(place.put_back(&then, &store)[0].action, FileAction::Untouched);
}

#[test]
fn asides_are_made_on_another_file_system() {
    let place =
        Directories { directory: tempfile::tempdir_in("/dev/shm").unwrap(), asides: tempfile::tempdir().unwrap() };
    let mut store = MemoryStore::new();
    fs::write(place.at("shared"), [3; 10_000]).unwrap();
    let then = record(&place.at("shared"), &[4; 20_000], &mut store);
    let done = place.put_back(&[then], &store);
    assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), [3; 10_000]);
    assert_eq!((place.state().len(), fs::read(place.at("shared")).unwrap().len()), (1, 20_000));
}

#[test]
fn missing_directories_come_back() {
    let place = Directories::new();
    let mut store = MemoryStore::new();
    let paths = [place.at("a/b/file"), place.at("a/b/c/file")];
    let then = paths.each_ref().map(|path| record(path, &[7; 10_000], &mut store));
    let done = place.put_back(&then, &store);
    assert!(done.iter().all(|done| (done.action, &done.set_aside) == (FileAction::Recreated, &None)));
    assert!(paths.iter().all(|path| fs::read(path).unwrap() == [7; 10_000]));
}

#[test]
fn a_file_with_further_names_keeps_them() {
    let place = Directories::new();
    let (path, second) = (place.at("file"), place.at("second"));
    fs::write(&path, [9; 9000]).unwrap();
    fs::hard_link(&path, &second).unwrap();
    let mut store = MemoryStore::new();
    let mut content = vec![0; 20_000];
    content[15_000] = 1;
    let then = record(&path, &content, &mut store);
    let done = place.put_back(&[then], &store);
    assert_eq!(done[0].action, FileAction::Rewritten);
    assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), [9; 9000]);
    assert!(fs::read(&path).unwrap() == content && fs::read(&second).unwrap() == content);
    assert_eq!(fs::metadata(&path).unwrap().nlink(), 2);
}

#[test]
fn a_mount_point_is_rewritten() {
    let place = Directories::new();
    let (path, below) = (place.at("file"), place.at("below"));
    fs::write(&path, b"covered").unwrap();
    fs::write(&below, b"now").unwrap();
    let _mounted = match bind_for_this_thread(&below, &path) {
        Ok(mounted) => mounted,
        Err(error) => pagemark_testing::skip!("mount in a namespace of its own: {error}"),
    };
    let mut store = MemoryStore::new();
    let then = record(&path, b"then", &mut store);
    let done = place.put_back(&[then], &store);
    assert_eq!(done[0].action, FileAction::Rewritten);
    assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), b"now");
    assert_eq!(fs::read(&below).unwrap(), b"then");
}

/// What the running thread alone has mounted. Unmounted when it is dropped, so that its directory
/// can be removed.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Mounts one file over another, for the running thread alone.
fn bind_for_this_thread(from: &Path, to: &Path) -> io::Result<Mounted> {
    use std::ffi::CString;
    let mounted = Mounted(to.to_owned());
    let [from, to] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
    let none = std::ptr::null();
    // SAFETY: the strings end with a zero and live longer than the calls; `none` stands for what is not
    // used.
    let failed = unsafe {
        libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) != 0
            || libc::mount(none, c"/".as_ptr(), none, libc::MS_PRIVATE | libc::MS_REC, none.cast()) != 0
            || libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast()) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(mounted) }
}

#[test]
fn what_is_no_file_any_more_is_in_the_way_and_left_alone() {
    let place = Directories::new();
    let mut store = MemoryStore::new();
    fs::write(place.at("secret"), b"secret").unwrap();
    fs::write(place.at("file"), b"now").unwrap();
    symlink(place.at("secret"), place.at("link")).unwrap();
    fs::create_dir(place.at("folder")).unwrap();
    fs::create_dir(place.at("elsewhere")).unwrap();
    symlink("elsewhere", place.at("way")).unwrap();
    let before = place.state();
    for (wanted, in_the_way) in [("link", "link"), ("folder", "folder"), ("way/file", "way"), ("file/below", "file")] {
        let records = [("file2", "new"), (wanted, "then")];
        let records = records.map(|(name, content)| record(&place.at(name), content.as_bytes(), &mut store));
        let error = place.change(&records, &store).unwrap_err();
        assert_eq!(
            (error.kind(), error.object()),
            (ErrorKind::BadPath, &Object::File(place.at(in_the_way))),
            "{error}"
        );
        assert_eq!((place.state(), place.asides()), (before.clone(), vec![]));
    }
}

#[test]
fn a_file_that_another_process_writes_is_left_alone_unless_it_is_a_shared_output() {
    let place = Directories::new();
    let path = place.at("log");
    let mut store = MemoryStore::new();
    fs::write(&path, b"now").unwrap();
    let log = OpenOptions::new().append(true).open(&path).unwrap();
    let mut writer = Command::new("sleep").arg("60").stdout(log).spawn().unwrap();
    let then = record(&path, b"then", &mut store);
    let before = place.state();
    let error = place.change(std::slice::from_ref(&then), &store).unwrap_err();
    assert_eq!((error.kind(), error.object()), (ErrorKind::FileInUse, &Object::File(path.clone())));
    assert!(error.to_string().contains(&format!("process {} (sleep)", writer.id())), "{error}");
    assert_eq!(place.state(), before);

    let shared = FileRecord { is_shared: true, ..then };
    assert_eq!(place.put_back(std::slice::from_ref(&shared), &store)[0].action, FileAction::Untouched);
    assert_eq!(place.state(), before);
    writer.kill().unwrap();
    writer.wait().unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(place.put_back(&[shared], &store)[0].action, FileAction::Recreated);
    assert_eq!(fs::read(path).unwrap(), b"then");
}

/// Files of every kind of change: the records, and the place with them.
fn one_of_each(store: &mut MemoryStore) -> (Directories, Vec<FileRecord>) {
    let place = Directories::new();
    fs::write(place.at("same"), b"same").unwrap();
    fs::write(place.at("mode"), b"mode").unwrap();
    fs::write(place.at("short"), b"now").unwrap();
    let mut sparse = File::create(place.at("sparse")).unwrap();
    sparse.write_all(&[1; 50_000]).unwrap();
    sparse.set_len(1 << 20).unwrap();
    let contents: [(&str, &[u8]); 6] = [
        ("same", b"same"),
        ("mode", b"mode"),
        ("new/directory/file", b"new"),
        ("short", &[2; 30_000]),
        ("sparse", b"then"),
        ("new/other", b"other"),
    ];
    let records = contents.map(|(name, content)| record(&place.at(name), content, store));
    fs::set_permissions(place.at("same"), Permissions::from_mode(0o640)).unwrap();
    (place, records.to_vec())
}

#[test]
fn changes_are_undone_exactly() {
    let mut store = MemoryStore::new();
    let (place, records) = one_of_each(&mut store);
    let before = place.state();
    let changed = place.change(&records, &store).unwrap();
    let kinds: Vec<_> = changed.files().iter().map(|file| file.action).collect();
    use FileAction::{Permissions, Recreated, Rewritten, Untouched};
    assert_eq!(kinds, [Untouched, Permissions, Recreated, Rewritten, Rewritten, Recreated]);
    assert_ne!(place.state(), before);
    assert_eq!(place.asides(), [RestoreState::InProgress]);
    changed.undo().unwrap();
    assert_eq!((place.state(), place.asides()), (before, vec![]));
}

/// Names the directory of a test for the process that it starts to be killed.
const KILLED: &str = "PAGEMARK_TEST_PUT_BACK";

const FILES: u8 = 6;

/// The content that a file is given by turns.
fn content(file: u8, turn: u8) -> Vec<u8> {
    vec![10 * turn + file; 100_000 + usize::from(turn) * 50_000]
}

/// The process that is killed: puts files back again and again.
#[test]
fn puts_files_back_until_it_is_killed() {
    let Some(directory) = std::env::var_os(KILLED).map(PathBuf::from) else { return };
    let mut store = MemoryStore::new();
    let path = |file| directory.join(format!("files/{file}"));
    let turns = [1, 2].map(|turn| -> Vec<_> {
        (0..FILES).map(|file| record(&path(file), &content(file, turn), &mut store)).collect()
    });
    fs::write(directory.join("ready"), b"").unwrap();
    for turn in turns.iter().cycle() {
        put_back(turn, &[], &store, "job@7", &directory.join("asides")).unwrap().keep().unwrap();
    }
}

#[test]
fn killed_at_any_instant_the_present_content_is_recoverable() {
    const TRIALS: u64 = 40;
    let mut interrupted = 0;
    for trial in 0.. {
        if trial >= TRIALS && interrupted > 0 {
            break;
        }
        assert!(trial < 5 * TRIALS, "no process was killed while it changed files");
        // On a slow disk, the copies of the first turn alone can take longer than the first trials.
        let delay_ms = trial * 9 + trial.saturating_sub(TRIALS) * 100;
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("files")).unwrap();
        (0..FILES).for_each(|file| fs::write(at(&format!("files/{file}")), content(file, 0)).unwrap());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "files::put_back::tests::puts_files_back_until_it_is_killed", "--nocapture"])
            .env(KILLED, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        pagemark_testing::wait_until("the process is ready", || at("ready").exists());
        std::thread::sleep(Duration::from_millis(delay_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = asides::list(&at("asides")).unwrap();
        let last: Vec<_> = found.iter().filter(|found| found.state == RestoreState::Interrupted).collect();
        assert!(last.len() <= 1 && found.iter().all(|found| found.state != RestoreState::InProgress));
        interrupted += last.len();
        for file in 0..FILES {
            let path = at(&format!("files/{file}"));
            let is_whole = |held: &[u8]| (0..3).any(|turn| held == content(file, turn));
            let aside = last.first().and_then(|found| Some((&found.path, found.aside.as_ref()?)));
            let copy = aside.and_then(|(directory, aside)| {
                let described = aside.files.iter().find(|described| described.path == encode_path(&path))?;
                Some(fs::read(directory.join(described.copy.as_ref()?)).unwrap())
            });
            // The description says where the content is that the file had before.
            assert_oracle!(
                copy.as_ref().is_none_or(|copy| is_whole(copy)),
                "trial {trial}, file {file}: the copy has other content"
            );
            assert_oracle!(
                copy.is_some() || is_whole(&fs::read(&path).unwrap()),
                "trial {trial}, file {file}: other content, and no copy"
            );
        }
    }
}

#[test]
fn hostile_records_are_refused() {
    let (place, mut store) = (Directories::new(), MemoryStore::new());
    let good = record(Path::new("/tmp/x"), b"then", &mut store);
    for path in
        ["", "x", "/", "/tmp/", "/tmp/../x", "/tmp/./x", "//tmp/x", r"/tmp/\x00", r"/tmp/\q", "/proc/1/mem", "/dev/vda"]
    {
        let bad = FileRecord { path: path.into(), ..good.clone() };
        let error = place.change(&[bad], &store).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadPath, "{path}: {error}");
    }
    let twice = place.change(&[good.clone(), good.clone()], &store).unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::BadPath, "{twice}");
    let huge = FileRecord { content: Blob { bytes: ByteCount::MAX, ..good.content }, ..good };
    assert_eq!(place.change(&[huge], &store).unwrap_err().kind(), ErrorKind::BadPath);
}

#[test]
fn content_that_cannot_be_read_touches_nothing() {
    let mut store = MemoryStore::new();
    let (place, mut records) = one_of_each(&mut store);
    let before = place.state();
    let mut tree = PageTree::new();
    tree.set(PageNumber::MIN, ContentId([7; 16]));
    let content = Blob { bytes: ByteCount::new(4), root: tree.save(&mut store).unwrap() };
    for name in ["short", "another"] {
        records.push(FileRecord { content, ..record(&place.at(name), b"then", &mut store) });
        if name == "short" {
            records.remove(3);
        }
        let error = place.change(&records, &store).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Store, "{error}");
        assert_eq!((place.state(), place.asides()), (before.clone(), vec![]));
        records.pop();
    }
}

#[test]
fn a_full_file_system_is_noticed_before_a_file_is_changed() {
    let place = Directories::new();
    let _mounted = match mount_small_for_this_thread(place.directory.path()) {
        Ok(mounted) => mounted,
        Err(error) => pagemark_testing::skip!("mount in a namespace of its own: {error}"),
    };
    let mut store = MemoryStore::new();
    fs::write(place.at("first"), b"now").unwrap();
    let random: Vec<u8> = (0..2 << 20).map(|byte: u32| (byte / 4096) as u8 | 1).collect();
    let records = [record(&place.at("first"), b"then", &mut store), record(&place.at("large"), &random, &mut store)];
    let before = place.state();
    let error = place.change(&records, &store).unwrap_err();
    assert_eq!((error.kind(), error.object()), (ErrorKind::NoSpace, &Object::File(place.at("large"))));
    assert_eq!((place.state(), place.asides()), (before.clone(), vec![]));

    // Asides that do not fit: the same.
    let place = Directories::new();
    let _mounted = mount_small_for_this_thread(place.asides.path()).unwrap();
    fs::write(place.at("first"), b"now").unwrap();
    fs::write(place.at("large"), &random).unwrap();
    let records = ["first", "large"].map(|name| record(&place.at(name), b"then", &mut store));
    let before = place.state();
    let error = place.change(&records, &store).unwrap_err();
    assert!(error.to_string().contains("no file was changed"), "{error}");
    assert_eq!((place.state(), place.asides()), (before, vec![]));
}

/// Mounts a file system of 1 MiB, for the running thread alone.
fn mount_small_for_this_thread(at: &Path) -> io::Result<Mounted> {
    use std::ffi::CString;
    let mounted = Mounted(at.to_owned());
    let at = CString::new(at.as_os_str().as_bytes()).unwrap();
    let none = std::ptr::null();
    // SAFETY: the strings end with a zero and live longer than the calls; `none` stands for what is not
    // used.
    let failed = unsafe {
        libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) != 0
            || libc::mount(none, c"/".as_ptr(), none, libc::MS_PRIVATE | libc::MS_REC, none.cast()) != 0
            || libc::mount(c"none".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=1m,mode=700".as_ptr().cast())
                != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(mounted) }
}
