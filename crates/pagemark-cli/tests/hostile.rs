//! Repositories that another user has prepared, or that are damaged in single places: the command
//! follows no link, waits for no FIFO, asks before it trusts, and loses no other checkpoint.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use pagemark::backend::{Backend, LeaseMode, LocalBackend};
use pagemark::repository::{Repository, RepositoryOptions, Retention};
use pagemark::{Error, ErrorKind};
use pagemark_process::ErrorKind as ProcessErrorKind;
use pagemark_process::restore::Restore;
use pagemark_testing::{in_own_session, skip, wait_for};
use subject::{NOBODY, Subject, assert_fails, has_criu, is_root, stderr, verifies};
use support::Pagemark;

/// A repository with two checkpoints of memory alone.
fn two_checkpoints() -> Option<(Pagemark, Subject)> {
    let pagemark = Pagemark::new();
    let subject = Subject::start(&["plain"])?;
    for _ in 0..2 {
        pagemark.done(&checkpoint_of(&subject.pid_text()));
    }
    Some((pagemark, subject))
}

fn checkpoint_of(pid: &str) -> [&str; 5] {
    ["checkpoint", "--memory-only", "--job", "subject", pid]
}

/// Runs the command to its end; fails if it hangs.
#[track_caller]
fn in_time(pagemark: &Pagemark, arguments: &[&str]) -> Output {
    let mut command = pagemark.command(arguments);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    wait_for(&format!("the end of {arguments:?}"), || child.try_wait().expect("our child"));
    child.wait_with_output().expect("its output")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn directories_behind_links_are_left_alone() {
    let Some((pagemark, subject)) = two_checkpoints() else { skip!("no C compiler") };
    let repository = pagemark.repository();
    let foreign = pagemark.directory().join("foreign");
    for directory in ["packs", "index", "checkpoints"] {
        let (own, moved) = (repository.join(directory), pagemark.directory().join("moved"));
        fs::create_dir_all(&foreign).expect("a directory");
        // A prune would take these names for its own files.
        for name in ["0123456789abcdef.pack", "0123456789abcdef.idx", "0123456789abcdef.pack.tmp", "letter"] {
            fs::write(foreign.join(name), "foreign").expect("a file");
        }
        fs::rename(&own, &moved).expect("a rename");
        symlink(&foreign, &own).expect("a link");
        for arguments in [&["prune", "--keep-last", "1"][..], &checkpoint_of(&subject.pid_text()), &["verify"]] {
            let output = in_time(&pagemark, arguments);
            assert_eq!(output.status.code(), Some(1), "{directory} {arguments:?}");
            assert!(stderr(&output).contains("symbolic link"), "{directory} {arguments:?}: {}", stderr(&output));
        }
        assert_eq!(fs::read_dir(&foreign).expect("a directory").count(), 4, "{directory}");
        fs::remove_dir_all(&foreign).expect("it goes");
        fs::remove_file(&own).expect("it goes");
        fs::rename(&moved, &own).expect("a rename");
    }
    verifies(&pagemark);
    subject.is_untouched();
}

#[test]
fn the_lock_overwrites_no_foreign_file() {
    let Some((pagemark, subject)) = two_checkpoints() else { skip!("no C compiler") };
    let lock = pagemark.repository().join("lock");
    let foreign = pagemark.directory().join("foreign");
    fs::write(&foreign, "foreign").expect("a file");
    let again = || {
        fs::remove_file(&lock).expect("it goes");
        &lock
    };
    symlink(&foreign, again()).expect("a link");
    assert_fails(&in_time(&pagemark, &checkpoint_of(&subject.pid_text())), &["lock", "symbolic link"]);
    // A backup by hard links is no attack, but the other name must keep its content.
    fs::hard_link(&foreign, again()).expect("a link");
    pagemark.done(&checkpoint_of(&subject.pid_text()));
    mkfifo(again(), Mode::S_IRUSR | Mode::S_IWUSR).expect("a FIFO");
    assert_fails(&in_time(&pagemark, &checkpoint_of(&subject.pid_text())), &["lock", "not a regular file"]);
    assert_eq!(fs::read_to_string(&foreign).expect("a file"), "foreign");
    let _ = again();
    pagemark.done(&checkpoint_of(&subject.pid_text()));
    verifies(&pagemark);
}

/// The number of checkpoints of `subject` that `log` lists.
fn readable(pagemark: &Pagemark) -> usize {
    let output = in_time(pagemark, &["log", "subject"]);
    String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.contains("subject@")).count()
}

