//! Containers, checkpointed from outside and restored: processes with ids, mounts and a network of
//! their own.

#[path = "support/container.rs"]
mod container;
#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use container::Container;
use pagemark_testing::{SplitMix, assert_oracle, assert_oracle_eq, copy_executable, skip, wait_for, wait_until};
use subject::{Steps, assert_fails, continues, criu_on, descriptors, has_criu, status_field, subject, untouched};
use support::{Pagemark, Restored, children, is_alive, kill_and_wait};

/// A test with a directory for the root of a container and one for its volume.
struct Story {
    pagemark: Pagemark,
    root: PathBuf,
    data: PathBuf,
    /// The subject, copied to where the container sees it.
    program: &'static str,
    steps: Steps,
}

impl Story {
    /// None if this machine cannot tell it.
    fn begin() -> Option<Story> {
        let program = subject().filter(|_| has_criu())?;
        let pagemark = Pagemark::new();
        let [root, data] = ["root", "data"].map(|name| pagemark.directory().join(name));
        for directory in [&root, &data] {
            fs::create_dir(directory).expect("a directory");
        }
        copy_executable(program.as_ref(), &data.join("subject"));
        let steps = Steps::new(&data);
        Some(Story { pagemark, root, data, program: "/data/subject", steps })
    }

    /// Starts a container whose first process leads a session and takes steps.
    fn container(&self) -> Container {
        let container = Container::start(
            &["--net"],
            &self.root,
            &self.data,
            &["setsid", self.program, "steps", "1", "/data/steps"],
        );
        self.steps.goes_on(container.pid);
        container
    }

    /// Starts a container of five processes that sleep.
    fn container_of_five(&self) -> Container {
        let many = "sleep 1000 & sleep 1000 & sleep 1000 & sleep 1000 & exec sleep 1000";
        let container = Container::start(&["--net"], &self.root, &self.data, &["setsid", "sh", "-c", many]);
        wait_until("its processes", || children(container.pid).len() == 4);
        container
    }

    /// Starts Pagemark.
    fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.pagemark.command(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("pagemark starts")
    }

    fn checkpoint(&self, pid: i32) {
        self.pagemark.done(&["checkpoint", "--job", "box", &pid.to_string()]);
    }

    fn restore(&self, options: &[&str]) -> Restored {
        let mut arguments = vec!["restore", "--yes", "--detach", "--json"];
        arguments.extend(options);
        let document = self.pagemark.json(&arguments);
        Restored::new(document["pid"].as_i64().expect("a process id") as i32)
    }

    fn refused(&self, options: &[&str], reasons: &[&str]) {
        let mut arguments = vec!["restore", "--yes", "--detach"];
        arguments.extend(options);
        assert_fails(&self.pagemark.output(&arguments), reasons);
    }
}

fn ids(pid: i32) -> Vec<String> {
    let ids = status_field(pid, "NSpid").expect("its ids");
    ids.split_whitespace().map(str::to_owned).collect()
}

/// What a program prints in the mounts, the network and the other surroundings of a container.
fn inside(pid: i32, program: &[&str]) -> String {
    let output = Command::new("nsenter").arg("--target").arg(pid.to_string()).arg("--all").args(program).output();
    String::from_utf8(output.expect("nsenter").stdout).expect("UTF-8")
}

/// The mounts of the host below the directory of the test. Others come and go beside it.
fn mounts_below(directory: &Path) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("our mounts");
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| Path::new(point).starts_with(directory)).map(str::to_owned).collect()
}

#[test]
fn a_container_comes_back_with_its_ids_mounts_and_files() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let mut container = story.container();
    let (pid, before) = (container.pid, descriptors(container.pid));
    let directory = fs::canonicalize(story.pagemark.directory()).expect("the directory of the test");
    story.checkpoint(pid);
    untouched(pid, &before);
    story.steps.goes_on(pid);
    let checkpointed = story.steps.pause();
    story.checkpoint(pid);
    story.steps.resume();
    story.steps.goes_on(pid);
    story.refused(&["box@2"], &["still runs", "end it first"]);
    container.kill();
    let inode = fs::metadata(story.data.join("steps")).expect("the steps").ino();

    let output = story.data.join("output");
    for round in 1..3 {
        // Who started the container writes its output, too, so that it is not put back.
        let mut log = fs::File::options().append(true).open(&output).expect("the output");
        log.write_all(b"more\n").expect("the output grows");
        story.steps.order_pause();
        let restored = story.restore(&["box@2"]);
        assert_eq!(ids(restored.0)[1..], ["1"], "it is the first process of its own ids");
        story.steps.is_paused_at(checkpointed);
        assert_eq!(fs::metadata(story.data.join("steps")).expect("the steps").ino(), inode, "put back in place");
        assert_eq!(fs::read_to_string(&output).expect("the output").matches("more\n").count(), round);
        assert_oracle_eq!(inside(restored.0, &["cat", "/tmp/file"]), "kept\n", "a file of the container");
        assert!(inside(restored.0, &["cat", "/proc/1/cmdline"]).starts_with(story.program));
        assert!(inside(restored.0, &["cat", "/proc/net/dev"]).contains("lo:"));
        assert_eq!(mounts_below(&directory), Vec::<String>::new(), "no mount is left outside");
        story.steps.resume();
        story.steps.goes_on(restored.0);
        // It can be saved like the first.
        story.checkpoint(restored.0);
        story.steps.goes_on(restored.0);
    }
    story.pagemark.verify(&[]);
}

