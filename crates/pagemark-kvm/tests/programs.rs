//! Programs run in the machine and outside of it, with equal output and exit status.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const MACHINE: &str = env!("CARGO_BIN_EXE_pagemark-kvm");

/// Why programs cannot run in the machine here, if so.
fn lacking() -> Option<String> {
    static LACKING: OnceLock<Option<String>> = OnceLock::new();
    let check = || {
        let output = Command::new(MACHINE).arg("--check").output().expect("the program of this crate");
        (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
    };
    LACKING.get_or_init(check).clone()
}

macro_rules! need_machine {
    () => {
        if let Some(reason) = lacking() {
            pagemark_testing::skip!("no machine under KVM: {reason}");
        }
    };
}

/// Also a test of the library, for the mechanism outside.
#[path = "../../pagemark/tests/store_encodings.rs"]
mod store_encodings;
#[path = "programs/trackers.rs"]
mod trackers;

/// Runs a command to its end, with nothing on its standard input.
fn output(mut command: Command) -> Output {
    let deadline = Instant::now() + pagemark_testing::patience();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let read = |from: &mut dyn std::io::Read| {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).expect("a pipe");
        bytes
    };
    let (stdout, stderr) = std::thread::scope(|scope| {
        let stdout = scope.spawn(|| read(&mut out));
        let stderr = scope.spawn(|| read(&mut err));
        while child.try_wait().expect("our child").is_none() {
            if Instant::now() > deadline {
                let _ = child.kill();
                panic!("{command:?} does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        (stdout.join().expect("no panic"), stderr.join().expect("no panic"))
    });
    Output { status: child.wait().expect("our child"), stdout, stderr }
}

/// Runs `program` outside and inside, in `dir`.
fn both(program: &Path, arguments: &[&str], dir: &Path) -> (Output, Output) {
    let run = |mut command: Command| {
        output({
            command.args(arguments).current_dir(dir).env("LC_ALL", "C");
            command
        })
    };
    let outside = run(Command::new(program));
    let mut inside = Command::new(MACHINE);
    inside.arg(program);
    (outside, run(inside))
}

/// Asserts that `program` does the same outside and inside.
#[track_caller]
fn same(program: impl AsRef<Path>, arguments: &[&str], dir: &Path) {
    let program = program.as_ref();
    let (outside, inside) = both(program, arguments, dir);
    let text = |output: &Output| {
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        format!("{}\n{stdout}\n--- standard error:\n{stderr}", output.status)
    };
    let is_same = (outside.status, &outside.stdout, &outside.stderr) == (inside.status, &inside.stdout, &inside.stderr);
    assert!(is_same, "{program:?} {arguments:?}\noutside: {}\ninside: {}", text(&outside), text(&inside));
}

/// A program of the system; the test is skipped without it.
macro_rules! program {
    ($name:literal) => {
        match find($name) {
            Some(path) => path,
            None => pagemark_testing::skip!("there is no {}", $name),
        }
    };
}

#[path = "programs/differences.rs"]
mod differences;
#[path = "programs/execution.rs"]
mod execution;
#[path = "programs/large.rs"]
mod large;

fn find(name: &str) -> Option<PathBuf> {
    ["/usr/bin", "/bin", "/usr/local/bin"].iter().map(|dir| Path::new(dir).join(name)).find(|path| path.is_file())
}

/// The C programs of `tests/programs`, with what the compiler needs for them.
const PROGRAMS: [(&str, &[&str]); 39] = [
    ("memory", &[]),
    ("memory", &["-static"]),
    ("memory", &["-no-pie"]),
    ("memory", &["-static-pie"]),
    ("messages", &[]),
    ("signals", &[]),
    ("threads", &["-pthread"]),
    ("links", &[]),
    ("guards", &[]),
    ("time", &["-pthread"]),
    ("children", &["-pthread"]),
    ("descriptors", &["-pthread"]),
    ("vectors", &["-mavx", "-pthread"]),
    ("rights", &[]),
    ("inherits", &[]),
    ("userfault", &["-pthread"]),
    ("killed", &["-pthread"]),
    ("wild", &[]),
    ("monitor", &[]),
    ("missing", &[]),
    ("injected", &["-shared", "-fPIC"]),
    ("secure", &[]),
    ("execution", &[]),
    ("leader", &["-pthread"]),
    ("forks", &[]),
    ("stack", &[]),
    ("limits", &["-pthread"]),
    ("breakpoint", &["-pthread"]),
    ("vsyscall", &[]),
    ("counted", &["-shared", "-fPIC"]),
    ("differences", &["-pthread"]),
    ("differences", &["-pthread", "-static"]),
    ("corners", &[]),
    ("masks", &[]),
    ("missing_pages", &["-pthread"]),
    ("unreadable", &[]),
    ("stream", &[]),
    ("failing", &["-pthread"]),
    ("served", &["-pthread"]),
];

/// Where there are compiled programs, for a computer that has no compiler.
const COMPILED: &str = "PAGEMARK_TEST_PROGRAMS";

/// A program of [`PROGRAMS`], compiled in `dir`.
fn compiled(name: &str, dir: &Path, flags: &[&str]) -> PathBuf {
    assert!(PROGRAMS.contains(&(name, flags)), "{name} with {flags:?} is not in the list");
    match std::env::var_os(COMPILED) {
        Some(directory) => place(Path::new(&directory), name, flags),
        None => compile(name, dir, flags),
    }
}

/// Where a program is in a directory of several.
fn place(directory: &Path, name: &str, flags: &[&str]) -> PathBuf {
    directory.join(name.to_owned() + &flags.concat())
}

fn compile(name: &str, directory: &Path, flags: &[&str]) -> PathBuf {
    let program = place(directory, name, flags);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).with_extension("c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-w", "-o"]).arg(&program).arg(&source).args(flags);
    assert!(compiler.status().expect("a C compiler").success(), "{source:?} does not compile");
    program
}

#[test]
#[ignore = "a machine of the lab that has no compiler needs it"]
fn all_programs_compile() {
    let directory = PathBuf::from(std::env::var_os(COMPILED).expect("a directory for the programs"));
    std::fs::create_dir_all(&directory).expect("a directory");
    for (name, flags) in PROGRAMS {
        compile(name, &directory, flags);
    }
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn is_root() -> bool {
    let mut id = Command::new("id");
    id.arg("-u");
    output(id).stdout == b"0\n"
}

#[test]
fn static_programs() {
    need_machine!();
    let busybox = program!("busybox");
    let dir = dir();
    std::fs::write(dir.path().join("text"), "c\na\nb\na\n".repeat(5000)).expect("a file");
    same(&busybox, &["echo", "hello"], dir.path());
    same(&busybox, &["sha256sum", "text"], dir.path());
    same(&busybox, &["sort", "-u", "text"], dir.path());
    same(&busybox, &["wc", "text"], dir.path());
    same(&busybox, &["grep", "-c", "a", "text"], dir.path());
    same(&busybox, &["awk", "{ n[$1]++ } END { for (k in n) print k, n[k] | \"cat\" }", "/dev/null"], dir.path());
    same(&busybox, &["ls", "-l", "/usr"], dir.path());
    same(&busybox, &["cat", "missing"], dir.path());
    same(&busybox, &["false"], dir.path());
    same(&busybox, &["readlink", "-f", "/proc/self/exe"], dir.path());
}

#[test]
fn dynamic_programs() {
    need_machine!();
    let dir = dir();
    std::fs::write(dir.path().join("text"), "the same line\n".repeat(20_000)).expect("a file");
    for (name, arguments) in [
        ("ls", &["-la", "/usr/bin"][..]),
        ("sha256sum", &["text"]),
        ("gzip", &["-c", "text"]),
        ("sort", &["text"]),
        ("stat", &["-c", "%s %F", "text"]),
        ("seq", &["1", "20000"]),
        ("sed", &["-n", "s/same/other/p;5q", "text"]),
        ("test", &["1", "-eq", "2"]),
        ("date", &["-u", "-d", "@0"]),
        ("realpath", &["/proc/self/exe"]),
    ] {
        let Some(program) = find(name) else { continue };
        same(program, arguments, dir.path());
    }
}

#[test]
fn the_arguments_of_a_program_are_shown() {
    need_machine!();
    let dir = tempfile::tempdir().expect("a directory");
    same(program!("cat"), &["/proc/self/cmdline", "/proc/self/environ"], dir.path());
    // A shell that has executed another program, and a child.
    let script =
        "cat /proc/self/cmdline; exec sh -c 'cat < /proc/$$/cmdline; cat < /proc/self/cmdline' name 'an argument' ''";
    same(program!("sh"), &["-c", script], dir.path());
    // The title of a process is what it writes over its arguments.
    let title = "\
import ctypes
fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
ctypes.memset(int(fields[45]), ord('x'), 3)
print(open('/proc/self/cmdline').read())
";
    same(program!("python3"), &["-c", title], dir.path());
}

#[test]
fn large_programs() {
    need_machine!();
    let dir = dir();
    std::fs::write(dir.path().join("data"), [7; 100_000]).expect("a file");
    let sql = "create table t(a, b); with recursive c(x) as (values(1) union all select x+1 from c where x<2000) \
               insert into t select x, x*x from c; select sum(b), count(*) from t; select sqlite_version();";
    same(program!("sqlite3"), &["file.db", &format!("{sql} drop table t;")], dir.path());
    same(program!("openssl"), &["sha512", "data"], dir.path());
    let python = program!("python3");
    let code = "import sys, math, zlib, json, re\n\
                d = {str(i): [i, math.sqrt(i)] for i in range(5000)}\n\
                s = json.dumps(d, sort_keys=True)\n\
                print(len(s), zlib.crc32(s.encode()), json.loads(s) == d, len(re.findall('1[0-9]+', s)))\n\
                print(sys.argv, 0.1 + 0.2, 10**50)\n\
                sys.exit(7)";
    same(&python, &["-c", code, "argument"], dir.path());
    same(&python, &["-c", "import ctypes; ctypes.string_at(8)"], dir.path());
}

#[test]
fn calls_on_memory() {
    need_machine!();
    let dir = dir();
    same(compiled("memory", dir.path(), &[]), &[], dir.path());
    same(compiled("memory", dir.path(), &["-static"]), &[], dir.path());
    same(compiled("memory", dir.path(), &["-no-pie"]), &[], dir.path());
    same(compiled("memory", dir.path(), &["-static-pie"]), &[], dir.path());
}

#[test]
fn messages() {
    need_machine!();
    let dir = dir();
    same(compiled("messages", dir.path(), &[]), &[], dir.path());
}

#[test]
fn signals() {
    need_machine!();
    let dir = dir();
    same(compiled("signals", dir.path(), &[]), &[], dir.path());
}

#[test]
fn masks_of_calls() {
    need_machine!();
    let dir = dir();
    same(compiled("masks", dir.path(), &[]), &[], dir.path());
}

#[test]
fn corners_of_calls() {
    need_machine!();
    let dir = dir();
    same(compiled("corners", dir.path(), &[]), &[], dir.path());
}

#[test]
fn threads() {
    need_machine!();
    let dir = dir();
    same(compiled("threads", dir.path(), &["-pthread"]), &[], dir.path());
}

/// A process goes on without its first thread.
#[test]
fn programs_whose_first_thread_has_ended() {
    need_machine!();
    let dir = dir();
    same(compiled("leader", dir.path(), &["-pthread"]), &[], dir.path());
}

/// A thread that cannot be made takes nothing away from the machine.
#[test]
fn threads_that_cannot_be_made() {
    need_machine!();
    if !is_root() {
        pagemark_testing::skip!("needs root to give it up");
    }
    let dir = dir();
    let (outside, inside) = both(&compiled("failing", dir.path(), &["-pthread"]), &[], dir.path());
    assert_eq!(String::from_utf8_lossy(&inside.stdout), String::from_utf8_lossy(&outside.stdout), "{inside:?}");
    assert_eq!(inside.status, outside.status);
}

#[test]
fn links_to_the_program() {
    need_machine!();
    let dir = dir();
    same(compiled("links", dir.path(), &[]), &[], dir.path());
}

#[test]
fn memory_of_which_nobody_says_that_it_can_be_read() {
    need_machine!();
    let dir = dir();
    same(compiled("unreadable", dir.path(), &[]), &[], dir.path());
}

#[test]
fn pages_behind_the_end_of_files() {
    need_machine!();
    let dir = dir();
    same(compiled("missing_pages", dir.path(), &["-pthread"]), &[], dir.path());
}

#[test]
fn guard_pages() {
    need_machine!();
    let dir = dir();
    same(compiled("guards", dir.path(), &[]), &[], dir.path());
}

#[test]
fn time() {
    need_machine!();
    let dir = dir();
    let program = compiled("time", dir.path(), &["-pthread"]);
    same(&program, &[], dir.path());
    // What replaces the kernel's data ends its use.
    let mut without = Command::new(MACHINE);
    without.arg(&program).arg("without");
    let without = output(without);
    let text = String::from_utf8_lossy(&without.stdout);
    assert!(without.status.success(), "{text}");
    let mut whole = Command::new(MACHINE);
    whole.args([program.as_os_str(), "1".as_ref()]);
    let whole = output(whole);
    let whole = String::from_utf8_lossy(&whole.stdout);
    // The same lines, but for those of the argument.
    let from = |text: &str| text.split_once("clock 0").map(|(_, rest)| rest.to_owned());
    if !text.starts_with("no vDSO") {
        assert_eq!(from(&text).expect("clocks"), from(&whole).expect("clocks"));
    }
}

#[test]
fn children() {
    need_machine!();
    let dir = dir();
    same(compiled("children", dir.path(), &["-pthread"]), &[], dir.path());
}

/// Where a child has no machine, because of a limit that its parent has set, `fork` fails.
#[test]
fn children_at_limits() {
    need_machine!();
    if !is_root() {
        pagemark_testing::skip!("needs root to give it up");
    }
    let dir = dir();
    let program = compiled("forks", dir.path(), &[]);
    let exceeded = ", then: Resource temporarily unavailable; 0 were killed\n";
    // A machine has a thread of KVM, which the limit counts too: even and odd ones are exceeded by
    // the one and by the other.
    let processes = libc::RLIMIT_NPROC.to_string();
    for limit in ["12", "13"] {
        let (outside, inside) = both(&program, &[&processes, limit], dir.path());
        for output in [outside, inside] {
            assert_eq!(String::from_utf8_lossy(&output.stdout), format!("some children{exceeded}"), "{output:?}");
            assert!(output.status.success(), "{output:?}");
        }
    }
    let files = libc::RLIMIT_NOFILE.to_string();
    same(&program, &[&files, "40"], dir.path());
    let (_, inside) = both(&program, &[&files, "0"], dir.path());
    assert_eq!(String::from_utf8_lossy(&inside.stdout), format!("no children{exceeded}"), "{inside:?}");
    assert!(String::from_utf8_lossy(&inside.stderr).contains("a child has no machine"), "{inside:?}");
}

#[test]
fn stacks_follow_their_limit() {
    need_machine!();
    let dir = dir();
    same(compiled("stack", dir.path(), &[]), &[], dir.path());
}

/// What the monitor has is neither data of the program nor at its addresses.
#[test]
fn programs_that_limit_their_memory() {
    need_machine!();
    let dir = dir();
    let program = compiled("limits", dir.path(), &["-pthread"]);
    same(&program, &[], dir.path());
    same(&program, &["addresses"], dir.path());
    // Who started the machine may have set one that can be raised.
    let run = |machine: Option<&str>| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -Sv 614400; exec \"$@\"", "sh"]).args(machine).arg(&program).arg("given");
        output(command)
    };
    assert_eq!(run(Some(MACHINE)), run(None));
}

