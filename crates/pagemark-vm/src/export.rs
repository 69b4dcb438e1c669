//! A checkpoint for QEMU alone: a stream of its migration, images of the disks, and a script that
//! starts QEMU with them.

pub(crate) mod core_file;
pub(crate) mod migration_stream;

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{File, Permissions};
use std::io::{BufWriter, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use pagemark::repository::Checkpoint;

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command_line::{own_arguments, with_machine_type, without_user};
use crate::qemu::drive::names_file;
use crate::qemu::machine::Startup;
use crate::qemu::owner::Owner;
use crate::qemu::user_files::UserDirectory;
use crate::restore::Restore;
use crate::restore::images::{NewImage, create_in};

/// Files in the directory of an export.
const STREAM: &str = "migration";
const SCRIPT: &str = "run.sh";

/// The descriptor by which the script gives QEMU the stream.
const STREAM_DESCRIPTOR: i32 = 9;

/// What [`export_qemu`] has written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QemuExport {
    /// A shell script that starts QEMU.
    pub script: PathBuf,
    /// The stream of the migration: memory and devices.
    pub stream: PathBuf,
    /// The disks by name, and the image of each.
    pub disks: Vec<(String, PathBuf)>,
}

/// Writes a virtual machine into the empty directory `directory`, in a form that needs no Pagemark:
/// the stream of a migration, images of the disks, and a shell script `run.sh` that starts QEMU
/// with the recorded command line, these images, and `-incoming` with the stream. The machine can
/// be started anew each time from the stream, but its images are those that the last run has left.
///
/// If root exports the machine of another user, that user can enter the directory, owns the stream
/// and the images, and can run the script, which root must not.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the checkpoint does not name the type of the machine, or a drive
/// had a medium that the command line does not name;
/// [`ErrorKind::Damaged`], [`ErrorKind::Disk`], [`ErrorKind::Store`], [`ErrorKind::System`].
/// What was written is removed then.
pub fn export_qemu(checkpoint: &Checkpoint, directory: &Path) -> Result<QemuExport> {
    let here = UserDirectory::open(None, directory);
    export_into(checkpoint, here.map_err(Error::system(format!("use the directory {}", directory.display())))?)
}

/// Like [`export_qemu`], into a directory that is open: what its path leads to meanwhile does not
/// matter.
///
/// # Errors
/// Those of [`export_qemu`].
pub fn export_qemu_to(checkpoint: &Checkpoint, directory: BorrowedFd<'_>) -> Result<QemuExport> {
    let directory = directory.try_clone_to_owned().map_err(Error::system("use the directory of the export"))?;
    export_into(checkpoint, UserDirectory::held(directory))
}

fn export_into(checkpoint: &Checkpoint, here: UserDirectory) -> Result<QemuExport> {
    // For the script. Files are made by the descriptor.
    let directory = here.path().map_err(Error::system("find the directory of the export"))?;
    let restore = Restore::new(checkpoint);
    let startup = restore.startup()?;
    let kind = startup.kind.as_ref().ok_or_else(|| {
        let reason = "the checkpoint does not name the type of its machine";
        let error = Error::about(ErrorKind::Unsupported, Object::None, reason);
        error.help("it was made by an earlier version of Pagemark: restore it, and take another one")
    })?;
    let owner = startup.owner_for_root()?;
    check_media(&startup)?;
    let mut arguments = with_machine_type(own_arguments(&startup.arguments), Some(&kind.machine));
    if !startup.is_running {
        arguments.push("-S".to_owned());
    }
    arguments.extend(["-incoming".to_owned(), format!("fd:{STREAM_DESCRIPTOR}")]);

    // So that the owner reaches what is its own.
    here.check_is_own()
        .and_then(|()| owner.map_or(Ok(()), |_| here.let_enter()))
        .map_err(Error::system(format!("use the directory {}", directory.display())))?;
    let disks = restore.disk_spaces(&startup)?;
    // Removed if the export fails.
    let mut images: Vec<NewImage> = Vec::new();
    for disk in &disks {
        let name = Path::new(&disk.image.file).file_name().map_or_else(|| "disk".into(), |name| name.to_string_lossy());
        let (image, file) = create_in(&here, &directory, &name, owner)?;
        restore.image_writer(&startup, disk).fill(&image, &file)?;
        image.replace_in(&mut arguments, disk.image)?;
        images.push(image);
    }
    let (stream, script) = (directory.join(STREAM), directory.join(SCRIPT));
    if owner.is_some() {
        arguments = without_user(&arguments);
    }
    let text = script_text(&restore.checkpoint_name(), &startup, owner, &arguments, &stream)?;
    let mut out = BufWriter::new(create(&here, STREAM, 0o600, owner)?);
    let written = migration_stream::write(&restore, &kind.machine, &mut out)
        .and_then(|()| out.flush().map_err(Error::system("write the migration stream")))
        .and_then(|()| write_script(&here, &text, owner));
    if let Err(error) = written {
        // A part of a stream is of no use.
        here.made(STREAM.into()).remove();
        return Err(error);
    }
    let disks = disks.iter().zip(images).map(|(disk, image)| (disk.image.label.clone(), image.keep()));
    Ok(QemuExport { script, stream, disks: disks.collect() })
}

