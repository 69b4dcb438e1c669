//! Tests of the whole repository: against a model, under faults, with damaged files, and with
//! several users at the same time.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use pagemark_testing::{assert_oracle, assert_oracle_eq, finding};
use proptest::prelude::*;
use tempfile::TempDir;

use super::format::{ANY_SPACES, PROCESSES_ONLY};
use super::manifest::MANIFEST_VERSION;
use super::*;
use crate::backend::faults::{Fault, FaultyBackend};
use crate::backend::{LeaseMode, Leased, ListKind, LocalBackend, MemoryBackend};
use crate::error::{Error, ErrorKind, Object};
use crate::{ByteCount, ChangedPage, Kind, Mechanism, PageNumber, PageTree, Store};

mod false_entries;

/// The content of a checkpoint: the page number, and the number from which the content is made.
type Pages = BTreeMap<u64, u64>;
/// All checkpoints.
type Model = BTreeMap<(String, u64), Pages>;

fn manifest(job: &str, root: ContentId, pages: u64) -> Manifest {
    Manifest {
        job: job.into(),
        sequence: 0,
        taken_unix_us: 0,
        command: vec!["program".into()],
        program: None,
        mechanism: Mechanism::Full,
        kind: TargetKind::Memory,
        spaces: vec![SpaceRecord::of_process(17, "program".into(), root, pages, Vec::new())],
        files: Vec::new(),
        state: Vec::new(),
        cost: Cost::default(),
    }
}

/// The pages of a tree by [`Store::get_many`], which must agree with reads of single pages.
fn read_many(store: &dyn Store, tree: &PageTree) -> Result<Vec<(u64, [u8; PAGE_SIZE])>, Error> {
    let (numbers, ids): (Vec<u64>, Vec<ContentId>) = tree.iter().map(|(page, id)| (page.get(), id)).unzip();
    let pages = Mutex::new(BTreeMap::new());
    store.get_many(Kind::Page, &ids, &|pieces, content| {
        for piece in pieces {
            let page = content[piece.bytes.clone()].try_into().unwrap();
            assert_eq!(pages.lock().unwrap().insert(numbers[piece.position], page), None, "visited twice");
        }
        std::ops::ControlFlow::Continue(())
    })?;
    Ok(pages.into_inner().unwrap().into_iter().collect())
}

/// Content made of a number: zeros for 0, half of the others can be compressed. The others are of
/// two families; pages of a family differ in a few bytes, so that one can be stored as a delta of
/// another.
fn page(number: u64) -> [u8; PAGE_SIZE] {
    thread_local! {
        static MADE: RefCell<HashMap<u64, [u8; PAGE_SIZE]>> = RefCell::default();
    }
    let make = || {
        let mut random = (number % 4).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::array::from_fn(|at| {
            if number.is_multiple_of(2) || at / 8 == number as usize % (PAGE_SIZE / 8) {
                return number.to_le_bytes()[at % 8];
            }
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 24) as u8
        })
    };
    MADE.with_borrow_mut(|made| *made.entry(number).or_insert_with(make))
}

/// Commits pages. Those of the job's last commit in this thread, failed ones included, are given to
/// the writer as what the pages were.
fn commit(repository: &Repository, job: &str, pages: &Pages) -> Result<CheckpointInfo, Error> {
    /// A page of a job in a repository.
    type ContentLocation = ([u8; 16], String, u64);
    thread_local! {
        static LAST: RefCell<HashMap<ContentLocation, ContentId>> = RefCell::default();
    }
    let mut writer = repository.writer("a test", Duration::ZERO)?;
    let mut tree = PageTree::new();
    let place = |number: u64| (repository.id(), job.to_owned(), number);
    let contents: Vec<_> = pages.values().map(|&content| page(content)).collect();
    let last = |&number: &u64| LAST.with_borrow(|last| last.get(&place(number)).copied()).unwrap_or(ContentId::ZERO);
    let changed = pages.keys().zip(&contents).map(|(number, content)| ChangedPage { last: last(number), content });
    let changed: Vec<_> = changed.collect();
    let ids = match changed[..] {
        [one] => vec![writer.put_changed(one.last, one.content)?],
        _ => writer.put_changed_pages(&changed)?,
    };
    for (&number, id) in pages.keys().zip(ids) {
        LAST.with_borrow_mut(|last| last.insert(place(number), id));
        tree.set(PageNumber::new(number), id);
    }
    let root = tree.save(&mut writer)?;
    writer.commit(manifest(job, root, tree.page_count()))
}

fn read(repository: &Repository, job: &str, sequence: u64) -> Result<Vec<(u64, [u8; PAGE_SIZE])>, Error> {
    let checkpoint = repository.read(job, sequence)?;
    let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint)?;
    let mut pages = Vec::new();
    for (number, id) in tree.iter() {
        let mut content = [0; PAGE_SIZE];
        checkpoint.get_page(id, &mut content)?;
        pages.push((number.get(), content));
    }
    assert_oracle!(read_many(&checkpoint, &tree)? == pages, "{job}@{sequence}: many pages read at once differ");
    Ok(pages)
}

fn content(pages: &Pages) -> Vec<(u64, [u8; PAGE_SIZE])> {
    pages.iter().filter(|(_, content)| **content != 0).map(|(&number, &content)| (number, page(content))).collect()
}

/// The checkpoints of the repository, each compared with its model.
fn check(repository: &Repository, model: &Model) -> BTreeSet<(String, u64)> {
    let mut found = BTreeSet::new();
    for job in repository.jobs().unwrap() {
        for info in repository.checkpoints(&job).unwrap() {
            let expected = &model[&(job.clone(), info.sequence)];
            let name = format!("{job}@{}", info.sequence);
            let read = read(repository, &job, info.sequence);
            let read = read.unwrap_or_else(|error| finding(&format!("{name} cannot be read: {error}")));
            assert_oracle!(read == content(expected), "{name} differs");
            found.insert((job.clone(), info.sequence));
        }
    }
    found
}

fn files(path: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(self::files(&path));
        }
        files.insert(path);
    }
    files
}

/// A backend, and the directory that it is in, if any.
struct Bed {
    backend: Arc<dyn Backend>,
    directory: Option<TempDir>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kept {
    InMemory,
    Locally,
}

const BOTH: [Kept; 2] = [Kept::InMemory, Kept::Locally];

impl Bed {
    /// An empty backend; a local one does not wait for the disk.
    fn new(kept: Kept) -> Bed {
        match kept {
            Kept::InMemory => Bed { backend: Arc::new(MemoryBackend::new()), directory: None },
            Kept::Locally => {
                let directory = tempfile::tempdir().unwrap();
                let backend = LocalBackend::create_directory(&directory.path().join("repository")).unwrap();
                Bed { backend: Arc::new(backend.unsynced()), directory: Some(directory) }
            }
        }
    }

