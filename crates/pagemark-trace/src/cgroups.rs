//! Control groups: recorded with a checkpoint, and joined again by a restore.
//!
//! CRIU can do this too ([`Cgroups::Criu`]), with the properties of the groups. It reads the
//! properties of all groups while the tree is frozen, which makes the freeze of a small process
//! four times as long. By default Pagemark therefore records only in which groups the threads are.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pagemark_linux::proc::{self, ControlGroup, Mount};
use serde::{Deserialize, Serialize};

use crate::recorded_pid::{PidsHere, RecordedPid};

/// What becomes of the control groups of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cgroups {
    /// A restore puts each thread into the groups in which it was, where they still exist.
    #[default]
    Restore,
    /// Restored processes are in the groups of the restoring command.
    Ignore,
    /// CRIU saves and restores groups and their properties.
    Criu(CriuCgroups),
}

/// The modes of CRIU's option `--manage-cgroups`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CriuCgroups {
    /// Restores properties; the groups must exist.
    Props,
    /// Creates groups that do not exist, with their properties.
    Soft,
    /// Creates groups, and restores all properties.
    Full,
    /// Creates all groups with their properties; none may exist.
    Strict,
}

impl CriuCgroups {
    /// All modes, with CRIU's names.
    const NAMES: [(CriuCgroups, &str); 4] = [
        (CriuCgroups::Props, "props"),
        (CriuCgroups::Soft, "soft"),
        (CriuCgroups::Full, "full"),
        (CriuCgroups::Strict, "strict"),
    ];
}

impl Cgroups {
    /// The value of CRIU's option `--manage-cgroups`.
    pub fn criu_mode(self) -> &'static str {
        let mode = CriuCgroups::NAMES.iter().find(|(mode, _)| self == Cgroups::Criu(*mode));
        mode.map_or("ignore", |(_, name)| name)
    }
}

impl FromStr for Cgroups {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let criu = CriuCgroups::NAMES.iter().find(|(_, of_mode)| *of_mode == name);
        match (name, criu) {
            ("restore", _) => Ok(Cgroups::Restore),
            ("ignore", _) => Ok(Cgroups::Ignore),
            (_, Some((mode, _))) => Ok(Cgroups::Criu(*mode)),
            _ => {
                let names = CriuCgroups::NAMES.map(|(_, name)| name).join(", ");
                Err(format!("the modes are restore and ignore, and those of CRIU: {names}"))
            }
        }
    }
}

/// A control group, as a line of `/proc/PID/cgroup` names it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Group {
    /// The controllers of a hierarchy of version 1, or its name as `name=NAME`; empty for version
    /// 2.
    hierarchy: String,
    /// Path from the root of the hierarchy.
    path: String,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hierarchy = if self.hierarchy.is_empty() { "version 2" } else { &self.hierarchy };
        write!(f, "{:?} of {hierarchy}", self.path)
    }
}

/// The groups of each process, and of each thread whose groups are not those of its process, by the
/// ids that CRIU's images have.
pub type Memberships = BTreeMap<RecordedPid, Vec<Group>>;

/// Reads the groups of the threads of processes. A process that is gone has none. `image_pid`
/// gives the id that the images have for a process or thread.
pub fn memberships(pids: &[i32], image_pid: fn(i32) -> RecordedPid) -> Memberships {
    let mut memberships = Memberships::new();
    for &pid in pids {
        let of_process = groups(pid);
        for thread in proc::threads(pid).unwrap_or_default() {
            let of_thread = groups(thread);
            if thread != pid && !of_thread.is_empty() && of_thread != of_process {
                memberships.insert(image_pid(thread), of_thread);
            }
        }
        memberships.insert(image_pid(pid), of_process);
    }
    memberships
}

fn groups(id: i32) -> Vec<Group> {
    let groups = proc::control_groups(id).unwrap_or_default();
    groups.into_iter().map(|ControlGroup { hierarchy, path }| Group { hierarchy, path }).collect()
}

/// A group that a process could not be put into.
#[derive(Debug)]
pub struct NotJoined {
    /// The process or thread, by its id here. Before a container is there, its first process by the
    /// recorded id.
    pub id: i32,
    /// The group.
    pub group: Group,
    /// Why not.
    pub error: io::Error,
}

impl fmt::Display for NotJoined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} is not in the control group {} as it was: {}", self.id, self.group, self.error)
    }
}

/// The mounted hierarchies, and the groups that are yet to be joined.
pub struct Joining {
    hierarchies: Vec<Hierarchy>,
    memberships: Memberships,
    /// The groups of what is restored before it joins others.
    own: Vec<Group>,
    /// Once its groups were opened.
    root_pid: Option<RecordedPid>,
    not_joined: Vec<NotJoined>,
}

