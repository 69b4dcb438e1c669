//! Saves the state of real programs, kills them, and restores them. Memory is compared bitwise with
//! memory at the freeze.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pagemark_process::criu::{Dump, DumpOptions};
use pagemark_process::restore::{RestoreEvent, RestoreOptions, Streams, prepare};
use pagemark_process::{ErrorKind, Object};
use pagemark_testing::{assert_oracle, assert_oracle_eq, skip, wait_until};
use support::{Checkpoints, Program, criu, is_alive, is_running, read_number, take};

/// A program that changes its memory without a pause, and shows every 2000th number.
fn counter() -> Program {
    let round = "
state[n % 50000] = str(n)
assert len(state) == 50000
if n % 2000 == 0:
    show(n)
";
    Program::counter("state = {i: str(i) * 5 for i in range(50000)}", round)
}

#[test]
fn a_python_program_continues_from_its_checkpoint() {
    let Some(criu) = criu() else { return };
    let mut program = counter();
    let at_checkpoint = program.count();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    let thawed = program.count();
    program.wait_until_count_exceeds(thawed + 10000);
    program.kill();

    let restored = taken.restore(&criu, &RestoreOptions { as_child: true, stopped: true, ..Default::default() });
    assert_eq!(restored.root_pid, program.pid());
    taken.compare(&restored.pids);
    program.adopt(&restored);
    let before = program.count();
    program.resume();
    // The restored program is behind the count that the killed program had reached.
    wait_until("the program counts", || program.count() != before);
    let after = program.count();
    assert!(after >= at_checkpoint && after <= thawed + 2000, "{at_checkpoint} {after} {thawed} {before}");
    program.wait_until_count_exceeds(after + 10000);
    assert!(is_running(program.pid()));
}

#[test]
fn a_dropped_dump_leaves_the_program_running() {
    let Some(criu) = criu() else { return };
    let program = counter();
    for stage in 0..3 {
        let directory = tempfile::tempdir().unwrap();
        let mut dump = Dump::start(&criu, program.pid(), directory.path(), &DumpOptions::default()).unwrap();
        if stage > 0 {
            while !dump.wait_frozen(Duration::from_millis(5)).unwrap() {}
        }
        if stage > 1 {
            dump.wait_state_saved().unwrap();
        }
        drop(dump);
        program.wait_until_count_exceeds(program.count());
        assert_eq!(support::tracer(program.pid()), 0);
    }
    let _ = take(&criu, program.pid(), &DumpOptions::default());
}

#[test]
fn an_impossible_dump_or_restore_names_the_reason() {
    let Some(criu) = criu() else { return };
    let directory = tempfile::tempdir().unwrap();
    let gone = Dump::start(&criu, i32::MAX - 1, directory.path(), &DumpOptions::default());
    assert!(matches!(&gone, Err(error) if error.kind() == ErrorKind::Gone), "{gone:?}");

    let mut program = counter();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    let refused = prepare(&taken.manifest, &taken.store, tempfile::tempdir().unwrap().path());
    let error = refused.unwrap_err();
    assert_eq!((error.kind(), error.object()), (ErrorKind::PidInUse, &Object::Id(program.pid())));
    assert!(error.reason().contains("in use by") && error.reason().contains("python"), "{error}");
    assert!(is_running(program.pid()));

    program.kill();
    let mut hostile = taken.manifest.clone();
    hostile.state[0].name = "../escaped.img".into();
    let refused = prepare(&hostile, &taken.store, tempfile::tempdir().unwrap().path());
    assert!(matches!(&refused, Err(error) if error.kind() == ErrorKind::Damaged), "{refused:?}");
    let mut incomplete = taken.manifest.clone();
    incomplete.spaces.clear();
    let refused = prepare(&incomplete, &taken.store, tempfile::tempdir().unwrap().path());
    assert!(matches!(&refused, Err(error) if error.kind() == ErrorKind::Damaged), "{refused:?}");
}

