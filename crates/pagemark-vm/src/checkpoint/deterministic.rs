//! Machines that repeat their run from a checkpoint, instruction by instruction: their command
//! line, and what a machine must not have.

use std::ffi::OsString;

use pagemark_linux::proc;
use serde_json::{Value, json};

use crate::checkpoint::input_list::{CARD, CARD_TIMERS};
use crate::checkpoint::simulator::{COMPLETES_REQUESTS, completes_requests, option_word, simulator_library};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command::text;
use crate::qemu::command_line::{lost_packets, option_name, own_arguments, records_network, split_options};
use crate::qemu::drive::device_of;
use crate::qemu::machine::Machine;

/// The arguments that are added where the command line has none of the name.
const ADDED: [[&str; 2]; 3] =
    [["icount", "shift=2,sleep=off"], ["rtc", "base=2026-01-01,clock=vm"], ["display", "none"]];

/// A machine that is switched off stays, so that its last state can be saved.
const STAYS: &str = "-no-shutdown";

/// Options by which others act on the machine while it runs, or by which it starts elsewhere.
const ACTING: [&str; 12] =
    ["qmp", "qmp-pretty", "monitor", "mon", "gdb", "s", "vnc", "spice", "incoming", "loadvm", "nographic", "daemonize"];

/// Devices, by a part of their names, that bring in what no repetition has.
const FROM_OUTSIDE: [&str; 6] = ["virtio-rng", "usb-host", "tpm-", "vfio", "vhost", "ivshmem"];

/// Instructions that give random numbers of the host.
const RANDOM: [&str; 2] = ["rdrand", "rdseed"];

/// Devices that only write characters: the others have input.
const OUTPUTS: [&str; 2] = ["file", "null"];

/// Options that make disks which are not by virtio-blk, or have no option of their file.
const UNNAMED_DISKS: [&str; 10] = ["hda", "hdb", "hdc", "hdd", "cdrom", "sd", "fda", "fdb", "pflash", "blockdev"];

/// What has a disk begin one request at a time, by a write to memory: its queue has room for no
/// more, it has no ports, and the processor itself carries the request out.
const DISK_PROPERTIES: [&str; 4] = [
    "virtio-blk-pci.disable-legacy=on",
    "virtio-blk-pci.ioeventfd=off",
    "virtio-blk-device.queue-size=4",
    "virtio-blk-device.indirect_desc=off",
];

/// QEMU's name for a disk by virtio-blk.
const VIRTIO_DISK: &str = "virtio-blk-device";
const BY_VIRTIO: &str = "attach it by virtio-blk: -drive file=IMAGE,format=FORMAT,if=virtio";

/// The label of Pagemark's own monitor.
const OWN_MONITOR: &str = "pagemark";

/// The command line of QEMU, a program with its arguments, as that of a machine that repeats its
/// run: a clock that counts instructions, and no clock of the host. Missing options are added. The
/// machine is paused until [`VmTarget::resume`](crate::VmTarget::resume).
///
/// # Errors
/// [`ErrorKind::Unsupported`] names an argument that makes runs differ.
///
/// ```
/// use std::ffi::OsString;
///
/// let command = ["qemu-system-x86_64", "-m", "64"].map(OsString::from);
/// let command = pagemark_vm::deterministic_command(&command)?;
/// assert!(command.contains(&"shift=2,sleep=off".into()));
/// # Ok::<(), pagemark_vm::Error>(())
/// ```
pub fn deterministic_command(command: &[OsString]) -> Result<Vec<OsString>> {
    let refused = |argument: &str, reason: &str, help: &'static str| {
        Err(Error::about(ErrorKind::Unsupported, Object::None, format!("{argument} {reason}")).help(help))
    };
    let words: Vec<String> = command.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    for (at, word) in words.iter().enumerate() {
        let Some(name) = option_name(word) else { continue };
        let value = words.get(at + 1).map_or("", String::as_str);
        let options = split_options(value);
        let has = |option: &str| options.contains(&option);
        let named = |name: &str| options.iter().find_map(|option| option.strip_prefix(name));
        match name {
            "enable-kvm" => return refused(word, "does not count instructions", "leave it out: TCG does"),
            "accel" if options[0] != "tcg" => {
                return refused(value, "does not count instructions", "use -accel tcg");
            }
            "icount" if !has("sleep=off") || named("shift=").is_none_or(|shift| shift.parse::<u8>().is_err()) => {
                return refused(value, "lets the clock depend on the host", "use -icount shift=2,sleep=off");
            }
            "icount" if named("rr=").is_some() => {
                return refused(value, "is for QEMU's own record and replay", "use -icount shift=2,sleep=off");
            }
            "rtc" if !has("clock=vm") || !named("base=").is_some_and(|base| base.starts_with(char::is_numeric)) => {
                return refused(value, "lets the clock depend on the host", "use -rtc base=2026-01-01,clock=vm");
            }
            "display" if value != "none" => {
                return refused(value, "lets a person act on the machine", "use -display none");
            }
            "object" if options[0] == "memory-backend-file" => {
                return refused(value, "would be shared by the simulations", "use memory-backend-ram, or -m alone");
            }
            _ if ACTING.contains(&name) => {
                return refused(word, "lets others act on the machine, or start it elsewhere", "leave it out");
            }
            _ => {}
        }
    }
    let mut command = command.to_vec();
    let has_option = |name: &str| words.iter().any(|word| option_name(word) == Some(name));
    for [name, value] in ADDED {
        if !has_option(name) {
            command.extend([format!("-{name}").into(), value.into()]);
        }
    }
    if !has_option("no-shutdown") {
        command.push(STAYS.into());
    }
    if !has_option("S") {
        command.push("-S".into());
    }
    Ok(command)
}