/// Every file of the repository in turn is a FIFO without a writer, or a link to a foreign file.
#[test]
fn fifos_and_links_in_place_of_files_are_reported() {
    let Some((pagemark, _subject)) = two_checkpoints() else { skip!("no C compiler") };
    let mut files = Vec::new();
    let mut directories = vec![pagemark.repository()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() { directories.push(path) } else { files.push(path) }
        }
    }
    files.retain(|path| !path.ends_with("lock"));
    assert!(files.len() >= 5, "{files:?}");
    let (moved, foreign) = (pagemark.directory().join("moved"), pagemark.directory().join("foreign"));
    for path in &files {
        fs::rename(path, &moved).expect("a rename");
        fs::write(&foreign, "foreign").expect("a file");
        for is_fifo in [true, false] {
            match is_fifo {
                true => mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).expect("a FIFO"),
                false => symlink(&foreign, path).expect("a link"),
            }
            // A commit record is reported, and hides no other.
            if path.parent().is_some_and(|job| job.ends_with("checkpoints/subject")) {
                let name = path.display().to_string();
                for arguments in [&["log"][..], &["log", "subject"]] {
                    assert_fails(&in_time(&pagemark, arguments), &[&name]);
                }
                assert_eq!(readable(&pagemark), 1, "{name}");
            }
            for arguments in [&["log"][..], &["log", "subject"], &["verify"]] {
                let output = in_time(&pagemark, arguments);
                let name = path.display();
                assert!(matches!(output.status.code(), Some(0 | 1)), "{name} {arguments:?}: {}", stderr(&output));
                assert!(!stderr(&output).contains("panicked"), "{name} {arguments:?}: {}", stderr(&output));
            }
            fs::remove_file(path).expect("it goes");
        }
        assert_eq!(fs::read_to_string(&foreign).expect("a file"), "foreign");
        fs::rename(&moved, path).expect("a rename");
    }
    verifies(&pagemark);
    assert_eq!(pagemark.checkpoints("subject").len(), 2);
}

/// Gives everything below a directory to another user.
fn give_all(directory: &Path, user: u32) {
    chown(directory, Some(user), Some(user)).expect("the owner");
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { give_all(&path, user) } else { chown(&path, Some(user), Some(user)).expect("the owner") }
    }
}

#[test]
fn a_repository_that_others_can_change_is_refused_unless_it_is_trusted() {
    if !is_root() {
        skip!("only root can give a repository to another user");
    }
    let Some((pagemark, subject)) = two_checkpoints() else { skip!("no C compiler") };
    let repository = pagemark.repository();
    let pid = subject.pid_text();
    let is_refused = |reason: &str| {
        for arguments in
            [&["log"][..], &["verify"], &["restore", "subject"], &["show", "subject"], &checkpoint_of(&pid)]
        {
            let output = pagemark.output(arguments);
            assert_fails(&output, &["other users can change the repository", reason, "--trust-repo"]);
        }
        let refused =
            |result: Result<Repository, Error>| matches!(result, Err(error) if error.kind() == ErrorKind::Exposed);
        assert!(refused(Repository::open(&repository)) && refused(Repository::open_or_create(&repository)));
        assert!(RepositoryOptions::default().trusted(true).open(&repository).is_ok());
        pagemark.done(&["log", "--trust-repo"]);
    };
    let set_mode = |name: &str, mode: u32| {
        let path = repository.join(name);
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the mode");
    };
    give_all(&repository, NOBODY);
    is_refused("belongs to user 65534");
    pagemark.done(&["checkpoint", "--trust-repo", "--memory-only", "--job", "subject", &pid]);
    give_all(&repository, 0);
    for mode in [0o777, 0o770, 0o722] {
        set_mode("", mode);
        is_refused(&format!("has the mode {mode:04o}"));
    }
    set_mode("", 0o755);
    for (name, mode) in [("packs", 0o777), ("checkpoints", 0o770), ("config", 0o666)] {
        let before = fs::metadata(repository.join(name)).expect("attributes").mode();
        set_mode(name, mode);
        is_refused(&format!("{name} has the mode {mode:04o}"));
        set_mode(name, before);
    }
    // Other users may read a repository.
    verifies(&pagemark);
    assert_eq!(pagemark.checkpoints("subject").len(), 3);

    // No repository is created in a directory of another user.
    let empty = pagemark.directory().join("empty");
    fs::create_dir(&empty).expect("a directory");
    chown(&empty, Some(NOBODY), Some(NOBODY)).expect("the owner");
    let before = fs::metadata(&empty).expect("attributes").mode();
    let place = empty.display().to_string();
    let output = pagemark.output(&["checkpoint", "--memory-only", "--repo", &place, &pid]);
    assert_fails(&output, &["belongs to user 65534", "--trust-repo"]);
    assert_eq!(fs::metadata(&empty).expect("attributes").mode(), before, "its mode was changed");
    assert_eq!(fs::read_dir(&empty).expect("a directory").count(), 0);
}

