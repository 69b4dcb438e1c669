//! The command line of a QEMU: what Pagemark reads from it, and what a restore changes in it.

use serde_json::Value;

/// The chardev of the monitor connection that a restore gives QEMU, by the number of its
/// descriptor.
pub(crate) const MONITOR_DESCRIPTOR: i32 = 3;

/// The arguments by which QEMU finds that connection.
pub(crate) const MONITOR_ARGUMENTS: [[&str; 2]; 2] = [["-chardev", "socket,id=pagemark,fd=3"], MONITOR];

/// What makes the chardev a monitor.
const MONITOR: [&str; 2] = ["-mon", "chardev=pagemark,mode=control"];

/// The begin of each chardev that Pagemark adds.
const OWN_CHARDEV: &str = "socket,id=pagemark,";

/// The output of a console whose input Pagemark records.
pub(crate) const CONSOLE_OUTPUT: &str = "file,id=pagemark-console,path=/dev/stdout,append=on";

/// The same console of a machine that is restored, with its input.
const CONSOLE: &str = "stdio,id=pagemark-console";

/// The option of Pagemark's plugin that names the list of what comes from outside.
pub(crate) const INPUTS: &str = "inputs=";

/// The option of the plugin by which standard input is the machine's console.
pub(crate) const READS_CONSOLE: &str = "console=on";

/// The option of the plugin that names the file of packets for the machine.
pub(crate) const PACKETS: &str = "network=";

/// The begin of the chardev that writes to that file, and of the filter that leads packets there.
pub(crate) const PACKETS_CHARDEV: &str = "file,id=pagemark-network,";
pub(crate) const PACKETS_FILTER: &str = "filter-redirector,id=pagemark-network-filter,";

/// The arguments by which packets from and for the network `id` are lost.
pub(crate) fn lost_packets(id: &str) -> [String; 4] {
    let filter = format!("filter-redirector,id=pagemark-lost-filter,netdev={id},queue=all,outdev=pagemark-lost");
    ["-chardev".into(), "null,id=pagemark-lost".into(), "-object".into(), filter]
}

/// The arguments that a restore adds to those of the checkpointed QEMU, besides a monitor.
const ADDED: [[&str; 2]; 3] = [
    ["-incoming", "defer"],
    // The stream of the devices alone has neither.
    ["-global", "migration.send-configuration=off"],
    ["-machine", "suppress-vmdesc=on"],
];

/// The arguments that give QEMU a monitor of Pagemark's, which listens on the socket `path`.
pub(crate) fn listening_monitor(path: &str) -> [String; 4] {
    let chardev = format!("{OWN_CHARDEV}path={},server=on,wait=off", path.replace(',', ",,"));
    ["-chardev".to_owned(), chardev, MONITOR[0].to_owned(), MONITOR[1].to_owned()]
}

/// The name that the arguments give the machine: `-name NAME` or `-name guest=NAME`.
///
/// ```
/// let arguments = ["-m", "64", "-name", "guest=vm1,debug-threads=on"].map(str::to_owned);
/// assert_eq!(pagemark_vm::machine_name(&arguments).as_deref(), Some("vm1"));
/// ```
pub fn machine_name(arguments: &[String]) -> Option<String> {
    let value = arguments.windows(2).rev().find(|pair| option_name(&pair[0]) == Some("name")).map(|pair| &pair[1])?;
    let named = split_options(value).into_iter().enumerate().find_map(|(at, option)| match option.split_once('=') {
        Some((key, name)) => (key == "guest").then_some(name),
        None => (at == 0).then_some(option),
    })?;
    Some(named.replace(",,", ",")).filter(|name| !name.is_empty())
}

/// True if the arguments make QEMU a daemon.
pub(crate) fn is_daemon(arguments: &[String]) -> bool {
    arguments.iter().any(|argument| option_name(argument) == Some("daemonize"))
}

