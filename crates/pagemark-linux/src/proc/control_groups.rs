//! `/proc/PID/cgroup`: the control groups of a process or thread.

use std::io;

/// The group of a process or thread in one hierarchy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControlGroup {
    /// The controllers of the hierarchy, as in `cpu,cpuacct`, or its name, as in `name=systemd`.
    /// Empty for version 2.
    pub hierarchy: String,
    /// Path of the group from the root of the hierarchy, with a leading slash.
    pub path: String,
}

/// The groups of a process or thread.
///
/// # Errors
/// There is no such process.
pub fn control_groups(id: i32) -> io::Result<Vec<ControlGroup>> {
    super::read(id, "cgroup").map(|text| parse(&text))
}

/// The groups of this process.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own_control_groups() -> io::Result<Vec<ControlGroup>> {
    std::fs::read(super::own_path("cgroup")).map(|text| parse(&text))
}

/// The content of `/proc/PID/cgroup`. Groups whose paths are not UTF-8 are left out.
pub fn parse(text: &[u8]) -> Vec<ControlGroup> {
    let group = |line: &[u8]| {
        let (_number, rest) = std::str::from_utf8(line).ok()?.split_once(':')?;
        let (hierarchy, path) = rest.split_once(':')?;
        Some(ControlGroup { hierarchy: hierarchy.to_owned(), path: path.to_owned() })
    };
    text.split(|&byte| byte == b'\n').filter_map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions_are_parsed() {
        let text = b"12:cpu,cpuacct:/user:1\n1:name=systemd:/\nnothing\n3:x:/\xff\n0::/user.slice\n";
        let groups: Vec<_> = parse(text).into_iter().map(|group| (group.hierarchy, group.path)).collect();
        let expected = [("cpu,cpuacct", "/user:1"), ("name=systemd", "/"), ("", "/user.slice")];
        assert_eq!(groups, expected.map(|(hierarchy, path)| (hierarchy.to_owned(), path.to_owned())));
    }
}
