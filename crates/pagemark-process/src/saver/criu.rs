//! The whole state of a process tree, saved by CRIU.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use pagemark::blob::BlobHistory;
use pagemark::repository::StateRecord;
use pagemark::target::VisitPage;
use pagemark::{PageNumber, PageRange, Store};

use super::{FreezeStage, FrozenState, Meanwhile, SavedState, StateSaver, Thawed, unreadable_state};
use crate::attach;
use crate::container;
use crate::criu::images::PageRun;
use crate::criu::{self, Criu, Dump, DumpOptions, ProcessImage};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::objects::ObjectId;
use crate::refusal;
use crate::scratch::{self, ScratchDirectory};
use crate::space::AddressSpace;

/// The longest time without a call of `meanwhile`.
const FREEZE_POLL: Duration = Duration::from_millis(16);

/// How often a dump is repeated because the program has just connected a socket.
const REPEATS: u32 = 3;

/// Saves the whole state of a tree by CRIU, so that the tree can be restored.
#[derive(Clone, Debug)]
pub struct CriuSaver {
    criu: Criu,
    options: DumpOptions,
}

impl CriuSaver {
    /// A saver that uses this CRIU.
    pub fn new(criu: Criu, options: DumpOptions) -> CriuSaver {
        CriuSaver { criu, options }
    }

    /// A saver that uses the CRIU of this machine.
    ///
    /// # Errors
    /// As [`Criu::find`].
    pub fn find(options: DumpOptions) -> Result<CriuSaver, Error> {
        Ok(CriuSaver::new(Criu::find()?, options))
    }
}

impl StateSaver for CriuSaver {
    fn is_restorable(&self) -> bool {
        true
    }

    fn check(&self, root_pid: i32) -> Result<()> {
        attach::check_namespace(root_pid)?;
        let locked = container::locked_directory(root_pid)
            .map_err(Error::system("read the mounts of", Object::Process(root_pid)))?;
        let Some(directory) = locked else { return Ok(()) };
        let reason = format!(
            "has a user namespace of its own and the directory {} from outside, below which something is mounted: a \
             restore could not mount it again",
            directory.display()
        );
        Err(Error::about(ErrorKind::PidNamespace, Object::command(root_pid), reason).help(
            "start it with directories below which nothing is mounted outside, above all with a root directory of its \
             own, or save memory alone with --memory-only",
        ))
    }

    fn leaves_objects_out(&self, pids: &[i32]) -> bool {
        criu::dump::may_withhold(pids)
    }

    fn gives_up_machines(&self) -> bool {
        true
    }

    fn freeze(
        &self,
        root_pid: i32,
        objects: &HashSet<ObjectId>,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Box<dyn FrozenState>> {
        let mut repeats = 0..REPEATS;
        loop {
            match self.dump(root_pid, objects, meanwhile) {
                Err(error) if refusal::is_of_new_connection(&error) && repeats.next().is_some() => {}
                Err(error) => return Err(refused(root_pid, error)),
                Ok(dumped) => return Ok(Box::new(dumped)),
            }
        }
    }
}

impl CriuSaver {
    fn dump(&self, root_pid: i32, objects: &HashSet<ObjectId>, meanwhile: Meanwhile<'_>) -> Result<Dumped> {
        let images = images_directory()?;
        let mut dump = Dump::start_without(&self.criu, root_pid, images.path(), &self.options, objects)?;
        while !dump.wait_frozen(FREEZE_POLL)? {
            meanwhile(FreezeStage::Freezing)?;
        }
        if dump.wait_all_frozen()? {
            meanwhile(FreezeStage::Saving)?;
        }
        dump.wait_state_saved()?;
        Ok(Dumped { dump, images })
    }
}

/// A tree that CRIU keeps frozen.
struct Dumped {
    // The directory is dropped last: CRIU writes into it.
    dump: Dump,
    images: ScratchDirectory,
}

impl FrozenState for Dumped {
    fn thaw(self: Box<Self>, spaces: &[&AddressSpace]) -> Result<Thawed> {
        let Dumped { dump, images } = *self;
        let populated = || spaces.iter().map(|space| (space.pid(), (space.image_pid(), space.populated()))).collect();
        let (timings, saved) = dump.thaw(populated)?;
        if let Some(image) =
            saved.processes.iter().find(|image| spaces.iter().all(|space| space.image_pid() != image.pid))
        {
            return Err(Error::killed(image.pid));
        }
        Ok(Thawed {
            frozen_at: timings.frozen_at,
            frozen_time: timings.downtime(),
            state: Box::new(Images { saved, _directory: images }),
        })
    }
}

/// CRIU's images.
struct Images {
    saved: criu::SavedState,
    _directory: ScratchDirectory,
}

impl Images {
    fn process(&self, pid: i32) -> Option<&ProcessImage> {
        self.saved.processes.iter().find(|image| image.pid == pid)
    }
}

impl SavedState for Images {
    fn held_pages(&self, pid: i32) -> Option<Vec<PageRange>> {
        let image = self.process(pid)?;
        Some(image.runs.iter().map(PageRun::page_range).collect())
    }

    fn objects_left_out(&self) -> Option<&HashSet<ObjectId>> {
        Some(&self.saved.withheld_objects)
    }

    fn saved_pages(&self, pid: i32, visit: VisitPage<'_>) -> Result<(), pagemark::Error> {
        let Some(image) = self.process(pid) else { return Ok(()) };
        image.for_each_present(&mut |page, content| visit(PageNumber::new(page), content))
    }

    fn record(&self, history: &mut BlobHistory, store: &mut dyn Store) -> Result<Vec<StateRecord>, pagemark::Error> {
        self.saved.files.iter().map(|path| record_image(path, history, store)).collect()
    }
}

/// Stores an image page by page, so that pages that did not change are held once.
fn record_image(path: &Path, history: &mut BlobHistory, store: &mut dyn Store) -> Result<StateRecord, pagemark::Error> {
    let mut file = File::open(path).map_err(unreadable_state(path))?;
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let content = history.write(&name, store, &mut file).map_err(|error| match error.kind() {
        pagemark::ErrorKind::Stream => unreadable_state(path)(error).into(),
        _ => error,
    })?;
    Ok(StateRecord { name, content })
}

/// CRIU's error, with what to do about it where that is known.
fn refused(root_pid: i32, source: Error) -> Error {
    match refusal::hint(root_pid, &source) {
        Some(hint) => source.help(hint),
        None => source,
    }
}

/// Makes a directory for CRIU's images, its owner's alone. It lies in memory, because the images
/// are written while the tree is frozen, and hold secrets of the tree.
fn images_directory() -> Result<ScratchDirectory> {
    let directory = scratch::parent();
    ScratchDirectory::new_in(&directory)
        .map_err(Error::system("cannot make a directory for the state in", Object::File(directory.clone())))
}
