//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

use pagemark_linux::fanotify::{self, Events};

/// Reads the events of fanotify that one `read` of the kernel has returned.
pub fn fanotify_events(bytes: &[u8]) -> Events {
    let mut events = Events::default();
    fanotify::parse(bytes, &mut events);
    events
}
