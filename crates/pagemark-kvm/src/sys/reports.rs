//! Reports of the monitor on the standard error stream.

use std::sync::OnceLock;

use super::signals;

/// A file: its device and number, and the device that it is.
type Identity = (u64, u64, u64);

/// What the standard error stream was when the program began. None if it was closed.
static STREAM: OnceLock<Option<Identity>> = OnceLock::new();

/// The program begins: its standard error stream is the one for reports.
pub fn begin() {
    STREAM.get_or_init(identity);
}

/// Writes `line`, unless the program has another file in place of the stream by now, which may be
/// its data. A stream that nobody reads any more sends the program no signal.
pub fn write(line: &str) {
    // Before the program begins, it is what the monitor itself was given.
    if identity().is_none_or(|now| STREAM.get().is_some_and(|then| *then != Some(now))) {
        return;
    }
    signals::without_broken_pipes(|| {
        // Without the lock of the standard library, which another thread may have had during a `fork`.
        // SAFETY: writes from the buffer.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    });
}

fn identity() -> Option<Identity> {
    let mut about = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fills the value if it returns 0.
    unsafe {
        (libc::fstat(libc::STDERR_FILENO, about.as_mut_ptr()) == 0).then(|| {
            let about = about.assume_init();
            (about.st_dev, about.st_ino, about.st_rdev)
        })
    }
}
