//! The command line of a QEMU: what Pagemark reads from it, and what a restore changes in it.

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
    let options = split_options(argument);
    let is_served = options.iter().any(|option| ["server", "server=on"].contains(option));
    let path = options.iter().find_map(|option| option.strip_prefix("unix:").or(option.strip_prefix("path=")));
    path.filter(|_| is_served).map(|path| path.replace(",,", ","))
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
pub(crate) fn records_inputs(plugin: &str) -> bool {
    split_options(plugin).iter().any(|option| option.starts_with(INPUTS))
}

/// True if the arguments have packets for the machine recorded.
pub(crate) fn records_network(arguments: &[String]) -> bool {
    let mut options = arguments.iter().filter(|value| records_inputs(value)).flat_map(|value| split_options(value));
    options.any(|option| option.starts_with(PACKETS))
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
pub(crate) fn arguments_of_restore(arguments: &[String], machine_type: Option<&str>) -> Vec<String> {
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
