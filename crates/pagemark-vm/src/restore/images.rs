//! New images of disks, written by a restore beside the images of the checkpointed machine.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::SigSet;
use pagemark::store::Piece;
use pagemark::{ByteCount, ContentId, Kind, PAGE_SIZE, PageNumber, Store};
use serde_json::{Value, json};

use crate::checkpoint::disks::Connections;
use crate::checkpoint::given_files::FILE_SET;
use crate::checkpoint::nbd::Client;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command::{Command, text};
use crate::qemu::command_line::MONITOR_ARGUMENTS;
use crate::qemu::drive::{
    DEVICE_DRIVER, DiskImage, FILE_DRIVER, ImageFormat, is_raw_over, names_backing, names_file, node_of_file,
    remove_backing, with_driver, with_other_file, with_qcow2,
};
use crate::qemu::machine::{Machine, Startup};
use crate::qemu::new_qemu::{NewQemu, Streams};
use crate::qemu::owner::Owner;
use crate::qemu::user_files::{self, MadeFile, UserDirectory};
use crate::restore::tree_within;

/// How long QEMU may take to make an empty image.
const CREATE_POLL: Duration = Duration::from_millis(1);

/// Names in the QEMU that writes an image.
const FILE_NODE: &str = "file";
const IMAGE_NODE: &str = "image";
const JOB: &str = "create";

/// The arguments of a QEMU that has no machine, and only writes an image.
const WRITER: [&str; 6] = ["-machine", "none", "-nodefaults", "-display", "none", "-S"];

/// A disk of a checkpoint.
pub struct SavedDisk<'a> {
    pub image: &'a DiskImage,
    pub root: ContentId,
    pub(crate) pages: u64,
    pub(crate) bytes: ByteCount,
    /// Where the restore puts it, if not beside the image: a new file, or a block device.
    pub(crate) target: Option<PathBuf>,
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
    path: PathBuf,
    /// None once it is kept, and for a block device.
    made: Option<MadeFile>,
    is_device: bool,
}

impl NewImage {
    /// Lets the arguments of QEMU name this image in place of `old`, and none below it: it holds
    /// all of the disk, or its header says what is below.
    pub(crate) fn replace_in(&self, arguments: &mut [String], old: &DiskImage) -> Result<()> {
        let mut is_named = false;
        for argument in &mut *arguments {
            if let Some(replaced) = with_other_file(argument, &old.file, &self.name) {
                *argument = with_driver(&replaced, &self.name, self.driver());
                is_named = true;
            }
        }
        remove_backing(arguments, &self.name);
        match is_named {
            true => Ok(()),
            false => Err(Error::damaged(format!("no argument of QEMU names the image {}", old.file))),
        }
    }

    /// Like [`NewImage::replace_in`], where this image is a qcow2 image over one of any format.
    pub(crate) fn replace_in_as_overlay(&self, arguments: &mut [String], old: &DiskImage) -> Result<()> {
        self.replace_in(arguments, old)?;
        if old.format == ImageFormat::Qcow2 {
            return Ok(());
        }
        let refused = || {
            let reason = "is of a node that no raw node is over, so that it cannot be an overlay";
            let error = Error::about(ErrorKind::Disk, Object::Image(self.name.clone().into()), reason);
            error.help("name the image by -drive, or by -blockdev with the format raw")
        };
        let naming: Vec<usize> = (0..arguments.len()).filter(|at| names_file(&arguments[*at], &self.name)).collect();
        for at in naming {
            // The format may be that of another argument, whose node is over this one.
            let place = match node_of_file(&arguments[at]) {
                Some(node) => (0..arguments.len()).find(|at| is_raw_over(&arguments[*at], &node)),
                None => Some(at),
            };
            let argument = place.and_then(|place| arguments.get_mut(place)).ok_or_else(refused)?;
            *argument = with_qcow2(argument).ok_or_else(refused)?;
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// QEMU's driver for what it is.
    fn driver(&self) -> &'static str {
        if self.is_device { DEVICE_DRIVER } else { FILE_DRIVER }
    }

    /// The path of the image, which stays.
    pub(crate) fn keep(mut self) -> PathBuf {
        self.made = None;
        std::mem::take(&mut self.path)
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            made.remove();
        }
    }
}