    fn kept(&self) -> Kept {
        if self.directory.is_some() { Kept::Locally } else { Kept::InMemory }
    }

    /// Another backend of this kind with the same objects.
    fn copy(&self) -> Bed {
        let copy = Bed::new(self.kept());
        copy.backend.prepare(&[PACKS, INDEXES, CHECKPOINTS]).unwrap();
        for name in objects(&*self.backend) {
            put(&*copy.backend, &name, &get(&*self.backend, &name));
        }
        copy
    }

    fn open(&self) -> Repository {
        Repository::on(self.backend.clone()).unwrap()
    }

    fn has_staged(&self) -> bool {
        match &self.directory {
            Some(directory) => {
                files(directory.path()).iter().any(|path| path.extension().is_some_and(|end| end == "tmp"))
            }
            None => false,
        }
    }
}

/// The names of all objects.
fn objects(backend: &dyn Backend) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        for entry in backend.list(&directory).unwrap() {
            let name = if directory.is_empty() { entry.name } else { format!("{directory}/{}", entry.name) };
            match entry.kind == ListKind::Directory {
                true => directories.push(name),
                false => drop(names.insert(name)),
            }
        }
    }
    names
}

fn get(backend: &dyn Backend, name: &str) -> Vec<u8> {
    let object = backend.open(name).unwrap().unwrap();
    let mut content = vec![0; object.bytes().unwrap() as usize];
    object.read_at(&mut content, 0).unwrap();
    content
}

fn put(backend: &dyn Backend, name: &str, content: &[u8]) {
    let mut object = backend.create(name).unwrap();
    object.append(&[content]).unwrap();
    object.publish().unwrap();
}

/// A repository of two jobs with some checkpoints each, most of which share content.
fn example(kept: Kept, checkpoints: u64) -> (Bed, Repository, Model) {
    let bed = Bed::new(kept);
    let repository = Repository::create_on(bed.backend.clone()).unwrap();
    let mut model = Model::new();
    for round in 0..checkpoints {
        let job = ["one", "two"][(round % 2) as usize];
        let pages: Pages = (0..24).map(|number| (number * 700, number * (round / 3 + 1) % 97)).collect();
        let info = commit(&repository, job, &pages).unwrap();
        model.insert((job.into(), info.sequence), pages);
    }
    (bed, repository, model)
}

#[test]
fn committed_content_is_read() {
    for kept in BOTH {
        let (bed, repository, model) = example(kept, 30);
        for repository in [&repository, &bed.open()] {
            assert_eq!(repository.jobs().unwrap(), ["one", "two"]);
            assert_oracle!(check(repository, &model).iter().eq(model.keys()), "checkpoints are lost");
        }
        let info = repository.checkpoints("one").unwrap()[0];
        let checkpoint = repository.read("one", 1).unwrap();
        assert_eq!(checkpoint.manifest.cost.written_bytes, info.written_bytes);
        let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();
        assert_eq!(checkpoint.get(Kind::Page, tree.get(PageNumber::new(700))).unwrap(), page(1));
        assert!(matches!(repository.read("one", 99), Err(error) if error.kind() == ErrorKind::NoCheckpoint));
        assert!(repository.checkpoints("three").unwrap().is_empty());
        assert!(repository.inner.view().tables.len() < 12, "tables are not merged");
        let report = repository.verify(&mut |_| {}).unwrap();
        assert_eq!((report.damaged, report.checkpoints), (Vec::new(), 30));
    }
}

#[test]
fn many_pieces_are_read_at_once() {
    let (_bed, repository, _) = example(Kept::Locally, 3);
    let pages: Pages = (0..300).map(|number| (number * 7, number % 50 + 1)).collect();
    let info = commit(&repository, "many", &pages).unwrap();
    // Equal pages are one piece; `read` compares the two ways to read.
    assert_oracle!(read(&repository, "many", info.sequence).unwrap() == content(&pages), "many pages differ");
    let checkpoint = repository.read("many", info.sequence).unwrap();
    let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();

    let ids: Vec<ContentId> = [ContentId::ZERO, tree.get(PageNumber::new(7)), ContentId::ZERO].into();
    let visited = Mutex::new(BTreeMap::new());
    let visit = |pieces: &[crate::store::Piece], content: &[u8]| {
        let mut visited = visited.lock().unwrap();
        visited.extend(pieces.iter().map(|piece| (piece.position, content[piece.bytes.clone()].to_vec())));
        std::ops::ControlFlow::Continue(())
    };
    checkpoint.get_many(Kind::Page, &ids, &visit).unwrap();
    assert_eq!(visited.into_inner().unwrap().into_values().collect::<Vec<_>>(), [page(0), page(2), page(0)]);

    let visits = Mutex::new(0);
    let ids: Vec<ContentId> = tree.iter().map(|(_, id)| id).collect();
    let visit = |_: &[crate::store::Piece], _: &[u8]| {
        *visits.lock().unwrap() += 1;
        std::ops::ControlFlow::Break(())
    };
    checkpoint.get_many(Kind::Page, &ids, &visit).unwrap();
    // A thread may have had a batch of its own when the first one ended the read.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    assert!((1..=threads).contains(&visits.into_inner().unwrap()));
    let unknown = [tree.get(PageNumber::new(7)), ContentId([9; 16])];
    let error = checkpoint.get_many(Kind::Page, &unknown, &|_, _| std::ops::ControlFlow::Continue(())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing);
}

/// Records of zeros are short, however long the content is.
#[test]
fn of_long_pieces_only_one_is_held_at_a_time() {
    const PIECE_BYTES: usize = 3 << 20;
    let (bed, repository, _) = example(Kept::InMemory, 0);
    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
    let content_of = |number: u8| {
        let mut content = vec![0; PIECE_BYTES];
        content[0] = number;
        content
    };
    let put = |number| writer.put(Kind::Manifest, &content_of(number)).unwrap();
    let ids: Vec<ContentId> = (1..20).map(put).collect();
    let sequence = writer.commit(manifest("long", ContentId::ZERO, 0)).unwrap().sequence;
    let checkpoint = bed.open().read("long", sequence).unwrap();
    // The bytes that threads hold now, and the most at a time; the pieces.
    let state = Mutex::new((0, 0, BTreeSet::new()));
    let visit = |pieces: &[crate::store::Piece], content: &[u8]| {
        let mut held = state.lock().unwrap();
        held.0 += content.len();
        held.1 = held.1.max(held.0);
        drop(held);
        for piece in pieces {
            let number = piece.position as u8 + 1;
            assert_oracle!(content[piece.bytes.clone()] == content_of(number), "piece {number} differs");
            assert!(state.lock().unwrap().2.insert(number), "visited twice");
        }
        state.lock().unwrap().0 -= content.len();
        std::ops::ControlFlow::Continue(())
    };
    checkpoint.get_many(Kind::Manifest, &ids, &visit).unwrap();
    let (_, most, visited) = state.into_inner().unwrap();
    assert_eq!(visited, (1..20).collect());
    assert_eq!(most, PIECE_BYTES);
}