/// CRIU refuses a descriptor for a process outside the tree.
#[test]
fn a_refusal_of_criu_has_its_reason() {
    let Some(criu) = criu() else { return };
    let program = Program::python(
        "import os, time\nfd = os.pidfd_open(1)\nopen('count', 'w').write('1')\nwhile True: time.sleep(0.01)",
    );
    wait_until("the program is there", || program.read("count").is_some());
    let directory = tempfile::tempdir().unwrap();
    let mut dump = Dump::start(&criu, program.pid(), directory.path(), &DumpOptions::default()).unwrap();
    let error = dump.wait_state_saved().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Criu);
    assert!(error.to_string().contains(&program.pid().to_string()), "{error}");
    let reason = error.reason();
    assert!(!reason.is_empty() && !reason.contains("no error message"), "{reason}");
    drop(dump);
    assert!(is_running(program.pid()));
}

const FAMILY: &str = r#"
import os, sys, time
# The parent sends numbers, the child answers with their squares.
there, back = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(there[1]); os.close(back[0])
    r, w = os.fdopen(there[0]), os.fdopen(back[1], 'w')
    for line in r:
        print(int(line) ** 2, file=w, flush=True)
    os._exit(0)
os.close(there[0]); os.close(back[1])
w, r = os.fdopen(there[1], 'w'), os.fdopen(back[0])
count = os.open('count.new', os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
os.pwrite(count, b'%-20d' % 0, 0)
os.rename('count.new', 'count')
n = 0
while True:
    n += 1
    print(n, file=w, flush=True)
    answer = int(r.readline())
    if answer != n * n:
        open('wrong', 'w').write(f'{n} {answer}')
        os._exit(99)
    if n % 500 == 0:
        os.pwrite(count, b'%-20d' % n, 0)
"#;

#[test]
fn a_family_with_pipes_comes_back() {
    let Some(criu) = criu() else { return };
    let mut program = Program::python(FAMILY);
    for _ in 0..3 {
        wait_until("the program counts", || program.read("count").is_some());
        let taken = take(&criu, program.pid(), &DumpOptions::default());
        assert_eq!(taken.manifest.spaces.len(), 2);
        program.kill();
        let restored = taken.restore(&criu, &RestoreOptions { as_child: true, stopped: true, ..Default::default() });
        taken.compare(&restored.pids);
        program.adopt(&restored);
        program.resume();
        let before: u64 = program.read("count").unwrap().parse().unwrap();
        wait_until("the family counts on", || {
            program.has_found_nothing_wrong();
            program.read("count").unwrap().parse::<u64>().unwrap() > before + 1000
        });
        program.has_found_nothing_wrong();
    }
}

const TORTURE: &str = include_str!("torture.c");

#[test]
fn threads_signals_and_timers_come_back() {
    let Some(criu) = criu() else { return };
    let Some(mut program) = Program::c(TORTURE) else { return };
    for _ in 0..3 {
        wait_until("the program counts", || program.read("count").is_some());
        let taken = take(&criu, program.pid(), &DumpOptions::default());
        program.kill();
        let restored = taken.restore(&criu, &RestoreOptions { as_child: true, stopped: true, ..Default::default() });
        taken.compare(&restored.pids);
        program.adopt(&restored);
        program.resume();
        let before: u64 = program.read("count").unwrap().parse().unwrap();
        wait_until("the program counts on", || {
            assert_oracle!(is_running(program.pid()), "the restored program does not run: {:?}", program.read("wrong"));
            program.read("count").unwrap().parse::<u64>().unwrap() > before + 20
        });
        program.has_found_nothing_wrong();
    }
}

const TALKER: &str = r#"
import sys, time
n = 0
while True:
    n += 1
    print('line', n, flush=True)
    time.sleep(0.01)
"#;

#[test]
fn output_into_a_pipe_goes_to_the_restoring_command() {
    let Some(criu) = criu() else { return };
    let mut program = Program::python_with(TALKER, Stdio::piped());
    let mut lines = BufReader::new(program.stdout());
    assert_eq!(read_number(&mut lines), 1);
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    assert!(read_number(&mut lines) > 1);
    program.kill();
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    // The last line may have been cut by the kill.
    let last_before: u64 = rest.lines().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).max().unwrap_or(2);

    // The restoring command is a process of its own, with a pipe for its output.
    let (mut restorer, restored) = taken.restore_by_command(&criu, Stdio::piped());
    let mut lines = BufReader::new(restorer.stdout.take().unwrap());
    let first = read_number(&mut lines);
    assert!(first >= 2 && first <= last_before + 1, "{first} {last_before}");
    for number in first + 1..first + 20 {
        assert_eq!(read_number(&mut lines), number);
    }
    program.adopt(&restored);
    restorer.wait().unwrap();
    program.kill();

    // A restored program without streams of its own writes to /dev/null and continues.
    let restored =
        taken.restore(&criu, &RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() });
    program.adopt(&restored);
    let target = std::fs::read_link(format!("/proc/{}/fd/1", program.pid())).unwrap();
    assert_eq!(target.to_str(), Some("/dev/null"));
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_running(program.pid()));
}