/// Options whose value is a path.
const PATH_OPTIONS: [&str; 24] = [
    "mem-path",
    "kernel",
    "initrd",
    "dtb",
    "bios",
    "pidfile",
    "D",
    "L",
    "hda",
    "hdb",
    "hdc",
    "hdd",
    "cdrom",
    "fda",
    "fdb",
    "mtdblock",
    "pflash",
    "sd",
    "readconfig",
    "shim",
    "dump-vmstate",
    "option-rom",
    "seed",
    "append-file",
];

/// Begins of values, and of options of values, behind which is a path.
const PATH_KEYS: [&str; 11] =
    ["file=", "filename=", "path=", "unix:", "file:", "pipe:", "mem-path=", "script=", "dir=", "loc=", "logfile="];

/// The first argument with a path that is not whole, of a QEMU that has made itself a daemon: it
/// has left the directory in which the path begins.
pub(crate) fn relative_path_of_daemon(arguments: &[String]) -> Option<&str> {
    if !is_daemon(arguments) {
        return None;
    }
    // A name with a colon is that of a server, or of a set of descriptors.
    let is_relative = |path: &str| !path.is_empty() && !path.starts_with('/') && !path.contains(':');
    named_paths(arguments).into_iter().find(|named| is_relative(&named.path)).map(|named| named.argument)
}

/// A path in QEMU's arguments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NamedPath<'a> {
    /// The name of the option; empty for an image by itself, `disk.img`.
    pub(crate) option: &'a str,
    /// The argument that has the path.
    pub(crate) argument: &'a str,
    pub(crate) path: String,
}

/// The paths in the arguments. Some are not those of files, but names of servers.
pub(crate) fn named_paths(arguments: &[String]) -> Vec<NamedPath<'_>> {
    let mut paths = Vec::new();
    let mut options = arguments.iter();
    while let Some(argument) = options.next() {
        let Some(name) = option_name(argument) else {
            paths.push(NamedPath { option: "", argument, path: argument.clone() });
            continue;
        };
        if WITHOUT_VALUE.contains(&name) {
            continue;
        }
        let Some(value) = options.next() else { break };
        let named = |path: String| NamedPath { option: name, argument: value, path };
        match () {
            () if PATH_OPTIONS.contains(&name) => paths.push(named(value.clone())),
            () if value.starts_with('{') => {
                let document = serde_json::from_str::<Value>(value).unwrap_or_default();
                named_members(&document, &mut |path| paths.push(named(path.to_owned())));
            }
            () => paths.extend(split_options(value).into_iter().filter_map(path_of_option).map(named)),
        }
    }
    paths
}

/// The path in one of the options of a value.
fn path_of_option(option: &str) -> Option<String> {
    let option = option.strip_prefix("mon:").unwrap_or(option);
    let path = PATH_KEYS.iter().find_map(|key| match key.ends_with('=') {
        // Also `file.filename=`.
        true => {
            let (before, path) = option.rsplit_once(key)?;
            (before.is_empty() || before.ends_with('.')).then_some(path)
        }
        false => option.strip_prefix(key),
    });
    path.map(|path| path.replace(",,", ","))
}

/// Calls `found` with the paths in a document.
fn named_members(document: &Value, found: &mut dyn FnMut(&str)) {
    match document {
        Value::Object(members) => members.iter().for_each(|(key, value)| match value {
            Value::String(path) if ["filename", "path", "mem-path"].contains(&&**key) => found(path),
            // Of an object, such as a dump of packets; it names a node of a node.
            Value::String(path) if key == "file" && members.contains_key("qom-type") => found(path),
            other => named_members(other, found),
        }),
        Value::Array(values) => values.iter().for_each(|value| named_members(value, found)),
        _ => {}
    }
}

/// Options of values by which QEMU uses a descriptor that it was started with.
const DESCRIPTOR_KEYS: [&str; 5] = ["fd", "fds", "vhostfd", "vhostfds", "sock_fd"];

/// The begin of the names of files that are descriptors of QEMU.
const DESCRIPTOR_SET: &str = "/dev/fdset/";

