//! Programs that `pagemark run` starts in a terminal, and that `restore` gives one again.

#[path = "support/screen.rs"]
mod screen;
#[path = "support/subject.rs"]
mod subject;
mod support;

use std::os::fd::AsRawFd;

use nix::pty::Winsize;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_testing::{assert_oracle, skip, wait_for};
use screen::{Screen, set_size};
use subject::has_criu;
use support::{Pagemark, children, is_alive, kill_and_wait, now_unix_us};

/// The leader of the program's session, a child of Pagemark, and the program.
fn program_of(pagemark: i32) -> i32 {
    wait_for("the program", || {
        let leader = children(pagemark).into_iter().find(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == "pagemark-term")
        });
        children(leader?).into_iter().next()
    })
}

/// Waits until the child of a shell sleeps in the foreground.
fn wait_for_job(shell: i32) {
    wait_for("a job in the foreground", || {
        let job = *children(shell).first()?;
        let stat = std::fs::read_to_string(format!("/proc/{job}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let (state, group, foreground) = (fields[0], fields[2], fields[5]);
        (stat.contains("(sleep)") && state == "S" && group == foreground).then_some(())
    });
}

#[test]
fn a_shell_on_a_terminal_controls_its_jobs_before_and_after_a_restore() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let mut screen = Screen::open(&pagemark);
    let before = screen.mode();
    // Careless programs leave their terminal open in others.
    screen.types("exec 7<>$(tty)\n");
    screen.expect("outer> ");
    screen.types("$PM run --job inner --every 200ms -q -- env PS1='inner> ' bash --norc --noprofile --noediting -i\n");
    screen.expect("inner> ");
    screen.types("answer=4711; echo size $(stty size </dev/tty)\n");
    screen.expect("size 24 80");
    let size = Winsize { ws_row: 40, ws_col: 132, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the structure lives through the call.
    unsafe { set_size(screen.master.as_raw_fd(), &size) }.expect("another size");
    wait_for("the new size", || {
        screen.types("echo size $(stty size </dev/tty) end\n");
        screen.expect(" end\r\n").contains("size 40 132").then_some(())
    });
    let program = program_of(screen.child("pagemark"));
    screen.types("sleep 1000\n");
    wait_for_job(program);
    screen.types("\x1a");
    screen.expect("Stopped");
    screen.expect("inner> ");
    screen.types("fg\n");
    wait_for_job(program);
    screen.types("\x03");
    screen.expect("inner> ");
    screen.types("sleep 2000\n");
    wait_for_job(program);
    pagemark.checkpoint_after("inner", now_unix_us());
    let jobs = children(program);
    kill(Pid::from_raw(program), Signal::SIGKILL).expect("it runs");
    jobs.into_iter().for_each(kill_and_wait);
    screen.expect("outer> ");
    assert_eq!(screen.mode(), before, "the mode of the terminal is not as it was");
    screen.types("echo status $?\n");
    screen.expect("status 137");

    screen.types("$PM restore -q inner\n");
    let runner = screen.child("pagemark");
    // CRIU is a child of the leader, too, until the program is there.
    wait_for("the restored program", || (program_of(runner) == program).then_some(()));
    screen.wait_for_lines(false);
    wait_for_job(program);
    screen.types("\x1a");
    screen.expect("Stopped");
    screen.types("kill %1; wait; echo $answer $(stty size </dev/tty)\n");
    screen.expect("4711 40 132");
    screen.types("exit 5\n");
    screen.expect("outer> ");
    screen.types("echo status $?\n");
    screen.expect("status 5");
    assert_eq!(screen.mode(), before, "the mode of the terminal is not as it was");
}

#[test]
fn the_stop_key_stops_the_job_and_the_shell_continues_it() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let mut screen = Screen::open(&pagemark);
    let before = screen.mode();
    screen.types("$PM run --job cat --every 200ms -q -- cat\n");
    screen.wait_for_lines(false);
    screen.types("a line\n");
    screen.expect("a line\r\na line\r\n");
    for _ in 0..3 {
        screen.types("\x1a");
        screen.expect("Stopped");
        screen.expect("outer> ");
        assert_eq!(screen.mode(), before);
        screen.types("fg\n");
        screen.wait_for_lines(false);
        screen.types("more\n");
        screen.expect("more\r\nmore\r\n");
    }
    // The end of the input.
    screen.types("\x04");
    screen.expect("outer> ");
    screen.types("echo status $?\n");
    screen.expect("status 0");
    assert_eq!(screen.mode(), before);
}

#[test]
fn the_terminal_is_as_before_when_pagemark_is_killed_and_the_program_keeps_running() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let mut screen = Screen::open(&pagemark);
    screen.types("$PM run --job ticks --every 200ms -q -- sh -c 'while :; do echo tick; sleep 0.1; done'\n");
    screen.expect("tick\r\n");
    screen.wait_for_lines(false);
    let runner = screen.child("pagemark");
    let program = program_of(runner);
    screen.types("");
    kill(Pid::from_raw(runner), Signal::SIGKILL).expect("it runs");
    screen.expect("outer> ");
    screen.wait_for_lines(true);
    screen.types("echo $((40 + 2))\n");
    screen.expect("42\r\n");
    screen.types("");
    screen.expect("tick\r\ntick\r\n");
    assert_oracle!(is_alive(program), "the program has ended");
    kill(Pid::from_raw(program), Signal::SIGKILL).expect("it runs");
}