/// The command line of [`deterministic_command`] for a machine with disks. A plugin of QEMU
/// completes each request to a disk before the instruction behind the one that has begun it: the
/// time of a request would otherwise be that of the host. For that, a disk has one request at a
/// time, and a write to memory begins it. A machine without disks keeps its command line.
///
/// # Errors
/// [`ErrorKind::Unsupported`] names a disk that is not virtio-blk by `-drive`, and
/// [`ErrorKind::NotFound`] says where the plugin was looked for.
pub fn deterministic_disks(command: &[OsString]) -> Result<Vec<OsString>> {
    let words: Vec<String> = command.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let names = || words.iter().filter_map(|word| option_name(word));
    if let Some(name) = names().find(|name| UNNAMED_DISKS.contains(name)) {
        let reason = format!("-{name} makes a disk whose requests cannot be completed at once");
        return Err(Error::about(ErrorKind::Unsupported, Object::None, reason).help(BY_VIRTIO));
    }
    let mut command = command.to_vec();
    if !names().any(|name| name == "drive") {
        return Ok(command);
    }
    for value in DISK_PROPERTIES {
        command.extend(["-global".into(), value.into()]);
    }
    let plugin = format!("{},{COMPLETES_REQUESTS}", option_word(&simulator_library()?)?);
    command.extend(["-plugin".into(), plugin.into()]);
    Ok(command)
}

/// The arguments of a recorded machine for one that is simulated: it writes no files.
pub fn arguments_of_simulation(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut words = own_arguments(arguments).into_iter().peekable();
    while let Some(word) = words.next() {
        let name = option_name(&word).unwrap_or_default().to_owned();
        match &*name {
            "pidfile" | "D" | "d" => drop(words.next()),
            // A temporary overlay would keep what the machine writes from its disks.
            "snapshot" => {}
            // The simulation loads it where it is on its node.
            "plugin" if words.peek().is_some_and(|value| completes_requests(std::slice::from_ref(value))) => {
                words.next();
            }
            "serial" | "parallel" | "debugcon" => {
                let value =
                    words.next().map(|value| if value.starts_with("file:") { "null".to_owned() } else { value });
                kept.extend([word].into_iter().chain(value));
            }
            "netdev" => {
                let Some(network) = words.next() else { continue };
                kept.extend(simulated_network(&network).unwrap_or(vec![word, network]));
            }
            "chardev" => {
                let value = words.next().map(|value| without_file(&value).unwrap_or(value));
                kept.extend([word].into_iter().chain(value));
            }
            _ => kept.push(word),
        }
    }
    kept
}

/// The arguments of a network that has the id of one that is recorded, and leads nowhere. That by
/// `user` has a part in the state of the devices, which only one of its kind takes.
fn simulated_network(network: &str) -> Option<Vec<String>> {
    let options = split_options(network);
    let id = options.iter().find_map(|option| option.strip_prefix("id="))?;
    let kind = if options[0] == "user" { "user,restrict=on" } else { "hubport,hubid=0" };
    let network = ["-netdev".to_owned(), format!("{kind},id={id}")];
    Some(network.into_iter().chain(lost_packets(id)).collect())
}

/// A character device that has the id of one that writes to a file, and writes nothing. None for
/// other devices.
fn without_file(chardev: &str) -> Option<String> {
    // That of a recorded console reads what is recorded.
    const FILES: [&str; 2] = ["file", "stdio"];
    let options = split_options(chardev);
    let id = options.iter().find(|option| option.starts_with("id="))?;
    FILES.contains(&options[0]).then(|| format!("null,{id}"))
}

