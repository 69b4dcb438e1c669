//! Tests of the library in C programs: it is installed, found by pkg-config, and linked.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pagemark_testing::{assert_oracle, assert_oracle_eq, skipped};

const MECHANISMS: [&str; 7] = ["auto", "adaptive", "pagemap-scan", "uffd", "mprotect", "emulate", "full"];

const WARNINGS: [&str; 5] = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"];

const SANITIZERS: [&str; 3] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"];

/// The output of the example with every mechanism.
const BANK: &str = "\
transfer of 30: done
transfer of 80: refused
balances: 70 130 100, in all 100000
accounts that differ from the opening: 2
account 1 then: 100
restored: 100 100 100, equal to the opening
";

/// The output of the example in C++ with every mechanism.
const LEDGER: &str = "\
30: booked
80: the account does not cover it
the replica has 70 and 130, in all 5000000
account 7 had 100; since then 2 pages differ
restored: 100 100
";

const CPLUSPLUS: [&str; 5] = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror"];

fn crate_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn workspace_path(path: &str) -> PathBuf {
    crate_path("../..").join(path)
}

/// Runs a command that must succeed, and returns its output.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:#?}");
    String::from_utf8(output.stdout).unwrap()
}

fn is_there(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skipped(&format!("no {program} here"));
    }
    found
}

/// The library, installed in a directory of its own.
struct Installed {
    prefix: tempfile::TempDir,
}

impl Installed {
    /// Where this machine has no C compiler or no pkg-config, reports that the test is skipped, and
    /// returns None.
    fn new() -> Option<Installed> {
        if !is_there("cc") || !is_there("pkg-config") {
            return None;
        }
        // The library is in the directory of this test's executable.
        let built = std::env::current_exe().unwrap();
        Some(Installed::of(built.parent().unwrap()))
    }

    fn of(built: &Path) -> Installed {
        let prefix = tempfile::tempdir().unwrap();
        run(Command::new(workspace_path("scripts/install-c.sh")).args([prefix.path(), built]));
        Installed { prefix }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.prefix.path().join(path)
    }

    fn pkg_config(&self, arguments: &[&str]) -> Vec<String> {
        let mut pkg_config = Command::new("pkg-config");
        let printed = pkg_config.env("PKG_CONFIG_PATH", self.path("lib/pkgconfig")).args(arguments).arg("pagemark");
        run(printed).split_whitespace().map(str::to_owned).collect()
    }

    /// Compiles a program against the shared library.
    fn compile(&self, source: &Path, flags: &[&str]) -> PathBuf {
        let program = self.path("program");
        let mut cc = Command::new("cc");
        cc.args(WARNINGS).args(flags).arg("-o").arg(&program).arg(source);
        run(cc.args(self.pkg_config(&["--cflags", "--libs"])));
        program
    }

    /// Compiles a program in C++ against the shared library. Where this machine has no compiler,
    /// reports that, and returns None.
    fn compile_cplusplus(&self, source: &Path, flags: &[&str]) -> Option<PathBuf> {
        if !is_there("c++") {
            return None;
        }
        let program = self.path("program");
        let mut compiler = Command::new("c++");
        compiler.args(CPLUSPLUS).args(flags).arg("-o").arg(&program).arg(source);
        run(compiler.args(self.pkg_config(&["--cflags", "--libs"])));
        Some(program)
    }

    /// Runs a program with a mechanism. Where this machine lacks the mechanism, reports that, and
    /// returns None.
    fn try_mechanism(&self, program: &Path, mechanism: &str) -> Option<Output> {
        let mut command = Command::new(program);
        let output = command.arg(mechanism).env("LD_LIBRARY_PATH", self.path("lib")).output().unwrap();
        if output.status.code() == Some(77) {
            skipped(&format!("{mechanism}: {}", String::from_utf8_lossy(&output.stderr).trim()));
            return None;
        }
        Some(output)
    }

    fn check(&self, program: &Path, mechanism: &str, expected: &str) {
        if let Some(output) = self.try_mechanism(program, mechanism) {
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && printed == expected, "{mechanism}: {output:#?}");
        }
    }
}

#[test]
fn the_example_prints_its_results_with_every_mechanism() {
    let Some(installed) = Installed::new() else { return };
    let program = installed.compile(&workspace_path("examples/c/bank.c"), &[]);
    MECHANISMS.iter().for_each(|mechanism| installed.check(&program, mechanism, BANK));
}

#[test]
fn the_example_runs_linked_statically() {
    let Some(installed) = Installed::new() else { return };
    let program = installed.path("static");
    let mut cc = Command::new("cc");
    cc.args(WARNINGS).arg("-o").arg(&program).arg(workspace_path("examples/c/bank.c"));
    cc.args(installed.pkg_config(&["--cflags"])).arg(installed.path("lib/libpagemark.a"));
    let libraries = installed.pkg_config(&["--static", "--libs-only-l"]);
    run(cc.args(libraries.iter().filter(|library| *library != "-lpagemark")));
    installed.check(&program, "auto", BANK);
}

