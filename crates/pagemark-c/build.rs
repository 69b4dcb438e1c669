//! Gives the shared library the name under which programs look for it when they start. Before
//! version 1 each minor version may change the ABI, so it is part of the name.

use std::env;

fn main() {
    let part = |name: &str| env::var(name).unwrap_or_default();
    let (major, minor) = (part("CARGO_PKG_VERSION_MAJOR"), part("CARGO_PKG_VERSION_MINOR"));
    let abi = if major == "0" { format!("0.{minor}") } else { major };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpagemark.so.{abi}");
    // A handler of SIGSEGV and those of `pthread_atfork` are called when `dlclose` has returned, too.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
