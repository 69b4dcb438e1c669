//! Which tests there are, and what their descriptions say.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::sync::LazyLock;

use regex_lite::Regex;

use crate::{Error, Result, command};

/// The directories of tests.
const KINDS: [&str; 2] = ["static", "transition"];
/// Programs beside the tests that are none.
const NO_TESTS: [&str; 3] = ["criu-rtc", "get_smaps_bits", "ofd_file_locks"];

/// In which namespaces a test runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    /// Those of whoever starts it: `h`.
    Host,
    /// Its own, with a root directory of its own: `ns`.
    Namespaces,
    /// The same, in a user namespace of its own: `uns`.
    UserNamespace,
}

impl Flavor {
    /// All flavors.
    pub const ALL: [Flavor; 3] = [Flavor::Host, Flavor::Namespaces, Flavor::UserNamespace];

    /// The name that CRIU's tests and the command line use.
    pub fn name(self) -> &'static str {
        match self {
            Flavor::Host => "h",
            Flavor::Namespaces => "ns",
            Flavor::UserNamespace => "uns",
        }
    }
}

impl FromStr for Flavor {
    type Err = Error;

    fn from_str(name: &str) -> Result<Flavor> {
        Flavor::ALL
            .into_iter()
            .find(|flavor| flavor.name() == name)
            .ok_or_else(|| Error::unmet(format!("{name} is no flavor of CRIU's tests"), "use any of: h, ns, uns"))
    }
}

/// A test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    /// In which namespaces it runs.
    pub flavor: Flavor,
    /// `static`: it waits while it is saved. `transition`: it changes its state all the time.
    pub kind: String,
    /// Its name.
    pub program: String,
    description: HashMap<String, String>,
}

impl Test {
    /// The test of this name, such as `static/pipe00` or `ns/static/pipe00`, in CRIU's directory
    /// `test`.
    ///
    /// # Errors
    /// If its description cannot be read.
    pub fn read(tree: &Path, name: &str) -> Result<Test> {
        let (flavor, path) = match name.split_once('/') {
            Some(("ns", path)) => (Flavor::Namespaces, path),
            Some(("uns", path)) => (Flavor::UserNamespace, path),
            _ => (Flavor::Host, name),
        };
        let no_test = || Error::unmet(format!("{name} is no test"), "name it static/NAME or ns/static/NAME");
        let (kind, program) = path.split_once('/').ok_or_else(no_test)?;
        let path = tree.join("zdtm").join(kind).join(format!("{program}.desc"));
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.map_err(Error::file("read", &path))?,
        };
        Ok(Test { flavor, kind: kind.to_owned(), program: program.to_owned(), description: parse(&text) })
    }

    /// Whether the sources in `tree` have it.
    pub fn exists(&self, tree: &Path) -> bool {
        tree.join("zdtm").join(&self.kind).join(format!("{}.c", self.program)).is_file()
    }

    /// `static/pipe00`, `ns/static/pipe00` or `uns/static/pipe00`.
    pub fn name(&self) -> String {
        match self.flavor {
            Flavor::Host => format!("{}/{}", self.kind, self.program),
            flavor => format!("{}/{}/{}", flavor.name(), self.kind, self.program),
        }
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

    /// Whether it can run in such namespaces.
    fn has(&self, flavor: Flavor) -> bool {
        let flavors = self.words("flavor");
        flavors.is_empty() || flavors.iter().any(|name| name == flavor.name())
    }
}

/// The tests that can run here, in each of their flavors.
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
            if !is_for_here || test.has_flag("noauto") || !test.words("feature").iter().all(has) {
                continue;
            }
            let check = directory.join(format!("{program}.checkskip"));
            if is_executable(&check) && !command::succeeds(Command::new(&check).current_dir(tree)) {
                continue;
            }
            let flavors = Flavor::ALL.into_iter().filter(|flavor| test.has(*flavor));
            tests.extend(flavors.map(|flavor| Test { flavor, ..test.clone() }));
        }
    }
    Ok(tests)
}

pub(super) fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// The parts of a description that are strings, or lists of strings, of which the words are joined:
/// it is a dictionary as Python writes it.
fn parse(text: &str) -> HashMap<String, String> {
    static PART: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"'(\w+)'\s*:\s*(?:'([^']*)'|\[([^\]]*)\])").expect("the expression is correct"));
    let value = |part: &regex_lite::Captures<'_>| match (part.get(2), part.get(3)) {
        (Some(word), _) => word.as_str().to_owned(),
        (_, list) => list.map_or("", |list| list.as_str()).replace(['\'', ','], " "),
    };
    PART.captures_iter(text).map(|part| (part[1].to_owned(), value(&part))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_of_a_test() {
        let description =
            parse("{\n  'flavor' : 'h ns',\n'flags': 'suid excl', 'deps': ['/bin/true'],'opts':'--a --b c'}");
        let flavor = Flavor::Host;
        let test = Test { flavor, kind: "static".into(), program: "pipe00".into(), description };
        assert_eq!(test.name(), "static/pipe00");
        assert!(test.has(Flavor::Host) && test.has(Flavor::Namespaces) && !test.has(Flavor::UserNamespace));
        assert!(test.is_exclusive() && !test.expects_refusal());
        assert_eq!(test.words("deps"), ["/bin/true"]);
        assert_eq!(test.words("opts"), ["--a", "--b", "c"]);
        assert!(test.words("ropts").is_empty());
        let test = Test { description: parse("{'flavor': 'ns uns', 'flags': 'crfail'}"), ..test };
        assert!(!test.has(Flavor::Host) && !test.is_exclusive() && test.expects_refusal());
        assert_eq!(Test { flavor: Flavor::UserNamespace, ..test }.name(), "uns/static/pipe00");
    }
}