/// Waits until a process that is traced executes code: CRIU's, for whose end CRIU waits.
fn wait_until_it_executes(pid: i32) {
    while status_field(pid, "State").is_some_and(|state| state.starts_with('t')) {}
}

/// The first process of a container ends after all others, and a process that CRIU traces has not
/// ended for the kernel until CRIU has waited for it.
#[test]
fn a_container_that_is_killed_in_its_freeze_ends() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let mut random = SplitMix(11);
    let mut frozen = 0;
    for round in 0..24 {
        let mut container = story.container_of_five();
        let mut checkpoint = story.start(&["checkpoint", "--job", "box", &container.pid.to_string()]);
        let tracer = || status_field(container.pid, "TracerPid").and_then(|tracer| tracer.parse().ok());
        let is_frozen = || tracer().is_some_and(|tracer| criu_on(container.pid).contains(&tracer));
        while checkpoint.try_wait().expect("our child").is_none() && !is_frozen() {}
        std::thread::sleep(Duration::from_millis(random.below(12)));
        wait_until_it_executes(container.pid);
        frozen += u32::from(is_frozen());
        container.kill();
        let output = checkpoint.wait_with_output().expect("it ends");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!message.contains("does not answer"), "round {round}: {message}");
    }
    assert!(frozen > 3, "{frozen} of the containers were frozen when they were killed");
}

#[test]
fn a_container_that_is_killed_in_its_restore_ends() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let mut container = story.container_of_five();
    story.checkpoint(container.pid);
    container.kill();
    let mut traced = 0;
    for round in 0..8 {
        let mut restore = story.start(&["restore", "--yes", "--detach", "box"]);
        let is_first = |pid: &i32| status_field(*pid, "NSpid").is_some_and(|ids| ids.ends_with("\t1"));
        let first = || children(restore.id() as i32).into_iter().flat_map(children).find(is_first);
        let first = wait_for("the first process", first);
        let is_traced = || status_field(first, "TracerPid").is_some_and(|tracer| tracer != "0");
        while restore.try_wait().expect("our child").is_none() && !is_traced() {}
        wait_until_it_executes(first);
        traced += u32::from(is_traced());
        kill_and_wait(first);
        let output = restore.wait_with_output().expect("it ends");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!message.contains("within"), "round {round}: {message}");
    }
    assert!(traced > 1, "{traced} of the containers were traced when they were killed");
}

/// The container's program checks all its memory, so that it waits for all of it.
#[test]
fn a_container_runs_before_its_memory_is_there_and_ends_if_it_never_comes() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let program = ["setsid", story.program, "data", "64", "/data/checks"];
    let mut container = Container::start(&["--net"], &story.root, &story.data, &program);
    let checks = story.data.join("checks");
    assert_oracle!(continues(&checks, container.pid), "the program has ended");
    story.checkpoint(container.pid);
    container.kill();
    let restored = story.restore(&["box", "--lazy"]);
    assert_eq!(ids(restored.0)[1..], ["1"]);
    assert_oracle!(continues(&checks, restored.0), "the restored program has ended");
    // It can be saved like the first.
    story.checkpoint(restored.0);
    drop(restored);

    let mut ended = 0;
    for ms in [0, 0, 2, 5, 10, 20, 40, 80] {
        let mut restore = story.pagemark.command(&["restore", "--yes", "--lazy", "box@1"]);
        restore.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut restore = restore.spawn().expect("pagemark starts");
        // This is the last message before the delivery of memory.
        let mut lines = BufReader::new(restore.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("runs as process")).expect("it is restored");
        let pid = line.rsplit(' ').next().and_then(|word| word.parse().ok()).expect("a process id");
        let restored = Restored::new(pid);
        std::thread::sleep(Duration::from_millis(ms));
        let _ = restore.kill();
        restore.wait().expect("our child");
        ended += u32::from(!continues(&checks, restored.0));
    }
    eprintln!("{ended} containers ended with the process that delivered their memory");
    assert!(ended > 0, "no restore was killed before all memory was there");
}

#[test]
fn a_container_is_restored_on_another_root_directory() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let mut container = Container::start(
        &["--net"],
        &story.root,
        &story.data,
        &["setsid", "sh", "-c", "exec /data/subject steps 1 /steps >>/output 2>&1"],
    );
    let steps = Steps::new(&story.root);
    steps.goes_on(container.pid);
    story.checkpoint(container.pid);
    container.kill();
    let moved = story.pagemark.directory().join("moved");
    fs::rename(&story.root, &moved).expect("the root directory is moved");
    story.refused(&["box"], &["root directory", "--root"]);
    assert!(!story.root.exists());
    let restored = story.restore(&["box", "--root", moved.to_str().expect("UTF-8")]);
    Steps::new(&moved).goes_on(restored.0);
}

