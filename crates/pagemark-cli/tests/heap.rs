//! `pagemark run --heap`: programs that know nothing of the heap are checkpointed with it, killed
//! and restored, and check their data by their own means.

mod support;

use std::path::Path;
use std::process::Command;

use pagemark_testing::{assert_oracle, assert_oracle_eq, copy_executable, skip, wait_for, wait_until};
use support::{Pagemark, Redis, free_port, is_alive, kill_tree, now_unix_us};

/// True if a process has the heap, with as many views as parts.
fn has_heap(pid: i32, parts: usize) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let of_heap = maps.lines().filter(|line| line.ends_with("/memfd:pagemark-heap (deleted)"));
    // Each begins with what is open; what is only reserved is a mapping of its own.
    of_heap.filter(|line| line.contains(" rw-s 00000000 ")).count() == parts
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// What a program writes into the file `result` must not depend on whether it is killed in the
/// middle and restored.
fn has_the_same_result(command: &[&str], files: &[(&str, &str)]) {
    if !is_installed(command[0]) {
        skip!("no {}", command[0]);
    }
    let pagemark = Pagemark::new();
    for (name, content) in files {
        std::fs::write(pagemark.directory().join(name), content).expect("a file");
    }
    let result = pagemark.directory().join("result");
    let mut plain = Command::new(command[0]);
    let status = plain.args(&command[1..]).current_dir(pagemark.directory()).status().expect("it starts");
    assert!(status.success(), "{status}");
    let expected = std::fs::read(&result).expect("it has a result");
    assert!(!expected.is_empty());
    std::fs::remove_file(&result).expect("it is there");

    // On a loaded host, checkpoints may take so long that the program ends before it is killed.
    for job in ["first", "second", "third", "fourth", "fifth"] {
        let mut runner = pagemark.run(&["--heap", "4", "--every", "200ms", "--job", job], command);
        let target = runner.target();
        // The program begins beside the first.
        wait_until("three checkpoints, or the end of the program", || {
            pagemark.checkpoints(job).len() >= 3 || !is_alive(target)
        });
        let had_heap = has_heap(target, 4);
        let was_running = is_alive(target);
        runner.kill();
        kill_tree(target);
        let _ = std::fs::remove_file(&result);
        if !was_running {
            continue;
        }
        assert!(had_heap, "{}", pagemark.log());
        pagemark.done(&["restore", job]);
        assert_oracle!(std::fs::read(&result).expect("it has a result") == expected, "another result");
        return;
    }
    panic!("the program always ended first: {}", pagemark.log());
}

#[test]
fn sqlite_goes_on_with_its_transaction() {
    // The file of the database is new in each run.
    let statements = "
        drop table if exists t;
        begin;
        create table t(a integer primary key, b text);
        with recursive c(x) as (select 1 union all select x + 1 from c where x < 900000)
            insert into t select x, hex(x * 7919) from c;
        create index i on t(b);
        delete from t where a % 3 = 0;
        commit;
        pragma integrity_check;
        select count(*), sum(a), max(b), group_concat(b) from (select * from t where a % 100 = 1 order by b);";
    has_the_same_result(&["sqlite3", "-cmd", ".output result", "data", statements], &[]);
}

#[test]
#[ignore = "some minutes"]
fn gcc_goes_on_compiling() {
    let function = |n: usize| {
        format!(
            "int f{n}(int *a, int n) {{ int s = {n}; for (int i = 0; i < n; i++) {{ \
             if (a[i] % {m} == 0) s += a[i] * {n}; else s ^= a[i] << (i & 7); a[i] = s; }} return s; }}\n",
            m = n + 2
        )
    };
    let program: String = (0..3000).map(function).collect();
    has_the_same_result(&["gcc", "-O2", "-pipe", "-c", "program.c", "-o", "result"], &[("program.c", &program)]);
}

