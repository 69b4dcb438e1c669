//! Shared anonymous memory of the processes of a tree: each object is a space, whose pages are
//! copied once, however many processes map it.
//!
//! What was written to an object is the union of what each process has written through its
//! mappings. All of it counts as written when a process that mapped it has left the tree or
//! executed another program, and when a process was forked, also one that is not there any more,
//! because nobody saw what they wrote. The kernel's records of all forks show the latter. An object
//! that a process maps only in part counts as written whole in each freeze: a mapping can grow
//! (`mremap`), be written to, and shrink again, unseen. What was freed counts as written, too: see
//! [`view`]. Of an object that is large and nearly empty, only pieces that hold data are tracked,
//! since tracking takes page tables. Objects that a process outside of the tree maps are left to
//! whoever saves the state.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, LazyLock};

use pagemark::repository::MappingException;
use pagemark::target::SpaceId;
use pagemark::{Address, AddressRangeExt, ByteCount, PageRange, Range, RangeSet};
use pagemark_linux::forks::{Forks, Record};
use pagemark_linux::proc::{self, Stat};
use pagemark_linux::sparse::{next_data, read_full};
use pagemark_trace::error::{Error, Object, Result};
use pagemark_trace::objects::{ObjectId, ObjectMapping, TrackedPart};
use pagemark_trace::space::Moment;

use view::Views;

mod view;

/// The first id in checkpoints of an object; the inode is added. Process ids are lower.
const FIRST_ID: SpaceId = 1 << 52;

/// Most bytes that the processes may map of all objects, each mapping counted. Tracking takes page
/// tables for a 512th of it, which may be at most a 64th of the machine's memory.
static MOST_MAPPED: LazyLock<ByteCount> = LazyLock::new(|| {
    // SAFETY: the calls take numbers.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    ByteCount::new(pages.max(0) as u64 * page.max(0) as u64 * (512 / 64))
});

/// A mapping that is longer has its object tracked everywhere only if at least every eighth of its
/// pages holds data ([`MOST_SPARSE`]). Otherwise only pieces that hold data are tracked.
const SMALL: ByteCount = ByteCount::new(64 << 20);
const MOST_SPARSE: u64 = 8;

/// The bytes that one page table maps.
const PIECE: ByteCount = ByteCount::new(2 << 20);

/// With more objects than this, those that are shorter than [`SHORT`] are not tracked: each
/// lengthens the freeze by some 0.1 ms, and CRIU saves 1 MiB in 0.7 ms.
const MANY_OBJECTS: usize = 128;
const SHORT: ByteCount = ByteCount::new(256 << 10);

/// How often the mappings of an object are read anew to open it.
const OPEN_TRIES: u32 = 3;

/// The size of a block of a file's status.
const BLOCK: u64 = 512;

/// The objects of a tree.
pub(crate) struct SharedObjects {
    root_pid: i32,
    objects: BTreeMap<ObjectId, SharedObject>,
    /// The tracked objects, as of the last listing.
    by_space: BTreeMap<SpaceId, ObjectId>,
    /// The mechanism finds what was written, so that less than everything may be copied.
    is_tracked: bool,
    /// None until an object is tracked.
    views: Option<Views>,
    /// None until there is an object.
    forks: Option<Forks>,
    /// The kernel does not let this process follow the forks, so that no object is tracked.
    is_blind: bool,
    /// The processes of the tree at the last listing.
    listed: HashSet<i32>,
    /// Those, those outside that map an object, and all that they have forked since.
    family: HashSet<i32>,
    /// Processes outside of the tree that map an object.
    outsiders: HashSet<i32>,
}

/// An object of shared memory.
struct SharedObject {
    id: ObjectId,
    /// None if it is left to whoever saves the state.
    space: Option<SpaceId>,
    /// Open from the listing of the processes until the end of the freeze.
    file: Option<File>,
    bytes: ByteCount,
    /// By offset.
    written: RangeSet,
    /// All of it counts as written.
    is_whole: bool,
    /// A process mapped only a part of it at a listing since the last freeze.
    is_partial: bool,
    is_outside: bool,
    /// Chosen at each listing: what holds data elsewhere later has been written since.
    part: TrackedPart,
    /// What held data in the freeze, by offset.
    held: RangeSet,
}

/// A space of shared memory, as it was in the freeze.
pub(crate) struct FrozenObject {
    pub(crate) object: ObjectId,
    pub(crate) space: SpaceId,
    pub(crate) bytes: ByteCount,
    pub(crate) held_pages: Vec<PageRange>,
}

