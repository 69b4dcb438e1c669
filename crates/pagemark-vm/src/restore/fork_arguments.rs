//! The command line of a machine that runs beside others of the same checkpoint: what the machines
//! would both use is made another for each.

use serde_json::Value;

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command_line::{option_name, own_arguments, split_options};

/// A part of QEMU's arguments that a user replaces. `{}` in the new text is the machine's number.
///
/// ```
/// use pagemark_vm::Replacement;
///
/// assert!(Replacement::new("hostfwd=tcp::2222-", "hostfwd=tcp::222{}-").is_some());
/// assert!(Replacement::new("hostfwd=tcp::2222-", "the same for each").is_none());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replacement {
    old: String,
    new: String,
}

impl Replacement {
    /// None if `old` is empty, or `new` has no `{}`, so that it is the same for each machine.
    pub fn new(old: &str, new: &str) -> Option<Replacement> {
        let is_right = !old.is_empty() && new.contains("{}");
        is_right.then(|| Replacement { old: old.to_owned(), new: new.to_owned() })
    }
}

/// The arguments of one of several machines, and its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ForkArguments {
    pub(crate) arguments: Vec<String>,
    pub(crate) name: String,
    /// What differs from the arguments of the checkpoint: each pair is what was, and what is.
    pub(crate) changes: Vec<(String, String)>,
}

/// The first address that QEMU gives network cards by itself, but for the last byte.
const DEFAULT_MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];

impl ForkArguments {
    /// The arguments of machine `number`, from 1, of those that share the checkpointed arguments
    /// `all`. `base` is the name of a machine that has none.
    ///
    /// # Errors
    /// [`ErrorKind::Start`] names an argument that two machines cannot both have, and that nothing
    /// replaces.
    pub(crate) fn new(all: &[String], number: u32, base: &str, replacements: &[Replacement]) -> Result<ForkArguments> {
        let own = own_arguments(all);
        let mut fork = ForkArguments { arguments: Vec::new(), name: String::new(), changes: Vec::new() };
        let (mut cards, mut position) = (0, 0);
        let names_console =
            |argument: &String| matches!(option_name(argument), Some("serial" | "monitor" | "nodefaults"));
        let has_console = own.iter().any(names_console);
        while let Some(argument) = own.get(position) {
            let value = own.get(position + 1);
            position += 1;
            let Some(name) = option_name(argument) else {
                fork.push(argument, replaced(argument, number, replacements));
                continue;
            };
            if name == "nographic" {
                let console = ["-display", "none", "-serial", "mon:pty"];
                let kept = if has_console { &console[..2] } else { &console[..] };
                fork.arguments.extend(kept.iter().map(|&word| word.to_owned()));
                continue;
            }
            if name == "s" {
                return Err(conflict(argument, "a port of the host"));
            }
            fork.arguments.push(argument.clone());
            let Some(value) = value.filter(|_| VALUED.contains(&name)) else { continue };
            position += 1;
            if let Some(new) = replaced(value, number, replacements) {
                if name == "name" {
                    fork.name = new.clone();
                }
                fork.push(value, Some(new));
                continue;
            }
            let new = match name {
                "name" => {
                    let named = crate::machine_name(&[argument.clone(), value.clone()]).unwrap_or_default();
                    fork.name = format!("{named}-{number}");
                    Some(value.replacen(&named, &fork.name, 1))
                }
                "qmp" | "qmp-pretty" | "monitor" | "serial" | "parallel" | "debugcon" => backend(value, number)?,
                "chardev" => chardev(value, number)?,
                "pidfile" | "D" => Some(format!("{value}.{number}")),
                "device" | "nic" | "net" => card(name, value, number, &mut cards),
                "vnc" if value.starts_with("unix:") => numbered_socket(value, number),
                "vnc" | "spice" | "gdb" => return Err(conflict(value, "a port of the host")),
                _ => None,
            };
            // Two machines cannot both listen on a port of the host, nor have one device of it.
            if let Some(option) = split_options(value).into_iter().find(|option| is_of_host(name, option)) {
                return Err(conflict(option, "a port or an interface of the host"));
            }
            fork.push(value, new);
        }
        if fork.name.is_empty() {
            fork.name = format!("{base}-{number}");
            fork.arguments.extend(["-name".to_owned(), fork.name.clone()]);
        }
        Ok(fork)
    }

    /// Adds an argument, in its new form if it has one.
    fn push(&mut self, old: &str, new: Option<String>) {
        match new {
            Some(new) if new != old => {
                self.changes.push((old.to_owned(), new.clone()));
                self.arguments.push(new);
            }
            _ => self.arguments.push(old.to_owned()),
        }
    }
}