/// With the option that the documents name, and without suppressions.
#[test]
fn the_example_runs_under_valgrind() {
    let Some(installed) = Installed::new() else { return };
    if !is_there("valgrind") {
        return;
    }
    let program = installed.compile(&workspace_path("examples/c/bank.c"), &["-g"]);
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--error-exitcode=9", "--vex-iropt-register-updates=allregs-at-mem-access"]);
    valgrind.arg(program).arg("auto").env("LD_LIBRARY_PATH", installed.path("lib"));
    assert_eq!(run(&mut valgrind), BANK);
}

/// Without the option, a mechanism that needs it is refused with its name, and the others work.
#[test]
fn valgrind_without_its_option_is_refused_or_works() {
    let Some(installed) = Installed::new() else { return };
    if !is_there("valgrind") {
        return;
    }
    let program = installed.compile(&workspace_path("examples/c/bank.c"), &["-g"]);
    let under_valgrind = |mechanism: &str| {
        let mut valgrind = Command::new("valgrind");
        valgrind.arg("--quiet").arg(&program).arg(mechanism).env("LD_LIBRARY_PATH", installed.path("lib"));
        valgrind.output().unwrap()
    };
    let chosen = under_valgrind("auto");
    assert!(chosen.status.success() && String::from_utf8_lossy(&chosen.stdout) == BANK, "{chosen:#?}");
    for mechanism in ["mprotect", "emulate"] {
        let refused = under_valgrind(mechanism);
        let said = String::from_utf8_lossy(&refused.stderr);
        // The status for a mechanism that the machine lacks.
        assert_eq!(refused.status.code(), Some(77), "{mechanism}: {said}");
        assert!(said.contains("--vex-iropt-register-updates=allregs-at-mem-access"), "{mechanism}: {said}");
    }
}

/// The library as `make install-c` builds it, without the features that other crates of the
/// workspace ask for.
#[test]
#[ignore = "some minutes: the library is built anew"]
fn the_example_runs_as_a_static_program() {
    for (target, compiler) in [("x86_64-unknown-linux-gnu", "cc"), ("x86_64-unknown-linux-musl", "musl-gcc")] {
        let libraries = run(Command::new("rustc").args(["--print", "target-libdir", "--target", target]));
        if !Path::new(libraries.trim()).exists() || !is_there(compiler) {
            skipped(&format!("no Rust for {target}, or no {compiler}"));
            continue;
        }
        let directory = workspace_path("target/static");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked", "-p", "pagemark-c", "--target", target, "--target-dir"]);
        run(cargo.arg(&directory).env("CC_x86_64_unknown_linux_musl", "musl-gcc").current_dir(workspace_path(".")));
        let installed = Installed::of(&directory.join(target).join("debug"));
        let program = installed.path("static");
        let mut cc = Command::new(compiler);
        cc.args(WARNINGS).arg("-static").arg("-o").arg(&program).arg(workspace_path("examples/c/bank.c"));
        run(cc.args(installed.pkg_config(&["--static", "--cflags", "--libs"])));
        MECHANISMS.iter().for_each(|mechanism| installed.check(&program, mechanism, BANK));
    }
}

impl Installed {
    /// Runs a program that takes a repository. Where this machine has no mechanism for it, reports
    /// that, and returns None.
    fn with_repository(&self, program: &Path, repository: &str) -> Option<String> {
        let output = self.on_repository(program, repository).output().unwrap();
        if output.status.code() == Some(77) {
            skipped(String::from_utf8_lossy(&output.stderr).trim());
            return None;
        }
        assert!(output.status.success(), "{output:#?}");
        Some(String::from_utf8(output.stdout).unwrap())
    }

    fn on_repository(&self, program: &Path, repository: &str) -> Command {
        let mut command = Command::new(program);
        command.arg(self.path(repository)).env("LD_LIBRARY_PATH", self.path("lib"));
        command
    }

