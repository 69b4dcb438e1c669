//! `pagemark simulate`: a machine is recorded, and its intervals are simulated.

#[path = "support/screen.rs"]
mod screen;
#[path = "support/small_disk.rs"]
mod small_disk;
mod support;

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use pagemark::repository::Repository;
use pagemark_testing::{MachinePaths, QEMU, console_program, guest_program, skip, wait_for};
use screen::Screen;
use small_disk::SmallDisk;
use support::Pagemark;

/// Records the job `vm`. Returns the command.
fn record(pagemark: &Pagemark, paths: &MachinePaths, guest: &Path, intervals: usize) -> Vec<String> {
    let (count, serial) = (intervals.to_string(), format!("file:{}", paths.join("serial").display()));
    // The firmware has loaded the guest by then.
    let options = ["simulate", "record", "--job", "vm", "--after", "40M", "--every", "1M", "--intervals"];
    let machine = ["--", QEMU, "-nodefaults", "-m", "16", "-kernel", guest.to_str().expect("a path"), "-serial"];
    let command = [&options[..], &[count.as_str()], &machine[..], &[serial.as_str()]].concat();
    pagemark.done(&command);
    command.into_iter().map(str::to_owned).collect()
}

/// Does what gdb is told with a machine that `simulate debug` has run to an instruction, and
/// returns the registers that the machine has then.
fn registers(pagemark: &Pagemark, at: u64, commands: &[&str]) -> Vec<String> {
    let (at, socket) = (at.to_string(), pagemark.directory().join("gdb"));
    let socket_text = socket.to_str().expect("a path");
    let mut debug = pagemark.command(&["simulate", "debug", "vm", "--at", &at, "--gdb", socket_text]);
    let mut debug = debug.stdout(Stdio::null()).spawn().expect("it starts");
    wait_for("a socket for gdb", || socket.exists().then_some(()));
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-ex", &format!("target remote {socket_text}")]);
    for command in commands.iter().chain(&["info registers", "kill"]) {
        gdb.args(["-ex", command]);
    }
    let output = gdb.stdin(Stdio::null()).output().expect("gdb runs");
    let text = String::from_utf8_lossy(&output.stdout);
    // gdb has killed the machine.
    assert!(debug.wait().expect("it ends").success() && !socket.exists(), "{text}");
    let is_register = |line: &&str| line.split_whitespace().nth(1).is_some_and(|value| value.starts_with("0x"));
    text.lines().filter(is_register).map(str::to_owned).collect()
}

/// The traces of both intervals are printed as one.
fn traces(pagemark: &Pagemark, results: &str, begun: u64) {
    let kept = |interval| ["simulate", "interval", interval, "--plugin", "trace", "--results", results, "--json"];
    let print = |options: &[&str]| {
        let text = pagemark.done(&[&["simulate", "trace", "vm", "--results", results], options].concat());
        let lines = text.lines().map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
        let mut lines = lines.collect::<Vec<_>>();
        assert_eq!(lines.remove(0).concat(), "instructioncodeaccessbytesvirtualphysical");
        lines
    };
    let first = pagemark.json(&kept("vm@1"))["begun"].as_u64().expect("a number");
    let output = pagemark.output(&["simulate", "trace", "vm", "--results", results]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("1 of 2 intervals have no result"), "{text}");
    pagemark.json(&kept("vm@2"));

    let numbers = |lines: &[Vec<String>]| {
        let mut numbers: Vec<u64> = lines.iter().map(|line| line[0].parse().expect("a number")).collect();
        numbers.dedup();
        numbers
    };
    let (from, count) = (first - 300, 600);
    let lines = print(&["--from", &from.to_string(), "--count", &count.to_string()]);
    assert_eq!(numbers(&lines), (from..from + count).collect::<Vec<_>>(), "over the border");
    assert_eq!(numbers(&print(&["--from", &(begun - 2).to_string()])), [begun - 2, begun - 1]);
    assert!(print(&["--from", &begun.to_string()]).is_empty());
    let store = lines.iter().find(|line| line[2] == "store").expect("the guest writes");
    let wanted = print(&["--from", &store[0], "--count", "1", "--stores", "--memory", &store[5]]);
    assert_eq!(wanted, std::slice::from_ref(store));

    let directory = Path::new(results).join("trace");
    let mut names: Vec<_> =
        std::fs::read_dir(&directory).expect("it is there").map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["1-2.json", "1-2.trace", "2-3.json", "2-3.trace"]);
    // A trace that is not complete is simulated again.
    let path = directory.join("2-3.trace");
    let length = path.metadata().expect("it is there").len();
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(length - 1)).expect("it is ours");
    let output = pagemark.output(&["simulate", "trace", "vm", "--results", results]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("not complete") && text.contains("vm@2"), "{text}");
}

