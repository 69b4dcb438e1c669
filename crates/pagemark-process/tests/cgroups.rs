//! Control groups of restored processes.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use pagemark_process::restore::Restore;
use pagemark_testing::{skip, wait_until};
use support::{Checkpoints, Program, tree};

/// A process, its child, and a second thread of the child.
const FAMILY: &str = r#"
import os, threading, time
if os.fork() == 0:
    threading.Thread(target=lambda: time.sleep(1000)).start()
    open('ready', 'w').close()
while True:
    time.sleep(1000)
"#;

/// A control group that is removed in the end.
struct Group(PathBuf);

impl Group {
    /// A new group in the first hierarchy where that is possible.
    fn new(name: &str) -> Option<Group> {
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids"].map(Path::new);
        let group = mounts.iter().map(|mount| mount.join(format!("pagemark-{name}-{}", std::process::id())));
        let mut made = group.filter(|group| fs::create_dir(group).is_ok());
        made.find(|group| group.join("cgroup.procs").exists() || fs::remove_dir(group).is_err()).map(Group)
    }

    fn put(&self, pid: i32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    fn has(&self, pid: i32) -> bool {
        let members = fs::read_to_string(self.0.join("cgroup.procs")).unwrap();
        members.lines().any(|member| member == pid.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn restored_processes_are_in_their_groups_and_groups_that_are_gone_are_reported() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let (Some(first), Some(second)) = (Group::new("first"), Group::new("second")) else {
        skip!("no control groups can be made here");
    };
    let mut program = Program::python(FAMILY);
    wait_until("the program has its child", || program.read("ready").is_some());
    let pids = tree(program.pid());
    let [root, child] = pids[..] else { panic!("{pids:?}") };
    first.put(root);
    second.put(child);
    let checkpoint = checkpoints.take(&program, &[]);
    let mut restore = |is_ignored| {
        program.kill();
        let restore = Restore::new(&checkpoint).criu(checkpoints.criu.clone());
        let restored = restore.ignore_cgroups(is_ignored).run(&mut |_| {}).unwrap();
        program.adopt(&restored);
        restored
    };

    let restored = restore(false);
    assert_eq!(restored.left_groups, Vec::<String>::new());
    assert!(first.has(root) && second.has(child));

    let restored = restore(true);
    assert_eq!(restored.left_groups, Vec::<String>::new());
    assert!(!first.has(root) && !first.has(child) && !second.has(child));

    drop(second);
    let restored = restore(false);
    assert!(first.has(root) && first.has(child));
    let [left] = &restored.left_groups[..] else { panic!("{:?}", restored.left_groups) };
    assert!(left.contains(&format!("process {child} ")) && left.contains("pagemark-second-"), "{left}");
    program.kill();
    drop(first);
}
