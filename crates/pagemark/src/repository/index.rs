//! All tables of a repository together: where is a piece of content?

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::format::{FileKind, Format, number_name, parse_number, random_number};
use super::pack;
use super::storage::{Storage, io_error};
use super::table::{Entry, Table, TableWriter, Unreadable};
use crate::{ContentId, StoreError};

/// Tables are merged once so many of similar size are there.
const MERGE_TABLES: usize = 6;
/// A table is merged with smaller ones if it is not larger than this many times all of them.
const MERGE_RATIO: u64 = 3;

/// Of packs that no index file covers, which are few unless index files are lost, so many tables are kept open.
const MAX_OPEN_TABLES: usize = if cfg!(test) { 8 } else { 64 };

/// What the repository consisted of at one moment: the packs, and tables that name all that is in them.
#[derive(Default)]
pub(super) struct View {
    /// Index files first, those with the most entries in front.
    pub(super) tables: Vec<Arc<Table>>,
    /// The packs that exist, in ascending order. What a table says of others is out of date.
    pub(super) packs: Vec<u64>,
    /// Tells whether it is still what is there.
    stamp: Option<Stamp>,
}

/// When the directories changed last, seconds and nanoseconds, and which tables were known to be damaged then.
#[derive(PartialEq, Eq)]
struct Stamp {
    changed: [(i64, i64); 2],
    bad_tables: usize,
}

/// A directory that changed less than this ago may change again without a new time.
const CLOCK_TICK: Duration = Duration::from_millis(100);

impl Stamp {
    /// None while it would not tell a change.
    fn take(root: &Path, bad: &HashSet<u64>) -> Option<Stamp> {
        let mut changed = [(0, 0); 2];
        for (time, part) in changed.iter_mut().zip(["packs", "index"]) {
            let metadata = std::fs::metadata(root.join(part)).ok()?;
            metadata.modified().ok()?.elapsed().ok().filter(|ago| *ago > CLOCK_TICK)?;
            *time = (metadata.mtime(), metadata.mtime_nsec());
        }
        Some(Stamp { changed, bad_tables: bad.len() })
    }
}

/// Where a copy of a piece of content is: the table's place in the view, the entry's in the table.
pub(super) struct Found {
    pub(super) table: usize,
    pub(super) position: u64,
    pub(super) entry: Entry,
}

/// A table that cannot be read, by its number.
pub(super) struct BadTable(pub(super) u64);

impl View {
    /// Where an id is; the inner error names a table that is damaged.
    pub(super) fn find(&self, id: ContentId) -> Result<Result<Option<Found>, BadTable>, StoreError> {
        self.find_from(id, 0)
    }

    /// Like [`View::find`], in the tables from the given one on.
    pub(super) fn find_from(&self, id: ContentId, first: usize) -> Result<Result<Option<Found>, BadTable>, StoreError> {
        for (table, content) in self.tables.iter().enumerate().skip(first) {
            match content.find(id)? {
                Ok(Some((position, entry))) if self.has_pack(entry.pack) => {
                    return Ok(Ok(Some(Found { table, position, entry })));
                }
                Ok(_) => {}
                Err(Unreadable(_)) => return Ok(Err(BadTable(content.number))),
            }
        }
        Ok(Ok(None))
    }

    /// This view with more packs.
    pub(super) fn with_packs(&self, more: &[Arc<Table>]) -> View {
        let mut view = View { tables: self.tables.clone(), packs: self.packs.clone(), stamp: None };
        view.packs.extend(more.iter().map(|table| table.number));
        view.packs.sort_unstable();
        view.tables.extend(more.iter().cloned());
        view
    }

    /// True if nothing changed since the view was read.
    pub(super) fn is_current(&self, root: &Path, bad: &HashSet<u64>) -> bool {
        self.stamp.is_some() && self.stamp == Stamp::take(root, bad)
    }

    pub(super) fn has_pack(&self, pack: u64) -> bool {
        self.packs.binary_search(&pack).is_ok()
    }

