//! Periodic timer descriptors that had expired at the freeze.
//!
//! The kernel starts such a timer again only when its descriptor is read, and says until then that it has no time left. CRIU takes
//! that for a timer that is not running and restores one that never fires again. In the image it is given one nanosecond to go and
//! one expiration less, which is the same timer.

use std::path::Path;

use prost::Message;

use super::CriuError;
use super::images::{FileEntry, Image, ImageError, ImageKind, TimerEntry, with_bytes};

/// Corrects `files.img` in an images directory.
pub(crate) fn arm_expired(directory: &Path) -> Result<(), CriuError> {
    let path = directory.join("files.img");
    let mut image = Image::read(&path, ImageKind::Files)?;
    let mut changed = false;
    for message in &mut image.messages {
        let decoded = FileEntry::decode(message.as_slice());
        let entry = decoded.map_err(|e| ImageError { path: path.clone(), reason: e.to_string() })?;
        let Some(timer) = entry.timer else { continue };
        let stands = timer.seconds == 0 && timer.nanoseconds == 0;
        let is_periodic = timer.interval_seconds != 0 || timer.interval_nanoseconds != 0;
        if timer.ticks > 0 && stands && is_periodic {
            let timer = TimerEntry { ticks: timer.ticks - 1, nanoseconds: 1, ..timer };
            *message = with_bytes(message, FileEntry::TIMER, &timer.encode_to_vec());
            changed = true;
        }
    }
    if changed {
        std::fs::write(&path, image.encode()).map_err(CriuError::io(format!("write {}", path.display())))?;
    }
    Ok(())
}
