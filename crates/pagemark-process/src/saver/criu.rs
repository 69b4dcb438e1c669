//! The whole state of a process tree, saved by CRIU.

use std::collections::HashSet;
use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pagemark::blob::BlobHistory;
use pagemark::repository::StateRecord;
use pagemark::target::VisitPage;
use pagemark::{PageNumber, PageRange, Store};
use pagemark_linux::proc::{Process, tree};
use pagemark_linux::scratch_directory::{Purpose, ScratchDirectory, parent_in_memory};
use pagemark_trace::RecordedPid;
use pagemark_trace::attach;
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use pagemark_trace::inject::memory_copy::MemoryCopy;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::parked::Repetition;
use pagemark_trace::space::AddressSpace;

use super::{FreezeStage, FrozenState, Meanwhile, ResumedTree, SavedState, StateSaver, unreadable_state};
use crate::container;
use crate::criu::images::PageRun;
use crate::criu::{self, Criu, Dump, DumpOptions, ProcessImage};
use crate::refusal;
use crate::restore::tcp_connections;
use crate::state::{confinement, descriptors};

/// The longest time without a call of `meanwhile`.
const FREEZE_POLL: Duration = Duration::from_millis(16);

/// How often a dump is repeated because the program was changing.
const REPEATS: u32 = 3;

/// Saves the whole state of a tree by CRIU, so that the tree can be restored.
#[derive(Clone, Debug)]
pub struct CriuSaver {
    criu: Criu,
    options: DumpOptions,
    notices: Arc<Notices>,
}

/// What there is to say of saved states.
#[derive(Debug, Default)]
struct Notices {
    /// Said once.
    has_told_connections: AtomicBool,
    untold: Mutex<Vec<String>>,
}

impl Notices {
    /// Tells of connections by TCP within the tree, which a restore closes.
    fn tell_connections(&self, connections: &[(SocketAddr, SocketAddr)]) {
        let ends: HashSet<_> = connections.iter().copied().collect();
        let is_within = |&(own, peer): &(SocketAddr, SocketAddr)| own < peer && ends.contains(&(peer, own));
        let mut within: Vec<_> = ends.iter().copied().filter(is_within).collect();
        within.sort();
        let Some((own, peer)) = within.first() else { return };
        if self.has_told_connections.swap(true, Ordering::Relaxed) {
            return;
        }
        let more = match within.len() {
            1 => format!("the connection of the program with itself, {own} to {peer}"),
            count => format!("{count} connections of the program with itself, as {own} to {peer}"),
        };
        let notice = format!("a restore closes {more}; --keep-connections keeps them");
        self.untold.lock().unwrap_or_else(PoisonError::into_inner).push(notice);
    }
}

impl CriuSaver {
    /// A saver that uses this CRIU.
    pub fn new(criu: Criu, options: DumpOptions) -> CriuSaver {
        CriuSaver { criu, options, notices: Arc::default() }
    }

    /// A saver that uses the CRIU of this machine.
    ///
    /// # Errors
    /// Those of [`Criu::find`].
    pub fn find(options: DumpOptions) -> Result<CriuSaver, Error> {
        Ok(CriuSaver::new(Criu::find()?, options))
    }
}

impl StateSaver for CriuSaver {
    fn is_restorable(&self) -> bool {
        true
    }

    fn check(&self, root: Process) -> Result<()> {
        attach::check_namespace(root.pid)?;
        attach::check_first_threads(root.pid)?;
        let tree = tree::members(root.pid).map_err(|_| Error::gone(root.pid))?;
        let tree: Vec<i32> = tree.iter().map(|member| member.process.pid).collect();
        descriptors::check(&tree)?;
        if !self.options.without_sandbox {
            confinement::check(&tree)?;
        }
        let locked = container::locked_directory(root.pid)
            .map_err(Error::system("read the mounts of", Object::Process(root.pid)))?;
        let Some(directory) = locked else { return Ok(()) };
        let reason = format!(
            "has a user namespace of its own and the directory {} from outside, below which something is mounted: a \
             restore could not mount it again",
            directory.display()
        );
        Err(Error::about(ErrorKind::PidNamespace, Object::command(root.pid), reason).help(
            "start it with directories below which nothing is mounted outside, above all with a root directory of its \
             own, or save memory alone with --memory-only",
        ))
    }

    fn leaves_objects_out(&self, pids: &[i32]) -> bool {
        criu::submission::may_withhold(pids)
    }

    fn gives_up_machines(&self) -> bool {
        true
    }

    fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut *self.notices.untold.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn freeze(
        &self,
        root: Process,
        objects: &HashSet<ObjectId>,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Box<dyn FrozenState>> {
        let mut repeats = 0..REPEATS;
        // CRIU does not wait long for the machines of processes.
        let repetition = Repetition::default();
        loop {
            match self.dump(root, objects, meanwhile) {
                Err(error) if refusal::is_of_change(&error) && repeats.next().is_some() => {}
                Err(error) if repetition.is_due(&error) => {}
                Err(error) => return Err(refused(root.pid, error)),
                Ok(dumped) => return Ok(Box::new(dumped)),
            }
        }
    }
}

impl CriuSaver {
    fn dump(&self, root: Process, objects: &HashSet<ObjectId>, meanwhile: Meanwhile<'_>) -> Result<Dumped> {
        let images = images_directory()?;
        let mut dump = Dump::start_without(&self.criu, root.pid, images.path(), &self.options, objects)?;
        while !dump.wait_frozen(FREEZE_POLL)? {
            meanwhile(FreezeStage::Freezing)?;
        }
        if dump.wait_all_frozen()? {
            meanwhile(FreezeStage::Saving)?;
        }
        dump.wait_state_saved()?;
        let notices = (!self.options.keep_connections).then(|| self.notices.clone());
        Ok(Dumped { dump, images, notices })
    }
}

/// A tree that CRIU keeps frozen.
struct Dumped {
    // The directory is dropped last: CRIU writes into it.
    dump: Dump,
    images: ScratchDirectory,
    /// None if the connections are kept.
    notices: Option<Arc<Notices>>,
}

impl FrozenState for Dumped {
    fn copy_memory(&self, pid: i32) -> Result<Option<MemoryCopy>> {
        MemoryCopy::hold(self.dump.copy_memory(pid)?).map(Some)
    }

    fn thaw(self: Box<Self>, spaces: &[&AddressSpace]) -> Result<ResumedTree> {
        let Dumped { dump, images, notices } = *self;
        let populated = || spaces.iter().map(|space| (space.pid(), (space.image_pid(), space.populated()))).collect();
        let (timings, saved) = dump.thaw(populated)?;
        if let Some(image) =
            saved.processes.iter().find(|image| spaces.iter().all(|space| space.image_pid() != image.pid))
        {
            return Err(Error::killed(image.pid.get()));
        }
        if let Some(notices) = notices {
            notices.tell_connections(&tcp_connections(images.path())?);
        }
        Ok(ResumedTree {
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
    fn process(&self, pid: RecordedPid) -> Option<&ProcessImage> {
        self.saved.processes.iter().find(|image| image.pid == pid)
    }
}

impl SavedState for Images {
    fn held_pages(&self, pid: RecordedPid) -> Option<Vec<PageRange>> {
        let image = self.process(pid)?;
        Some(image.runs.iter().map(PageRun::page_range).collect())
    }

    fn objects_left_out(&self) -> Option<&HashSet<ObjectId>> {
        Some(&self.saved.withheld_objects)
    }

    fn saved_pages(&self, pid: RecordedPid, visit: VisitPage<'_>) -> Result<(), pagemark::Error> {
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
    if source.kind() == ErrorKind::Criu
        && let Some(named) = descriptors::named(root_pid, &source.reason())
    {
        return named;
    }
    match refusal::hint(root_pid, &source) {
        Some(hint) => source.help(hint),
        None => source,
    }
}

/// Makes a directory for CRIU's images, its owner's alone. It lies in memory, because the images
/// are written while the tree is frozen, and hold secrets of the tree.
fn images_directory() -> Result<ScratchDirectory> {
    let directory = parent_in_memory();
    ScratchDirectory::new_in(&directory, Purpose::State)
        .map_err(Error::system("cannot make a directory for the state in", Object::File(directory.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_a_program_with_itself_are_told_once() {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let notices = Notices::default();
        let take = || std::mem::take(&mut *notices.untold.lock().unwrap());
        notices.tell_connections(&[(address(1), address(2)), (address(3), address(1))]);
        assert_eq!(take(), Vec::<String>::new());
        let both = [(address(2), address(1)), (address(9), address(1)), (address(1), address(2))];
        notices.tell_connections(&both);
        let told = take();
        assert!(told.len() == 1 && told[0].contains("127.0.0.1:1 to 127.0.0.1:2"), "{told:?}");
        notices.tell_connections(&both);
        assert_eq!(take(), Vec::<String>::new());
    }
}