impl WriteImage<'_> {
    /// Writes a new image for the checkpoint with this name.
    pub(crate) fn write(&self, checkpoint: &str) -> Result<NewImage> {
        let (image, file) = match &self.disk.target {
            Some(target) => self.create_at(target)?,
            None => self.create(&self.disk.image.file, checkpoint)?,
        };
        self.fill(&image, &file)?;
        Ok(image)
    }

    /// Checks that there is a place for a new image: beside a block device there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Disk`] names the disk and the device.
    pub(crate) fn check_place(&self) -> Result<()> {
        let DiskImage { label, file, is_device, .. } = self.disk.image;
        let path = self.startup.directory.join(file);
        // Earlier versions did not record it.
        let is_device = || *is_device || user_files::is_device(self.startup.owner_for_root().ok().flatten(), &path);
        if self.disk.target.is_some() || !is_device() {
            return Ok(());
        }
        let reason = format!("was the block device {}, which is not written to unasked", path.display());
        let error = Error::about(ErrorKind::Disk, Object::Disk(label.clone()), reason);
        Err(error.help(format!("--disk {label}=PATH names a new file, or a block device of the same length")))
    }

    /// Makes the file `target`, or opens the block device, with the rights of QEMU's user.
    fn create_at(&self, target: &Path) -> Result<(NewImage, File)> {
        let owner = self.startup.owner_for_root()?;
        let failed = |error| {
            Error::of(ErrorKind::Disk, "make", Object::Image(target.to_owned()), error).help(self.whose_rights())
        };
        let name = target.to_str().map(str::to_owned).ok_or_else(|| {
            Error::about(ErrorKind::Disk, Object::Image(target.to_owned()), "has a name that is no text")
        })?;
        if let Some(device) = user_files::open_device(owner, target).map_err(failed)? {
            self.check_length(target, &device)?;
            return Ok((NewImage { name, path: target.to_owned(), made: None, is_device: true }, device));
        }
        let (Some(directory), Some(file_name)) = (target.parent(), target.file_name()) else {
            return Err(Error::about(ErrorKind::Disk, Object::Image(target.to_owned()), "is no name of a file"));
        };
        let here = UserDirectory::open(owner, directory).map_err(failed)?;
        let file = here.create(file_name).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                let reason = "exists already, and a restore overwrites no file";
                Error::about(ErrorKind::Disk, Object::Image(target.to_owned()), reason)
            }
            _ => failed(error),
        })?;
        let old = self.startup.directory.join(&self.disk.image.file);
        let rights = here.take_over_rights(&file, &old);
        let image =
            NewImage { name, path: target.to_owned(), made: Some(here.made(file_name.into())), is_device: false };
        rights.map_err(failed)?;
        Ok((image, file))
    }

    /// Who must be able to write to an image.
    fn whose_rights(&self) -> String {
        match &self.startup.owner {
            Some(owner) => format!("the user {}, who ran QEMU, must be able to make or write it", owner.user),
            None => "the user who runs QEMU must be able to make or write it".to_owned(),
        }
    }

    /// Checks that a device has the length of a raw disk: the machine would find another one.
    fn check_length(&self, path: &Path, mut device: &File) -> Result<()> {
        let failed = |error| Error::of(ErrorKind::Disk, "find the length of", Object::Image(path.to_owned()), error);
        let bytes = device.seek(SeekFrom::End(0)).map_err(failed)?;
        if self.disk.image.format != ImageFormat::Raw || bytes == self.disk.bytes.get() {
            return Ok(());
        }
        let reason = format!("has {bytes} bytes, and the disk {} had {}", self.disk.image.label, self.disk.bytes.get());
        Err(Error::about(ErrorKind::Disk, Object::Image(path.to_owned()), reason))
    }

    /// Makes a file beside the image `beside`, with the rights of QEMU's user. `added` says what it
    /// is of.
    fn create(&self, beside: &str, added: &str) -> Result<(NewImage, File)> {
        let (directory, old) = (&self.startup.directory, &self.disk.image.file);
        let owner = self.startup.owner_for_root()?;
        let wanted = format!("{}.{added}", without_checkpoint(beside));
        let (place, name) = split_name(&wanted);
        let here = directory.join(place);
        let opened = UserDirectory::open(owner, &here);
        let opened = opened
            .map_err(|error| Error::of(ErrorKind::Disk, "make an image in", Object::Image(here.clone()), error))?;
        let (made, here, file) =
            create_file(opened, &here, name, |here, file| here.take_over_rights(file, &directory.join(old)))?;
        // As the command line has it.
        let name = format!("{place}{made}");
        let path = directory.join(&name);
        Ok((NewImage { name, path, made: Some(here.made(made.into())), is_device: false }, file))
    }

    /// Writes the content of the disk to `file`, which is that of the new image.
    pub(crate) fn fill(&self, image: &NewImage, file: &File) -> Result<()> {
        let path = image.path.as_path();
        let failed = |error| Error::of(ErrorKind::Disk, "write", Object::Image(path.to_owned()), error);
        let name = format!("the disk {}", self.disk.image.label);
        let tree = tree_within(self.disk.root, self.disk.bytes, &name, self.store)?;
        let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) = tree.iter().unzip();
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
                match image.is_device {
                    // What the disk does not hold must not be what the device held.
                    true => user_files::fill_with_zeros(file, self.disk.bytes).map_err(failed)?,
                    false => file.set_len(self.disk.bytes.get()).map_err(failed)?,
                }
                copy(&|offset, content| file.write_all_at(content, offset))?;
                file.sync_all().map_err(failed)?;
            }
            ImageFormat::Qcow2 => {
                let mut writer = self.start_writer(image, file)?;
                // What the image does not have would be read from another that the command line names below it.
                if names_backing(&self.startup.arguments) {
                    writer.client.clear().map_err(failed)?;
                }
                let writer = Mutex::new(writer);
                let lock = || writer.lock().unwrap_or_else(PoisonError::into_inner);
                copy(&|offset, content| lock().client.write(offset, content))?;
                writer.into_inner().unwrap_or_else(PoisonError::into_inner).finish()?.map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Makes an empty image over `base`, for the machine with this name.
    pub(crate) fn write_overlay(&self, base: &NewImage, machine: &str) -> Result<NewImage> {
        let beside = if self.disk.target.is_some() { &base.name } else { &self.disk.image.file };
        let (overlay, file) = self.create(beside, machine)?;
        let format = match self.disk.image.format {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        };
        let (_started, mut machine) = self.create_qcow2(&overlay, &file, Some((&base.path, format)))?;
        machine.execute(&Command::new("blockdev-del", json!({"node-name": FILE_NODE})))?;
        Ok(overlay)
    }

    /// Starts a QEMU that makes an empty image of the file, over another of this format if there is
    /// one.
    fn create_qcow2(&self, image: &NewImage, file: &File, base: Option<(&Path, &str)>) -> Result<(NewQemu, Machine)> {
        let arguments = WRITER.iter().chain(MONITOR_ARGUMENTS.iter().flatten());
        let arguments: Vec<String> = arguments.map(|&argument| argument.to_owned()).collect();
        let mut started = NewQemu::start(self.startup, &arguments, Streams::Detached, SigSet::empty())?;
        let mut machine = started.machine()?;
        machine.monitor.execute_with("add-fd", json!({"fdset-id": FILE_SET}), Some(file.as_fd()))?;
        let mut run = |name, arguments| machine.execute(&Command::new(name, arguments));
        let text = |path: &Path| match path.to_str() {
            Some(path) => Ok(path.to_owned()),
            None => Err(Error::about(ErrorKind::Disk, Object::Image(path.to_owned()), "has a name that is no text")),
        };
        let path = format!("/dev/fdset/{FILE_SET}");
        run("blockdev-add", json!({"driver": image.driver(), "node-name": FILE_NODE, "filename": path}))?;
        let mut options = json!({"driver": "qcow2", "file": FILE_NODE, "size": self.disk.bytes});
        if let Some((base, format)) = base {
            options["backing-file"] = text(base)?.into();
            options["backing-fmt"] = format.into();
        }
        run("blockdev-create", json!({"job-id": JOB, "options": options}))?;
        wait_for_job(&mut machine)?;
        Ok((started, machine))
    }

    /// Starts a QEMU that makes an empty image of the file, which is that of `image`, and writes to
    /// it.
    fn start_writer(&self, image: &NewImage, file: &File) -> Result<ImageWriter> {
        let (started, mut machine) = self.create_qcow2(image, file, None)?;
        let mut run = |name, arguments| machine.execute(&Command::new(name, arguments));
        run("blockdev-add", json!({"driver": "qcow2", "node-name": IMAGE_NODE, "file": FILE_NODE}))?;
        let connections = Connections::new(1)?;
        connections.give(&mut machine)?;
        machine.execute(&connections.start_server())?;
        let export = json!({
            "type": "nbd", "id": IMAGE_NODE, "node-name": IMAGE_NODE, "name": IMAGE_NODE, "writable": true,
        });
        machine.execute(&Command::new("block-export-add", export))?;
        let failed = |error| Error::of(ErrorKind::Disk, "write", Object::Image(image.path.clone()), error);
        let stream = connections.into_streams().pop().ok_or_else(|| Error::damaged("no connection"))?;
        let client = Client::open(stream, IMAGE_NODE, None).map_err(failed)?;
        Ok(ImageWriter { client, machine, _started: started })
    }
}

