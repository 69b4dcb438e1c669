//! Targets that cannot be attached to, targets that exit, machines that lack a program, and
//! repositories that are damaged or in use: each is reported, harms no target and loses no
//! checkpoint.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pagemark::backend::{Backend, LeaseMode, Leased, LocalBackend};
use pagemark::repository::Repository;
use pagemark_testing::{pause_32, skip, wait_for};
use subject::{NOBODY, Subject, assert_fails, has_criu, is_root, public_directory, stderr, verifies};
use support::Pagemark;

/// `pagemark checkpoint --memory-only --job subject`, which needs no CRIU.
fn checkpoint(pagemark: &Pagemark, pid: i32) -> Output {
    pagemark.output(&["checkpoint", "--memory-only", "--job", "subject", &pid.to_string()])
}

/// The command as user nobody, with a home of its own.
fn as_nobody(home: &Path) -> Command {
    let program = home.join("pagemark");
    if !program.exists() {
        // Other users may not be permitted to enter the build directory.
        pagemark_testing::executable(&program, &fs::read(env!("CARGO_BIN_EXE_pagemark")).expect("the command"));
        fs::create_dir(home.join("home")).expect("a home");
        std::os::unix::fs::chown(home.join("home"), Some(NOBODY), Some(NOBODY)).expect("its owner");
    }
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY).env_clear().env("HOME", home.join("home")).current_dir("/").stdin(Stdio::null());
    command
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the command runs")
}