fn has_gdb() -> bool {
    Command::new("gdb").arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// A step of gdb is an instruction, and a machine at a later instruction is where it leads.
fn debugs(pagemark: &Pagemark, begin: u64) {
    const STEPS: u64 = 7;
    let at = begin + 500_000;
    let stepped = registers(pagemark, at, &[&format!("stepi {STEPS}")]);
    assert!(stepped.iter().any(|line| line.starts_with("rip")), "{stepped:?}");
    assert_eq!(stepped, registers(pagemark, at + STEPS, &[]));
    assert_ne!(stepped, registers(pagemark, at, &[]));
    assert!(!registers(pagemark, begin, &[]).is_empty(), "at a checkpoint");
    for at in [begin - 1, begin + 1_000_000_000_000] {
        let output = pagemark.output(&["simulate", "debug", "vm", "--at", &at.to_string()]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains("at instruction"), "{text}");
    }
    let nowhere = ["simulate", "debug", "vm", "--at", &at.to_string(), "--gdb", "/nowhere/socket"];
    let output = pagemark.output(&nowhere);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("does not listen at /nowhere/socket"), "{text}");
}

#[test]
fn a_recorded_interval_is_simulated_and_its_result_is_kept() {
    let Some(guest) = guest_program() else { skip!("no QEMU, or no compiler for its guest") };
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let recorded = record(&pagemark, &paths, guest, 2);

    let listed = pagemark.json(&["simulate", "list", "vm", "--json"]);
    let listed = listed.as_array().expect("intervals");
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|interval| interval["instructions"].as_u64() >= Some(1_000_000)), "{listed:?}");
    let results = pagemark.directory().join("results");
    let results_text = results.to_str().expect("a path");
    let simulate = ["simulate", "interval", "vm@1", "--plugin", "mix", "--results", results_text];
    let done = pagemark.json(&[&simulate[..], &["--json"]].concat());
    assert_eq!(done["instructions"], listed[0]["instructions"]);
    let kept = std::fs::read(results.join("mix/1-2.json")).expect("it was kept");
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&kept).expect("JSON"), done);

    let merge = ["simulate", "merge", "vm", "--plugin", "mix", "--results", results_text];
    let partial = pagemark.output(&merge);
    let text = String::from_utf8_lossy(&partial.stderr);
    assert!(partial.status.code() == Some(1) && text.contains("1 of 2 intervals") && text.contains("vm@2"), "{text}");
    let planned = ["simulate", "plan", "vm", "--plugin", "mix", "--results", results_text, "--share", "none"];
    assert!(pagemark.done(&planned).contains("1 of 2 intervals have a result by mix"));
    let plan = pagemark.json(&[&planned[..], &["--json"]].concat());
    assert_eq!((&plan["kept"], plan["intervals"].as_array().map(Vec::len)), (&serde_json::json!(1), Some(1)));
    let missing = &plan["intervals"][0];
    assert_eq!((missing["begin"].as_u64(), missing["end"].as_u64()), (Some(2), Some(3)));
    let words = |command: &serde_json::Value| serde_json::from_value::<Vec<String>>(command.clone()).expect("words");
    let command = words(&missing["command"]);
    assert_eq!(command[1..4], ["simulate", "interval", "vm@2"]);
    let done = std::process::Command::new(&command[0]).args(&command[1..]).output().expect("it starts");
    assert!(done.status.success() && results.join("mix/2-3.json").exists(), "{done:?}");
    assert_eq!(words(&plan["merge"])[1..4], ["simulate", "merge", "vm"]);
    std::fs::remove_file(results.join("mix/2-3.json")).expect("it was kept");
    let shared = pagemark.directory().join("shared");
    let shared = ["--share", shared.to_str().expect("a path"), "--json"];
    let sharing = ["simulate", "interval", "vm@2", "--plugin", "mix", "--results", results_text];
    let second = pagemark.json(&[&sharing[..], &shared].concat());
    assert!(std::fs::read_dir(shared[1]).expect("it was made").count() > 1, "memory is shared");
    let merged = pagemark.json(&[&merge[..], &["--json"]].concat());
    let long = pagemark.json(&["simulate", "interval", "vm@1", "--to", "3", "--plugin", "mix", "--json"]);
    assert_eq!(merged["results"], long["results"], "sums are exact");
    assert_eq!((&merged["begun"], &merged["missing"]), (&long["begun"], &serde_json::json!([])));
    assert!(pagemark.done(&merge).contains("2 of 2 intervals"));
    // What is not of this interval is not used.
    let (first_file, second_file) = (results.join("mix/1-2.json"), results.join("mix/2-3.json"));
    for wrong in [b"{".to_vec(), kept.clone(), second.to_string().replace("\"vm\"", "\"other\"").into_bytes()] {
        std::fs::write(&second_file, wrong).expect("it is written");
        let output = pagemark.output(&merge);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("2-3.json is not used"), "{text}");
    }
    // Names of counts cannot steer the terminal, and what is no file is not waited for.
    let hostile = second.to_string().replace("\"loads\"", "\"\\u001b[31mloads\"");
    std::fs::write(&second_file, hostile).expect("it is written");
    let text = pagemark.done(&merge);
    assert!(text.contains("[31mloads") && !text.contains('\u{1b}'), "{text}");
    std::fs::remove_file(&second_file).expect("it is there");
    nix::unistd::mkfifo(&second_file, nix::sys::stat::Mode::S_IRWXU).expect("it is made");
    let output = pagemark.output(&merge);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("it is not a file"), "{text}");
    std::fs::remove_file(&second_file).expect("it is there");
    std::fs::remove_file(first_file).expect("it was kept");

    traces(&pagemark, results_text, long["begun"].as_u64().expect("a number"));
    let merged = ["simulate", "merge", "vm", "--plugin", "cache,warm-up=1", "--results", results_text];
    for interval in ["vm@1", "vm@2"] {
        pagemark.done(&["simulate", "interval", interval, "--plugin", "cache,warm-up=1", "--results", results_text]);
    }
    assert!(pagemark.done(&merged).contains("at most"));
    assert!(results.join("cache-warm-up-1/2-3.json").exists());

    if has_gdb() {
        debugs(&pagemark, listed[0]["begin"].as_u64().expect("a number"));
    } else {
        eprintln!("skipped: gdb at an instruction: there is no gdb");
    }

    let wrong = [
        (["vm@3", "mix"], "no interval begins at vm@3"),
        (["vm@1", "mixed"], "mix, hot, cache, trace"),
        (["vm@1", "trace"], "--results DIR"),
        (["vm@1", "mix,warm-up=1"], "keeps nothing"),
        (["vm@1", "cache,warm=1"], "no option warm=1"),
    ];
    for (wrong, named) in wrong {
        let output = pagemark.output(&["simulate", "interval", wrong[0], "--plugin", wrong[1]]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(named), "{text}");
    }
    let recorded: Vec<&str> = recorded.iter().map(String::as_str).collect();
    let refused = pagemark.output(&recorded);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("earlier run"), "{text}");
    let refused = pagemark.output(&["simulate", "record", "--job", "other", "--", QEMU, "-nodefaults", "-smp", "2"]);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("2 processors") && text.contains("-smp 1"), "{text}");
    let left = std::fs::read_dir(&results).expect("the results").count();
    assert_eq!(left, 3, "nothing else was kept");
}

