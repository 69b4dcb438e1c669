//! Programs that know nothing of the heap run with it, with the same results.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pagemark_testing::{assert_oracle, assert_oracle_eq, in_machine};

/// The library, which Cargo puts beside the tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libpagemark_malloc.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

fn preloaded(program: impl AsRef<OsStr>, parts: usize) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).env("PAGEMARK_HEAP_PARTS", parts.to_string());
    command
}

/// What a program prints that succeeds.
fn printed(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {status}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// What a program prints that ends with an error if something that it wrote is not saved.
fn checked(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_oracle!(status.success(), "{command:?}: {status}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

#[test]
fn the_functions_behave_as_those_of_the_c_library() {
    let directory = tempfile::tempdir().unwrap();
    let (source, program) =
        (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/allocator.c"), directory.path().join("program"));
    // The compiler runs with the heap, too.
    printed(
        preloaded("cc", 4).args(["-O1", "-fno-builtin", "-Wall", "-Werror", "-pthread", source, "-o"]).arg(&program),
    );
    for parts in [1, 2, 4, 8] {
        for (name, value) in
            [("PAGEMARK_HEAP_TRACKED", "0"), ("PAGEMARK_HEAP_TRACKED", "1"), ("PAGEMARK_HEAP_POPULATE", "0")]
        {
            let text = printed(preloaded(&program, parts).env(name, value));
            assert_oracle_eq!(text, "right\n", "{parts} parts, {name}={value}");
        }
    }
}

/// A program of the tests that is linked with the library, compiled into a directory.
fn program_in_c(name: &str, directory: &Path) -> PathBuf {
    let (library, program) = (library(), directory.join("program"));
    let libraries = library.parent().unwrap().display();
    let mut compiler = Command::new("cc");
    compiler
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/include"));
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)).arg("-o").arg(&program);
    // Cargo's variable for libraries names another directory, which may have an older one.
    compiler.args([format!("-L{libraries}"), format!("-Wl,--disable-new-dtags,-rpath,{libraries}")]);
    compiler.arg("-lpagemark_malloc");
    printed(&mut compiler);
    program
}

#[test]
fn a_program_in_c_saves_all_that_it_writes() {
    let directory = tempfile::tempdir().unwrap();
    let program = program_in_c("checkpoints.c", directory.path());
    for parts in [1, 4, 8] {
        for strategy in ["separate", "by-history", "by-cost"] {
            let text = checked(Command::new(&program).arg(strategy).env("PAGEMARK_HEAP_PARTS", parts.to_string()));
            if text == "not supported\n" {
                pagemark_testing::skip!("the kernel cannot track a heap");
            }
            assert_oracle_eq!(text, "all was saved\n", "{parts} parts, {strategy}");
        }
    }
    let outside = printed(Command::new(&program).args(["separate", "two-level"]));
    assert_eq!(outside, "not supported\n", "without a machine");
}

#[test]
fn a_program_forks_while_its_threads_track_and_save_the_heap() {
    let directory = tempfile::tempdir().unwrap();
    let program = program_in_c("forks.c", directory.path());
    for parts in [1, 4] {
        let mut command = Command::new(&program);
        // A small heap, because each fork copies it.
        let text = printed(command.env("PAGEMARK_HEAP_PARTS", parts.to_string()).env("PAGEMARK_HEAP_GIB", "1"));
        if text == "not supported\n" {
            pagemark_testing::skip!("the kernel cannot track a heap");
        }
        assert_oracle_eq!(text, "all forked\n", "{parts} parts");
    }
}

#[test]
fn a_program_in_c_saves_all_that_it_writes_in_a_machine() {
    let directory = tempfile::tempdir().unwrap();
    let program = program_in_c("checkpoints.c", directory.path());
    let inside = |keeps: &str, parts: usize, arguments: &[&str]| {
        let command = in_machine(&[&[program.to_str().unwrap()], arguments].concat(), keeps)?;
        let mut inside = Command::new(&command[0]);
        Some(checked(inside.args(&command[1..]).env("PAGEMARK_HEAP_PARTS", parts.to_string())))
    };
    for (parts, arguments) in [
        (4, &["by-cost"][..]),
        (1, &["by-cost", "two-level"]),
        (4, &["separate", "two-level"]),
        (8, &["by-history", "two-level"]),
    ] {
        let Some(text) = inside("log", parts, arguments) else { return };
        assert_oracle_eq!(text, "all was saved\n", "{parts} parts, {arguments:?}");
    }
    let Some(text) = inside("rings", 4, &["separate", "two-level"]) else { return };
    assert_eq!(text, "not supported\n", "with rings");
}

#[test]
fn a_program_forks_whatever_it_does_with_sigsegv() {
    let directory = tempfile::tempdir().unwrap();
    let (source, program) = (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/segv.c"), directory.path().join("program"));
    printed(Command::new("cc").args(["-O1", "-Wall", "-Werror", "-pthread", source, "-o"]).arg(&program));
    for parts in [1, 4] {
        let text = printed(preloaded(&program, parts).env("PAGEMARK_HEAP_GIB", "1"));
        assert_oracle_eq!(text, "right\n", "{parts} parts");
    }
}

#[test]
fn a_program_locks_what_it_uses() {
    let directory = tempfile::tempdir().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/locked.c");
    let program = directory.path().join("program");
    // GCC leaves out a call of malloc whose object is only written.
    printed(Command::new("cc").args(["-O1", "-fno-builtin", "-Wall", "-Werror", source, "-o"]).arg(&program));
    for parts in [1, 4, 8] {
        // A heap that would fit if all of it was locked.
        let text = printed(preloaded(&program, parts).env("PAGEMARK_HEAP_GIB", "1"));
        if text == "not permitted\n" {
            pagemark_testing::skip!("memory cannot be locked");
        }
        assert_oracle_eq!(text, "right\n", "{parts} parts");
    }
}

#[test]
fn python_runs_with_it() {
    if !is_installed("python3") {
        pagemark_testing::skip!("no python3");
    }
    let program = "
import hashlib, json, os, subprocess, threading
table = {str(i): list(range(i % 50)) for i in range(20000)}
assert json.loads(json.dumps(table)) == table
child = os.fork()
if child == 0:
    table['more'] = 1
    os._exit(len(table) != 20001)
assert os.waitpid(child, 0)[1] == 0 and len(table) == 20000
threads = [threading.Thread(target=lambda: [bytes(i) for i in range(3000)]) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout.strip())
print(hashlib.sha256(json.dumps(table).encode()).hexdigest())
";
    let expected = printed(Command::new("python3").args(["-c", program]));
    for parts in [1, 8] {
        // Objects of Python's own allocator are in mappings; with `malloc`, all are on the heap.
        let output = printed(preloaded("python3", parts).env("PYTHONMALLOC", "malloc").args(["-c", program]));
        assert_eq!(output, expected);
    }
}

/// In a child, the C library uses the open streams of a program with threads before any handler.
/// The signal that this raises is handled although the alternate stack is in the heap.
#[test]
fn a_child_begins_although_the_alternate_signal_stack_is_on_the_heap() {
    if !is_installed("python3") {
        pagemark_testing::skip!("no python3");
    }
    let program = "
import ctypes, os, threading
open_stream = ctypes.CDLL(None).fopen
open_stream.restype = ctypes.c_void_p
assert open_stream(b'/dev/null', b'r')
threading.Thread(target=threading.Event().wait, daemon=True).start()
child = os.fork()
if child == 0:
    os._exit(7)
print(os.waitpid(child, 0)[1] >> 8, flush=True)
os._exit(0)
";
    let mut command = preloaded("python3", 4);
    let output = printed(command.env("PYTHONMALLOC", "malloc").args(["-X", "faulthandler", "-c", program]));
    assert_eq!(output, "7\n");
}

#[test]
fn sqlite_runs_with_it() {
    if !is_installed("sqlite3") {
        pagemark_testing::skip!("no sqlite3");
    }
    let directory = tempfile::tempdir().unwrap();
    let statements = "create table t(a integer primary key, b text);
        with recursive c(x) as (select 1 union all select x + 1 from c where x < 50000)
            insert into t select x, hex(x * 7919) from c;
        create index i on t(b);
        delete from t where a % 3 = 0;
        pragma integrity_check;
        select count(*), sum(a), max(b), group_concat(b) from t where a % 100 = 1;";
    let run = |mut command: Command, name: &str| printed(command.arg(directory.path().join(name)).arg(statements));
    let expected = run(Command::new("sqlite3"), "plain");
    assert!(expected.starts_with("ok\n"));
    assert_eq!(run(preloaded("sqlite3", 4), "preloaded"), expected);
}

#[test]
fn a_program_whose_heap_cannot_be_made_does_not_start() {
    let refused = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(127), "{command:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&mut preloaded("true", 3)).contains("must be 1, 2, 4 or 8"));
    let mut limited = preloaded("sh", 4);
    limited.env_remove("LD_PRELOAD").args(["-c", "ulimit -v 4000000; LD_PRELOAD=$0 exec true"]).arg(library());
    assert!(refused(&mut limited).contains("PAGEMARK_HEAP_GIB"));
    limited.env("PAGEMARK_HEAP_GIB", "0");
    assert!(limited.status().unwrap().success());
}

/// The variables of the heap's threads have a place, whatever the program loads: the loader
/// allocates when it makes room for those of other libraries.
#[test]
fn a_program_loads_libraries_with_variables_of_threads() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let (source, program) = (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/libraries.c"), place("program"));
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-O1", "-fno-builtin", "-Wall", "-Werror", "-pthread", source, "-ldl", "-o"]);
    printed(compiler.arg(&program));
    let touch = "static __thread long sum, places[100];\
                 long touch(long value) { places[value % 100] += value; sum = places[value % 100]; return value; }";
    std::fs::write(place("touch.c"), touch).unwrap();
    let first = place("0.so");
    printed(Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).arg(&first).arg(place("touch.c")));
    const LIBRARIES: usize = 150;
    for number in 1..LIBRARIES {
        std::fs::copy(&first, place(&format!("{number}.so"))).unwrap();
    }
    for parts in [1, 4] {
        let mut command = preloaded(&program, parts);
        command.arg(directory.path()).arg(LIBRARIES.to_string()).env("PAGEMARK_HEAP_GIB", "1");
        assert_oracle_eq!(printed(&mut command), "right\n", "{parts} parts");
    }
}
