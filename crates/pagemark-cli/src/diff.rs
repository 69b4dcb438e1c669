//! `pagemark diff`: the pages and files in which two checkpoints differ.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::{Checkpoint, FileRecord, MappingRecord, SpaceKind, SpaceRecord};
use pagemark::target::SpaceId;
use pagemark::{ByteCount, ContentId, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_linux::room;
use pagemark_report::escape::printable;
use pagemark_report::text;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{print, print_json};
use crate::reference::{Reference, read_checkpoint};
use crate::repository::RepositoryOptions;
use crate::space::{MappingRow, mapping_table, space_title};

/// Show which pages differ between two checkpoints, by mapping
#[derive(Args, Debug)]
pub struct Diff {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// One JSON document
    #[arg(long, conflicts_with = "hex")]
    json: bool,
    /// Also print the bytes that differ: 16 a line, `-` as they were in A, `+` as they are in B
    #[arg(long)]
    hex: bool,
    /// The earlier checkpoint
    #[arg(value_name = "A")]
    a: Reference,
    /// The later checkpoint
    #[arg(value_name = "B")]
    b: Reference,
}

/// Differences of two checkpoints.
#[derive(Serialize)]
struct Difference {
    a: String,
    b: String,
    differing_pages: u64,
    processes: Vec<SpaceDifference>,
    /// The spaces that are not processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    spaces: Vec<SpaceDifference>,
    files: Vec<FileDifference>,
}

#[derive(Serialize)]
struct SpaceDifference {
    id: SpaceId,
    #[serde(flatten)]
    kind: SpaceKind,
    name: String,
    /// `a` or `b` if only that checkpoint has the space.
    only_in: Option<&'static str>,
    differing_pages: u64,
    mappings: Vec<MappingDifference>,
    /// Kind, number and name of the space, for the text.
    #[serde(skip)]
    title: String,
    #[serde(skip)]
    roots: (ContentId, ContentId),
}

#[derive(Serialize)]
struct MappingDifference {
    start: u64,
    end: u64,
    permissions: String,
    name: String,
    differing_pages: u64,
}

#[derive(Serialize)]
struct FileDifference {
    path: String,
    /// None if the checkpoint does not hold the file.
    size_in_a: Option<u64>,
    size_in_b: Option<u64>,
}

impl Diff {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let a = read_checkpoint(&repository, &self.a)?;
        let b = read_checkpoint(&repository, &self.b)?;
        let difference = compare(&a, &b).map_err(damaged)?;
        if self.json {
            return print_json(&difference);
        }
        print(&summary(&difference));
        if self.hex {
            for space in difference.processes.iter().chain(&difference.spaces) {
                let (old, new) = space.roots;
                let printed = PageTree::diff(&b, old, new, &mut |page, old, new| {
                    print(&hex(&b, page, old, new)?);
                    Ok(())
                });
                printed.map_err(damaged)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The differing pages by mapping, and the differing files.
fn summary(difference: &Difference) -> String {
    let mut out = String::new();
    for space in difference.processes.iter().chain(&difference.spaces) {
        let only_in = match space.only_in {
            Some("a") => format!(", only in {}", difference.a),
            Some(_) => format!(", only in {}", difference.b),
            None => String::new(),
        };
        let pages = text::count(space.differing_pages);
        out += &format!("{}: {pages} pages differ{only_in}\n", space.title);
        let mappings = space.mappings.iter().map(|mapping| MappingRow {
            start: mapping.start,
            end: mapping.end,
            permissions: &mapping.permissions,
            pages: mapping.differing_pages,
            name: &mapping.name,
        });
        out += &mapping_table("pages differ", mappings);
    }
    for file in &difference.files {
        let size = |size: Option<u64>| size.map_or("not there".into(), text::bytes);
        out += &format!("file {}: {} → {}\n", printable(&file.path), size(file.size_in_a), size(file.size_in_b));
    }
    if difference.differing_pages == 0 && difference.files.is_empty() {
        out += &format!("{} and {} hold the same memory and files\n", difference.a, difference.b);
    }
    out
}

fn damaged(error: pagemark::Error) -> Failure {
    Failure::new("cannot compare the checkpoints", error).help("`pagemark verify` lists what is damaged")
}

fn compare(a: &Checkpoint, b: &Checkpoint) -> Result<Difference, pagemark::Error> {
    let mut differences = Vec::new();
    let mut rows = most_rows()?;
    for space in &b.manifest.spaces {
        let before = a.manifest.spaces.iter().find(|other| is_same(other, space));
        differences.push(compare_space(b, before, Some(space), space, &mut rows)?);
    }
    for space in &a.manifest.spaces {
        if !b.manifest.spaces.iter().any(|other| is_same(other, space)) {
            differences.push(compare_space(a, Some(space), None, space, &mut rows)?);
        }
    }
    let differing_pages = differences.iter().map(|difference| difference.differing_pages).sum();
    let is_process = |difference: &SpaceDifference| matches!(difference.kind, SpaceKind::Process { .. });
    let (processes, spaces) = differences.into_iter().partition(is_process);
    Ok(Difference {
        a: format!("{}@{}", a.manifest.job, a.manifest.sequence),
        b: format!("{}@{}", b.manifest.job, b.manifest.sequence),
        differing_pages,
        processes,
        spaces,
        files: compare_files(&a.manifest.files, &b.manifest.files),
    })
}

fn is_same(a: &SpaceRecord, b: &SpaceRecord) -> bool {
    a.id == b.id && a.kind == b.kind
}

/// The most rows of all tables: pages of a hostile repository that are in no mapping can be in any
/// number of places.
fn most_rows() -> Result<usize, pagemark::Error> {
    room::most_values::<[MappingRecord; 2]>().map_err(pagemark::Error::system("asking for the memory"))
}

/// Compares a space, which one of `a` and `b` may lack. `known` is one that exists. `rows` is how
/// many rows the tables may have, less those of this space afterwards.
fn compare_space(
    store: &dyn Store,
    a: Option<&SpaceRecord>,
    b: Option<&SpaceRecord>,
    known: &SpaceRecord,
    rows: &mut usize,
) -> Result<SpaceDifference, pagemark::Error> {
    let root = |space: Option<&SpaceRecord>| space.map_or(ContentId::ZERO, |space| space.root);
    let mappings = |space: Option<&SpaceRecord>| space.map_or(Vec::new(), |space| space.mappings.clone());
    let (in_a, in_b) = (mappings(a), mappings(b));
    let mut differing_pages = 0;
    // By first address. Of two mappings at the same address, that of B counts.
    let mut by_mapping: BTreeMap<u64, (MappingRecord, u64)> = BTreeMap::new();
    PageTree::diff(store, root(a), root(b), &mut |page, _, _| {
        differing_pages += 1;
        let address = page.address().get();
        let found = containing(&in_b, address).or_else(|| containing(&in_a, address));
        let mapping = found.cloned().unwrap_or_else(|| unmapped(&known.kind, address));
        let follows = |last: &MappingRecord| last.end == address && last.permissions == mapping.permissions;
        match by_mapping.last_entry() {
            // Pages in no mapping that follow one another are shown as one.
            Some(mut last) if found.is_none() && follows(&last.get().0) => {
                let (run, pages) = last.get_mut();
                (run.end, *pages) = (mapping.end, *pages + 1);
            }
            _ => by_mapping.entry(mapping.start).or_insert((mapping, 0)).1 += 1,
        }
        match by_mapping.len() <= *rows {
            true => Ok(()),
            false => {
                Err(pagemark::Error::system(format!("listing where {} differs", space_title(known)))(room::none()))
            }
        }
    })?;
    *rows -= by_mapping.len();
    Ok(SpaceDifference {
        id: known.id,
        kind: known.kind.clone(),
        name: known.label.clone(),
        only_in: match (a, b) {
            (Some(_), None) => Some("a"),
            (None, Some(_)) => Some("b"),
            _ => None,
        },
        title: space_title(known),
        differing_pages,
        mappings: by_mapping
            .into_values()
            .map(|(mapping, differing_pages)| MappingDifference {
                start: mapping.start,
                end: mapping.end,
                permissions: mapping.permissions,
                name: mapping.name,
                differing_pages,
            })
            .collect(),
        roots: (root(a), root(b)),
    })
}

/// The mapping, of an ascending list, that contains `address`.
fn containing(mappings: &[MappingRecord], address: u64) -> Option<&MappingRecord> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    mappings[..after].last().filter(|mapping| address < mapping.end)
}

/// A placeholder for the mapping of a page that is in no mapping of either checkpoint: that of a
/// process, or one of a space that has no mappings.
fn unmapped(kind: &SpaceKind, address: u64) -> MappingRecord {
    let (permissions, name) = match kind {
        SpaceKind::Process { .. } => ("----", "(not mapped)"),
        _ => ("", ""),
    };
    MappingRecord {
        start: address,
        end: address.saturating_add(ByteCount::PAGE.get()),
        permissions: permissions.into(),
        offset: 0,
        name: name.into(),
        exception: None,
        memory: None,
    }
}

fn compare_files(a: &[FileRecord], b: &[FileRecord]) -> Vec<FileDifference> {
    let mut by_path: BTreeMap<&str, [Option<&FileRecord>; 2]> = BTreeMap::new();
    for (side, files) in [a, b].into_iter().enumerate() {
        for file in files {
            by_path.entry(&file.path).or_default()[side] = Some(file);
        }
    }
    let content = |file: Option<&FileRecord>| file.map(|file| file.content);
    by_path
        .into_iter()
        .filter(|(_, [a, b])| content(*a) != content(*b))
        .map(|(path, [a, b])| FileDifference {
            path: path.to_owned(),
            size_in_a: a.map(|file| file.content.bytes.get()),
            size_in_b: b.map(|file| file.content.bytes.get()),
        })
        .collect()
}

/// A hex dump of the lines of a page that differ.
fn hex(store: &dyn Store, page: PageNumber, old: ContentId, new: ContentId) -> Result<String, pagemark::Error> {
    let (mut before, mut after) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    store.get_page(old, &mut before)?;
    store.get_page(new, &mut after)?;
    Ok(pagemark_report::hex::difference(page.address().get(), &before, &after))
}

#[cfg(test)]
mod tests {
    use pagemark::{Blob, Kind, MemoryStore};

    use super::*;

    #[test]
    fn a_page_belongs_to_the_mapping_around_it() {
        let mapping = |start, end| MappingRecord { start, end, ..unmapped(&SpaceKind::Process { pid: 1 }, 0) };
        let mappings = [mapping(0x1000, 0x3000), mapping(0x5000, 0x6000)];
        assert_eq!(containing(&mappings, 0x2000).map(|m| m.start), Some(0x1000));
        assert_eq!(containing(&mappings, 0x3000), None);
        assert_eq!(containing(&mappings, 0x0), None);
        assert_eq!(containing(&mappings, 0x5000).map(|m| m.start), Some(0x5000));
    }

    #[test]
    fn pages_in_no_mapping_that_follow_one_another_are_shown_as_one() {
        let mut store = MemoryStore::new();
        let mut space = |kind: SpaceKind, pages: &[u64], mappings: Vec<MappingRecord>| {
            let mut tree = PageTree::new();
            for &page in pages {
                tree.set(PageNumber::new(page), store.put(Kind::Page, &[page as u8 + 1; PAGE_SIZE]).unwrap());
            }
            let root = tree.save(&mut store).unwrap();
            SpaceRecord { id: 1, label: "a".into(), kind, root, pages: pages.len() as u64, mappings }
        };
        let disk = space(SpaceKind::Disk { bytes: ByteCount::of_pages(9) }, &[1, 2, 3, 5], Vec::new());
        let mapped =
            MappingRecord { start: 0x1000, end: 0x2000, permissions: "rw-p".into(), ..unmapped(&disk.kind, 0) };
        let process = space(SpaceKind::Process { pid: 1 }, &[1, 2, 3], vec![mapped]);
        let rows = |space: &SpaceRecord| {
            let difference = compare_space(&store, None, Some(space), space, &mut 2).unwrap();
            let row = |found: MappingDifference| (found.start, found.end, found.name, found.differing_pages);
            difference.mappings.into_iter().map(row).collect::<Vec<_>>()
        };
        assert_eq!(rows(&disk), [(0x1000, 0x4000, String::new(), 3), (0x5000, 0x6000, String::new(), 1)]);
        let unmapped = (0x2000, 0x4000, "(not mapped)".to_owned(), 2);
        assert_eq!(rows(&process), [(0x1000, 0x2000, String::new(), 1), unmapped]);

        for space in [disk, process] {
            let error = compare_space(&store, None, Some(&space), &space, &mut 1).err().unwrap();
            assert!(error.to_string().contains(&space_title(&space)), "{error}");
        }
    }

    #[test]
    fn files_differ_in_content_not_in_time() {
        let file = |path: &str, size: u64| FileRecord {
            path: path.into(),
            content: Blob { bytes: ByteCount::new(size), root: ContentId::ZERO },
            mode: 0o600,
            uid: 0,
            gid: 0,
            modified_unix_ns: size as i64,
            is_shared: false,
        };
        let touched = FileRecord { modified_unix_ns: 77, ..file("/same", 1) };
        let differing =
            compare_files(&[file("/same", 1), file("/gone", 2), file("/grown", 3)], &[touched, file("/grown", 4)]);
        let found: Vec<_> = differing.iter().map(|file| (file.path.as_str(), file.size_in_a, file.size_in_b)).collect();
        assert_eq!(found, [("/gone", Some(2), None), ("/grown", Some(3), Some(4))]);
    }
}
