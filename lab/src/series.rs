//! Compiles the state of the kernel after each patch of kernel/ldt. Whoever looks for a fault by
//! bisection meets these states, so none of them may cause a warning.
//!
//! The build directories are kept from patch to patch. A patch costs what it changes: of the files
//! that the series touches, those that make finds out of date, and the files that include a header
//! that the patch touches.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::batch::TestResult;
use crate::kernel::{Kernel, lost_settings};
use crate::{Error, Result, cache, command, kernel_build, progress, source_root};

/// Of make: nothing waits for these builds.
const NICENESS: u32 = 19;
/// Parts of the source whose files are compiled because they include a touched header, besides the
/// parts that have a touched file.
const USERS_OF_HEADERS: [&str; 3] = ["arch/x86/mm", "fs", "kernel"];
/// The largest parts of the source that nothing compiled here needs. Their configuration stays.
const NOT_UNPACKED: [&str; 4] = ["*/drivers/*.[ch]", "*/sound/*.[ch]", "*/net/*.c", "*/arch/[!x]*/*.[chS]"];
/// Warnings of the level 1, as errors.
const WARNINGS: &str = "W=1e";
/// The lines of the compiler that a failure quotes.
const QUOTED_LINES: usize = 6;
/// The file, in all configurations, to which a function that nobody uses is added at the end.
const SPOILT: &str = "mm/mprotect.c";

/// A configuration in which the series is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Configuration {
    /// For x86-64, with the option that the series adds.
    With,
    /// The same without the option.
    Without,
    /// For a processor that cannot have the option.
    I386,
}

impl Configuration {
    const ALL: [Configuration; 3] = [Configuration::With, Configuration::Without, Configuration::I386];

    fn name(self) -> &'static str {
        match self {
            Configuration::With => "with MEM_LWD",
            Configuration::Without => "without MEM_LWD",
            Configuration::I386 => "i386",
        }
    }

    /// The architecture's name for make.
    fn architecture(self) -> &'static str {
        if self == Configuration::I386 { "i386" } else { "x86_64" }
    }

    fn directory(self) -> &'static str {
        match self {
            Configuration::With => "with",
            Configuration::Without => "without",
            Configuration::I386 => "i386",
        }
    }

    fn fragments(self) -> Vec<PathBuf> {
        let names: &[&str] = match self {
            Configuration::With => &["base", "ldt", "series"],
            Configuration::Without => &["base", "series"],
            Configuration::I386 => &["base", "series-i386"],
        };
        names.iter().map(|name| source_root().join(format!("lab/config/{name}.config"))).collect()
    }
}

/// A patch of the series.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Patch {
    path: PathBuf,
    /// The files that it changes, from the root of the kernel's source.
    touched: Vec<String>,
}

impl Patch {
    fn read(path: &Path) -> Result<Patch> {
        let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
        let touched = touched(&text);
        if touched.is_empty() {
            return Err(Error::unmet(format!("{} changes no file", path.display()), "it needs lines `diff --git`"));
        }
        Ok(Patch { path: path.to_owned(), touched })
    }

    fn name(&self) -> String {
        self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The touched files of the kernel itself with this extension.
    fn of_kernel<'a>(&'a self, extension: &'a str) -> impl Iterator<Item = &'a str> {
        let files = self.touched.iter().map(String::as_str);
        files.filter(move |file| !is_apart(file) && has_extension(file, extension))
    }

    /// Whether it may change which options there are.
    fn configures(&self) -> bool {
        self.touched.iter().any(|file| file.rsplit('/').next().is_some_and(|name| name.starts_with("Kconfig")))
    }
}

/// Compiles each state of the series, in a directory of the cache that is removed at the end. What
/// the compiler prints is kept in `log`.
///
/// Returns a result for each patch, and one that says whether a warning would have been noticed.
///
/// # Errors
/// If the source cannot be had or configured. A patch that does not apply or compile is a result.
pub fn compile_each_patch(log: &Path) -> Result<Vec<TestResult>> {
    cache::remove_abandoned(&cache::lab(), "series");
    let work = cache::lab().join(format!("series.{}", std::process::id()));
    cache::remove(&work)?;
    let results = Tree::new(&work, log).and_then(Tree::compile_each_patch);
    cache::remove(&work)?;
    results
}

/// The kernel's source with the patches so far, and a build directory for each configuration.
struct Tree<'a> {
    work: &'a Path,
    source: PathBuf,
    patches: Vec<Patch>,
    log: &'a Path,
    /// The configurations whose options all exist in the present state.
    ready: Vec<Configuration>,
}

