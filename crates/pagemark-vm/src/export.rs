//! A checkpoint for QEMU alone: a stream of its migration, images of the disks, and a script that
//! starts QEMU with them.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pagemark::repository::Checkpoint;

use crate::command_line::{own_arguments, with_machine_type};
use crate::drive::names_file;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::images::{NewImage, create_in};
use crate::machine::Startup;
use crate::migration_stream;
use crate::restore::Restore;

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
/// # Errors
/// [`ErrorKind::Unsupported`] if the checkpoint does not name the type of the machine, or a drive
/// had a medium that the command line does not name;
/// [`ErrorKind::Damaged`], [`ErrorKind::Disk`], [`ErrorKind::Store`], [`ErrorKind::System`].
/// What was written is removed then.
pub fn export_qemu(checkpoint: &Checkpoint, directory: &Path) -> Result<QemuExport> {
    let directory = directory.canonicalize().map_err(Error::system("find the directory of the export"))?;
    let restore = Restore::new(checkpoint);
    let startup = restore.startup()?;
    let kind = startup.kind.as_ref().ok_or_else(|| {
        let reason = "the checkpoint does not name the type of its machine";
        let error = Error::about(ErrorKind::Unsupported, Object::None, reason);
        error.help("it was made by an earlier version of Pagemark: restore it, and take another one")
    })?;
    check_media(&startup)?;
    let mut arguments = with_machine_type(own_arguments(&startup.arguments), Some(&kind.machine));
    if !startup.is_running {
        arguments.push("-S".to_owned());
    }
    arguments.extend(["-incoming".to_owned(), format!("fd:{STREAM_DESCRIPTOR}")]);

    let disks = restore.disk_spaces(&startup)?;
    // Removed if the export fails.
    let mut images: Vec<NewImage> = Vec::new();
    for disk in &disks {
        let name = Path::new(&disk.image.file).file_name().map_or_else(|| "disk".into(), |name| name.to_string_lossy());
        let (image, file) = create_in(&directory, &name)?;
        restore.image_writer(&startup, disk).fill(&image, &file)?;
        image.replace_in(&mut arguments, disk.image)?;
        images.push(image);
    }
    let (stream, script) = (directory.join(STREAM), directory.join(SCRIPT));
    let text = script_text(&restore.checkpoint_name(), &startup, &arguments, &stream)?;
    let mut out = BufWriter::new(create(&stream, 0o600)?);
    let written = migration_stream::write(&restore, &kind.machine, &mut out)
        .and_then(|()| out.flush().map_err(Error::system("write the migration stream")))
        .and_then(|()| write_script(&script, &text));
    if let Err(error) = written {
        // A part of a stream is of no use.
        let _ = fs::remove_file(&stream);
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

fn create(path: &Path, mode: u32) -> Result<File> {
    let created = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    created.map_err(Error::system(format!("make {}", path.display())))
}

fn write_script(path: &Path, text: &str) -> Result<()> {
    create(path, 0o700)?.write_all(text.as_bytes()).map_err(Error::system("write the script"))
}

/// The script. Its words are quoted for the shell.
fn script_text(name: &str, startup: &Startup, arguments: &[String], stream: &Path) -> Result<String> {
    let word = |path: &Path| match path.to_str() {
        Some(text) => Ok(quoted(text)),
        None => Err(Error::damaged(format!("the name {} is no text", path.display()))),
    };
    let mut text = format!("#!/bin/sh\n# {name}, by QEMU {} without Pagemark.\n", startup.version);
    let mut line = |line: String| writeln!(text, "{line}").map_err(Error::damaged);
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
