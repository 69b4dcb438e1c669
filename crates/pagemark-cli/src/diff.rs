//! `pagemark diff`: what changed from one checkpoint to another.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::{Checkpoint, FileRecord, MappingRecord, SpaceRecord};
use pagemark::{ContentId, PAGE_SIZE, PageTree, Store, StoreError};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{print, print_json};
use crate::place::{Place, Reference, read};
use crate::text::{self, Table, clean};

/// Tell which pages differ between two checkpoints, by mapping
#[derive(Args, Debug)]
pub struct Diff {
    #[command(flatten)]
    place: Place,
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

/// Bytes of memory in one line of `--hex`.
const LINE_BYTES: usize = 16;

/// What differs between two checkpoints.
#[derive(Serialize)]
struct Difference {
    a: String,
    b: String,
    differing_pages: u64,
    processes: Vec<ProcessDifference>,
    files: Vec<FileDifference>,
}

#[derive(Serialize)]
struct ProcessDifference {
    pid: i32,
    name: String,
    /// `a` or `b` where the other has no such process.
    only_in: Option<&'static str>,
    differing_pages: u64,
    mappings: Vec<MappingDifference>,
    #[serde(skip)]
    pages: Vec<(u64, ContentId, ContentId)>,
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
    /// None where the checkpoint does not hold the file.
    size_in_a: Option<u64>,
    size_in_b: Option<u64>,
}

impl Diff {
    pub fn run(self) -> Outcome {
        let repository = self.place.open()?;
        let a = read(&repository, &self.a)?;
        let b = read(&repository, &self.b)?;
        let difference = compare(&a, &b, self.hex).map_err(damaged)?;
        if self.json {
            return print_json(&difference);
        }
        self.tell(&difference);
        if self.hex {
            for process in &difference.processes {
                for &(page, old, new) in &process.pages {
                    print(&hex(&b, page, old, new).map_err(damaged)?);
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn tell(&self, difference: &Difference) {
        let mut out = String::new();
        for process in &difference.processes {
            let where_it_is = match process.only_in {
                Some("a") => format!(", only in {}", difference.a),
                Some(_) => format!(", only in {}", difference.b),
                None => String::new(),
            };
            let pages = text::count(process.differing_pages);
            out += &format!("process {} {}: {pages} pages differ{where_it_is}\n", process.pid, clean(&process.name));
            let mut table = Table::new(&["  address", "", ">size", ">pages differ", "what"]);
            for mapping in &process.mappings {
                table.row([
                    format!("  {:012x}", mapping.start),
                    mapping.permissions.clone(),
                    text::bytes(mapping.end.saturating_sub(mapping.start)),
                    text::count(mapping.differing_pages),
                    clean(&mapping.name),
                ]);
            }
            if !process.mappings.is_empty() {
                out += &table.to_string();
            }
        }
        for file in &difference.files {
            let size = |size: Option<u64>| size.map_or("not there".into(), text::bytes);
            out += &format!("file {}: {} → {}\n", clean(&file.path), size(file.size_in_a), size(file.size_in_b));
        }
        if difference.differing_pages == 0 && difference.files.is_empty() {
            out += &format!("{} and {} hold the same memory and files\n", difference.a, difference.b);
        }
        print(&out);
    }
}

fn damaged(error: StoreError) -> Failure {
    Failure::new("cannot compare the checkpoints", error).help("`pagemark verify` tells what is damaged")
}

fn compare(a: &Checkpoint, b: &Checkpoint, keep_pages: bool) -> Result<Difference, StoreError> {
    let mut processes = Vec::new();
    for space in &b.manifest.spaces {
        let before = a.manifest.spaces.iter().find(|other| other.pid == space.pid);
        processes.push(compare_space(b, before, Some(space), keep_pages)?);
    }
    for space in &a.manifest.spaces {
        if !b.manifest.spaces.iter().any(|other| other.pid == space.pid) {
            processes.push(compare_space(a, Some(space), None, keep_pages)?);
        }
    }
    Ok(Difference {
        a: format!("{}@{}", a.manifest.job, a.manifest.sequence),
        b: format!("{}@{}", b.manifest.job, b.manifest.sequence),
        differing_pages: processes.iter().map(|process| process.differing_pages).sum(),
        processes,
        files: compare_files(&a.manifest.files, &b.manifest.files),
    })
}

fn compare_space(
    store: &dyn Store,
    a: Option<&SpaceRecord>,
    b: Option<&SpaceRecord>,
    keep_pages: bool,
) -> Result<ProcessDifference, StoreError> {
    let root = |space: Option<&SpaceRecord>| space.map_or(ContentId::ZERO, |space| space.root);
    let mappings = |space: Option<&SpaceRecord>| space.map_or(Vec::new(), |space| space.mappings.clone());
    let (in_a, in_b) = (mappings(a), mappings(b));
    let mut differing_pages = 0;
    let mut pages = Vec::new();
    // By first address; a mapping of B goes before one of A that was at the same place.
    let mut by_mapping: BTreeMap<u64, (MappingRecord, u64)> = BTreeMap::new();
    PageTree::diff(store, root(a), root(b), &mut |page, old, new| {
        differing_pages += 1;
        let address = page * PAGE_SIZE as u64;
        let mapping = containing(&in_b, address).or_else(|| containing(&in_a, address));
        let mapping = mapping.cloned().unwrap_or_else(|| unmapped(address));
        by_mapping.entry(mapping.start).or_insert((mapping, 0)).1 += 1;
        if keep_pages {
            pages.push((page, old, new));
        }
        Ok(())
    })?;
    let known = b.or(a);
    Ok(ProcessDifference {
        pid: known.map_or(0, |space| space.pid),
        name: known.map_or(String::new(), |space| space.name.clone()),
        only_in: match (a, b) {
            (Some(_), None) => Some("a"),
            (None, Some(_)) => Some("b"),
            _ => None,
        },
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
        pages,
    })
}

/// The mapping of an ascending list that `address` is in.
fn containing(mappings: &[MappingRecord], address: u64) -> Option<&MappingRecord> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    mappings[..after].last().filter(|mapping| address < mapping.end)
}

/// Stands for the mapping of a page which no mapping of either checkpoint holds.
fn unmapped(address: u64) -> MappingRecord {
    MappingRecord {
        start: address,
        end: address + PAGE_SIZE as u64,
        permissions: "----".into(),
        offset: 0,
        name: "(not mapped)".into(),
    }
}

fn compare_files(a: &[FileRecord], b: &[FileRecord]) -> Vec<FileDifference> {
    let mut by_path: BTreeMap<&str, [Option<&FileRecord>; 2]> = BTreeMap::new();
    for (side, files) in [a, b].into_iter().enumerate() {
        for file in files {
            by_path.entry(&file.path).or_default()[side] = Some(file);
        }
    }
    let content = |file: Option<&FileRecord>| file.map(|file| (file.size, file.root));
    by_path
        .into_iter()
        .filter(|(_, [a, b])| content(*a) != content(*b))
        .map(|(path, [a, b])| FileDifference {
            path: path.to_owned(),
            size_in_a: a.map(|file| file.size),
            size_in_b: b.map(|file| file.size),
        })
        .collect()
}

/// The lines of one page that differ.
fn hex(store: &dyn Store, page: u64, old: ContentId, new: ContentId) -> Result<String, StoreError> {
    let (mut before, mut after) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    store.get_page(old, &mut before)?;
    store.get_page(new, &mut after)?;
    Ok(hex_lines(page * PAGE_SIZE as u64, &before, &after))
}

fn hex_lines(address: u64, before: &[u8], after: &[u8]) -> String {
    let mut out = String::new();
    for (index, (old, new)) in before.chunks(LINE_BYTES).zip(after.chunks(LINE_BYTES)).enumerate() {
        if old != new {
            let address = address + (index * LINE_BYTES) as u64;
            for (sign, line) in [('-', old), ('+', new)] {
                let digits: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
                let letter = |&byte: &u8| if (0x20..0x7f).contains(&byte) { char::from(byte) } else { '.' };
                let letters: String = line.iter().map(letter).collect();
                out += &format!("{address:012x} {sign} {}  {letters}\n", digits.join(" "));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_differ_are_printed() {
        let before = [0u8; 64];
        let mut after = before;
        after[17] = b'A';
        let zeros = vec!["00"; 16].join(" ");
        assert_eq!(
            hex_lines(0x1000, &before, &after),
            format!(
                "000000001010 - {zeros}  ................\n000000001010 + 00 41 {}  .A..............\n",
                vec!["00"; 14].join(" ")
            )
        );
        assert_eq!(hex_lines(0, &before, &before), "");
    }

    #[test]
    fn a_page_belongs_to_the_mapping_around_it() {
        let mapping = |start, end| MappingRecord { start, end, ..unmapped(0) };
        let mappings = [mapping(0x1000, 0x3000), mapping(0x5000, 0x6000)];
        assert_eq!(containing(&mappings, 0x2000).map(|m| m.start), Some(0x1000));
        assert_eq!(containing(&mappings, 0x3000), None);
        assert_eq!(containing(&mappings, 0x0), None);
        assert_eq!(containing(&mappings, 0x5000).map(|m| m.start), Some(0x5000));
    }

    #[test]
    fn files_differ_in_content_not_in_time() {
        let file = |path: &str, size| FileRecord {
            path: path.into(),
            size,
            root: ContentId::ZERO,
            mode: 0o600,
            uid: 0,
            gid: 0,
            modified_unix_ns: size as i64,
        };
        let touched = FileRecord { modified_unix_ns: 77, ..file("/same", 1) };
        let differing =
            compare_files(&[file("/same", 1), file("/gone", 2), file("/grown", 3)], &[touched, file("/grown", 4)]);
        let told: Vec<_> = differing.iter().map(|file| (file.path.as_str(), file.size_in_a, file.size_in_b)).collect();
        assert_eq!(told, [("/gone", Some(2), None), ("/grown", Some(3), Some(4))]);
    }
}
