//! The file of a program: found, checked and opened before anything changes.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::elf::{self, Elf, HEADER_BYTES, NotElf};

/// How many scripts can be the interpreter of another, as for Linux.
const MOST_SCRIPTS: usize = 5;
/// How much of a script's first line counts, as for Linux.
const SCRIPT_LINE: usize = 256;

/// A program that can be loaded.
#[derive(Debug)]
pub struct Image {
    /// The program, which need not be the file that was named: that may be a script.
    pub file: File,
    /// The path of `file`.
    pub path: PathBuf,
    /// The path that was named (`AT_EXECFN`).
    pub named: CString,
    /// The arguments; with those that a script adds.
    pub arguments: Vec<CString>,
    /// What `file` holds.
    pub elf: Elf,
    /// The dynamic linker.
    pub linker: Option<(File, Elf)>,
}

/// Why a program cannot be run: the errno of `execve`, and what the machine lacks if Linux would
/// run it.
#[derive(Debug)]
pub struct Unloadable {
    /// The errno.
    pub errno: i32,
    /// What the machine cannot do.
    pub lacking: Option<&'static str>,
}

impl Unloadable {
    fn new(errno: i32) -> Unloadable {
        Unloadable { errno, lacking: None }
    }
}

impl From<io::Error> for Unloadable {
    fn from(error: io::Error) -> Unloadable {
        Unloadable::new(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<std::ffi::NulError> for Unloadable {
    fn from(_: std::ffi::NulError) -> Unloadable {
        Unloadable::new(libc::EINVAL)
    }
}

/// Opens `path` for execution.
fn open(path: &Path) -> Result<File, Unloadable> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `name` ends with zero.
    let may = unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::X_OK, libc::AT_EACCESS) };
    if may != 0 {
        return Err(io::Error::last_os_error().into());
    }
    // Without O_NONBLOCK, opening a pipe would wait.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|error| {
        // Linux runs programs that only may be executed, not read.
        let lacking = (error.raw_os_error() == Some(libc::EACCES)).then_some("running a program that cannot be read");
        Unloadable { lacking, ..Unloadable::from(error) }
    })?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Unloadable::new(libc::EACCES));
    }
    // SAFETY: only ask.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let sets_user = metadata.mode() & libc::S_ISUID != 0 && metadata.uid() != user;
    let sets_group =
        metadata.mode() & libc::S_ISGID != 0 && metadata.mode() & libc::S_IXGRP != 0 && metadata.gid() != group;
    if sets_user || sets_group {
        let lacking = Some("running a program with the rights of its file's owner");
        return Err(Unloadable { errno: libc::EPERM, lacking });
    }
    Ok(file)
}

/// Reads up to `len` bytes from `offset` on.
fn read(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn read_elf(file: &File, header: &[u8]) -> Result<Elf, Unloadable> {
    let refused = |error| match error {
        NotElf::Foreign => {
            Unloadable { errno: libc::ENOEXEC, lacking: Some("running programs of 32 bits or of other processors") }
        }
        NotElf::Other | NotElf::Damaged => Unloadable::new(libc::ENOEXEC),
    };
    let header = &header[..header.len().min(HEADER_BYTES)];
    let (offset, len) = elf::program_headers(header).map_err(refused)?;
    if offset > i64::MAX as u64 - len as u64 {
        return Err(Unloadable::new(libc::ENOEXEC));
    }
    let headers = read(file, offset, len)?;
    if headers.len() < len {
        return Err(Unloadable::new(libc::ENOEXEC));
    }
    elf::parse(header, &headers).map_err(refused)
}

/// The interpreter and the argument that the first line of a script names.
fn script(head: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let line = head.strip_prefix(b"#!")?;
    let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let trim = |text: &'_ [u8]| -> (usize, usize) {
        let start = text.iter().take_while(|byte| blank(byte)).count();
        let end = text.len() - text[start..].iter().rev().take_while(|byte| blank(byte)).count();
        (start, end)
    };
    let (start, end) = trim(line);
    let line = &line[start..end];
    let name_len = line.iter().take_while(|byte| !blank(byte)).count();
    let (name, rest) = line.split_at(name_len);
    let (start, end) = trim(rest);
    (!name.is_empty()).then_some((name, (start < end).then_some(&rest[start..end])))
}

impl Image {
    /// The program at `path`, or the interpreter of the script there.
    pub fn open(path: &CStr, arguments: &[CString]) -> Result<Image, Unloadable> {
        let named = path.to_owned();
        let mut path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
        let mut arguments = arguments.to_vec();
        for _ in 0..=MOST_SCRIPTS {
            let file = open(&path)?;
            let head = read(&file, 0, SCRIPT_LINE.max(HEADER_BYTES))?;
            if let Some((interpreter, argument)) = script(&head) {
                let interpreter = interpreter.to_vec();
                let mut added = vec![CString::new(interpreter.clone())?];
                added.extend(argument.map(CString::new).transpose()?);
                added.push(CString::new(path.as_os_str().as_bytes())?);
                arguments = added.into_iter().chain(arguments.into_iter().skip(1)).collect();
                path = PathBuf::from(OsStr::from_bytes(&interpreter));
                continue;
            }
            let elf = read_elf(&file, &head)?;
            let linker = match elf.linker {
                None => None,
                Some((offset, len)) => {
                    let mut name = read(&file, offset, len)?;
                    if name.pop() != Some(0) || name.contains(&0) {
                        return Err(Unloadable::new(libc::ENOEXEC));
                    }
                    let file = open(Path::new(OsStr::from_bytes(&name)))?;
                    let head = read(&file, 0, HEADER_BYTES)?;
                    let elf = read_elf(&file, &head).map_err(|mut error| {
                        if error.errno == libc::ENOEXEC {
                            error.errno = libc::ELIBBAD;
                        }
                        error
                    })?;
                    Some((file, elf))
                }
            };
            return Ok(Image { file, path, named, arguments, elf, linker });
        }
        Err(Unloadable::new(libc::ELOOP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines_of_scripts_are_read_as_linux_does() {
        assert_eq!(script(b"#!/bin/sh\nexit"), Some((&b"/bin/sh"[..], None)));
        assert_eq!(script(b"#! /usr/bin/env  -S a b \t\n"), Some((&b"/usr/bin/env"[..], Some(&b"-S a b"[..]))));
        assert_eq!(script(b"#!   \n/bin/sh"), None);
        assert_eq!(script(b"\x7fELF"), None);
    }

    #[test]
    fn a_script_is_run_by_its_interpreter() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("script");
        pagemark_testing::executable(&path, b"#!/bin/sh -e\n");
        let name = CString::new(path.as_os_str().as_bytes()).expect("no zero");
        let image = Image::open(&name, &[c"x".into(), c"y".into()]).expect("sh is there");
        assert_eq!(image.path, Path::new("/bin/sh"));
        assert_eq!(image.arguments, [c"/bin/sh".to_owned(), c"-e".into(), name.clone(), c"y".into()]);
        assert_eq!(Image::open(c"/", &[]).expect_err("a directory").errno, libc::EACCES);
        assert_eq!(Image::open(c"/nowhere/at/all", &[]).expect_err("missing").errno, libc::ENOENT);
    }
}