/// A program types each line when the machine asks for it, at times of the host.
#[test]
fn what_is_typed_to_a_machine_is_typed_again_in_its_simulations() {
    let Some(guest) = console_program() else { skip!("no QEMU, or no compiler for its guest") };
    const INTERVALS: u64 = 5;
    let (count, last) = (INTERVALS.to_string(), (INTERVALS + 1).to_string());
    let pagemark = Pagemark::new();
    let options = ["simulate", "record", "--job", "vm", "--after", "40M", "--every", "1M", "--intervals"];
    let machine = ["--", QEMU, "-nodefaults", "-m", "16", "-kernel", guest.to_str().expect("a path")];
    let command = [&options[..], &[&*count], &machine, &["-serial", "stdio"]].concat();
    let mut record = pagemark.command(&command);
    let mut record = record.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut keyboard = record.stdin.take().expect("a pipe");
    let mut screen = BufReader::new(record.stdout.take().expect("a pipe"));
    let (mut turns, mut typed) = (0, Vec::new());
    loop {
        let mut line = String::new();
        if screen.read_line(&mut line).expect("text") == 0 {
            break;
        }
        let question = format!("turn {}\n", turns + 1);
        if !line.ends_with('\n') && question.starts_with(&line) {
            // The last interval has ended within the question.
            break;
        }
        if line == question {
            turns += 1;
            let line = format!("{turns} is the number of this line\n");
            // The machine has ended if nobody reads.
            if keyboard.write_all(line.as_bytes()).is_ok() {
                typed.push(line);
            }
        } else {
            assert!(typed.last().is_some_and(|last| last.starts_with(line.trim_end())), "{line} of {typed:?}");
        }
    }
    assert!(record.wait().expect("it ends").success());
    let inputs = |sequence| {
        let repository = Repository::open(&pagemark.repository()).expect("a repository");
        let state = repository.read("vm", sequence).expect("a checkpoint").manifest.state.clone();
        state.iter().find(|record| record.name == "qemu-inputs").expect("inputs are recorded").content.bytes
    };
    for from in 1..=INTERVALS {
        assert!(inputs(from) < inputs(from + 1), "something came to the machine in each interval");
        let interval = format!("vm@{from}");
        pagemark.done(&["simulate", "interval", &interval, "--plugin", "mix", "--results", "results"]);
    }
    let whole = ["simulate", "interval", "vm@1", "--to", &last, "--plugin", "mix", "--json"];
    let merged = pagemark.json(&["simulate", "merge", "vm", "--plugin", "mix", "--results", "results", "--json"]);
    assert_eq!(merged["results"], pagemark.json(&whole)["results"]);
    let warm = ["simulate", "interval", "vm@3", "--plugin", "cache,warm-up=2"];
    assert!(pagemark.done(&warm).contains("l1d-hits"), "inputs of the warm-up come, too");
    // What Pagemark does not read is not recorded.
    let monitor = ["simulate", "record", "--job", "other", "--", QEMU, "-nodefaults", "-serial", "pty"];
    let refused = pagemark.output(&monitor);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("-serial stdio"), "{text}");
}