#[test]
fn content_is_written_once() {
    for kept in BOTH {
        let (_bed, repository, mut model) = example(kept, 0);
        let pages: Pages = (0..200).map(|number| (number, 2 * number + 1)).collect();
        let first = commit(&repository, "one", &pages).unwrap();
        assert!(first.written_bytes > ByteCount::of_pages(200).get());
        let again = commit(&repository, "two", &pages).unwrap();
        assert!(again.written_bytes < 2048, "{} bytes for what was there", again.written_bytes);
        let zeros = commit(&repository, "two", &(0..200).map(|number| (number, 0)).collect()).unwrap();
        assert!(zeros.written_bytes < 2048, "{} bytes for zeros", zeros.written_bytes);
        model.insert(("one".into(), 1), pages.clone());
        model.insert(("two".into(), 1), pages);
        model.insert(("two".into(), 2), Pages::new());
        check(&repository, &model);
    }
}

#[test]
fn only_the_owner_reads() {
    let (_bed, repository, _) = example(Kept::Locally, 8);
    for path in files(repository.path()).into_iter().chain([repository.path().to_owned()]) {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
    }
}

#[test]
fn writers_write_at_once_and_only_a_prune_alone() {
    for kept in BOTH {
        let (bed, repository, _) = example(kept, 1);
        let writer = repository.writer("writes", Duration::ZERO).unwrap();
        repository.writer("writes too", Duration::ZERO).unwrap();
        assert!(repository.prune_within(Duration::ZERO, &Retention::default(), None).unwrap().is_none());
        drop(writer);
        assert!(repository.prune_within(Duration::ZERO, &Retention::default(), None).unwrap().is_some());
        let alone = lock::Lock::alone(&*bed.backend, "prunes", Duration::ZERO).unwrap();
        let error = match repository.writer("waits", Duration::from_millis(30)) {
            Err(error) if error.kind() == ErrorKind::InUse => error.to_string(),
            _ => panic!("it writes beside a prune"),
        };
        assert!(error.contains(&format!("process {} (prunes)", std::process::id())), "{error}");
        drop(alone);
        repository.writer("waits", Duration::ZERO).unwrap();
    }
}

#[test]
fn who_goes_on_is_waited_for() {
    let (bed, repository, _) = example(Kept::InMemory, 1);
    let patience = Duration::from_secs(1);
    let Leased::Granted(alone) = bed.backend.lease("lock", LeaseMode::Alone, "goes on").unwrap() else {
        panic!("it is held")
    };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| repository.writer("waits", patience).map(drop));
        // Longer than the patience, in steps that are much shorter.
        for _ in 0..40 {
            std::thread::sleep(patience / 20);
            alone.show_progress();
        }
        assert!(!waiting.is_finished(), "it gave up, or did not wait");
        drop(alone);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn content_that_another_writer_saw_stays_though_its_commit_fails() {
    let (bed, _, _) = example(Kept::InMemory, 1);
    let new: Pages = (0..90).map(|number| (number * 3, number + 5000)).collect();
    // Every step of a commit fails once, after which another writer stores the same content.
    let count = FaultyBackend::new(bed.copy().backend.clone(), Fault::None, 1);
    commit(&Repository::on(Arc::new(count.clone())).unwrap(), "one", &new).unwrap();
    for at in 1..=count.steps() {
        let bed = bed.copy();
        let other = bed.open();
        let faulty = FaultyBackend::new(bed.backend.clone(), Fault::Error { at }, 1);
        let _ = commit(&Repository::on(Arc::new(faulty)).unwrap(), "one", &new);
        commit(&other, "two", &new).unwrap();
        assert_oracle_eq!(other.verify(&mut |_| {}).unwrap().damaged, [], "step {at}: what is damaged");
    }
}

#[test]
fn a_job_is_claimed_by_one_program() {
    for kept in BOTH {
        let (bed, repository, _) = example(kept, 1);
        let claim = repository.claim("web", "process 7 (web --port 80)").unwrap();
        let refused = bed.open().claim("web", "process 8 (web --port 81)");
        let error = refused.err().expect("it is claimed");
        assert_eq!(error.kind(), ErrorKind::JobInUse);
        assert_eq!(error.to_string(), "the job web is in use by process 7 (web --port 80)");
        let other = bed.open().claim("web-2", "process 8").unwrap();
        assert_eq!((claim.job(), other.job()), ("web", "web-2"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                drop(claim);
            });
            bed.open().claim_within("web", "process 8", Duration::from_secs(300)).unwrap();
        });
    }
}

#[test]
fn the_last_checkpoint_of_a_job_that_goes_on_is_not_pruned() {
    let (_bed, repository, _) = example(Kept::Locally, 1);
    let hold = repository.hold("one", 1).unwrap();
    commit(&repository, "one", &Pages::new()).unwrap();
    let retention = Retention { keep_last: Some(1), keep_every: None };
    let report = repository.prune(&retention, Some("one"), &mut |_| {}).unwrap();
    assert_eq!((report.removed, report.in_use), (vec![], vec![("one".into(), 1)]));
    drop(hold);
    let report = repository.prune(&retention, Some("one"), &mut |_| {}).unwrap();
    assert_eq!(report.removed, [("one".into(), 1)]);
}

#[test]
fn uncommitted_content_leaves_nothing() {
    let (_bed, repository, model) = example(Kept::Locally, 3);
    let before = files(repository.path());
    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
    for number in 1000..1200 {
        let id = writer.put(Kind::Page, &page(number)).unwrap();
        assert_eq!(writer.get(Kind::Page, id).unwrap(), page(number));
        let mut content = [0; PAGE_SIZE];
        writer.get_page(id, &mut content).unwrap();
        assert_eq!(content, page(number));
    }
    assert_ne!(files(repository.path()), before);
    drop(writer);
    assert_eq!(files(repository.path()), before);
    check(&repository, &model);
}

#[test]
fn a_checkpoint_names_only_stored_content() {
    for kept in BOTH {
        let (_bed, repository, _) = example(kept, 1);
        let writer = repository.writer("a test", Duration::ZERO).unwrap();
        let nowhere = ContentId([9; 16]);
        let refused = writer.commit(manifest("one", nowhere, 1));
        assert!(matches!(refused, Err(error) if error.object() == &Object::Content(nowhere)));
    }
}