/// A breakpoint that its file does not have is not the program's.
#[test]
fn breakpoints_of_others_are_taken_out() {
    need_machine!();
    let dir = dir();
    let program = compiled("breakpoint", dir.path(), &["-pthread"]);
    let (untouched, _) = both(&program, &[], dir.path());
    let (_, inside) = both(&program, &["breakpoint"], dir.path());
    assert_eq!((inside.status, &inside.stdout), (untouched.status, &untouched.stdout), "{inside:?}");
    let text = String::from_utf8_lossy(&inside.stderr);
    assert!(text.contains("a breakpoint in its code that its file does not have"), "{text}");
}

/// Has the host's kernel trace a function of `$0`, and runs it outside and by `$1`.
const TRACED: &str = r#"
mkdir tracing && mount -t tracefs none tracing && test -e tracing/uprobe_events || exit 77
offset=0x$(nm "$0" | awk '$3 == "traced" { print $1 }')
event=pagemark_$$
echo "p:$event/traced $0:$(printf 0x%x $offset)" >> tracing/uprobe_events || exit 77
echo 1 > tracing/events/$event/traced/enable
"$0"; echo "status $?"
"$1" "$0"; echo "status $?"
echo 0 > tracing/events/$event/traced/enable
echo "-:$event/traced" >> tracing/uprobe_events
"#;

