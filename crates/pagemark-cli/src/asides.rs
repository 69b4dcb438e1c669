//! `pagemark asides`: lists and removes what files held before restores changed them.

use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use pagemark_process::files::asides::{self, FoundAside, RestoreState};
use pagemark_process::files::decode_path;
use pagemark_report::escape::printable;
use pagemark_report::message;
use pagemark_report::text;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{print, print_json};
use crate::repository::RepositoryOptions;

/// List what files held before restores changed them, or remove it
///
/// A restore that changes files copies their present content into a directory of its own first.
#[derive(Args, Debug)]
pub struct Asides {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    directory: AsidesOptions,
    /// One JSON document
    #[arg(long, conflicts_with_all = ["remove", "remove_all"])]
    json: bool,
    /// Remove these, by the names that the list shows; the content is lost
    #[arg(long, value_name = "NAME", num_args = 1..)]
    remove: Vec<OsString>,
    /// Remove all, except those of interrupted restores and of restores in progress
    #[arg(long, conflicts_with = "remove")]
    remove_all: bool,
}

/// The directory of asides.
#[derive(Args, Debug)]
pub struct AsidesOptions {
    /// Directory for the present content of files that a restore changes [default: asides in the
    /// repository]
    #[arg(long = "asides", value_name = "DIR")]
    asides: Option<PathBuf>,
}

impl AsidesOptions {
    /// The directory: that of the option, or the default.
    pub fn path(&self, repository: &RepositoryOptions) -> Result<PathBuf, Failure> {
        self.asides.clone().map_or_else(|| Ok(repository.path()?.join("asides")), Ok)
    }
}

#[derive(Serialize)]
struct Document {
    name: String,
    path: String,
    /// `complete`, `in-progress`, `interrupted` or `unused`.
    state: &'static str,
    allocated_bytes: u64,
    checkpoint: Option<String>,
    begun_unix_us: Option<u64>,
    files: Vec<File>,
}

#[derive(Serialize)]
struct File {
    path: String,
    /// Path of the copy of its content; none if the restore created it or changed only attributes.
    copy: Option<String>,
    existed: bool,
}

impl Asides {
    pub fn run(self) -> Outcome {
        let directory = self.directory.path(&self.repository)?;
        let failed = |error| Failure::new("cannot list asides", error).help("name another directory with --asides DIR");
        if !self.remove.is_empty() {
            return self.remove.iter().try_for_each(|name| remove(&directory, name)).map(|()| ExitCode::SUCCESS);
        }
        let found = asides::list(&directory).map_err(failed)?;
        if self.remove_all {
            let removable = |found: &&FoundAside| matches!(found.state, RestoreState::Complete | RestoreState::Unused);
            for found in found.iter().filter(removable) {
                remove(&directory, found.path.file_name().unwrap_or_default())?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let documents: Vec<Document> = found.iter().map(Document::from).collect();
        if self.json {
            return print_json(&documents);
        }
        documents.iter().for_each(|document| print(&document.to_text()));
        Ok(ExitCode::SUCCESS)
    }
}

fn remove(directory: &std::path::Path, name: &std::ffi::OsStr) -> Result<(), Failure> {
    asides::remove(directory, name).map_err(|error| {
        Failure::new(format!("cannot remove the asides {}", printable(&name.to_string_lossy())), error)
            .help("`pagemark asides` lists them")
    })
}

impl From<&FoundAside> for Document {
    fn from(found: &FoundAside) -> Self {
        let aside = found.aside.as_ref();
        let files = aside.map_or(&[][..], |aside| &aside.files).iter().map(|file| File {
            path: decode_path(&file.path).map_or_else(|| file.path.clone(), |path| path.display().to_string()),
            copy: file.copy.as_ref().map(|copy| found.path.join(copy).display().to_string()),
            existed: file.existed,
        });
        Document {
            name: found.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            path: found.path.display().to_string(),
            state: match found.state {
                RestoreState::Complete => "complete",
                RestoreState::InProgress => "in-progress",
                RestoreState::Interrupted => "interrupted",
                RestoreState::Unused => "unused",
            },
            allocated_bytes: found.allocated_bytes,
            checkpoint: aside.map(|aside| aside.checkpoint.clone()),
            begun_unix_us: aside.map(|aside| aside.begun_unix_us),
            files: files.collect(),
        }
    }
}

impl Document {
    fn to_text(&self) -> String {
        let when = self.begun_unix_us.map_or_else(String::new, |begun| format!(", {}", text::ago(begun)));
        let state = match self.state {
            "interrupted" => "; the restore was interrupted, and these files may hold anything",
            "in-progress" => "; the restore is in progress",
            "unused" => "; the restore was interrupted before it changed a file",
            _ => "",
        };
        let mut out = format!("{}{when}, {}{state}\n", printable(&self.name), text::bytes(self.allocated_bytes));
        for file in &self.files {
            let path = printable(&file.path);
            let _ = match (&file.copy, file.existed) {
                (Some(copy), _) => writeln!(out, "  {path} held what is in {}", printable(copy)),
                (None, true) => writeln!(out, "  {path} had other permissions or another owner"),
                (None, false) => writeln!(out, "  {path} did not exist"),
            };
        }
        out
    }
}

/// Reports the interrupted restores whose asides are in `directory`.
pub fn report_interrupted(directory: &std::path::Path) {
    // What cannot be listed is reported by the restore, if that needs the directory.
    for found in asides::list(directory).unwrap_or_default() {
        if found.state == RestoreState::Interrupted {
            let path = printable(&found.path.display().to_string());
            message!("pagemark: an earlier restore was interrupted; what its files held before is in {path}");
            message!("help: `pagemark asides` lists them, and removes them with --remove");
        }
    }
}
