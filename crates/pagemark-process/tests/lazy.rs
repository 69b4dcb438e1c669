//! A program that runs before its memory is there.

mod support;

use pagemark_process::criu::DumpOptions;
use pagemark_process::lazy;
use pagemark_process::restore::{RestoreOptions, Streams};
use pagemark_testing::wait_until;
use support::{Program, criu, is_running, take};

/// Holds 64 MiB, and when told to, checks them all.
const HOLDER: &str = r#"
import os, time
block = [bytes([i % 251 + 1]) * 65536 for i in range(1024)]
count = os.open('count.new', os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
os.pwrite(count, b'%-20d' % 0, 0)
os.rename('count.new', 'count')
n = 0
while True:
    n += 1
    os.pwrite(count, b'%-20d' % n, 0)
    if os.path.exists('check'):
        right = all(block[i] == bytes([i % 251 + 1]) * 65536 for i in range(1024))
        open('checked', 'w').write('right' if right else 'wrong')
        os.remove('check')
    time.sleep(0.005)
"#;

#[test]
fn a_program_runs_before_its_memory_is_there() {
    let Some(criu) = criu() else { return };
    let mut program = Program::python(HOLDER);
    wait_until("the program counts", || program.read("count").is_some());
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let directory = tempfile::tempdir().unwrap();
    let prepared = lazy::prepare(&taken.manifest, &taken.store, directory.path()).unwrap();
    let options = RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() };
    let restored = prepared.run(&criu, &taken.store, &options).unwrap();
    program.adopt(restored.restored());
    assert!(is_running(program.pid()));
    // Its memory is not there yet: it comes while the program already checks it.
    std::fs::write(program.directory().join("check"), "").unwrap();
    let mut last = 0;
    let delivered = restored.deliver(&mut |pages| last = pages).unwrap();
    assert_eq!(delivered, last);
    assert!(delivered > 64 << 20 >> 12, "{delivered}");
    wait_until("the memory is checked", || program.read("checked").is_some());
    assert_eq!(program.read("checked").as_deref(), Some("right"));
    let before: u64 = program.read("count").unwrap().parse().unwrap();
    wait_until("the program counts on", || program.read("count").unwrap().parse::<u64>().unwrap() > before + 5);
}

#[test]
fn a_program_whose_memory_is_lost_is_killed() {
    let Some(criu) = criu() else { return };
    let mut program = Program::python(HOLDER);
    wait_until("the program counts", || program.read("count").is_some());
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
