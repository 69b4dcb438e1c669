//! A repository whose disk is full: the checkpoint is skipped and the failure reported, the target
//! continues, and no complete checkpoint is lost.

#[path = "support/small_disk.rs"]
mod small_disk;
#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::repository::Repository;
use pagemark_testing::{assert_oracle, assert_oracle_eq, skip, wait_for};
use small_disk::SmallDisk;
use subject::{Subject, assert_fails, has_criu};
use support::{Pagemark, Runner, kill_and_wait};

#[test]
fn a_full_disk_loses_nothing_but_the_checkpoint() {
    let Some(disk) = SmallDisk::mount("size=32m,mode=700") else { skip!("no file system can be mounted") };
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data");
    let Some(mut subject) = Subject::start(&["data", "8", data.to_str().expect("UTF-8")]) else {
        skip!("no C compiler")
    };
    let repository = disk.path().join("repository");
    let (place, pid) = (repository.to_str().expect("UTF-8"), subject.pid_text());
    let mut arguments = vec!["checkpoint", "--job", "subject", "--repo", place, &pid];
    if !has_criu() {
        arguments.push("--memory-only");
    }
    let verified = || pagemark.verify(&["--repo", place]);
    let count = || Repository::open(&repository).expect("it opens").checkpoints("subject").expect("a list").len();
    let progress = || fs::read_to_string(&data).unwrap_or_default();
    let goes_on = || {
        let before = progress().len();
        wait_for("the target to go on", || {
            assert_oracle!(!progress().contains('!'), "the target has found its data wrong");
            (progress().len() > before + 3).then_some(())
        });
    };
    goes_on();
    pagemark.done(&arguments);
    assert_eq!(count(), 1);

    // Twice the data need more room than there is.
    subject.signal(Signal::SIGUSR1);
    wait_for("more data", || progress().ends_with('+').then_some(()));
    let filler = disk.path().join("filler");
    fs::write(&filler, vec![1; 18 << 20]).expect("room for the filler");
    for _ in 0..3 {
        assert_fails(&pagemark.output(&arguments), &["cannot checkpoint process", place, "No space left on device"]);
        subject.is_untouched();
        goes_on();
        assert_oracle_eq!(count(), 1, "the number of checkpoints");
        verified();
    }
    fs::remove_file(&filler).expect("it goes");
    pagemark.done(&arguments);
    assert_oracle_eq!(count(), 2, "the number of checkpoints");
    verified();
    subject.is_untouched();

    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let target = subject.pid();
    subject.kill();
    pagemark.done(&["restore", "--detach", "--repo", place, "subject@2"]);
    goes_on();
    assert_oracle!(progress().ends_with('+'), "it has lost data");
    support::kill_and_wait(target);
}

/// Fills a file system except for some bytes.
fn fill(path: &Path, spare_bytes: u64) {
    let mut filler = File::create(path).expect("an empty file");
    while filler.write_all(&[1; 4096]).is_ok() {}
    let length = filler.metadata().expect("its length").len();
    filler.set_len(length.saturating_sub(spare_bytes)).expect("it shrinks");
}

