//! `pagemark show`: one checkpoint in full.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::{Checkpoint, Manifest, SpaceRecord, TargetKind};
use pagemark::{PAGE_SIZE, PageTree};

use crate::failure::{Failure, Outcome};
use crate::output::{print, print_json};
use crate::place::{Place, Reference, read};
use crate::report::rounds;
use crate::text::{self, Table, clean};

/// Show what a checkpoint holds: processes, mappings, files, cost
#[derive(Args, Debug)]
pub struct Show {
    #[command(flatten)]
    place: Place,
    /// The manifest, as one JSON document
    #[arg(long)]
    json: bool,
    /// The checkpoint; the newest without a number
    #[arg(value_name = "JOB[@N]")]
    checkpoint: Reference,
}

impl Show {
    pub fn run(self) -> Outcome {
        let repository = self.place.open()?;
        let checkpoint = read(&repository, &self.checkpoint)?;
        if self.json {
            return print_json(&checkpoint.manifest);
        }
        let mut out = String::new();
        head(&mut out, &checkpoint.manifest);
        for space in &checkpoint.manifest.spaces {
            out += "\n";
            out += &process(&checkpoint, space)?;
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
    };
    let state_bytes: u64 = manifest.state.iter().map(|state| state.size).sum();
    let pages: u64 = manifest.spaces.iter().map(|space| space.pages).sum();
    let lines = [
        ("checkpoint", format!("{}@{}", manifest.job, manifest.sequence)),
        ("taken", format!("{} ({})", text::moment(manifest.taken_unix_us), text::ago(manifest.taken_unix_us))),
        ("command", clean(&manifest.command.join(" "))),
        ("holds", what.into()),
        ("memory", format!("{} in {} pages", text::bytes(pages * PAGE_SIZE as u64), text::count(pages))),
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
        ("written", text::bytes(cost.written_bytes)),
    ];
    for (name, value) in lines {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<11} {value}");
    }
}

/// One process and its mappings, with the pages that the checkpoint holds of each.
fn process(checkpoint: &Checkpoint, space: &SpaceRecord) -> Result<String, Failure> {
    let tree = PageTree::load(space.root, checkpoint).map_err(|error| {
        Failure::new(format!("cannot read the memory of process {}", space.pid), error)
            .help("`pagemark verify` tells what is damaged")
    })?;
    let mut table = Table::new(&["  address", "", ">size", ">pages held", "what"]);
    for mapping in &space.mappings {
        let pages = tree.range(mapping.start / PAGE_SIZE as u64..mapping.end / PAGE_SIZE as u64).count();
        table.row([
            format!("  {:012x}", mapping.start),
            mapping.permissions.clone(),
            text::bytes(mapping.end.saturating_sub(mapping.start)),
            text::count(pages as u64),
            clean(&mapping.name),
        ]);
    }
    Ok(format!("process {} {}, {} pages\n{table}", space.pid, clean(&space.name), text::count(space.pages)))
}

fn files(out: &mut String, manifest: &Manifest) {
    if manifest.files.is_empty() {
        return;
    }
    let mut table = Table::new(&["  file open for writing", ">size", "changed"]);
    for file in &manifest.files {
        table.row([
            format!("  {}", clean(&file.path)),
            text::bytes(file.size),
            text::moment((file.modified_unix_ns / 1000).max(0) as u64),
        ]);
    }
    let _ = write!(out, "\n{table}");
}