/// True if the only network card is one whose packets are recorded. `network` lists the cards, and
/// `devices` the properties of all devices.
fn has_recorded_card(network: &str, devices: &str) -> bool {
    let mut cards = network.lines().filter(|line| line.contains("type=nic"));
    let is_known = cards.next().is_some_and(|card| card.contains(&format!("model={CARD},")));
    // A card that has no such property has the timer.
    let is_off = |timer: &&str| devices.contains(&format!("{timer} = false"));
    is_known && cards.next().is_none() && CARD_TIMERS.iter().all(is_off)
}

impl Machine {
    /// Checks that nothing but its own instructions decides what the machine does.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] names what does.
    pub(crate) fn check_deterministic(&mut self) -> Result<()> {
        let pid = self.pid;
        let refused = |reason: String, help: &'static str| {
            Err(Error::about(ErrorKind::Unsupported, Object::Process(pid), reason).help(help))
        };
        let list = |value: Value| value.as_array().cloned().unwrap_or_default();
        if self.has_kvm()? {
            return refused("runs under KVM, which does not count instructions".into(), "use -accel tcg");
        }
        let processors = list(self.monitor.execute("query-cpus-fast", json!({}))?);
        if processors.len() != 1 {
            let reason = format!("has {} processors, whose order is that of the host", processors.len());
            return refused(reason, "use -smp 1");
        }
        for instruction in RANDOM {
            let property = json!({"path": text(&processors[0], "qom-path"), "property": instruction});
            match self.monitor.execute("qom-get", property) {
                Ok(value) if value.as_bool() == Some(true) => {
                    let reason = format!("has a processor with {instruction}, a source of random numbers of the host");
                    return refused(reason, "use -cpu MODEL,rdrand=off,rdseed=off");
                }
                // A processor of another kind has no such instruction.
                Err(error) if error.kind() != ErrorKind::Command => return Err(error),
                _ => {}
            }
        }
        let devices = self.monitor.human("info qtree")?;
        let network = self.monitor.human("info network")?;
        let is_recorded =
            || Ok::<_, Error>(records_network(&self.arguments()?) && has_recorded_card(&network, &devices));
        if !network.trim().is_empty() && !is_recorded()? {
            let help = "add -nic none, or use -netdev user,id=n -device e1000,netdev=n";
            return refused("has a network card: what comes in is not recorded".into(), help);
        }
        for drive in list(self.monitor.execute("query-block", json!({}))?) {
            if drive.get("inserted").is_some() && !self.answers_at_once(&drive)? {
                let reason = format!("has a disk, {}: when it answers is not recorded", text(&drive, "device"));
                return refused(reason, BY_VIRTIO);
            }
        }
        let mut characters = list(self.monitor.execute("query-chardev", json!({}))?).into_iter();
        let has_input = |device: &Value| {
            let kind = text(device, "filename");
            text(device, "label") != OWN_MONITOR && !OUTPUTS.contains(&kind.split(':').next().unwrap_or_default())
        };
        if let Some(device) = characters.find(has_input) {
            let reason = format!("has a character device with input, {}", text(&device, "label"));
            return refused(reason, "add -nodefaults, and use -serial stdio, -serial file:PATH or -serial null");
        }
        if let Some(name) = FROM_OUTSIDE.iter().find(|name| devices.contains(**name)) {
            return refused(format!("has a device {name}, whose input is not recorded"), "leave the device out");
        }
        Ok(())
    }

    /// The command line of QEMU.
    fn arguments(&self) -> Result<Vec<String>> {
        let arguments = proc::arguments(self.pid).map_err(Error::system("read QEMU's command line"))?;
        Ok(arguments.iter().map(|argument| String::from_utf8_lossy(argument).into_owned()).collect())
    }

    /// True if a disk, an entry of `query-block`, has each request completed before the next
    /// instruction.
    fn answers_at_once(&mut self, drive: &Value) -> Result<bool> {
        let arguments = self.arguments()?;
        let device = device_of(drive);
        let Some((adapter, _)) = device.rsplit_once('/') else { return Ok(false) };
        let mut is = |path: &str, property: &str, value: Value| {
            match self.monitor.execute("qom-get", json!({"path": path, "property": property})) {
                Ok(found) => Ok(found == value),
                // Another device has no such property.
                Err(error) if error.kind() == ErrorKind::Command => Ok(false),
                Err(error) => Err(error),
            }
        };
        if !completes_requests(&arguments) || !is(&device, "type", json!(VIRTIO_DISK))? {
            return Ok(false);
        }
        let properties = [
            (&*device, "queue-size", json!(4)),
            (&*device, "indirect_desc", json!(false)),
            (adapter, "ioeventfd", json!(false)),
            (adapter, "disable-legacy", json!("on")),
        ];
        for (path, property, value) in properties {
            if !is(path, property, value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How many instructions the machine has executed since its start. While it runs, how many they
    /// were a short time before.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if its instructions are not counted.
    pub fn instructions(&mut self) -> Result<u64> {
        let count = self.monitor.execute("query-replay", json!({}))?.get("icount").and_then(Value::as_u64);
        count.ok_or_else(|| {
            let reason = "does not count its instructions";
            let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
            error.help("start it with -icount shift=2,sleep=off")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn clocks_that_count_instructions_are_added() {
        let command = |line: &str| {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            let made = deterministic_command(&words)?;
            Ok::<_, Error>(made.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" "))
        };
        let whole = "q -m 64 -icount shift=2,sleep=off -rtc base=2026-01-01,clock=vm -display none -no-shutdown -S";
        assert_eq!(command("q -m 64").unwrap(), whole);
        assert_eq!(command(whole).unwrap(), whole, "nothing is added twice");
        let refused = [
            "-enable-kvm",
            "-accel kvm",
            "-icount shift=auto,sleep=off",
            "-icount shift=2",
            "-icount shift=2,sleep=off,rr=record",
            "-rtc clock=vm",
            "-rtc base=utc,clock=vm",
            "-rtc base=2026-01-01",
            "-display gtk",
            "-qmp unix:a,server=on",
            "-s",
            "-nographic",
            "-object memory-backend-file,id=m,size=1M,mem-path=/a",
        ];
        for line in refused {
            let error = command(&format!("q {line}")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{line}");
            assert!(!error.advice().is_empty(), "{line}");
        }
    }

    #[test]
    fn a_simulation_writes_no_files() {
        let arguments =
            words("-serial file:a -parallel null -chardev file,id=s,path=b -chardev null,id=t -pidfile c -D d -m 9");
        let expected = "-serial null -parallel null -chardev null,id=s -chardev null,id=t -m 9";
        assert_eq!(arguments_of_simulation(&arguments).join(" "), expected);
        assert!(arguments_of_simulation(&words("-chardev")).len() == 1, "what QEMU refuses is left to it");
    }

    #[test]
    fn a_simulation_has_no_network() {
        let recorded = words(
            "-netdev user,id=n,hostfwd=udp::7-:7 -device e1000,netdev=n -global e1000.mitigation=off \
             -chardev file,id=pagemark-network,path=/p,append=on -plugin a.so,inputs=/q,network=/p \
             -object filter-redirector,id=pagemark-network-filter,netdev=n,queue=tx,outdev=pagemark-network",
        );
        let end = "-chardev null,id=pagemark-lost \
             -object filter-redirector,id=pagemark-lost-filter,netdev=n,queue=all,outdev=pagemark-lost \
             -device e1000,netdev=n -global e1000.mitigation=off";
        let simulated = arguments_of_simulation(&recorded);
        assert_eq!(simulated.join(" "), format!("-netdev user,restrict=on,id=n {end}"));
        assert_eq!(own_arguments(&simulated), simulated);
        let recorded = recorded.join(" ").replace("user,id=n,hostfwd=udp::7-:7", "socket,udp=a:1,id=n");
        let simulated = arguments_of_simulation(&words(&recorded)).join(" ");
        assert_eq!(simulated, format!("-netdev hubport,hubid=0,id=n {end}"));
    }

    #[test]
    fn a_network_card_that_is_not_recorded_is_found() {
        let card = "e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\n";
        let user = " \\ n: index=0,type=user,net=10.0.2.0,restrict=off\n";
        let is_recorded = |cards: &[&str], devices| has_recorded_card(&cards.concat(), devices);
        let off = "autonegotiation = false\n mitigation = false";
        assert!(is_recorded(&[card, user], off));
        assert!(!is_recorded(&[card, user, &card.replace("e1000", "rtl8139")], off));
        assert!(!is_recorded(&[&card.replace("e1000", "e1000e"), user], off));
        assert!(!is_recorded(&[card, user], "mitigation = false"));
        assert!(!is_recorded(&[card, user], "mitigation = false\n autonegotiation = true"));
        assert!(!is_recorded(&[user], off));
    }
}
