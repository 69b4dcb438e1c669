//! Periodic timer descriptors that had expired at the freeze.
//!
//! The kernel restarts such a timer only when its descriptor is read, and until then reports that
//! no time is left. CRIU takes the timer for a stopped one and restores a timer that never fires
//! again. In the image, the timer therefore gets one nanosecond of time left and one expiration
//! less, which is an equivalent timer.

use std::path::Path;

use pagemark_trace::error::Error;
use prost::Message;

use super::images::schema::{FileEntry, TimerfdEntry};
use super::images::{Image, ImageKind, with_bytes};

/// Corrects `files.img` in an images directory.
pub(crate) fn arm_expired(directory: &Path) -> Result<(), Error> {
    let path = directory.join("files.img");
    let mut image = Image::read(&path, ImageKind::Files)?;
    let mut changed = false;
    for message in &mut image.messages {
        let decoded = FileEntry::decode(message.as_slice());
        let entry = decoded.map_err(|e| Error::image(path.clone(), e.to_string()))?;
        let Some(timer) = entry.tfd else { continue };
        let is_stopped = timer.vsec == 0 && timer.vnsec == 0;
        let is_periodic = timer.isec != 0 || timer.insec != 0;
        if timer.ticks > 0 && is_stopped && is_periodic {
            let timer = TimerfdEntry { ticks: timer.ticks - 1, vnsec: 1, ..timer };
            *message = with_bytes(message, FileEntry::TFD, &timer.encode_to_vec());
            changed = true;
        }
    }
    if changed {
        std::fs::write(&path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))?;
    }
    Ok(())
}
