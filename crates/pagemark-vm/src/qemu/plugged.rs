//! The devices of a command line: a restored machine has these and no others.

use serde_json::{Value, json};

use crate::qemu::command::{Command, text};
use crate::qemu::command_line::{option_name, split_options};

/// Where QEMU's tree of objects has the devices that users have added, with an id and without.
const USERS_DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// The commands that list these places.
pub(crate) fn list() -> [Command; 2] {
    USERS_DEVICES.map(|place| Command::new("qom-list", json!({ "path": place })))
}

/// The devices in what QEMU has replied to the commands of [`list`].
pub(crate) fn listed(lists: [&Value; 2]) -> Vec<String> {
    let devices = USERS_DEVICES.iter().zip(lists).flat_map(|(place, list)| {
        let children = list.as_array().map_or(&[][..], Vec::as_slice);
        let children = children.iter().filter(|child| text(child, "type").starts_with("child<"));
        children.map(move |child| format!("{place}/{}", text(child, "name")))
    });
    devices.collect()
}

/// The first device of the command line that the machine, whose devices are at the places
/// `present`, has not any more; for a device without an id, QEMU's name for it.
pub(crate) fn unplugged(arguments: &[String], present: &[String]) -> Option<String> {
    let has = |place: &str, name: &str| present.iter().any(|device| *device == format!("{place}/{name}"));
    let mut without_id = 0;
    for pair in arguments.windows(2) {
        let id = match option_name(&pair[0]) {
            Some("device") => id_of(&pair[1]),
            // The device of such a drive is QEMU's own addition, as one without an id.
            Some("drive") if split_options(&pair[1]).contains(&"if=virtio") => None,
            _ => continue,
        };
        match id {
            Some(id) if !has(USERS_DEVICES[0], &id) => return Some(id),
            Some(_) => {}
            None => without_id += 1,
        }
    }
    // QEMU numbers all that have no id, also those that are plugged in later.
    let number = |device: &String| -> Option<usize> {
        let name = device.strip_prefix(USERS_DEVICES[1])?.strip_prefix("/device[")?;
        name.strip_suffix(']')?.parse().ok()
    };
    let count = present.iter().filter_map(number).map(|number| number + 1).max().unwrap_or(0).max(without_id);
    (0..count).map(|number| format!("device[{number}]")).find(|name| !has(USERS_DEVICES[1], name))
}

/// The id of the value of a `-device`.
fn id_of(value: &str) -> Option<String> {
    if value.starts_with('{') {
        let device: Value = serde_json::from_str(value).ok()?;
        return Some(device.get("id")?.as_str()?.to_owned());
    }
    let id = split_options(value).into_iter().find_map(|option| option.strip_prefix("id="))?;
    Some(id.replace(",,", ","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_the_command_line_that_is_gone_is_named() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let line =
            words("-device a,id=x -device b -drive if=virtio,file=c -device {\"driver\":\"d\",\"id\":\"y\"} -nic user");
        let all = words(
            "/machine/peripheral/x /machine/peripheral/y /machine/peripheral-anon/device[0] \
             /machine/peripheral-anon/device[1] /machine/peripheral-anon/device[2]",
        );
        assert_eq!(unplugged(&line, &all), None);
        for (gone, name) in [(0, "x"), (1, "y"), (2, "device[0]"), (3, "device[1]")] {
            let mut rest = all.clone();
            rest.remove(gone);
            assert_eq!(unplugged(&line, &rest).as_deref(), Some(name));
        }
        // One that the command line does not count.
        assert_eq!(unplugged(&line, &all[..4]), None);
        assert_eq!(unplugged(&line, &all[..3]).as_deref(), Some("device[1]"));
    }
}