/// A mapping of an object, and the process.
pub(crate) type Mapped = (i32, ObjectMapping);

/// The id in checkpoints of an object.
pub(crate) fn recorded_id(object: ObjectId) -> SpaceId {
    FIRST_ID + object.inode() % FIRST_ID
}

impl SharedObjects {
    /// For the tree below this process. `is_tracked` if the mechanism finds what was written.
    pub(crate) fn new(root_pid: i32, is_tracked: bool) -> SharedObjects {
        SharedObjects {
            root_pid,
            objects: BTreeMap::new(),
            by_space: BTreeMap::new(),
            is_tracked,
            views: None,
            forks: None,
            is_blind: false,
            listed: HashSet::new(),
            family: HashSet::new(),
            outsiders: HashSet::new(),
        }
    }

    /// Takes the kernel's records of forks, before the processes are listed. The children that are
    /// not listed then have left.
    pub(crate) fn take_forks(&mut self) {
        let Some(forks) = &mut self.forks else { return };
        let records = forks.read();
        for record in &records.records {
            if let Record::Fork { parent, child } = record
                && self.family.contains(parent)
            {
                self.family.insert(*child);
            }
        }
        if records.is_incomplete {
            self.all_written();
            self.family.extend(self.find_outsiders());
        }
    }

    /// Leaves out the forks that were recorded since the tree was listed in its freeze: those of
    /// copies of its memory, which write nothing.
    pub(crate) fn leave_out_forks(&mut self) {
        let Some(forks) = &mut self.forks else { return };
        if forks.read().is_incomplete {
            self.all_written();
            self.family.extend(self.find_outsiders());
        }
    }

    /// Takes the listed processes that have memory; `is_one_replaced` if one of them executed a
    /// program since.
    pub(crate) fn take_processes(&mut self, listed: &HashSet<i32>, is_one_replaced: bool) {
        let left: Vec<i32> = self.family.difference(listed).copied().collect();
        let has_one_left = left.iter().any(|pid| !self.outsiders.contains(pid));
        self.outsiders = left.into_iter().filter(|&pid| self.is_outsider(pid)).collect();
        self.family = listed.union(&self.outsiders).copied().collect();
        // It may have unmapped what it inherited and wrote.
        let has_new = !listed.is_subset(&self.listed);
        self.listed.clone_from(listed);
        if has_one_left || has_new || is_one_replaced {
            self.all_written();
        }
    }

    fn all_written(&mut self) {
        self.objects.values_mut().for_each(|object| object.is_whole = true);
    }

    /// True if a process maps an object of the tree, and is not in the tree. A process that was
    /// forked since the tree was listed is in it.
    fn is_outsider(&self, pid: i32) -> bool {
        mapped_by(pid).iter().any(|mapped| self.objects.contains_key(mapped)) && !self.is_in_tree(pid)
    }

    fn is_in_tree(&self, pid: i32) -> bool {
        let parent = |&pid: &i32| Stat::read(pid).ok().map(|stat| stat.parent_pid).filter(|&parent| parent > 1);
        std::iter::successors(Some(pid), parent).any(|ancestor| ancestor == self.root_pid)
    }

    /// The processes that are not in the tree and map an object of it.
    fn find_outsiders(&self) -> HashSet<i32> {
        // The views of this process write nothing.
        let own_pid = std::process::id() as i32;
        let others = proc::processes().unwrap_or_default().into_iter().filter(|&pid| pid != own_pid);
        let others = others.filter(|pid| !self.family.contains(pid) || self.outsiders.contains(pid));
        others.filter(|&pid| self.is_outsider(pid)).collect()
    }

    /// Takes the mappings of all processes. Once the tree is being frozen, new objects are left to
    /// whoever saves the state. Returns true if the processes must be listed again, because their
    /// forks are followed only from now on.
    pub(crate) fn take_mappings(
        &mut self,
        mapped: Vec<Mapped>,
        moment: Moment,
        next_space: &mut SpaceId,
    ) -> Result<bool> {
        let mut mappings = Mappings::new();
        for place in mapped {
            mappings.entry(place.1.object).or_default().push(place);
        }
        let has_new = self.take_objects(&mappings, moment);
        if self.objects.is_empty() {
            self.by_space.clear();
            return Ok(false);
        }
        let must_list_again = moment.may_stop() && self.begin_to_follow(has_new)?;
        self.choose_tracked(&mappings, moment, next_space)?;
        for (id, object) in &mut self.objects {
            object.take_mappings(places_of(&mappings, id), self.views.as_ref(), moment)?;
        }
        self.by_space = self.objects.values().filter_map(|object| Some((object.space?, object.id))).collect();
        Ok(must_list_again)
    }