/// A mounted hierarchy.
#[derive(PartialEq, Eq, Debug)]
struct Hierarchy {
    /// As in [`Group::hierarchy`], without an order of the controllers.
    controllers: Vec<String>,
    /// The group that is mounted.
    root: PathBuf,
    directory: PathBuf,
}

impl Joining {
    /// Of processes with these memberships.
    pub fn new(memberships: Memberships) -> Joining {
        let mounts = Mount::of_this_process().unwrap_or_default();
        let hierarchies = mounts.into_iter().filter_map(Hierarchy::of).collect();
        let own = groups(std::process::id() as i32);
        Joining { hierarchies, memberships, own, root_pid: None, not_joined: Vec::new() }
    }

    /// Opens the files through which the restoring program joins the groups of the root process, by
    /// writing `0` to each. Everything that it restores then begins there, and the memory of the
    /// tree is charged to these groups.
    pub fn open_groups_of(&mut self, root_pid: RecordedPid) -> Vec<File> {
        let groups = self.memberships.remove(&root_pid).unwrap_or_default();
        let mut files = Vec::new();
        for group in &groups {
            if self.own.contains(group) {
                continue;
            }
            match self.open(group, Unit::Process) {
                Ok(file) => files.push(file),
                Err(error) => self.not_joined.push(NotJoined { id: root_pid.get(), group: group.clone(), error }),
            }
        }
        // What the others inherit.
        if !groups.is_empty() {
            self.own = groups;
            self.root_pid = Some(root_pid);
        }
        files
    }

    /// Puts the restored processes and threads into their groups where these are not the groups of
    /// the root process. One that a container has no more is in no group. Returns the groups that
    /// were not joined.
    pub fn join_others(mut self, here: &PidsHere) -> Vec<NotJoined> {
        if let Some(root_pid) = self.root_pid.and_then(|root_pid| here.get(root_pid)) {
            let now = groups(root_pid);
            for group in self.own.iter().filter(|&group| !now.contains(group)) {
                if self.not_joined.iter().all(|not_joined| not_joined.group != *group) {
                    let error = io::Error::from(io::ErrorKind::PermissionDenied);
                    self.not_joined.push(NotJoined { id: root_pid, group: group.clone(), error });
                }
            }
        }
        for (id, groups) in std::mem::take(&mut self.memberships) {
            let Some(id) = here.get(id) else { continue };
            let unit = if proc::Status::read(id).is_ok_and(|status| status.process_id == id) {
                Unit::Process
            } else {
                Unit::Thread
            };
            for group in groups.into_iter().filter(|group| !self.own.contains(group)) {
                let joined = self.open(&group, unit).and_then(|mut file| file.write_all(id.to_string().as_bytes()));
                if let Err(error) = joined {
                    self.not_joined.push(NotJoined { id, group, error });
                }
            }
        }
        self.not_joined
    }

    /// Opens the file of a group that takes the ids of its members.
    fn open(&self, group: &Group, unit: Unit) -> io::Result<File> {
        let directory = self
            .directory(group)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "its hierarchy is not mounted here"))?;
        let name = match (unit, group.hierarchy.is_empty()) {
            (Unit::Process, _) => "cgroup.procs",
            (Unit::Thread, true) => "cgroup.threads",
            (Unit::Thread, false) => "tasks",
        };
        OpenOptions::new().write(true).open(directory.join(name))
    }

    fn directory(&self, group: &Group) -> Option<PathBuf> {
        let controllers = controllers(&group.hierarchy);
        self.hierarchies.iter().filter(|mount| mount.controllers == controllers).find_map(|mount| {
            let path = Path::new(&group.path).strip_prefix(&mount.root).ok()?;
            // A group outside of the namespace of groups has a path that leads upwards.
            let is_inside = path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
            is_inside.then(|| mount.directory.join(path))
        })
    }
}

/// The ways out of the control groups of this process: to the root of each hierarchy. Whoever ends
/// a service, a session or a job kills all of its group; the root has no such end. Empty where that
/// is not permitted.
pub fn ways_out() -> Vec<File> {
    let joining = Joining::new(Memberships::new());
    let nested = joining.own.iter().filter(|group| group.path != "/");
    let roots = nested.map(|group| Group { hierarchy: group.hierarchy.clone(), path: "/".into() });
    roots.filter_map(|root| joining.open(&root, Unit::Process).ok()).collect()
}

/// Takes the ways out, in the process that is to leave. Makes only system calls. An error leaves
/// the process in a group.
pub fn take(ways_out: &[File]) {
    for mut way in ways_out {
        // The process that writes.
        let _ = way.write(b"0");
    }
}

