//! Which tests there are, and what their descriptions say.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use regex_lite::Regex;

use crate::{Error, Result, command};

/// The directories of tests.
const KINDS: [&str; 2] = ["static", "transition"];
/// Programs beside the tests that are none.
const NO_TESTS: [&str; 3] = ["criu-rtc", "get_smaps_bits", "ofd_file_locks"];

/// A test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    /// `static`: it waits while it is saved. `transition`: it changes its state all the time.
    pub kind: String,
    /// Its name.
    pub program: String,
    description: HashMap<String, String>,
}

impl Test {
    /// The test of this name, such as `static/pipe00`, in CRIU's directory `test`.
    ///
    /// # Errors
    /// If its description cannot be read.
    pub fn read(tree: &Path, name: &str) -> Result<Test> {
        let (kind, program) =
            name.split_once('/').ok_or_else(|| Error::unmet(format!("{name} is no test"), "name it static/NAME"))?;
        let path = tree.join("zdtm").join(kind).join(format!("{program}.desc"));
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.map_err(Error::file("read", &path))?,
        };
        Ok(Test { kind: kind.to_owned(), program: program.to_owned(), description: parse(&text) })
    }

    /// `static/pipe00`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.kind, self.program)
    }

    /// The words of a part of the description, such as `opts`.
    pub fn words(&self, part: &str) -> Vec<String> {
        self.description.get(part).map_or(Vec::new(), |words| words.split_whitespace().map(str::to_owned).collect())
    }

    /// Whether the description has this flag.
    pub fn has_flag(&self, flag: &str) -> bool {
        self.words("flags").iter().any(|word| word == flag)
    }

    /// Whether it expects that it cannot be saved.
    pub fn expects_refusal(&self) -> bool {
        self.has_flag("crfail")
    }

    /// Whether it must not run beside others.
    pub fn is_exclusive(&self) -> bool {
        // `vt` opens a console of the host, and `inotify_irmap` has its files in `/etc`.
        let uses_host = ["vt", "inotify_irmap"].contains(&self.program.as_str());
        self.has_flag("excl") || self.program.contains("cgroup") || uses_host
    }

    /// Whether it runs in the namespaces of whoever starts it, without a root directory of its own.
    fn runs_on_host(&self) -> bool {
        let flavors = self.words("flavor");
        flavors.is_empty() || flavors.iter().any(|flavor| flavor == "h")
    }
}

/// The tests that can run here, in the namespaces of whoever starts them.
pub fn tests(tree: &Path, criu: &Path) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    let mut features = HashMap::new();
    for kind in KINDS {
        let directory = tree.join("zdtm").join(kind);
        let entries = std::fs::read_dir(&directory).map_err(Error::file("read", &directory))?;
        let mut programs: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".c").map(str::to_owned))
            .filter(|program| is_executable(&directory.join(program)) && !NO_TESTS.contains(&program.as_str()))
            .collect();
        programs.sort();
        for program in programs {
            let test = Test::read(tree, &format!("{kind}/{program}"))?;
            let has = |feature: &String| {
                *features.entry(feature.clone()).or_insert_with(|| {
                    command::succeeds(Command::new(criu).args(["check", "--no-default-config", "--feature", feature]))
                })
            };
            let is_for_here = ["", "x86_64"].contains(&test.words("arch").join(" ").as_str());
            if !test.runs_on_host() || !is_for_here || test.has_flag("noauto") || !test.words("feature").iter().all(has)
            {
                continue;
            }
            let check = directory.join(format!("{program}.checkskip"));
            if is_executable(&check) && !command::succeeds(Command::new(&check).current_dir(tree)) {
                continue;
            }
            tests.push(test);
        }
    }
    Ok(tests)
}

pub(super) fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// The parts of a description that are strings: it is a dictionary as Python writes it.
fn parse(text: &str) -> HashMap<String, String> {
    static PART: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"'(\w+)'\s*:\s*'([^']*)'").expect("the expression is correct"));
    PART.captures_iter(text).map(|part| (part[1].to_owned(), part[2].to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_of_a_test() {
        let description =
            parse("{\n  'flavor' : 'h ns',\n'flags': 'suid excl', 'deps': ['/bin/true'],'opts':'--a --b c'}");
        let test = Test { kind: "static".into(), program: "pipe00".into(), description };
        assert_eq!(test.name(), "static/pipe00");
        assert!(test.runs_on_host() && test.is_exclusive() && !test.expects_refusal());
        assert_eq!(test.words("opts"), ["--a", "--b", "c"]);
        assert!(test.words("ropts").is_empty());
        let test = Test { description: parse("{'flavor': 'ns uns', 'flags': 'crfail'}"), ..test };
        assert!(!test.runs_on_host() && !test.is_exclusive() && test.expects_refusal());
    }
}
