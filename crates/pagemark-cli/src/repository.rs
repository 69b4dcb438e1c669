//! Which repository a command reads or writes.

use std::env;
use std::path::{Path, PathBuf};

use clap::Args;
use nix::unistd::{User, geteuid};
use pagemark::repository::Repository;
use pagemark::{Error, ErrorKind};
use pagemark_report::escape::printable;
use pagemark_report::message;

use crate::failure::Failure;
use crate::options::MemoryOptions;

/// Options of every command that reads or writes a repository.
#[derive(Args, Debug)]
pub struct RepositoryOptions {
    /// Directory of the repository [default: $PAGEMARK_REPO, else ~/.local/share/pagemark]
    #[arg(long, value_name = "DIR", global = true)]
    pub repo: Option<PathBuf>,
    /// Use the repository although other users can change it: it belongs to another user, or its
    /// mode lets others write it. They decide what a restore from it brings back
    #[arg(long, global = true)]
    pub trust_repo: bool,
}

/// The home that the user database names. Services have no HOME.
fn registered_home() -> Option<PathBuf> {
    User::from_uid(geteuid()).ok().flatten().map(|user| user.dir)
}

impl RepositoryOptions {
    /// The directory: that of the option, of PAGEMARK_REPO, or the default.
    pub fn path(&self) -> Result<PathBuf, Failure> {
        let directory = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        self.repo
            .clone()
            .or_else(|| directory("PAGEMARK_REPO"))
            .or_else(|| directory("XDG_DATA_HOME").map(|data| data.join("pagemark")))
            .or_else(|| directory("HOME").or_else(registered_home).map(|home| home.join(".local/share/pagemark")))
            .ok_or_else(|| {
                Failure::plain("it is not known where the repository is: HOME is not set, and this user has no home")
                    .help("name it with --repo DIR or PAGEMARK_REPO")
            })
    }

    /// Opens the repository, which must exist.
    pub fn open(&self) -> Result<Repository, Failure> {
        let path = self.path()?;
        if !path.exists() {
            return Err(Failure::plain(format!("there is no repository at {}", path.display())).help(
                "take a checkpoint first (`pagemark run -- PROGRAM`), or name another with --repo DIR or PAGEMARK_REPO",
            ));
        }
        self.opened(&path, self.options().open(&path))
    }

    /// Opens the repository to store memory in it, and creates it if it does not exist.
    pub fn open_or_create(&self, memory: &MemoryOptions) -> Result<Repository, Failure> {
        let path = self.path()?;
        self.opened(&path, self.options().whole_pages(memory.whole_pages).open_or_create(&path))
    }

    fn options(&self) -> pagemark::repository::RepositoryOptions {
        pagemark::repository::RepositoryOptions::default().trusted(self.trust_repo)
    }

    fn opened(&self, path: &Path, result: Result<Repository, Error>) -> Result<Repository, Failure> {
        let repository = result.map_err(|error| {
            let help = match error.kind() {
                ErrorKind::Exposed => {
                    "make it yours alone (chown, chmod go-w), or use it all the same with --trust-repo"
                }
                _ => "another place can be named with --repo DIR or PAGEMARK_REPO",
            };
            Failure::new(format!("cannot open the repository at {}", path.display()), error).help(help)
        })?;
        if let Some(damage) = repository.config_damage() {
            let config = printable(&path.join("config").display().to_string());
            message!(
                "pagemark: {config}: {}. Its copy is used; the next checkpoint writes it again",
                printable(damage)
            );
        }
        Ok(repository)
    }
}