/// The first value that needs a descriptor of the program that has started QEMU: a restored QEMU
/// has none of these.
pub(crate) fn with_descriptor(arguments: &[String]) -> Option<&str> {
    let mut values = arguments.windows(2).filter(|pair| pair[0].starts_with('-')).map(|pair| pair[1].as_str());
    values.find(|value| {
        // Its own, which a restore adds anew.
        !value.starts_with(OWN_CHARDEV) && !value.starts_with("fd:") && uses_descriptor(value)
    })
}

fn uses_descriptor(value: &str) -> bool {
    if value.starts_with('{')
        && let Ok(document) = serde_json::from_str::<Value>(value)
    {
        return has_descriptor(&document);
    }
    split_options(value).into_iter().any(|option| match option.split_once('=') {
        Some((key, value)) => {
            let name = key.rsplit('.').next().unwrap_or(key);
            DESCRIPTOR_KEYS.contains(&name) || key == "addr.type" && value == "fd" || value.starts_with(DESCRIPTOR_SET)
        }
        None => option.starts_with(DESCRIPTOR_SET),
    })
}

/// True if a document names a descriptor.
fn has_descriptor(value: &Value) -> bool {
    match value {
        Value::Object(members) => members.iter().any(|(key, value)| {
            DESCRIPTOR_KEYS.contains(&&**key) || key == "type" && value == "fd" || has_descriptor(value)
        }),
        Value::Array(values) => values.iter().any(has_descriptor),
        Value::String(text) => text.starts_with(DESCRIPTOR_SET),
        _ => false,
    }
}

/// Options of QEMU without a value.
const WITHOUT_VALUE: [&str; 32] = [
    "h",
    "help",
    "version",
    "snapshot",
    "no-fd-bootchk",
    "full-screen",
    "no-quit",
    "nographic",
    "no-acpi",
    "no-hpet",
    "usb",
    "portrait",
    "curses",
    "alt-grab",
    "ctrl-grab",
    "win2k-hack",
    "no-reboot",
    "no-shutdown",
    "S",
    "daemonize",
    "enable-kvm",
    "nodefaults",
    "no-user-config",
    "s",
    "singlestep",
    "preconfig",
    "only-migratable",
    "enable-sync-profile",
    "semihosting",
    "old-param",
    "mem-prealloc",
    "perfmap",
];

/// The name of an option, without its one or two dashes.
pub(crate) fn option_name(argument: &str) -> Option<&str> {
    let name = argument.strip_prefix('-')?;
    Some(name.strip_prefix('-').unwrap_or(name))
}

/// Splits at single commas.
pub(crate) fn split_options(argument: &str) -> Vec<&str> {
    let (mut options, mut start, mut at) = (Vec::new(), 0, 0);
    let bytes = argument.as_bytes();
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b',', Some(b',')) => at += 2,
            (b',', _) => {
                options.push(&argument[start..at]);
                at += 1;
                start = at;
            }
            _ => at += 1,
        }
    }
    options.push(&argument[start..]);
    options
}

/// The path of a socket on which QEMU listens because of this argument: `unix:PATH,server=on` or
/// `socket,path=PATH,server=on`.
pub(crate) fn served_path(argument: &str) -> Option<String> {
    const SERVED: [&str; 5] = ["server", "server=on", "server=yes", "server=true", "server=y"];
    let options = split_options(argument);
    let is_served = options.iter().any(|option| SERVED.contains(option));
    let path = options.iter().find_map(|option| {
        let option = option.strip_prefix("mon:").unwrap_or(option);
        ["unix:", "path=", "addr.path="].iter().find_map(|key| option.strip_prefix(key))
    });
    path.filter(|_| is_served).map(|path| path.replace(",,", ","))
}

