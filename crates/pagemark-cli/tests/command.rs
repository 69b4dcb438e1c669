//! Messages and exit statuses of the command that need no checkpoint.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// Runs `pagemark` with a repository of its own, which does not exist yet.
struct Pagemark {
    home: TempDir,
}

impl Pagemark {
    fn new() -> Self {
        Pagemark { home: TempDir::new().expect("a temporary directory") }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark"));
        command.env("PAGEMARK_REPO", self.repository()).env_remove("XDG_DATA_HOME").stdin(Stdio::null());
        command
    }

    fn repository(&self) -> std::path::PathBuf {
        self.home.path().join("repository")
    }

    /// Starts `pagemark run` of a shell that runs `script`. Returns it, and the lines that the
    /// shell prints.
    fn run_script(&self, script: &str) -> (Child, impl Iterator<Item = String> + use<>) {
        let mut child = self
            .command()
            .args(["run", "--memory-only", "--quiet", "--every", "1h", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("pagemark starts");
        let output = BufReader::new(child.stdout.take().expect("it is a pipe"));
        (child, output.lines().map_while(Result::ok))
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().expect("pagemark starts")
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that the command failed with `status`, and printed a reason that contains `text` to
/// stderr, and nothing to stdout.
#[track_caller]
fn assert_fails(output: &Output, status: i32, text: &str) {
    let told = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{told}");
    assert!(told.contains(text), "{text:?} is not in {told:?}");
    assert_eq!(stdout(output), "");
}

#[test]
fn wrong_usage_ends_with_2() {
    let pagemark = Pagemark::new();
    for arguments in [
        &[][..],
        // A single checkpoint watches no files.
        &["checkpoint", "1", "--files", "open"],
        &["no-such-command"],
        &["run"],
        &["run", "--every", "soon", "--", "true"],
        &["run", "--every", "0s", "--", "true"],
        &["run", "--mechanism", "magic", "--", "true"],
        &["run", "--keep-last", "0", "--", "true"],
        &["attach"],
        &["attach", "x"],
        &["diff", "a@1"],
        &["diff", "a@x", "a@2"],
        &["export", "a"],
        &["export", "a", "--core", "x", "--criu", "y"],
        &["export", "a", "--qemu", "x", "--criu", "y"],
        &["restore", "--json"],
        &["show", "@3"],
    ] {
        let output = pagemark.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
    }
    let output = pagemark.run(&["run", "--mechanism", "magic", "--", "true"]);
    assert!(stderr(&output).contains("pagemap-scan"), "the mechanisms are not named: {}", stderr(&output));
    assert!(!pagemark.repository().exists());
}

#[test]
fn measurements_are_another_program() {
    let pagemark = Pagemark::new();
    for arguments in [&["bench"][..], &["bench", "region", "--mib", "1"], &["bench", "--help"]] {
        let output = pagemark.run(arguments);
        assert_fails(&output, 2, "`pagemark-bench`");
        assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    }
    assert!(!stdout(&pagemark.run(&["--help"])).contains("bench"));
}

#[test]
fn without_a_repository_the_message_names_the_option() {
    let pagemark = Pagemark::new();
    for arguments in [
        &["log"][..],
        &["log", "redis"],
        &["restore"],
        &["restore", "redis"],
        &["show", "redis@1"],
        &["diff", "redis@1", "redis@2"],
        &["verify"],
        &["prune", "--keep-last", "1"],
        &["export", "redis", "--core", "core"],
    ] {
        let output = pagemark.run(arguments);
        assert_fails(&output, 1, "pagemark: there is no repository at");
        assert!(stderr(&output).contains("\nhelp: "), "{arguments:?} gives no help: {}", stderr(&output));
        assert!(!pagemark.repository().exists(), "{arguments:?} made a repository");
    }
}

#[test]
fn prune_requires_a_number_to_keep() {
    assert_fails(&Pagemark::new().run(&["prune"]), 2, "no number and no period of checkpoints to keep");
}

#[test]
fn processes_that_cannot_be_attached_to_are_named() {
    let pagemark = Pagemark::new();
    // The number is larger than the kernel's largest process id.
    for pid in ["4194305", "0"] {
        assert_fails(&pagemark.run(&["attach", pid]), 1, &format!("there is no process {pid}"));
        assert_fails(&pagemark.run(&["checkpoint", pid]), 1, &format!("there is no process {pid}"));
    }
    assert!(!pagemark.repository().exists());
    for command in ["attach", "checkpoint", "top"] {
        let output = pagemark.run(&[command, "1"]);
        assert_eq!(output.status.code(), Some(1), "{command}: {}", stderr(&output));
        assert!(stderr(&output).starts_with("pagemark: cannot "), "{}", stderr(&output));
    }
}

#[test]
fn a_program_that_cannot_start_ends_as_in_a_shell() {
    let pagemark = Pagemark::new();
    let missing = pagemark.run(&["run", "--memory-only", "--", "/no/such/program"]);
    assert_fails(&missing, 127, "cannot start /no/such/program");
    assert_fails(&pagemark.run(&["run", "--memory-only", "--", "/"]), 126, "cannot start /");
}

#[test]
fn a_program_runs_as_if_by_itself() {
    let pagemark = Pagemark::new();
    let script = "echo out; echo err >&2; pwd; echo \"$VALUE\"; cat; exit 7";
    let mut command = pagemark.command();
    command.args(["run", "--memory-only", "--quiet", "--every", "1h", "--", "sh", "-c", script]);
    command
        .env("VALUE", "of the environment")
        .current_dir("/usr")
        .stdin(std::fs::File::open("/proc/self/comm").expect("Linux"));
    let output = command.output().expect("pagemark starts");
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let lines: Vec<_> = stdout(&output).lines().map(str::to_owned).collect();
    assert_eq!(lines[..3], ["out", "/usr", "of the environment"]);
    assert_eq!(lines.len(), 4, "stdin was not the program's: {lines:?}");
    assert_eq!(stderr(&output), "err\n");
}

#[test]
fn the_last_word_goes_to_stderr_alone() {
    let output = Pagemark::new().run(&["run", "--memory-only", "--every", "1h", "--", "echo", "out"]);
    assert!(output.status.success());
    assert_eq!(stdout(&output), "out\n");
    assert_eq!(stderr(&output), "pagemark: no checkpoint of echo was taken\n");
}

#[test]
fn a_signal_that_ends_the_program_is_in_the_status() {
    let output = Pagemark::new().run(&["run", "--memory-only", "--quiet", "--", "sh", "-c", "kill -KILL $$"]);
    assert_eq!(output.status.code(), Some(128 + 9));
}

#[test]
fn signals_to_pagemark_reach_the_program() {
    let pagemark = Pagemark::new();
    let script = "trap 'echo usr1' USR1; trap 'echo term; exit 3' TERM; echo ready; while :; do sleep 0.01; done";
    let (mut child, mut lines) = pagemark.run_script(script);
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    assert_eq!(lines.next().as_deref(), Some("ready"));
    // A shell cannot trap SIGHUP if it was started with the signal ignored, as by nohup.
    nix::sys::signal::kill(pid, nix::sys::signal::SIGUSR1).expect("it runs");
    assert_eq!(lines.next().as_deref(), Some("usr1"));
    nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM).expect("it runs");
    assert_eq!(lines.next().as_deref(), Some("term"));
    assert_eq!(child.wait().expect("it is ours").code(), Some(3));
}

#[test]
fn doctor_names_every_mechanism() {
    let output = Pagemark::new().run(&["doctor", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let findings: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let mechanisms = findings["mechanisms"].as_array().expect("a list");
    for name in ["ldt", "adaptive", "pagemap-scan", "soft-dirty", "compare", "full"] {
        let found = mechanisms.iter().find(|found| found["mechanism"] == name).unwrap_or_else(|| panic!("no {name}"));
        let works = found["works"].as_bool().expect("true or false");
        if name == "ldt" {
            assert_eq!(findings["auto"] == "ldt", works, "it costs the least where it works: {findings}");
        }
        assert_eq!(found["reason"].is_null(), works, "{found}");
        assert_eq!(found["collect_ns"].is_number(), works, "{found}");
    }
    assert!(findings["criu"]["text"].is_string());
    let machine = &findings["process_machine"];
    assert!(
        machine["works"].is_boolean() && machine["text"].as_str().is_some_and(|text| text.contains("kvm")),
        "{machine}"
    );
    let told = stdout(&Pagemark::new().run(&["doctor"]));
    assert!(told.contains("mechanism") && told.contains("pagemap-scan"), "{told}");
    assert!(told.contains("CRIU") && told.contains("KVM"), "{told}");
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let pagemark = Pagemark::new();
    for shell in ["bash", "zsh", "fish"] {
        let output = pagemark.run(&["completions", shell]);
        assert!(output.status.success() && stdout(&output).contains("doctor"), "{shell}");
    }
    let directory = pagemark.home.path().join("man");
    assert!(pagemark.run(&["man", &directory.display().to_string()]).status.success());
    for command in [
        "",
        "-run",
        "-attach",
        "-checkpoint",
        "-restore",
        "-log",
        "-show",
        "-diff",
        "-verify",
        "-prune",
        "-export",
        "-top",
        "-doctor",
    ] {
        let page = directory.join(format!("pagemark{command}.1"));
        let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        // The page of all commands has none.
        assert!(command.is_empty() || text.contains(".SH EXAMPLES\n"), "{} has no examples", page.display());
        assert!(!text.contains(".SH EXTRA"), "{}", page.display());
    }
    let output = pagemark.run(&["man", "/proc/nothing"]);
    assert_fails(&output, 1, "cannot write manual pages into /proc/nothing");
}

#[test]
fn a_reader_that_goes_away_is_no_crash() {
    let pagemark = Pagemark::new();
    let binary = Path::new(env!("CARGO_BIN_EXE_pagemark")).display().to_string();
    let script = format!("{binary} completions bash | true; {binary} doctor | true");
    let output =
        Command::new("sh").args(["-c", &script]).env("PAGEMARK_REPO", pagemark.repository()).output().expect("sh");
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_stopped_job_is_continued_whole() {
    use nix::sys::signal::{Signal, kill};
    let pagemark = Pagemark::new();
    // The child of the program must resume too.
    let script = "sh -c 'while :; do echo child; sleep 0.01; done'; :";
    let (mut child, mut lines) = pagemark.run_script(script);
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    assert_eq!(lines.next().as_deref(), Some("child"));
    kill(pid, Signal::SIGTSTP).expect("it runs");
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is not gone");
        stat.rsplit(") ").next().and_then(|rest| rest.chars().next())
    };
    while state() != Some('T') {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    kill(pid, Signal::SIGCONT).expect("it is stopped");
    // More bytes than a pipe holds.
    for _ in 0..20 {
        assert_eq!(lines.next().as_deref(), Some("child"));
    }
    // The signal goes to the program alone. Its child ends when the pipe has no reader: before the
    // signal has come, the program would go on behind it.
    kill(pid, Signal::SIGTERM).expect("it runs");
    assert_eq!(child.wait().expect("it is ours").code(), Some(128 + 15));
    drop(lines);
}

/// A job with such a name could have no checkpoint.
#[test]
fn a_wrong_name_of_a_job_is_refused_before_the_program_starts() {
    let pagemark = Pagemark::new();
    let file = pagemark.home.path().join("file");
    for name in ["a/b", "..", "", ".hidden", "a b"] {
        for arguments in [
            &["run", "--job", name, "--", "touch", file.to_str().expect("UTF-8")][..],
            &["checkpoint", "--job", name, "1"],
        ] {
            let output = pagemark.run(arguments);
            let told = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{name:?}: {told}");
            assert!(told.contains("a job cannot be called"), "{name:?}: {told}");
        }
    }
    assert!(!file.exists(), "the program was started");
}

#[test]
fn memory_that_a_program_has_saved_is_shown_and_not_taken_for_a_process() {
    let pagemark = Pagemark::new();
    let repository = pagemark::repository::Repository::open_or_create(&pagemark.repository()).expect("a repository");
    let region = pagemark::Region::new(4 * pagemark::PAGE_SIZE).expect("a region");
    region.write(5000, b"saved").expect("the region is written");
    region.save(&repository, "saved").expect("the region is saved");
    drop(repository);
    let shown = stdout(&pagemark.run(&["show", "saved"]));
    assert!(shown.contains("memory that a program has saved") && shown.contains("region 0"), "{shown}");
    assert_fails(&pagemark.run(&["restore", "saved"]), 1, "the program opens it, with the library");
    let (core, criu) = (pagemark.home.path().join("core"), pagemark.home.path().join("images"));
    let [core, criu] = [&core, &criu].map(|path| path.to_str().expect("the path is text"));
    assert_fails(&pagemark.run(&["export", "--core", core, "saved"]), 1, "saved@1 holds no process");
    assert_fails(&pagemark.run(&["export", "--criu", criu, "saved"]), 1, "holds memory that a program has saved");
    assert_fails(&pagemark.run(&["fork", "saved"]), 2, "no checkpoint of a virtual machine");
    assert!(!Path::new(core).exists() && !Path::new(criu).exists());
}
