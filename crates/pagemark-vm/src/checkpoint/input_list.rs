//! What came to a machine from outside while it was recorded, and when.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{self, Stdio};

use crate::checkpoint::simulator::{completes_requests, option_word, shared_file, simulator_library};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command_line::{
    CONSOLE_OUTPUT, INPUTS, PACKETS, PACKETS_CHARDEV, PACKETS_FILTER, READS_CONSOLE, option_name, split_options,
};

/// The serial port of a console whose input is recorded.
const CONSOLE: &str = "stdio";

/// The network card whose packets are recorded. The processor itself sends what is to be sent when
/// it writes to the card's register, and the card interrupts it at once.
pub(crate) const CARD: &str = "e1000";

/// What the card does by timers otherwise, which are not part of its state: it delays interrupts,
/// and takes a while to find the speed of its cable. They are properties of the card, which newer
/// QEMUs do not have: there it always does both.
pub(crate) const CARD_TIMERS: [&str; 2] = ["mitigation", "autonegotiation"];

/// What is behind a network whose packets are recorded.
const NETWORKS: [&str; 4] = ["user", "socket", "stream", "dgram"];

/// What of a network by `-netdev user` has a state that a simulation cannot begin with.
const UNRECORDED_OPTION: &str = "guestfwd=";

/// The list of what comes to a machine from outside, which Pagemark's plugin writes in QEMU. It is
/// in memory, and part of each checkpoint.
#[derive(Debug)]
pub struct InputList {
    file: File,
    path: PathBuf,
    /// Packets that QEMU has for the machine. QEMU and its plugin use it, by its path.
    _packets: Option<File>,
    has_console: bool,
}

impl InputList {
    /// An empty list.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn new() -> Result<InputList> {
        let (file, path) = shared_file()?;
        Ok(InputList { file, path, _packets: None, has_console: false })
    }

    /// True if standard input is the machine's console.
    pub fn has_console(&self) -> bool {
        self.has_console
    }

    /// A list that a machine gets when it runs again.
    pub fn of(bytes: &[u8]) -> Result<InputList> {
        let list = InputList::new()?;
        list.file.write_all_at(bytes, 0).map_err(Error::system("keep the inputs of the machine"))?;
        Ok(list)
    }

    /// What is in it.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let failed = || Error::system("read the inputs of the machine");
        let mut bytes = vec![0; self.file.metadata().map_err(failed())?.len() as usize];
        self.file.read_exact_at(&mut bytes, 0).map_err(failed())?;
        Ok(bytes)
    }

    /// The option of the plugin that names it.
    pub fn option(&self) -> Result<String> {
        Ok(format!("{INPUTS}{}", option_word(&self.path)?))
    }
}

/// The command line of a machine that repeats its run
/// ([`deterministic_command`](crate::deterministic_command)), with what comes to it from outside
/// recorded: by the console `-serial stdio`, and by the network card e1000 with `-netdev`.
/// Pagemark's plugin reads QEMU's standard input, gets the packets that QEMU has for the machine,
/// and writes to the list what the machine gets of it, and when. None if the machine has neither.
///
/// # Errors
/// [`ErrorKind::NotFound`] says where the plugin was looked for, and [`ErrorKind::Unsupported`] how
/// the network, or the network card of this QEMU, differs from one that is recorded.
///
/// ```
/// use std::ffi::OsString;
///
/// let command = ["qemu-system-x86_64", "-serial", "file:serial"].map(OsString::from);
/// assert!(pagemark_vm::deterministic_inputs(&command)?.is_none());
/// # Ok::<(), pagemark_vm::Error>(())
/// ```
pub fn deterministic_inputs(command: &[OsString]) -> Result<Option<(Vec<OsString>, InputList)>> {
    let words: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let values =
        |name: &str| (2..words.len()).filter(|&at| option_name(&words[at - 1]) == Some(name)).collect::<Vec<usize>>();
    let console = values("serial").into_iter().find(|&at| words[at] == CONSOLE);
    let networks = values("netdev");
    if console.is_none() && networks.is_empty() {
        return Ok(None);
    }
    let mut list = InputList::new()?;
    let mut options = list.option()?;
    let (mut changed, mut added) = (command.to_vec(), Vec::<String>::new());
    if let Some(at) = console {
        list.has_console = true;
        changed[at] = "chardev:pagemark-console".into();
        added.extend(["-chardev".into(), CONSOLE_OUTPUT.into()]);
        options += &format!(",{READS_CONSOLE}");
    }
    if !networks.is_empty() {
        let at = |places: Vec<usize>| places.into_iter().map(|at| &*words[at]).collect::<Vec<_>>();
        let id = recorded_network(&at(networks), &at(values("device")))?;
        check_card_timers(&command[0])?;
        let (packets, path) = shared_file()?;
        let path = option_word(&path)?;
        added.extend(["-chardev".into(), format!("{PACKETS_CHARDEV}path={path},append=on")]);
        added.extend(["-object".into(), format!("{PACKETS_FILTER}netdev={id},queue=tx,outdev=pagemark-network")]);
        added.extend(CARD_TIMERS.iter().flat_map(|timer| ["-global".into(), format!("{CARD}.{timer}=off")]));
        options += &format!(",{PACKETS}{path}");
        list._packets = Some(packets);
    }
    match values("plugin").into_iter().find(|&at| completes_requests(&words[at..=at])) {
        Some(at) => changed[at] = format!("{},{options}", words[at]).into(),
        None => added.extend(["-plugin".into(), format!("{},{options}", option_word(&simulator_library()?)?)]),
    }
    changed.extend(added.into_iter().map(OsString::from));
    Ok(Some((changed, list)))
}

