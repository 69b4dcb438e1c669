//! A process tree as a target.

mod freeze_costs;

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use pagemark::blob::BlobHistory;
use pagemark::repository::{MappingException, MappingRecord, SpaceKind, TargetKind};
use pagemark::target::{
    Captured, CapturedSpace, Frozen, Keep, KeptCounts, Recorded, SpaceId, Target, TargetDescription, TargetError,
    TargetMemory, VisitPage, WhileFreezing,
};
use pagemark::{AddressRangeExt, Mechanism, PAGE_SIZE, Range, RangeSet, Store};
use pagemark_linux::proc::{self, Process, Status};
use pagemark_linux::scratch_directory;
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use pagemark_trace::freezer;
use pagemark_trace::inject::memory_copy::MemoryCopy;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::parked::ParkedProcesses;
use pagemark_trace::space::{AddressSpace, Moment};

use crate::files::{
    DataTree, FileTracker, FileWatch, FrozenMembers, OpenFile, TreeRecord, Users, encode_path, open_for_writing,
    record_trees, record_users, with_closed,
};
use crate::saver::{FreezeStage, FrozenState, ResumedTree, SavedState, StateSaver};
use crate::tree::{FrozenMapping, FrozenObject, FrozenProcess, ProcessTree, recorded_id};

use freeze_costs::FreezeCosts;

/// A process and all its descendants.
pub struct ProcessTarget {
    tree: ProcessTree,
    saver: Arc<dyn StateSaver>,
    /// What files held, from one checkpoint to the next.
    files: FileTracker,
    /// What the saved state held.
    states: BlobHistory,
    /// The directories that belong to the job whole.
    data: Vec<DataTree>,
    /// Finds the files that the processes have written and closed.
    watch: Option<Arc<FileWatch>>,
    command: Vec<String>,
    freeze_hook: Option<FreezeHook>,
    /// See [`ProcessTarget::set_fewest_kept_pages`].
    fewest_kept_pages: u64,
    costs: FreezeCosts,
}

/// Called with the ids of all processes, the root first, while they are frozen and their state is
/// saved.
pub type FreezeHook = Box<dyn FnMut(&[i32]) + Send>;

impl ProcessTarget {
    /// Attaches to a running process and its descendants. Written pages are found by `mechanism`;
    /// `saver` freezes the tree and saves its state. Dropped at any point, the target keeps
    /// running, untouched.
    ///
    /// # Errors
    /// The process can't be attached to, or the saver can't save it.
    pub fn attach(root: Process, mechanism: Mechanism, saver: Arc<dyn StateSaver>) -> Result<ProcessTarget> {
        saver.check(root)?;
        let tree = ProcessTree::attach(root, mechanism)?;
        let command = proc::command_line(root.pid).map_or_else(|_| Vec::new(), |line| vec![line]);
        // Images that a killed process has left there hold secrets and take up memory.
        scratch_directory::sweep(&scratch_directory::parent_in_memory());
        Ok(ProcessTarget {
            tree,
            saver,
            files: FileTracker::new(),
            states: BlobHistory::default(),
            data: Vec::new(),
            watch: None,
            command,
            freeze_hook: None,
            fewest_kept_pages: FEWEST_KEPT_PAGES,
            costs: FreezeCosts::default(),
        })
    }

    /// The process at the root of the tree.
    pub fn root_pid(&self) -> i32 {
        self.tree.root().pid
    }

    /// The mechanism by which written pages are found.
    pub fn mechanism(&self) -> Mechanism {
        self.tree.mechanism()
    }

    /// Lists the regular files that the tree has open for writing now.
    ///
    /// # Errors
    /// [`System`](crate::ErrorKind::System), [`BadPath`](crate::ErrorKind::BadPath).
    pub fn open_files(&self) -> Result<Vec<OpenFile>> {
        open_for_writing(&self.tree.pids())
    }

    /// Makes `trees` belong to the job: each checkpoint has all their files, open or closed, and a
    /// restore makes them as they were. No process outside the tree of processes may write there.
    pub fn set_data(&mut self, trees: Vec<DataTree>) {
        self.data = trees;
    }

