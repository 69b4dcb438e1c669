//! The tests of the lab that have passed on the same content: they need not run again.
//!
//! The content is all that tests can depend on: the sources of the lab and of the kernel's series,
//! the versions of the compiler and of the emulator, the extent; and the sources of the product, or
//! the test binary, for those that run it. It is compared by its hash; of a step, the tests of one
//! subject are kept together, and are not kept if one of them has failed, or was flaky.

use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::batch::Subject;
use crate::{Error, Result, cache, command, source_root};

/// What all of the lab's tests are built from and configured by. `target` and files that git
/// ignores are not in it.
const OF_LAB: [&str; 4] = ["Cargo.lock", "Cargo.toml", "kernel", "lab"];
/// The programs that test binaries start.
const OF_PROGRAMS: [&str; 1] = ["crates/pagemark-testing"];
/// The product.
const OF_PRODUCT: [&str; 2] = ["crates", "papers"];
/// The programs that build and run them.
const TOOLS: [[&str; 2]; 3] = [["rustc", "-vV"], ["gcc", "--version"], ["qemu-system-x86_64", "--version"]];

/// The content that tests depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    hash: String,
}

impl Content {
    /// That of tests of a subject, with words for what else they depend on. None where git does not
    /// know the sources, so that nothing is certain.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn of_tests(subject: &Subject, words: &[&str]) -> Result<Option<Content>> {
        let (sources, binary): (&[&str], _) = match subject {
            Subject::Kernel => (&[], None),
            Subject::Binary(path) => (&OF_PROGRAMS, Some(path.clone())),
            Subject::Sources => (&OF_PRODUCT, None),
        };
        let mut list = Command::new("git");
        list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]).args(OF_LAB).args(sources);
        let Ok(files) = command::output(list.current_dir(source_root()), "listing the sources", "") else {
            return Ok(None);
        };
        let sources = files.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from);
        let files: Vec<PathBuf> = sources.chain(binary).collect();
        let mut versions = Vec::new();
        for [tool, argument] in TOOLS {
            versions.push(command::output(Command::new(tool).arg(argument), tool, "install it")?);
        }
        let words = words.iter().copied().chain(versions.iter().map(String::as_str));
        Content::of(source_root(), &files, words).map(Some)
    }

    fn of<'a>(root: &Path, files: &[PathBuf], words: impl Iterator<Item = &'a str>) -> Result<Content> {
        let mut hasher = Sha256::new();
        let mut add = |bytes: &[u8]| {
            hasher.update((bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        words.for_each(|word| add(word.as_bytes()));
        for file in files {
            let path = root.join(file);
            add(file.to_string_lossy().as_bytes());
            match std::fs::read(&path) {
                Ok(content) => add(&content),
                // It is in git's index, and was removed from the tree.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => add(b"removed"),
                Err(error) => return Err(Error::file("read", &path)(error)),
            }
        }
        Ok(Content { hash: hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect() })
    }

    /// When tests of a step have passed on this content, if they have.
    pub fn passed(&self, step: &str) -> Option<String> {
        std::fs::read_to_string(self.record(step)).ok().map(|text| text.trim().to_owned())
    }

    /// Keeps that tests of a step have passed.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub fn keep(&self, step: &str) -> Result<()> {
        cache::create(&directory())?;
        let path = self.record(step);
        let date = command::output(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]), "date", "")?;
        std::fs::write(&path, date).map_err(Error::file("write", &path))
    }

    fn record(&self, step: &str) -> PathBuf {
        directory().join(format!("{}-{}", step.replace(' ', "-"), &self.hash[..32]))
    }
}

fn directory() -> PathBuf {
    cache::project().join("passed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_change_of_a_file_a_name_or_a_word_is_another_content() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("a", "one");
        write("b", "two");
        let content = |files: &[&str], word: &str| {
            let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
            Content::of(directory.path(), &files, [word].into_iter()).unwrap()
        };
        let first = content(&["a", "b"], "quick");
        assert_eq!(content(&["a", "b"], "quick"), first);
        assert_ne!(content(&["a", "b"], "full"), first);
        assert_ne!(content(&["a"], "quick"), first);
        assert_ne!(content(&["a", "b", "c"], "quick"), first, "a file that is not there");
        write("b", "twO");
        assert_ne!(content(&["a", "b"], "quick"), first);
    }

    #[test]
    fn each_subject_has_a_content_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("binary");
        std::fs::write(&binary, "one").unwrap();
        let of_binary = Subject::Binary(binary.clone());
        let content = |subject| Content::of_tests(subject, &["quick"]).unwrap();
        let subjects = [Subject::Kernel, of_binary.clone(), Subject::Sources];
        let contents = subjects.each_ref().map(content);
        assert_eq!(subjects.each_ref().map(content), contents);
        if contents[0].is_none() {
            return;
        }
        assert!(contents[0] != contents[1] && contents[1] != contents[2] && contents[0] != contents[2]);
        assert!(contents.iter().flatten().all(|content| content.passed("no such step").is_none()));
        std::fs::write(&binary, "two").unwrap();
        assert_ne!(content(&of_binary), contents[1]);
        assert_eq!(content(&Subject::Kernel), contents[0]);
    }
}
