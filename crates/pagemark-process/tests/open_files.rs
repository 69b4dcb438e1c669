//! Files of programs that are checkpointed, killed and restored.

mod support;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pagemark_linux::{fanotify, forks};
use pagemark_process::criu::Criu;
use pagemark_process::files::{DataTree, FileWatch, asides};
use pagemark_process::restore::{RestoreFailure, Stage};
use pagemark_testing::{assert_oracle, assert_oracle_eq, skip, wait_until};
use support::{Checkpoints, Program};

/// Inserts rows in a database with a rollback journal, one per transaction, except while there is a
/// file `pause`. Reports the number of rows in `rows`, and an error in `error`.
const DATABASE: &str = r#"
import os, sqlite3, time
database = sqlite3.connect('rows.db', isolation_level=None)
database.execute('pragma journal_mode = delete')
database.execute('create table rows (number integer primary key, content blob)')
number = 0
while True:
    while os.path.exists('pause'):
        open('paused', 'w').close()
        time.sleep(0.005)
    number += 1
    try:
        database.execute('insert into rows values (?, randomblob(3000))', (number,))
    except Exception as error:
        with open('error', 'w') as file:
            file.write(str(error))
        raise
    with open('rows.new', 'w') as file:
        file.write(str(number))
    try:
        os.rename('rows.new', 'rows')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
    time.sleep(0.001)
"#;

#[test]
fn a_database_with_a_rollback_journal_is_written_on_after_a_restore() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(DATABASE);
    let at = |name: &str| -> PathBuf { program.directory().join(name) };
    let (pause, paused, database) = (at("pause"), at("paused"), at("rows.db"));
    let rows = |program: &Program| program.read("rows").and_then(|rows| rows.parse::<u64>().ok()).unwrap_or(0);
    // Between transactions there is no journal, which is a closed file and not in the checkpoint.
    let pause_program = || {
        let _ = fs::remove_file(&paused);
        File::create(&pause).unwrap();
        wait_until("the program pauses", || paused.exists());
    };
    wait_until("some rows", || rows(&program) > 20);
    pause_program();
    let rows_then = rows(&program);
    let checkpoint = checkpoints.take(&program, &[]);
    fs::remove_file(&pause).unwrap();
    wait_until("more rows", || rows(&program) > rows_then + 100);
    pause_program();
    let inode = fs::metadata(&database).unwrap().ino();
    program.kill();
    fs::remove_file(&pause).unwrap();

    let restored = checkpoints.restore(&checkpoint).unwrap();
    program.adopt(&restored);
    assert_eq!(fs::metadata(&database).unwrap().ino(), inode);
    wait_until("rows after the restore", || {
        assert_oracle_eq!(program.read("error"), None, "the error of the program");
        rows(&program) > rows_then && rows(&program) < rows_then + 90 || rows(&program) > rows_then + 150
    });
    let now = rows(&program);
    wait_until("further rows", || {
        assert_oracle_eq!(program.read("error"), None, "the error of the program");
        rows(&program) > now + 50
    });
    File::create(&pause).unwrap();
    let _ = fs::remove_file(&paused);
    wait_until("the program pauses", || paused.exists());
    let check = "
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
count, last = database.execute('select count(*), max(number) from rows').fetchone()
print(database.execute('pragma integrity_check').fetchone()[0], count == last, last >= int(sys.argv[2]))";
    let output = Command::new("python3").args(["-c", check]).arg(&database).arg(now.to_string()).output().unwrap();
    assert_oracle_eq!(String::from_utf8_lossy(&output.stdout).trim(), "ok True True", "the database: {output:?}");
    // The aside of the database is a consistent database too.
    let found = asides::list(&checkpoints.asides()).unwrap();
    let aside = found[0].aside.as_ref().unwrap();
    let described = aside.files.iter().find(|file| file.path.ends_with("/rows.db")).unwrap();
    let copy = found[0].path.join(described.copy.as_ref().unwrap());
    let output = Command::new("python3").args(["-c", check]).arg(&copy).arg((rows_then + 100).to_string()).output();
    assert_oracle_eq!(
        String::from_utf8_lossy(&output.unwrap().stdout).trim(),
        "ok True True",
        "the database in the aside"
    );
}

