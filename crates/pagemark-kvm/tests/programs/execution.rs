//! What decides whether a program is executed, which file it is, and with which rights.

use super::{compiled, dir, is_root, lacking, same};

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