/// The script starts QEMU with the media that the command line names.
fn check_media(startup: &Startup) -> Result<()> {
    let is_named = |file: &str| startup.arguments.iter().any(|argument| names_file(argument, file));
    let images = startup.media.iter().filter_map(|medium| Some((medium, medium.image.as_ref()?)));
    match images.into_iter().find(|(_, image)| !is_named(&image.file)) {
        Some((medium, image)) => {
            let reason = format!("has the medium {}, which the command line does not name", image.file);
            Err(Error::about(ErrorKind::Unsupported, Object::Device(medium.device.clone()), reason))
        }
        None => Ok(()),
    }
}

/// Makes a file, which is the owner's if there is one.
fn create(here: &UserDirectory, name: &str, mode: u32, owner: Option<&Owner>) -> Result<File> {
    let created = here.create(OsStr::new(name)).and_then(|file| {
        owner.map_or(Ok(()), |owner| fchown(&file, Some(owner.user), Some(owner.group)))?;
        file.set_permissions(Permissions::from_mode(mode))?;
        Ok(file)
    });
    created.map_err(Error::system(format!("make {name}")))
}

fn write_script(here: &UserDirectory, text: &str, owner: Option<&Owner>) -> Result<()> {
    let mode = if owner.is_some() { 0o755 } else { 0o700 };
    create(here, SCRIPT, mode, None)?.write_all(text.as_bytes()).map_err(Error::system("write the script"))
}

/// The script. Its words are quoted for the shell.
fn script_text(
    name: &str,
    startup: &Startup,
    owner: Option<&Owner>,
    arguments: &[String],
    stream: &Path,
) -> Result<String> {
    let word = |path: &Path| match path.to_str() {
        Some(text) => Ok(quoted(text)),
        None => Err(Error::damaged(format!("the name {} is no text", path.display()))),
    };
    let mut text = format!("#!/bin/sh\n# {name}, by QEMU {} without Pagemark.\n", startup.version);
    let mut line = |line: String| writeln!(text, "{line}").map_err(Error::damaged);
    if let Some(Owner { user, group, groups, .. }) = owner {
        let groups = match &groups[..] {
            [] => "--clear-groups".to_owned(),
            groups => format!("--groups={}", groups.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
        };
        let how = format!("setpriv --reuid={user} --regid={group} {groups} setsid sh $0");
        let words = format!("this machine is that of the user {user}, who must not get root's rights: {how}");
        line(format!("[ \"$(id -u)\" != 0 ] || {{ echo \"{words}\" >&2; exit 1; }}"))?;
    }
    line(format!("cd {} || exit 1", word(&startup.directory)?))?;
    let program = word(&startup.program)?;
    let arguments: Vec<String> = arguments.iter().map(|argument| quoted(argument)).collect();
    line(format!("exec {program} {} \"$@\" {STREAM_DESCRIPTOR}<{}", arguments.join(" "), word(stream)?))?;
    Ok(text)
}

/// A word for the shell.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn plain_words_stay_as_they_are() {
        assert_eq!(quoted("file=/a/b.raw,format=raw"), "file=/a/b.raw,format=raw");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn the_shell_reads_what_was_quoted(words in prop::collection::vec("[ -~\n\té]{0,20}", 0..8)) {
            let line: Vec<String> = words.iter().map(|word| quoted(word)).collect();
            let script = format!("for word in {}; do printf '%s\\0' \"$word\"; done", line.join(" "));
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            let read: Vec<String> =
                String::from_utf8(output.stdout).unwrap().split_terminator('\0').map(str::to_owned).collect();
            prop_assert_eq!(read, words);
        }
    }
}
