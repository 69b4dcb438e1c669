//! Files of `/proc` that describe the machine.

use std::fs;
use std::io;
use std::path::Path;

use super::{ControlGroup, Fields};

/// Memory that is free or holds only what can be read again, of the machine and of the control
/// groups that limit this process, bytes. None where the kernel does not say.
pub fn available_bytes() -> Option<u64> {
    let of_machine = Fields::read("/proc/meminfo").ok()?.bytes("MemAvailable")?;
    let groups = super::own_control_groups().unwrap_or_default();
    let of_groups = available_in_control_groups(&groups, Path::new("/sys/fs/cgroup"));
    Some(of_groups.map_or(of_machine, |bytes| bytes.min(of_machine)))
}

/// The least that any of the control groups has left of its limit; None without a limit. `root`
/// is the directory where the hierarchies are mounted.
fn available_in_control_groups(groups: &[ControlGroup], root: &Path) -> Option<u64> {
    let left = groups.iter().filter_map(|group| {
        let path = group.path.strip_prefix('/')?;
        let (root, limit, usage, files) = match group.hierarchy.as_str() {
            "" => (root.to_owned(), "memory.max", "memory.current", "inactive_file"),
            controllers if controllers.split(',').any(|controller| controller == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            }
            _ => return None,
        };
        let directory = root.join(path);
        // In a container the mounted hierarchy may begin at the container's own group.
        let groups = directory.ancestors().take_while(|group| group.starts_with(&root));
        let left = groups.filter_map(|group| {
            let read = |name| fs::read_to_string(group.join(name)).ok();
            let number = |name| read(name)?.trim().parse::<u64>().ok();
            let statistics = read("memory.stat").unwrap_or_default();
            let mut statistics = statistics.lines().filter_map(|line| line.split_once(' '));
            let file_bytes = statistics.find(|(name, _)| *name == files).and_then(|(_, bytes)| bytes.parse().ok());
            let used_bytes = number(usage)?.saturating_sub(file_bytes.unwrap_or(0));
            Some(number(limit)?.saturating_sub(used_bytes))
        });
        left.min()
    });
    left.min()
}

/// True if the machine has swap space.
///
/// # Errors
/// `/proc` is not mounted.
pub fn has_swap() -> io::Result<bool> {
    // The first line is a heading.
    Ok(fs::read("/proc/swaps")?.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).count() > 1)
}

/// The name of the first processor's model; empty where the kernel does not say.
///
/// # Errors
/// `/proc` is not mounted.
pub fn processor_model() -> io::Result<String> {
    let text = fs::read("/proc/cpuinfo")?;
    let lines = String::from_utf8_lossy(&text);
    let model = lines.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    Ok(model.map(|(_, name)| name.trim().to_owned()).unwrap_or_default())
}

/// A setting of the kernel, `/proc/sys/NAME`, without surrounding white space. None where there is
/// no such setting.
pub fn setting(name: &str) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/sys/{name}")).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_control_group_limits_memory() {
        let directory = tempfile::tempdir().unwrap();
        let write = |group: &str, limit: &str, usage: &str, statistics: &str| {
            let group = directory.path().join(group);
            fs::create_dir_all(&group).unwrap();
            let version_1 = group.starts_with(directory.path().join("memory"));
            let names = if version_1 { ["limit_in_bytes", "usage_in_bytes"] } else { ["max", "current"] };
            fs::write(group.join(format!("memory.{}", names[0])), limit).unwrap();
            fs::write(group.join(format!("memory.{}", names[1])), usage).unwrap();
            fs::write(group.join("memory.stat"), statistics).unwrap();
        };
        let available = |groups: &str| {
            available_in_control_groups(&super::super::control_groups::parse(groups.as_bytes()), directory.path())
        };
        assert_eq!(available("0::/a/b\n"), None);
        write("a", "1000\n", "700\n", "anon 650\ninactive_file 50\n");
        write("a/b", "max\n", "600\n", "");
        assert_eq!(available("0::/a/b\n"), Some(350));
        assert_eq!(available("0::/\n"), None);
        write("memory/c", "900\n", "800\n", "total_inactive_file 20\n");
        assert_eq!(available("7:pids:/c\n4:memory:/c\n0::/a/b\n"), Some(120));
        assert_eq!(available("no groups"), None);
    }

    #[test]
    fn this_machine_is_described() {
        assert!(available_bytes().unwrap() > 0);
        has_swap().unwrap();
        processor_model().unwrap();
        assert!(setting("kernel/pid_max").unwrap().parse::<u32>().unwrap() > 0);
        assert_eq!(setting("no/such/setting"), None);
    }
}