    /// Makes the files belong to the job that `watch` finds. It must follow the root of the tree.
    pub fn set_watch(&mut self, watch: Arc<FileWatch>) {
        self.watch = Some(watch);
    }

    /// Lists the files that belong to the job now: those that the tree has open for writing, those
    /// that it has written and closed, and all files of the data trees. Also returns the rest of
    /// the trees.
    fn list_files(&mut self) -> Result<(Vec<OpenFile>, Vec<TreeRecord>)> {
        let mut files = self.open_files()?;
        let users = Users::of_tree(self.root_pid(), &self.tree.pids())?;
        self.files.set_users(users.clone());
        let mut trees = Vec::with_capacity(self.data.len());
        for tree in &self.data {
            let (all, record) = tree.list_with(files, &users)?;
            files = all;
            trees.push(record);
        }
        if let Some(watch) = &self.watch {
            let written = watch.list(&self.data, &users)?;
            files = with_closed(files, written.files);
            trees.extend(written.trees);
        }
        Ok((files, trees))
    }

    /// Has `hook` called in each freeze, so that something else can be captured at the same
    /// instant. Its time is downtime.
    pub fn set_freeze_hook(&mut self, hook: FreezeHook) {
        self.freeze_hook = Some(hook);
    }

    /// Sets for how many pages a process is forked in a copy-on-write checkpoint; the pages of one
    /// with fewer are copied in the freeze. By default 2,048. With the strategy
    /// [`Auto`](pagemark::checkpointer::Strategy::Auto), a process is forked if that has taken less
    /// time than to copy in the last freezes.
    pub fn set_fewest_kept_pages(&mut self, pages: u64) {
        self.fewest_kept_pages = pages;
    }

    /// Freezes the tree and lets it resume, without storing anything. Returns how long it was
    /// frozen: what each checkpoint takes besides for memory and files.
    ///
    /// # Errors
    /// Those of [`Target::freeze`]. The tree runs.
    pub fn stop_time(&mut self) -> Result<Duration> {
        let objects = self.tree.objects();
        let machines = GivenUp::of(&self.tree, &*self.saver)?;
        let state = self.saver.freeze(self.tree.root(), &objects, &mut |_| Ok(()))?;
        self.tree.spaces(Moment::Frozen)?;
        let waited = machines.map(GivenUp::release);
        let thawed = state.thaw(&self.tree.address_spaces())?;
        self.tree.take_stopped_time();
        Ok(standstill(waited, &thawed).1)
    }

    /// Tracks the shared memory of the tree from now on, unless the saver keeps it whole. Each
    /// checkpoint does so itself; who observes the tree without one calls it.
    ///
    /// # Errors
    /// Those of [`TargetMemory::spaces`].
    pub fn track_shared_memory(&mut self) -> Result<()> {
        let pids: Vec<i32> = freezer::members(self.root_pid())?.iter().map(|member| member.process.pid).collect();
        self.tree.set_has_objects(self.saver.leaves_objects_out(&pids));
        // The objects are known before the first round, since a freeze tracks no new ones.
        self.tree.spaces(Moment::BeforeFreeze)?;
        Ok(())
    }

    /// Copies the content of open files while the tree runs, so that less is left for the freeze.
    /// Returns the number of bytes read from them.
    ///
    /// # Errors
    /// The files cannot be read or stored; then call [`Target::capture_failed`], since it is no
    /// longer known what was written.
    pub fn precopy_files(&mut self, store: &mut dyn Store) -> Result<u64> {
        self.tree.spaces(Moment::BeforeFreeze)?;
        self.tree.collect_shared()?;
        // Listed after collecting: what is written through a mapping that comes in between is collected the
        // next time.
        let (files, _) = self.list_files()?;
        let written = self.tree.take_shared_written();
        self.files.precopy(&files, &written, store)
    }

    /// Copies the content of files while the tree is frozen. Returns the rest of the data trees.
    fn copy_files(&mut self) -> Result<Vec<TreeRecord>> {
        let (files, trees) = self.list_files()?;
        let written = self.tree.take_shared_written();
        self.files.freeze_copy(&files, &written)?;
        Ok(trees)
    }
}

