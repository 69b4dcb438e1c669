//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

use std::fs;
use std::path::{Path, PathBuf};

use crate::criu::dump::read_pstree;
use crate::criu::images::container::{bytes_of, decode_queues, with_bytes, with_each, with_varint, without};
use crate::criu::images::{Image, ImageKind, Pagemap, mappings};
use crate::criu::notes::Notes;
use crate::criu::regular_files::{self, Demand};
use crate::criu::{outside_sockets, own_network, stdio, timers};
use crate::files::asides;
use crate::restore;

/// The images whose content the fuzzer chooses, in the order in which it names them.
const IMAGES: [(&str, ImageKind); 15] = [
    ("files.img", ImageKind::Files),
    ("fdinfo-2.img", ImageKind::Descriptors),
    ("core-1.img", ImageKind::Core),
    ("mm-1.img", ImageKind::Mm),
    ("pstree.img", ImageKind::Pstree),
    ("tty-info.img", ImageKind::Terminals),
    ("remap-fpath.img", ImageKind::Remaps),
    ("pagemap-1.img", ImageKind::Pagemap),
    ("netdev-9.img", ImageKind::Interfaces),
    ("netns-9.img", ImageKind::Network),
    ("ids-1.img", ImageKind::Ids),
    ("fs-1.img", ImageKind::Directories),
    ("ghost-file-1.img", ImageKind::Ghost),
    ("sk-queues.img", ImageKind::Queues),
    ("mountpoints-9.img", ImageKind::Mounts),
];

/// Writes images of these messages into `directory`, which must be empty, and does to them what a
/// restore does. A message belongs to the image with its number.
pub fn images(directory: &Path, messages: &[(u8, &[u8])]) {
    for (number, (name, kind)) in IMAGES.into_iter().enumerate() {
        let mut image = Image::new(kind);
        let of_image = messages.iter().filter(|(of, _)| usize::from(*of) % IMAGES.len() == number);
        image.messages.extend(of_image.map(|(_, message)| message.to_vec()));
        // Only a tree with mounts of its own has this one.
        if kind == ImageKind::Mounts && image.messages.is_empty() {
            continue;
        }
        let encoded = image.encode();
        assert_eq!(Image::decode(&encoded, kind).as_ref(), Ok(&image));
        fs::write(directory.join(name), encoded).expect("the directory can be written");
    }
    let _ = read_pstree(directory);
    let _ = Pagemap::read(&directory.join("pagemap-1.img"));
    let _ = mappings::changed(&directory.join("mm-1.img"), |_, mapping| Some(mapping.to_vec()));
    let path_of = |name: &str, _: bool| Some(PathBuf::from(name));
    let _ = regular_files::revise(directory, &path_of, &mut |_| Ok(Demand::Position(7)));
    let _ = stdio::foreground(directory, 1);
    let _ = stdio::adopt_terminals(directory, 1, None);
    let _ = timers::arm_expired(directory);
    let _ = outside_sockets::disconnect(directory, Path::new("/"), false);
    let _ = own_network::make_by_criu(directory);
    restore::read_images(directory);
}

/// Decodes an image file, and changes fields of any bytes as if they were a message.
pub fn image_file(bytes: &[u8], field: u32) {
    for (_, kind) in IMAGES {
        if let Ok(image) = Image::decode(bytes, kind) {
            assert_eq!(Image::decode(&image.encode(), kind), Ok(image));
        }
    }
    let _ = decode_queues(bytes);
    let _ = (bytes_of(bytes, field), without(bytes, field), with_varint(bytes, field.max(1), 7));
    let _ = with_bytes(bytes, field.max(1), b"content");
    assert!(with_each(bytes, field, |content| Some(vec![content.to_vec()])).len() <= bytes.len() + 16);
}

/// Reads the notes of a dump.
pub fn notes(text: &[u8]) {
    let _ = serde_json::from_slice::<Notes>(text);
}

/// Lists the asides of a restore whose description is `text`, in `directory`, which must be empty.
pub fn asides(directory: &Path, text: &[u8]) {
    let aside = directory.join("job@1-20240229T123456");
    fs::create_dir(&aside).expect("the directory can be written");
    fs::write(aside.join(asides::DESCRIPTION), text).expect("the directory can be written");
    let _ = asides::list(directory);
}