/// What joins a group.
#[derive(Clone, Copy)]
enum Unit {
    Process,
    Thread,
}

fn controllers(text: &str) -> Vec<String> {
    let mut parts: Vec<String> = text.split(',').map(str::to_owned).collect();
    parts.sort();
    parts
}

impl Hierarchy {
    /// None if the mount is not one of control groups.
    fn of(mount: Mount) -> Option<Hierarchy> {
        let controllers = match &*mount.file_system {
            "cgroup2" => controllers(""),
            "cgroup" => {
                // The options of the file system are the controllers, the name, and some others.
                let others = ["rw", "ro", "xattr", "clone_children", "cpuset_v2_mode", "noprefix"];
                let parts = mount.options.split(',');
                let parts = parts.filter(|option| !others.contains(option) && !option.starts_with("release_agent="));
                controllers(&parts.collect::<Vec<_>>().join(","))
            }
            _ => return None,
        };
        Some(Hierarchy { controllers, root: mount.root, directory: mount.point })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_by_the_names_that_criu_gets() {
        for name in ["props", "soft", "full", "strict", "ignore"] {
            assert_eq!(name.parse::<Cgroups>().unwrap().criu_mode(), name);
        }
        assert_eq!("restore".parse::<Cgroups>().unwrap().criu_mode(), "ignore");
        let error = "none".parse::<Cgroups>().unwrap_err();
        assert!(error.contains("restore") && error.contains("strict"), "{error}");
    }

    #[test]
    fn groups_are_found_where_their_hierarchy_is_mounted() {
        let lines = [
            "30 23 0:26 / /sys/fs/cgroup/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate",
            "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpuacct,cpu",
            "32 23 0:28 /inner /mnt/named rw - cgroup none rw,xattr,name=jobs",
            "33 23 0:29 / /proc rw - proc proc rw",
        ];
        let mounts = Mount::parse(lines.join("\n").as_bytes());
        let hierarchies = mounts.into_iter().filter_map(Hierarchy::of).collect();
        let joining = Joining { hierarchies, ..Joining::new(Memberships::new()) };
        let directory = |hierarchy: &str, path: &str| {
            let group = Group { hierarchy: hierarchy.into(), path: path.into() };
            joining.directory(&group).map(|directory| directory.display().to_string())
        };
        assert_eq!(directory("", "/a/b").as_deref(), Some("/sys/fs/cgroup/unified/a/b"));
        assert_eq!(directory("cpu,cpuacct", "/").as_deref(), Some("/sys/fs/cgroup/cpu,cpuacct/"));
        assert_eq!(directory("name=jobs", "/inner/a").as_deref(), Some("/mnt/named/a"));
        assert_eq!(directory("name=jobs", "/a"), None);
        assert_eq!(directory("", "/../a"), None);
        assert_eq!(directory("memory", "/"), None);
    }

    #[test]
    fn this_process_is_in_its_groups() {
        let own = std::process::id() as i32;
        let mut joining = Joining::new(memberships(&[own], RecordedPid::new));
        // It is in all of them, so nothing is to be joined.
        assert!(joining.open_groups_of(RecordedPid::new(own)).is_empty());
        assert!(joining.join_others(&PidsHere::as_recorded()).is_empty());
    }

    #[test]
    fn a_process_that_has_ended_is_not_taken_for_another() {
        let (directory, own) = (tempfile::tempdir().unwrap(), std::process::id() as i32);
        let members = directory.path().join("cgroup.procs");
        std::fs::write(&members, "").unwrap();
        let group = Group { hierarchy: String::new(), path: "/".into() };
        let hierarchy =
            Hierarchy { controllers: controllers(""), root: "/".into(), directory: directory.path().into() };
        let joining = Joining::new(Memberships::from([(RecordedPid::new(own), vec![group])]));
        let joining = Joining { hierarchies: vec![hierarchy], own: Vec::new(), ..joining };
        // In the container the id was that of a process that has ended since.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = proc::Process::find(child.id() as i32).unwrap();
        child.wait().unwrap();
        let not_joined = joining.join_others(&PidsHere::of_container(ended));
        assert!(not_joined.is_empty(), "{not_joined:?}");
        assert_eq!(std::fs::read_to_string(&members).unwrap(), "");
    }

    #[test]
    fn modes_have_names() {
        for name in ["restore", "ignore", "props", "soft", "full", "strict"] {
            let mode: Cgroups = name.parse().unwrap();
            assert!(mode.criu_mode() == name || mode.criu_mode() == "ignore", "{name}");
        }
        assert!("none".parse::<Cgroups>().is_err());
    }
}