#[test]
fn a_program_on_a_terminal_gets_the_restoring_commands() {
    let Some(criu) = criu() else { return };
    for own_terminal in [false, true] {
        let terminal = support::Terminal::open();
        let mut program = Program::python_on(TALKER, &terminal, own_terminal);
        let mut lines = terminal.lines();
        assert_eq!(read_number(&mut lines), 1);
        let taken = take(&criu, program.pid(), &DumpOptions::default());
        assert!(read_number(&mut lines) > 1);
        program.kill();
        drop(lines);
        drop(terminal);

        let other = support::Terminal::open();
        let (mut restorer, restored) = taken.restore_on(&criu, &other);
        program.adopt(&restored);
        let mut lines = other.lines();
        let first = read_number(&mut lines);
        for number in first + 1..first + 20 {
            assert_eq!(read_number(&mut lines), number);
        }
        restorer.wait().unwrap();
        program.kill();

        // Detached, without a terminal.
        let restored =
            taken.restore(&criu, &RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() });
        program.adopt(&restored);
        std::thread::sleep(Duration::from_millis(100));
        assert!(is_running(program.pid()));
    }
}

/// Not a test by itself: the restoring command of the tests above, as a process of its own.
#[test]
fn restoring_command() {
    support::restoring_command();
}

/// Not a test by itself: takes dumps until it is killed.
#[test]
fn dumping_command() {
    let Some(pid) = std::env::var("PAGEMARK_TEST_DUMP").ok().and_then(|pid| pid.parse().ok()) else { return };
    let criu = pagemark_process::criu::Criu::find().unwrap();
    println!("ready");
    std::io::stdout().flush().unwrap();
    loop {
        let directory = tempfile::tempdir().unwrap();
        let mut dump = Dump::start(&criu, pid, directory.path(), &DumpOptions::default()).unwrap();
        dump.wait_state_saved().unwrap();
        let memory = support::tree(pid).into_iter().map(|pid| (pid, support::memory(pid))).collect();
        dump.thaw(|| support::populated(&memory)).unwrap();
    }
}

