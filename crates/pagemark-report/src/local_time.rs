//! The local time zone, which only the C library knows.

use std::mem::MaybeUninit;

/// A moment in the local time zone. Months and days count from 1.
pub(crate) struct LocalTime {
    pub year: i32,
    pub month: i32,
    pub day: i32,
    pub hour: i32,
    pub minute: i32,
    pub second: i32,
}

/// Converts seconds since 1970 UTC. `None` if the year does not fit.
pub(crate) fn local_time(unix_seconds: i64) -> Option<LocalTime> {
    let mut broken_down = MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both pointers are to live values of the right type; localtime_r keeps neither.
    let found = unsafe { libc::localtime_r(&unix_seconds, broken_down.as_mut_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: localtime_r has succeeded and written the value; zeros were a valid value before.
    let time = unsafe { broken_down.assume_init() };
    Some(LocalTime {
        year: time.tm_year.checked_add(1900)?,
        month: time.tm_mon + 1,
        day: time.tm_mday,
        hour: time.tm_hour,
        minute: time.tm_min,
        second: time.tm_sec,
    })
}