/// The files are handed over in its `/proc`, which others could exchange.
#[test]
fn a_container_whose_root_directory_others_can_write_is_refused_with_a_remedy() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let set_mode = |mode| fs::set_permissions(&story.root, fs::Permissions::from_mode(mode)).expect("it is ours");
    // Root's group can write, of which no user of the container is.
    std::os::unix::fs::chown(&story.root, None, Some(0)).expect("it is ours");
    set_mode(0o775);
    let mut container = story.container();
    story.checkpoint(container.pid);
    container.kill();
    set_mode(0o777);
    story.refused(&["box"], &["others than root can change", "let root alone write to the root directory"]);
    set_mode(0o775);
    let restored = story.restore(&["box"]);
    story.steps.goes_on(restored.0);
}

#[test]
fn a_container_with_interfaces_needs_a_network_that_has_them() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let mut container = story.container();
    let target = container.pid.to_string();
    let add = ["ip", "link", "add", "veth-inside", "type", "veth", "peer", "name", "veth-other"];
    let added = Command::new("nsenter").args(["--target", &target, "--net"]).args(add).output().expect("nsenter");
    if !added.status.success() {
        skip!("this kernel has no virtual network interfaces: {}", String::from_utf8_lossy(&added.stderr));
    }
    story.checkpoint(container.pid);
    container.kill();
    story.refused(&["box"], &["veth-inside", "--network PATH"]);
    let restored = story.restore(&["box", "--network", "loopback"]);
    story.steps.goes_on(restored.0);
    drop(restored);
    let restored = story.restore(&["box", "--network", "/proc/self/ns/net"]);
    story.steps.goes_on(restored.0);
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).expect("a network");
    assert_eq!(network(&restored.0.to_string()), network("self"));
}

#[test]
fn a_container_comes_back_with_its_network_if_that_is_saved() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let mut container = story.container();
    let target = container.pid.to_string();
    let set = "ip address add 192.0.2.7/32 dev lo && echo 7 77 > /proc/sys/net/ipv4/ping_group_range";
    let set = Command::new("nsenter").args(["--target", &target, "--net", "sh", "-c", set]).output().expect("nsenter");
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    let settings = |pid: i32| {
        let show = "ip -o address show dev lo | grep -o '192[.0-9/]*'; cat /proc/sys/net/ipv4/ping_group_range";
        let output = Command::new("nsenter").args(["--target", &pid.to_string(), "--net", "sh", "-c", show]).output();
        String::from_utf8(output.expect("nsenter").stdout).expect("UTF-8")
    };
    assert_eq!(settings(container.pid), "192.0.2.7/32\n7\t77\n");
    let before = descriptors(container.pid);
    story.pagemark.done(&["checkpoint", "--save-network", "--job", "box", &target]);
    untouched(container.pid, &before);
    story.checkpoint(container.pid);
    container.kill();
    let restored = story.restore(&["box@1"]);
    story.steps.goes_on(restored.0);
    assert_eq!(settings(restored.0), "192.0.2.7/32\n7\t77\n");
    drop(restored);
    story.refused(&["box@1", "--network", "loopback"], &["--save-network", "without --network"]);
    let restored = story.restore(&["box@2"]);
    assert_eq!(settings(restored.0), "1\t0\n", "the network of a new namespace");
}

#[test]
fn a_first_process_without_a_session_is_refused_with_a_remedy() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let container =
        Container::start(&["--net"], &story.root, &story.data, &[story.program, "steps", "1", "/data/steps"]);
    story.steps.goes_on(container.pid);
    let output = story.pagemark.output(&["checkpoint", "--job", "box", &container.pid.to_string()]);
    assert_fails(&output, &["setsid"]);
    assert!(is_alive(container.pid));
    story.steps.goes_on(container.pid);
}

/// The container has the host's `/dev`, and what is mounted below it.
#[test]
fn a_container_with_users_of_its_own_is_refused_if_no_restore_could_mount_its_directories() {
    let Some(story) = Story::begin() else { skip!("whole checkpoints need root, CRIU and a C compiler") };
    let options = ["--net", "--user", "--map-root-user"];
    let program = ["setsid", story.program, "steps", "1", "/data/steps"];
    let container = Container::start(&options, &story.root, &story.data, &program);
    story.steps.goes_on(container.pid);
    let before = descriptors(container.pid);
    let output = story.pagemark.output(&["checkpoint", "--job", "box", &container.pid.to_string()]);
    assert_fails(&output, &["user namespace", "from outside", "--memory-only"]);
    assert_eq!(descriptors(container.pid), before);
    story.steps.goes_on(container.pid);
}