    /// Takes the objects that are mapped. True if some are new.
    fn take_objects(&mut self, mappings: &Mappings, moment: Moment) -> bool {
        // A list that is read while mappings move may lack one. While the tree is being frozen, what is
        // tracked must stay so.
        if moment != Moment::Freezing {
            self.objects.retain(|id, _| mappings.contains_key(id));
            if let Some(views) = &self.views {
                views.retain(|id| self.objects.get(&id).is_some_and(|object| object.space.is_some()));
            }
        }
        let known_count = self.objects.len();
        for &id in mappings.keys() {
            self.objects.entry(id).or_insert_with(|| SharedObject::new(id));
        }
        self.objects.len() > known_count
    }

    /// Begins to follow the forks of the processes, and to watch what maps their objects. True if
    /// the forks are followed only from now on.
    fn begin_to_follow(&mut self, has_new_objects: bool) -> Result<bool> {
        let mut must_list_again = false;
        if self.forks.is_none() && !self.is_blind {
            self.forks = Forks::new().ok();
            self.is_blind = self.forks.is_none();
            must_list_again = !self.is_blind;
        }
        if has_new_objects {
            self.outsiders.extend(self.find_outsiders());
            self.family.extend(&self.outsiders);
        }
        if self.is_tracked && self.views.is_none() {
            self.views = Some(Views::new().map_err(Error::system("start to watch shared memory", Object::None))?);
        }
        Ok(must_list_again)
    }

    /// Chooses the objects that are tracked, and which part of each.
    fn choose_tracked(&mut self, mappings: &Mappings, moment: Moment, next_space: &mut SpaceId) -> Result<()> {
        let may_begin = moment.may_stop();
        let (is_blind, are_many) = (self.is_blind, self.objects.len() > MANY_OBJECTS);
        let outside: HashSet<ObjectId> = self.outsiders.iter().flat_map(|&pid| mapped_by(pid)).collect();
        let may_track = |object: &SharedObject| {
            let is_short = are_many && longest(places_of(mappings, &object.id)) < SHORT;
            may_begin && !is_blind && !object.is_outside && !is_short
        };
        let mut tracked_bytes = ByteCount::ZERO;
        for (id, object) in &mut self.objects {
            object.is_outside = outside.contains(id);
            if self.is_tracked && (may_track(object) || object.space.is_some()) {
                object.choose_part(places_of(mappings, id))?;
                tracked_bytes += object.tracked_bytes(places_of(mappings, id));
            }
        }
        for object in self.objects.values_mut().filter(|_| may_begin) {
            let has_part = object.space.is_some() || object.has_part(places_of(mappings, &object.id));
            let may_be_scanned = !self.is_tracked || has_part && tracked_bytes <= *MOST_MAPPED;
            let is_tracked = may_track(object) && may_be_scanned;
            match object.space {
                None if is_tracked => {
                    (object.space, object.is_whole) = (Some(*next_space), true);
                    *next_space += 1;
                }
                Some(_) if !is_tracked => object.space = None,
                _ => {}
            }
        }
        Ok(())
    }

    /// The spaces that are tracked.
    pub(crate) fn spaces(&self) -> impl Iterator<Item = SpaceId> {
        self.by_space.keys().copied()
    }

    /// The objects that are tracked.
    pub(crate) fn tracked(&self) -> HashSet<ObjectId> {
        self.by_space.values().copied().collect()
    }

    /// The objects that are tracked, and which part of each.
    pub(crate) fn tracked_parts(&self) -> HashMap<ObjectId, TrackedPart> {
        let tracked = self.by_space.values().filter_map(|id| self.objects.get(id));
        tracked.map(|object| (object.id, object.part.clone())).collect()
    }

    /// How a mapping of an object is treated, if it is not tracked.
    pub(crate) fn exception(&self, object: ObjectId) -> Option<MappingException> {
        match self.objects.get(&object) {
            Some(known) if known.space.is_some() => None,
            Some(known) if known.is_outside => Some(MappingException::SharedOutside),
            _ => Some(MappingException::SavedWhole),
        }
    }

    /// Drops all objects.
    pub(crate) fn clear(&mut self) {
        *self = SharedObjects::new(self.root_pid, self.is_tracked);
    }