/// The paths of all sockets on which QEMU listens because of these arguments, those of its screens
/// included.
pub(crate) fn served_paths(arguments: &[String]) -> Vec<String> {
    let mut paths: Vec<String> = arguments.iter().filter_map(|argument| served_path(argument)).collect();
    for pair in arguments.windows(2) {
        let options = || split_options(&pair[1]).into_iter();
        let path = match option_name(&pair[0]) {
            Some("vnc") if !options().any(|option| ["reverse", "reverse=on"].contains(&option)) => {
                options().find_map(|option| option.strip_prefix("unix:"))
            }
            Some("spice") if options().any(|option| ["unix", "unix=on"].contains(&option)) => {
                options().find_map(|option| option.strip_prefix("addr="))
            }
            _ => None,
        };
        paths.extend(path.map(|path| path.replace(",,", ",")));
    }
    paths
}

/// The paths of the sockets on which QEMU serves its monitor (QMP) because of these arguments:
/// `-qmp unix:PATH,server=on`, or `-mon chardev=ID,mode=control` with a chardev that is such a
/// socket.
pub(crate) fn monitor_paths(arguments: &[String]) -> Vec<String> {
    let pairs = || arguments.windows(2).filter_map(|pair| Some((option_name(&pair[0])?, pair[1].as_str())));
    let of_chardev = |id: &str| {
        let named = |value: &&str| split_options(value).iter().any(|option| option.strip_prefix("id=") == Some(id));
        let chardevs = pairs().filter(|(name, _)| *name == "chardev").map(|(_, value)| value);
        chardevs.filter(named).find_map(served_path)
    };
    let monitors = pairs().filter_map(|(name, value)| match name {
        "qmp" | "qmp-pretty" => value.strip_prefix("chardev:").map_or_else(|| served_path(value), of_chardev),
        "mon" => {
            let options = split_options(value);
            let is_control = options.contains(&"mode=control");
            let id = options.iter().find_map(|option| option.strip_prefix("chardev="));
            let first = || options.first().copied().filter(|option| !option.contains('='));
            id.or_else(first).filter(|_| is_control).and_then(of_chardev)
        }
        _ => None,
    });
    monitors.collect()
}

/// True if the value of an option `-plugin` has the machine's input recorded.
pub fn records_inputs(plugin: &str) -> bool {
    split_options(plugin).iter().any(|option| option.starts_with(INPUTS))
}

/// True if the arguments have packets for the machine recorded.
pub(crate) fn records_network(arguments: &[String]) -> bool {
    let mut options = arguments.iter().filter(|value| records_inputs(value)).flat_map(|value| split_options(value));
    options.any(|option| option.starts_with(PACKETS))
}

/// The arguments without those by which QEMU, as root, becomes another user: for a QEMU that is
/// started as that user.
pub(crate) fn without_user(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::with_capacity(arguments.len());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match option_name(argument) {
            Some("runas") => drop(rest.next()),
            Some("run-with") => {
                let Some(value) = rest.next() else { continue };
                let others = split_options(value).into_iter().filter(|option| !option.starts_with("user="));
                let others = others.collect::<Vec<_>>().join(",");
                if !others.is_empty() {
                    kept.extend([argument.clone(), others]);
                }
            }
            _ => kept.push(argument.clone()),
        }
    }
    kept
}