#[test]
fn killed_at_any_instant_it_leaves_the_program_running() {
    let Some(criu) = criu() else { return };
    let Some(program) = Program::c(TORTURE) else { return };
    wait_until("the program counts", || program.read("count").is_some());
    let descriptors = program.descriptors();
    let code = program.executable_mappings();
    for round in 0..60_u64 {
        let mut dumper = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "dumping_command", "--nocapture"])
            .env("PAGEMARK_TEST_DUMP", program.pid().to_string())
            // The leftovers of a killed process are removed with the program's directory.
            .env("TMPDIR", program.directory())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(dumper.stdout.take().unwrap());
        loop {
            let mut line = String::new();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the dumping command ended");
            if line.contains("ready") {
                break;
            }
        }
        // A dump takes some 50 ms: the instants are spread over two of them, a different one each time.
        std::thread::sleep(Duration::from_micros(round * 100_000 / 60 + round * 7919 % 1000));
        dumper.kill().unwrap();
        dumper.wait().unwrap();
        wait_until("nobody traces the program", || support::tracer(program.pid()) == 0);
        let before: u64 = program.read("count").unwrap().parse().unwrap();
        wait_until("the program counts on", || {
            assert_oracle!(
                is_alive(program.pid()),
                "round {round}: the program has ended: {:?}",
                program.read("wrong")
            );
            program.read("count").unwrap().parse::<u64>().unwrap() > before
        });
    }
    wait_until("no CRIU is left", || support::tracer(program.pid()) == 0);
    program.has_found_nothing_wrong();
    assert_eq!(program.descriptors(), descriptors);
    assert_eq!(program.executable_mappings(), code);
    let _ = take(&criu, program.pid(), &DumpOptions::default());
}

/// A connection to a Redis server.
struct Redis(BufReader<TcpStream>);

impl Redis {
    fn connect(port: u16) -> Option<Redis> {
        let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(pagemark_testing::patience())).unwrap();
        Some(Redis(BufReader::new(stream)))
    }

    fn ask(&mut self, command: &str) -> std::io::Result<String> {
        self.0.get_mut().write_all(format!("{command}\r\n").as_bytes())?;
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(length) = line.strip_prefix('$') {
            let length: usize = length.trim().parse().expect("a length");
            let mut text = vec![0; length + 2];
            self.0.read_exact(&mut text)?;
            return Ok(String::from_utf8_lossy(&text[..length]).into_owned());
        }
        Ok(line.trim_end().to_string())
    }
}

#[test]
fn redis_keeps_its_clients_and_comes_back_with_every_key() {
    let Some(criu) = criu() else { return };
    if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
        skip!("no redis-server");
    }
    const PORT: u16 = 7801;
    for keep_connections in [false, true] {
        let mut command = Command::new("redis-server");
        command.args(["--port", &PORT.to_string(), "--save", "", "--enable-debug-command", "local"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut server = Program::start(&mut command);
        let mut first = None;
        wait_until("the server listens", || {
            first = Redis::connect(PORT);
            first.is_some()
        });
        let mut client = first.unwrap();
        assert!(client.ask("DEBUG POPULATE 100000 key 100").unwrap().starts_with("+OK"));

        // A client that writes and reads without a pause is not disturbed by checkpoints.
        let stop = Arc::new(AtomicBool::new(false));
        let load = std::thread::spawn({
            let stop = stop.clone();
            let mut client = Redis::connect(PORT).unwrap();
            move || {
                let mut count = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    assert!(client.ask(&format!("SET key:{} {count}", count % 5000)).unwrap().starts_with("+OK"));
                    assert_oracle_eq!(
                        client.ask(&format!("GET key:{}", count % 5000)).unwrap(),
                        count.to_string(),
                        "a value"
                    );
                }
                count
            }
        });
        let options = DumpOptions { keep_connections, ..DumpOptions::default() };
        for _ in 0..5 {
            let taken = take(&criu, server.pid(), &options);
            eprintln!("frozen for {:?} (memory is read slowly here)", taken.timings.downtime());
        }
        stop.store(true, Ordering::Relaxed);
        assert!(load.join().unwrap() > 0);

        let digest = client.ask("DEBUG DIGEST").unwrap();
        let taken = take(&criu, server.pid(), &options);
        client.ask("FLUSHALL").unwrap();
        assert_ne!(client.ask("DEBUG DIGEST").unwrap(), digest);
        server.kill();
        let restored =
            taken.restore(&criu, &RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() });
        server.adopt(&restored);
        if keep_connections {
            assert!(restored.closed_connections.is_empty(), "{:?}", restored.closed_connections);
        } else {
            // The old connection is closed, and reported.
            assert!(client.ask("PING").is_err());
            let connection = format!("127.0.0.1:{PORT} to 127.0.0.1:");
            let reported = restored.closed_connections.iter().filter(|closed| closed.starts_with(&connection));
            assert_eq!(reported.count(), 1, "{:?}", restored.closed_connections);
        }
        let mut client = Redis::connect(PORT).unwrap();
        assert_oracle_eq!(client.ask("DEBUG DIGEST").unwrap(), digest, "the restored data");
        assert!(client.ask("SET key:1 after").unwrap().starts_with("+OK"));
        assert_eq!(client.ask("GET key:1").unwrap(), "after");
        server.kill();
    }
}