/// Options whose values are looked at.
const VALUED: [&str; 19] = [
    "name",
    "qmp",
    "qmp-pretty",
    "monitor",
    "serial",
    "parallel",
    "debugcon",
    "chardev",
    "pidfile",
    "D",
    "device",
    "nic",
    "net",
    "netdev",
    "vnc",
    "spice",
    "gdb",
    "drive",
    "blockdev",
];

fn conflict(argument: &str, what: &str) -> Error {
    let reason = format!("{argument} is {what}, which only one machine can have");
    let error = Error::of(ErrorKind::Start, "start several machines", Object::None, reason);
    error.help(format!("give each its own: --replace '{argument}' '…{{}}…'; {{}} is the number of the machine"))
}

fn replaced(argument: &str, number: u32, replacements: &[Replacement]) -> Option<String> {
    let replacement = replacements.iter().find(|replacement| argument.contains(&replacement.old))?;
    Some(argument.replace(&replacement.old, &replacement.new.replace("{}", &number.to_string())))
}

/// True for an option of a network that belongs to the host.
fn is_of_host(name: &str, option: &str) -> bool {
    ["netdev", "nic", "net"].contains(&name)
        && ["hostfwd=", "ifname=", "listen="].iter().any(|key| option.starts_with(key))
}

/// The value of `-serial` and its like: sockets and files get a number, a terminal becomes a
/// pseudo-terminal.
fn backend(value: &str, number: u32) -> Result<Option<String>> {
    let (mux, device) = value.strip_prefix("mon:").map_or(("", value), |device| ("mon:", device));
    let numbered = |kind: &str| {
        let rest = device.strip_prefix(kind)?;
        let end = split_options(rest).first().map_or(0, |path| path.len());
        Some(format!("{mux}{kind}{}.{number}{}", &rest[..end], &rest[end..]))
    };
    if device == "stdio" {
        return Ok(Some(format!("{mux}pty")));
    }
    if ["tcp:", "telnet:", "websocket:", "udp:"].iter().any(|kind| device.starts_with(kind)) && is_server(device) {
        return Err(conflict(value, "a port of the host"));
    }
    Ok(match device.starts_with("unix:") && !is_server(device) {
        true => None,
        false => ["unix:", "file:", "pipe:"].iter().find_map(|kind| numbered(kind)),
    })
}

/// The value of `-vnc unix:PATH`.
fn numbered_socket(value: &str, number: u32) -> Option<String> {
    let end = split_options(value).first()?.len();
    Some(format!("{}.{number}{}", &value[..end], &value[end..]))
}

/// The value of `-chardev`.
fn chardev(value: &str, number: u32) -> Result<Option<String>> {
    let options = split_options(value);
    let kind = options.first().copied().unwrap_or_default();
    let has = |key: &str| options.iter().any(|option| option.starts_with(key));
    let of_terminal = |option: &&str| !option.starts_with("signal=");
    match kind {
        "stdio" => {
            let kept = options.iter().skip(1).copied().filter(of_terminal);
            Ok(Some([&["pty"][..], &kept.collect::<Vec<_>>()].concat().join(",")))
        }
        "socket" if is_server(value) && !has("path=") => Err(conflict(value, "a port of the host")),
        "socket" if !is_server(value) => Ok(None),
        "socket" | "file" | "pipe" | "ringbuf" => {
            let path = |option: &&str| match option.starts_with("path=") {
                true => format!("{option}.{number}"),
                false => (*option).to_owned(),
            };
            Ok(Some(options.iter().map(path).collect::<Vec<_>>().join(",")))
        }
        _ => Ok(None),
    }
}

fn is_server(value: &str) -> bool {
    split_options(value).iter().any(|option| ["server", "server=on"].contains(option))
}

/// The value of `-device`, `-nic` or `-net` with another address for the network card. None if it
/// is no network card.
fn card(name: &str, value: &str, number: u32, cards: &mut u8) -> Option<String> {
    if value.starts_with('{') {
        return described_card(value, number, cards);
    }
    let mut options: Vec<String> = split_options(value).into_iter().map(str::to_owned).collect();
    let is_card = match name {
        "device" => options.iter().any(|option| option.starts_with("netdev=") || option.starts_with("mac=")),
        "net" => options[0] == "nic",
        _ => options[0] != "none",
    };
    if !is_card {
        return None;
    }
    let key = if name == "net" { "macaddr=" } else { "mac=" };
    let given = options.iter_mut().find(|option| option.starts_with(key));
    let new = format!("{key}{}", other_address(given.as_ref().map(|given| &given[key.len()..]), number, cards)?);
    match given {
        Some(given) => *given = new,
        None => options.push(new),
    }
    Some(options.join(","))
}

