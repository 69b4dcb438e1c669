//! The events of fanotify hold names that any user chooses.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark::fuzzing::fanotify_events;

fuzz_target!(|bytes: &[u8]| {
    let events = fanotify_events(bytes);
    assert!(events.events.iter().all(|event| event.name.len() <= bytes.len()));
});