    /// Adds what a process has written.
    pub(crate) fn add_written(&mut self, written: Vec<(ObjectId, Range)>) {
        for (id, part) in written {
            if let Some(object) = self.objects.get_mut(&id) {
                object.written.insert(part);
            }
        }
    }

    /// Adds to `dirty` what was written in an object since the last call. None if the space is
    /// none of an object.
    pub(crate) fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet, is_frozen: bool) -> Option<Result<()>> {
        let object = self.objects.get_mut(self.by_space.get(&space)?)?;
        Some(object.collect(dirty, is_frozen, self.views.as_ref()))
    }

    /// Reads an object. None if the space is none of an object.
    pub(crate) fn read(&self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Option<Result<RangeSet>> {
        let object = self.objects.get(self.by_space.get(&space)?)?;
        Some(object.read(ranges, buffer))
    }

    /// The tracked objects as they were in the freeze.
    pub(crate) fn describe(&self) -> Vec<FrozenObject> {
        let tracked = self.objects.values().filter_map(|object| Some((object, object.space?)));
        let described = tracked.map(|(object, space)| FrozenObject {
            object: object.id,
            space,
            bytes: object.bytes,
            held_pages: object.held.iter().map(|range| range.page_range()).collect(),
        });
        described.collect()
    }

    /// Closes the objects, so that the memory does not outlive the processes.
    pub(crate) fn close(&mut self) {
        self.objects.values_mut().for_each(|object| object.file = None);
    }
}

/// Where each object is mapped.
type Mappings = BTreeMap<ObjectId, Vec<Mapped>>;

fn places_of<'a>(mappings: &'a Mappings, id: &ObjectId) -> &'a [Mapped] {
    mappings.get(id).map_or(&[], Vec::as_slice)
}

impl SharedObject {
    /// Takes the places where the object is mapped now.
    fn take_mappings(&mut self, mapped: &[Mapped], views: Option<&Views>, moment: Moment) -> Result<()> {
        // The writes of a process outside of the tree are not tracked.
        self.is_whole |= self.is_outside;
        if self.space.is_some() && self.file.is_none() {
            self.open(mapped)?;
            // Nothing can be copied until it is open.
            self.is_whole |= self.file.is_none();
        }
        if let Some(views) = views.filter(|_| self.space.is_some()) {
            self.follow(views, mapped)?;
        }
        let is_partial = self.space.is_some() && self.is_mapped_in_part(mapped);
        self.is_partial |= is_partial;
        if moment.is_frozen() {
            self.is_whole |= self.is_partial;
            self.is_partial = is_partial;
        }
        Ok(())
    }

    fn new(id: ObjectId) -> SharedObject {
        SharedObject {
            id,
            space: None,
            file: None,
            bytes: ByteCount::ZERO,
            written: RangeSet::new(),
            is_whole: true,
            is_partial: false,
            is_outside: false,
            part: None,
            held: RangeSet::new(),
        }
    }

    fn failed(&self, operation: &'static str) -> impl FnOnce(io::Error) -> Error {
        Error::system(operation, Object::File(format!("/dev/zero (inode {})", self.id.inode()).into()))
    }

    /// Opens the object through one of its mappings. Stays closed if all of them are gone.
    fn open(&mut self, mapped: &[Mapped]) -> Result<()> {
        self.open_by(mapped)?;
        for _ in 0..OPEN_TRIES {
            if self.file.is_some() {
                break;
            }
            // A mapping that is split or extended meanwhile is found by its new addresses.
            let pids: BTreeSet<i32> = mapped.iter().map(|(pid, _)| *pid).collect();
            let now = pids.into_iter().flat_map(|pid| mappings_by(pid).into_iter().map(move |mapping| (pid, mapping)));
            let now: Vec<Mapped> = now.filter(|(_, mapping)| mapping.object == self.id).collect();
            self.open_by(&now)?;
        }
        Ok(())
    }