/// Opens a database anew for each transaction, and also creates, renames and removes a file in each
/// round. Files are closed most of the time. Reports the number of committed rows in `rows`.
const CLOSER: &str = r#"
import os, sqlite3, time
os.mkdir('data')
number = 0
while True:
    database = sqlite3.connect('data/rows.db', isolation_level=None)
    if number == 0:
        database.execute('create table rows (number integer primary key, content blob)')
    try:
        database.execute('insert into rows values (?, randomblob(3000))', (number + 1,))
    except Exception as error:
        with open('error', 'w') as file:
            file.write(str(error))
        raise
    database.close()
    number += 1
    with open('data/step%d' % number, 'w') as file:
        file.write('%d\n' % number * 2000)
    if number > 3:
        os.rename('data/step%d' % (number - 2), 'data/renamed%d' % (number - 2))
        os.remove('data/renamed%d' % (number - 3)) if number > 4 else None
    with open('rows.new', 'w') as file:
        file.write(str(number))
    try:
        os.rename('rows.new', 'rows')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
"#;

#[test]
fn a_directory_of_closed_files_comes_back_from_any_checkpoint() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let program = Program::python(CLOSER);
    wait_until("the directory", || program.directory().join("data").exists());
    let tree = vec![DataTree::new(&program.directory().join("data")).unwrap()];
    closer_comes_back(program, &checkpoints, tree, None);
}

#[test]
fn closed_files_that_were_watched_come_back_from_any_checkpoint() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    if let Some(error) = fanotify::NAMES.refusal().or(forks::RECORDS.refusal()) {
        skip!("files cannot be watched ({error})");
    }
    let waits = "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.001)\n";
    let program = Program::python(&format!("{waits}{CLOSER}"));
    // The watch begins after the program's execution: what another test's thread has open at the fork
    // and closes first is closed last, for the kernel, by the new process.
    let mut watch = FileWatch::new().unwrap();
    watch.follow(program.pid()).unwrap();
    fs::write(program.directory().join("go"), "").unwrap();
    closer_comes_back(program, &checkpoints, Vec::new(), Some(watch));
}

/// Takes checkpoints of a program that runs CLOSER, and restores and checks each.
fn closer_comes_back(mut program: Program, checkpoints: &Checkpoints, tree: Vec<DataTree>, watch: Option<FileWatch>) {
    let data = program.directory().join("data");
    let rows = |program: &Program| program.read("rows").and_then(|rows| rows.parse::<u64>().ok()).unwrap_or(0);
    wait_until("some rows", || rows(&program) > 10);
    let committed = std::cell::RefCell::new(vec![rows(&program)]);
    let more = || {
        let before = rows(&program);
        wait_until("more rows", || rows(&program) > before + 20);
        committed.borrow_mut().push(rows(&program));
    };
    // Neither the checkpoints nor the kill wait for the end of a transaction.
    let taken = checkpoints.take_all(&program, tree, watch, &[&more, &more, &more, &more]);
    more();
    program.kill();
    let committed = committed.into_inner();
    for number in [2, 0, 4, 1, 3] {
        // The program has written this file since the checkpoint.
        fs::remove_file(program.directory().join("rows")).unwrap();
        let restored = checkpoints.restore(&taken[number]).unwrap();
        program.adopt(&restored);
        let at_restore = committed[number];
        wait_until("rows after the restore", || {
            assert_oracle_eq!(program.read("error"), None, "the error of the program");
            assert_oracle!(support::is_alive(program.pid()), "the program has ended");
            rows(&program) > at_restore + 20
        });
        program.kill();
        let check = "
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
count, last = database.execute('select count(*), max(number) from rows').fetchone()
print(database.execute('pragma integrity_check').fetchone()[0], count == last, last >= int(sys.argv[2]))";
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(&data).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        let database = copy.path().join("rows.db");
        let output = Command::new("python3").args(["-c", check]).arg(database).arg(at_restore.to_string()).output();
        let output = output.unwrap();
        assert_oracle_eq!(
            String::from_utf8_lossy(&output.stdout).trim(),
            "ok True True",
            "the database of checkpoint {number}: {output:?}"
        );
    }
}