/// A QEMU that writes an image. Dropped, it is killed.
struct ImageWriter {
    client: Client,
    machine: Machine,
    _started: NewQemu,
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

/// Makes an image in a directory of this process's user, for the owner of QEMU alone. `name` is
/// that of its file; another image that has it gets a number.
pub(crate) fn create_in(
    here: &UserDirectory,
    directory: &Path,
    name: &str,
    owner: Option<&Owner>,
) -> Result<(NewImage, File)> {
    let give = |_: &UserDirectory, file: &File| match owner {
        Some(owner) => fchown(file, Some(owner.user), Some(owner.group)),
        None => Ok(()),
    };
    let here = here.try_clone().map_err(Error::system("make an image"))?;
    let (made, here, file) = create_file(here, directory, name, give)?;
    let path = directory.join(&made);
    let name = path
        .to_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::about(ErrorKind::Disk, Object::Image(path.clone()), "has a name that is no text"))?;
    Ok((NewImage { name, path, made: Some(here.made(made.into())), is_device: false }, file))
}

/// The name of a file, behind that of its directory.
fn split_name(path: &str) -> (&str, &str) {
    path.split_at(path.rfind('/').map_or(0, |slash| slash + 1))
}

/// Makes a file with this name, or with a number behind it, in the opened `directory`, and has
/// `prepare` give it further rights. Returns the name and the directory.
fn create_file(
    here: UserDirectory,
    directory: &Path,
    wanted: &str,
    prepare: impl Fn(&UserDirectory, &File) -> io::Result<()>,
) -> Result<(String, UserDirectory, File)> {
    let failed = |name: &str, error| Error::of(ErrorKind::Disk, "make", Object::Image(directory.join(name)), error);
    for number in 1u32.. {
        let name = match number {
            1 => wanted.to_owned(),
            _ => format!("{wanted}-{number}"),
        };
        match here.create(OsStr::new(&name)) {
            Ok(file) => {
                if let Err(error) = prepare(&here, &file) {
                    let error = failed(&name, error);
                    here.made(name.into()).remove();
                    return Err(error);
                }
                return Ok((name, here, file));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(&name, error)),
        }
    }
    Err(Error::damaged("too many images"))
}

/// The name of an image without what [`WriteImage::write`] has added.
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
pub fn copy_pages(
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
        let create = |old: &str| {
            let wanted = format!("{}.vm@12", without_checkpoint(old));
            let here = UserDirectory::open(None, directory.path()).unwrap();
            create_file(here, directory.path(), &wanted, |_, _| Ok(())).unwrap().0
        };
        assert_eq!(create("disk.qcow2"), "disk.qcow2.vm@12");
        assert_eq!(create("disk.qcow2"), "disk.qcow2.vm@12-2");
        assert_eq!(create("disk.qcow2.vm@12-2"), "disk.qcow2.vm@12-3");
        assert_eq!(create("disk.qcow2.my.vm@9"), "disk.qcow2.my.vm@12");
        for kept in ["a@1", "a.b@", "a.@1", "a.b@c", "x.y@1/disk", "a.b@1-"] {
            assert_eq!(without_checkpoint(kept), kept);
        }
        assert_eq!(split_name("/a/b.raw"), ("/a/", "b.raw"));
        assert_eq!(split_name("b.raw"), ("", "b.raw"));
    }
}