#[test]
fn a_directory_that_is_no_repository_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    assert!(matches!(Repository::open(&path), Err(error) if error.kind() == ErrorKind::NotARepository));
    Repository::open_or_create(&path).unwrap();
    assert!(matches!(Repository::create(&path), Err(error) if error.kind() == ErrorKind::Exists));
    Repository::open_or_create(&path).unwrap();
    assert!(matches!(Repository::create(directory.path()), Err(error) if error.kind() == ErrorKind::NotEmpty));
    let config = std::fs::read_to_string(path.join("config")).unwrap();
    std::fs::write(path.join("config"), config.replace("\"format\": 1", "\"format\": 4")).unwrap();
    assert!(
        matches!(Repository::open(&path), Err(error) if error.kind() == ErrorKind::NewerFormat { found: 4, known: 3 })
    );
    std::fs::write(path.join("config"), &config[..config.len() / 2]).unwrap();
    assert!(Repository::open(&path).unwrap().config_damage().is_some());
    std::fs::remove_file(path.join("config.copy")).unwrap();
    assert!(matches!(Repository::open(&path), Err(error) if error.kind() == ErrorKind::DamagedConfig));
    let repository = {
        std::fs::write(path.join("config"), &config).unwrap();
        Repository::open(&path).unwrap()
    };
    std::fs::remove_dir_all(&path).unwrap();
    Repository::create(&path).unwrap();
    assert!(matches!(repository.writer("a test", Duration::ZERO), Err(error) if error.kind() == ErrorKind::Replaced));
    for name in ["", ".", "..", ".hidden", "a/b", "a\0b", "ä", &"a".repeat(65)] {
        assert!(
            matches!(repository.checkpoints(name), Err(error) if error.kind() == ErrorKind::InvalidName),
            "{name:?}"
        );
    }
}

#[test]
fn without_index_files_everything_is_found() {
    for kept in BOTH {
        let (bed, repository, mut model) = example(kept, 20);
        let count = |directory: &str| objects(&*bed.backend).iter().filter(|name| name.starts_with(directory)).count();
        assert!(count(INDEXES) > 0);
        let indexes = objects(&*bed.backend).into_iter().filter(|name| name.starts_with(INDEXES));
        indexes.for_each(|name| bed.backend.remove(&name).unwrap());
        for repository in [&repository, &bed.open()] {
            assert_oracle!(check(repository, &model).iter().eq(model.keys()), "checkpoints are lost");
            let before = count(PACKS);
            let pages = model[&("one".into(), 1)].clone();
            let info = commit(repository, "one", &pages).unwrap();
            model.insert(("one".into(), info.sequence), pages);
            assert_eq!(count(PACKS), before + 1);
        }
    }
}

#[test]
fn a_pack_whose_table_is_damaged_is_read_and_then_written_anew() {
    for kept in BOTH {
        let (bed, repository, model) = example(kept, 3);
        let packs: Vec<_> = objects(&*bed.backend).into_iter().filter(|name| name.starts_with(PACKS)).collect();
        for name in &packs {
            let content = get(&*bed.backend, name);
            put(&*bed.backend, name, &content[..content.len() - 1]);
        }
        drop(repository);
        let repository = bed.open();
        check(&repository, &model);
        let report = repository.verify(&mut |_| {}).unwrap();
        assert_eq!(report.damaged.len(), packs.len());
        assert!(report.damaged.iter().all(|damage| damage.touched.is_empty()));
        repository.prune(&Retention::default(), None, &mut |_| {}).unwrap();
        assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
        check(&repository, &model);
    }
}

#[test]
fn a_prune_frees_space_and_leaves_content_in_use() {
    for kept in BOTH {
        let (bed, repository, mut model) = example(kept, 30);
        let reading = repository.read("one", 2).unwrap();
        let other = bed.open();
        let retention = Retention { keep_last: Some(1), keep_every: None };
        let report = other.prune(&retention, None, &mut |_| {}).unwrap();
        assert_eq!((report.removed.len(), &report.in_use[..]), (27, &[("one".to_owned(), 2)][..]));
        assert!(report.freed_bytes > 0);
        model.retain(|(job, sequence), _| *sequence == 15 || (job == "one" && *sequence == 2));
        assert_oracle!(check(&repository, &model).iter().eq(model.keys()), "another's view is out of date");
        PageTree::load(reading.manifest.spaces[0].root, &reading).unwrap();
        drop(reading);
        assert_eq!(repository.prune(&retention, Some("one"), &mut |_| {}).unwrap().removed, [("one".to_owned(), 2)]);
        assert!(repository.prune(&retention, None, &mut |_| {}).unwrap().removed.is_empty());
        assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
        assert!(matches!(repository.read("one", 2), Err(error) if error.kind() == ErrorKind::NoCheckpoint));
        let info = commit(&repository, "one", &Pages::new()).unwrap();
        assert_eq!(info.sequence, 16);
    }
}

#[test]
fn readers_continue_while_others_commit_and_prune() {
    for kept in BOTH {
        let (bed, repository, model) = example(kept, 6);
        let backend = &bed.backend;
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let repository = Repository::on(backend.clone()).unwrap();
                        let mut rounds = 0;
                        while rounds < 3 || !stop.load(std::sync::atomic::Ordering::Relaxed) {
                            for job in ["one", "two"] {
                                let Some(info) = repository.checkpoints(job).unwrap().pop() else { continue };
                                match read(&repository, job, info.sequence) {
                                    Ok(pages) => assert_oracle!(
                                        pages == content(&model[&(job.into(), 3)]),
                                        "{job}@{} differs",
                                        info.sequence
                                    ),
                                    // It was pruned between the two calls.
                                    Err(error) if error.kind() == ErrorKind::NoCheckpoint => {}
                                    Err(error) => finding(&format!("{job}: {error}")),
                                }
                            }
                            rounds += 1;
                        }
                    })
                })
                .collect();
            for round in 0..25 {
                // Content that is pruned, beside content that stays: packs are written anew.
                commit(&repository, "three", &(0..100).map(|number| (number, 1000 * round + number)).collect())
                    .unwrap();
                for job in ["one", "two"] {
                    commit(&repository, job, &model[&(job.into(), 3)]).unwrap();
                }
                repository.prune(&Retention { keep_last: Some(1), keep_every: None }, None, &mut |_| {}).unwrap();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
    }
}

/// Replaces all packs by others, by commits and a prune.
fn replace_packs(backend: &Arc<dyn Backend>) {
    let packs = |backend: &dyn Backend| -> BTreeSet<String> {
        objects(backend).into_iter().filter(|name| name.starts_with(PACKS)).collect()
    };
    let repository = Repository::on(backend.clone()).unwrap();
    let before = packs(&**backend);
    for round in 0.. {
        assert!(round < 40, "some packs are never replaced");
        commit(&repository, "garbage", &(0..100).map(|number| (number, 1000 * round + number)).collect()).unwrap();
        repository.prune(&Retention { keep_last: Some(1), keep_every: None }, None, &mut |_| {}).unwrap();
        if packs(&**backend).is_disjoint(&before) {
            return;
        }
    }
}

