//! The file of a program: found, checked and opened before anything changes.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::elf::{self, Elf, HEADER_BYTES, NotElf};
use crate::sys::execution::{self, Refused};

/// How many scripts can be the interpreter of another, as for Linux.
const MOST_SCRIPTS: usize = 5;
/// How much of a script's first line counts, as for Linux.
const SCRIPT_LINE: usize = 256;
/// Before the number of a descriptor, in what the kernel calls a program that is given by it.
pub(crate) const DESCRIPTORS: &[u8] = b"/dev/fd/";

/// A program that can be loaded.
#[derive(Debug)]
pub struct Image {
    /// The program, which need not be the file that was named: that may be a script.
    pub file: File,
    /// The path of `file`, without links. It need not lead there any more.
    pub path: PathBuf,
    /// The path that was named (`AT_EXECFN`).
    pub named: CString,
    /// The arguments; with those that a script adds.
    pub arguments: Vec<CString>,
    /// What `file` holds.
    pub elf: Elf,
    /// The dynamic linker.
    pub linker: Option<(File, Elf)>,
    /// What the program would have outside, and does without here.
    pub lacking: Option<&'static str>,
}

/// Where a program is to be found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'p> {
    /// A directory, or the file if the path is empty.
    pub directory: RawFd,
    /// The path from there on.
    pub path: &'p CStr,
    /// What the program knows as its path.
    pub named: &'p CStr,
    /// Whether a link at the end of the path is followed.
    pub follows: bool,
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

/// Opens the file at `place` for execution.
fn open(place: &Place<'_>) -> Result<File, Unloadable> {
    let opened = if place.path.is_empty() {
        if place.directory == libc::AT_FDCWD {
            // The present directory.
            return Err(Unloadable::new(libc::EACCES));
        }
        if !execution::is_open(place.directory) {
            return Err(Unloadable::new(libc::EBADF));
        }
        // Not a copy of the descriptor: that may not be open for reading.
        let path = CString::new(execution::path_of(place.directory))?;
        execution::open(libc::AT_FDCWD, &path, 0)
    } else {
        execution::open(place.directory, place.path, if place.follows { 0 } else { libc::O_NOFOLLOW })
    };
    let file = opened.map_err(|error| {
        // Linux runs programs that only may be executed, not read.
        let lacking = (error.raw_os_error() == Some(libc::EACCES)).then_some("running a program that cannot be read");
        Unloadable { lacking, ..Unloadable::from(error) }
    })?;
    if !file.metadata()?.is_file() {
        return Err(Unloadable::new(libc::EACCES));
    }
    execution::check(&file).map_err(|refused| match refused {
        Refused::Rules(error) => error.into(),
        Refused::Unknown => Unloadable {
            errno: libc::EACCES,
            lacking: Some("executing programs under rules of Landlock before Linux 6.14"),
        },
    })?;
    Ok(file)
}

/// Opens the file at `path` for execution.
fn open_path(path: &Path) -> Result<File, Unloadable> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    open(&Place { directory: libc::AT_FDCWD, path: &path, named: &path, follows: true })
}

/// Whether a program gets the rights that its file gives outside. Returns what it does without.
fn check_rights(file: &File) -> Result<Option<&'static str>, Unloadable> {
    let metadata = file.metadata()?;
    if execution::gives_no_rights(file) {
        return Ok(None);
    }
    let (user, group) = execution::user_and_group();
    let sets_user = metadata.mode() & libc::S_ISUID != 0 && metadata.uid() != user;
    let sets_group =
        metadata.mode() & libc::S_ISGID != 0 && metadata.mode() & libc::S_IXGRP != 0 && metadata.gid() != group;
    if sets_user || sets_group {
        let lacking = Some("running a program with the rights of its file's owner or group");
        return Err(Unloadable { errno: libc::EPERM, lacking });
    }
    // Root has them anyway.
    let lacks = user != 0 && execution::has_capabilities(file);
    Ok(lacks.then_some("the capabilities of the program's file"))
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

/// The dynamic linker that `elf`, the content of `file`, names.
fn open_linker(file: &File, elf: &Elf) -> Result<Option<File>, Unloadable> {
    let Some((offset, len)) = elf.linker else { return Ok(None) };
    let mut name = read(file, offset, len)?;
    if name.pop() != Some(0) || name.contains(&0) {
        return Err(Unloadable::new(libc::ENOEXEC));
    }
    open_path(Path::new(OsStr::from_bytes(&name))).map(Some)
}