#[test]
fn processes_that_are_no_targets_are_refused() {
    let pagemark = Pagemark::new();
    let output = checkpoint(&pagemark, 1);
    assert_fails(&output, &["cannot checkpoint process 1", "attach to one of its services"]);
    assert_fails(&checkpoint(&pagemark, i32::MAX), &["there is no process 2147483647"]);
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        assert_fails(&checkpoint(&pagemark, 2), &["process 2 (kthreadd) is a thread of the kernel"]);
    } else {
        pagemark_testing::skipped("process 2 is no thread of the kernel here");
    }

    let by_shell = |script: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh", env!("CARGO_BIN_EXE_pagemark")]).env("PAGEMARK_REPO", pagemark.repository());
        run(shell.stdin(Stdio::null()))
    };
    let own = by_shell(r#"exec "$1" checkpoint --memory-only --job subject $$"#);
    assert_fails(&own, &["is pagemark itself"]);
    let parent = by_shell(r#""$1" checkpoint --memory-only --job subject $$; exit $?"#);
    assert_fails(&parent, &["has started pagemark", "run pagemark from elsewhere"]);
    verifies(&pagemark);
}

#[test]
fn a_process_of_another_user_is_left_alone() {
    if !is_root() {
        skip!("only root can be somebody else");
    }
    let Some(subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    let home = public_directory();
    for command in ["checkpoint", "attach"] {
        let output = run(as_nobody(home.path()).args([command, "--memory-only", &subject.pid_text()]));
        assert_fails(
            &output,
            &["may not be traced", "it belongs to user 0\nhelp: run pagemark as that user or as root"],
        );
    }
    let output = run(as_nobody(home.path()).args(["top", "--count", "1", &subject.pid_text()]));
    assert_fails(&output, &["may not be traced", "it belongs to user 0"]);
    subject.is_untouched();
}

#[test]
fn a_32_bit_program_is_told() {
    let pagemark = Pagemark::new();
    let Some(mut child) = pause_32(pagemark.directory()) else { return };
    let output = checkpoint(&pagemark, child.id() as i32);
    let lives = support::is_alive(child.id() as i32);
    child.kill().expect("it lives");
    child.wait().expect("our child");
    assert_fails(&output, &["(pause) is a 32-bit program\nhelp: only 64-bit ones can be attached to"]);
    assert!(lives, "it did not survive");
}

#[test]
fn a_filter_against_userfaultfd_is_suspended_or_reported() {
    for mode in ["refuses", "kills"] {
        let Some(subject) = Subject::start(&[mode]) else { skip!("no C compiler") };
        if is_root() {
            let pagemark = Pagemark::new();
            let output = checkpoint(&pagemark, subject.pid());
            assert!(output.status.success(), "{mode}: {}", stderr(&output));
            subject.is_untouched();

            let home = public_directory();
            let subject = Subject::start_as(Some(NOBODY), &[mode]).expect("as before");
            let pid = subject.pid_text();
            let output = run(as_nobody(home.path()).args(["checkpoint", "--memory-only", &pid]));
            assert_fails(&output, &["seccomp filter", "run pagemark as root, or use --mechanism compare"]);
            subject.is_untouched();
            // The command that the message names works.
            let way_out = ["checkpoint", "--memory-only", "--mechanism", "compare", &pid];
            let output = run(as_nobody(home.path()).args(way_out));
            assert!(output.status.success(), "{mode}: {}", stderr(&output));
            subject.is_untouched();
        }
    }
}

#[test]
fn a_process_with_a_userfaultfd_of_its_own_is_refused() {
    if !is_root() {
        skip!("userfaultfd needs root here");
    }
    let Some(subject) = Subject::start(&["userfaultfd"]) else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    assert_fails(
        &pagemark.output(&["checkpoint", "--memory-only", "--mechanism", "pagemap-scan", &subject.pid_text()]),
        &["(subject) uses userfaultfd itself (descriptor", "use --mechanism compare"],
    );
    subject.is_untouched();
    let way_out = ["checkpoint", "--memory-only", "--mechanism", "compare", &subject.pid_text()];
    pagemark.done(&way_out);
    subject.is_untouched();
}

#[test]
fn a_process_under_a_debugger_is_refused() {
    let Some(subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let pid = nix::unistd::Pid::from_raw(subject.pid());
    nix::sys::ptrace::seize(pid, nix::sys::ptrace::Options::empty()).expect("our child");
    let tracer = format!("is traced by process {}", std::process::id());
    assert_fails(&checkpoint(&pagemark, subject.pid()), &[&tracer, "detach that first"]);
    // A tracee must be stopped to be detached.
    nix::sys::ptrace::interrupt(pid).expect("it is ours");
    nix::sys::wait::waitpid(pid, None).expect("it stops");
    nix::sys::ptrace::detach(pid, None).expect("it is stopped");
    subject.is_untouched();
    assert!(checkpoint(&pagemark, subject.pid()).status.success());
    subject.is_untouched();
}

/// Targets that exit at any moment of attaching, copying, freezing and saving.
#[test]
fn targets_that_exit_meanwhile_are_reported() {
    let Some(program) = subject::subject() else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let program = program.display().to_string();
    for round in 0..24 {
        let ms = (round * 29 % 230).to_string();
        let mut arguments = vec!["run", "--every", "20ms", "--job", "run"];
        if !has_criu() {
            arguments.push("--memory-only");
        }
        let output = pagemark.output(&[&arguments[..], &["--", &program, "exits", &ms]].concat());
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(7), "after {ms} ms: {told}");
        assert!(told.lines().last().is_some_and(|line| line.contains("of run")), "after {ms} ms: {told}");
        assert!(!told.contains("panicked"), "{told}");
    }
    let (mut taken, mut gone) = (0, 0);
    for round in 0..24 {
        let mut subject = Subject::start(&["exits", &(round * 13 % 170).to_string()]).expect("as before");
        let pid = subject.pid_text();
        let mut arguments = vec!["checkpoint", "--job", "once", &pid];
        if !has_criu() {
            arguments.push("--memory-only");
        }
        let output = pagemark.output(&arguments);
        if output.status.success() {
            taken += 1;
        } else {
            gone += 1;
            let told = stderr(&output);
            assert_fails(&output, &[&pid]);
            assert!(["there is no process", "is gone", "has exited"].iter().any(|text| told.contains(text)), "{told}");
        }
        assert_eq!(subject.wait(), Some(7), "it did not end as it would have");
    }
    eprintln!("{taken} checkpoints were taken, {gone} targets were gone");
    assert!(gone > 0, "no target exited in time");
    verifies(&pagemark);
}

/// The command without CRIU, or with that CRIU.
fn without_criu(pagemark: &Pagemark, criu: Option<&Path>, arguments: &[&str]) -> Output {
    let empty = pagemark.directory().join("empty");
    fs::create_dir_all(&empty).expect("a directory");
    let mut command = pagemark.command(arguments);
    command.env("PATH", &empty).env("XDG_CACHE_HOME", &empty).env_remove("PAGEMARK_CRIU").stdin(Stdio::null());
    if let Some(criu) = criu {
        command.env("PAGEMARK_CRIU", criu);
    }
    run(&mut command)
}

fn script(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    pagemark_testing::executable(&path, format!("#!/bin/sh\n{text}\n").as_bytes());
    path
}

#[test]
fn without_criu_memory_can_be_saved_and_looked_at() {
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data").display().to_string();
    let Some(subject) = Subject::start(&["data", "1", &data]) else { skip!("no C compiler") };
    let pid = subject.pid_text();
    let old = script(pagemark.directory(), "old", "echo Version: 3.17.1");
    let broken = script(pagemark.directory(), "broken", "echo 'libnet.so.9: no such file' >&2; exit 127");
    for (criu, texts) in [
        (None, &["CRIU was not found", "$PAGEMARK_CRIU", "install CRIU 4.2 or later", "make criu"][..]),
        (Some(Path::new("/nonexistent")), &["/nonexistent does not work here", "No such file"]),
        (Some(&old), &["is CRIU 3.17.1, and 4.2 or later is needed", "make criu"]),
        (Some(&broken), &["does not work here", "libnet.so.9"]),
    ] {
        for arguments in [&["checkpoint", &pid][..], &["attach", &pid], &["run", "--", "true"]] {
            let output = without_criu(&pagemark, criu, arguments);
            assert_fails(&output, texts);
            assert!(stderr(&output).contains("memory alone"), "{}", stderr(&output));
        }
    }
    subject.is_untouched();

    for _ in 0..2 {
        let output = without_criu(&pagemark, None, &["checkpoint", "--memory-only", "--job", "memory", &pid]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
    subject.is_untouched();
    let core = pagemark.directory().join("core");
    for arguments in [
        &["show", "memory@1"][..],
        &["diff", "memory@1", "memory@2"],
        &["log", "memory"],
        &["export", "memory@2", "--core", core.to_str().expect("UTF-8")],
        &["verify"],
    ] {
        let output = without_criu(&pagemark, None, arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    }
    match Command::new("gdb")
        .args(["--batch", "-nx", "-ex", "info registers rip", "-ex", "x/4xb $rsp", "-c"])
        .arg(&core)
        .output()
    {
        Ok(output) => {
            let told = String::from_utf8_lossy(&output.stdout);
            assert!(
                told.contains("rip ") && told.contains("0x7ff") && !stderr(&output).contains("not access"),
                "{told}{}",
                stderr(&output)
            );
        }
        Err(_) => pagemark_testing::skipped("no gdb"),
    }
    // With and without CRIU, an impossible restore is refused before a step is reported.
    let images = pagemark.directory().join("images");
    for (arguments, what) in [
        (&["restore", "memory@2"][..], "cannot restore memory@2"),
        (&["restore", "--lazy", "memory@2"], "cannot restore memory@2"),
        (&["export", "memory@2", "--criu", images.to_str().expect("UTF-8")], "cannot write CRIU's images"),
    ] {
        for output in [pagemark.output(arguments), without_criu(&pagemark, None, arguments)] {
            let told = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{told}");
            assert!(told.starts_with(&format!("pagemark: {what}")), "{told}");
            assert!(told.contains("holds memory alone and cannot be restored"), "{told}");
        }
    }
    assert!(!images.exists(), "a directory for nothing");
    subject.is_untouched();
}

#[test]
fn a_repository_that_is_written_names_the_writer() {
    let Some(subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    assert!(checkpoint(&pagemark, subject.pid()).status.success());
    let repository = Repository::open(&pagemark.repository()).expect("a repository");
    let prunes = || {
        let mut prune = pagemark.command(&["prune", "--keep-last", "1"]);
        let prune = prune.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        prune.spawn().expect("it starts")
    };
    // Writers do not wait for each other. A prune waits for a writer.
    let writer = repository.writer("a test", Duration::from_secs(10)).expect("it writes");
    let mut prune = prunes();
    assert!(checkpoint(&pagemark, subject.pid()).status.success());
    assert!(prune.try_wait().expect("a state").is_none(), "it pruned while another writes");
    drop(writer);
    assert!(prune.wait().expect("it ends").success());

    // Who keeps all others from writing, and shows no progress.
    let backend = LocalBackend::new(&pagemark.repository()).expect("a directory");
    let own = format!("process {} (a test)", std::process::id());
    let Leased::Granted(held) = backend.lease("lock", LeaseMode::Alone, &own).expect("no error") else {
        panic!("it is held")
    };
    // Commands that only read do not wait.
    verifies(&pagemark);
    assert_eq!(pagemark.checkpoints("subject").len(), 1);
    // It waits for half a minute.
    assert_fails(&checkpoint(&pagemark, subject.pid()), &["is held by", &own, "no progress", "try again"]);
    subject.is_untouched();
    drop(held);
    assert!(checkpoint(&pagemark, subject.pid()).status.success());
    verifies(&pagemark);
}

#[test]
fn a_directory_that_is_no_repository_is_left_alone() {
    let Some(subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let repository = pagemark.repository();
    fs::create_dir(&repository).expect("a directory");
    fs::write(repository.join("letter"), "dear").expect("a file");
    for arguments in [&["log"][..], &["verify"], &["restore", "subject"], &["prune", "--keep-last", "1"]] {
        assert_fails(&pagemark.output(arguments), &["is no repository", "--repo DIR"]);
    }
    assert_fails(&checkpoint(&pagemark, subject.pid()), &["holds something else than a repository"]);
    assert_eq!(fs::read_dir(&repository).expect("a directory").count(), 1);
    fs::remove_dir_all(&repository).expect("it goes");

    fs::write(&repository, "a file").expect("a file");
    assert_fails(&checkpoint(&pagemark, subject.pid()), &["cannot open the repository"]);
    assert_fails(&pagemark.output(&["log"]), &["cannot open the repository"]);
    assert_eq!(fs::read_to_string(&repository).expect("a file"), "a file");
    fs::remove_file(&repository).expect("it goes");

    assert!(checkpoint(&pagemark, subject.pid()).status.success());
    let config = repository.join("config");
    let text = fs::read_to_string(&config).expect("its configuration");
    let mut newer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    newer["format"] = 99.into();
    fs::write(&config, newer.to_string()).expect("written");
    for arguments in [&["log"][..], &["verify"], &["restore", "subject"]] {
        assert_fails(
            &pagemark.output(arguments),
            &["has the format 99", "use the version that wrote it, or a later one"],
        );
    }
    assert_fails(&checkpoint(&pagemark, subject.pid()), &["has the format 99"]);
    fs::write(&config, text).expect("written");
    verifies(&pagemark);

    if is_root() {
        // Other users cannot read it.
        let home = public_directory();
        let closed = home.path().join("repository");
        pagemark.done(&["checkpoint", "--memory-only", "--repo", closed.to_str().expect("UTF-8"), &subject.pid_text()]);
        for arguments in [&["log"][..], &["verify"]] {
            let output = run(as_nobody(home.path()).args(arguments).arg("--repo").arg(&closed));
            assert_fails(&output, &["cannot open the repository", "Permission denied"]);
        }
    }
    subject.is_untouched();
}

/// Every file below a directory.
fn files(directory: &Path, list: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files(&path, list) } else { list.push(path) }
    }
}

#[test]
fn damage_to_any_file_is_reported() {
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data").display().to_string();
    let Some(subject) = Subject::start(&["data", "1", &data]) else { skip!("no C compiler") };
    for _ in 0..3 {
        assert!(checkpoint(&pagemark, subject.pid()).status.success());
    }
    let mut all = Vec::new();
    files(&pagemark.repository(), &mut all);
    // The files of leases have no content of the repository.
    let is_lease = |path: &Path| path.ends_with("lock") || path.components().any(|part| part.as_os_str() == "locks");
    all.retain(|path| !is_lease(path));
    assert!(all.len() > 5, "{all:?}");
    let no_panic = |output: &Output, what: &str| {
        let told = stderr(output);
        assert!(matches!(output.status.code(), Some(0 | 1)) && !told.contains("panicked"), "{what}: {told}");
    };
    for path in &all {
        let whole = fs::read(path).expect("a file");
        let content = whole.trim_ascii_end().len();
        let mut damages = vec![whole[..whole.len() / 2].to_vec(), whole[..content - 1].to_vec(), Vec::new()];
        for at in [0, content / 3, content - 1] {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x10;
            damages.push(flipped);
        }
        for (number, damage) in damages.iter().enumerate() {
            let what = format!("damage {number} of {}", path.display());
            fs::write(path, damage).expect("written");
            let output = pagemark.output(&["verify"]);
            no_panic(&output, &what);
            let told = stderr(&output) + &String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.code(), Some(1), "{what} was not noticed: {told}");
            let name = path.file_name().expect("a name").display().to_string();
            assert!(told.contains(&name), "{what} is not named: {told}");
            if number % 2 == 0 {
                for arguments in [&["log"][..], &["show", "subject@1"], &["diff", "subject@1", "subject@3"]] {
                    no_panic(&pagemark.output(arguments), &what);
                }
            }
        }
        fs::write(path, &whole).expect("written");
    }
    verifies(&pagemark);
    assert_eq!(pagemark.checkpoints("subject").len(), 3);
    subject.is_untouched();
}

#[test]
fn impossible_restores_are_refused() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let Some(mut subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let pid = subject.pid_text();
    for _ in 0..3 {
        pagemark.done(&["checkpoint", "--job", "subject", &pid]);
    }
    subject.is_untouched();
    for arguments in
        [&["restore", "subject"][..], &["restore", "--detach", "subject"], &["restore", "--lazy", "subject"]]
    {
        assert_fails(&pagemark.output(arguments), &["cannot restore subject@3", &pid]);
        subject.is_untouched();
    }
    assert_fails(&pagemark.output(&["restore", "subject@99"]), &["has no checkpoint 99", "pagemark log subject"]);
    assert_fails(&pagemark.output(&["restore", "unknown"]), &["job unknown has no checkpoints", "subject"]);
    pagemark.done(&["prune", "--keep-last", "1"]);
    assert_fails(&pagemark.output(&["restore", "subject@1"]), &["has no checkpoint 1", "pagemark log subject"]);
    verifies(&pagemark);

    let target = subject.pid();
    subject.kill();
    pagemark.done(&["restore", "--detach", "subject"]);
    assert!(support::is_alive(target));
    support::kill_and_wait(target);
}

/// A process that has exited keeps its id until its parent has waited for it.
#[test]
fn a_zombie_in_the_way_of_a_restore_is_reported_with_its_parent() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let Some(mut subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    subject.signal(nix::sys::signal::Signal::SIGKILL);
    wait_for("the zombie", || {
        subject::status_field(subject.pid(), "State").is_some_and(|state| state.starts_with('Z')).then_some(())
    });
    let parent = format!("process {}", std::process::id());
    let output = pagemark.output(&["restore", "--detach", "subject"]);
    assert_fails(&output, &[&subject.pid_text(), &parent, "has not waited for this exited child (subject)"]);
    // The parent may take some time.
    let target = subject.pid();
    let mut restore = pagemark.command(&["restore", "--detach", "subject"]).spawn().expect("pagemark starts");
    std::thread::sleep(Duration::from_millis(300));
    subject.kill();
    assert!(restore.wait().expect("our child").success());
    support::kill_and_wait(target);
}

/// A CRIU that is stopped some time after the start of a restore, and then waits for ever.
fn criu_that_stops(directory: &Path, after: Duration) -> PathBuf {
    let criu = pagemark_process::criu::Criu::find().expect("CRIU");
    // The waiting process is made an orphan, because CRIU does not expect children.
    let stop = match after {
        Duration::ZERO => "kill -STOP $$".to_owned(),
        after => format!("( (sleep {}; kill -STOP $$) </dev/null >/dev/null 2>&1 & )", after.as_secs_f64()),
    };
    let text =
        format!("#!/bin/sh\ncase \" $* \" in *' restore '*) {stop};; esac\nexec {} \"$@\"\n", criu.path().display());
    let program = directory.join("criu-that-stops");
    fs::write(&program, text).expect("a script");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("its mode");
    program
}

/// CRIU, or a process that it restores, waits for ever.
#[test]
fn a_restore_that_hangs_is_ended_and_can_be_repeated() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data").display().to_string();
    let Some(mut subject) = Subject::start(&["data", "16", &data]) else { skip!("no C compiler") };
    pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    let target = subject.pid();
    subject.kill();
    let place = pagemark.directory().join("temporary");
    fs::create_dir(&place).expect("a directory");
    let wanted = format!(" restore --no-default-config -D {}", place.display());
    let criu = || {
        let processes = fs::read_dir("/proc").expect("processes").flatten();
        let mut ids = processes.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok());
        ids.find(|&pid: &i32| support::command_line(pid).contains(&wanted))
    };
    for lazy in [false, true] {
        for ms in [0, 10, 30, 60] {
            let mut command = pagemark.command(&["restore", "--detach", "--time-limit", "2s", "subject"]);
            command.args(lazy.then_some("--lazy")).env("TMPDIR", &place);
            command.env("PAGEMARK_CRIU", criu_that_stops(pagemark.directory(), Duration::from_millis(ms)));
            let output = run(command.stdin(Stdio::null()));
            if output.status.success() {
                // CRIU had ended before.
                assert_ne!(ms, 0);
                support::kill_and_wait(target);
                continue;
            }
            let told = stderr(&output);
            assert!(told.contains("did not restore process") && told.contains("within 2 s"), "{told}");
            assert!(told.contains(") is in state T in "), "{told}");
            assert!(!support::is_alive(target), "after {ms} ms something is left: {told}");
            assert_eq!(criu(), None, "after {ms} ms CRIU is left");
        }
    }
    pagemark.done(&["restore", "--detach", "subject"]);
    assert!(support::is_alive(target));
    support::kill_and_wait(target);
}

/// Services have no HOME, and `sudo` may keep that of another user.
#[test]
fn criu_is_found_whatever_home_the_environment_names() {
    let Ok(criu) = pagemark_process::criu::Criu::find() else { skip!("no CRIU to find") };
    let home = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("the user database").expect("this user").dir;
    if !criu.path().starts_with(home.join(".cache")) {
        skip!("CRIU is not in the cache of this user's home");
    }
    let pagemark = Pagemark::new();
    for home in [None, Some("/nonexistent")] {
        let mut command = pagemark.command(&["doctor", "--json"]);
        command.env_remove("PAGEMARK_CRIU").env_remove("XDG_CACHE_HOME").env_remove("HOME").env("PATH", "/usr/bin");
        command.envs(home.map(|home| ("HOME", home))).stdin(Stdio::null());
        let output = run(&mut command);
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(found["criu"]["works"], true, "{home:?}: {found}");
    }
}

/// Messages go to a log on a full disk, or to a reader that has ended.
#[test]
fn messages_that_cannot_be_written_end_nothing() {
    let pagemark = Pagemark::new();
    let full = || Stdio::from(fs::File::options().write(true).open("/dev/full").expect("it is there"));
    let unread = || Stdio::from(std::io::pipe().expect("a pipe").1);
    for messages in [full(), unread()] {
        let mut refused = pagemark.command(&["show", "nothing@1"]);
        let status = refused.stderr(messages).status().expect("the command runs");
        assert_eq!(status.code(), Some(1), "not that of a panic");
    }
    let Some(subject) = Subject::start(&["plain"]) else { skip!("no C compiler") };
    for messages in [full(), unread()] {
        let pid = subject.pid_text();
        let mut taken = pagemark.command(&["checkpoint", "--memory-only", "--job", "subject", &pid]);
        assert!(taken.stderr(messages).status().expect("the command runs").success());
    }
    assert_eq!(Repository::open(&pagemark.repository()).unwrap().checkpoints("subject").unwrap().len(), 2);
    for (results, status, said) in [(full(), 1, "No space left on device"), (unread(), 141, "")] {
        let output = pagemark.command(&["log", "subject"]).stdout(results).stderr(Stdio::piped()).spawn();
        let output = output.and_then(|child| child.wait_with_output()).expect("the command runs");
        assert_eq!(output.status.code(), Some(status));
        let text = stderr(&output);
        assert!(if said.is_empty() { text.is_empty() } else { text.contains(said) }, "{text}");
    }
}
