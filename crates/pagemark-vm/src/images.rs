//! New images of disks, written by a restore beside the images of the checkpointed machine.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pagemark::store::Piece;
use pagemark::{ByteCount, ContentId, Kind, PAGE_SIZE, PageNumber, PageTree, Store};
use serde_json::{Value, json};

use crate::command::{Command, text};
use crate::command_line::MONITOR_ARGUMENTS;
use crate::disks::Connections;
use crate::drive::{DiskImage, ImageFormat, names_file, with_other_file, with_qcow2};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::machine::{Machine, Startup};
use crate::nbd::Client;
use crate::started::{Started, Streams};

/// How long QEMU may take to make an empty image.
const CREATE_POLL: Duration = Duration::from_millis(1);

/// Names in the QEMU that writes an image.
const FILE_NODE: &str = "file";
const IMAGE_NODE: &str = "image";
const JOB: &str = "create";

/// The arguments of a QEMU that has no machine, and only writes an image.
const WRITER: [&str; 6] = ["-machine", "none", "-nodefaults", "-display", "none", "-S"];

/// A disk of a checkpoint.
pub(crate) struct SavedDisk<'a> {
    pub(crate) image: &'a DiskImage,
    pub(crate) root: ContentId,
    pub(crate) pages: u64,
    pub(crate) bytes: ByteCount,
}

/// What is needed to write a new image.
pub(crate) struct WriteImage<'a> {
    pub(crate) startup: &'a Startup,
    pub(crate) disk: &'a SavedDisk<'a>,
    pub(crate) store: &'a (dyn Store + Sync),
}

/// An image that was written. Dropped, it is removed.
#[derive(Debug)]
pub(crate) struct NewImage {
    /// The name for the command line.
    name: String,
    /// None once it is kept.
    path: Option<PathBuf>,
}

impl NewImage {
    /// Lets the arguments of QEMU name this image in place of `old`.
    pub(crate) fn replace_in(&self, arguments: &mut [String], old: &DiskImage) -> Result<()> {
        let mut is_named = false;
        for argument in arguments {
            if let Some(replaced) = with_other_file(argument, &old.file, &self.name) {
                *argument = replaced;
                is_named = true;
            }
        }
        match is_named {
            true => Ok(()),
            false => Err(Error::damaged(format!("no argument of QEMU names the image {}", old.file))),
        }
    }

    /// As [`NewImage::replace_in`], where this image is a qcow2 image over one of any format.
    pub(crate) fn replace_in_as_overlay(&self, arguments: &mut [String], old: &DiskImage) -> Result<()> {
        self.replace_in(arguments, old)?;
        if old.format == ImageFormat::Qcow2 {
            return Ok(());
        }
        for argument in arguments.iter_mut().filter(|argument| names_file(argument, &self.name)) {
            *argument = with_qcow2(argument).ok_or_else(|| {
                let reason = "is of a node without a format of its own, so that it cannot be an overlay";
                let error = Error::about(ErrorKind::Disk, Object::Image(self.name.clone().into()), reason);
                error.help("name the image by -drive, or by one -blockdev with its format")
            })?;
        }
        Ok(())
    }

