//! All tables of a repository together: they find a piece of content.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::sync::Arc;

use super::format::{FileKind, Format, INDEXES, PACKS, index_name, pack_name, parse_number, random_number};
use super::pack;
use super::table::{Entry, Table, TableWriter, Unreadable};
use crate::backend::{Backend, BackendError, ListKind, NewObject, Stamp};
use crate::{ContentId, Error};

/// Tables are merged once there are this many of similar size.
const MERGE_TABLES: usize = 6;
/// A table is merged with smaller ones if it is not larger than this many times all of them.
const MERGE_RATIO: u64 = 3;

/// Number of tables that are kept open, of packs that no index file covers. There are few of them
/// unless index files are lost.
const MAX_OPEN_TABLES: usize = if cfg!(test) { 8 } else { 64 };

/// The files of the repository at one moment: the packs, and tables that name all their content.
#[derive(Default)]
pub(super) struct View {
    /// Index files first, those with the most entries in front.
    pub(super) tables: Vec<Arc<Table>>,
    /// The packs that exist, in ascending order. Entries of other packs are out of date.
    pub(super) packs: Vec<u64>,
    /// Packs that were listed and then gone, in ascending order. Their content may be in packs that
    /// were not there yet when the packs were listed.
    gone_packs: Vec<u64>,
    /// Says whether the view is still current.
    stamp: Option<ViewStamp>,
}

/// The stamps of the directories, and how many tables were known to be damaged.
#[derive(PartialEq, Eq)]
struct ViewStamp {
    directories: [Stamp; 2],
    bad_tables: usize,
}