#[test]
fn an_interval_of_a_time_is_simulated_by_its_instructions() {
    let Some(guest) = guest_program() else { skip!("no QEMU, or no compiler for its guest") };
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let serial = format!("file:{}", paths.join("serial").display());
    let options = ["simulate", "record", "--job", "vm", "--after", "40M", "--every", "5ms", "--intervals", "1", "--"];
    let machine = [QEMU, "-nodefaults", "-m", "16", "-kernel", guest.to_str().expect("a path"), "-serial", &serial];
    pagemark.done(&[&options[..], &machine].concat());
    assert_eq!(pagemark.checkpoints("vm").len(), 2);
    let document = pagemark.json(&["simulate", "interval", "vm@1", "--plugin", "mix", "--json"]);
    assert!(document["instructions"].as_u64().is_some_and(|count| count > 0), "{document}");
}

/// A person stops the recording as any program in a terminal, and goes on.
#[test]
fn a_person_types_to_a_machine_in_a_terminal() {
    let Some(guest) = console_program() else { skip!("no QEMU, or no compiler for its guest") };
    let pagemark = Pagemark::new();
    let mut screen = Screen::open(&pagemark);
    let before = screen.mode();
    let options = "$PM simulate record -q --job vm --after 40M --every 1M -- ";
    screen.types(&format!("{options} {QEMU} -nodefaults -m 16 -kernel {} -serial stdio\n", guest.display()));
    screen.expect("turn 1\r\n");
    screen.wait_for_lines(false);
    screen.types("first line\n");
    assert_eq!(screen.expect("turn 2\r\n").matches("first line").count(), 1, "the machine shows it");
    screen.types("\x1a");
    screen.expect("Stopped");
    screen.expect("outer> ");
    assert_eq!(screen.mode(), before);
    screen.types("fg\n");
    screen.wait_for_lines(false);
    screen.types("second line\n");
    assert_eq!(screen.expect("turn 3\r\n").matches("second line").count(), 1, "the machine shows it");
    screen.types("\x1a");
    screen.expect("outer> ");
    screen.types("fg\n");
    screen.wait_for_lines(false);
    screen.types("\x03");
    screen.expect("outer> ");
    assert_eq!(screen.mode(), before);
    screen.types("echo status $?\n");
    screen.expect("status 0");
}

#[test]
fn a_simulation_ends_with_the_process_that_has_started_it() {
    let pagemark = Pagemark::new();
    let stranger = ["simulate", "interval", "vm@1", "--plugin", "mix", "--parent", "1"];
    let output = pagemark.output(&stranger);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("has not started this one"), "{text}");
}

