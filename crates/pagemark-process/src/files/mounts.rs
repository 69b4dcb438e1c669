//! The file systems on which programs keep files.

use std::io;
use std::path::Path;

use pagemark_linux::proc::mounts::Mount;

/// Types of file systems that hold no files of programs.
const WITHOUT_FILES: [&str; 21] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "rpc_pipefs",
    "securityfs",
    "selinuxfs",
    "sysfs",
    "tracefs",
];

/// The file systems that are mounted here and can be written, each once: where its root is mounted,
/// if it is.
pub(super) fn file_systems() -> io::Result<Vec<Mount>> {
    Ok(with_files(Mount::of_this_process()?))
}

fn with_files(mounts: Vec<Mount>) -> Vec<Mount> {
    let mut found: Vec<Mount> = Vec::new();
    let is_read_only = |mount: &Mount| mount.options.split(',').any(|option| option == "ro");
    let is_root = |mount: &Mount| mount.root == Path::new("/");
    for mount in mounts {
        if WITHOUT_FILES.contains(&mount.file_system.as_str()) || is_read_only(&mount) {
            continue;
        }
        match found.iter_mut().find(|other| other.device == mount.device) {
            Some(other) if is_root(&mount) && !is_root(other) => *other = mount,
            Some(_) => {}
            None => found.push(mount),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_system_is_listed_once_where_its_root_is() {
        let text = "\
22 1 254:0 /home /srv rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
24 1 254:0 /var /mnt rw,relatime - ext4 /dev/vda rw,discard
25 23 0:5 / /proc rw - proc proc rw
26 23 0:9 / /dev/shm rw,nosuid master:3 shared:4 - tmpfs tmpfs rw,size=1k
27 23 0:10 / /boot ro - vfat /dev/vdb ro
28 23 0:11 /part /data rw - xfs /dev/vdc rw
";
        let found = with_files(Mount::parse(text.as_bytes()));
        let points: Vec<_> = found.iter().map(|mount| mount.point.to_str().unwrap()).collect();
        assert_eq!(points, ["/", "/dev/shm", "/data"]);
        assert!(!file_systems().unwrap().is_empty());
    }
}
