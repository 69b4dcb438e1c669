//! Programs whose threads are rarely outside of a restartable sequence.

mod support;

use pagemark_testing::{skip, wait_until};
use support::{Checkpoints, Program};

#[test]
fn threads_that_are_rarely_outside_of_a_restartable_sequence_come_back() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = Program::c(include_str!("sequences.c")) else { return };
    wait_until("the threads run", || program.count() > 0 || program.read("none").is_some());
    if program.read("none").is_some() {
        skip!("the C library has no restartable sequences");
    }
    let advance = |program: &Program| {
        program.wait_until_count_exceeds(program.count() + 20);
        program.has_found_nothing_wrong();
    };
    let checkpoint = checkpoints.take(&program, &[&|| advance(&program), &|| advance(&program)]);
    advance(&program);
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    advance(&program);
}