impl TargetMemory for ProcessTarget {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.tree.spaces(Moment::BeforeFreeze)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        self.tree.collect(space, dirty, Moment::BeforeFreeze)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.tree.read(space, ranges, buffer, Moment::BeforeFreeze)
    }
}

impl Target for ProcessTarget {
    type Frozen<'target> = FrozenTree<'target>;

    fn description(&self) -> TargetDescription {
        TargetDescription {
            label: format!("process {}", self.root_pid()),
            command: self.command.clone(),
            kind: if self.saver.is_restorable() { TargetKind::Process } else { TargetKind::Memory },
            mechanism: self.mechanism(),
        }
    }

    fn precopy(&mut self, store: &mut dyn Store) -> Result<(), pagemark::Error> {
        self.track_shared_memory()?;
        if self.saver.is_restorable() {
            self.precopy_files(store)?;
        }
        Ok(())
    }

    fn freeze(&mut self, meanwhile: WhileFreezing<'_, Error>) -> Result<FrozenTree<'_>> {
        let (root, objects) = (self.tree.root(), self.tree.objects());
        let machines = GivenUp::of(&self.tree, &*self.saver)?;
        let tree = &mut self.tree;
        let meanwhile = &mut |stage| match stage {
            FreezeStage::Freezing => meanwhile(&mut FreezingTree(tree)),
            FreezeStage::Saving => {
                tree.find_data_pages();
                Ok(())
            }
        };
        let state = self.saver.freeze(root, &objects, meanwhile)?;
        if let Some(hook) = &mut self.freeze_hook {
            let pids: Vec<i32> = freezer::members(root.pid)?.iter().map(|member| member.process.pid).collect();
            hook(&pids);
        }
        Ok(FrozenTree { target: self, state, machines, copies: KeptMemory::default() })
    }

    fn capture_failed(&mut self) {
        self.files.forget();
        self.states.forget();
        self.tree.close_objects();
        // That time belongs to the checkpoint that failed.
        self.tree.take_stopped_time();
    }
}

/// A tree whose processes may be stopped at any moment.
struct FreezingTree<'target>(&'target mut ProcessTree);

impl TargetMemory for FreezingTree<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.0.spaces(Moment::Freezing)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        self.0.collect(space, dirty, Moment::Freezing)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.0.read(space, ranges, buffer, Moment::Freezing)
    }
}

/// A process tree that is frozen. Dropped, the tree resumes.
pub struct FrozenTree<'target> {
    target: &'target mut ProcessTarget,
    state: Box<dyn FrozenState>,
    machines: Option<GivenUp>,
    copies: KeptMemory,
}

/// See [`ProcessTarget::set_fewest_kept_pages`].
const FEWEST_KEPT_PAGES: u64 = 2048;

/// The memory of processes as it was in a freeze: a copy of each that had much to keep.
#[derive(Default)]
struct KeptMemory {
    copies: HashMap<SpaceId, MemoryCopy>,
    /// Pages that were read.
    pages: u64,
}

impl KeptMemory {
    /// Keeps pages that a copy has. Returns those that it lacks: the program keeps them from its
    /// children, or shares them with others.
    fn keep(&mut self, space: SpaceId, copy: MemoryCopy, pages: &RangeSet) -> Result<RangeSet> {
        let mut rest = pages.clone();
        rest.subtract(&copy.present(pages)?);
        self.copies.insert(space, copy);
        Ok(rest)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, pagemark::Error> {
        let copy = self.copies.get(&space).ok_or_else(pagemark::Error::cannot_keep_pages)?;
        self.pages += ranges.iter().map(|range| range.byte_count().pages_rounded_up()).sum::<u64>();
        copy.read(ranges, buffer).map_err(TargetError::into_error)
    }
}

/// The machines that a tree has given up for its tracker. Dropped, it may make them again.
struct GivenUp {
    /// When the first process began to wait.
    since: Instant,
    machines: ParkedProcesses,
}

impl GivenUp {
    /// None if whoever saves the state has the tree do so, or there is no need.
    fn of(tree: &ProcessTree, saver: &dyn StateSaver) -> Result<Option<GivenUp>> {
        let is_needed = tree.mechanism().process_tracking().is_ok_and(|tracking| tracking.needs_parking);
        let since = Instant::now();
        let machines = (is_needed && !saver.gives_up_machines()).then(|| ParkedProcesses::park_tree(tree.root().pid));
        Ok(machines.transpose()?.map(|machines| GivenUp { since, machines }))
    }