#[test]
fn content_is_found_however_often_it_moves_while_packs_are_listed() {
    for kept in BOTH {
        let (bed, repository, model) = example(kept, 6);
        let reading = repository.read("one", 3).unwrap();
        for moves in 1..=4 {
            // Packs are replaced between each of the first lists of them and what the reader does next.
            let moves_left = Arc::new(AtomicUsize::new(0));
            let (backend, left) = (bed.backend.clone(), moves_left.clone());
            let moving = FaultyBackend::new(bed.backend.clone(), Fault::None, 0).after_list(move |directory| {
                let is_to_move = |left: usize| if directory == PACKS { left.checked_sub(1) } else { None };
                if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_to_move).is_ok() {
                    replace_packs(&backend);
                }
            });
            let reader = Repository::on(Arc::new(moving)).unwrap();
            // What the reader knows is out of date.
            replace_packs(&bed.backend);
            moves_left.store(moves, Ordering::Relaxed);
            let pages = read(&reader, "one", 3).unwrap();
            assert_oracle!(pages == content(&model[&("one".into(), 3)]), "other content after {moves} moves");
            assert_eq!(moves_left.load(Ordering::Relaxed), 0);
        }
        drop(reading);
    }
}

#[derive(Debug, Clone)]
enum Action {
    /// Changes some pages of a job and commits.
    Commit {
        job: usize,
        changes: Vec<(u64, u64)>,
    },
    Abort {
        contents: Vec<u64>,
    },
    Prune {
        keep_last: u32,
        job: Option<usize>,
    },
    Reopen,
}

fn action() -> impl Strategy<Value = Action> {
    let changes = prop::collection::vec((0u64..300, 0u64..120), 0..30);
    prop_oneof![
        6 => (0usize..2, changes).prop_map(|(job, changes)| Action::Commit { job, changes }),
        1 => prop::collection::vec(any::<u64>(), 0..10).prop_map(|contents| Action::Abort { contents }),
        2 => (0u32..4, prop::option::of(0usize..2)).prop_map(|(keep_last, job)| Action::Prune { keep_last, job }),
        1 => Just(Action::Reopen),
    ]
}

proptest! {
    #![proptest_config(pagemark_testing::cases(40))]

    #[test]
    fn behaves_like_a_map_of_checkpoints(
        actions in prop::collection::vec(action(), 1..25),
        // Three of four cases are in memory, which is faster.
        kept in prop::sample::select(vec![Kept::InMemory, Kept::InMemory, Kept::InMemory, Kept::Locally]),
    ) {
        let (bed, mut repository, mut model) = example(kept, 0);
        let mut present: Vec<Pages> = vec![Pages::new(); 2];
        let jobs = ["one", "two"];
        for action in actions {
            match action {
                Action::Commit { job, changes } => {
                    present[job].extend(changes);
                    let info = commit(&repository, jobs[job], &present[job]).unwrap();
                    model.insert((jobs[job].into(), info.sequence), present[job].clone());
                }
                Action::Abort { contents } => {
                    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
                    for content in contents {
                        writer.put(Kind::Page, &page(content)).unwrap();
                    }
                }
                Action::Prune { keep_last, job } => {
                    let job = job.map(|job| jobs[job]);
                    let retention = Retention { keep_last: Some(keep_last), keep_every: None };
                    let report = repository.prune(&retention, job, &mut |_| {}).unwrap();
                    let mut expected = Vec::new();
                    for name in jobs.iter().filter(|name| job.is_none_or(|job| job == **name)) {
                        let all: Vec<_> = model.keys().filter(|(job, _)| job == name).cloned().collect();
                        expected.extend(all[..all.len().saturating_sub(keep_last.max(1) as usize)].to_vec());
                    }
                    model.retain(|key, _| !expected.contains(key));
                    prop_assert_eq!(report.removed, expected);
                    prop_assert!(report.unreadable.is_empty());
                }
                Action::Reopen => repository = bed.open(),
            }
            prop_assert!(check(&repository, &model).iter().eq(model.keys()));
            prop_assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, vec![]);
        }
    }
}

/// The operation in which a fault happens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Commit,
    Prune,
    Create,
}

struct Struck {
    failed: Option<Error>,
    steps: usize,
}

/// Carries out the operation on a copy of the example with a fault, and then the steps of a
/// restart.
fn strike(base: &Bed, model: &Model, work: Work, fault: Fault, seed: u64, power: bool) -> Struck {
    let mut model = model.clone();
    let mut surely: BTreeSet<_> = model.keys().cloned().collect();
    let new: Pages = (0..90).map(|number| (number * 3, number + 5000)).collect();
    let new_key = ("one".to_owned(), model.keys().filter(|(job, _)| job == "one").count() as u64 + 1);
    let bed = if work == Work::Create { Bed::new(base.kept()) } else { base.copy() };
    let before = objects(&*bed.backend);
    let faulty = FaultyBackend::new(bed.backend.clone(), fault, seed);
    let backend = Arc::new(faulty.clone());
    let failed = match work {
        Work::Create => {
            model.clear();
            surely.clear();
            Repository::create_on(backend).err()
        }
        Work::Commit => {
            model.insert(new_key.clone(), new.clone());
            let repository = Repository::on(backend).unwrap();
            let failed = commit(&repository, "one", &new).err();
            if failed.is_none() {
                surely.insert(new_key.clone());
            } else if !faulty.is_dead() {
                let now = check(&repository, &model);
                assert_oracle!(now == surely, "{fault:?}: it failed but is there, or something is gone: {failed:?}");
                if matches!(fault, Fault::DiskFull { .. }) {
                    assert_eq!(objects(&*bed.backend), before, "{fault:?} left something behind");
                    assert!(!bed.has_staged(), "{fault:?} left something staged");
                }
            }
            failed
        }
        Work::Prune => {
            surely.retain(|(job, sequence)| job == "two" || *sequence > 4);
            let repository = Repository::on(backend).unwrap();
            let retention = Retention { keep_last: Some(2), keep_every: None };
            repository.prune(&retention, Some("one"), &mut |_| {}).err()
        }
    };
    if power {
        faulty.lose_power().unwrap();
    }

    let repository = match Repository::on(bed.backend.clone()) {
        Err(error) if error.kind() == ErrorKind::NotARepository && work == Work::Create && failed.is_some() => {
            Repository::create_on(bed.backend.clone()).unwrap()
        }
        opened => opened.unwrap_or_else(|error| finding(&format!("{fault:?}: {error}"))),
    };
    let found = check(&repository, &model);
    assert_oracle!(found.is_superset(&surely), "{fault:?}: checkpoints are gone");
    assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "{fault:?}: what is damaged");
    let last: Pages = (0..20).map(|number| (number, number + 7000)).collect();
    let info = commit(&repository, "one", &last).unwrap();
    model.insert(("one".into(), info.sequence), last);
    repository.prune(&Retention::default(), None, &mut |_| {}).unwrap();
    assert_oracle_eq!(check(&repository, &model).len(), found.len() + 1, "{fault:?}: the number of checkpoints");
    assert!(!bed.has_staged(), "{fault:?} left something staged");
    Struck { failed, steps: faulty.steps() }
}

