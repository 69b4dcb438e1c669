//! What decides whether a program is executed, which file it is, and with which rights.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::{MACHINE, compiled, dir, find, is_root, lacking, output, same};

macro_rules! need_machine_and_root {
    () => {
        if let Some(reason) = lacking() {
            pagemark_testing::skip!("no machine under KVM: {reason}");
        }
        if !is_root() {
            pagemark_testing::skip!("needs root to give it up");
        }
    };
}

/// A program that has more rights than its user loads nothing that the user names.
#[test]
fn users_do_not_choose_libraries_of_programs_with_more_rights() {
    need_machine_and_root!();
    let dir = dir();
    let library = compiled("injected", dir.path(), &["-shared", "-fPIC"]);
    let program = compiled("secure", dir.path(), &[]);
    same(program, &[library.to_str().expect("a path in UTF-8")], dir.path());
}

/// The kernel looks a program up once: what was opened is executed, whatever its name leads to.
#[test]
fn the_file_that_was_opened_is_executed() {
    need_machine_and_root!();
    let dir = dir();
    let program = compiled("execution", dir.path(), &[]);
    // Rules of Landlock on execution hold for the monitor's file too.
    let monitor = Path::new(MACHINE).parent().and_then(Path::to_str).expect("a directory");
    same(program, &[monitor], dir.path());
}

/// Where the kernel gives a program no rights of its file, the program runs without them.
#[test]
fn files_give_rights_only_where_the_kernel_would() {
    need_machine_and_root!();
    let (id, setpriv) = (program!("id"), program!("setpriv"));
    let dir = dir();
    let own = dir.path().join("id");
    std::fs::copy(id, &own).expect("a copy");
    std::os::unix::fs::chown(&own, Some(65534), Some(65534)).expect("root may");
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o6755)).expect("root may");
    same(setpriv, &["--no-new-privs", "./id"], dir.path());
    let mut inside = Command::new(MACHINE);
    inside.arg(&own);
    let refused = output(inside);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(126) && text.contains("file's owner or group"), "{text}");
}