    /// The path of the image, which stays.
    pub(crate) fn keep(mut self) -> PathBuf {
        self.path.take().unwrap_or_default()
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

impl WriteImage<'_> {
    /// Writes a new image for the checkpoint with this name.
    pub(crate) fn write(&self, checkpoint: &str) -> Result<NewImage> {
        let old = &self.disk.image.file;
        let (name, file) = create_beside(&self.startup.directory, old, checkpoint)?;
        let path = self.startup.directory.join(&name);
        let image = NewImage { name, path: Some(path.clone()) };
        self.copy_owner(&file).map_err(|error| Error::of(ErrorKind::Disk, "write", Object::Image(path), error))?;
        self.fill(&image, &file)?;
        Ok(image)
    }

    /// Writes the content of the disk to `file`, which is that of the new image.
    pub(crate) fn fill(&self, image: &NewImage, file: &File) -> Result<()> {
        let path = image.path.as_deref().unwrap_or(Path::new(""));
        let failed = |error| Error::of(ErrorKind::Disk, "write", Object::Image(path.to_owned()), error);
        let tree = PageTree::load(self.disk.root, self.store)?;
        let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) = tree.iter().unzip();
        if targets.last().is_some_and(|last| last.get() >= self.disk.bytes.pages_rounded_up()) {
            return Err(Error::damaged(format!("the disk {} has pages behind its end", self.disk.image.label)));
        }
        let copy = |write: &(dyn Fn(u64, &[u8]) -> io::Result<()> + Sync)| {
            let write = |page: PageNumber, content: &[u8]| {
                let offset = page.address().get();
                // The disk need not end with a page.
                let left = self.disk.bytes.saturating_sub(ByteCount::new(offset)).to_usize();
                write(offset, &content[..content.len().min(left)])
            };
            copy_pages(self.store, &ids, &targets, &write)?.map_err(failed)
        };
        match self.disk.image.format {
            ImageFormat::Raw => {
                file.set_len(self.disk.bytes.get()).map_err(failed)?;
                copy(&|offset, content| file.write_all_at(content, offset))?;
                file.sync_all().map_err(failed)?;
            }
            ImageFormat::Qcow2 => {
                let writer = Mutex::new(self.start_writer(path)?);
                let lock = || writer.lock().unwrap_or_else(PoisonError::into_inner);
                copy(&|offset, content| lock().client.write(offset, content))?;
                writer.into_inner().unwrap_or_else(PoisonError::into_inner).finish()?.map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Makes an empty image over `base`, for the machine with this name.
    pub(crate) fn write_overlay(&self, base: &NewImage, machine: &str) -> Result<NewImage> {
        let (name, file) = create_beside(&self.startup.directory, &self.disk.image.file, machine)?;
        let path = self.startup.directory.join(&name);
        let overlay = NewImage { name, path: Some(path.clone()) };
        self.copy_owner(&file)
            .map_err(|error| Error::of(ErrorKind::Disk, "write", Object::Image(path.clone()), error))?;
        let base_path = self.startup.directory.join(&base.name);
        let format = match self.disk.image.format {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        };
        let (_started, mut machine) = self.create_qcow2(&path, Some((&base_path, format)))?;
        machine.execute(&Command::new("blockdev-del", json!({"node-name": FILE_NODE})))?;
        Ok(overlay)
    }

    /// Gives the new image the owner and the mode of the old one, if that is still there.
    fn copy_owner(&self, file: &File) -> io::Result<()> {
        match fs::metadata(self.startup.directory.join(&self.disk.image.file)) {
            Ok(old) if old.is_file() => {
                let new = file.metadata()?;
                if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
                    fchown(file, Some(old.uid()), Some(old.gid()))?;
                }
                file.set_permissions(old.permissions())
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Starts a QEMU that makes an empty image of the file `path`, over another of this format if
    /// there is one.
    fn create_qcow2(&self, path: &Path, base: Option<(&Path, &str)>) -> Result<(Started, Machine)> {
        let arguments = WRITER.iter().chain(MONITOR_ARGUMENTS.iter().flatten());
        let arguments: Vec<String> = arguments.map(|&argument| argument.to_owned()).collect();
        let mut started = Started::start(self.startup, &arguments, Streams::Detached)?;
        let mut machine = started.machine(self.startup)?;
        let mut run = |name, arguments| machine.execute(&Command::new(name, arguments));
        let text = |path: &Path| match path.to_str() {
            Some(path) => Ok(path.to_owned()),
            None => Err(Error::about(ErrorKind::Disk, Object::Image(path.to_owned()), "has a name that is no text")),
        };
        run("blockdev-add", json!({"driver": "file", "node-name": FILE_NODE, "filename": text(path)?}))?;
        let mut options = json!({"driver": "qcow2", "file": FILE_NODE, "size": self.disk.bytes});
        if let Some((base, format)) = base {
            options["backing-file"] = text(base)?.into();
            options["backing-fmt"] = format.into();
        }
        run("blockdev-create", json!({"job-id": JOB, "options": options}))?;
        wait_for_job(&mut machine)?;
        Ok((started, machine))
    }

    /// Starts a QEMU that makes an empty image of the file `path`, and writes to it.
    fn start_writer(&self, path: &Path) -> Result<ImageWriter> {
        let (started, mut machine) = self.create_qcow2(path, None)?;
        let mut run = |name, arguments| machine.execute(&Command::new(name, arguments));
        run("blockdev-add", json!({"driver": "qcow2", "node-name": IMAGE_NODE, "file": FILE_NODE}))?;
        let connections = Connections::new(1)?;
        connections.give(&mut machine)?;
        machine.execute(&connections.start_server())?;
        let export = json!({
            "type": "nbd", "id": IMAGE_NODE, "node-name": IMAGE_NODE, "name": IMAGE_NODE, "writable": true,
        });
        machine.execute(&Command::new("block-export-add", export))?;
        let failed = |error| Error::of(ErrorKind::Disk, "write", Object::Image(path.into()), error);
        let stream = connections.into_streams().pop().ok_or_else(|| Error::damaged("no connection"))?;
        let client = Client::open(stream, IMAGE_NODE, None).map_err(failed)?;
        Ok(ImageWriter { client, machine, _started: started })
    }
}

/// A QEMU that writes an image. Dropped, it is killed.
struct ImageWriter {
    client: Client,
    machine: Machine,
    _started: Started,
}

impl ImageWriter {
    /// Has QEMU complete the image.
    fn finish(mut self) -> Result<io::Result<()>> {
        let finished = self.client.finish();
        if finished.is_ok() {
            // These write what QEMU holds of the format's tables.
            self.machine.execute(&Command::new("nbd-server-stop", json!({})))?;
            self.machine.execute(&Command::new("blockdev-del", json!({"node-name": IMAGE_NODE})))?;
            self.machine.execute(&Command::new("blockdev-del", json!({"node-name": FILE_NODE})))?;
        }
        Ok(finished)
    }
}

/// Waits until QEMU has made an empty image.
fn wait_for_job(machine: &mut Machine) -> Result<()> {
    loop {
        let jobs = machine.monitor.execute("query-jobs", json!({}))?;
        let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| text(job, "id") == JOB));
        match job {
            Some(job) if text(job, "status") != "concluded" => std::thread::sleep(CREATE_POLL),
            Some(job) => {
                if let Some(reason) = job.get("error").and_then(Value::as_str) {
                    let error = reason.to_owned();
                    return Err(Error::of(ErrorKind::Disk, "make an empty image", Object::None, error));
                }
                return machine.execute(&Command::new("job-dismiss", json!({"id": JOB})));
            }
            None => return Err(Error::about(ErrorKind::Monitor, Object::Process(machine.pid), "lost a job")),
        }
    }
}

/// Makes a file beside the image `old` of a QEMU in `directory`, whose name says which checkpoint
/// it is of. Returns the name as the command line has it.
fn create_beside(directory: &Path, old: &str, checkpoint: &str) -> Result<(String, File)> {
    create_file(directory, &format!("{}.{checkpoint}", without_checkpoint(old)))
}

/// Makes an image in a directory other than that of the original, for the owner alone. `name` is
/// that of its file; another image that has it gets a number.
pub(crate) fn create_in(directory: &Path, name: &str) -> Result<(NewImage, File)> {
    let (name, file) = create_file(directory, name)?;
    let path = directory.join(name);
    let name = path
        .to_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::about(ErrorKind::Disk, Object::Image(path.clone()), "has a name that is no text"))?;
    Ok((NewImage { name, path: Some(path) }, file))
}

/// Makes a file with this name, or with a number behind it. Returns the name.
fn create_file(directory: &Path, wanted: &str) -> Result<(String, File)> {
    for number in 1u32.. {
        let name = match number {
            1 => wanted.to_owned(),
            _ => format!("{wanted}-{number}"),
        };
        let path = directory.join(&name);
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((name, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::of(ErrorKind::Disk, "make", Object::Image(path), error)),
        }
    }
    Err(Error::damaged("too many images"))
}

/// The name of an image without what [`create_beside`] has added.
fn without_checkpoint(name: &str) -> &str {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_checkpoint = |added: &str| {
        let sequence = added.rsplit_once('@').filter(|(job, _)| !job.is_empty()).map(|(_, sequence)| sequence);
        sequence.is_some_and(|sequence| match sequence.split_once('-') {
            Some((sequence, number)) => is_number(sequence) && is_number(number),
            None => is_number(sequence),
        })
    };
    match name.rsplit_once('.') {
        Some((base, added)) if !added.contains('/') && !base.is_empty() && is_checkpoint(added) => base,
        _ => name,
    }
}

/// Copies pages from a store to their targets, neighbours together. The inner error is that of
/// `write`.
pub(crate) fn copy_pages(
    store: &(dyn Store + Sync),
    ids: &[ContentId],
    targets: &[PageNumber],
    write: &(dyn Fn(PageNumber, &[u8]) -> io::Result<()> + Sync),
) -> Result<io::Result<()>> {
    let failure = Mutex::new(Ok(()));
    let copy = |pieces: &[Piece], content: &[u8]| -> io::Result<()> {
        let follows =
            |a: &Piece, b: &Piece| targets[a.position] + 1 == targets[b.position] && a.bytes.end == b.bytes.start;
        for run in pieces.chunk_by(follows) {
            let bytes = &content[run[0].bytes.start..run[run.len() - 1].bytes.end];
            if bytes.len() != run.len() * PAGE_SIZE {
                return Err(io::ErrorKind::InvalidData.into());
            }
            write(targets[run[0].position], bytes)?;
        }
        Ok(())
    };
    store.get_many(Kind::Page, ids, &|pieces, content| match copy(pieces, content) {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            if failure.is_ok() {
                *failure = Err(error);
            }
            ControlFlow::Break(())
        }
    })?;
    Ok(failure.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_after_its_checkpoint() {
        let directory = tempfile::tempdir().unwrap();
        let create = |old: &str| create_beside(directory.path(), old, "vm@12").unwrap().0;
        assert_eq!(create("disk.qcow2"), "disk.qcow2.vm@12");
        assert_eq!(create("disk.qcow2"), "disk.qcow2.vm@12-2");
        assert_eq!(create("disk.qcow2.vm@12-2"), "disk.qcow2.vm@12-3");
        assert_eq!(create("disk.qcow2.my.vm@9"), "disk.qcow2.my.vm@12");
        for kept in ["a@1", "a.b@", "a.@1", "a.b@c", "x.y@1/disk", "a.b@1-"] {
            assert_eq!(without_checkpoint(kept), kept);
        }
        assert!(create_beside(Path::new("/nowhere"), "disk", "vm@1").is_err());
    }
}
