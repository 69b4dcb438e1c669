//! Reading and checking the whole repository.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::checkpoint::Reader;
use super::format::{CONFIG, CONFIG_COPY, FILE_HEADER_BYTES, FileKind, INDEXES, PACKS, index_name, pack_name};
use super::index::numbers_in;
use super::pack::{RECORD_HEADER_BYTES, read_record, scan};
use super::record;
use super::table::{Entry, Table, Unreadable};
use super::{Inner, Manifest, Progress, Repository, SpaceRecord, config, is_newer};
use crate::backend::Object;
use crate::id::SpaceId;
use crate::tree::NodeRecord;
use crate::{ContentId, Error, ErrorKind, PageNumber};

/// The result of [`Repository::verify`].
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct VerifyReport {
    /// Checkpoints visited.
    pub checkpoints: u64,
    /// Pieces of content read.
    pub pieces: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Damaged places.
    pub damaged: Vec<Damage>,
}

/// A damaged place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Damage {
    /// The file. For content that is nowhere, the repository.
    pub file: PathBuf,
    /// The content, if that is known.
    pub id: Option<ContentId>,
    /// The check that failed.
    pub reason: String,
    /// The parts of checkpoints that cannot be restored because of it. Empty if no checkpoint needs
    /// the place, or there is an intact copy.
    pub touched: Vec<Touched>,
}

/// A part of a checkpoint that damage touches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Touched {
    /// The checkpoint's job.
    pub job: String,
    /// The checkpoint.
    pub sequence: u64,
    /// Of what.
    pub part: Part,
    /// Where in it the first touched page begins, in bytes: an address in a process, an offset in a
    /// file.
    pub address: u64,
    /// How many pages are touched; for a damaged node of a tree, all that it may cover.
    pub pages: u64,
}

/// A part of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// All of it.
    Whole,
    /// The memory of a process.
    Process(i32),
    /// A space that is not a process.
    Space {
        /// Its id.
        id: SpaceId,
        /// Its name.
        label: String,
    },
    /// A file's content.
    File(String),
    /// A file of the target's state.
    State(String),
}

impl Repository {
    /// Reads everything, and reports which checkpoints the damage touches. Writing and pruning can
    /// continue meanwhile.
    ///
    /// # Errors
    /// The storage failed, or a manifest has a later version. Damage is no error: it is in the
    /// report.
    pub fn verify(&self, progress: &mut dyn FnMut(Progress)) -> Result<VerifyReport, Error> {
        let mut verifier = Verifier {
            inner: self.inner.clone(),
            reader: Reader(self.inner.clone()),
            report: VerifyReport::default(),
            bad: HashMap::new(),
            baseless: HashMap::new(),
            clean: HashSet::new(),
            dirty: HashMap::new(),
        };
        verifier.config()?;
        verifier.indexes()?;
        verifier.packs(progress)?;
        verifier.checkpoints()?;
        Ok(verifier.report)
    }
}

struct Verifier {
    inner: Arc<Inner>,
    reader: Reader,
    report: VerifyReport,
    /// Content of which no whole copy is there: its place in the report.
    bad: HashMap<ContentId, usize>,
    /// Deltas without a base, and their packs. That is no damage unless a checkpoint needs one: a
    /// prune keeps only the bases that are needed.
    baseless: HashMap<ContentId, PathBuf>,
    /// Nodes with nothing bad below.
    clean: HashSet<ContentId>,
    /// The others, with what is.
    dirty: HashMap<ContentId, Vec<Hit>>,
}

/// Bad content below a node.
#[derive(Clone, Copy)]
struct Hit {
    bad: usize,
    /// The first page that has it, counted from the node's first.
    page: u64,
    pages: u64,
}

impl Verifier {
    fn damage(&mut self, file: &Path, id: Option<ContentId>, reason: String) -> usize {
        self.report.damaged.push(Damage { file: file.to_owned(), id, reason, touched: Vec::new() });
        self.report.damaged.len() - 1
    }

