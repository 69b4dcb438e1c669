//! Finds calls that take a path in the modules that handle the files of a job.
//!
//! A user of the job may exchange any file that a path leads to. Two modules walk paths: one
//! without following links and in the name of the job's users, one along links of root's alone. The
//! others work with what they return. Each exception is listed with its reason.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The modules that walk paths.
const WALKS: [&str; 2] = ["files/directory.rs", "files/walk.rs"];

/// Parts of calls that take a path.
const CALLS: [&str; 34] = [
    "fs::read_dir(",
    "fs::read(",
    "fs::read_to_string(",
    "fs::read_link(",
    "fs::write(",
    "fs::rename(",
    "fs::copy(",
    "fs::hard_link(",
    "fs::create_dir(",
    "fs::create_dir_all(",
    "fs::remove_file(",
    "fs::remove_dir(",
    "fs::remove_dir_all(",
    "fs::metadata(",
    "fs::symlink_metadata(",
    "fs::set_permissions(",
    "fs::canonicalize(",
    "File::open(",
    "File::create(",
    "File::create_new(",
    "OpenOptions::new(",
    "DirBuilder::new(",
    ".canonicalize()",
    ".exists()",
    ".is_dir()",
    " lchown(",
    " chown(",
    " symlink(",
    "mkfifo(",
    "openat(",
    "mkdirat(",
    "renameat(",
    "statfs(",
    "stat(",
];

/// A call, and the reason why it may take a path.
const EXCEPTIONS: [(&str, &str, &str); 24] = [
    ("files/asides.rs", "fs::metadata(", "finds the owner of this process's own directory"),
    ("files/asides.rs", "OpenOptions::new(", "a directory for asides, held by its descriptor"),
    ("files/asides.rs", "mkdirat(", "in that directory, by its descriptor"),
    ("files/asides.rs", "openat(", "in that directory, by its descriptor"),
    ("files/asides.rs", "renameat(", "in that directory, by its descriptor"),
    ("files/asides.rs", "fs::read_dir(", "lists that directory"),
    ("files/asides.rs", "fs::read(", "reads a description in that directory"),
    ("files/asides.rs", "fs::remove_dir_all(", "removes what is in that directory"),
    ("files/asides.rs", ".is_dir()", "of the type of an entry"),
    ("files/data_tree.rs", ".canonicalize()", "of a directory that the user of the command names"),
    ("files/data_tree.rs", ".is_dir()", "of that directory; else of attributes"),
    ("files/list.rs", "fs::read_link(", "of a link below /proc/PID"),
    ("files/list.rs", "fs::metadata(", "of a link below /proc/PID"),
    ("files/list.rs", "statfs(", "asks for the kind of a file system, and opens nothing"),
    ("files/output_directory.rs", "mkdirat(", "in a directory that is held"),
    ("files/output_directory.rs", "openat(", "in a directory that is held, one name without a link"),
    ("files/output_directory.rs", "stat(", "of a descriptor"),
    ("files/put_back_tree.rs", ".is_dir()", "of attributes"),
    ("files/written.rs", ".is_dir()", "of attributes"),
    ("files/writers.rs", "fs::metadata(", "of a link below /proc/PID"),
    ("files/writers.rs", "stat(", "of a standard stream of this process"),
    ("restore/root.rs", "fs::read(", "reads this process's own scratch directory"),
    ("restore/root.rs", "fs::read_link(", "of a descriptor of this process"),
    ("restore/root.rs", ".canonicalize()", "of the root directory, where this process is not root's"),
];

#[test]
fn paths_of_a_job_are_walked_in_two_modules() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files: Vec<String> = fs::read_dir(source.join("files"))
        .unwrap()
        .map(|entry| format!("files/{}", entry.unwrap().file_name().to_str().unwrap()))
        // A module's directory has its tests.
        .filter(|name| name.ends_with(".rs") && !WALKS.contains(&name.as_str()) && name != "files/hostile.rs")
        .collect();
    files.push("restore/root.rs".into());
    let mut found = BTreeSet::new();
    for file in &files {
        let text = fs::read_to_string(source.join(file)).unwrap();
        let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap();
            for call in CALLS.iter().filter(|call| code.contains(**call)) {
                found.insert((file.clone(), *call, number + 1));
            }
        }
    }
    let is_excepted = |file: &str, call: &str| EXCEPTIONS.iter().any(|(f, c, _)| *f == file && *c == call);
    let others: Vec<_> = found.iter().filter(|(file, call, _)| !is_excepted(file, call)).collect();
    assert!(others.is_empty(), "use the functions of {WALKS:?}, or list the exception: {others:?}");
    let unused: Vec<_> =
        EXCEPTIONS.iter().filter(|(file, call, _)| !found.iter().any(|(f, c, _)| f == file && c == call)).collect();
    assert!(unused.is_empty(), "these are no exceptions any more: {unused:?}");
}
