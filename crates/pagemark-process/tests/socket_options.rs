//! The options and multicast groups of sockets, before a checkpoint and after a restore, as the
//! program reads them.

mod support;

use pagemark_process::criu::DumpOptions;
use pagemark_process::restore::{RestoreEvent, RestoreOptions, Streams};
use pagemark_testing::{assert_oracle, wait_until};
use support::{Checkpoints, Program, criu, is_running, take};

/// Sockets of several kinds, with all options set that the kernel permits. Asked by the file
/// `ask.N`, the program writes into `seen.N` what it reads of each option.
const SOCKETS: &str = include_str!("trackee/socket_options.py");

/// What the program reads of its sockets, asked for the time `number`.
fn options(program: &Program, number: u32) -> String {
    std::fs::write(program.directory().join(format!("ask.{number}")), "").unwrap();
    let seen = format!("seen.{number}");
    wait_until("the program reads its options", || program.read(&seen).is_some() || !is_running(program.pid()));
    program.read(&seen).expect("the program runs")
}

/// The lines that differ.
fn changes(before: &str, after: &str) -> Vec<String> {
    assert_eq!(before.lines().count(), after.lines().count());
    before
        .lines()
        .zip(after.lines())
        .filter(|(before, after)| before != after)
        .map(|(a, b)| format!("{a}, then {b}"))
        .collect()
}

#[test]
fn sockets_keep_their_options() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(SOCKETS);
    let before = options(&program, 0);
    // Those that are not as in a new socket.
    assert!(before.lines().filter(|line| line.contains("set")).count() > 80, "{before}");
    assert!(before.contains("True") && !before.contains("False"), "{before}");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    for is_lazy in [false, true] {
        let restore = checkpoints.restoring(&checkpoint, &checkpoints.criu).lazy(is_lazy);
        let mut lost_state = Vec::new();
        let restored = restore.run(&mut |event| {
            if let RestoreEvent::Running(restored) = event {
                program.adopt(restored);
                lost_state = restored.lost_state.clone();
            }
        });
        restored.unwrap();
        assert_eq!(lost_state, Vec::<String>::new());
        let lost = changes(&before, &options(&program, 1));
        assert_oracle!(lost.is_empty(), "options of sockets, lazy {is_lazy}: {lost:#?}");
        // The next restore begins at the same checkpoint.
        std::fs::remove_file(program.directory().join("seen.1")).unwrap();
        program.kill();
    }
}

#[test]
fn sockets_keep_their_options_without_a_gate() {
    let Some(criu) = criu() else { return };
    let mut program = Program::python(SOCKETS);
    let before = options(&program, 0);
    let taken = take(&criu, program.pid(), &DumpOptions { keep_connections: true, ..DumpOptions::default() });
    program.kill();
    let options_of_restore = RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() };
    let restored = taken.restore(&criu, &options_of_restore);
    assert_eq!(restored.lost_state, Vec::<String>::new());
    program.adopt(&restored);
    let lost = changes(&before, &options(&program, 1));
    assert_oracle!(lost.is_empty(), "options of sockets: {lost:#?}");
    program.kill();
}