/// Full disks: that of the results, and that of the memory which intervals share.
#[test]
fn a_full_disk_ends_an_interval_and_the_same_command_goes_on() {
    let Some(guest) = guest_program() else { skip!("no QEMU, or no compiler for its guest") };
    let Some(disk) = SmallDisk::mount("size=64k,mode=700") else { skip!("no file system can be mounted") };
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    record(&pagemark, &paths, guest, 1);
    let place = disk.path().to_str().expect("a path");
    let results = pagemark.directory().join("results");
    let results = results.to_str().expect("a path");
    let interval = ["simulate", "interval", "vm@1", "--plugin", "mix", "--results"];
    let fails = |options: &[&str]| {
        let output = pagemark.output(&[&interval[..], options].concat());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(place) && text.contains("No space left on device") && text.contains("help: "), "{text}");
    };
    fails(&[results, "--share", place]);
    assert!(!Path::new(results).exists(), "there is no result");
    // What other intervals share is not damaged by one that had no room.
    let mut remount = Command::new("mount");
    let status = remount.args(["-o", "remount,size=64m", place]).status().expect("mount runs");
    assert!(status.success());
    let shared = pagemark.json(&[&interval[..], &[results, "--share", place, "--json"]].concat());
    let alone = pagemark.json(&["simulate", "interval", "vm@1", "--plugin", "mix", "--json"]);
    assert_eq!(shared["results"], alone["results"]);

    let filler = disk.path().join("filler");
    let mut file = std::fs::File::create(&filler).expect("a filler");
    while file.write_all(&[1; 4096]).is_ok() {}
    fails(&[place]);
    drop(file);
    std::fs::remove_file(&filler).expect("it is there");
    pagemark.done(&[&interval[..], &[place]].concat());
    let names =
        std::fs::read_dir(disk.path().join("mix")).expect("it was made").map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["1-2.json"]);
}

/// Whenever an interval is killed, also while it reads pages for others: they get no other pages.
#[test]
fn a_killed_interval_damages_no_memory_that_others_share() {
    let Some(guest) = guest_program() else { skip!("no QEMU, or no compiler for its guest") };
    let Some(disk) = SmallDisk::mount("mode=700") else { skip!("no file system can be mounted") };
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    record(&pagemark, &paths, guest, 2);
    let place = disk.path().to_str().expect("a path");
    let alone = ["vm@1", "vm@2"].map(|interval| {
        let done = pagemark.json(&["simulate", "interval", interval, "--plugin", "hot", "--json"]);
        done["results"].clone()
    });
    let share = ["--plugin", "hot", "--share", place, "--json"];
    for delay in 1..12 {
        let mut interval = pagemark.command(&[&["simulate", "interval", "vm@1"], &share[..]].concat());
        let mut interval = interval.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        std::thread::sleep(std::time::Duration::from_millis(delay * 30));
        // Where it has ended already, nothing is killed.
        let _ = interval.kill();
        interval.wait().expect("it ends");
    }
    for (interval, alone) in ["vm@1", "vm@2"].iter().zip(alone) {
        let done = pagemark.json(&[&["simulate", "interval", interval], &share[..]].concat());
        assert_eq!(done["results"], alone, "{interval}");
    }
}

#[test]
fn a_run_in_parallel_says_what_its_interpreter_lacks() {
    let Some(guest) = guest_program() else { skip!("no QEMU, or no compiler for its guest") };
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    record(&pagemark, &paths, guest, 1);
    // Stands for an interpreter: prints the missing module, or fails to load the package.
    let python = pagemark.directory().join("python");
    let path = python.to_str().expect("a path");
    let run = |script: Option<&str>| {
        if let Some(script) = script {
            std::fs::write(&python, format!("#!/bin/sh\n{script}\n")).expect("it is written");
            std::fs::set_permissions(&python, Permissions::from_mode(0o755)).expect("it is ours");
        }
        let mut command = pagemark.command(&["simulate", "run", "vm", "--plugin", "mix"]);
        let output = command.env("PAGEMARK_PYTHON", &python).output().expect("the command runs");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    let install = format!("{path} -m pip install 'pagemark[simulate]'");
    let cases = [
        (None, "cannot start"),
        (Some("echo ray"), "has no module ray"),
        (Some("echo pagemark.simulate"), "has no module pagemark.simulate"),
        (Some("echo Traceback >&2; echo ImportError >&2; exit 1"), "cannot load the Python package: ImportError"),
    ];
    for (script, named) in cases {
        let text = run(script);
        assert!(text.contains(named) && text.contains(&install) && text.contains("PAGEMARK_PYTHON"), "{text}");
    }
    // What is simulated already needs no Ray.
    pagemark.done(&["simulate", "interval", "vm@1", "--plugin", "mix", "--results", "vm-results"]);
    assert!(pagemark.done(&["simulate", "run", "vm", "--plugin", "mix"]).contains("1 of 1 intervals"));
}