    /// Asserts that a program ends with the line `expected`, also if it is killed after some of its
    /// saves and started again: each time it begins with more than before.
    fn survives_kills(&self, program: &Path, expected: &str) {
        let Some(printed) = self.with_repository(program, "whole") else { return };
        assert_eq!(printed.lines().last(), Some(expected));
        let number = |line: Option<std::io::Result<String>>| -> u64 {
            line.unwrap().unwrap().split_whitespace().last().unwrap().parse().unwrap()
        };
        let mut begun = Vec::new();
        for kill in 0..5 {
            let mut child = self.on_repository(program, "killed").stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            begun.push(number(lines.next()));
            for _ in 0..1 + kill % 3 {
                number(lines.next());
            }
            std::thread::sleep(Duration::from_micros(kill * 1700 % 9000));
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_oracle!(begun.is_sorted_by(|before, now| before < now), "saves were lost: {begun:?}");
        let printed = self.with_repository(program, "killed").unwrap();
        assert_oracle_eq!(printed.lines().last(), Some(expected), "what the program ends with after it was killed");
    }
}

#[test]
fn a_program_that_is_killed_continues_from_its_last_save() {
    let Some(installed) = Installed::new() else { return };
    let program = installed.compile(&workspace_path("examples/c/sieve.c"), &[]);
    installed.survives_kills(&program, "82025 primes below 1048576");
}

#[test]
fn a_heap_in_c_survives_its_program() {
    let Some(installed) = Installed::new() else { return };
    let program = installed.compile(&workspace_path("examples/c/tree.c"), &[]);
    installed.survives_kills(&program, "20000 numbers in order");
}

#[test]
fn containers_of_cplusplus_survive_their_program() {
    let Some(installed) = Installed::new() else { return };
    let Some(program) = installed.compile_cplusplus(&workspace_path("examples/cpp/words.cpp"), &[]) else { return };
    installed.survives_kills(&program, "27204 places of 1000 words");
}

#[test]
fn saved_heaps_in_c_and_cplusplus_do_what_they_should() {
    let Some(installed) = Installed::new() else { return };
    for (flags, name) in [(&[][..], "plain"), (&SANITIZERS[..], "sanitized")] {
        if !flags.is_empty() && !has_sanitizers(&installed) {
            return;
        }
        let source = crate_path("tests/saved_heap.c");
        installed.with_repository(&installed.compile(&source, flags), &format!("{name}-c"));
        let source = crate_path("tests/saved_heap.cpp");
        let Some(program) = installed.compile_cplusplus(&source, flags) else { return };
        installed.with_repository(&program, &format!("{name}-cplusplus"));
    }
}

#[test]
fn locked_memory_is_what_a_saved_heap_uses() {
    let Some(installed) = Installed::new() else { return };
    installed.with_repository(&installed.compile(&crate_path("tests/locked.c"), &[]), "locked");
}

/// As an interpreter does, which has no static thread-local storage left for what it loads, also
/// with the features that the whole workspace asks for.
#[test]
fn a_program_that_runs_loads_the_library() {
    let Some(installed) = Installed::new() else { return };
    let program = installed.path("loads");
    let mut cc = Command::new("cc");
    run(cc.arg("-std=c11").arg("-o").arg(&program).arg(crate_path("tests/loaded.c")).arg("-ldl"));
    let library = installed.path("lib/libpagemark.so");
    let mut loads = Command::new(program);
    assert_eq!(run(loads.arg(&library).env_remove("GLIBC_TUNABLES")), "loaded\n");
    if is_there("readelf") {
        let dynamic = run(Command::new("readelf").args(["--dynamic", "--wide"]).arg(&library));
        assert!(dynamic.contains("SONAME") && !dynamic.contains("STATIC_TLS"), "{dynamic}");
    }
}

#[test]
fn misuse_is_refused() {
    let Some(installed) = Installed::new() else { return };
    let program = installed.compile(&crate_path("tests/misuse.c"), &["-pthread"]);
    MECHANISMS.iter().for_each(|mechanism| installed.check(&program, mechanism, ""));
}

/// True if the C compiler has its sanitizers here; otherwise reports that a test is skipped.
fn has_sanitizers(installed: &Installed) -> bool {
    let empty = installed.path("empty.c");
    std::fs::write(&empty, "int main(void) { return 0; }\n").unwrap();
    let mut cc = Command::new("cc");
    let linked = cc.args(SANITIZERS).arg("-o").arg(installed.path("empty")).arg(&empty).output().unwrap();
    if !linked.status.success() {
        skipped("cc has no sanitizers here");
    }
    linked.status.success()
}

#[test]
fn the_address_and_undefined_behaviour_sanitizers_find_nothing() {
    let Some(installed) = Installed::new() else { return };
    if !has_sanitizers(&installed) {
        return;
    }
    for (source, expected) in [(workspace_path("examples/c/bank.c"), BANK), (crate_path("tests/misuse.c"), "")] {
        let program = installed.compile(&source, &[&SANITIZERS[..], &["-pthread"]].concat());
        MECHANISMS.iter().for_each(|mechanism| installed.check(&program, mechanism, expected));
    }
}

#[test]
fn a_cplusplus_compiler_takes_the_header() {
    let Some(installed) = Installed::new() else { return };
    if !is_there("c++") {
        return;
    }
    let source = installed.path("header.cpp");
    std::fs::write(&source, "#include <pagemark.h>\nint main() { return pagemark_version() == nullptr; }\n").unwrap();
    let program = installed.path("header");
    let mut compiler = Command::new("c++");
    compiler.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]).arg(&program).arg(&source);
    run(compiler.args(installed.pkg_config(&["--cflags", "--libs"])));
    run(Command::new(&program).env("LD_LIBRARY_PATH", installed.path("lib")));
}

