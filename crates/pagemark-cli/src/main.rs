//! The command `pagemark`.

fn main() {}
