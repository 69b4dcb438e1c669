//! Exports of checkpoints for other programs.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs::File;
use std::process::{Command, Stdio};

use pagemark_process::criu::Criu;
use pagemark_testing::skip;
use subject::{NOBODY, Steps, Subject, assert_fails, has_criu, is_root};
use support::{Pagemark, kill_and_wait};

#[test]
fn plain_criu_restores_an_export() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let pagemark = Pagemark::new();
    let steps = Steps::new(pagemark.directory());
    let Some(mut subject) = Subject::start(&steps.arguments(4)) else { skip!("no C compiler") };
    let pid = subject.pid();
    // The first checkpoint has all memory, the second the changes. The export contains both.
    steps.goes_on(pid);
    pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    steps.goes_on(pid);
    let at_checkpoint = steps.pause();
    pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    steps.resume();
    steps.goes_on(pid);
    subject.kill();

    if is_root() {
        // Who owns the directory could exchange the images.
        let others = pagemark.directory().join("others");
        std::fs::create_dir(&others).expect("a directory");
        std::os::unix::fs::chown(&others, Some(NOBODY), None).expect("root may do this");
        let output = pagemark.output(&["export", "subject@2", "--criu", others.to_str().expect("UTF-8")]);
        assert_fails(&output, &["other users can change it"]);
    }
    let directory = pagemark.directory().join("images");
    let told = pagemark.done(&["export", "subject@2", "--criu", directory.to_str().expect("UTF-8")]);
    let (_, line) = told.split_once("`criu ").expect("it tells how to use it");
    let arguments = line.split_once('`').expect("it tells all of it").0.split(' ');
    steps.order_pause();
    let output = File::create(pagemark.directory().join("criu.log")).expect("a log file");
    let mut criu = Command::new(Criu::find().expect("it was found before").path())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(output.try_clone().expect("one more"))
        .stderr(output)
        .spawn()
        .expect("CRIU starts");
    steps.is_paused_at(at_checkpoint);
    steps.resume();
    steps.goes_on(pid);
    kill_and_wait(pid);
    criu.wait().expect("our child");
}