/// Follows the file `log` as `tail -f` does, and reports the sum of its lines.
const READER: &str = r#"
import os, time
total = 0
with open('log') as log:
    while True:
        line = log.readline()
        if not line:
            time.sleep(0.005)
            continue
        total += int(line)
        with open('total.new', 'w') as file:
            file.write(str(total))
        try:
            os.rename('total.new', 'total')
        except FileNotFoundError:
            pass  # Frozen between the two lines, and renamed since.
"#;

fn append(path: &Path, line: &str) {
    let mut log = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    writeln!(log, "{line}").unwrap();
}

#[test]
fn a_reader_of_a_log_that_grew_is_restored_and_reads_on() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    append(&log, "1");
    let text = READER.replace("'log'", &format!("'{}'", log.display()));
    let mut program = Program::python(&text);
    let total = |program: &Program| program.read("total");
    wait_until("the first line", || total(&program).as_deref() == Some("1"));
    let checkpoint = checkpoints.take(&program, &[]);
    append(&log, "10");
    wait_until("the second line", || total(&program).as_deref() == Some("11"));
    program.kill();
    append(&log, "100");
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    wait_until("all lines", || total(&program).as_deref() == Some("111"));
    program.kill();

    // A file that is too short is named, and nothing is touched.
    File::create(&log).unwrap();
    let failure = checkpoints.restore(&checkpoint).unwrap_err();
    assert!(failure.to_string().contains(&log.display().to_string()), "{failure}");
    assert_eq!(failure.stage, Stage::Prepare);
}

/// Holds a lease on `leased`, which it writes, and has no handler for SIGIO: the signal kills it.
const LEASE_HOLDER: &str = r#"
import fcntl, os, time
leased = os.open('leased', os.O_CREAT | os.O_RDWR, 0o600)
fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
number = 0
while True:
    number += 1
    os.lseek(leased, 0, os.SEEK_SET)
    os.write(leased, b'%020d' % number)
    with open('state.new', 'w') as file:
        file.write(f'{number} {fcntl.fcntl(leased, fcntl.F_GETLEASE)} {os.lseek(leased, 0, os.SEEK_CUR)}')
    try:
        os.rename('state.new', 'state')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
    time.sleep(0.002)
"#;

#[test]
fn a_lease_survives_checkpoints_and_a_restore() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(LEASE_HOLDER);
    let state = |program: &Program| {
        let words = program.read("state").unwrap_or_default();
        let words: Vec<u64> = words.split(' ').filter_map(|word| word.parse().ok()).collect();
        (words.first().copied().unwrap_or(0), words.get(1..).map(<[u64]>::to_vec))
    };
    let holds_its_lease = |program: &Program| {
        let before = state(program).0;
        wait_until("the program goes on", || {
            assert!(support::is_alive(program.pid()), "the lease was broken");
            state(program).0 > before + 5
        });
        // The state is the lease, and the file offset after the number.
        assert_eq!(state(program).1, Some(vec![libc::F_WRLCK as u64, 20]));
    };
    wait_until("the program runs", || state(&program).0 > 0);
    let checkpoint = checkpoints.take(&program, &[&|| holds_its_lease(&program), &|| holds_its_lease(&program)]);
    holds_its_lease(&program);
    let number_then = state(&program).0;
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    holds_its_lease(&program);
    assert!(state(&program).0 < number_then + 1000);
}

/// Listens on a port and on a path, before it counts.
const SERVER: &str = r#"
import socket
port = socket.create_server(('127.0.0.1', 0))
path = socket.socket(socket.AF_UNIX)
path.bind(os.getcwd() + '/socket')
path.listen()
with open('port', 'w') as file:
    file.write(str(port.getsockname()[1]))
"#;