#[test]
fn killed_at_any_step_it_keeps_every_complete_checkpoint() {
    let factor = u64::from(pagemark_testing::factor());
    for kept in BOTH {
        let (bed, _repository, model) = example(kept, 12);
        let mut points = 0;
        for (work, seeds) in [(Work::Create, 2), (Work::Commit, 3), (Work::Prune, 3)] {
            // Most cases are in memory, which is faster. Seed 0 and another one are the least.
            let seeds = if kept == Kept::Locally { factor + 1 } else { seeds * factor };
            let steps = strike(&bed, &model, work, Fault::None, 0, false).steps;
            for at in 1..=steps {
                for seed in 0..seeds {
                    // Seed 0: the process is killed, but not the machine.
                    let struck = strike(&bed, &model, work, Fault::Kill { at }, seed * 7919 + at as u64, seed > 0);
                    assert!(struck.steps == at, "{work:?} does not always take the same steps");
                    points += 1;
                }
            }
            eprintln!("{kept:?}, {work:?}: {steps} steps");
        }
        assert!(points >= if kept == Kept::Locally { 80 } else { 150 }, "only {points} points");
    }
}

#[test]
fn a_full_disk_or_an_error_at_any_step_loses_only_the_operation() {
    for kept in BOTH {
        let (bed, _repository, model) = example(kept, 12);
        for work in [Work::Commit, Work::Prune] {
            let steps = strike(&bed, &model, work, Fault::None, 0, false).steps;
            let mut failures = 0;
            // On a disk, which is slow, the short run takes every third step, the long one all of them.
            let stride = if kept == Kept::Locally && pagemark_testing::factor() == 1 { 3 } else { 1 };
            for at in (1..=steps).step_by(stride) {
                let full = strike(&bed, &model, work, Fault::DiskFull { from: at }, at as u64, false);
                if let Some(error) = full.failed {
                    assert_eq!(error.kind(), ErrorKind::NoRoom, "{error}");
                    failures += 1;
                }
                // In the short run, the machine stops after every other error.
                for crash in [false, true] {
                    if pagemark_testing::factor() > 1 || crash == at.is_multiple_of(2) {
                        strike(&bed, &model, work, Fault::Error { at }, at as u64, crash);
                    }
                }
            }
            assert!(failures > 10 / stride, "{work:?} failed at {failures} of {steps} steps only");
        }
    }
}

/// The checkpoints that cannot be read. Those that can be read are compared with the model.
fn unreadable(repository: &Repository, model: &Model) -> BTreeSet<(String, u64)> {
    let mut failed = BTreeSet::new();
    for ((job, sequence), pages) in model {
        match read(repository, job, *sequence) {
            Ok(read) => assert_oracle!(read == content(pages), "{job}@{sequence} is read, but wrong"),
            Err(_) => drop(failed.insert((job.clone(), *sequence))),
        }
    }
    failed
}

/// True if a byte of a pack is in compressed content, which can change and still unpack to the same
/// bytes.
fn is_in_compressed_content(pack: &[u8], at: usize) -> bool {
    let mut record = format::FILE_HEADER_BYTES;
    while let Some(header) = pack[record..].first_chunk::<{ pack::RECORD_HEADER_BYTES }>() {
        let stored = u32::from_le_bytes(std::array::from_fn(|index| header[16 + index])) as usize;
        let content = record + header.len();
        if (content..content + stored).contains(&at) {
            return header[25] == pack::Encoding::Lz4 as u8;
        }
        record = content + stored;
        if record > at {
            return false;
        }
    }
    false
}

fn touched(report: &VerifyReport) -> BTreeSet<(String, u64)> {
    let touched = report.damaged.iter().flat_map(|damage| &damage.touched);
    touched.map(|touched| (touched.job.clone(), touched.sequence)).collect()
}

#[test]
fn damage_anywhere_is_noticed_and_located() {
    for kept in BOTH {
        let (bed, repository, model) = example(kept, 9);
        drop(repository);
        let mut random = 88172645463325252u64;
        let mut below = |end: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 16) % end
        };
        let (mut lost, mut harmless) = (0, 0);
        for name in objects(&*bed.backend) {
            let original = get(&*bed.backend, &name);
            for round in 0..7 + 3 * pagemark_testing::factor() {
                let mut damaged = original.clone();
                let at = below(original.len() as u64) as usize;
                match round {
                    0 => damaged.truncate(at),
                    1 => damaged[at..].fill(0),
                    2 => damaged.extend_from_slice(&original),
                    3 => damaged.clear(),
                    // The table and its tail are short.
                    4..7 => damaged[original.len() - 1 - at % original.len().min(400)] ^= 1 << below(8),
                    _ => damaged[at] ^= 1 << below(8),
                }
                if damaged == original {
                    continue;
                }
                put(&*bed.backend, &name, &damaged);
                let repository = match Repository::on(bed.backend.clone()) {
                    Ok(repository) => repository,
                    Err(error) => {
                        assert!(name == CONFIG, "{error}");
                        continue;
                    }
                };
                let failed = unreadable(&repository, &model);
                let report = repository.verify(&mut |_| {}).unwrap();
                assert_eq!(touched(&report), failed, "{} changed at {at}:\n{report}", name);
                if name != CONFIG && report.damaged.is_empty() {
                    let changed = (0..original.len()).find(|&at| damaged.get(at) != Some(&original[at]));
                    let is_packed = changed.is_some_and(|at| is_in_compressed_content(&original, at));
                    // The case of a hexadecimal digit and the last line break have no meaning.
                    let is_equal = damaged.trim_ascii_end().eq_ignore_ascii_case(original.trim_ascii_end());
                    let has_no_meaning = name == CONFIG_COPY && is_equal;
                    assert!(is_packed || has_no_meaning, "{name} changed at {changed:?} and nobody noticed");
                }
                if failed.is_empty() { harmless += 1 } else { lost += 1 }
            }
            put(&*bed.backend, &name, &original);
            // A missing file is noticed where it is needed.
            if name != CONFIG && !name.starts_with(CHECKPOINTS) {
                bed.backend.remove(&name).unwrap();
                let repository = Repository::on(bed.backend.clone()).unwrap();
                assert_eq!(touched(&repository.verify(&mut |_| {}).unwrap()), unreadable(&repository, &model));
                put(&*bed.backend, &name, &original);
            }
        }
        assert!(lost > 50 && harmless > 50, "{lost} {harmless}");
        assert_eq!(Repository::on(bed.backend.clone()).unwrap().verify(&mut |_| {}).unwrap().damaged, []);
    }
}

