//! The demonstration of `make demo`, with less data.

mod support;

use std::path::Path;
use std::process::Command;

use pagemark_testing::skip;
use support::free_port;

#[test]
#[ignore = "takes half a minute"]
fn the_demonstration_loses_nothing() {
    if let Err(error) = pagemark_process::criu::Criu::find() {
        skip!("{error}");
    }
    let port = free_port().to_string();
    let temporary = tempfile::tempdir().expect("a directory");
    let mut demo = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/demo.sh"));
    demo.env("PAGEMARK", env!("CARGO_BIN_EXE_pagemark")).env("MIB", "64").env("PORT", port).env_remove("PAGEMARK_REPO");
    let shown = demo.env("TMPDIR", temporary.path()).output().expect("the script");
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.status.success(), "{text}\n{}", String::from_utf8_lossy(&shown.stderr));
    assert!(text.contains("Compare every key") && text.contains(": nothing."), "{text}");
    let left: Vec<_> = std::fs::read_dir(temporary.path()).expect("the directory").collect();
    assert!(left.is_empty(), "the demonstration leaves {left:?}");
}
