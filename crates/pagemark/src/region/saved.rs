//! Saving a region to a repository, and opening a saved region.

use pagemark_linux::own_memory::Mapping;

use super::target::{RegionTarget, UnsavedOffsets};
use super::{Region, RegionOptions};
use crate::checkpointer::{Checkpointer, Strategy};
use crate::job::{Job, JobOptions, Policy, Taken};
use crate::repository::{Checkpoint, Repository, SpaceKind, SpaceRecord};
use crate::{Error, PAGE_SIZE, PageNumber, PageTree, RangeSet, Store};

use super::claim::Claim;

/// The label of a region that is saved by itself.
const LABEL: &str = "region";

/// The job that a region was last saved to, and the state of its saved content.
pub(super) struct Saved {
    repository: Repository,
    job: String,
    checkpointer: Checkpointer,
    target: u64,
}

impl Saved {
    fn is_in(&self, repository: &Repository, job: &str) -> bool {
        self.repository.id() == repository.id() && self.job == job
    }
}

impl Region {
    /// Saves the region as the next checkpoint of a job. When this returns, the checkpoint is
    /// durable; after a crash at any instant the newest checkpoint is this one or the one before
    /// it, whole.
    ///
    /// The first save to a job reads the whole region. Each further save reads and stores what was
    /// written since the one before, as does the first save of a region that was opened from the
    /// newest checkpoint of the job.
    ///
    /// The region must not be in a transaction, and what other threads write during the call is in
    /// this checkpoint or in the next one.
    ///
    /// ```
    /// use pagemark::region::{Region, RegionOptions};
    /// use pagemark::repository::Repository;
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("repository");
    /// let repository = Repository::open_or_create(&path)?;
    /// let region = Region::new(1 << 20)?;
    /// region.write(5000, b"survives")?;
    /// region.save(&repository, "example")?;
    /// drop(region);
    ///
    /// let region = Region::open(&repository, "example", RegionOptions::default())?;
    /// let mut content = [0; 8];
    /// region.read(5000, &mut content)?;
    /// assert_eq!(&content, b"survives");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `ErrorKind::TransactionOpen`, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// or the mechanism or the repository failed. After an error
    /// the repository is unchanged, and the next save includes the writes.
    pub fn save(&self, repository: &Repository, job: &str) -> Result<Taken, Error> {
        self.check()?;
        let mut saved = self.lock_saved();
        let known = saved.take().filter(|known| known.is_in(repository, job));
        let is_current =
            |known: &Saved| self.lock().unsaved.as_ref().is_some_and(|unsaved| unsaved.is_of(known.target));
        let (target, checkpointer) = match known.filter(is_current) {
            Some(known) => (RegionTarget::resumed(LABEL, self, known.target), known.checkpointer),
            None => (RegionTarget::new([(LABEL, self)])?, Checkpointer::new()),
        };
        let number = target.number();
        // The caller waits until the checkpoint is durable, so copying in rounds would gain
        // nothing.
        let policy = Policy { strategy: Strategy::StopAndCopy, ..Policy::default() };
        let options = JobOptions { policy, ..JobOptions::new(job) };
        let mut running = Job::resumed(target, repository.clone(), options, checkpointer);
        let taken = running.checkpoint();
        let checkpointer = running.into_checkpointer();
        *saved = Some(Saved { repository: repository.clone(), job: job.to_owned(), checkpointer, target: number });
        taken
    }

    /// Opens the newest checkpoint of a job that [`Region::save`] has written: maps a region of the
    /// same length that holds what was saved, at whatever address.
    ///
    /// # Errors
    /// `ErrorKind::NeverSaved` if the job has no checkpoint, `ErrorKind::NoRegion`,
    /// the errors of [`Repository::read`], and as [`Region::with_options`].
    pub fn open(repository: &Repository, job: &str, options: RegionOptions) -> Result<Region, Error> {
        let checkpoint = newest(repository, job)?;
        let (region, tree) = Region::map_checkpoint(&checkpoint, LABEL, options)?;
        let target = RegionTarget::reserve_number();
        region.lock().unsaved = Some(UnsavedOffsets::none(target));
        region.resume_from(repository, &checkpoint, tree, target);
        Ok(region)
    }

    /// Maps a region that holds what the region with the label held in a checkpoint.
    ///
    /// # Errors
    /// `ErrorKind::NoRegion` if the checkpoint has no region of that label,
    /// the errors of [`Store::get`], and as [`Region::with_options`].
    pub fn from_checkpoint(checkpoint: &Checkpoint, label: &str, options: RegionOptions) -> Result<Region, Error> {
        Region::map_checkpoint(checkpoint, label, options).map(|(region, _)| region)
    }