/// The id of the only network, whose only card is one that is recorded.
fn recorded_network<'a>(networks: &[&'a str], cards: &[&str]) -> Result<&'a str> {
    let refused = |reason: String| {
        let help = "use -netdev user,id=n -device e1000,netdev=n, and no other network";
        Err(Error::about(ErrorKind::Unsupported, Object::None, reason).help(help))
    };
    let options = split_options(networks[0]);
    let id = options.iter().find_map(|option| option.strip_prefix("id=")).unwrap_or_default();
    let is_known = NETWORKS.contains(&options[0]) && !id.is_empty();
    if networks.len() > 1 || !is_known || options.iter().any(|option| option.starts_with(UNRECORDED_OPTION)) {
        return refused(format!("what comes by -netdev {} is not recorded", networks.join(" and ")));
    }
    let is_network = |card: &&&str| {
        let options = split_options(card);
        options[0] == CARD || options.iter().any(|option| option.starts_with("netdev="))
    };
    match cards.iter().filter(is_network).collect::<Vec<_>>()[..] {
        [card] if is_recorded(card, id) => Ok(id),
        [] => refused(format!("-netdev {} has no network card by -device", networks[0])),
        ref cards => {
            let cards = cards.iter().map(|card| card.to_string()).collect::<Vec<_>>().join(" and ");
            refused(format!("what comes by the network card {cards} is not recorded"))
        }
    }
}

/// Checks that QEMU, `program`, can switch off what the card does by timers.
fn check_card_timers(program: &OsStr) -> Result<()> {
    let mut command = process::Command::new(program);
    // A program that does not run is reported when the machine is to be started.
    match command.args(["-device", &format!("{CARD},help")]).stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => check_card_properties(&String::from_utf8_lossy(&output.stdout)),
        _ => Ok(()),
    }
}

/// Checks the properties of the card, as QEMU lists them.
fn check_card_properties(list: &str) -> Result<()> {
    let is_there = |timer: &str| list.lines().any(|line| line.trim_start().starts_with(&format!("{timer}=")));
    let Some(missing) = CARD_TIMERS.into_iter().find(|timer| !is_there(timer)) else { return Ok(()) };
    let reason = format!(
        "what comes by the network card {CARD} of this QEMU is not recorded: the card has no property {missing}, by \
         which one of its timers is switched off"
    );
    let help = format!("use a QEMU whose {CARD} has it, as that of version 7.2 has, or a machine without a network");
    Err(Error::about(ErrorKind::Unsupported, Object::None, reason).help(help))
}

/// True if a device is a card of the network `id` that acts at the machine's time.
fn is_recorded(card: &str, id: &str) -> bool {
    let options = split_options(card);
    let has_timer = |option: &&str| {
        option.split_once('=').is_some_and(|(name, value)| CARD_TIMERS.contains(&name) && value != "off")
    };
    options[0] == CARD && options.contains(&&*format!("netdev={id}")) && !options.iter().any(has_timer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_network_with_one_card_is_recorded() {
        let id = |networks: &[&'static str], cards: &[&str]| recorded_network(networks, cards);
        let (user, card) = ("user,id=n,hostfwd=udp::7-:7", "e1000,netdev=n,mac=52:54:00:12:34:57");
        assert_eq!(id(&[user], &["isa-debugcon", card]).unwrap(), "n");
        assert_eq!(id(&["socket,udp=a:1,localaddr=a:2,id=n"], &["e1000,mitigation=off,netdev=n"]).unwrap(), "n");
        let refused: [(&[&'static str], &[&str]); 9] = [
            (&["user"], &[card]),
            (&["tap,id=n"], &[card]),
            (&["user,id=n,guestfwd=tcp:10.0.2.9:1-cmd:cat"], &[card]),
            (&[user, "user,id=m"], &[card]),
            (&[user], &[]),
            (&[user], &["e1000"]),
            (&[user], &["virtio-net-pci,netdev=n"]),
            (&[user], &[card, "e1000,netdev=m"]),
            (&[user], &["e1000,netdev=n,mitigation=on"]),
        ];
        for (networks, cards) in refused {
            let error = id(networks, cards).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{networks:?} {cards:?}");
            assert!(error.advice().contains("e1000"), "{error}");
        }
    }

    #[test]
    fn a_card_whose_timers_cannot_be_switched_off_is_not_recorded() {
        let (mitigation, autonegotiation) = ("  mitigation=<bool> - on/off\n", "  autonegotiation=<bool> - on/off\n");
        let listed = |properties: &[&str]| check_card_properties(&format!("e1000 options:\n{}", properties.concat()));
        listed(&[autonegotiation, mitigation]).unwrap();
        for (properties, missing) in [([mitigation], "autonegotiation"), ([autonegotiation], "mitigation")] {
            let error = listed(&properties).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(missing) && !error.advice().is_empty(), "{error}");
        }
        // A program without such a list, and one that is not there.
        assert!(check_card_timers("echo".as_ref()).is_err());
        check_card_timers("pagemark-no-such-program".as_ref()).unwrap();
    }
}