    /// `config` and its copy, one of which is intact.
    fn config(&mut self) -> Result<(), Error> {
        let backend = self.inner.backend.clone();
        if let Some(reason) = config::read(&*backend)?.damage {
            let reason = format!("{reason}. Its copy is used; the next checkpoint or prune writes it again");
            self.damage(&self.inner.path_of(CONFIG), None, reason);
        }
        if let Some(reason) = config::damage_of_copy(&*backend, &self.inner.format) {
            let reason = format!("{reason}. It is the copy of {CONFIG}; the next checkpoint or prune writes it again");
            self.damage(&self.inner.path_of(CONFIG_COPY), None, reason);
        }
        Ok(())
    }

    /// Index files: damage there costs time, not content.
    fn indexes(&mut self) -> Result<(), Error> {
        let backend = self.inner.backend.clone();
        for number in numbers_in(&*backend, INDEXES, ".idx")? {
            let path = self.inner.path_of(&index_name(number));
            let Some(object) = backend.open(&index_name(number))? else { continue };
            let opened = match Table::open(object, &backend, &self.inner.format, FileKind::Index, number) {
                // A writer has merged it with others meanwhile.
                Err(error) if error.is_not_found() => continue,
                opened => opened?,
            };
            let checked = match opened {
                Ok(table) => {
                    self.report.read_bytes += table.file_bytes;
                    for_each_entry(&table, &mut |_| {})?
                }
                Err(unreadable) => Err(unreadable),
            };
            if let Err(Unreadable(reason)) = checked
                && backend.bytes(&index_name(number))?.is_some()
            {
                self.damage(&path, None, format!("{reason}; what it leads to is found without it"));
            }
        }
        Ok(())
    }