#[test]
fn verify_names_the_page() {
    for kept in BOTH {
        let (bed, repository, _) = example(kept, 0);
        commit(&repository, "one", &[(3, 1001), (0x7fff0, 1003)].into()).unwrap();
        commit(&repository, "two", &[(9, 1003)].into()).unwrap();
        let tree = {
            let checkpoint = repository.read("two", 1).unwrap();
            PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap()
        };
        let found = repository.inner.view().find(tree.get(PageNumber::new(9))).unwrap().ok().flatten().unwrap();
        let pack = pack_name(found.entry.pack);
        let mut content = get(&*bed.backend, &pack);
        content[found.entry.offset as usize + 100..][..6].copy_from_slice(b"damage");
        put(&*bed.backend, &pack, &content);
        let report = repository.verify(&mut |_| {}).unwrap();
        assert_eq!(report.damaged.len(), 1);
        assert_eq!(report.damaged[0].id, Some(tree.get(PageNumber::new(9))));
        let page =
            |job: &str, address| Touched { job: job.into(), sequence: 1, part: Part::Process(17), address, pages: 1 };
        assert_eq!(report.damaged[0].touched, [page("one", 0x7fff_0000), page("two", 0x9000)]);
        let text = report.to_string();
        assert!(text.contains("touches two@1: memory of process 17, the page at 0x9000"), "{text}");
        // Pruning neither stops at the damage nor hides it.
        let pruned = repository.prune(&Retention::default(), None, &mut |_| {}).unwrap();
        assert!(pruned.removed.is_empty());
        assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, report.damaged);
    }
}

#[test]
fn content_of_a_later_version_is_neither_misread_nor_pruned() {
    let (_bed, repository, model) = example(Kept::InMemory, 3);
    let inner = &repository.inner;
    let found = u64::from(MANIFEST_VERSION) + 1;
    let json = format!(r#"{{"version": {found}, "sections": []}}"#).into_bytes();
    let json = json.as_slice();
    let id = ContentId::of(&inner.format.key, json);
    let mut packs = inner.new_packs();
    packs.add(Kind::Manifest, id, json).unwrap();
    packs.publish().unwrap();
    let info = CheckpointInfo { sequence: 3, taken_unix_us: 0, written_bytes: 0, manifest: id };
    record::NewRecord::write(&*inner.backend, "one", &inner.format, info).unwrap().publish().unwrap();
    let is_newer = |error: Error| {
        let expected = ErrorKind::NewerFormat { found, known: u64::from(MANIFEST_VERSION) };
        error.kind() == expected && error.to_string().contains("@3")
    };
    assert!(repository.read("one", 3).err().is_some_and(is_newer));
    assert!(repository.verify(&mut |_| {}).is_err_and(is_newer));
    assert!(repository.prune(&Retention::default(), None, &mut |_| {}).is_err_and(is_newer));
    assert_eq!(inner.get(id).unwrap(), json);
    for ((job, sequence), pages) in &model {
        assert_oracle!(read(&repository, job, *sequence).unwrap() == content(pages), "{job}@{sequence} differs");
    }
}

#[test]
fn a_space_that_is_no_process_raises_the_format() {
    let (bed, repository, mut model) = example(Kept::InMemory, 1);
    let number = || config::read(&*bed.backend).unwrap().number;
    assert_eq!(number(), PROCESSES_ONLY);
    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
    let mut tree = PageTree::new();
    tree.set(PageNumber::new(3), writer.put(Kind::Page, &page(5)).unwrap());
    let mut manifest = manifest("one", tree.save(&mut writer).unwrap(), 1);
    manifest.spaces[0].kind = SpaceKind::Region { bytes: ByteCount::of_pages(9) };
    assert_eq!(writer.commit(manifest.clone()).unwrap().sequence, 2);
    assert_eq!(number(), ANY_SPACES);
    let committed = bed.open().read("one", 2).unwrap().manifest;
    assert_eq!(committed.spaces, manifest.spaces);
    model.insert(("one".into(), 2), [(3, 5)].into());
    assert_oracle!(check(&bed.open(), &model).iter().eq(model.keys()), "checkpoints are lost");

    let writer = repository.writer("a test", Duration::ZERO).unwrap();
    manifest.spaces.push(manifest.spaces[0].clone());
    let error = writer.commit(manifest).unwrap_err();
    assert!(error.kind() == ErrorKind::DuplicateSpace && error.to_string().contains("the id 17"), "{error}");
}

#[test]
fn only_backends_touch_files() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/repository");
    let mut sources = vec![directory.with_extension("rs")];
    for entry in std::fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        sources.extend((path.is_file() && !path.ends_with("tests.rs")).then_some(path));
    }
    assert!(sources.len() > 10);
    for path in sources {
        let text = std::fs::read_to_string(&path).unwrap();
        for call in ["std::fs", "std::os", "File::", "OpenOptions", "nix::", "libc::", "std::io::Write"] {
            assert!(!text.contains(call), "{} has {call}", path.display());
        }
    }
}

/// The entry of a job's page in a checkpoint.
fn entry_of(repository: &Repository, job: &str, sequence: u64, number: u64) -> Entry {
    let checkpoint = repository.read(job, sequence).unwrap();
    let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();
    let found = repository.inner.view().find(tree.get(PageNumber::new(number))).unwrap();
    found.ok().unwrap().unwrap().entry
}

/// A repository of a job of one page, which is stored whole twice and then as a delta, and the
/// model of it.
fn changed_page(kept: Kept) -> (Bed, Repository, Model) {
    let bed = Bed::new(kept);
    let repository = Repository::create_on(bed.backend.clone()).unwrap();
    let mut model = Model::new();
    for content in [1, 5, 9, 13] {
        let pages = Pages::from([(7, content)]);
        let info = commit(&repository, "one", &pages).unwrap();
        model.insert(("one".into(), info.sequence), pages);
    }
    let is_delta: Vec<bool> = (1..=4).map(|sequence| entry_of(&repository, "one", sequence, 7).is_delta).collect();
    assert_eq!(is_delta, [false, false, true, true]);
    (bed, repository, model)
}