#[test]
fn programs_that_are_traced_by_uprobes() {
    need_machine!();
    if !is_root() || find("nm").is_none() {
        pagemark_testing::skip!("needs root, and nm");
    }
    let dir = dir();
    let program = compiled("breakpoint", dir.path(), &["-pthread"]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", TRACED]).arg(&program).arg(MACHINE).current_dir(dir.path());
    let output = output(command);
    if output.status.code() == Some(77) {
        pagemark_testing::skip!("no uprobes here: {}", String::from_utf8_lossy(&output.stderr));
    }
    let once = "10, a child 0x700\nstatus 0\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), once.repeat(2), "{output:?}");
}

#[test]
fn calls_by_the_page_at_the_end() {
    need_machine!();
    let dir = dir();
    same(compiled("vsyscall", dir.path(), &[]), &[], dir.path());
}

/// A program that has as many files open as it may still gets threads and children.
#[test]
fn programs_without_free_descriptors() {
    need_machine!();
    let dir = dir();
    same(compiled("descriptors", dir.path(), &["-pthread"]), &[], dir.path());
}

#[test]
fn shells() {
    need_machine!();
    let dir = dir();
    let script = "echo a; (exit 3); echo $?; seq 1 2000 | sort -n | tail -1; yes | head -2; x=$(echo sub); echo $x; \
                  for i in 1 2 3; do echo $i; done | while read i; do echo \"<$i>\"; done; sleep 0.05 & wait; \
                  trap 'echo trapped' USR1; kill -USR1 $$; echo text | tr a-z A-Z > file; cat file; exit 4";
    for shell in ["sh", "bash", "busybox"] {
        let Some(shell) = find(shell) else { continue };
        let arguments: &[&str] = if shell.ends_with("busybox") { &["sh", "-c", script] } else { &["-c", script] };
        same(shell, arguments, dir.path());
    }
}

#[test]
fn python_with_threads_and_children() {
    need_machine!();
    let dir = dir();
    let code = "import threading, subprocess, os, multiprocessing\n\
                results = []\n\
                def work(i): results.append(sum(k * i for k in range(20000)))\n\
                threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]\n\
                [t.start() for t in threads]; [t.join() for t in threads]\n\
                print(sorted(results))\n\
                print(subprocess.run(['echo', 'hi'], capture_output=True))\n\
                try: subprocess.run(['/nonexistent'])\n\
                except OSError as e: print(e)\n\
                with multiprocessing.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2, 3]))\n";
    same(program!("python3"), &["-c", code], dir.path());
}

/// The registers of AVX survive all that leaves the program, and signal frames have them.
#[test]
fn vector_registers() {
    need_machine!();
    if !is_x86_feature_detected!("avx") {
        pagemark_testing::skip!("the processor has no AVX");
    }
    let dir = dir();
    same(compiled("vectors", dir.path(), &["-mavx", "-pthread"]), &[], dir.path());
}

/// A program that gives up root loses the right to `/dev/kvm`. Its children, and programs that it
/// executes, run in the machine nevertheless.
#[test]
fn programs_that_lose_the_right_to_kvm() {
    need_machine!();
    if !is_root() {
        pagemark_testing::skip!("needs root to give it up");
    }
    let dir = dir();
    same(compiled("rights", dir.path(), &[]), &[], dir.path());
}

/// Ignored signals, closed descriptors and limits come through, also when the program executes
/// another.
#[test]
fn what_the_caller_leaves_to_the_program() {
    need_machine!();
    let dir = dir();
    let program = compiled("inherits", dir.path(), &[]);
    for caller in [
        "exec \"$@\"",
        "trap '' PIPE; exec \"$@\"",
        "trap '' HUP INT PIPE; ulimit -n 64; exec \"$@\"",
        "exec \"$@\" <&-",
        "exec \"$@\" <&- 2>&-",
        "ulimit -n 12; exec \"$@\"",
    ] {
        let run = |machine: Option<&str>| {
            let mut command = Command::new("sh");
            command.args(["-c", caller, "sh"]).args(machine).arg(&program).arg("again");
            output(command)
        };
        let (outside, inside) = (run(None), run(Some(MACHINE)));
        assert!(outside.status.success() && !outside.stdout.is_empty(), "{caller}: {outside:?}");
        assert_eq!(inside, outside, "{caller}");
    }
}

/// Missing pages, and write protection that waits for a thread of the program.
#[test]
fn faults_that_the_program_serves() {
    need_machine!();
    let dir = dir();
    same(compiled("userfault", dir.path(), &["-pthread"]), &[], dir.path());
}

/// A child that shares the memory may be killed while the monitor changes what is mapped.
#[test]
fn killed_children_that_share_memory() {
    need_machine!();
    let dir = dir();
    same(compiled("killed", dir.path(), &["-pthread"]), &[], dir.path());
}

/// Programs that do what is not allowed die as they do outside, and the machine survives them.
#[test]
fn wild_programs() {
    need_machine!();
    let dir = dir();
    let program = compiled("wild", dir.path(), &[]);
    let kernel = format!("{:#x}", 0x6000_0000_0000u64 + 0x1000);
    for arguments in [
        &["jump", "0"][..],
        &["jump", "0x8000000000000000"],
        &["jump", "0x600000004000"],
        &["jump", &kernel],
        &["read", "0x7fff00000000"],
        &["read", &kernel],
        &["write", &kernel],
        &["write", "0xffffff0000000000"],
        &["stack", "0x600000001000"],
        &["ud2"],
        &["int3"],
        &["int"],
        &["int1"],
        &["int 3"],
        &["hlt"],
        &["cr3", "0x1000"],
        &["lidt"],
        &["wrmsr"],
        &["out", "0x11"],
        &["out", "0x2e"],
        &["out", "0x80"],
        &["iret", "0x401000"],
        &["segment", "0x18"],
        &["abort"],
        &["flags"],
        &["rsp", "0x600000002000"],
        &["gs"],
        &["sysret", "0x600000004000"],
    ] {
        same(&program, arguments, dir.path());
    }
}

/// System calls neither read nor write the monitor's memory, and the program cannot close its
/// descriptors.
#[test]
fn the_monitor_is_out_of_reach() {
    need_machine!();
    let dir = dir();
    let program = compiled("monitor", dir.path(), &[]);
    let mut command = Command::new(MACHINE);
    command.arg(&program);
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{} {text} {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(text.lines().count() >= 10 && text.lines().all(|line| line.ends_with("refused")), "{text}");
}

/// Reports do not get into files of the program, nor does one that nobody reads end it.
#[test]
fn reports_go_to_the_stream_alone() {
    need_machine!();
    let dir = dir();
    let program = compiled("stream", dir.path(), &[]);
    for arguments in [&[][..], &["broken"], &["executed"]] {
        same(&program, arguments, dir.path());
    }
}

/// Who makes the pages that `mmap` asks for may access memory meanwhile.
#[test]
fn a_program_serves_the_file_that_it_maps() {
    need_machine!();
    let dir = dir();
    let program = compiled("served", dir.path(), &["-pthread"]);
    same(&program, &[], dir.path());
}

/// What the machine does not have is reported by name, and the program goes on.
#[test]
fn missing_calls_are_reported() {
    need_machine!();
    let dir = dir();
    let program = compiled("missing", dir.path(), &[]);
    let mut command = Command::new(MACHINE);
    command.arg(&program);
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {text}", output.status);
    for call in ["ptrace", "bpf", "seccomp", "prctl", "number 999"] {
        assert_eq!(text.matches(&format!("the system call {call}")).count(), 1, "{call}: {text}");
    }
    assert_eq!(text.lines().count(), 5, "{text}");
}

#[test]
fn programs_that_cannot_be_started() {
    need_machine!();
    let dir = dir();
    let path = dir.path().join("file");
    let run = |path: &Path| {
        let mut command = Command::new(MACHINE);
        command.arg(path);
        let output = output(command);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, text) = run(&dir.path().join("missing"));
    assert!(status == Some(127) && text.contains("No such file"), "{text}");
    std::fs::write(&path, "no program").expect("a file");
    let (status, text) = run(&path);
    assert!(status == Some(126) && text.contains("Permission denied"), "{text}");
    pagemark_testing::executable(&path, b"no program");
    let (status, text) = run(&path);
    assert!(status == Some(126) && text.contains("Exec format error"), "{text}");
    // A file of another class says what the machine does not have.
    let mut header = vec![0u8; 64];
    header[..6].copy_from_slice(b"\x7fELF\x01\x01");
    header[18] = 3;
    pagemark_testing::executable(&path, &header);
    let (status, text) = run(&path);
    assert!(status == Some(126) && text.contains("32 bits"), "{text}");
}

/// Without `/dev/kvm`, or without the right to it, the error says what would enable it.
#[test]
fn a_machine_without_kvm_says_what_would_help() {
    if !Path::new("/dev/kvm").exists() {
        let text = lacking().expect("there is no /dev/kvm");
        assert!(text.contains("/dev/kvm") && text.contains("kvm_intel"), "{text}");
        return;
    }
    if !is_root() {
        pagemark_testing::skip!("needs root to hide /dev/kvm");
    }
    let hidden = |shell: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", shell, MACHINE]);
        let output = output(command);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, text) = hidden("mount -t tmpfs none /dev && exec \"$0\" /bin/true");
    assert!(status == Some(125) && text.contains("open /dev/kvm") && text.contains("kvm_intel"), "{text}");
    let (status, text) = hidden("mount --bind /dev/null /dev/kvm && exec \"$0\" /bin/true");
    assert!(status == Some(125) && text.contains("/dev/kvm is not the device of KVM"), "{text}");
}