    fn open_by(&mut self, mapped: &[Mapped]) -> Result<()> {
        for (pid, mapping) in mapped {
            match File::open(proc::mapped_file(*pid, &mapping.range)) {
                Ok(file) => {
                    let metadata = file.metadata().map_err(self.failed("read the size of"))?;
                    if metadata.ino() == self.id.inode() {
                        self.bytes = ByteCount::new(metadata.len());
                        self.file = Some(file);
                        return Ok(());
                    }
                }
                Err(error) if proc::is_gone(&error) || error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.failed("open shared memory")(error)),
            }
        }
        Ok(())
    }

    /// Chooses where writes are looked for: only in pieces that hold data, if tracking all would
    /// take page tables for much that holds none. As it was, if the mappings are gone meanwhile.
    fn choose_part(&mut self, mapped: &[Mapped]) -> Result<()> {
        let longest = longest(mapped);
        if longest <= SMALL {
            self.part = None;
            return Ok(());
        }
        if self.file.is_none() {
            self.open(mapped)?;
        }
        let Some(file) = &self.file else { return Ok(()) };
        let metadata = file.metadata().map_err(self.failed("read the size of"))?;
        let is_sparse = longest.get() > metadata.blocks() * BLOCK * MOST_SPARSE;
        self.part = if is_sparse { Some(Arc::new(self.pieces_with_data()?)) } else { None };
        Ok(())
    }

    /// The pieces of the object that hold data.
    fn pieces_with_data(&self) -> Result<RangeSet> {
        let data = self.data().map_err(self.failed("find the data of"))?;
        let piece = PIECE.get();
        let whole = |data: Range| {
            let (start, end) = (data.start.get() / piece * piece, data.end.get().next_multiple_of(piece));
            Address::new(start)..Address::new(end)
        };
        Ok(data.iter().map(whole).collect())
    }

    /// True if it is known which part is to be tracked. That of a large object, which may be far
    /// larger than its data, is known once it has been open.
    fn has_part(&self, mapped: &[Mapped]) -> bool {
        self.file.is_some() || longest(mapped) <= SMALL
    }

    /// How much of the mappings is tracked, each counted. Once the part is chosen, a large object
    /// is open, or its mappings are gone, such as those of a child that has exited.
    fn tracked_bytes(&self, mapped: &[Mapped]) -> ByteCount {
        if !self.has_part(mapped) {
            return ByteCount::ZERO;
        }
        mapped.iter().flat_map(|(_, mapping)| mapping.addresses(&self.part)).map(|part| part.byte_count()).sum()
    }

    /// True if a process maps a part of the object and not all of it.
    fn is_mapped_in_part(&self, mapped: &[Mapped]) -> bool {
        let mut parts: HashMap<i32, RangeSet> = HashMap::new();
        for (pid, mapping) in mapped {
            parts.entry(*pid).or_default().insert(mapping.all_offsets());
        }
        let all = Address::new(0)..(Address::new(0) + self.bytes).page_aligned_up();
        parts.values().any(|part| !part.covers(all.clone()))
    }

    /// Follows the object with a view. Without one it is not known what was freed.
    fn follow(&mut self, views: &Views, mapped: &[Mapped]) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        if self.bytes > ByteCount::ZERO && !views.follow(self.id, self.bytes, mapped) {
            self.is_whole = true;
            views.begin(self.id, file, self.bytes, mapped.to_vec()).map_err(self.failed("map"))?;
        }
        Ok(())
    }

    fn collect(&mut self, dirty: &mut RangeSet, is_frozen: bool, views: Option<&Views>) -> Result<()> {
        if !is_frozen && (self.file.is_none() || !self.is_whole && self.written.is_empty()) {
            return Ok(());
        }
        let mut data = self.data().map_err(self.failed("find the data of"))?;
        if let Some(part) = &self.part {
            let mut new = data.clone();
            new.subtract(part);
            self.written.extend(&new);
        }
        match views {
            Some(views) if is_frozen => {
                let freed = views.find_freed(self.id, &data).map_err(self.failed("find the freed pages of"))?;
                self.written.extend(&freed);
                // What is not mapped counts as freed in the next freeze.
                let _ = views.map(self.id, &freed);
            }
            // What is freed from now on is noticed, and all that is mapped now is read afterwards. In other
            // collects nothing is mapped: a freed neighbour could be, unnoticed.
            Some(views) if self.is_whole => match views.map(self.id, &data) {
                Ok(()) => data.extend(&self.data().map_err(self.failed("find the data of"))?),
                // It became shorter meanwhile.
                Err(_) => views.forget(self.id),
            },
            _ => {}
        }
        if self.is_whole {
            dirty.extend(&data);
        } else {
            dirty.extend(&self.written.intersection(&data));
        }
        self.is_whole = false;
        self.written.clear();
        if is_frozen {
            self.held = data;
        }
        Ok(())
    }

    /// What holds data, by offset. The rest holds zeros.
    fn data(&self) -> io::Result<RangeSet> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let (mut data, mut at) = (RangeSet::new(), Address::MIN);
        let end = (at + ByteCount::new(file.metadata()?.len())).page_aligned_up();
        while at < end {
            let next = next_data(file, at, end)?;
            at = next.end;
            data.insert(next);
        }
        Ok(data)
    }

    fn read(&self, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        let Some(file) = &self.file else { return Ok(ranges.iter().cloned().collect()) };
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for range in ranges {
            let mine = rest.split_off_mut(..range.byte_count().to_usize());
            let mine = mine.ok_or(io::ErrorKind::InvalidInput).map_err(|kind| self.failed("read")(kind.into()))?;
            let size = ByteCount::new(range.end.get());
            let done = read_full(file, mine, range.start, size).map_err(self.failed("read"))?;
            // Beyond the end.
            let end = (range.start + ByteCount::from(done)).page_aligned_up();
            mine[done..].fill(0);
            missing.insert(end.min(range.end)..range.end);
        }
        Ok(missing)
    }
}

