//! `pagemark show`: the content and the cost of a checkpoint.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::{Checkpoint, Manifest, MappingException, MappingRecord, SpaceRecord, TargetKind};
use pagemark::{AddressRangeExt, ByteCount, PageTree};
use pagemark_report::table::Table;
use pagemark_report::text;

use crate::failure::{Failure, Outcome};
use crate::job;
use crate::output::{print, print_json};
use crate::reference::{Reference, read_checkpoint};
use crate::report::rounds;
use crate::repository::RepositoryOptions;
use crate::space::{MappingRow, mapping_table, space_title};

/// Show what a checkpoint holds: processes, mappings, files, cost
#[derive(Args, Debug)]
pub struct Show {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// The manifest, as one JSON document
    #[arg(long)]
    json: bool,
    /// The checkpoint; the newest without a number
    #[arg(value_name = "JOB[@N]")]
    checkpoint: Reference,
}

impl Show {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let checkpoint = read_checkpoint(&repository, &self.checkpoint)?;
        if self.json {
            return print_json(&checkpoint.manifest);
        }
        let mut out = String::new();
        head(&mut out, &checkpoint.manifest);
        for space in &checkpoint.manifest.spaces {
            out += "\n";
            out += &self::space(&checkpoint, space)?;
        }
        files(&mut out, &checkpoint.manifest);
        print(&out);
        Ok(ExitCode::SUCCESS)
    }
}

fn head(out: &mut String, manifest: &Manifest) {
    let cost = &manifest.cost;
    let what = match manifest.kind {
        TargetKind::Process => "processes with their whole state",
        TargetKind::Memory => "memory and registers alone: to look at, not to restore",
        TargetKind::Region => "memory that a program has saved, for the program to open",
        TargetKind::VirtualMachine => "a virtual machine with its devices",
    };
    let state_bytes: u64 = manifest.state.iter().map(|state| state.content.bytes.get()).sum();
    let pages: u64 = manifest.spaces.iter().map(|space| space.pages).sum();
    let lines = [
        ("checkpoint", format!("{}@{}", manifest.job, manifest.sequence)),
        ("taken", format!("{} ({})", text::moment(manifest.taken_unix_us), text::ago(manifest.taken_unix_us))),
        ("command", or_unknown(Some(job::command_of(manifest)).filter(|command| !command.is_empty()))),
        ("directory", or_unknown(manifest.program.as_ref().and_then(|program| program.directory.clone()))),
        ("holds", what.into()),
        ("memory", format!("{} in {} pages", text::bytes(ByteCount::of_pages(pages).get()), text::count(pages))),
        ("state", format!("{} in {} files", text::bytes(state_bytes), manifest.state.len())),
        (
            "dirty",
            format!(
                "{} pages by {}, {} of them copied while frozen, {}",
                text::count(cost.dirty_pages),
                manifest.mechanism,
                text::count(cost.frozen_pages),
                rounds(cost.rounds)
            ),
        ),
        (
            "frozen",
            format!(
                "{} (memory {}, state {})",
                text::micros(cost.downtime_us),
                text::micros(cost.memory_downtime_us),
                text::micros(cost.state_downtime_us)
            ),
        ),
        ("in flight", format!("at most {} of copied pages in Pagemark's memory", text::bytes(cost.peak_flight_bytes))),
        ("written", text::bytes(cost.written_bytes)),
    ];
    let kept = (cost.kept_pages() > 0).then(|| {
        let (pages, cow) = (text::count(cost.kept_pages()), text::count(cost.cow_pages));
        let waited = text::count(cost.write_faults);
        ("kept", format!("{pages} pages copied after the freeze, {cow} of them before a write; {waited} writes waited"))
    });
    let mut table = Table::without_header(2);
    for (name, value) in lines.into_iter().chain(kept) {
        table.row([name.into(), value]);
    }
    *out += &table.to_string();
}

/// Early checkpoints do not say everything of their programs.
fn or_unknown(text: Option<String>) -> String {
    text.unwrap_or_else(|| "unknown".into())
}

/// A space and its mappings, with the number of pages that the checkpoint holds of each.
fn space(checkpoint: &Checkpoint, space: &SpaceRecord) -> Result<String, Failure> {
    let tree = PageTree::load(space.root, checkpoint).map_err(|error| {
        Failure::new(format!("cannot read the memory of {}", space_title(space)), error)
            .help("`pagemark verify` lists what is damaged")
    })?;
    let names: Vec<String> = space.mappings.iter().map(description).collect();
    let mappings = space.mappings.iter().zip(&names).map(|(mapping, name)| MappingRow {
        start: mapping.start,
        end: mapping.end,
        permissions: &mapping.permissions,
        pages: tree.count(mapping.range().page_range()),
        name,
    });
    let table = mapping_table("pages held", mappings);
    Ok(format!("{}, {} pages\n{table}", space_title(space), text::count(space.pages)))
}

/// The name of a mapping, and its exception.
fn description(mapping: &MappingRecord) -> String {
    let exception = match mapping.exception {
        None if mapping.memory.is_some() => "shared: held once, below",
        None => return mapping.name.clone(),
        Some(MappingException::SavedWhole) => "not tracked: CRIU saves all of it in each checkpoint",
        Some(MappingException::SharedOutside) => {
            "a process outside maps it too: CRIU saves all of it in each checkpoint"
        }
        Some(MappingException::Unregistrable) => "unregistrable: counts as written in each checkpoint",
        Some(MappingException::Droppable) => "droppable: restored as zeros",
    };
    format!("{} ({exception})", mapping.name).trim_start().to_owned()
}

fn files(out: &mut String, manifest: &Manifest) {
    if manifest.files.is_empty() {
        return;
    }
    let mut table = Table::new(["  file", ">size", "changed"]);
    for file in &manifest.files {
        table.row([
            format!("  {}", file.path),
            text::bytes(file.content.bytes.get()),
            text::moment((file.modified_unix_ns / 1000).max(0) as u64),
        ]);
    }
    let _ = write!(out, "\n{table}");
}
