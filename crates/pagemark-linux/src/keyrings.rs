//! Keyrings of the kernel, by their numbers: what they hold.

use std::io;

use nix::errno::Errno;

const DESCRIBE: libc::c_long = 6;
const READ: libc::c_long = 11;

/// Keyrings and keys that are read at most.
const MAX_HELD: usize = 4096;

/// The longest description that is read, bytes.
const MAX_DESCRIPTION: usize = 4096;

/// How many keys a keyring holds that would be lost with it: all but the keyrings of users, which
/// the kernel keeps for the user.
///
/// # Errors
/// `EACCES`: this thread may not read it. `ENOKEY`, `EKEYREVOKED`: it is gone.
pub fn own_keys(keyring: i32) -> io::Result<usize> {
    let mut held = vec![0_i32; MAX_HELD];
    // SAFETY: the call writes at most as many bytes as it is told, which `held` has.
    let bytes = unsafe { libc::syscall(libc::SYS_keyctl, READ, keyring, held.as_mut_ptr(), MAX_HELD * 4) };
    // More than there is room for is not lost: it counts.
    let count = Errno::result(bytes)? as usize / size_of::<i32>();
    let read = &held[..count.min(MAX_HELD)];
    Ok(count - read.iter().filter(|&&key| is_keyring_of_user(key)).count())
}

/// True for the keyring of a user, and for that of the sessions of a user without any.
fn is_keyring_of_user(key: i32) -> bool {
    let mut text = [0_u8; MAX_DESCRIPTION];
    // SAFETY: the call writes at most as many bytes as it is told, which `text` has.
    let bytes = unsafe { libc::syscall(libc::SYS_keyctl, DESCRIBE, key, text.as_mut_ptr(), MAX_DESCRIPTION) };
    let Some(text) = usize::try_from(bytes).ok().and_then(|bytes| text.get(..bytes)) else { return false };
    // The kind, the user, the group, the permissions and the name, which ends with a zero.
    let mut fields = text.split(|&byte| byte == b';');
    let (kind, name) = (fields.next(), fields.nth(3).unwrap_or_default());
    kind == Some(b"keyring") && (name.starts_with(b"_uid.") || name.starts_with(b"_uid_ses."))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOIN_SESSION: libc::c_long = 1;
    const LINK: libc::c_long = 8;
    const OF_SESSION: libc::c_long = -3;
    const OF_USER: libc::c_long = -4;

    fn keyctl(operation: libc::c_long, arguments: [libc::c_long; 2]) -> nix::Result<i32> {
        // SAFETY: the operations of these tests take numbers alone.
        let result = unsafe { libc::syscall(libc::SYS_keyctl, operation, arguments[0], arguments[1]) };
        Errno::result(result).map(|number| number as i32)
    }

    #[test]
    fn the_keyring_of_a_user_is_no_key_of_a_session() {
        // The session ends with the thread.
        let thread = std::thread::spawn(|| {
            let session = match keyctl(JOIN_SESSION, [0, 0]) {
                Err(error) => return pagemark_testing::skipped(&format!("the kernel has no keyrings: {error}")),
                Ok(session) => session,
            };
            assert_eq!(own_keys(session).unwrap(), 0);
            keyctl(LINK, [OF_USER, OF_SESSION]).unwrap();
            assert_eq!(own_keys(session).unwrap(), 0);
            // SAFETY: the call reads two names that end with a zero and one byte; all outlive it.
            let key = unsafe {
                let (kind, name, content) = (c"user".as_ptr(), c"pagemark".as_ptr(), c"x".as_ptr());
                libc::syscall(libc::SYS_add_key, kind, name, content, 1_usize, OF_SESSION)
            };
            assert!(key > 0);
            assert_eq!(own_keys(session).unwrap(), 1);
        });
        thread.join().unwrap();
        assert!(own_keys(i32::MAX).is_err());
    }
}