#[test]
fn a_page_that_changes_a_little_is_stored_as_what_changed() {
    for kept in BOTH {
        let (bed, repository, model) = changed_page(kept);
        let written: Vec<u64> = repository.checkpoints("one").unwrap().iter().map(|info| info.written_bytes).collect();
        assert!(written[3] + 3500 < written[1], "{written:?}");
        for repository in [&repository, &bed.open()] {
            check(repository, &model);
            let report = repository.verify(&mut |_| {}).unwrap();
            assert_oracle!(report.damaged.is_empty(), "something is damaged: {report:?}");
        }
        // A program that does not know deltas must not prune.
        assert_eq!(config::read(&*bed.backend).unwrap().number, format::DELTAS);
    }
}

#[test]
fn a_page_that_had_its_content_before_keeps_its_base() {
    let (_bed, repository, mut model) = changed_page(BOTH[0]);
    for content in [9, 17] {
        let pages = Pages::from([(7, content)]);
        let info = commit(&repository, "one", &pages).unwrap();
        model.insert(("one".into(), info.sequence), pages);
    }
    assert!(entry_of(&repository, "one", 6, 7).is_delta);
    check(&repository, &model);
}

#[test]
fn a_page_that_changes_more_and_more_is_stored_whole_again() {
    let repository = Repository::create_on(Arc::new(MemoryBackend::new())).unwrap();
    let (mut content, mut last) = (page(1), ContentId::ZERO);
    let mut were_deltas = Vec::new();
    for step in 0..20 {
        let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
        content[step * 200..(step + 1) * 200].iter_mut().for_each(|byte| *byte = !*byte);
        last = writer.put_changed(last, &content).unwrap();
        let mut tree = PageTree::new();
        tree.set(PageNumber::new(7), last);
        let root = tree.save(&mut writer).unwrap();
        let info = writer.commit(manifest("one", root, 1)).unwrap();
        assert_oracle!(read(&repository, "one", info.sequence).unwrap() == [(7, content)], "step {step} differs");
        were_deltas.push(entry_of(&repository, "one", info.sequence, 7).is_delta);
    }
    let whole: Vec<usize> = (0..20).filter(|step| !were_deltas[*step]).collect();
    assert!(whole.starts_with(&[0, 1]) && (3..6).contains(&whole.len()), "{whole:?}");
}

#[test]
fn a_base_stays_as_long_as_a_delta_needs_it() {
    for kept in BOTH {
        let (bed, repository, mut model) = changed_page(kept);
        let base = entry_of(&repository, "one", 2, 7);
        let retention = Retention { keep_last: Some(1), keep_every: None };
        // The first prune removes the checkpoints that have the base; the second moves it.
        for _ in 0..2 {
            repository.prune(&retention, None, &mut |_| {}).unwrap();
            model.retain(|(_, sequence), _| *sequence == 4);
            for repository in [&repository, &bed.open()] {
                assert_oracle!(check(repository, &model).iter().eq(model.keys()), "checkpoints are lost");
                assert_oracle!(repository.verify(&mut |_| {}).unwrap().damaged.is_empty(), "something is damaged");
                assert!(repository.inner.holds(base.id).unwrap());
            }
        }
        let pages = Pages::from([(7, 2)]);
        commit(&repository, "one", &pages).unwrap();
        repository.prune(&retention, None, &mut |_| {}).unwrap();
        assert!(!repository.inner.holds(base.id).unwrap());
    }
}

#[test]
fn a_base_that_a_prune_removed_is_not_used() {
    let (bed, repository, mut model) = changed_page(Kept::InMemory);
    // Another process, which does not know what this one keeps in memory.
    let other = bed.open();
    commit(&other, "two", &Pages::from([(7, 2)])).unwrap();
    other.expire(&Retention { keep_last: Some(1), keep_every: None }, Some("one")).unwrap();
    bed.backend.remove(&record::name("one", 4)).unwrap();
    other.prune(&Retention::default(), None, &mut |_| {}).unwrap();
    let pages = Pages::from([(7, 17)]);
    let info = commit(&repository, "one", &pages).unwrap();
    model.clear();
    model.insert(("one".into(), info.sequence), pages);
    assert!(!entry_of(&repository, "one", info.sequence, 7).is_delta);
    let expected = content(&model[&("one".into(), info.sequence)]);
    assert_oracle!(read(&repository, "one", info.sequence).unwrap() == expected, "the page differs");
}

#[test]
fn a_delta_whose_base_is_gone_does_not_count_as_stored() {
    for kept in BOTH {
        let (bed, repository, _) = changed_page(kept);
        let base = entry_of(&repository, "one", 2, 7);
        drop(repository);
        // As after a prune that no checkpoint kept from removing the base.
        let name = pack_name(base.pack);
        (2..=4).for_each(|sequence| bed.backend.remove(&record::name("one", sequence)).unwrap());
        bed.backend.remove(&name).unwrap();
        let repository = bed.open();
        assert_oracle!(repository.verify(&mut |_| {}).unwrap().damaged.is_empty(), "something is damaged");
        let pages = Pages::from([(9, 13)]);
        commit(&repository, "two", &pages).unwrap();
        for _ in 0..2 {
            assert_oracle!(read(&repository, "two", 1).unwrap() == content(&pages), "two@1 differs");
            assert_oracle!(repository.verify(&mut |_| {}).unwrap().damaged.is_empty(), "something is damaged");
            repository.prune(&Retention::default(), None, &mut |_| {}).unwrap();
        }
    }
}

#[test]
fn damage_of_a_base_touches_the_checkpoints_with_its_deltas() {
    for kept in BOTH {
        let (bed, repository, _) = changed_page(kept);
        let base = entry_of(&repository, "one", 2, 7);
        let name = pack_name(base.pack);
        let mut pack = get(&*bed.backend, &name);
        pack[base.offset as usize + 100] ^= 1;
        drop(repository);
        put(&*bed.backend, &name, &pack);
        let repository = bed.open();
        let report = repository.verify(&mut |_| {}).unwrap();
        let touched: BTreeSet<u64> =
            report.damaged.iter().flat_map(|damage| &damage.touched).map(|touched| touched.sequence).collect();
        assert_eq!(touched, BTreeSet::from([2, 3, 4]));
        for sequence in 2..=4 {
            let error = read(&repository, "one", sequence).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
        }
        read(&repository, "one", 1).unwrap();
        repository.prune(&Retention::default(), None, &mut |_| {}).unwrap();
    }
}

#[test]
fn a_repository_of_whole_pages_has_no_deltas() {
    let directory = tempfile::tempdir().unwrap();
    let options = RepositoryOptions::default().whole_pages(true);
    let repository = options.create(&directory.path().join("repository")).unwrap();
    for content in [1, 5, 9, 13] {
        let info = commit(&repository, "one", &Pages::from([(7, content)])).unwrap();
        assert!(!entry_of(&repository, "one", info.sequence, 7).is_delta);
    }
    assert_eq!(config::read(&*repository.inner.backend).unwrap().number, PROCESSES_ONLY);
}
