//! Changes to the mappings of a process in its `mm` image.

use std::path::Path;

use pagemark_trace::error::Error;
use prost::Message;

use super::schema::{MmEntry, VmaEntry};
use super::{Image, ImageKind, with_each};

/// The flags that `mmap` takes for a private mapping without a file.
pub(crate) const PRIVATE_ANONYMOUS: u32 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u32;

/// Returns an image of mappings in which `change` has replaced encoded mappings, where it returns
/// others.
///
/// # Errors
/// [`ErrorKind::Image`](pagemark_trace::error::ErrorKind::Image): the image cannot be understood.
pub(crate) fn changed(
    path: &Path,
    mut change: impl FnMut(&VmaEntry, &[u8]) -> Option<Vec<u8>>,
) -> Result<Image, Error> {
    divided(path, |entry, mapping| Some(vec![change(entry, mapping)?]))
}

/// Like [`changed`]; several mappings may take the place of one.
pub(crate) fn divided(
    path: &Path,
    mut change: impl FnMut(&VmaEntry, &[u8]) -> Option<Vec<Vec<u8>>>,
) -> Result<Image, Error> {
    let mut image = Image::read(path, ImageKind::Mm)?;
    let message = image.messages.first_mut().ok_or_else(|| Error::image(path, "it has no message"))?;
    MmEntry::decode(message.as_slice()).map_err(|error| Error::image(path, error.to_string()))?;
    *message = with_each(message, MmEntry::VMAS, |mapping| {
        // It was decoded with the image.
        VmaEntry::decode(mapping).ok().and_then(|entry| change(&entry, mapping))
    });
    Ok(image)
}
