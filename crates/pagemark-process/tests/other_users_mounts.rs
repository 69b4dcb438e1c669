//! Containers in which a program of another user runs, and whose mounts that user leads elsewhere
//! before a restore that root makes; and what root's own programs have in read-only mounts.

mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

use pagemark::repository::Checkpoint;
use pagemark_process::restore::{RestoreFailure, Restored};
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT_AGAIN};

const USER: u32 = 65534;

/// Executed in the mounts of a container to be, in the directory of its user: the container gets
/// the root directory `way/root`, in which only root can write, and the user's directory at `data`.
const OWN_ROOT: &str = "
setpriv --reuid=65534 --regid=65534 --clear-groups mkdir -p way x/y/b k/etc src &&
mkdir way/root && mount --bind way/root way/root && cd way/root &&
mkdir proc data etc && for name in bin lib lib64 usr; do mkdir -p $name && mount --rbind /$name $name; done &&
mount -t proc proc proc && mount --bind ../.. data && mount --bind data/src data/x/y/b &&
mount -t tmpfs -o mode=777 tmpfs data/k/etc && pivot_root . . && umount -l . && cd /data";

/// A container whose program reports `text`. None after reporting why the test is skipped.
fn container(set_up: &str, text: &str) -> Option<Program> {
    let text = format!("import os, time\ndef read():\n    return {text}\n{REPORT_AGAIN}");
    let program = Program::of_a_user_in_a_container_after(set_up.trim(), &text)?;
    wait_until("the program reports", || program.read("out").is_some());
    Some(program)
}

fn restore(checkpoints: &Checkpoints, checkpoint: &Checkpoint, is_lazy: bool) -> Result<Restored, RestoreFailure> {
    checkpoints.restoring(checkpoint, &checkpoints.criu).lazy(is_lazy).run(&mut |_| {})
}

/// As the user.
fn make_link(target: &Path, link: &Path) {
    symlink(target, link).unwrap();
    lchown(link, Some(USER), Some(USER)).unwrap();
}

/// As the user.
fn make_directories(path: &Path, first: &Path) {
    fs::create_dir_all(path).unwrap();
    for made in path.ancestors().take_while(|made| *made != first) {
        chown(made, Some(USER), Some(USER)).unwrap();
    }
}

/// A directory that only root can enter, with the root directory of another container.
fn roots(program: &Program) -> PathBuf {
    let roots = program.directory().join("roots");
    for name in ["proc", "data", "etc", "bin", "lib", "lib64", "usr"] {
        fs::create_dir_all(roots.join("root").join(name)).unwrap();
    }
    fs::write(roots.join("root/secret"), "SECRET").unwrap();
    fs::set_permissions(&roots, Permissions::from_mode(0o700)).unwrap();
    roots
}

#[test]
fn a_root_directory_that_the_user_has_exchanged_is_not_used() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = container(OWN_ROOT, "str(os.path.exists('/secret'))") else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let at = |name: &str| program.directory().join(name);
    let (roots, way, old) = (roots(&program), at("way"), at("old"));
    for is_lazy in [false, true] {
        // A link to root's, and root's itself, moved there as if root had done it.
        fs::rename(&way, &old).unwrap();
        make_link(&roots, &way);
        let error = restore(&checkpoints, &checkpoint, is_lazy).unwrap_err().to_string();
        assert!(error.contains("way, a symbolic link now"), "{error}");
        fs::remove_file(&way).unwrap();
        fs::rename(&roots, &way).unwrap();
        let error = restore(&checkpoints, &checkpoint, is_lazy).unwrap_err().to_string();
        assert!(error.contains("way/root") && error.contains("another place"), "{error}");
        let trusting = checkpoints.restoring(&checkpoint, &checkpoints.criu).trust_paths(vec![way.join("root")]);
        program.adopt(&trusting.run(&mut |_| {}).unwrap());
        program.kill();
        fs::rename(&way, &roots).unwrap();
        fs::rename(&old, &way).unwrap();
        program.adopt(&restore(&checkpoints, &checkpoint, is_lazy).unwrap());
        assert_eq!(program.report(), "False");
        program.kill();
    }
}