    /// The processes may make them again when they run. Returns since when they have waited.
    fn release(mut self) -> Instant {
        self.machines.release();
        self.since
    }
}

/// Since when a tree that has resumed stood still, and for how long. Its first process may have
/// waited for its machine since `waited`.
fn standstill(waited: Option<Instant>, thawed: &ResumedTree) -> (Instant, Duration) {
    let since = waited.map_or(thawed.frozen_at, |waited| waited.min(thawed.frozen_at));
    (since, thawed.frozen_time + (thawed.frozen_at - since))
}

impl TargetMemory for FrozenTree<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.target.tree.spaces(Moment::Frozen)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        self.target.tree.collect(space, dirty, Moment::Frozen)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        let begin = Instant::now();
        let missing = self.target.tree.read(space, ranges, buffer, Moment::Frozen)?;
        self.target.costs.copied((buffer.len() / PAGE_SIZE) as u64, begin.elapsed());
        Ok(missing)
    }
}

impl<'target> Frozen for FrozenTree<'target> {
    type Captured = CapturedTree<'target>;

    fn keep(&mut self, space: SpaceId, pages: &RangeSet, wanted: Keep) -> Result<Option<RangeSet>> {
        // Shared memory has no process, and a fork does not keep it.
        let Some(pid) = self.target.tree.pid_of(space) else { return Ok(Some(pages.clone())) };
        let page_table_bytes = LazyCell::new(|| Status::read(pid).map_or(0, |status| status.page_table_bytes));
        let (count, costs) = (pages.page_count(), &self.target.costs);
        let is_worth_it = match wanted {
            Keep::Always => count >= self.target.fewest_kept_pages,
            // Most processes have too few pages for the fork of the smallest one.
            Keep::IfShorter => costs.fork_pays(count, 0) && costs.fork_pays(count, *page_table_bytes),
        };
        if !is_worth_it {
            return Ok(Some(pages.clone()));
        }
        let page_table_bytes = *page_table_bytes;
        let begin = Instant::now();
        let Some(copy) = self.state.copy_memory(pid)? else { return Ok(None) };
        self.target.costs.forked(page_table_bytes, begin.elapsed());
        self.target.tree.leave_out_forks();
        self.copies.keep(space, copy, pages).map(Some)
    }

    fn thaw(self) -> Result<CapturedTree<'target>> {
        let FrozenTree { target, state, machines, copies } = self;
        let is_restorable = target.saver.is_restorable();
        let pid_here: fn(&AddressSpace) -> RecordedPid = |space| RecordedPid::new(space.pid());
        let processes = target.tree.describe(if is_restorable { AddressSpace::image_pid } else { pid_here });
        let mut objects = target.tree.describe_objects();
        let members = FrozenMembers::now(processes.iter().map(|process| process.pid).collect());
        // Files are copied while the tree is frozen, but whatever fails there, the tree resumes first.
        let files = if is_restorable { target.copy_files() } else { Ok(Vec::new()) };
        let waited = machines.map(GivenUp::release);
        let thawed = state.thaw(&target.tree.address_spaces())?;
        let (frozen_at, frozen_time) = standstill(waited, &thawed);
        let trees = files?;
        if let Some(left_out) = thawed.state.objects_left_out() {
            let known: HashSet<ObjectId> = objects.iter().map(|object| object.object).collect();
            if let Some(lost) = left_out.difference(&known).next() {
                let reason = format!("the object with inode {} was not tracked", lost.inode());
                return Err(Error::about(ErrorKind::Track, Object::None, reason).during("save shared memory:"));
            }
            // The state has the others.
            objects.retain(|object| left_out.contains(&object.object));
        }
        let taken_at = SystemTime::now() - frozen_at.elapsed();
        // Registering new mappings stopped processes, too.
        let downtime = frozen_time + target.tree.take_stopped_time();
        target.tree.begin_interval()?;
        let data: Vec<PathBuf> = target.data.iter().map(|tree| tree.path().to_owned()).collect();
        let (files, states, state) = (&mut target.files, &mut target.states, thawed.state);
        Ok(CapturedTree { files, states, data, trees, members, processes, objects, state, taken_at, downtime, copies })
    }
}

