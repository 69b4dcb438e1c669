//! Names that others choose, in everything that a command writes: none steers the terminal or
//! begins a line.

mod support;

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::process::{Child, Output, Stdio};

use pagemark_report::escape::is_steering;
use support::Pagemark;

/// Colour, the title of the window, a line of its own, a control of the second set, text that runs
/// from right to left.
const NAME: &str = "e\x1b[31m\x1b]0;pwn\x07\nfake line: restored OK\u{9b}2J\u{202e}x";

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_clean(output: &Output, what: &str) {
    for (stream, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        let text = String::from_utf8_lossy(bytes);
        let steers = |character: char| is_steering(character) && !matches!(character, '\n' | '\t');
        assert!(!text.contains(steers), "{what}: {stream} steers the terminal: {text:?}");
        assert!(!text.lines().any(|line| line.starts_with("fake")), "{what}: {stream} has a false line: {text:?}");
    }
}

#[test]
fn a_name_in_the_arguments_does_not_steer_the_terminal() {
    let pagemark = Pagemark::new();
    let repository = pagemark.directory().join(NAME).display().to_string();
    let checkpoint = format!("{NAME}@1");
    let commands: &[&[&str]] = &[
        &[NAME],
        &["run", NAME],
        &["run", "--repo", NAME, "--memory-only", "--", NAME],
        &["run", "--job", NAME, "--", "true"],
        &["attach", NAME],
        &["checkpoint", "--job", NAME, "1"],
        &["checkpoint", &format!("--every={NAME}"), "1"],
        &["restore", NAME],
        &["restore", &format!("job@{NAME}")],
        &["fork", &checkpoint],
        &["log", NAME],
        &["show", &checkpoint],
        &["diff", &checkpoint, &checkpoint],
        &["verify", NAME],
        &["prune", "--keep-last", "1", NAME],
        &["prune", "--keep-last", NAME],
        &["asides", NAME],
        &["export", "--core", NAME, &checkpoint],
        &["top", NAME],
        &["advise", NAME],
        &["vm", "attach", NAME],
        &["vm", "checkpoint", NAME],
        &["vm", "advise", NAME],
        &["vm", "run", "--", NAME],
        &["simulate", NAME],
        &["completions", NAME],
    ];
    for command in commands {
        for options in [&[][..], &["--repo", &repository]] {
            let arguments = [*command, if command.contains(&"--") { &[] } else { options }].concat();
            let output = pagemark.output(&arguments);
            is_clean(&output, &arguments.join(" "));
            assert!(!output.status.success() || command[0] == "run" || command[0] == "asides", "{arguments:?}");
        }
    }
    let mut invalid = pagemark.command(&["log"]);
    let output = invalid.arg(OsString::from_vec(b"a\x9b\xff\x1b[2J".to_vec())).output().expect("it runs");
    is_clean(&output, "bytes that are no text");
}

#[test]
fn a_name_of_a_program_and_its_files_does_not_steer_the_terminal() {
    let pagemark = Pagemark::new();
    let directory = pagemark.directory().join(NAME);
    fs::create_dir(&directory).expect("a directory");
    let program = directory.join(&NAME[..NAME.len() - 4]);
    pagemark_testing::copy_executable("/bin/sleep".as_ref(), &program);
    let mut command = std::process::Command::new(&program);
    command.args(["1000"]).current_dir(&directory).stdin(Stdio::null());
    let running = Killed(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"));
    let pid = running.0.id().to_string();
    let mut job = String::new();
    for _ in 0..2 {
        let output = pagemark.output(&["checkpoint", "--memory-only", &pid]);
        is_clean(&output, "checkpoint");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        job = pagemark.json(&["log", "--json"])[0]["job"].as_str().expect("a name").to_owned();
    }
    let (first, second) = (format!("{job}@1"), format!("{job}@2"));
    for arguments in [
        &["log"][..],
        &["log", "--json"],
        &["log", &job],
        &["log", "--json", &job],
        &["show", &job],
        &["show", "--json", &job],
        &["diff", &first, &second],
        &["diff", "--json", &first, &second],
        &["verify"],
        &["verify", "--json"],
        &["restore", "--detach", &job],
        &["fork", &job],
        &["export", "--core", &directory.join(NAME).join("core").display().to_string(), &job],
        &["export", "--core", &directory.join("core\u{202e}\n").display().to_string(), &job],
        &["prune", "--keep-last", "1", &job],
    ] {
        let output = pagemark.output(arguments);
        is_clean(&output, &arguments.join(" "));
        if arguments.contains(&"--json") {
            let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
            // What is escaped is read as it was.
            let text = document.to_string();
            assert!(arguments[0] != "show" || text.contains("\u{202e}"), "{text}");
        }
    }
}
