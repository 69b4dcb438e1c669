//! The network namespace of a tree that has a user namespace of its own.
//!
//! Such a tree can only enter a network namespace that belongs to its user namespace, so CRIU has
//! to make both. The dump names the network as one that is provided from outside; the images are
//! changed to a namespace that has the loopback interface alone.

use std::path::Path;

use pagemark_trace::error::Error;
use prost::Message;

use super::images::schema::{InterfaceEntry, LOOPBACK, NetworkEntry};
use super::images::{Image, ImageKind, without};

/// The loopback interface of each new namespace.
const NUMBER: u32 = 1;
const MTU: u32 = 65536;

/// Changes the images in `directory` so that CRIU makes the network namespace, with the loopback
/// interface up and nothing else.
///
/// # Errors
/// An image cannot be read or written.
pub(crate) fn make_by_criu(directory: &Path) -> Result<(), Error> {
    let failed = |path: &Path| Error::criu_io(format!("write {}", path.display()));
    let entries = std::fs::read_dir(directory).map_err(Error::criu_io(format!("read {}", directory.display())))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(id) = name.strip_prefix("netns-") else { continue };
        let mut network = Image::read(&path, ImageKind::Network)?;
        for message in &mut network.messages {
            NetworkEntry::decode(message.as_slice()).map_err(|error| Error::image(&path, error.to_string()))?;
            *message = without(message, NetworkEntry::EXT_KEY);
        }
        std::fs::write(&path, network.encode()).map_err(failed(&path))?;
        let flags = (libc::IFF_UP | libc::IFF_LOOPBACK | libc::IFF_RUNNING) as u32;
        let loopback = InterfaceEntry { r#type: LOOPBACK, ifindex: NUMBER, mtu: MTU, flags, name: "lo".into() };
        let mut interfaces = Image::new(ImageKind::Interfaces);
        interfaces.messages.push(loopback.encode_to_vec());
        let path = directory.join(format!("netdev-{id}"));
        std::fs::write(&path, interfaces.encode()).map_err(failed(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::images::read_all;
    use super::*;

    #[test]
    fn a_network_from_outside_becomes_one_with_the_loopback_interface() {
        let directory = tempfile::tempdir().unwrap();
        let (network, interfaces) = (directory.path().join("netns-11.img"), directory.path().join("netdev-11.img"));
        let mut image = Image::new(ImageKind::Network);
        // With a field that is not declared here.
        let undeclared = [0x48, 7];
        let entry = NetworkEntry { ext_key: Some("outside".into()) }.encode_to_vec();
        image.messages.push([&undeclared[..], &entry].concat());
        std::fs::write(&network, image.encode()).unwrap();
        make_by_criu(directory.path()).unwrap();
        assert_eq!(Image::read(&network, ImageKind::Network).unwrap().messages, [undeclared]);
        let made: Vec<InterfaceEntry> = read_all(&interfaces, ImageKind::Interfaces).unwrap();
        assert_eq!(made.len(), 1);
        assert_eq!((made[0].name.as_str(), made[0].r#type), ("lo", LOOPBACK));
        assert_ne!(made[0].flags & libc::IFF_UP as u32, 0);
    }
}