    fn map_checkpoint(
        checkpoint: &Checkpoint,
        label: &str,
        options: RegionOptions,
    ) -> Result<(Region, PageTree), Error> {
        let (record, bytes) = find(checkpoint, label)?;
        let tree = load_tree(record, bytes, checkpoint)?;
        let mut mapping = Mapping::new(bytes).map_err(Error::system(format!("mapping a region of {bytes} bytes")))?;
        let claim = Claim::new(mapping.range())?;
        let content = mapping.content_mut();
        for (page, id) in tree.iter() {
            let offset = page.address().to_usize();
            let page = content.get_mut(offset..).and_then(|rest| rest.first_chunk_mut::<PAGE_SIZE>());
            checkpoint.get_page(id, page.ok_or_else(|| damaged(record))?)?;
        }
        let region = Region::track_new(mapping, claim, options)?;
        Ok((region, tree))
    }

    /// Makes the region hold what was saved last in a job, in place; for memory that the program
    /// has allocated itself and adopted. Only pages that differ are written, and they count as
    /// written. Further saves to the job are incremental.
    ///
    /// # Errors
    /// Those of [`Region::open`], `ErrorKind::SavedLengthDiffers`, `ErrorKind::TransactionOpen`. A
    /// page that can't be read from the repository leaves the region partly loaded.
    pub fn load(&self, repository: &Repository, job: &str) -> Result<RangeSet, Error> {
        self.check()?;
        let checkpoint = newest(repository, job)?;
        let (record, bytes) = find(&checkpoint, LABEL)?;
        if bytes != self.bytes() {
            return Err(Error::saved_length_differs(bytes, self.bytes()));
        }
        let tree = load_tree(record, bytes, &checkpoint)?;
        let target = RegionTarget::reserve_number();
        let mut loaded = RangeSet::new();
        {
            let mut state = self.lock();
            if state.is_open {
                return Err(Error::transaction_open());
            }
            state.collect()?;
            // Set before the loading, so that the next save includes what other threads write
            // meanwhile.
            state.unsaved = Some(UnsavedOffsets::none(target));
            let memory = self.shared_bytes();
            let mut content = [0; PAGE_SIZE];
            for page in (0..bytes / PAGE_SIZE).map(PageNumber::from) {
                checkpoint.get_page(tree.get(page), &mut content)?;
                let offset = page.address().to_usize();
                if !memory.equals(offset, &content) {
                    let offsets = RangeSet::from(page.addresses());
                    let pinned = state.pin(&offsets)?;
                    memory.write(offset, &content);
                    state.unpin(&pinned);
                    state.discarded.extend(&offsets);
                    loaded.extend(&offsets);
                }
            }
        }
        self.resume_from(repository, &checkpoint, tree, target);
        Ok(loaded)
    }

    /// Records that a checkpoint holds the content of the region, except for what `target` finds
    /// written.
    fn resume_from(&self, repository: &Repository, checkpoint: &Checkpoint, tree: PageTree, target: u64) {
        let mut checkpointer = Checkpointer::new();
        checkpointer.resume_space(0, tree);
        let job = checkpoint.manifest.job.clone();
        *self.lock_saved() = Some(Saved { repository: repository.clone(), job, checkpointer, target });
    }
}

fn newest(repository: &Repository, job: &str) -> Result<Checkpoint, Error> {
    let checkpoints = repository.checkpoints(job)?;
    let last = checkpoints.last().ok_or_else(|| Error::never_saved(job))?;
    repository.read(job, last.sequence)
}

/// The record of a region, and its length, which was checked.
fn find<'checkpoint>(
    checkpoint: &'checkpoint Checkpoint,
    label: &str,
) -> Result<(&'checkpoint SpaceRecord, usize), Error> {
    let found = checkpoint.manifest.spaces.iter().find_map(|space| match space.kind {
        SpaceKind::Region { bytes } if space.label == label => Some((space, bytes)),
        _ => None,
    });
    let missing = || Error::no_region(&checkpoint.manifest.job, checkpoint.manifest.sequence, label);
    let (space, bytes) = found.ok_or_else(missing)?;
    let bytes = Some(bytes.to_usize()).filter(|bytes| *bytes > 0 && bytes.is_multiple_of(PAGE_SIZE));
    Ok((space, bytes.ok_or_else(|| damaged(space))?))
}

fn load_tree(record: &SpaceRecord, bytes: usize, store: &dyn Store) -> Result<PageTree, Error> {
    let tree = PageTree::load(record.root, store)?;
    match tree.is_before(PageNumber::from(bytes / PAGE_SIZE)) {
        true => Ok(tree),
        false => Err(damaged(record)),
    }
}

fn damaged(record: &SpaceRecord) -> Error {
    let reason = format!("the length of the region {} does not fit its pages", record.label);
    Error::damaged_content(record.root, reason)
}