/// Like [`card`], of a device that is described by a document.
fn described_card(value: &str, number: u32, cards: &mut u8) -> Option<String> {
    let mut document: Value = serde_json::from_str(value).ok()?;
    let given = document.get("mac").and_then(Value::as_str);
    if given.is_none() && document.get("netdev").is_none() {
        return None;
    }
    let new = other_address(given, number, cards)?;
    document.as_object_mut()?.insert("mac".to_owned(), new.into());
    Some(document.to_string())
}

/// The address of a card in machine `number`, whose address was `given`, or is QEMU's own for the
/// next card. None if that is no address.
fn other_address(given: Option<&str>, number: u32, cards: &mut u8) -> Option<String> {
    let mut address = DEFAULT_MAC;
    address[5] = address[5].wrapping_add(*cards);
    *cards = cards.wrapping_add(1);
    if let Some(given) = given {
        let bytes = given.split(':').map(|byte| u8::from_str_radix(byte, 16).ok());
        address = bytes.collect::<Option<Vec<u8>>>()?.try_into().ok()?;
    }
    // The last bytes may count the cards of one machine.
    let [low, high, ..] = number.to_le_bytes();
    address[3] = address[3].wrapping_add(low);
    address[2] = address[2].wrapping_add(high);
    Some(address.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forked(line: &str, replacements: &[(&str, &str)]) -> Result<ForkArguments> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let replacements: Vec<Replacement> =
            replacements.iter().map(|(old, new)| Replacement::new(old, new).unwrap()).collect();
        ForkArguments::new(&words, 2, "box", &replacements)
    }

    #[test]
    fn what_two_machines_cannot_share_is_made_another() {
        for (line, expected) in [
            ("-m 64 -name vm1", "-m 64 -name vm1-2"),
            ("-name guest=vm1,process=x", "-name guest=vm1-2,process=x"),
            ("-name a -qmp unix:/a,,b,server=on,wait=off", "-name a-2 -qmp unix:/a,,b.2,server=on,wait=off"),
            ("-name a -serial mon:stdio", "-name a-2 -serial mon:pty"),
            ("-name a -serial file:log -pidfile p", "-name a-2 -serial file:log.2 -pidfile p.2"),
            ("-name a -chardev stdio,id=c,signal=off,mux=on", "-name a-2 -chardev pty,id=c,mux=on"),
            ("-name a -chardev file,id=c,path=x", "-name a-2 -chardev file,id=c,path=x.2"),
            ("-name a -chardev socket,id=c,path=x", "-name a-2 -chardev socket,id=c,path=x"),
            ("-name a -nographic", "-name a-2 -display none -serial mon:pty"),
            ("-name a -nographic -nodefaults", "-name a-2 -display none -nodefaults"),
            ("-name a -nographic -serial null", "-name a-2 -display none -serial null"),
            ("-name a -device e1000,netdev=n", "-name a-2 -device e1000,netdev=n,mac=52:54:00:14:34:56"),
            ("-name a -nic user,mac=52:54:00:00:00:01", "-name a-2 -nic user,mac=52:54:00:02:00:01"),
            (
                r#"-name a -device {"driver":"e1000","mac":"52:54:00:00:00:01"}"#,
                r#"-name a-2 -device {"driver":"e1000","mac":"52:54:00:02:00:01"}"#,
            ),
            (
                r#"-name a -device {"driver":"e1000","netdev":"n"}"#,
                r#"-name a-2 -device {"driver":"e1000","mac":"52:54:00:14:34:56","netdev":"n"}"#,
            ),
            (r#"-name a -device {"driver":"nvme"}"#, r#"-name a-2 -device {"driver":"nvme"}"#),
            ("-name a -vnc unix:/a,password=on", "-name a-2 -vnc unix:/a.2,password=on"),
            ("-name a -device virtio-rng-pci disk.img", "-name a-2 -device virtio-rng-pci disk.img"),
            ("", "-name box-2"),
        ] {
            assert_eq!(forked(line, &[]).unwrap().arguments.join(" "), expected);
        }
        assert_eq!(forked("-name vm1", &[]).unwrap().name, "vm1-2");
    }

    #[test]
    fn what_belongs_to_the_host_needs_a_replacement() {
        for line in [
            "-s",
            "-vnc :1",
            "-netdev user,id=n,hostfwd=tcp::2222-:22",
            "-netdev tap,ifname=t0",
            "-serial tcp::4,server=on",
        ] {
            let error = forked(line, &[]).unwrap_err();
            assert!(error.kind() == ErrorKind::Start && error.advice().contains("--replace"), "{error}");
        }
        let fork = forked(
            "-netdev user,id=n,hostfwd=tcp::2222-:22 -qmp unix:a,server",
            &[("2222", "333{}"), ("unix:a", "unix:q{}")],
        );
        let fork = fork.unwrap();
        assert_eq!(fork.arguments[1], "user,id=n,hostfwd=tcp::3332-:22");
        assert_eq!(fork.arguments[3], "unix:q2,server");
    }
}