/// The target of `series` is the program `subject`, which checks its data, and adds to the file
/// `data` while the data are right.
fn recovers(pagemark: &Pagemark, disk: &SmallDisk, mut series: Runner, target: i32, data: &Path) {
    let repository = disk.path().join("repository");
    let place = repository.to_str().expect("UTF-8");
    let count = || Repository::open(&repository).and_then(|it| it.checkpoints("subject")).map_or(0, |list| list.len());
    let progress = || fs::read_to_string(data).unwrap_or_default();
    let goes_on = || {
        let before = progress().len();
        wait_for("the target to go on", || {
            assert_oracle!(!progress().contains('!'), "the target has found its data wrong");
            (progress().len() > before + 3).then_some(())
        });
    };
    wait_for("two checkpoints", || (count() > 1).then_some(()));

    // The disk becomes full while pages are written, of which there are more then, and before the
    // first write.
    let filler = disk.path().join("filler");
    for spare_bytes in [2 << 20, 0] {
        fill(&filler, spare_bytes);
        let told_before = pagemark.log().len();
        kill(Pid::from_raw(target), Signal::SIGUSR1).expect("it lives");
        let failure = wait_for("a checkpoint to fail", || {
            let told = pagemark.log().split_off(told_before);
            told.lines().find(|line| line.contains("No space left on device")).map(str::to_owned)
        });
        for text in ["no checkpoint of subject this time; it keeps running, and the next interval tries again", place] {
            assert!(failure.contains(text), "{text:?} is not in: {failure}");
        }
        // Meanwhile checkpoints are tried and fail.
        let held = count();
        assert_oracle!(held > 1, "checkpoints are lost");
        for _ in 0..8 {
            goes_on();
        }
        assert_oracle!(count() >= held, "checkpoints are lost");
        assert_eq!(count(), held, "checkpoints came from nowhere, or went");
        assert_eq!(series.child.try_wait().expect("our child"), None, "the series has ended: {}", pagemark.log());
        pagemark.verify(&["--repo", place]);

        fs::remove_file(&filler).expect("it goes");
        wait_for("checkpoints after there is room again", || (count() > held + 1).then_some(()));
        goes_on();
    }
    assert!(progress().ends_with('+'), "it has not got more data");
    kill(Pid::from_raw(series.child.id() as i32), Signal::SIGINT).expect("it runs");
    wait_for("the series to end", || series.child.try_wait().expect("our child"));
    pagemark.verify(&["--repo", place]);
}

/// Restores the target from the newest checkpoint; the target checks its data.
fn comes_back(pagemark: &Pagemark, disk: &SmallDisk, target: i32, data: &Path) {
    let before = fs::read(data).expect("its progress").len();
    let repository = disk.path().join("repository");
    pagemark.done(&["restore", "--detach", "--repo", repository.to_str().expect("UTF-8"), "subject"]);
    wait_for("the restored target to go on", || {
        assert_oracle!(support::is_alive(target), "the restored target has found its data wrong");
        (fs::read(data).expect("its progress").len() > before + 3).then_some(())
    });
    kill_and_wait(target);
}

/// Options of a series whose repository is on the disk.
fn options(repository: &Path) -> Vec<&str> {
    let mut options = vec!["--job", "subject", "--every", "100ms", "--repo", repository.to_str().expect("UTF-8")];
    if !has_criu() {
        options.push("--memory-only");
    }
    options
}

#[test]
fn an_attached_series_continues_when_there_is_room_again() {
    let Some(disk) = SmallDisk::mount("size=64m,mode=700") else { skip!("no file system can be mounted") };
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data");
    let Some(mut subject) = Subject::start(&["data", "8", data.to_str().expect("UTF-8")]) else {
        skip!("no C compiler")
    };
    let mut command = pagemark.command(&["attach"]);
    command.args(options(&disk.path().join("repository"))).arg(subject.pid_text());
    let log = File::create(pagemark.directory().join("pagemark.log")).expect("a log file");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let series = Runner { child: command.spawn().expect("pagemark starts") };
    recovers(&pagemark, &disk, series, subject.pid(), &data);
    subject.is_untouched();
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let target = subject.pid();
    subject.kill();
    comes_back(&pagemark, &disk, target, &data);
}

#[test]
fn a_run_continues_when_there_is_room_again() {
    let Some(disk) = SmallDisk::mount("size=64m,mode=700") else { skip!("no file system can be mounted") };
    let Some(program) = subject::subject() else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data");
    let command = [program.to_str(), Some("data"), Some("8"), data.to_str()].map(|word| word.expect("UTF-8"));
    let series = pagemark.run(&options(&disk.path().join("repository")), &command);
    let target = series.target();
    // The signal that ends the series is passed to the program, and ends it too.
    recovers(&pagemark, &disk, series, target, &data);
    assert!(!support::is_alive(target));
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    comes_back(&pagemark, &disk, target, &data);
}
