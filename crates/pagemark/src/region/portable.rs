//! Snapshots of regions that leave their process: as bytes, or in a repository.

use pagemark_linux::own_memory::Mapping;
use pagemark_linux::shared_bytes::SharedBytes;

use super::changes::{Changes, EncodedKind};
use super::claim::Claim;
use super::{Region, RegionOptions, RegionSnapshot};
use crate::job::Taken;
use crate::repository::Repository;
use crate::snapshot::SnapshotStore;
use crate::{AddressRangeExt, Error, Mechanism, PAGE_SIZE, RangeSet};

impl RegionSnapshot {
    /// The snapshot as bytes, for another process or a file. Zeros take no place in it.
    ///
    /// ```
    /// use pagemark::Region;
    /// use pagemark::region::{RegionOptions, RegionSnapshot};
    /// use pagemark::snapshot::SnapshotStore;
    /// let region = Region::new(1 << 20)?;
    /// region.write(5000, b"sent")?;
    /// let bytes = region.snapshot()?.to_bytes()?;
    ///
    /// let received = RegionSnapshot::from_bytes(&bytes, &SnapshotStore::new())?;
    /// let copy = Region::from_snapshot(&received, RegionOptions::default())?;
    /// let mut content = [0; 4];
    /// copy.read(5000, &mut content)?;
    /// assert_eq!(&content, b"sent");
    /// # Ok::<(), pagemark::Error>(())
    /// ```
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let mut changes = Changes::none(self.content.bytes().to_usize(), false);
        for range in self.content.holding().iter() {
            changes.add_from(&range, &self.content)?;
        }
        changes.try_encode(EncodedKind::Snapshot)
    }

    /// The snapshot that [`RegionSnapshot::to_bytes`] has encoded, in a store. It is equal to all
    /// snapshots in that store that have the same content. It belongs to no region:
    /// [`Region::from_snapshot`] makes one. Any bytes are examined safely; the checksum shows
    /// accidents, and not what somebody has forged.
    ///
    /// # Errors
    /// `ErrorKind::Damaged`, `ErrorKind::NewerFormat`, and the errors of
    /// [`SnapshotStore::snapshot`].
    pub fn from_bytes(bytes: &[u8], store: &SnapshotStore) -> Result<RegionSnapshot, Error> {
        let changes = Changes::decode(bytes, EncodedKind::Snapshot)?;
        let region_bytes = changes.region_bytes();
        if changes.has_old() || !region_bytes.is_whole_pages() || region_bytes.get() == 0 {
            return Err(EncodedKind::Snapshot.damaged("it is not of a region"));
        }
        let mut area = Mapping::new(region_bytes.to_usize()).map_err(Error::no_memory)?;
        for change in changes.iter() {
            area.content_mut()[change.offset..change.offset + change.new.len()].copy_from_slice(change.new);
        }
        let area = SharedBytes::of(area.content_mut());
        let content = store.snapshot_of_zeros_except(&area, changes.offsets(), &RangeSet::new())?;
        Ok(RegionSnapshot { content, region: None })
    }

    /// Saves the snapshot as the next checkpoint of a job, as [`Region::save`] saves a region.
    /// [`RegionSnapshot::open`] and [`Region::open`] read it. All of the content is read; what the
    /// repository holds already is not stored again.
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`, or the repository failed.
    pub fn save(&self, repository: &Repository, job: &str) -> Result<Taken, Error> {
        Region::from_snapshot(self, plain_options(None))?.save(repository, job)
    }

    /// Reads the newest checkpoint of a job that [`RegionSnapshot::save`] or [`Region::save`] has
    /// written into a store. The snapshot belongs to no region, as that of
    /// [`RegionSnapshot::from_bytes`].
    ///
    /// # Errors
    /// Those of [`Region::open`], and the errors of [`SnapshotStore::snapshot`].
    pub fn open(repository: &Repository, job: &str, store: &SnapshotStore) -> Result<RegionSnapshot, Error> {
        let region = Region::open(repository, job, plain_options(Some(store.clone())))?;
        Ok(RegionSnapshot { region: None, ..region.snapshot()? })
    }
}

impl Region {
    /// Maps a region that holds the content of a snapshot, of whichever region it was taken.
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`, and as [`Region::with_options`].
    pub fn from_snapshot(snapshot: &RegionSnapshot, options: RegionOptions) -> Result<Region, Error> {
        let content = snapshot.content();
        let mut mapping = Mapping::new(content.bytes().to_usize()).map_err(Error::no_memory)?;
        let claim = Claim::new(mapping.range())?;
        debug_assert!(content.bytes().to_usize().is_multiple_of(PAGE_SIZE));
        for range in content.holding().iter() {
            content.read_at(range.start, &mut mapping.content_mut()[range.to_offsets()])?;
        }
        Region::track_new(mapping, claim, options)
    }
}

/// Options of a region that is not written.
fn plain_options(store: Option<SnapshotStore>) -> RegionOptions {
    RegionOptions { mechanism: Some(Mechanism::Full), without_rollback: true, store, ..RegionOptions::default() }
}
