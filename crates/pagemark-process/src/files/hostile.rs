//! Tests: what a hostile user of a job can make root do, by swapping files while root works.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use pagemark::repository::FileRecord;
use pagemark::{Blob, MemoryStore};
use pagemark_trace::error::{ErrorKind, Result};
use pagemark_trace::identity::Identity;

use super::asides;
use super::data_tree::{DirectoryRecord, TreeRecord, list_tree};
use super::encode_path;
use super::put_back::{ChangedFiles, FileAction, put_back_for};
use super::users::Users;
use super::written::WrittenPaths;

const NOBODY: u32 = 65534;

fn nobody() -> Identity {
    Identity { uid: NOBODY, gid: NOBODY, groups: vec![] }
}

/// A directory of the hostile user, one of root's, and one for asides.
struct Place {
    directory: tempfile::TempDir,
    store: MemoryStore,
}

impl Place {
    /// None if this process is not root.
    fn new() -> Option<Place> {
        if !nix::unistd::geteuid().is_root() {
            pagemark_testing::skipped("acting for another user needs root");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let place = Place { directory, store: MemoryStore::new() };
        fs::set_permissions(place.directory.path(), Permissions::from_mode(0o755)).unwrap();
        for (name, owner, mode) in [("user", NOBODY, 0o755), ("root", 0, 0o755), ("asides", 0, 0o700)] {
            fs::create_dir(place.at(name)).unwrap();
            chown(place.at(name), Some(owner), Some(owner)).unwrap();
            fs::set_permissions(place.at(name), Permissions::from_mode(mode)).unwrap();
        }
        place.write("root/victim", b"root's own", 0, 0o644);
        Some(place)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, content: &[u8], owner: u32, mode: u32) {
        fs::write(self.at(name), content).unwrap();
        chown(self.at(name), Some(owner), Some(owner)).unwrap();
        fs::set_permissions(self.at(name), Permissions::from_mode(mode)).unwrap();
    }

    fn make_directory(&self, name: &str, owner: u32, mode: u32) {
        fs::create_dir(self.at(name)).unwrap();
        chown(self.at(name), Some(owner), Some(owner)).unwrap();
        fs::set_permissions(self.at(name), Permissions::from_mode(mode)).unwrap();
    }

    fn record(&mut self, name: &str, content: &[u8], owner: u32, mode: u32) -> FileRecord {
        FileRecord {
            path: encode_path(&self.at(name)),
            content: Blob::write(&mut self.store, &mut &*content).unwrap(),
            mode,
            uid: owner,
            gid: owner,
            modified_unix_ns: 1_000_000_000,
            is_shared: false,
        }
    }

    fn put_back(&self, users: &Users, files: &[FileRecord], trees: &[TreeRecord]) -> Result<ChangedFiles> {
        put_back_for(users, files, trees, &self.store, "job@1", &self.at("asides"))
    }

    /// Owner, mode and content of root's files.
    fn roots(&self) -> (u32, u32, Vec<u8>, usize) {
        let victim = fs::metadata(self.at("root/victim")).unwrap();
        let content = fs::read(self.at("root/victim")).unwrap();
        (victim.uid(), victim.mode() & 0o7777, content, fs::read_dir(self.at("root")).unwrap().count())
    }

    /// Calls `work` while the hostile user exchanges two names again and again.
    fn while_swapped<T>(&self, one: &str, other: &str, work: impl FnOnce(&AtomicU64) -> T) -> T {
        let (one, other, is_done, swaps) = (self.at(one), self.at(other), AtomicBool::new(false), AtomicU64::new(0));
        let swap = || {
            while !is_done.load(Ordering::Relaxed) {
                if renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE).is_ok() {
                    swaps.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            let attacker = scope.spawn(|| nobody().run(swap).unwrap());
            let result = work(&swaps);
            is_done.store(true, Ordering::Relaxed);
            attacker.join().unwrap();
            result
        })
    }
}

fn hostile() -> Users {
    Users::of_identity(nobody())
}

fn directory(path: &Path, mode: u32) -> DirectoryRecord {
    DirectoryRecord { path: encode_path(path), mode, uid: NOBODY, gid: NOBODY }
}

#[test]
fn root_s_content_is_not_put_into_a_file_that_a_user_has_put_in_its_place() {
    let Some(mut place) = Place::new() else { return };
    let record = place.record("user/private", b"root's own", 0, 0o600);
    place.write("user/private", b"planted", NOBODY, 0o644);
    let error = place.put_back(&Users::this_process(), std::slice::from_ref(&record), &[]).unwrap_err().to_string();
    assert!(error.contains("is one of user 65534 now"), "{error}");
    assert_eq!(fs::read(place.at("user/private")).unwrap(), b"planted");
    assert_eq!(fs::metadata(place.at("user/private")).unwrap().uid(), NOBODY);
    // Where it is gone, a new one is made.
    fs::remove_file(place.at("user/private")).unwrap();
    place.put_back(&Users::this_process(), &[record], &[]).unwrap().keep().unwrap();
    let made = fs::metadata(place.at("user/private")).unwrap();
    assert_eq!((made.uid(), made.mode() & 0o7777), (0, 0o600));
}

#[test]
fn a_directory_that_is_swapped_for_a_link_gives_root_s_file_no_mode() {
    let Some(place) = Place::new() else { return };
    let before = place.roots();
    place.make_directory("user/tree", NOBODY, 0o755);
    place.make_directory("user/tree/d", NOBODY, 0o700);
    symlink(place.at("root/victim"), place.at("user/l")).unwrap();
    chown(place.at("user"), Some(NOBODY), None).unwrap();
    let root = place.at("user/tree");
    let tree = |mode| TreeRecord {
        path: encode_path(&root),
        directories: vec![directory(&root, 0o755), directory(&root.join("d"), mode)],
        ..TreeRecord::default()
    };
    let done = place.while_swapped("user/tree/d", "user/l", |swaps| {
        let mut done = 0;
        for round in 0_u64.. {
            let changed = place.put_back(&hostile(), &[], &[tree(if round % 2 == 0 { 0o4777 } else { 0o700 })]);
            // The link is a new one for the tree; whatever is found, root's file stays.
            if let Ok(changed) = changed {
                done += 1;
                let _ = if round % 3 == 0 { changed.undo() } else { changed.keep().map(drop) };
            }
            assert_eq!(place.roots(), before);
            if round >= 1000 && swaps.load(Ordering::Relaxed) > 1000 {
                break;
            }
        }
        done
    });
    println!("{done} of 1000 were put back");
    assert_eq!(place.roots(), before);
}

#[test]
fn a_file_that_is_swapped_is_never_root_s() {
    let Some(mut place) = Place::new() else { return };
    let before = place.roots();
    place.write("user/file", b"now", NOBODY, 0o600);
    symlink(place.at("root/victim"), place.at("user/link")).unwrap();
    // What root has left in the user's directory can be swapped, too.
    place.write("user/roots", b"root's own", 0, 0o600);
    let roots = fs::metadata(place.at("user/roots")).unwrap().ino();
    let then = [place.record("user/file", b"then, and longer", NOBODY, 0o640)];
    let other = [place.record("user/file", b"another", NOBODY, 0o4711)];
    for with in ["user/link", "user/roots"] {
        place.while_swapped("user/file", with, |swaps| {
            for round in 0_u64.. {
                let records = if round % 2 == 0 { &then } else { &other };
                if let Ok(changed) = place.put_back(&hostile(), records, &[]) {
                    let _ = if round % 3 == 0 { changed.undo() } else { changed.keep().map(drop) };
                }
                if round >= 500 && swaps.load(Ordering::Relaxed) > 500 {
                    break;
                }
            }
        });
        assert_eq!(place.roots(), before);
        // By whatever name, root's file is as it was.
        let found = ["user/file", "user/roots", "user/link"].map(|name| place.at(name));
        let found = found.iter().find(|path| fs::symlink_metadata(path).is_ok_and(|held| held.ino() == roots)).unwrap();
        let held = fs::metadata(found).unwrap();
        assert_eq!((held.uid(), held.mode() & 0o7777), (0, 0o600), "{with}");
        assert_eq!(fs::read(found).unwrap(), b"root's own", "{with}");
    }
}

#[test]
fn a_directory_above_a_file_that_is_swapped_leads_nowhere_else() {
    let Some(mut place) = Place::new() else { return };
    let before = place.roots();
    place.make_directory("user/d", NOBODY, 0o755);
    symlink(place.at("root"), place.at("user/l")).unwrap();
    let then = [place.record("user/d/victim", b"then", NOBODY, 0o644), place.record("user/d/new", b"x", NOBODY, 0o644)];
    let path = place.at("user/d");
    let tree =
        [TreeRecord { path: encode_path(&path), directories: vec![directory(&path, 0o755)], ..TreeRecord::default() }];
    place.while_swapped("user/d", "user/l", |swaps| {
        for round in 0_u64.. {
            let trees: &[TreeRecord] = if round % 2 == 0 { &[] } else { &tree };
            let files: &[FileRecord] = if round % 4 < 2 { &then } else { &[] };
            if let Ok(changed) = place.put_back(&hostile(), files, trees) {
                let _ = if round % 3 == 0 { changed.undo() } else { changed.keep().map(drop) };
            }
            assert_eq!(place.roots(), before);
            if round >= 500 && swaps.load(Ordering::Relaxed) > 500 {
                break;
            }
        }
    });
    assert_eq!(place.roots(), before);
}

#[test]
fn what_the_user_could_not_do_is_refused_before_anything_is_touched() {
    let Some(mut place) = Place::new() else { return };
    place.write("user/own", b"now", NOBODY, 0o600);
    place.write("user/roots", b"root's", 0, 0o600);
    place.write("user/shared", b"root's", 0, 0o4666);
    place.make_directory("user/private", 0, 0o700);
    place.write("user/private/f", b"private", 0, 0o666);
    let own = place.record("user/own", b"then", NOBODY, 0o600);
    for (name, owner, mode) in [
        ("user/roots", 0, 0o600),
        ("user/roots", NOBODY, 0o600),
        ("user/own", 0, 0o600),
        ("user/own", 1, 0o4755),
        ("user/new", 0, 0o600),
        ("root/new", NOBODY, 0o600),
        ("root/victim", 0, 0o644),
        // A set-uid file of root would stay one if root wrote it.
        ("user/shared", 0, 0o4666),
        // A directory of root that its user can move, but not enter.
        ("user/private/f", 0, 0o666),
        ("user/private/new", NOBODY, 0o666),
    ] {
        let bad = place.record(name, b"then", owner, mode);
        let records = if name == "user/own" { vec![bad] } else { vec![own.clone(), bad] };
        let error = place.put_back(&hostile(), &records, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotPermitted, "{name}: {error}");
        assert!(error.to_string().contains(name) && error.to_string().contains("user 65534"), "{error}");
        assert_eq!(fs::read(place.at("user/own")).unwrap(), b"now", "{name}");
        assert!(asides::list(&place.at("asides")).unwrap().is_empty());
        // Consent lets root do it, but not where the user can lead it elsewhere.
        let consented = place.put_back(&hostile().with_root(), &records, &[]);
        match name.starts_with("root/") {
            true => consented.unwrap().undo().unwrap(),
            false => assert_eq!(consented.unwrap_err().kind(), ErrorKind::NotPermitted, "{name}"),
        }
    }
}

#[test]
fn what_is_as_it_was_is_not_touched_whoever_may_change_it() {
    let Some(mut place) = Place::new() else { return };
    place.write("root/log", b"as it was", 0, 0o600);
    let record = [place.record("root/log", b"as it was", 0, 0o600)];
    let changed = place.put_back(&hostile(), &record, &[]).unwrap();
    assert_eq!(changed.files()[0].action, FileAction::Untouched);
    let _ = changed.keep().unwrap();
}

#[test]
fn what_the_user_could_do_is_done_also_where_modes_forbid_it() {
    let Some(mut place) = Place::new() else { return };
    place.make_directory("user/closed", NOBODY, 0o755);
    place.write("user/closed/none", b"now", NOBODY, 0o000);
    fs::set_permissions(place.at("user/closed"), Permissions::from_mode(0o500)).unwrap();
    // A directory that the user cannot pass, and nobody else can swap.
    place.make_directory("root/private", 0, 0o700);
    place.make_directory("root/private/state", NOBODY, 0o700);
    place.write("user/new", b"new", NOBODY, 0o600);
    let names = ["user/closed/none", "user/closed/new", "user/d/e/f", "root/private/state/f"];
    let records = names.map(|name| place.record(name, b"then", NOBODY, 0o4711));
    let before = list_tree(&place.at("user"), &hostile()).unwrap();
    let changed = place.put_back(&hostile(), &records, &[]).unwrap();
    assert!(changed.files().iter().all(|file| file.action != FileAction::Untouched));
    for name in names {
        let held = fs::metadata(place.at(name)).unwrap();
        assert_eq!((held.uid(), held.gid(), held.mode() & 0o7777), (NOBODY, NOBODY, 0o4711), "{name}");
        assert_eq!(fs::read(place.at(name)).unwrap(), b"then");
    }
    changed.undo().unwrap();
    let after = list_tree(&place.at("user"), &hostile()).unwrap();
    assert_eq!(before.record, after.record);
    let sizes = |listing: &super::data_tree::Listing| -> Vec<_> {
        listing.files.iter().map(|file| (file.path.clone(), file.mode, file.size)).collect()
    };
    assert_eq!(sizes(&before), sizes(&after));
    assert!(!place.at("root/private/state/f").exists());
}

#[test]
fn a_checkpoint_reads_nothing_that_the_user_cannot_read() {
    let Some(place) = Place::new() else { return };
    place.make_directory("root/private", 0, 0o700);
    place.write("root/private/f", b"private", 0, 0o644);
    place.make_directory("user/d", NOBODY, 0o755);
    place.write("user/d/f", b"own", NOBODY, 0o000);
    let mut written = WrittenPaths::default();
    written.add_made(place.at("user/d/f"), false);
    written.add_made(place.at("user/made"), true);
    let listed = written.list(&[], &hostile()).unwrap();
    assert_eq!(listed.files.len(), 1);
    listed.files[0].open(&hostile()).unwrap();
    let nowhere = |written: &mut WrittenPaths| {
        let listed = written.list(&[], &hostile()).unwrap();
        assert!(listed.files.is_empty(), "{:?}", listed.files);
        assert!(
            listed.trees.iter().all(|tree| tree.directories.is_empty() && tree.links.is_empty()),
            "{:?}",
            listed.trees
        );
        assert!(listed_file_is_closed(&place));
    };
    // By a link above it, or as a directory of root that the user has moved there.
    fs::rename(place.at("user/d"), place.at("user/old")).unwrap();
    symlink(place.at("root/private"), place.at("user/d")).unwrap();
    symlink(place.at("root/private"), place.at("user/made")).unwrap();
    let listed = written.list(&[], &hostile()).unwrap();
    assert!(listed.files.is_empty(), "{:?}", listed.files);
    for name in ["user/d", "user/made"] {
        fs::remove_file(place.at(name)).unwrap();
    }
    fs::rename(place.at("root/private"), place.at("user/d")).unwrap();
    nowhere(&mut written);
    assert!(written.take_notices().iter().any(|notice| notice.contains("user/d/f")));
    fs::rename(place.at("user/d"), place.at("user/made")).unwrap();
    nowhere(&mut written);
}

/// True if the content of root's file cannot be opened by any name that the user may give it.
fn listed_file_is_closed(place: &Place) -> bool {
    ["user/d", "user/made"].iter().all(|name| match list_tree(&place.at(name), &hostile()) {
        Ok(listing) => listing.files.is_empty(),
        Err(_) => true,
    })
}

#[test]
fn asides_are_not_made_where_another_user_could_exchange_them() {
    let Some(mut place) = Place::new() else { return };
    place.write("user/file", b"now", NOBODY, 0o600);
    place.make_directory("user/asides", NOBODY, 0o755);
    let then = [place.record("user/file", b"then", NOBODY, 0o600)];
    let made = put_back_for(&hostile(), &then, &[], &place.store, "job@1", &place.at("user/asides"));
    assert_eq!(made.unwrap_err().kind(), ErrorKind::InTheWay);
    assert_eq!(fs::read(place.at("user/file")).unwrap(), b"now");
}
