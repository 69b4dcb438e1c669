//! Restores that deliver memory while the program runs.

mod support;

use pagemark_process::criu::DumpOptions;
use pagemark_process::restore::{RestoreOptions, Streams, lazy};
use pagemark_testing::wait_until;
use support::{Program, criu, is_running, take};

/// A program that holds 64 MiB, and checks them when the file `check` is created.
fn holder() -> Program {
    Program::counter(
        "block = [bytes([i % 251 + 1]) * 65536 for i in range(1024)]",
        r#"
show(n)
if os.path.exists('check'):
    right = all(block[i] == bytes([i % 251 + 1]) * 65536 for i in range(1024))
    open('checked', 'w').write('right' if right else 'wrong')
    os.remove('check')
time.sleep(0.005)
"#,
    )
}

#[test]
fn a_program_runs_before_its_memory_is_there() {
    let Some(criu) = criu() else { return };
    let mut program = holder();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let directory = tempfile::tempdir().unwrap();
    let prepared = lazy::prepare(&taken.manifest, &taken.store, directory.path()).unwrap();
    let options = RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() };
    let restored = prepared.run(&criu, &taken.store, &options).unwrap();
    program.adopt(restored.restored());
    assert!(is_running(program.pid()));
    // The memory is delivered while the program checks it.
    std::fs::write(program.directory().join("check"), "").unwrap();
    let mut last = 0;
    let delivered = restored.deliver(&mut |pages| last = pages).unwrap();
    assert_eq!(delivered, last);
    assert!(delivered > 64 << 20 >> 12, "{delivered}");
    wait_until("the memory is checked", || program.read("checked").is_some());
    assert_eq!(program.read("checked").as_deref(), Some("right"));
    program.wait_until_count_exceeds(program.count() + 5);
}

#[test]
fn a_program_whose_memory_is_lost_is_killed() {
    let Some(criu) = criu() else { return };
    let mut program = holder();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let directory = tempfile::tempdir().unwrap();
    let prepared = lazy::prepare(&taken.manifest, &taken.store, directory.path()).unwrap();
    let options = RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() };
    let restored = prepared.run(&criu, &taken.store, &options).unwrap();
    program.adopt(restored.restored());
    std::fs::write(program.directory().join("check"), "").unwrap();
    drop(restored);
    wait_until("the program is gone", || !support::is_alive(program.pid()));
    assert_ne!(program.read("checked").as_deref(), Some("wrong"));
}