/// What the threads of `settings.c` see of themselves, asked for the time `number`.
fn settings(program: &Program, number: u32) -> String {
    std::fs::write(program.directory().join(format!("ask.{number}")), "").unwrap();
    let seen = format!("seen.{number}");
    wait_until("the program looks at itself", || program.read(&seen).is_some());
    program.read(&seen).unwrap()
}

#[test]
fn threads_keep_their_settings() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = Program::c(include_str!("trackee/settings.c")) else { skip!("no C compiler") };
    let before = settings(&program, 0);
    for known in ["priority 16386", "priority 24576", "slack 3000", "personality 60000", "personality 200000"] {
        assert!(before.contains(known), "{before}");
    }
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
        assert_oracle_eq!(settings(&program, 1), before, "what threads see, lazy {is_lazy}");
        // The next restore begins at the same checkpoint.
        std::fs::remove_file(program.directory().join("seen.1")).unwrap();
        program.kill();
    }
}

#[test]
fn threads_keep_their_settings_without_a_gate() {
    let Some(criu) = criu() else { return };
    let Some(mut program) = Program::c(include_str!("trackee/settings.c")) else { skip!("no C compiler") };
    let before = settings(&program, 0);
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let restored = taken.restore(&criu, &RestoreOptions { as_child: true, ..Default::default() });
    assert_eq!(restored.lost_state, Vec::<String>::new());
    program.adopt(&restored);
    assert_oracle_eq!(settings(&program, 1), before, "what threads see");
    program.kill();
}

const FILTERED: &str = r#"
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(void)
{
	struct sock_filter allow[] = { { 0x06, 0, 0, SECCOMP_RET_ALLOW } };
	struct sock_fprog program = { 1, allow };
	char *memory = malloc(8 << 20);
	memset(memory, 7, 8 << 20);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		return 1;
	for (long n = 1;; n++) {
		if (memory[n % (8 << 20)] != 7)
			return 2;
		static int count = -1;
		char text[32];
		snprintf(text, sizeof(text), "%-20ld", (long)n);
		if (count < 0) {
			count = open("count.new", O_CREAT | O_RDWR, 0600);
			pwrite(count, text, 20, 0);
			rename("count.new", "count");
		}
		pwrite(count, text, 20, 0);
		usleep(1000);
	}
}
"#;

#[test]
fn a_program_under_a_seccomp_filter_comes_back() {
    let Some(criu) = criu() else { return };
    let Some(mut program) = Program::c(FILTERED) else { return };
    wait_until("the program counts", || program.read("count").is_some());
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let restored = taken.restore(&criu, &RestoreOptions { as_child: true, stopped: true, ..Default::default() });
    taken.compare(&restored.pids);
    program.adopt(&restored);
    program.resume();
    let before: u64 = program.read("count").unwrap().parse().unwrap();
    wait_until("the program counts on", || program.read("count").unwrap().parse::<u64>().unwrap() > before + 50);
}