fn read_linker(file: File) -> Result<(File, Elf), Unloadable> {
    let head = read(&file, 0, HEADER_BYTES)?;
    match read_elf(&file, &head) {
        Ok(elf) => Ok((file, elf)),
        Err(error) if error.errno == libc::ENOEXEC => Err(Unloadable { errno: libc::ELIBBAD, ..error }),
        Err(error) => Err(error),
    }
}

impl Image {
    /// The program at `path`, or the interpreter of the script there.
    ///
    /// # Errors
    /// The kernel would not execute it, or the machine cannot run it.
    pub fn open(path: &CStr, arguments: &[CString]) -> Result<Image, Unloadable> {
        Image::open_at(&Place { directory: libc::AT_FDCWD, path, named: path, follows: true }, arguments)
    }

    /// Like [`Image::open`].
    pub(crate) fn open_at(place: &Place<'_>, arguments: &[CString]) -> Result<Image, Unloadable> {
        let mut arguments = arguments.to_vec();
        let mut file = open(place)?;
        // What the kernel calls the file that it executes.
        let mut name = place.named.to_owned();
        for _ in 0..=MOST_SCRIPTS {
            let head = read(&file, 0, SCRIPT_LINE.max(HEADER_BYTES))?;
            let Some((interpreter, argument)) = script(&head) else {
                let lacking = check_rights(&file)?;
                let elf = read_elf(&file, &head)?;
                let linker = open_linker(&file, &elf)?;
                return Image::of_files((file, elf), linker, place.named, arguments, lacking);
            };
            if place.directory != libc::AT_FDCWD && execution::is_closed_by_exec(place.directory) {
                // The interpreter would not find the script.
                return Err(Unloadable::new(libc::ENOENT));
            }
            let interpreter = CString::new(interpreter)?;
            let mut added = vec![interpreter.clone()];
            added.extend(argument.map(CString::new).transpose()?);
            added.push(name);
            arguments = added.into_iter().chain(arguments.into_iter().skip(1)).collect();
            file = open_path(Path::new(OsStr::from_bytes(interpreter.to_bytes())))?;
            name = interpreter;
        }
        Err(Unloadable::new(libc::ELOOP))
    }

    /// The program in `file`, which an [`Image`] has had with these arguments.
    pub(crate) fn of_open(
        file: File,
        linker: Option<File>,
        named: &CStr,
        arguments: Vec<CString>,
    ) -> Result<Image, Unloadable> {
        let head = read(&file, 0, HEADER_BYTES)?;
        let elf = read_elf(&file, &head)?;
        Image::of_files((file, elf), linker, named, arguments, None)
    }

    fn of_files(
        (file, elf): (File, Elf),
        linker: Option<File>,
        named: &CStr,
        arguments: Vec<CString>,
        lacking: Option<&'static str>,
    ) -> Result<Image, Unloadable> {
        let linker = linker.map(read_linker).transpose()?;
        let path = std::fs::read_link(execution::path_of(file.as_raw_fd()));
        let path = path.unwrap_or_else(|_| PathBuf::from(OsStr::from_bytes(named.to_bytes())));
        Ok(Image { file, path, named: named.to_owned(), arguments, elf, linker, lacking })
    }

    /// The name of the program as the kernel has it (`comm`).
    pub(crate) fn short_name(&self) -> Vec<u8> {
        const MOST: usize = 15;
        let last = |path: &[u8]| path.rsplit(|&byte| byte == b'/').next().unwrap_or_default().to_vec();
        let named = self.named.to_bytes();
        // A file that was given by its descriptor has the name of its place.
        let name = match named.strip_prefix(DESCRIPTORS) {
            Some(number) if number.iter().all(u8::is_ascii_digit) => {
                let path = self.path.as_os_str().as_bytes();
                last(path.strip_suffix(b" (deleted)").unwrap_or(path))
            }
            _ => last(named),
        };
        name.into_iter().take(MOST).collect()
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
        assert_eq!(image.path, std::fs::canonicalize("/bin/sh").expect("sh is there"));
        assert_eq!(image.short_name(), b"script");
        assert_eq!(image.arguments, [c"/bin/sh".to_owned(), c"-e".into(), name.clone(), c"y".into()]);
        assert_eq!(Image::open(c"/", &[]).expect_err("a directory").errno, libc::EACCES);
        assert_eq!(Image::open(c"/nowhere/at/all", &[]).expect_err("missing").errno, libc::ENOENT);
    }
}