/// What a freeze captured of a process tree besides its memory. The tree runs.
pub struct CapturedTree<'target> {
    files: &'target mut FileTracker,
    states: &'target mut BlobHistory,
    /// The paths of the data trees.
    data: Vec<PathBuf>,
    trees: Vec<TreeRecord>,
    members: FrozenMembers,
    processes: Vec<FrozenProcess>,
    /// The shared memory that the state does not have.
    objects: Vec<FrozenObject>,
    state: Box<dyn SavedState>,
    taken_at: SystemTime,
    downtime: Duration,
    copies: KeptMemory,
}

impl Captured for CapturedTree<'_> {
    fn read_kept(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, pagemark::Error> {
        self.copies.read(space, ranges, buffer)
    }

    fn kept_counts(&self) -> KeptCounts {
        KeptCounts { concurrent_pages: self.copies.pages, ..KeptCounts::default() }
    }

    fn release_kept(&mut self) {
        self.copies.copies.clear();
    }

    fn taken_at(&self) -> SystemTime {
        self.taken_at
    }

    fn downtime(&self) -> Duration {
        self.downtime
    }

    fn spaces(&self) -> Vec<CapturedSpace> {
        let captured: HashSet<ObjectId> = self.objects.iter().map(|object| object.object).collect();
        let record = |mapping| self.mapping_record(mapping, &captured);
        let processes = self.processes.iter();
        let spaces = processes.map(|process| CapturedSpace {
            space: process.space,
            id: SpaceId::try_from(process.recorded_pid.get()).unwrap_or_default(),
            label: process.name.clone(),
            kind: SpaceKind::Process { pid: process.recorded_pid.get() },
            mappings: process.mappings.iter().map(record).collect(),
            held_pages: self.state.held_pages(process.recorded_pid),
        });
        let objects = self.objects.iter().map(|object| CapturedSpace {
            space: object.space,
            id: recorded_id(object.object),
            label: String::new(),
            kind: SpaceKind::SharedMemory { bytes: object.bytes, inode: object.object.inode() },
            mappings: Vec::new(),
            held_pages: Some(object.held_pages.clone()),
        });
        spaces.chain(objects).collect()
    }

    fn saved_pages(&self, space: SpaceId, visit: VisitPage<'_>) -> Result<(), pagemark::Error> {
        let process = self.processes.iter().find(|process| process.space == space);
        process.map_or(Ok(()), |process| self.state.saved_pages(process.recorded_pid, visit))
    }

    fn record(self, store: &mut dyn Store) -> Result<Recorded, pagemark::Error> {
        let mut state = self.state.record(self.states, store)?;
        self.states.end_checkpoint();
        if !self.trees.is_empty() {
            state.push(record_trees(&self.trees, store)?);
        }
        state.push(record_users(self.files.users(), store)?);
        self.files.find_other_writers(&self.members, &self.data)?;
        let files = self.files.finish(store)?;
        Ok(Recorded { files, state })
    }
}

impl CapturedTree<'_> {
    /// `captured` are the objects of shared memory that the state does not have.
    fn mapping_record(&self, frozen: &FrozenMapping, captured: &HashSet<ObjectId>) -> MappingRecord {
        let FrozenMapping { mapping, exception, object } = frozen;
        let is_in_state = object.is_some_and(|object| !captured.contains(&object));
        let exception = if is_in_state { Some(MappingException::SavedWhole) } else { *exception };
        // A state of registers has no memory.
        let has_memory = self.state.objects_left_out().is_some();
        let exception = exception.filter(|exception| has_memory || !exception.is_of_shared_memory());
        MappingRecord {
            start: mapping.start.get(),
            end: mapping.end.get(),
            permissions: mapping.permissions(),
            offset: mapping.offset,
            name: encode_path(Path::new(OsStr::from_bytes(&mapping.name))),
            exception,
            memory: object.filter(|object| captured.contains(object)).map(recorded_id),
        }
    }
}