impl<'a> Tree<'a> {
    fn new(work: &'a Path, log: &'a Path) -> Result<Tree<'a>> {
        let source = work.join("source");
        kernel_build::unpack_source(&source, &NOT_UNPACKED)?;
        let patches: Vec<Patch> = Kernel::Ldt.patches()?.iter().map(|path| Patch::read(path)).collect::<Result<_>>()?;
        Ok(Tree { work, source, patches, log, ready: Vec::new() })
    }

    fn compile_each_patch(mut self) -> Result<Vec<TestResult>> {
        let mut results = Vec::new();
        for index in 0..self.patches.len() {
            let start = Instant::now();
            let patch = self.patches[index].clone();
            let what = match kernel_build::apply(&patch.path, &self.source, &self.work.join("patch.log")) {
                Ok(()) => self.compile(&patch, index == 0)?,
                Err(error) => Err(error.to_string()),
            };
            let (what, failure) = match what {
                Ok(what) => (what, None),
                Err(failure) => ("does not compile".to_owned(), Some(failure)),
            };
            let seconds = start.elapsed().as_secs();
            progress!("{}: {what}, {seconds} s", patch.name());
            let name = format!("series: {}: {what}", patch.name());
            results.push(TestResult::new(name, failure, Some(seconds)));
        }
        results.push(self.check_that_all_was_compiled());
        results.push(self.check_that_a_warning_is_noticed()?);
        Ok(results)
    }

    /// Compiles what the patch, which is applied, changes. Returns what was compiled, or why that
    /// failed.
    fn compile(&mut self, patch: &Patch, is_first: bool) -> Result<Result<String, String>> {
        if is_first || patch.configures() {
            self.configure()?;
        }
        let (mut counts, mut failures) = (Vec::new(), Vec::new());
        if patch.touched.iter().any(|file| !is_apart(file)) {
            let sources: BTreeSet<&str> = self.patches.iter().flat_map(|patch| patch.of_kernel("c")).collect();
            let headers: Vec<&str> = patch.of_kernel("h").collect();
            let mut left: BTreeSet<&str> = patch.of_kernel("c").collect();
            for &configuration in &self.ready {
                let compiled = self.compiled_files(configuration, &sources)?;
                left.retain(|file| !compiled.contains(*file));
                let mut wanted = Vec::new();
                for file in &compiled {
                    if sources.contains(file.as_str()) || self.includes(file, &headers)? {
                        wanted.push(file.as_str());
                    }
                }
                match self.make_objects(configuration, &wanted)? {
                    Ok(count) => counts.push((configuration, count)),
                    Err(failure) => failures.push(format!("{}: {failure}", configuration.name())),
                }
            }
            failures.extend(left.iter().map(|file| format!("no configuration compiles {file}")));
            if failures.is_empty() && counts.iter().all(|(_, count)| *count == 0) {
                failures.push("nothing was compiled".to_owned());
            }
        }
        let tests: Vec<&String> = patch
            .touched
            .iter()
            .filter(|file| file.starts_with("tools/testing/") && has_extension(file, "c"))
            .collect();
        for test in &tests {
            failures.extend(self.check_test(test)?);
        }
        Ok(if failures.is_empty() { Ok(summary(&counts, tests.len())) } else { Err(failures.join("\n")) })
    }

    fn build_directory(&self, configuration: Configuration) -> PathBuf {
        self.work.join(configuration.directory())
    }

    fn make(&self, configuration: Configuration) -> Command {
        let mut make = command::at_low_priority("make", NICENESS);
        make.arg("-C").arg(&self.source).arg(format!("O={}", self.build_directory(configuration).display()));
        make.arg(format!("ARCH={}", configuration.architecture())).arg(WARNINGS).arg("LOCALVERSION=");
        make.arg(format!("-j{}", kernel_build::processors()));
        make
    }

    /// Makes the configurations anew. That with the series' option exists only from the patch on
    /// that adds the option.
    fn configure(&mut self) -> Result<()> {
        self.ready.clear();
        for configuration in Configuration::ALL {
            let build = self.build_directory(configuration);
            cache::create(&build)?;
            let fragments = configuration.fragments();
            let mut text = String::new();
            for path in &fragments {
                text += &std::fs::read_to_string(path).map_err(Error::file("read", path))?;
            }
            let what = format!("configuring the kernel {}", configuration.name());
            let (log, help) = (self.work.join("configure.log"), "see above");
            command::logged(self.make(configuration).arg("tinyconfig"), &log, &what, help)?;
            let config = build.join(".config");
            let mut merge = Command::new("scripts/kconfig/merge_config.sh");
            merge.current_dir(&self.source).arg("-m").arg("-O").arg(&build).arg(&config).args(&fragments);
            command::logged(&mut merge, &log, &what, help)?;
            command::logged(self.make(configuration).arg("olddefconfig"), &log, &what, help)?;
            let made = std::fs::read_to_string(&config).map_err(Error::file("read", &config))?;
            let lost = lost_settings(&text, &made);
            match configuration {
                Configuration::With if lost == ["CONFIG_MEM_LWD=y"] => continue,
                // The fragments are for 64 bits.
                Configuration::I386 => {}
                _ if lost.is_empty() => {}
                _ => {
                    return Err(Error::unmet(
                        format!("the kernel {} lacks {}", configuration.name(), lost.join(" ")),
                        "correct the fragments in lab/config: a setting depends on another that is missing",
                    ));
                }
            }
            self.ready.push(configuration);
        }
        Ok(())
    }

    /// The C files that the configuration compiles in the parts of the source that matter here.
    fn compiled_files(&self, configuration: Configuration, sources: &BTreeSet<&str>) -> Result<BTreeSet<String>> {
        let log = self.work.join("prepare.log");
        let what = format!("preparing the build {}", configuration.name());
        command::logged(self.make(configuration).arg("prepare"), &log, &what, "see above")?;
        let parts: BTreeSet<&str> = sources.iter().map(|file| parent(file)).chain(USERS_OF_HEADERS).collect();
        let mut files = BTreeSet::new();
        for part in parts {
            let build = self.build_directory(configuration);
            for object in objects_of(&self.source, &build, part)? {
                let file = format!("{part}/{}.c", object.trim_end_matches(".o"));
                if self.source.join(&file).exists() {
                    files.insert(file);
                }
            }
        }
        Ok(files)
    }

    /// Whether the file includes one of the headers itself.
    fn includes(&self, file: &str, headers: &[&str]) -> Result<bool> {
        let path = self.source.join(file);
        let text = std::fs::read(&path).map_err(Error::file("read", &path))?;
        Ok(headers.iter().any(|header| includes(file, &String::from_utf8_lossy(&text), header)))
    }

    /// Compiles those of the files that are out of date. Returns their number, or the compiler's
    /// errors.
    fn make_objects(&self, configuration: Configuration, files: &[&str]) -> Result<Result<usize, String>> {
        let objects: Vec<String> =
            files.iter().map(|file| format!("{}.o", file.strip_suffix(".c").unwrap_or(file))).collect();
        let mut make = self.make(configuration);
        make.arg("-k").args(&objects);
        let (passed, output) = self.output_of(&mut make)?;
        if passed {
            return Ok(Ok(count_compiled(&output, &objects)));
        }
        Ok(Err(errors(&output)))
    }

    /// The warnings of a selftest, if there are any.
    fn check_test(&self, file: &str) -> Result<Option<String>> {
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-Wall", "-Werror", "-fsyntax-only", "-isystem"]);
        gcc.arg(self.source.join("tools/include/uapi")).arg(self.source.join(file));
        let (passed, output) = self.output_of(&mut gcc)?;
        Ok((!passed).then(|| errors(&output)))
    }

    /// Runs a command, and adds its output to the log.
    fn output_of(&self, command: &mut Command) -> Result<(bool, String)> {
        let own_log = self.work.join("make.log");
        let file = std::fs::File::create(&own_log).map_err(Error::file("create", &own_log))?;
        command::redirect(command, file, &own_log)?;
        let status = command::start(command)?.wait().map_err(Error::file("wait for the writer of", &own_log))?;
        let text = std::fs::read(&own_log).map_err(Error::file("read", &own_log))?;
        let log = std::fs::File::options().append(true).create(true).open(self.log);
        log.and_then(|mut log| std::io::Write::write_all(&mut log, &text)).map_err(Error::file("write", self.log))?;
        Ok((status.success(), String::from_utf8_lossy(&text).into_owned()))
    }

    fn check_that_all_was_compiled(&self) -> TestResult {
        let missing: Vec<&str> = Configuration::ALL
            .iter()
            .filter(|configuration| !self.ready.contains(configuration))
            .map(|configuration| configuration.name())
            .collect();
        let failure = (!missing.is_empty()).then(|| format!("never possible: {}", missing.join(", ")));
        TestResult::new("series: every configuration was compiled", failure, None)
    }

    /// Adds a mistake to the last state, which the compiler must report.
    fn check_that_a_warning_is_noticed(&self) -> Result<TestResult> {
        let path = self.source.join(SPOILT);
        let mut text = std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
        let _ = writeln!(text, "static int nobody_uses_this(void) {{ return 0; }}");
        std::fs::write(&path, text).map_err(Error::file("write", &path))?;
        let mut failures = Vec::new();
        for configuration in Configuration::ALL {
            match self.make_objects(configuration, &[SPOILT])? {
                Err(errors) if errors.contains("nobody_uses_this") => {}
                Err(errors) => failures.push(format!("{}: another error: {errors}", configuration.name())),
                Ok(_) => failures.push(format!("{}: no error", configuration.name())),
            }
        }
        let failure = (!failures.is_empty()).then(|| failures.join("\n"));
        Ok(TestResult::new("series: a warning is noticed", failure, None))
    }
}