#[test]
fn a_lost_config_is_read_from_its_copy_and_written_again() {
    let Some((pagemark, subject)) = two_checkpoints() else { skip!("no C compiler") };
    let (config, copy) = (pagemark.repository().join("config"), pagemark.repository().join("config.copy"));
    let content = fs::read(&config).expect("its configuration");
    let damages: [&dyn Fn(&Path); 5] = [
        &|path| fs::remove_file(path).expect("it goes"),
        &|path| fs::write(path, "").expect("written"),
        &|path| fs::write(path, &content[..content.len() / 2]).expect("written"),
        &|path| {
            fs::write(path, String::from_utf8_lossy(&content).replace("key\": \"", "key\": \"00")).expect("written")
        },
        &|path| {
            fs::remove_file(path).expect("it goes");
            symlink("/dev/null", path).expect("a link");
        },
    ];
    for (number, damage) in damages.iter().enumerate() {
        damage(&config);
        let output = pagemark.output(&["log", "subject"]);
        assert!(output.status.success(), "damage {number}: {}", stderr(&output));
        assert_eq!(stdout(&output).matches("subject@").count(), 2, "damage {number}: {}", stdout(&output));
        assert!(stderr(&output).contains("Its copy is used"), "damage {number}: {}", stderr(&output));
        assert!(stdout(&pagemark.output(&["verify"])).contains("config: "), "damage {number}");
        pagemark.done(&checkpoint_of(&subject.pid_text()));
        assert_eq!(fs::read(&config).expect("it is there again"), content, "damage {number}");
        verifies(&pagemark);
        // Likewise the copy is written again. A missing copy is no damage: earlier versions made none.
        damage(&copy);
        pagemark.done(&["log", "subject"]);
        pagemark.done(&["prune", "--keep-last", "2"]);
        assert_eq!(fs::read(&copy).expect("it is there again"), content, "damage {number}");
        verifies(&pagemark);
    }
    fs::write(&config, "{}").expect("written");
    fs::write(&copy, "{}").expect("written");
    assert_fails(&pagemark.output(&["log"]), &["config is damaged and has no intact copy"]);
    fs::remove_file(&config).expect("it goes");
    fs::remove_file(&copy).expect("it goes");
    assert_fails(&pagemark.output(&["log"]), &["is no repository"]);
}