/// The length of the longest of these mappings.
fn longest(mapped: &[Mapped]) -> ByteCount {
    mapped.iter().map(|(_, mapping)| mapping.range.byte_count()).max().unwrap_or_default()
}

/// The objects that a process maps; none if it has ended.
fn mapped_by(pid: i32) -> Vec<ObjectId> {
    mappings_by(pid).into_iter().map(|mapping| mapping.object).collect()
}

fn mappings_by(pid: i32) -> Vec<ObjectMapping> {
    let mappings = proc::live_thread(pid).and_then(|thread| proc::maps::read(thread).ok()).unwrap_or_default();
    mappings.iter().filter_map(ObjectMapping::of).collect()
}

/// True if a process maps the object there, or elsewhere.
fn is_mapped_by(pid: i32, object: ObjectId, range: &Range) -> bool {
    let path = proc::mapped_file(pid, range);
    path.metadata().is_ok_and(|metadata| metadata.ino() == object.inode()) || mapped_by(pid).contains(&object)
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap, mprotect, munmap};

    use super::*;

    /// The reserved size of the memory of a heap.
    const RESERVED: usize = 64 << 30;

    /// Memory of a heap, and its mapping.
    fn heap() -> (*mut libc::c_void, Mapped) {
        let file = memfd_create(c"pagemark-heap", MFdFlags::MFD_CLOEXEC).unwrap();
        let length = RESERVED.try_into().unwrap();
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(None, length, protection, flags, &file, 0) }.unwrap();
        let pid = std::process::id() as i32;
        let at = Address::of(start.as_ptr().cast::<u8>());
        let mapping = mappings_by(pid).into_iter().find(|mapping| mapping.range.start == at).unwrap();
        (start.as_ptr(), (pid, mapping))
    }

    fn unmap(start: *mut libc::c_void) {
        // SAFETY: the mapping is that of a test, and nothing refers to it.
        unsafe { munmap(NonNull::new(start).unwrap(), RESERVED) }.unwrap();
    }

    #[test]
    fn an_object_whose_mappings_are_gone_takes_no_page_tables() {
        let (start, mapped) = heap();
        let mapped = [mapped];
        let mut known = SharedObject::new(mapped[0].1.object);
        known.choose_part(&mapped).unwrap();
        assert_eq!((known.file.is_some(), known.tracked_bytes(&mapped)), (true, ByteCount::ZERO), "it holds no data");
        unmap(start);
        // The list of the mappings was read before.
        let mut gone = SharedObject::new(mapped[0].1.object);
        gone.choose_part(&mapped).unwrap();
        assert_eq!((gone.file.is_some(), gone.tracked_bytes(&mapped)), (false, ByteCount::ZERO));
        assert!(!gone.has_part(&mapped), "all of it would be scanned");
    }

    /// As when a heap grows after the list of the mappings was read.
    #[test]
    fn an_object_whose_mapping_was_split_takes_no_page_tables() {
        let (start, mapped) = heap();
        // SAFETY: the mapping is this test's, and nothing refers to it.
        unsafe { mprotect(NonNull::new(start).unwrap(), 1 << 20, ProtFlags::PROT_READ) }.unwrap();
        let mapped = [mapped];
        assert!(!proc::mapped_file(mapped[0].0, &mapped[0].1.range).exists());
        let mut object = SharedObject::new(mapped[0].1.object);
        object.choose_part(&mapped).unwrap();
        assert!(object.file.is_some() && object.has_part(&mapped));
        assert_eq!(object.part.as_deref(), Some(&RangeSet::new()), "it holds no data");
        unmap(start);
    }
}