impl ViewStamp {
    /// None if the backend does not report changes.
    fn take(backend: &dyn Backend, bad: &HashSet<u64>) -> Option<ViewStamp> {
        Some(ViewStamp { directories: [backend.stamp(PACKS)?, backend.stamp(INDEXES)?], bad_tables: bad.len() })
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
    pub(super) fn find(&self, id: ContentId) -> Result<Result<Option<Found>, BadTable>, Error> {
        self.find_from(id, 0)
    }

    /// Like [`View::find`], in the tables from the given one on.
    pub(super) fn find_from(&self, id: ContentId, first: usize) -> Result<Result<Option<Found>, BadTable>, Error> {
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

    /// Like [`View::find_from`], but only a copy that is stored whole, not as a delta.
    pub(super) fn find_whole_from(
        &self,
        id: ContentId,
        mut first: usize,
    ) -> Result<Result<Option<Found>, BadTable>, Error> {
        loop {
            match self.find_from(id, first)? {
                Ok(Some(found)) if found.entry.is_delta => first = found.table + 1,
                searched => return Ok(searched),
            }
        }
    }

    /// Where a page that is stored whole probably is: the entry is not checked.
    pub(super) fn guess_whole(&self, id: ContentId) -> Option<Entry> {
        let guess = |table: &Arc<Table>| table.find_unchecked(id).ok()?.ok()?.map(|(_, entry)| entry);
        self.tables.iter().filter_map(guess).find(|entry| !entry.is_delta && self.has_pack(entry.pack))
    }

    /// This view with more packs.
    pub(super) fn with_packs(&self, more: &[Arc<Table>]) -> View {
        let mut view = View { tables: self.tables.clone(), packs: self.packs.clone(), ..View::default() };
        view.packs.extend(more.iter().map(|table| table.number));
        view.packs.sort_unstable();
        view.tables.extend(more.iter().cloned());
        view
    }

    /// True if nothing changed since the view was read.
    pub(super) fn is_current(&self, backend: &dyn Backend, bad: &HashSet<u64>) -> bool {
        self.stamp.is_some() && self.stamp == ViewStamp::take(backend, bad)
    }

    pub(super) fn has_pack(&self, pack: u64) -> bool {
        self.packs.binary_search(&pack).is_ok()
    }

    /// True if both consist of the same files, and the same ones vanished while they were read.
    pub(super) fn is_same(&self, other: &View) -> bool {
        let numbers = |view: &View| view.tables.iter().map(|table| table.number).collect::<Vec<_>>();
        self.packs == other.packs && self.gone_packs == other.gone_packs && numbers(self) == numbers(other)
    }

    /// Lists the files. Tables that `old` has are not read again; `bad` ones are not used.
    pub(super) fn read(
        backend: &Arc<dyn Backend>,
        format: &Format,
        old: &View,
        bad: &HashSet<u64>,
    ) -> Result<View, BackendError> {
        let stamp = ViewStamp::take(&**backend, bad);
        let mut packs = numbers_in(&**backend, PACKS, ".pack")?;
        packs.sort_unstable();
        let mut indexes = Vec::new();
        for number in numbers_in(&**backend, INDEXES, ".idx")? {
            if bad.contains(&number) {
                continue;
            }
            match old.tables.iter().find(|table| table.number == number) {
                Some(table) => indexes.push(table.clone()),
                // A damaged table is not needed: each pack has its own.
                None => indexes.extend(open_table(backend, format, FileKind::Index, number)?.map(Arc::new)),
            }
        }
        indexes.sort_unstable_by_key(|table| (Reverse(table.entry_count), table.number));
        let mut view = View { packs, stamp, ..View::default() };
        let mut covered = HashSet::new();
        for table in indexes {
            let more = table.packs.iter().filter(|&&pack| view.has_pack(pack) && covered.insert(pack)).count();
            if more > 0 {
                view.tables.push(table);
            }
        }
        let uncovered: Vec<u64> = view.packs.iter().copied().filter(|pack| !covered.contains(pack)).collect();
        for number in uncovered {
            let known = old.tables.iter().find(|table| table.number == number);
            if let Some(table) = known.filter(|table| table.is_rebuilt() || !bad.contains(&number)) {
                view.tables.push(table.clone());
                continue;
            }
            match open_pack_table(backend, format, number, bad.contains(&number))? {
                Some(mut table) => {
                    if view.tables.len() >= MAX_OPEN_TABLES {
                        table.close();
                    }
                    view.tables.push(Arc::new(table));
                }
                None => view.gone_packs.push(number),
            }
        }
        let View { packs, gone_packs, .. } = &mut view;
        packs.retain(|pack| gone_packs.binary_search(pack).is_err());
        Ok(view)
    }

    /// Which tables are to be merged now, if any: as many small ones as keep the number of tables
    /// logarithmic.
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

    /// True if it is time to merge tables.
    pub(super) fn wants_merge(&self) -> bool {
        self.merge_group().is_some()
    }

    /// Merges tables if it is time to. Returns the view with the new one.
    pub(super) fn merged(&self, backend: &Arc<dyn Backend>, format: &Format) -> Result<Option<View>, Error> {
        self.merge_group().map(|group| self.merge(&group, backend, format)).transpose()
    }

    /// Writes an index file with the current entries of `group`, and removes those of the group
    /// that were index files.
    pub(super) fn merge(
        &self,
        group: &[Arc<Table>],
        backend: &Arc<dyn Backend>,
        format: &Format,
    ) -> Result<View, Error> {
        let number = random_number()?;
        let name = index_name(number);
        let mut object = backend.create(&name)?;
        self.write_merged(group, format, &mut *object)?;
        let table = object.finish()?;
        if let Err(error) = object.publish().and_then(|()| backend.sync(INDEXES)) {
            // What cannot be removed now, the next writer removes.
            let _ = backend.remove(&name);
            return Err(error.into());
        }
        let is_merged = |table: &Arc<Table>| group.iter().any(|other| other.number == table.number);
        for table in group.iter().filter(|table| table.kind == FileKind::Index) {
            backend.remove(&table.name())?;
        }
        let table = Table::open(table, backend, format, FileKind::Index, number)?;
        let table = table.map_err(|unreadable| unreadable.of(&name))?;
        let mut tables: Vec<_> = self.tables.iter().filter(|table| !is_merged(table)).cloned().collect();
        tables.push(Arc::new(table));
        tables.sort_by_key(|table| (table.kind == FileKind::Pack, Reverse(table.entry_count), table.number));
        Ok(View { tables, packs: self.packs.clone(), ..View::default() })
    }

    fn write_merged(&self, group: &[Arc<Table>], format: &Format, object: &mut dyn NewObject) -> Result<(), Error> {
        object.append(&[&format.file_header(FileKind::Index)])?;
        let max_entries = group.iter().map(|table| table.entry_count).sum();
        let mut writer = TableWriter::new(object, format, FileKind::Index, max_entries);
        let mut sources: Vec<_> = group.iter().map(|table| table.entries()).collect();
        let mut heads = BinaryHeap::new();
        let order = |entry: Entry, source: usize| Reverse((entry, source));
        for (source, entries) in sources.iter_mut().enumerate() {
            if let Some(entry) = entries.next().transpose()? {
                heads.push(order(entry, source));
            }
        }
        let mut last = None;
        while let Some(Reverse((entry, source))) = heads.pop() {
            // Of several copies one is enough to find the content.
            if self.has_pack(entry.pack) && last != Some(entry.id) {
                writer.push(&entry)?;
                last = Some(entry.id);
            }
            if let Some(entry) = sources[source].next().transpose()? {
                heads.push(order(entry, source));
            }
        }
        let mut packs: Vec<u64> = group.iter().flat_map(|table| &table.packs).copied().collect();
        packs.retain(|&pack| self.has_pack(pack));
        packs.sort_unstable();
        packs.dedup();
        Ok(writer.finish(&packs)?)
    }
}

/// Opens the table in a pack or an index file. None if the file is gone or its table is damaged.
fn open_table(
    backend: &Arc<dyn Backend>,
    format: &Format,
    kind: FileKind,
    number: u64,
) -> Result<Option<Table>, BackendError> {
    let name = match kind {
        FileKind::Pack => pack_name(number),
        FileKind::Index => index_name(number),
    };
    let Some(object) = backend.open(&name)? else { return Ok(None) };
    match Table::open(object, backend, format, kind, number) {
        Ok(Ok(table)) => Ok(Some(table)),
        Ok(Err(Unreadable(_))) => Ok(None),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens a pack's own table, or makes one from its records if that is damaged. None if the pack is
/// gone.
pub(super) fn open_pack_table(
    backend: &Arc<dyn Backend>,
    format: &Format,
    number: u64,
    rebuild: bool,
) -> Result<Option<Table>, BackendError> {
    if !rebuild && let Some(table) = open_table(backend, format, FileKind::Pack, number)? {
        return Ok(Some(table));
    }
    let Some(object) = backend.open(&pack_name(number))? else { return Ok(None) };
    let scan = || {
        let file_bytes = object.bytes()?;
        Ok((pack::scan(&*object, &format.key, number, file_bytes)?, file_bytes))
    };
    match scan() {
        Ok((entries, file_bytes)) => Ok(Some(Table::of_entries(entries, number, file_bytes))),
        Err(error) if BackendError::is_not_found(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The numbers of the objects in a directory whose names end so.
pub(super) fn numbers_in(backend: &dyn Backend, directory: &str, ending: &str) -> Result<Vec<u64>, BackendError> {
    let objects = backend.list(directory)?.into_iter().filter(|entry| entry.kind == ListKind::Object);
    Ok(objects.filter_map(|entry| entry.name.strip_suffix(ending).and_then(parse_number)).collect())
}