    /// True if both consist of the same files.
    pub(super) fn is_same(&self, other: &View) -> bool {
        let numbers = |view: &View| view.tables.iter().map(|table| table.number).collect::<Vec<_>>();
        self.packs == other.packs && numbers(self) == numbers(other)
    }

    /// Looks what is there now. Tables that `old` has are not read again; `bad` ones are not used.
    pub(super) fn read(root: &Path, format: &Format, old: &View, bad: &HashSet<u64>) -> Result<View, StoreError> {
        let stamp = Stamp::take(root, bad);
        let mut packs = numbers_in(&root.join("packs"), ".pack")?;
        packs.sort_unstable();
        let mut indexes = Vec::new();
        for number in numbers_in(&root.join("index"), ".idx")? {
            if bad.contains(&number) {
                continue;
            }
            let path = root.join("index").join(format!("{}.idx", number_name(number)));
            match old.tables.iter().find(|table| table.number == number) {
                Some(table) => indexes.push(table.clone()),
                None => match File::open(&path) {
                    Ok(file) => {
                        // What cannot be read is not needed either: each pack has its own table.
                        if let Ok(table) = Table::open(file, &path, format, FileKind::Index, number)? {
                            indexes.push(Arc::new(table));
                        }
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(source) => return Err(io_error("open", &path, source)),
                },
            }
        }
        indexes.sort_unstable_by_key(|table| (Reverse(table.entry_count), table.number));
        let mut view = View { tables: Vec::new(), packs, stamp };
        let mut covered = HashSet::new();
        for table in indexes {
            let more = table.packs.iter().filter(|&&pack| view.has_pack(pack) && covered.insert(pack)).count();
            if more > 0 {
                view.tables.push(table);
            }
        }
        let uncovered: Vec<u64> = view.packs.iter().copied().filter(|pack| !covered.contains(pack)).collect();
        let mut gone = HashSet::new();
        for number in uncovered {
            let known = old.tables.iter().find(|table| table.number == number);
            if let Some(table) = known.filter(|table| table.is_rebuilt() || !bad.contains(&number)) {
                view.tables.push(table.clone());
                continue;
            }
            match open_pack_table(root, format, number, bad.contains(&number))? {
                Some(mut table) => {
                    if view.tables.len() >= MAX_OPEN_TABLES {
                        table.close();
                    }
                    view.tables.push(Arc::new(table));
                }
                None => drop(gone.insert(number)),
            }
        }
        view.packs.retain(|pack| !gone.contains(pack));
        Ok(view)
    }

    /// Which tables are to be merged now, if any: as many small ones as keep the number of tables logarithmic.
    fn merge_group(&self) -> Option<Vec<Arc<Table>>> {
        let mut tables = self.tables.clone();
        tables.sort_by_key(|table| table.entry_count);
        let (mut group, mut entries) = (0, 0);
        for table in &tables {
            if group > 1 && table.entry_count > MERGE_RATIO * entries {
                break;
            }
            entries += table.entry_count;
            group += 1;
        }
        (group >= MERGE_TABLES).then(|| tables[..group].to_vec())
    }

    /// Merges tables if it is time to. Returns the view with the new one.
    pub(super) fn merged(&self, root: &Path, format: &Format, storage: &Storage) -> Result<Option<View>, StoreError> {
        self.merge_group().map(|group| self.merge(&group, root, format, storage)).transpose()
    }

    /// Writes an index file that has what `group` has, without what is out of date, and removes those of them that
    /// were index files.
    pub(super) fn merge(
        &self,
        group: &[Arc<Table>],
        root: &Path,
        format: &Format,
        storage: &Storage,
    ) -> Result<View, StoreError> {
        let directory = root.join("index");
        let number = random_number().map_err(|source| io_error("read", Path::new("/dev/urandom"), source))?;
        let path = directory.join(format!("{}.idx", number_name(number)));
        let mut file = storage.create(&path.with_extension("idx.tmp"))?;
        let written = self.write_merged(group, format, &mut file, &path).and_then(|()| storage.sync_dir(&directory));
        if let Err(error) = written {
            // What cannot be removed, the next writer removes.
            let _ = file.remove();
            return Err(error);
        }
        let is_merged = |table: &Arc<Table>| group.iter().any(|other| other.number == table.number);
        for table in group.iter().filter(|table| table.kind == FileKind::Index) {
            storage.remove(table.path())?;
        }
        let file = File::open(&path).map_err(|source| io_error("open", &path, source))?;
        let table = Table::open(file, &path, format, FileKind::Index, number)?.map_err(|Unreadable(reason)| {
            io_error("read back", &path, std::io::Error::new(std::io::ErrorKind::InvalidData, reason))
        })?;
        let mut tables: Vec<_> = self.tables.iter().filter(|table| !is_merged(table)).cloned().collect();
        tables.push(Arc::new(table));
        tables.sort_by_key(|table| (table.kind == FileKind::Pack, Reverse(table.entry_count), table.number));
        Ok(View { tables, packs: self.packs.clone(), stamp: None })
    }

    fn write_merged(
        &self,
        group: &[Arc<Table>],
        format: &Format,
        file: &mut super::storage::NewFile,
        path: &Path,
    ) -> Result<(), StoreError> {
        file.append(&[&format.file_header(FileKind::Index)])?;
        let max_entries = group.iter().map(|table| table.entry_count).sum();
        let mut writer = TableWriter::new(file, format, FileKind::Index, max_entries);
        let mut sources: Vec<_> = group.iter().map(|table| table.entries()).collect();
        let mut heads = BinaryHeap::new();
        let order =
            |entry: &Entry, source: usize| Reverse((entry.id, entry.pack, entry.offset, entry.stored_bytes, source));
        for (source, entries) in sources.iter_mut().enumerate() {
            if let Some(entry) = entries.next().transpose()? {
                heads.push(order(&entry, source));
            }
        }
        let mut last = None;
        while let Some(Reverse((id, pack, offset, stored_bytes, source))) = heads.pop() {
            // Of several copies one is enough to find the content.
            if self.has_pack(pack) && last != Some(id) {
                writer.push(&Entry { id, pack, offset, stored_bytes })?;
                last = Some(id);
            }
            if let Some(entry) = sources[source].next().transpose()? {
                heads.push(order(&entry, source));
            }
        }
        let mut packs: Vec<u64> = group.iter().flat_map(|table| &table.packs).copied().collect();
        packs.retain(|&pack| self.has_pack(pack));
        packs.sort_unstable();
        packs.dedup();
        writer.finish(&packs)?;
        file.sync()?;
        file.rename(path)
    }
}

/// Opens a pack's own table, or makes one from its records if that is damaged. None if the pack is gone.
pub(super) fn open_pack_table(
    root: &Path,
    format: &Format,
    number: u64,
    rebuild: bool,
) -> Result<Option<Table>, StoreError> {
    let path = root.join("packs").join(format!("{}.pack", number_name(number)));
    let open = || match File::open(&path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(io_error("open", &path, source)),
    };
    if !rebuild {
        let Some(file) = open()? else { return Ok(None) };
        if let Ok(table) = Table::open(file, &path, format, FileKind::Pack, number)? {
            return Ok(Some(table));
        }
    }
    let Some(file) = open()? else { return Ok(None) };
    let file_bytes = file.metadata().map_err(|source| io_error("read", &path, source))?.len();
    let entries = pack::scan(&(&file, path.as_path()), &format.key, number, file_bytes)?;
    Ok(Some(Table::of_entries(entries, &path, number, file_bytes)))
}

/// The numbers of the files in a directory whose names end so.
pub(super) fn numbers_in(directory: &Path, ending: &str) -> Result<Vec<u64>, StoreError> {
    let list = || -> std::io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for file in std::fs::read_dir(directory)? {
            let name = file?.file_name();
            numbers.extend(name.to_str().and_then(|name| name.strip_suffix(ending)).and_then(parse_number));
        }
        Ok(numbers)
    };
    list().map_err(|source| io_error("list", directory, source))
}