    fn packs(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        let numbers = numbers_in(&*self.inner.backend, PACKS, ".pack")?;
        let inner = self.inner.clone();
        let file_bytes = |number: u64| inner.backend.bytes(&pack_name(number)).ok().flatten().unwrap_or(0);
        let total_bytes = numbers.iter().map(|number| file_bytes(*number)).sum();
        let mut done_bytes = 0;
        for number in numbers {
            let bytes = file_bytes(number);
            // A prune may remove packs; their needed content is in other packs then.
            if let Some(pack) = self.inner.backend.open(&pack_name(number))? {
                match self.pack(number, &pack) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    checked => checked?,
                }
            }
            done_bytes += bytes;
            self.report.read_bytes += bytes;
            progress(Progress { done_bytes, total_bytes });
        }
        Ok(())
    }

    fn pack(&mut self, number: u64, pack: &Arc<dyn Object>) -> Result<(), Error> {
        let path = self.inner.path_of(&pack_name(number));
        let key = self.inner.format.key;
        let mut entries = Vec::new();
        let backend = &self.inner.backend;
        let opened = match Table::open(pack.clone(), backend, &self.inner.format, FileKind::Pack, number)? {
            Ok(table) => for_each_entry(&table, &mut |entry| entries.push(entry))?.map(|()| table),
            Err(unreadable) => Err(unreadable),
        };
        match opened {
            Ok(table) => {
                entries.sort_unstable_by_key(|entry| entry.offset);
                let mut end = FILE_HEADER_BYTES as u64;
                for entry in &entries {
                    if u64::from(entry.offset) == end {
                        end += RECORD_HEADER_BYTES as u64 + u64::from(entry.stored_bytes);
                    }
                }
                if end != table.entries_offset {
                    self.damage(&path, None, format!("its table does not fit its records from offset {end} on"));
                }
            }
            Err(Unreadable(reason)) => {
                entries = scan(&**pack, &key, number, pack.bytes()?)?;
                self.damage(&path, None, format!("{reason}; {} records are found without its table", entries.len()));
            }
        }
        for entry in &entries {
            self.report.pieces += 1;
            if !matches!(self.inner.has_base_in(&self.inner.view(), entry)?, Ok(true))
                && self.inner.check_base(entry).is_err_and(|error| error.kind() == ErrorKind::Missing)
            {
                self.baseless.insert(entry.id, path.clone());
                continue;
            }
            match read_record(&**pack, &key, entry, &*self.inner) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Damaged => {
                    let is_elsewhere = self.inner.get(entry.id).is_ok();
                    let note = if is_elsewhere { "; a whole copy is elsewhere" } else { "" };
                    let at = self.damage(&path, Some(entry.id), format!("{error}{note}"));
                    if !is_elsewhere {
                        self.bad.insert(entry.id, at);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The place in the report of content that is missing or damaged; none if it is whole.
    fn bad_content(&mut self, id: ContentId) -> Result<Option<usize>, Error> {
        if let Some(at) = self.bad.get(&id) {
            return Ok(Some(*at));
        }
        if self.inner.holds(id)? {
            return Ok(None);
        }
        let at = match self.baseless.remove(&id) {
            Some(pack) => self.damage(&pack, Some(id), format!("{id} is the change of a page that is not there")),
            None => {
                let file = self.inner.backend.location().to_owned();
                self.damage(&file, Some(id), Error::missing(id).to_string())
            }
        };
        self.bad.insert(id, at);
        Ok(Some(at))
    }

    fn checkpoints(&mut self) -> Result<(), Error> {
        for job in self.inner.job_names()? {
            for sequence in self.inner.sequences(&job)? {
                let (_pin, info) = match self.inner.pin(&job, sequence) {
                    Ok(pinned) => pinned,
                    Err(error) if error.kind() == ErrorKind::NoCheckpoint => continue,
                    Err(error) if error.kind() == ErrorKind::DamagedRecord => {
                        self.report.checkpoints += 1;
                        let path = self.inner.path_of(&record::name(&job, sequence));
                        let at = self.damage(&path, None, error.reason());
                        self.touch(at, &job, sequence, Part::Whole, 0, 0);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                self.report.checkpoints += 1;
                if let Some(at) = self.bad_content(info.manifest)? {
                    self.touch(at, &job, sequence, Part::Whole, 0, 0);
                    continue;
                }
                match self.inner.read_manifest(&job, &info) {
                    Ok(manifest) => self.checkpoint(&manifest)?,
                    Err(error) if is_newer(&error) || error.is_storage() => return Err(error),
                    Err(error) => {
                        let path = self.inner.path_of(&record::name(&job, sequence));
                        let at = self.damage(&path, Some(info.manifest), error.to_string());
                        self.touch(at, &job, sequence, Part::Whole, 0, 0);
                    }
                }
            }
        }
        Ok(())
    }

    fn checkpoint(&mut self, manifest: &Manifest) -> Result<(), Error> {
        let space_part = |space: &SpaceRecord| match space.pid() {
            Some(pid) => Part::Process(pid),
            None => Part::Space { id: space.id, label: space.label.clone() },
        };
        let spaces = manifest.spaces.iter().map(|space| (space_part(space), space.root));
        let files = manifest.files.iter().map(|file| (Part::File(file.path.clone()), file.content.root));
        let state = manifest.state.iter().map(|state| (Part::State(state.name.clone()), state.content.root));
        for (part, root) in spaces.chain(files).chain(state).filter(|(_, root)| !root.is_zero()) {
            for hit in self.tree(root, None)? {
                let address = PageNumber::new(hit.page).address().get();
                self.touch(hit.bad, &manifest.job, manifest.sequence, part.clone(), address, hit.pages);
            }
        }
        Ok(())
    }

    fn touch(&mut self, damage: usize, job: &str, sequence: u64, part: Part, address: u64, pages: u64) {
        let job = job.to_owned();
        self.report.damaged[damage].touched.push(Touched { job, sequence, part, address, pages });
    }

    /// The damaged content in a tree; a node that several trees share is visited once.
    fn tree(&mut self, id: ContentId, level: Option<u8>) -> Result<Vec<Hit>, Error> {
        if self.clean.contains(&id) {
            return Ok(Vec::new());
        }
        if let Some(hits) = self.dirty.get(&id) {
            return Ok(hits.clone());
        }
        let pages = level.map_or(0, |level| 16u64.saturating_pow(u32::from(level) + 1));
        if let Some(bad) = self.bad_content(id)? {
            return Ok(vec![Hit { bad, page: 0, pages }]);
        }
        let record = match level {
            None => NodeRecord::get_root(id, &self.reader),
            Some(level) => NodeRecord::get(id, level, &self.reader),
        };
        let record = match record {
            Ok(record) => record,
            Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Missing) => {
                let path = self.inner.backend.location().to_owned();
                let bad = self.damage(&path, Some(id), error.to_string());
                self.bad.insert(id, bad);
                return Ok(vec![Hit { bad, page: 0, pages }]);
            }
            Err(error) => return Err(error),
        };
        let mut hits: Vec<Hit> = Vec::new();
        for (child, id) in record.children.into_iter().enumerate().filter(|(_, id)| !id.is_zero()) {
            let below = match record.level.checked_sub(1) {
                None => self.bad_content(id)?.map(|bad| Hit { bad, page: 0, pages: 1 }).into_iter().collect(),
                Some(level) => self.tree(id, Some(level))?,
            };
            let (first, _) = record.child_span(0, child);
            for hit in below {
                match hits.iter_mut().find(|other| other.bad == hit.bad) {
                    Some(other) => other.pages = other.pages.saturating_add(hit.pages),
                    None => hits.push(Hit { page: first.saturating_add(hit.page), ..hit }),
                }
            }
        }
        match hits.is_empty() {
            true => drop(self.clean.insert(id)),
            false => drop(self.dirty.insert(id, hits.clone())),
        }
        Ok(hits)
    }
}

/// Reads all of a table; the inner error says that it is damaged.
fn for_each_entry(table: &Table, visit: &mut dyn FnMut(Entry)) -> Result<Result<(), Unreadable>, Error> {
    let mut last = None;
    for entry in table.entries() {
        match entry {
            Ok(entry) if last.is_none_or(|last| last < entry.id) => {
                last = Some(entry.id);
                visit(entry);
            }
            Ok(_) => return Ok(Err(Unreadable("its table is not in order".into()))),
            Err(error) if error.kind() == ErrorKind::DamagedTable => return Ok(Err(Unreadable(error.reason()))),
            Err(error) => return Err(error),
        }
    }
    Ok(Ok(()))
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for damage in &self.damaged {
            writeln!(f, "{}: {}", damage.file.display(), damage.reason)?;
            match damage.touched.is_empty() {
                true => writeln!(f, "  touches no checkpoint")?,
                false => damage.touched.iter().try_for_each(|touched| writeln!(f, "  touches {touched}"))?,
            }
        }
        let (pieces, bytes, checkpoints) = (self.pieces, self.read_bytes, self.checkpoints);
        writeln!(f, "{checkpoints} checkpoints, {pieces} pieces of content, {bytes} bytes read")?;
        let mut touched: Vec<_> = self
            .damaged
            .iter()
            .flat_map(|damage| &damage.touched)
            .map(|touched| (&touched.job, touched.sequence))
            .collect();
        touched.sort();
        touched.dedup();
        match (self.damaged.len(), touched.len()) {
            (0, _) => writeln!(f, "nothing is damaged"),
            (damaged, 0) => writeln!(f, "{damaged} damaged places; every checkpoint can be restored"),
            (damaged, touched) => writeln!(f, "{damaged} damaged places; {touched} checkpoints are touched"),
        }
    }
}

impl fmt::Display for Touched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}: ", self.job, self.sequence)?;
        match &self.part {
            Part::Whole => return f.write_str("all of it"),
            Part::Process(pid) => write!(f, "memory of process {pid}")?,
            Part::Space { id, label } => write!(f, "space {id} ({label})")?,
            Part::File(path) => write!(f, "the file {path}")?,
            Part::State(name) => write!(f, "the state {name}")?,
        }
        match self.pages {
            0 => f.write_str(", all of it"),
            1 => write!(f, ", the page at {:#x}", self.address),
            pages => write!(f, ", up to {pages} pages from {:#x} on", self.address),
        }
    }
}
