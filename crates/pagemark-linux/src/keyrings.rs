//! Keyrings of the kernel, by their numbers: what they hold.

use std::io;

use nix::errno::Errno;

const DESCRIBE: libc::c_long = 6;
const READ: libc::c_long = 11;

/// Keyrings and keys that are read at most.
const MAX_HELD: usize = 4096;

/// The longest description that is read, bytes.
const MAX_DESCRIPTION: usize = 4096;

/// The keys and keyrings that a keyring holds.
///
/// # Errors
/// `EACCES`: this thread may not read it. `ENOKEY`, `EKEYREVOKED`: it is gone. `E2BIG`: there are
/// very many.
pub fn held(keyring: i32) -> io::Result<Vec<i32>> {
    let mut held = vec![0_i32; MAX_HELD];
    // SAFETY: the call writes at most as many bytes as it is told, which `held` has.
    let bytes = unsafe { libc::syscall(libc::SYS_keyctl, READ, keyring, held.as_mut_ptr(), MAX_HELD * 4) };
    let count = Errno::result(bytes)? as usize / size_of::<i32>();
    if count > MAX_HELD {
        return Err(Errno::E2BIG.into());
    }
    held.truncate(count);
    Ok(held)
}

/// True for what a login or a service manager puts into the keyring of each session, and no program
/// loses with it: the keyrings of users, which the kernel keeps for the user, and systemd's number
/// of the start of a service. False if this thread may not see it.
pub fn is_of_each_session(key: i32) -> bool {
    let mut text = [0_u8; MAX_DESCRIPTION];
    // SAFETY: the call writes at most as many bytes as it is told, which `text` has.
    let bytes = unsafe { libc::syscall(libc::SYS_keyctl, DESCRIBE, key, text.as_mut_ptr(), MAX_DESCRIPTION) };
    let Some(text) = usize::try_from(bytes).ok().and_then(|bytes| text.get(..bytes)) else { return false };
    // The kind, the user, the group, the permissions and the name, which ends with a zero.
    let mut fields = text.split(|&byte| byte == b';');
    let (kind, name) = (fields.next(), fields.nth(3).unwrap_or_default());
    match kind {
        Some(b"keyring") => name.starts_with(b"_uid.") || name.starts_with(b"_uid_ses."),
        Some(b"user") => name == b"invocation_id\0",
        _ => false,
    }
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
    fn what_each_session_has_is_no_key_of_a_program() {
        let own_keys =
            |session: i32| held(session).map(|keys| keys.iter().filter(|&&key| !is_of_each_session(key)).count());
        // The session ends with the thread.
        let thread = std::thread::spawn(move || {
            let session = match keyctl(JOIN_SESSION, [0, 0]) {
                Err(error) => return pagemark_testing::skipped(&format!("the kernel has no keyrings: {error}")),
                Ok(session) => session,
            };
            assert_eq!(own_keys(session).unwrap(), 0);
            keyctl(LINK, [OF_USER, OF_SESSION]).unwrap();
            assert_eq!(own_keys(session).unwrap(), 0);
            for (name, expected) in [(c"invocation_id", 0), (c"pagemark", 1)] {
                // SAFETY: the call reads two names that end with a zero and one byte; all outlive it.
                let key = unsafe {
                    let (kind, content) = (c"user".as_ptr(), c"x".as_ptr());
                    libc::syscall(libc::SYS_add_key, kind, name.as_ptr(), content, 1_usize, OF_SESSION)
                };
                assert!(key > 0);
                assert_eq!(own_keys(session).unwrap(), expected, "{name:?}");
            }
        });
        thread.join().unwrap();
        assert!(own_keys(i32::MAX).is_err());
    }
}