#[test]
fn an_obstacle_is_named_and_nothing_is_touched() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::counter(SERVER, "show(n)\ntime.sleep(0.002)");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let count = program.directory().join("count");
    fs::write(&count, "something else").unwrap();
    let before = fs::metadata(&count).unwrap();
    let untouched = |failure: &RestoreFailure| {
        let now = fs::metadata(&count).unwrap();
        assert_eq!(fs::read_to_string(&count).unwrap(), "something else", "{failure}");
        assert_eq!((now.ino(), now.mode(), now.mtime_nsec()), (before.ino(), before.mode(), before.mtime_nsec()));
        assert_eq!(asides::list(&checkpoints.asides()).unwrap(), [], "{failure}");
    };

    let port = program.read("port").unwrap();
    let listener = std::net::TcpListener::bind(format!("127.0.0.1:{port}")).unwrap();
    let failure = checkpoints.restore(&checkpoint).unwrap_err();
    let own = format!("process {}", std::process::id());
    assert!(failure.to_string().contains(&own) && failure.to_string().contains(&port), "{failure}");
    assert_eq!(failure.stage, Stage::Prepare);
    untouched(&failure);
    drop(listener);

    let socket = program.directory().join("socket");
    fs::remove_file(&socket).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let failure = checkpoints.restore(&checkpoint).unwrap_err();
    assert!(failure.to_string().contains(&own) && failure.to_string().contains("/socket"), "{failure}");
    untouched(&failure);
    std::os::unix::net::UnixStream::connect(&socket).unwrap();
    drop(listener);

    let writer = fs::OpenOptions::new().append(true).open(&count).unwrap();
    let mut other = Command::new("sleep").arg("60").stdout(writer).spawn().unwrap();
    let failure = checkpoints.restore(&checkpoint).unwrap_err();
    assert!(failure.to_string().contains(&format!("process {}", other.id())), "{failure}");
    assert_eq!(failure.stage, Stage::Files);
    untouched(&failure);
    other.kill().unwrap();
    other.wait().unwrap();

    // If CRIU fails after the files were put back, they are changed back.
    let failing = checkpoints.directory.path().join("criu");
    let script = "#!/bin/sh\n[ \"$1\" = restore ] && { cat COUNT > SEEN; exit 1; }\nexec CRIU \"$@\"\n";
    let script = script
        .replace("CRIU", &checkpoints.criu.path().display().to_string())
        .replace("COUNT", &count.display().to_string())
        .replace("SEEN", &checkpoints.directory.path().join("seen").display().to_string());
    pagemark_testing::executable(&failing, script.as_bytes());
    let failure = checkpoints.restore_by(&checkpoint, &Criu::at(&failing).unwrap()).unwrap_err();
    assert_eq!(failure.stage, Stage::Processes, "{failure}");
    let seen = fs::read_to_string(checkpoints.directory.path().join("seen")).unwrap();
    assert_eq!(seen.len(), 20, "the file was not put back: {seen:?}");
    untouched(&failure);

    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    program.wait_until_count_exceeds(seen.trim().parse::<u64>().unwrap() + 5);
}

/// Writes lines to its standard output.
const TALKER: &str = r#"
import os, sys, time
number = 0
while True:
    number += 1
    os.write(1, b'line %d\n' % number)
    with open('number.new', 'w') as file:
        file.write(str(number))
    try:
        os.rename('number.new', 'number')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
    time.sleep(0.002)
"#;

#[test]
fn an_output_that_others_write_too_is_not_rolled_back() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    for appends in [true, false] {
        let log = directory.path().join(format!("log{appends}"));
        let open = || fs::OpenOptions::new().append(appends).write(true).create(true).truncate(!appends).open(&log);
        let output = open().unwrap();
        // This process has the log open, as `pagemark run` has its own output.
        let mut program = Program::python_with(TALKER, Stdio::from(output.try_clone().unwrap()));
        let number = |program: &Program| program.read("number").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        wait_until("some lines", || number(&program) > 5);
        let checkpoint = checkpoints.take(&program, &[]);
        let then = number(&program);
        (&output).write_all(b"of another\n").unwrap();
        wait_until("more lines", || number(&program) > then + 20);
        program.kill();
        drop(output);
        let before = fs::read_to_string(&log).unwrap();
        program.adopt(&checkpoints.restore(&checkpoint).unwrap());
        wait_until("lines after the restore", || fs::read_to_string(&log).unwrap().len() > before.len() + 100);
        program.kill();
        let after = fs::read_to_string(&log).unwrap();
        assert_oracle!(after.starts_with(&before), "the log lost lines");
        let next: u64 = after[before.len()..].lines().next().unwrap().strip_prefix("line ").unwrap().parse().unwrap();
        assert!(next <= then + 5, "it goes on with line {next}, after a checkpoint at {then}");
    }
}