/// What was compiled, of the kernel and of its tests.
fn summary(counts: &[(Configuration, usize)], tests: usize) -> String {
    let of_kernel = counts.iter().filter(|(_, count)| *count > 0);
    let mut parts: Vec<String> =
        of_kernel.map(|(configuration, count)| format!("{count} files {}", configuration.name())).collect();
    if tests > 0 {
        parts.push(format!("{tests} selftest"));
    }
    if parts.is_empty() { "nothing to compile".to_owned() } else { parts.join(", ") }
}

/// The files that a patch changes, by its lines `diff --git a/OLD b/NEW`.
fn touched(patch: &str) -> Vec<String> {
    let headers = patch.lines().filter_map(|line| line.strip_prefix("diff --git a/"));
    headers.filter_map(|names| names.split_once(" b/")).map(|(_, new)| new.to_owned()).collect()
}

/// Whether the file is no part of the kernel itself.
fn is_apart(file: &str) -> bool {
    ["tools/", "Documentation/"].iter().any(|part| file.starts_with(part)) || file == "MAINTAINERS"
}

fn has_extension(file: &str, extension: &str) -> bool {
    Path::new(file).extension().is_some_and(|found| found == extension)
}

fn parent(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// Whether the text of `file` has a line that includes `header`, both from the root of the source.
fn includes(file: &str, text: &str, header: &str) -> bool {
    let for_all = header.strip_prefix("include/").or_else(|| header.strip_prefix("arch/x86/include/"));
    let name = match for_all {
        Some(name) => format!("<{name}>"),
        None if parent(header) == parent(file) => format!("\"{}\"", header.rsplit('/').next().unwrap_or(header)),
        None => return false,
    };
    let included =
        |line: &str| line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include").map(str::to_owned);
    text.lines().filter_map(included).any(|rest| rest.trim_start().starts_with(&name))
}

/// The objects that the makefile of a part of the source lists, with the parts of those that are
/// composed of several.
fn objects_of(source: &Path, build: &Path, part: &str) -> Result<Vec<String>> {
    let makefile = build.join("list-objects.mk");
    // As scripts/Makefile.lib, one level deep.
    let text = "include include/config/auto.conf\n\
                include $(srctree)/$(obj)/Makefile\n\
                parts = $(1) $(foreach o,$(1),$($(basename $(o))-objs) $($(basename $(o))-y))\n\
                list: ; @echo $(call parts,$(obj-y) $(obj-m))\n";
    std::fs::write(&makefile, text).map_err(Error::file("write", &makefile))?;
    let mut make = Command::new("make");
    make.args(["-s", "--no-print-directory", "-C"]).arg(build).arg("-f").arg(&makefile).arg("list");
    // The variables of the caller's own make would change what this one prints.
    make.env_remove("MAKEFLAGS").env_remove("MFLAGS");
    make.arg(format!("srctree={}", source.display())).args([format!("obj={part}"), format!("src={part}")]);
    make.arg("SRCARCH=x86");
    let listed = command::output(&mut make, &format!("listing what is compiled in {part}"), "see above")?;
    Ok(listed.split_whitespace().filter(|name| name.ends_with(".o")).map(str::to_owned).collect())
}

/// How many of the objects make has compiled, by its lines `  CC      OBJECT`.
fn count_compiled(output: &str, objects: &[String]) -> usize {
    let compiled = output.lines().filter_map(|line| line.trim_start().strip_prefix("CC "));
    compiled.filter(|object| objects.iter().any(|wanted| wanted == object.trim())).count()
}

/// The first lines of the compiler that name an error, or the last lines if none does.
fn errors(output: &str) -> String {
    let mut found: Vec<&str> = Vec::new();
    for line in output.lines().filter(|line| line.contains("error: ") || line.contains("warning: ")) {
        if found.len() < QUOTED_LINES && !found.contains(&line) {
            found.push(line);
        }
    }
    if found.is_empty() { command::last_lines(output.as_bytes(), QUOTED_LINES) } else { found.join("\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str = "\
Subject: [PATCH] mm: a change
 diff --git a/no b/no
diff --git a/mm/Kconfig b/mm/Kconfig
--- a/mm/Kconfig
+++ b/mm/Kconfig
@@ -1 +1 @@
-diff --git a/removed b/removed
+diff --git a/added b/added
diff --git a/include/linux/new.h b/include/linux/new.h
diff --git a/mm/memory.c b/mm/memory.c
diff --git a/tools/testing/selftests/mm/test.c b/tools/testing/selftests/mm/test.c
diff --git a/MAINTAINERS b/MAINTAINERS
";

    #[test]
    fn a_patch_names_what_it_changes() {
        let patch = Patch { path: "/p/0007-mm-a-change.patch".into(), touched: touched(PATCH) };
        assert_eq!(patch.touched.len(), 5);
        assert_eq!(patch.name(), "0007-mm-a-change");
        assert_eq!(patch.of_kernel("c").collect::<Vec<_>>(), ["mm/memory.c"]);
        assert_eq!(patch.of_kernel("h").collect::<Vec<_>>(), ["include/linux/new.h"]);
        assert!(patch.configures());
        let other = Patch { touched: vec!["mm/memory.c".to_owned()], ..patch };
        assert!(!other.configures());
    }

    #[test]
    fn a_header_is_included_by_its_name_or_from_its_own_directory() {
        let text =
            "#include <linux/mm.h>\n# include\t<asm/tlbflush.h>\n#include \"internal.h\"\n// #include <linux/no.h>\n";
        for header in ["include/linux/mm.h", "arch/x86/include/asm/tlbflush.h", "mm/internal.h"] {
            assert!(includes("mm/memory.c", text, header), "{header}");
        }
        for header in ["include/linux/no.h", "include/linux/m.h", "fs/proc/internal.h", "mm/other.h"] {
            assert!(!includes("mm/memory.c", text, header), "{header}");
        }
    }

    #[test]
    fn objects_are_those_of_the_configuration_with_their_parts() {
        let directory = tempfile::tempdir().unwrap();
        let (source, build) = (directory.path().join("source"), directory.path().join("build"));
        cache::create(&source.join("fs/part")).unwrap();
        cache::create(&build.join("include/config")).unwrap();
        let makefile = "obj-y += first.o whole.o\nobj-$(CONFIG_MODULE) += module.o\nobj-$(CONFIG_NOT) += not.o\n\
                        whole-y := one.o\nwhole-$(CONFIG_PART) += two.o\nwhole-$(CONFIG_NOT) += three.o\n\
                        obj-y += below/\n";
        std::fs::write(source.join("fs/part/Makefile"), makefile).unwrap();
        std::fs::write(build.join("include/config/auto.conf"), "CONFIG_PART=y\nCONFIG_MODULE=m\n").unwrap();
        let found = objects_of(&source, &build, "fs/part").unwrap();
        assert_eq!(found, ["first.o", "whole.o", "module.o", "one.o", "two.o"]);
        assert!(objects_of(&source, &build, "fs/none").is_err());
    }

    #[test]
    fn a_summary_leaves_out_a_configuration_that_compiles_nothing() {
        let counts = [(Configuration::With, 2), (Configuration::I386, 0)];
        assert_eq!(summary(&counts, 0), "2 files with MEM_LWD");
        assert_eq!(summary(&counts[1..], 1), "1 selftest");
        assert_eq!(summary(&[], 0), "nothing to compile");
    }

    #[test]
    fn what_make_compiled_is_counted_without_its_own_tools() {
        let output =
            "  HOSTCC  scripts/x.o\n  CC      kernel/bounds.s\n  CC      mm/memory.o\n  CC      mm/memory.os\n";
        let objects = ["mm/memory.o", "mm/gup.o"].map(str::to_owned);
        assert_eq!(count_compiled(output, &objects), 1);
    }

    #[test]
    fn a_failure_quotes_errors_once_or_the_end_of_the_output() {
        let output = "  CC  mm/a.o\na.c:1: error: x\na.c:1: error: x\nnote\na.c:2: warning: y\nmake: failed\n";
        assert_eq!(errors(output), "a.c:1: error: x\na.c:2: warning: y");
        assert_eq!(errors("make: no rule\n"), "make: no rule");
    }

    #[test]
    fn every_configuration_has_its_fragments() {
        for configuration in Configuration::ALL {
            assert!(configuration.fragments().iter().all(|path| path.exists()), "{configuration:?}");
        }
    }

    #[test]
    fn the_series_touches_the_file_that_is_spoilt() {
        let patches = Kernel::Ldt.patches().unwrap();
        let patches: Vec<Patch> = patches.iter().map(|path| Patch::read(path).unwrap()).collect();
        assert!(patches.iter().any(|patch| patch.of_kernel("c").any(|file| file == SPOILT)));
        assert!(patches.iter().any(Patch::configures));
    }
}
