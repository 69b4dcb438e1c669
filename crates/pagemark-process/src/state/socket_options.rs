//! The options of sockets. CRIU saves some of them; each that can be read and set is compared here,
//! so that it does not matter which.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use pagemark_linux::socket_options::{OptionValue, SocketKind, SocketOption};
use pagemark_trace::PidsHere;

use super::sockets::{Place, name};

/// The options that sockets of one kind have in common.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct SocketOptions {
    kind: SocketKind,
    /// A descriptor of each of the sockets.
    sockets: Vec<Place>,
    /// The bytes of each value by the option's name.
    options: BTreeMap<String, Vec<u8>>,
}

/// What is read of a socket in the freeze, by the names of the options.
type Values = Vec<(&'static str, OptionValue)>;

/// Observes sockets, one after the other.
#[derive(Default)]
pub(super) struct Observation(Vec<(SocketKind, Values, Vec<Place>)>);

impl Observation {
    /// Notes the options of a socket.
    pub fn add(&mut self, place: Place, kind: SocketKind, socket: &OwnedFd) {
        let value = |option: &SocketOption| Some((option.name, option.get(socket).ok()?));
        let values: Values = SocketOption::of(kind).filter_map(value).collect();
        match self.0.iter_mut().find(|(of, other, _)| *of == kind && *other == values) {
            Some((_, _, places)) => places.push(place),
            None => self.0.push((kind, values, vec![place])),
        }
    }

    /// What was found.
    pub fn finish(self) -> Vec<SocketOptions> {
        let noted = |(kind, values, sockets): (SocketKind, Values, Vec<Place>)| SocketOptions {
            kind,
            sockets,
            options: values.iter().map(|(name, value)| ((*name).to_owned(), value.bytes().to_owned())).collect(),
        };
        self.0.into_iter().map(noted).collect()
    }
}

/// Sockets that lack the same option.
struct Loss {
    option: &'static str,
    first: Place,
    sockets: usize,
    reason: io::Error,
}

impl SocketOptions {
    /// Gives them to the sockets, and adds to `missing` which of them the sockets do not have then.
    pub(super) fn give_back(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let mut losses: Vec<Loss> = Vec::new();
        for &place in &self.sockets {
            let Some(socket) = place.open(here).filter(|socket| self.is_one(socket)) else { continue };
            for (option, reason) in self.give(&socket) {
                match losses.iter_mut().find(|loss| loss.option == option) {
                    Some(loss) => loss.sockets += 1,
                    None => losses.push(Loss { option, first: place, sockets: 1, reason }),
                }
            }
        }
        missing.extend(losses.iter().map(|Loss { option, first, sockets, reason }| {
            format!("{} lost the socket option {option}: {reason}", name(*first, *sockets))
        }));
    }

    /// True if the socket is of this kind. Something else may have taken its place, as the output
    /// of the restoring command.
    fn is_one(&self, socket: &OwnedFd) -> bool {
        let of = |kind: SocketKind| (kind.domain, kind.kind, kind.protocol);
        SocketKind::of(socket).is_ok_and(|kind| of(kind) == of(self.kind))
    }

    /// Gives them to one socket. Returns the options that it does not have then.
    fn give(&self, socket: &OwnedFd) -> Vec<(&'static str, io::Error)> {
        // What a damaged checkpoint has under another name, or too long, asks for nothing.
        let wanted: Vec<(&SocketOption, OptionValue)> = SocketOption::of(self.kind)
            .filter_map(|option| Some((option, OptionValue::from_bytes(self.options.get(option.name)?)?)))
            .collect();
        let mut refused: Vec<(&'static str, io::Error)> = Vec::new();
        for (option, value) in &wanted {
            if !option.get(socket).is_ok_and(|current| current == *value)
                && let Err(error) = option.set(socket, value)
            {
                refused.push((option.name, error));
            }
        }
        // One option may have changed another.
        for (option, value) in &wanted {
            if !refused.iter().any(|(name, _)| *name == option.name)
                && !option.get(socket).is_ok_and(|current| current == *value)
            {
                refused.push((option.name, io::Error::other("it has another value")));
            }
        }
        refused
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use pagemark_linux::pidfd;
    use pagemark_trace::RecordedPid;

    use super::*;

    fn option(name: &str) -> &'static SocketOption {
        let kind = SocketKind { domain: libc::AF_INET, kind: libc::SOCK_DGRAM, protocol: 17, is_listening: false };
        SocketOption::of(kind).find(|option| option.name == name).unwrap()
    }

    fn value(number: i32) -> OptionValue {
        OptionValue::from_bytes(&number.to_ne_bytes()).unwrap()
    }

    /// The options of a socket of this process, noted and read again.
    fn note(socket: &UdpSocket) -> SocketOptions {
        let place = Place { pid: RecordedPid::new(std::process::id() as i32), descriptor: socket.as_raw_fd() };
        let mut observation = Observation::default();
        let copy: OwnedFd = socket.try_clone().unwrap().into();
        observation.add(place, SocketKind::of(&copy).unwrap(), &copy);
        serde_json::from_str(&serde_json::to_string(&observation.finish()[0]).unwrap()).unwrap()
    }

    #[test]
    fn a_socket_gets_back_what_it_had() {
        if pidfd::GET_DESCRIPTOR.refusal().is_some() {
            pagemark_testing::skipped("no pidfd_getfd");
            return;
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let changed = [("IP_MTU_DISCOVER", 2, 0), ("IP_TOS", 0x10, 0x20), ("SO_PRIORITY", 3, 5)];
        for (name, number, _) in changed {
            option(name).set(&socket, &value(number)).unwrap();
        }
        let noted = note(&socket);
        for (name, _, other) in changed {
            option(name).set(&socket, &value(other)).unwrap();
        }
        let mut missing = Vec::new();
        noted.give_back(&PidsHere::as_recorded(), &mut missing);
        assert_eq!(missing, Vec::<String>::new());
        for (name, number, _) in changed {
            assert_eq!(option(name).get(&socket).unwrap(), value(number), "{name}");
        }
    }

    #[test]
    fn what_a_socket_cannot_have_is_named() {
        if pidfd::GET_DESCRIPTOR.refusal().is_some() {
            pagemark_testing::skipped("no pidfd_getfd");
            return;
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut noted = note(&socket);
        noted.options.insert("IP_TTL".into(), vec![0xff, 0xff, 0, 0]);
        noted.options.insert("NO_OPTION".into(), vec![1]);
        noted.options.insert("SO_BROADCAST".into(), vec![1; 100]);
        let mut missing = Vec::new();
        noted.give_back(&PidsHere::as_recorded(), &mut missing);
        let (number, pid) = (socket.as_raw_fd(), std::process::id());
        let expected = format!(
            "descriptor {number} of process {pid} lost the socket option IP_TTL: Invalid argument (os error 22)"
        );
        assert_eq!(missing, [expected]);
        // Another kind of socket that has its number is left alone.
        noted.kind.protocol = 1;
        missing.clear();
        noted.give_back(&PidsHere::as_recorded(), &mut missing);
        assert!(missing.is_empty());
    }
}
