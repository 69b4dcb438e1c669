//! Programs that write a large part of their memory all the time, with the strategy copy-on-write.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use pagemark_testing::{assert_oracle, assert_unviolated, in_own_session, rounds, skip, wait_for};
use support::{Pagemark, Restored, children, is_alive, kill_tree, now_unix_us};

/// Pages that the program writes in each round: more than are copied in a freeze.
const PAGES: u64 = 8192;

/// A program in Python that checks and rewrites a value in each page, again and again. It has a
/// mapping that it keeps from its children, which it checks and writes, too. None without Python.
fn program() -> Option<Vec<String>> {
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    let python = String::from_utf8(python.stdout).expect("UTF-8").trim().to_owned();
    let program = format!(
        "
import mmap, os
def memory(pages):
    return mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
shown, hidden, wiped = memory({PAGES}), memory(64), memory(64)
hidden.madvise(mmap.MADV_DONTFORK)
wiped.madvise(18)
number = 0
while True:
    for mapping in shown, hidden, wiped:
        for at in range(0, len(mapping), 4096):
            found = int.from_bytes(mapping[at:at + 8], 'little')
            if found != number:
                open('violated', 'w').write(f'{{at}} is {{found}} in round {{number}}')
                os._exit(1)
            mapping[at:at + 8] = (number + 1).to_bytes(8, 'little')
    number += 1
    with open('progress', 'a') as progress:
        progress.write(f'ok {{number}}\\n')
"
    );
    Some(vec![python, "-c".to_owned(), program])
}

fn goes_on(of: &Path, pid: i32, when: &str) {
    let before = rounds(of);
    wait_for(&format!("{when}: the program to go on"), || {
        assert_unviolated(of);
        assert_oracle!(is_alive(pid), "{when}: the program has ended");
        (rounds(of) > before + 2).then_some(())
    });
}

/// What a program that writes all the time did cost.
fn comes_back(strategy: &str) -> Option<serde_json::Value> {
    let program = program()?;
    let pagemark = Pagemark::new();
    let of = pagemark.directory().to_owned();
    let options = ["--every", "300ms", "--job", "job", "--strategy", strategy];
    let mut runner = pagemark.run(&options, &program);
    let target = runner.target();
    goes_on(&of, target, "at the begin");
    for _ in 0..4 {
        pagemark.checkpoint_after("job", now_unix_us());
        goes_on(&of, target, "after a checkpoint");
        assert_eq!(children(target), [0; 0], "a child is left");
    }
    assert!(!pagemark.log().contains("no checkpoint"), "{}", pagemark.log());
    runner.kill();
    kill_tree(target);

    let shown = pagemark.json(&["show", "--json", "job"]);
    let restored = pagemark.json(&["restore", "--detach", "--json", "job"]);
    let pid = restored["pid"].as_i64().expect("a process id") as i32;
    let restored = Restored::new(pid);
    goes_on(&of, restored.0, "restored");
    pagemark.done(&["checkpoint", "--job", "job", "--strategy", strategy, &pid.to_string()]);
    goes_on(&of, restored.0, "restored and checkpointed");
    pagemark.verify(&[]);
    let log = pagemark.done(&["log", "job"]);
    assert!(log.contains("strategy"), "{log}");
    Some(shown["cost"].clone())
}

#[test]
fn a_program_that_writes_all_the_time_comes_back() {
    let Some(cost) = comes_back("copy-on-write") else { skip!("no Python") };
    let count = |name: &str| cost[name].as_u64().unwrap_or_else(|| panic!("{name}: {cost}"));
    assert!(count("concurrent_pages") >= PAGES, "{cost}");
    assert!(count("frozen_pages") < PAGES, "{cost}");
}

#[test]
fn it_comes_back_whatever_is_chosen_for_each_checkpoint() {
    if comes_back("auto").is_none() {
        skip!("no Python");
    }
}

#[test]
fn a_program_whose_memory_cannot_be_copied_is_left_alone() {
    let Some(program) = program() else { skip!("no Python") };
    let pagemark = Pagemark::new();
    let of = pagemark.directory().to_owned();
    let mut filtered = Command::new("python3");
    let filter = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Instruction(ctypes.Structure):
    _fields_ = [('code', ctypes.c_ushort), ('jt', ctypes.c_ubyte), ('jf', ctypes.c_ubyte), ('k', ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.POINTER(Instruction))]
allow = (Instruction * 1)(Instruction(0x06, 0, 0, 0x7fff0000))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(1, allow)), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
";
    filtered.args(["-c", filter]).args(&program).current_dir(&of).stdin(Stdio::null());
    let mut child = in_own_session(&mut filtered).spawn().expect("Python");
    let pid = child.id() as i32;
    goes_on(&of, pid, "at the begin");
    let checkpoint =
        |strategy| pagemark.output(&["checkpoint", "--job", "job", "--strategy", strategy, &pid.to_string()]);
    let refused = checkpoint("copy-on-write");
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("seccomp filter"), "{message}");
    assert!(message.contains("use the strategy pre-copy"), "{message}");
    goes_on(&of, pid, "refused");
    let taken = checkpoint("pre-copy");
    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
    goes_on(&of, pid, "checkpointed in another way");
    child.kill().expect("a child");
    child.wait().expect("a child");
}

#[test]
fn memory_alone_has_no_copy_on_write() {
    let pagemark = Pagemark::new();
    let own = std::process::id().to_string();
    let refused = pagemark.output(&["checkpoint", "--memory-only", "--strategy", "copy-on-write", &own]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("--memory-only"), "{message}");
}
