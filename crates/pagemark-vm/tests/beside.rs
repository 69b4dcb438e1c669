//! A restore while the original runs, or ends: nothing of the original is taken or written to.

#[path = "support/restored.rs"]
mod restored;

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use pagemark::repository::{Checkpoint, Repository};
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{MachinePaths, PLAIN, Qemu, TestMonitor, guest_program, skip};
use pagemark_vm::{ErrorKind, Restore, VmTarget};
use serde_json::json;

fn checkpoint(paths: &MachinePaths) -> Checkpoint {
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("vm"));
    job.checkpoint().unwrap();
    job.detach();
    Repository::open(&paths.join("repository")).unwrap().read("vm", 1).unwrap()
}

#[test]
fn a_restore_beside_the_original_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &PLAIN);
    let checkpoint = checkpoint(&paths);
    let error = restored::restore(&checkpoint).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Start);
    let by = format!("is in use by process {}", qemu.pid());
    assert!(error.to_string().contains(&by), "{error}");
    paths.wait_for_steps(1);
}

/// The sockets and the other file are gone, as after `rm`: they do not tell that the original runs.
#[test]
fn files_that_the_original_writes_to_are_not_written_to_by_a_restore() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let memory = |path: &Path, form: &str| match form {
        "json" => json!({
            "qom-type": "memory-backend-file", "id": "m", "size": 64 << 20, "mem-path": path, "share": true,
        })
        .to_string(),
        _ => format!("memory-backend-file,id=m,size=64M,mem-path={},share=on", path.display()),
    };
    let machine = ["-m", "64", "-machine", "memory-backend=m"].map(str::to_owned);
    let lines = |path: &Path| -> Vec<(bool, Vec<String>)> {
        let file = path.display();
        let words = |option: &str, value: String| vec![option.to_owned(), value];
        vec![
            (true, [words("-object", memory(path, "json")), machine.to_vec()].concat()),
            (true, [words("-object", memory(path, "options")), machine.to_vec()].concat()),
            (false, words("-debugcon", format!("file:{file}"))),
            (false, words("-D", file.to_string())),
        ]
    };
    for number in 0..lines(Path::new("")).len() {
        let paths = MachinePaths::default();
        let file = paths.join("file");
        let (is_memory, further) = lines(&file).swap_remove(number);
        let qemu = Qemu::start(&paths, &further);
        let checkpoint = checkpoint(&paths);
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        own.run("stop", json!({}));
        ["test.qmp", "vm.qmp", "serial"].iter().for_each(|name| fs::remove_file(paths.join(name)).unwrap());
        if !is_memory {
            fs::write(&file, "of the original").unwrap();
        }
        let before = fs::read(&file).unwrap();
        let named = format!("{} is in use by process {}", file.display(), qemu.pid());
        let mut errors = vec![restored::restore(&checkpoint).err().unwrap()];
        if is_memory {
            // Other files are those of each machine.
            errors.push(Restore::new(&checkpoint).fork(1, &[]).unwrap_err());
        }
        for error in errors {
            assert!(error.kind() == ErrorKind::Start && error.to_string().contains(&named), "{further:?}: {error}");
        }
        assert!(fs::read(&file).unwrap() == before, "{further:?}");
        drop(qemu);
        restored::restore(&checkpoint).unwrap();
    }
}

/// Two QEMUs would each get a part of what comes through a pipe.
#[test]
fn a_pipe_of_the_original_is_not_read_by_a_restore() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let ends = ["pipe.in", "pipe.out"].map(|name| paths.join(name));
    ends.iter().for_each(|end| mkfifo(end, Mode::S_IRWXU).unwrap());
    let value = format!("pipe,id=p,path={}", paths.join("pipe").display());
    let qemu = Qemu::start(&paths, &["-chardev", &value]);
    let checkpoint = checkpoint(&paths);
    ["test.qmp", "vm.qmp", "serial"].iter().for_each(|name| fs::remove_file(paths.join(name)).unwrap());
    let error = restored::restore(&checkpoint).err().unwrap();
    let named = format!("{} is in use by process {}", ends[0].display(), qemu.pid());
    assert!(error.kind() == ErrorKind::Start && error.to_string().contains(&named), "{error}");
    drop(qemu);
    // The program at the other end is none of QEMU's.
    let other_end = fs::File::options().read(true).write(true).open(&ends[0]).unwrap();
    let mut other = Command::new("sleep").arg("1000").stdin(other_end.try_clone().unwrap()).spawn().unwrap();
    let restored = restored::restore(&checkpoint);
    other.kill().unwrap();
    other.wait().unwrap();
    drop(restored.unwrap());
}

#[test]
fn the_end_of_an_original_that_was_killed_is_waited_for() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &PLAIN);
    let checkpoint = checkpoint(&paths);
    kill(Pid::from_raw(qemu.pid()), Signal::SIGKILL).unwrap();
    let _restored = restored::restore(&checkpoint).unwrap();
    paths.wait_for_steps(1);
}
