//! Checkpoints of programs that change their machine of `pagemark-kvm`, and take long for it.

mod support;

use std::time::Duration;

use pagemark_testing::{skip, wait_until};
use support::{Checkpoints, Program, REPORT};

/// Has the description of a machine (`pagemark_kvm_protocol::description`) that was given up, and
/// that a thread makes again until there is a file `done`.
const CHANGES: &str = r#"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int main(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    unsigned *header = mmap((void *)0x540000000000, 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (header == MAP_FAILED) return 1;
    header[2] = 2;
    header[3] = 1;
    memcpy(header, "PMKVMp01", 8);
    report("ready", "ready");
    while (access("done", F_OK)) usleep(10000);
    header[3] = 0;
    for (;;) pause();
}
"#;

/// Longer than CRIU, which waits for the machine, is let wait.
const CHANGE: Duration = Duration::from_secs(12);

#[test]
fn a_checkpoint_waits_for_a_thread_that_is_not_scheduled_in_a_change() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(program) = Program::c(&format!("{REPORT}{CHANGES}")) else { skip!("no C compiler") };
    wait_until("the description", || program.read("ready").is_some());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(CHANGE);
            std::fs::write(program.directory().join("done"), "").unwrap();
        });
        checkpoints.take(&program, &[]);
    });
}