#[test]
fn a_damaged_checkpoint_hides_no_other() {
    let Some((pagemark, subject)) = two_checkpoints() else { skip!("no C compiler") };
    pagemark.done(&checkpoint_of(&subject.pid_text()));
    pagemark.done(&["checkpoint", "--memory-only", "--job", "other", &subject.pid_text()]);
    let record = |sequence: u64| pagemark.repository().join(format!("checkpoints/subject/{sequence:010}"));
    let whole = fs::read(record(2)).expect("a record");
    let damages: [&dyn Fn(); 4] = [
        &|| fs::write(record(2), "short").expect("written"),
        // The record of another checkpoint.
        &|| assert!(fs::copy(record(1), record(2)).is_ok()),
        // The manifest's id: the record has to be that of another manifest.
        &|| {
            let mut changed = whole.clone();
            changed[60] ^= 1;
            fs::write(record(2), changed).expect("written");
        },
        &|| fs::write(record(2), [&whole[..], b"longer"].concat()).expect("written"),
    ];
    for (number, damage) in damages.iter().enumerate() {
        damage();
        for arguments in [&["log", "subject"][..], &["log"]] {
            let output = pagemark.output(arguments);
            let (listed, told) = (stdout(&output), stderr(&output));
            assert_eq!(output.status.code(), Some(1), "damage {number}: {told}");
            assert!(told.contains("cannot read subject@2: "), "damage {number}: {told}");
            let expected: &[&str] =
                if arguments.len() == 1 { &["subject", "other", "@3"] } else { &["subject@1", "subject@3"] };
            assert!(expected.iter().all(|text| listed.contains(text)), "damage {number}: {listed}");
        }
        fs::write(record(2), &whole).expect("written");
    }
    verifies(&pagemark);

    // The manifest: the pack that holds it is gone.
    let packs = pagemark.repository().join("packs");
    let newest = fs::read_dir(&packs).expect("packs").flatten().max_by_key(|entry| {
        let metadata = entry.metadata().expect("attributes");
        (metadata.mtime(), metadata.mtime_nsec())
    });
    fs::remove_file(newest.expect("a pack").path()).expect("it goes");
    let output = pagemark.output(&["log", "other"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot read other@1: "), "{}", stderr(&output));
    assert!(stdout(&pagemark.output(&["log"])).contains("subject"));

    // Without a number, the newest readable checkpoint is taken, and a message reports that.
    fs::write(record(3), "short").expect("written");
    let output = pagemark.output(&["show", "subject"]);
    assert!(stderr(&output).contains("cannot read subject@3: "), "{}", stderr(&output));
    assert!(stderr(&output).contains("subject@2 is taken instead"), "{}", stderr(&output));
}

/// Names of files that Pagemark has not made.
#[test]
fn records_with_strange_names_do_no_harm() {
    let Some((pagemark, subject)) = two_checkpoints() else { skip!("no C compiler") };
    let job = pagemark.repository().join("checkpoints/subject");
    let record = fs::read(job.join("0000000002")).expect("a record");
    for name in ["..2", "0000000003x", "+000000003", "2", "-1", "0000000000", "00000000000000000002"] {
        fs::write(job.join(name), &record).expect("a file");
    }
    for name in ["...", "..subject", ".hidden", "a b", "ä"] {
        fs::create_dir(pagemark.repository().join("checkpoints").join(name)).expect("a directory");
    }
    let output = pagemark.output(&["log", "subject"]);
    assert!(stdout(&output).contains("subject@1") && stdout(&output).contains("subject@2"), "{}", stdout(&output));
    for name in ["../packs", "..", "subject/..", "/etc", "subject/../../config"] {
        assert_eq!(pagemark.output(&["log", name]).status.code(), Some(1), "{name}");
        assert_eq!(pagemark.output(&["restore", name]).status.code(), Some(1), "{name}");
    }
    fs::remove_file(job.join("0000000000")).expect("it goes");
    pagemark.done(&checkpoint_of(&subject.pid_text()));
    // No number follows this one.
    fs::write(job.join(u64::MAX.to_string()), &record).expect("a file");
    let output = pagemark.output(&checkpoint_of(&subject.pid_text()));
    assert_fails(&output, &["no checkpoint can have a higher number"]);
    subject.is_untouched();
}

/// Another user who can write the directory above replaces the repository while it is open.
#[test]
fn a_repository_that_is_replaced_while_it_is_used_is_noticed() {
    let Some((pagemark, _subject)) = two_checkpoints() else { skip!("no C compiler") };
    let path = pagemark.repository();
    let repository = Repository::open(&path).expect("a repository");
    let moved = pagemark.directory().join("moved");
    fs::rename(&path, &moved).expect("a rename");
    let foreign = pagemark.directory().join("foreign");
    fs::create_dir(&foreign).expect("a directory");
    fs::write(foreign.join("letter.tmp"), "foreign").expect("a file");
    symlink(&foreign, &path).expect("a link");
    let replaced = |result: Result<(), Error>| matches!(result, Err(error) if error.kind() == ErrorKind::Replaced);
    assert!(replaced(repository.writer("a test", std::time::Duration::ZERO).map(drop)));
    assert!(replaced(repository.prune(&Retention::default(), None, &mut |_| {}).map(drop)));
    // The repository that was opened can still be read.
    assert_eq!(repository.checkpoints("subject").expect("a list").len(), 2);
    assert_eq!(repository.read("subject", 2).expect("a checkpoint").manifest.sequence, 2);
    assert_eq!(fs::read_dir(&foreign).expect("a directory").count(), 1);
    fs::remove_file(&path).expect("it goes");
    fs::rename(&moved, &path).expect("a rename");
    assert!(repository.writer("a test", std::time::Duration::ZERO).is_ok());
    let backend = LocalBackend::new(&path).expect("a directory");
    assert!(backend.lease("lock", LeaseMode::Shared, "a test").is_ok());
}

/// A process that has a file open for writing, and works in a directory.
struct Writer {
    child: Child,
    file: PathBuf,
}

impl Writer {
    /// With `content` in the file, which has this mode.
    fn start(file: PathBuf, directory: &Path, content: &str, mode: u32) -> Writer {
        fs::write(&file, content).expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("its mode");
        let output = fs::OpenOptions::new().append(true).open(&file).expect("the file");
        let mut command = Command::new("sleep");
        command.arg("1000").current_dir(directory).stdin(Stdio::null()).stdout(output).stderr(Stdio::null());
        Writer { child: in_own_session(&mut command).spawn().expect("sleep starts"), file }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Kills the process, whichever process is its parent, and changes the file.
    fn end(&mut self, content: &str) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if support::is_alive(self.pid()) {
            support::kill_and_wait(self.pid());
        }
        fs::write(&self.file, content).expect("the file");
    }

    #[track_caller]
    fn was_not_restored(&self) {
        assert!(!support::is_alive(self.pid()), "it was restored");
        assert_eq!(fs::read_to_string(&self.file).expect("the file"), "now", "its file was changed");
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end("");
    }
}

/// Runs the command with this answer at its terminal.
fn at_terminal(pagemark: &Pagemark, arguments: &[&str], answer: &str) -> Output {
    let terminal = nix::pty::openpty(None, None).expect("a terminal");
    nix::unistd::write(&terminal.master, answer.as_bytes()).expect("written");
    let mut command = pagemark.command(arguments);
    command.stdin(Stdio::from(terminal.slave)).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.output().expect("the command runs")
}

#[test]
fn a_restore_asks_before_it_changes_unusual_files() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let pagemark = Pagemark::new();
    let at = |name: &str| {
        let path = pagemark.directory().join(name);
        fs::create_dir_all(&path).expect("a directory");
        path
    };
    let restore = ["restore", "--detach", "writer"];
    for (number, (file, directory, mode, reason)) in [
        (at("other").join("file"), at("own"), 0o600, "outside the job's own directories"),
        (at("own").join("file"), PathBuf::from("/"), 0o600, "outside the job's own directories"),
        (at("own").join("set-uid"), at("own"), 0o4755, "set-uid or set-gid (mode 4755) of user 0"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut writer = Writer::start(file.clone(), &directory, "then", mode);
        pagemark.done(&["checkpoint", "--job", "writer", &writer.pid().to_string()]);
        writer.end("now");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its mode");

        assert_fails(&pagemark.output(&restore), &[&file.display().to_string(), reason, "no terminal", "--yes"]);
        writer.was_not_restored();
        for answer in ["n\n", "\n", "maybe\n", "\u{4}"] {
            let output = at_terminal(&pagemark, &restore, answer);
            assert_fails(&output, &[&file.display().to_string(), "Change them?", "there was no consent"]);
            writer.was_not_restored();
        }
        let repository = Repository::open(&pagemark.repository()).expect("the repository");
        let checkpoint = repository.read("writer", number as u64 + 1).expect("a checkpoint");
        let failure = Restore::new(&checkpoint).detach(true).run(&mut |_| {}).expect_err("no consent");
        assert!(
            failure.error.kind() == ProcessErrorKind::NoConsent
                && failure.error.reason().contains(&*file.to_string_lossy()),
            "{failure}"
        );
        writer.was_not_restored();

        match number {
            0 => drop(pagemark.done(&[&restore[..], &["--yes"]].concat())),
            1 => assert!(at_terminal(&pagemark, &restore, "y\n").status.success()),
            _ => drop(Restore::new(&checkpoint).detach(true).allow_unusual_files(true).run(&mut |_| {}).expect("runs")),
        }
        assert!(support::is_alive(writer.pid()));
        assert_eq!(fs::read_to_string(&file).expect("the file"), "then");
        assert_eq!(fs::metadata(&file).expect("its attributes").permissions().mode() & 0o7777, mode);
        writer.end("then");
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("its mode");
        // A file that would not be changed needs no consent.
        pagemark.done(&restore);
        writer.end("");
    }
    let file = at("own").join("below/file");
    at("own/below");
    let mut writer = Writer::start(file.clone(), &at("own"), "then", 0o600);
    pagemark.done(&["checkpoint", "--job", "writer", &writer.pid().to_string()]);
    writer.end("now");
    pagemark.done(&restore);
    assert_eq!(fs::read_to_string(&file).expect("the file"), "then");
    writer.end("now");
    // A user who can change the repository can also add a working directory to the checkpoint.
    fs::set_permissions(pagemark.repository(), fs::Permissions::from_mode(0o770)).expect("its mode");
    let trusted = [&restore[..], &["--trust-repo"]].concat();
    assert_fails(&pagemark.output(&trusted), &["outside the job's own directories", "--yes"]);
    writer.was_not_restored();
}

/// A checkpoint that names files of the system.
#[test]
fn a_checkpoint_that_names_foreign_files_changes_none() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let pagemark = Pagemark::new();
    let file = pagemark.directory().join("file");
    let mut writer = Writer::start(file, pagemark.directory(), "then", 0o600);
    pagemark.done(&["checkpoint", "--job", "writer", &writer.pid().to_string()]);
    writer.end("now");
    let victim_directory = tempfile::tempdir().expect("a directory");
    let victim = victim_directory.path().join("shadow");
    fs::write(&victim, "root:*:").expect("a file");
    symlink(victim_directory.path(), pagemark.directory().join("link")).expect("a link");

    let repository = Repository::open(&pagemark.repository()).expect("the repository");
    let mut manifest = repository.read("writer", 1).expect("a checkpoint").manifest;
    let through_link = pagemark.directory().join("link/shadow").display().to_string();
    let up = format!("{}/../{}", pagemark.directory().display(), &victim.display().to_string()[1..]);
    for (path, listed) in [
        (victim.display().to_string(), true),
        (through_link, false),
        (up, false),
        (victim.display().to_string()[1..].to_owned(), true),
        ("/proc/1/mem".to_owned(), true),
    ] {
        manifest.files[0].path = path.clone();
        let writer_of = repository.writer("a test", std::time::Duration::from_secs(10)).expect("the lock");
        let sequence = writer_of.commit(manifest.clone()).expect("a checkpoint").sequence;
        let name = format!("writer@{sequence}");
        let output = pagemark.output(&["restore", "--detach", &name]);
        assert_eq!(output.status.code(), Some(1), "{path}");
        assert!(!listed || stderr(&output).contains("--yes"), "{path}: {}", stderr(&output));
        if path != victim.display().to_string() {
            // Consent does not allow a path that cannot be one of a regular file.
            let output = pagemark.output(&["restore", "--detach", "--yes", &name]);
            assert_eq!(output.status.code(), Some(1), "{path}: {}", stderr(&output));
        }
        assert_eq!(fs::read_to_string(&victim).expect("a file"), "root:*:", "{path}");
        writer.was_not_restored();
    }
    // The name of a state file leads out of the directory of images.
    manifest.files.clear();
    manifest.state[0].name = "../escaped".into();
    let writer_of = repository.writer("a test", std::time::Duration::from_secs(10)).expect("the lock");
    let sequence = writer_of.commit(manifest).expect("a checkpoint").sequence;
    let output = pagemark.output(&["restore", "--detach", "--yes", &format!("writer@{sequence}")]);
    assert_fails(&output, &["../escaped", "is no name of a state file"]);
}