/// The arguments of the checkpointed QEMU, without those that Pagemark has added and those of a
/// start.
pub(crate) fn own_arguments(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::with_capacity(arguments.len());
    let mut rest = arguments.iter().map(String::as_str).peekable();
    while let Some(argument) = rest.next() {
        match (option_name(argument), rest.peek().copied()) {
            (Some("S" | "daemonize"), _) => {}
            // It was started from a state that is older than the checkpoint.
            (Some("incoming" | "loadvm"), Some(_)) => drop(rest.next()),
            (Some("chardev"), Some(value)) if value.starts_with(OWN_CHARDEV) => drop(rest.next()),
            (_, Some(value)) if argument == MONITOR[0] && value == MONITOR[1] => drop(rest.next()),
            (Some("chardev"), Some(value)) if value.starts_with(PACKETS_CHARDEV) => drop(rest.next()),
            (Some("object"), Some(value)) if value.starts_with(PACKETS_FILTER) => drop(rest.next()),
            (Some("chardev"), Some(CONSOLE_OUTPUT)) => {
                kept.extend([argument, CONSOLE].map(str::to_owned));
                rest.next();
            }
            (Some("plugin"), Some(value)) if records_inputs(value) => {
                let is_input =
                    |option: &str| option.starts_with(INPUTS) || option.starts_with(PACKETS) || option == READS_CONSOLE;
                let options: Vec<&str> = split_options(value).into_iter().filter(|option| !is_input(option)).collect();
                // It has another purpose, too.
                if options.len() > 1 {
                    kept.extend([argument.to_owned(), options.join(",")]);
                }
                rest.next();
            }
            (_, Some(value)) if ADDED.contains(&[argument, value]) => drop(rest.next()),
            _ => kept.push(argument.to_owned()),
        }
    }
    kept
}

/// The arguments of a machine of the type `machine_type` as those of one that is restored: paused,
/// with a monitor of Pagemark's, and waiting for the state of its devices.
pub fn arguments_of_restore(arguments: &[String], machine_type: Option<&str>) -> Vec<String> {
    let mut kept = with_machine_type(own_arguments(arguments), machine_type);
    kept.push("-S".to_owned());
    kept.extend(MONITOR_ARGUMENTS.iter().chain(&ADDED).flatten().map(|&argument| argument.to_owned()));
    kept
}