#[test]
fn a_mount_that_the_user_leads_to_another_place_ends_the_restore() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = container(OWN_ROOT, "str(os.path.ismount('/etc'))") else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    for is_lazy in [false, true] {
        program.adopt(&restore(&checkpoints, &checkpoint, is_lazy).unwrap());
        assert_eq!(program.report(), "False");
        program.kill();
        // Where CRIU looks for the kind of the mount's place, `x/y/b` is not mounted yet.
        let at = |name: &str| program.directory().join(name);
        make_directories(&at("x/y/b/up/etc"), &at("x/y/b"));
        make_link(Path::new("../../../.."), &at("src/up"));
        fs::rename(at("k"), at("old")).unwrap();
        make_link(Path::new("x/y/b/up"), &at("k"));
        fs::remove_file(at("out")).unwrap();
        let error = restore(&checkpoints, &checkpoint, is_lazy).unwrap_err().to_string();
        assert!(error.contains("/etc") && error.contains("had no such mount"), "{error}");
        assert_eq!(program.read("out"), None, "it has run");
        fs::remove_file(at("k")).unwrap();
        fs::rename(at("old"), at("k")).unwrap();
        fs::remove_file(at("src/up")).unwrap();
        fs::remove_dir_all(at("x/y/b/up")).unwrap();
        fs::write(at("out"), "").unwrap();
        chown(at("out"), Some(USER), Some(USER)).unwrap();
    }
}

#[test]
fn a_directory_that_is_mounted_and_removed_is_not_made_where_a_user_leads() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set_up = "setpriv --reuid=65534 --regid=65534 --clear-groups mkdir -p way/gone on && \
                  mount --bind way/gone on && rmdir way/gone";
    let Some(mut program) = container(set_up, "str(os.listdir('on'))") else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let roots = roots(&program);
    let changed = || fs::metadata(&roots).unwrap().ctime_nsec();
    let before = changed();
    let way = program.directory().join("way");
    fs::remove_dir(&way).unwrap();
    make_link(&roots, &way);
    for is_lazy in [false, true] {
        let error = restore(&checkpoints, &checkpoint, is_lazy).unwrap_err().to_string();
        assert!(error.contains("way/gone") && error.contains("was removed"), "{error}");
        assert_eq!(changed(), before, "something was made in a directory of root's");
    }
}

#[test]
fn a_directory_of_root_that_is_mounted_is_not_replaced_by_one_of_the_user() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set_up = "setpriv --reuid=65534 --regid=65534 --clear-groups mkdir -p way/own && mkdir way/roots etc own && \
                  mount --bind way/roots etc && mount --bind way/own own";
    let Some(mut program) = container(set_up, "str([os.stat('etc').st_uid, os.stat('own').st_uid])") else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let way = program.directory().join("way");
    program.adopt(&restore(&checkpoints, &checkpoint, false).unwrap());
    assert_eq!(program.report(), "[0, 65534]");
    program.kill();
    for (name, is_refused) in [("roots", true), ("own", false)] {
        fs::rename(way.join(name), way.join("old")).unwrap();
        make_directories(&way.join(name), &way);
        let restored = restore(&checkpoints, &checkpoint, false);
        match is_refused {
            true => {
                let error = restored.unwrap_err().to_string();
                assert!(error.contains("way/roots") && error.contains("another"), "{error}");
            }
            false => {
                program.adopt(&restored.unwrap());
                program.kill();
            }
        }
        fs::remove_dir(way.join(name)).unwrap();
        fs::rename(way.join("old"), way.join(name)).unwrap();
    }
}

/// The mount gets read-only when the file has lost its name.
#[test]
fn a_removed_file_of_a_read_only_mount_comes_back() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set_up = "mkdir data && mount -t tmpfs tmpfs data && echo kept > data/gone";
    let text = format!(
        "import os, subprocess, time
gone = os.open('data/gone', os.O_RDONLY)
os.unlink('data/gone')
subprocess.run(['mount', '-o', 'remount,bind,ro', 'data'], check=True)
def read():
    is_read_only = os.fstatvfs(gone).f_flag & os.ST_RDONLY
    return str([os.pread(gone, 9, 0), os.fstat(gone).st_nlink, is_read_only, os.listdir('data')])
{REPORT_AGAIN}"
    );
    let Some(mut program) = Program::of_root_in_a_container_after(set_up, &text) else { return };
    let expected = "[b'kept\\n', 0, 1, []]";
    assert_eq!(program.report(), expected);
    for is_lazy in [false, true] {
        let checkpoint = checkpoints.take(&program, &[]);
        program.kill();
        program.adopt(&restore(&checkpoints, &checkpoint, is_lazy).unwrap());
        assert_eq!(program.report(), expected);
    }
}