#[test]
fn the_example_in_cplusplus_prints_its_results_with_every_mechanism() {
    let Some(installed) = Installed::new() else { return };
    let source = workspace_path("examples/cpp/ledger.cpp");
    let Some(program) = installed.compile_cplusplus(&source, &[]) else { return };
    MECHANISMS.iter().for_each(|mechanism| installed.check(&program, mechanism, LEDGER));
}

#[test]
fn objects_of_cplusplus_own_what_they_should() {
    let Some(installed) = Installed::new() else { return };
    let source = crate_path("tests/handles.cpp");
    let Some(program) = installed.compile_cplusplus(&source, &[]) else { return };
    MECHANISMS.iter().for_each(|mechanism| installed.check(&program, mechanism, ""));
    // The sanitizer for addresses also finds what is never freed.
    let Some(program) = installed.compile_cplusplus(&source, &SANITIZERS) else { return };
    installed.check(&program, "auto", "");
}

const CMAKE_PROJECT: &str = "\
cmake_minimum_required(VERSION 3.16)
project(ledger CXX)
find_package(pagemark VERSION REQUIRED CONFIG)
foreach(kind pagemark static)
  add_executable(with_${kind} SOURCE)
  target_compile_features(with_${kind} PRIVATE cxx_std_20)
  target_link_libraries(with_${kind} PRIVATE pagemark::${kind})
endforeach()
";

#[test]
fn cmake_finds_the_library() {
    let Some(installed) = Installed::new() else { return };
    if !is_there("cmake") || !is_there("c++") {
        return;
    }
    let configure = |version: &str, name: &str| {
        let source = workspace_path("examples/cpp/ledger.cpp").canonicalize().unwrap();
        let project = CMAKE_PROJECT.replace("VERSION REQUIRED", &format!("{version} REQUIRED"));
        let directory = installed.path(name);
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("CMakeLists.txt"), project.replace("SOURCE", source.to_str().unwrap())).unwrap();
        let mut cmake = Command::new("cmake");
        cmake.arg("-DCMAKE_PREFIX_PATH=".to_owned() + installed.prefix.path().to_str().unwrap());
        cmake.arg("-S").arg(&directory).arg("-B").arg(directory.join("build"));
        (cmake.output().unwrap(), directory.join("build"))
    };
    let (configured, build) = configure("0.1", "project");
    assert!(configured.status.success(), "{configured:#?}");
    run(Command::new("cmake").arg("--build").arg(&build));
    for kind in ["pagemark", "static"] {
        installed.check(&build.join(format!("with_{kind}")), "auto", LEDGER);
    }
    let (refused, _) = configure("0.2", "too-new");
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("0.1.0"), "{refused:#?}");
}

#[test]
fn the_version_is_the_same_everywhere() {
    let Some(installed) = Installed::new() else { return };
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(installed.pkg_config(&["--modversion"]), [version]);
    let library = std::fs::canonicalize(installed.path("lib/libpagemark.so")).unwrap();
    assert_eq!(library.file_name().unwrap().to_str().unwrap(), format!("libpagemark.so.{version}"));
}

#[test]
fn no_debug_information_is_installed() {
    let Some(installed) = Installed::new() else { return };
    let has_it =
        |path: &Path| run(Command::new("readelf").args(["--sections", "--wide"]).arg(path)).contains(" .debug_info ");
    assert!(has_it(&std::env::current_exe().unwrap()), "there is none that could be left out");
    for library in ["lib/libpagemark.so", "lib/libpagemark.a"] {
        assert!(!has_it(&installed.path(library)), "{library}");
    }
}

#[test]
fn the_header_matches_the_sources() {
    let cbindgen = std::env::var_os("PAGEMARK_CBINDGEN").map_or_else(|| cached("cbindgen/bin/cbindgen"), PathBuf::from);
    if !cbindgen.exists() {
        skipped("no cbindgen here: run `make setup`");
        return;
    }
    let header = crate_path("include/pagemark.h");
    let mut command = Command::new(cbindgen);
    let made = run(command.arg("--config").arg(crate_path("cbindgen.toml")).arg(env!("CARGO_MANIFEST_DIR")));
    let checked_in = std::fs::read_to_string(&header).unwrap();
    assert!(made == checked_in, "{} is not up to date: run `make header`", header.display());
}

/// A file in the cache that `make setup` fills.
fn cached(path: &str) -> PathBuf {
    let home = || Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("pagemark").join(path)
}