/// The arguments, with the type of the machine by its full name: a name such as `q35` is another
/// type in another version of QEMU.
pub(crate) fn with_machine_type(mut arguments: Vec<String>, machine_type: Option<&str>) -> Vec<String> {
    let Some(machine_type) = machine_type else { return arguments };
    let added = ["-machine", machine_type];
    if !arguments.windows(2).any(|pair| pair == added) {
        arguments.extend(added.map(str::to_owned));
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn all_sockets_that_qemu_serves_are_found() {
        let line = "-qmp unix:a,server=on,wait=off -monitor unix:b,server -serial mon:unix:c,server=yes \
                    -chardev socket,id=s,path=d,,e,server=on -chardev socket,id=c,path=client \
                    -vnc unix:f,password=on -vnc unix:g,reverse=on -spice unix=on,addr=h -spice port=1,addr=i \
                    -netdev stream,id=n,server=on,addr.type=unix,addr.path=j";
        assert_eq!(served_paths(&words(line)), ["a", "b", "c", "d,e", "j", "f", "h"]);
    }

    #[test]
    fn paths_of_all_options_are_found() {
        let line = r#"-serial file:a -chardev file,id=c,path=b,logfile=c,,d -D e -pidfile f -daemonize disk
                      -object memory-backend-file,id=m,mem-path=g,size=1G -mem-path h -blockdev driver=file,filename=i
                      -object {"qom-type":"memory-backend-file","mem-path":"j"} -object filter-dump,id=f,file=k
                      -object {"qom-type":"filter-dump","file":"l"} -blockdev {"driver":"raw","file":"node"}"#;
        let arguments = words(line);
        let found: Vec<_> = named_paths(&arguments).into_iter().map(|named| (named.option, named.path)).collect();
        let expected = [
            ("serial", "a"),
            ("chardev", "b"),
            ("chardev", "c,d"),
            ("D", "e"),
            ("pidfile", "f"),
            ("", "disk"),
            ("object", "g"),
            ("mem-path", "h"),
            ("blockdev", "i"),
            ("object", "j"),
            ("object", "k"),
            ("object", "l"),
        ];
        assert_eq!(found, expected.map(|(option, path)| (option, path.to_owned())));
    }

    #[test]
    fn descriptors_of_the_program_that_started_qemu_are_found() {
        for value in [
            "socket,id=charmonitor,fd=31,server=on,wait=off",
            "tap,fds=33:34,id=hostnet0,vhost=on,vhostfds=35:36",
            "set=3,fd=20",
            "driver=file,filename=/dev/fdset/3,node-name=n",
            "/dev/fdset/3",
            "stream,id=n,addr.type=fd,addr.str=7",
            r#"{"type":"tap","fd":"33","id":"hostnet0"}"#,
            r#"{"type":"stream","addr":{"type":"fd","str":"7"}}"#,
            r#"{"driver":"raw","file":{"driver":"file","filename":"/dev/fdset/2"}}"#,
        ] {
            let arguments = ["-name", "fd=3", "-x", value].map(str::to_owned);
            assert_eq!(with_descriptor(&arguments[2..]), Some(value));
        }
        let mut others = words("-m 64 -chardev socket,id=m,path=/run/m -drive file=/dev/fd0,if=floppy fd=3 -snapshot");
        others.extend(MONITOR_ARGUMENTS.iter().flatten().map(|&word| word.to_owned()));
        others.extend(words("-incoming fd:9 -device {\"driver\":\"nvme\",\"id\":\"fd\"}"));
        assert_eq!(with_descriptor(&others), None);
    }

    #[test]
    fn monitors_that_listen_on_a_socket_are_found() {
        let found = |text: &str| monitor_paths(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(found("-m 64 -qmp unix:/run/vm.qmp,server=on,wait=off"), ["/run/vm.qmp"]);
        assert_eq!(found("--qmp-pretty unix:a,,b,server,nowait -qmp unix:c,server=on"), ["a,b", "c"]);
        let chardev = "-chardev socket,id=m,path=/run/m,server=on,wait=off";
        for monitor in ["-mon chardev=m,mode=control", "-mon m,mode=control,pretty=on", "-qmp chardev:m"] {
            assert_eq!(found(&format!("{monitor} {chardev}")), ["/run/m"], "{monitor}");
        }
        // For people; of another chardev; one that connects; a descriptor; a port; standard input.
        for none in [
            "-mon chardev=m,mode=readline",
            "-mon chardev=other,mode=control",
            "-qmp unix:/run/vm.qmp",
            "-chardev socket,id=n,fd=3,server=on -mon chardev=n,mode=control",
            "-qmp tcp:localhost:4444,server=on",
            "-qmp stdio",
            "-qmp",
        ] {
            assert!(found(&format!("{chardev} {none}")).is_empty(), "{none}");
        }
    }

    #[test]
    fn sockets_on_which_qemu_listens_are_found() {
        let served = |argument| served_path(argument);
        assert_eq!(served("unix:/a/b,server=on,wait=off").as_deref(), Some("/a/b"));
        assert_eq!(served("socket,id=q,path=c,,d,server").as_deref(), Some("c,d"));
        for other in ["unix:/a/b", "socket,id=q,path=c,server=off", "q35"] {
            assert_eq!(served(other), None, "{other}");
        }
    }

    #[test]
    fn arguments_are_kept_but_for_those_of_a_start() {
        let line = words("-m 64 -S -daemonize -incoming defer -loadvm x -qmp unix:a,server=on -name S");
        let restored = arguments_of_restore(&line, None);
        let expected = "-m 64 -qmp unix:a,server=on -name S -S \
            -chardev socket,id=pagemark,fd=3 -mon chardev=pagemark,mode=control -incoming defer \
            -global migration.send-configuration=off -machine suppress-vmdesc=on";
        assert_eq!(restored.join(" "), expected);
        assert_eq!(arguments_of_restore(&restored, None), restored, "a restored machine is restored again");
    }

    #[test]
    fn a_daemon_has_left_the_directory_of_its_paths() {
        let found = |line: &str| relative_path_of_daemon(&words(&format!("{line} -daemonize"))).map(str::to_owned);
        for (line, expected) in [
            ("-m 64 -drive file=a.raw,format=raw", "file=a.raw,format=raw"),
            ("-pidfile pid", "pid"),
            ("-nodefaults disk.img", "disk.img"),
            ("-kernel vmlinuz -append /x", "vmlinuz"),
            ("-qmp unix:q,server=on", "unix:q,server=on"),
            ("-serial mon:unix:q", "mon:unix:q"),
            ("-chardev socket,id=a,path=b", "socket,id=a,path=b"),
            ("-blockdev driver=raw,file.filename=a,file.driver=file", "driver=raw,file.filename=a,file.driver=file"),
            (
                "-blockdev {\"driver\":\"raw\",\"file\":{\"filename\":\"a\"}}",
                "{\"driver\":\"raw\",\"file\":{\"filename\":\"a\"}}",
            ),
        ] {
            assert_eq!(found(line).as_deref(), Some(expected));
        }
        for line in [
            "-m 64 -name vm -cpu max -drive file=/a.raw,format=raw -pidfile /p -qmp unix:/q,server=on",
            "-blockdev {\"driver\":\"raw\",\"node-name\":\"n\",\"file\":{\"filename\":\"/a\"}}",
            "-drive file=nbd:unix:/a -device virtio-blk-pci,drive=d -nographic -S",
        ] {
            assert_eq!(found(line), None, "{line}");
        }
        assert_eq!(relative_path_of_daemon(&words("-drive file=a.raw")), None);
    }

    #[test]
    fn a_qemu_that_is_started_as_its_user_does_not_change_its_user() {
        for (line, expected) in [
            ("-m 64 -runas nobody -name a", "-m 64 -name a"),
            ("--runas nobody", ""),
            ("-run-with user=nobody -m 64", "-m 64"),
            ("-run-with async-teardown=on,user=1:2", "-run-with async-teardown=on"),
            ("-name runas", "-name runas"),
        ] {
            assert_eq!(without_user(&words(line)).join(" "), expected);
        }
    }

    #[test]
    fn the_type_of_a_machine_is_named_in_full() {
        let restored = arguments_of_restore(&words("-machine q35,memory-backend=m -m 64"), Some("pc-q35-7.2"));
        let line = restored.join(" ");
        assert!(line.starts_with("-machine q35,memory-backend=m -m 64 -machine pc-q35-7.2 -S "), "{line}");
        assert_eq!(arguments_of_restore(&restored, Some("pc-q35-7.2")), restored, "it is restored again");
    }

    #[test]
    fn the_monitor_of_a_started_machine_is_not_part_of_its_command_line() {
        let started = [&words("-m 64")[..], &listening_monitor("/tmp/a,b")].concat();
        assert_eq!(started[3], "socket,id=pagemark,path=/tmp/a,,b,server=on,wait=off");
        assert_eq!(own_arguments(&started), words("-m 64"));
    }

    #[test]
    fn a_recorded_console_is_a_console() {
        let recorded = format!("-serial chardev:pagemark-console -plugin a,,b.so,inputs=/p -chardev {CONSOLE_OUTPUT}");
        assert_eq!(
            own_arguments(&words(&recorded)),
            words(&format!("-serial chardev:pagemark-console -chardev {CONSOLE}"))
        );
        let disks = words("-plugin a.so,disks=on,inputs=/p,console=on,network=/q -m 9");
        assert!(records_network(&disks));
        assert_eq!(own_arguments(&disks), words("-plugin a.so,disks=on -m 9"));
    }

    #[test]
    fn a_machine_has_the_name_that_the_last_option_gives() {
        let name = |line| machine_name(&words(line));
        assert_eq!(name("-name a --name b,,c,process=d").as_deref(), Some("b,c"));
        assert_eq!(name("-name process=d,guest=e").as_deref(), Some("e"));
        for line in ["", "-name", "-name process=d", "-m name"] {
            assert_eq!(name(line), None, "{line}");
        }
        assert!(is_daemon(&words("-m 64 --daemonize")) && !is_daemon(&words("-name daemonize")));
    }
}