/// Keeps a table whose values it replaces, compares them with their digests, and lets children
/// change copies.
const TABLE: &str = "
import hashlib, os, random, time
choose = random.Random(1)
def value():
    return bytearray(choose.randbytes(8)) * choose.randint(1, 60)
table = [value() for _ in range(1500)]
digests = [hashlib.sha256(bytes).digest() for bytes in table]
def check():
    for bytes, digest in zip(table, digests):
        assert hashlib.sha256(bytes).digest() == digest
n = 0
while True:
    for key in choose.sample(range(len(table)), 100):
        table[key] = value()
        digests[key] = hashlib.sha256(table[key]).digest()
    check()
    if n % 5 == 0:
        child = os.fork()
        if child == 0:
            check()
            table.clear()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        check()
    n += 1
    with open('count.new', 'w') as file:
        file.write(str(n))
    try:
        os.rename('count.new', 'count')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
    time.sleep(0.01)
";

fn count(directory: &Path) -> u64 {
    std::fs::read_to_string(directory.join("count")).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn goes_on(pagemark: &Pagemark, pid: i32) {
    let before = count(pagemark.directory());
    // A child is forked in five of them.
    wait_for("the program to go on", || {
        assert_oracle!(is_alive(pid), "it ended: {}", pagemark.target_log());
        (count(pagemark.directory()) > before + 5).then_some(())
    });
}

#[test]
fn python_comes_back() {
    python_comes_back_with(&[4], &[]);
}

#[test]
fn python_comes_back_in_a_machine() {
    if let Err(error) = pagemark_kvm::check() {
        skip!("no machine under KVM: {error}");
    }
    python_comes_back_with(&[4], &["--kvm"]);
}

#[test]
#[ignore = "some minutes"]
fn python_comes_back_with_other_numbers_of_parts() {
    python_comes_back_with(&[1, 2, 8], &[]);
}

fn python_comes_back_with(numbers: &[usize], options: &[&str]) {
    for &parts in numbers {
        let pagemark = Pagemark::new();
        // Objects of Python's own allocator would be in mappings of their own.
        let command = ["env", "PYTHONMALLOC=malloc", "python3", "-c", TABLE];
        let heap = parts.to_string();
        let options = [&["--heap", &heap, "--every", "300ms", "--job", "python"], options].concat();
        let mut runner = pagemark.run(&options, &command);
        let target = runner.target();
        goes_on(&pagemark, target);
        for _ in 0..2 {
            pagemark.checkpoint_after("python", now_unix_us());
        }
        assert!(has_heap(target, parts), "{}", pagemark.log());
        goes_on(&pagemark, target);
        runner.kill();
        kill_tree(target);

        pagemark.done(&["restore", "--detach", "python"]);
        goes_on(&pagemark, target);
        assert!(has_heap(target, parts));
        // What was restored can be saved, and is shared memory that is tracked.
        for _ in 0..2 {
            pagemark.done(&["checkpoint", "--job", "python", &target.to_string()]);
        }
        kill_tree(target);
        let shown = pagemark.json(&["show", "--json", "python"]);
        let spaces = shown["spaces"].as_array().expect("spaces");
        assert!(spaces.iter().any(|space| space["kind"] == "shared-memory"), "{shown:#}");
        let newest = pagemark.checkpoints("python").iter().map(|listed| listed.sequence).max().expect("some");
        let difference = pagemark.done(&["diff", &format!("python@{}", newest - 1), &format!("python@{newest}")]);
        assert!(difference.contains("shared memory"), "{difference}");
        pagemark.done(&["restore", "--detach", "--lazy", "python"]);
        goes_on(&pagemark, target);
        kill_tree(target);
    }
}

#[test]
fn redis_comes_back_and_saves_its_data_itself() {
    if !is_installed("redis-server") {
        skip!("no redis-server");
    }
    let pagemark = Pagemark::new();
    let port = free_port();
    let text = port.to_string();
    let server = ["redis-server", "--port", &text, "--save", "", "--enable-debug-command", "local"];
    let mut runner = pagemark.run(&["--heap", "4", "--every", "500ms", "--job", "redis"], &server);
    let mut redis = wait_for("the server", || Redis::connect(port));
    let target = runner.target();
    let load = |requests: &str, test: &str| {
        let done = Command::new("redis-benchmark")
            .args(["-p", &text, "-q", "-n", requests, "-r", "5000", "-d", "100", "-t", test])
            .output()
            .expect("it starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    load("4000", "set,incr,lpush,hset,zadd");
    let digest = redis.must(&["DEBUG", "DIGEST"]);
    let sequence = pagemark.checkpoint_after("redis", now_unix_us());
    assert!(has_heap(target, 4), "{}", pagemark.log());
    load("1000", "set,lpush");
    runner.kill();
    kill_tree(target);

    pagemark.done(&["restore", "--detach", &format!("redis@{sequence}")]);
    let mut redis = wait_for("the restored server", || Redis::connect(port));
    assert_oracle_eq!(redis.must(&["DEBUG", "DIGEST"]), digest, "the restored data");
    // A child has a copy of the heap.
    assert_eq!(redis.must(&["BGSAVE"]), "Background saving started");
    load("1000", "set,lpush");
    wait_for("the child", || redis.must(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:0").then_some(()));
    assert!(redis.must(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:ok"));
    kill_tree(target);
}

/// What `run --heap` says of a program that cannot have the heap, and the exit status.
fn refused(options: &[&str], program: &Path) -> (String, Option<i32>) {
    let pagemark = Pagemark::new();
    let mut command = pagemark.command(&["run", "--heap"]);
    let output = command.args(options).arg("--").arg(program).output().expect("it starts");
    assert!(!pagemark.repository().exists(), "it began");
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}

#[test]
fn what_cannot_have_the_heap_is_not_started() {
    let directory = tempfile::tempdir().expect("a directory");
    let place = |name: &str| directory.path().join(name);

    let (text, status) = refused(&["3"], Path::new("true"));
    assert!(text.contains("[possible values: 1, 2, 4, 8]") && status == Some(2), "{text}");

    std::fs::write(place("static.c"), "void _start(void) { __asm__(\"mov $60, %eax; xor %edi, %edi; syscall\"); }")
        .expect("a file");
    let mut compiler = Command::new("cc");
    let compiled = compiler.args(["-static", "-nostdlib", "-o"]).args([place("static"), place("static.c")]).status();
    assert!(compiled.expect("a compiler").success());
    let (text, status) = refused(&["4"], &place("static"));
    assert!(text.contains("/static is linked statically") && status == Some(126), "{text}");
    pagemark_testing::executable(&place("script"), format!("#!{}\n", place("static").display()).as_bytes());
    let (text, status) = refused(&["4"], &place("script"));
    assert!(text.contains("/static is linked statically") && status == Some(126), "{text}");

    if nix::unistd::geteuid().is_root() {
        copy_executable(Path::new("/bin/true"), &place("other"));
        let nobody = nix::unistd::Uid::from_raw(65_534);
        nix::unistd::chown(&place("other"), Some(nobody), None).expect("root may do this");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
        std::fs::set_permissions(place("other"), mode).expect("root may do this");
        let (text, status) = refused(&["4"], &place("other"));
        assert!(text.contains("the rights of its file's owner") && status == Some(126), "{text}");
    }

    let heap = |path: &Path| {
        let pagemark = Pagemark::new();
        let mut command = pagemark.command(&["run", "--heap", "4", "true"]);
        let output = command.env("PAGEMARK_HEAP_LIBRARY", path).output().expect("it starts");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(heap(&place("missing")).contains("No such file"));
    std::fs::write(place("a heap"), "").expect("a file");
    let text = heap(&place("a heap"));
    assert!(text.contains("its path has a blank or a colon"), "{text}");
    std::fs::write(place("text"), "").expect("a file");
    let text = heap(&place("text"));
    assert!(text.contains("is not a library of"), "{text}");
}
