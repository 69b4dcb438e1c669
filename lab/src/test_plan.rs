//! The tests of the lab: which run in which machine.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::batch::{self, GuestTest, Subject, TestResult};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::test_programs::{CPrograms, TestBinaries};
use crate::{Error, Result, cache, command, packages, selftests, series};

/// Debian's kernel changes its own code as it runs, which the emulator does not always get right
/// with several processors.
pub const STOCK_PROCESSORS: u32 = 1;

/// How much is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What `make test` runs: some minutes.
    Quick,
    /// More seeds, longer runs, and all parts.
    Full,
}

impl Extent {
    /// The name that the command line uses.
    pub fn name(self) -> &'static str {
        match self {
            Extent::Quick => "quick",
            Extent::Full => "full",
        }
    }

    /// How long the oracle, and others that run at random, run for each seed, in seconds.
    fn seconds(self) -> u64 {
        match self {
            Extent::Quick => 3,
            Extent::Full => 60,
        }
    }

    /// Seconds after which a test, or a binary of tests, hangs, however loaded the host is. The
    /// longest of the quick tests takes four minutes on an idle one, of the others half an hour.
    pub(crate) fn hangs_s(self) -> u64 {
        match self {
            Extent::Quick => 1200,
            Extent::Full => 3 * 3600,
        }
    }

    fn seeds(self) -> &'static [u32] {
        match self {
            Extent::Quick => &[1],
            Extent::Full => &[1, 2, 3],
        }
    }
}

impl FromStr for Extent {
    type Err = Error;

    fn from_str(name: &str) -> Result<Extent> {
        [Extent::Quick, Extent::Full]
            .into_iter()
            .find(|extent| extent.name() == name)
            .ok_or_else(|| Error::unmet(format!("{name} is no extent of tests"), "use quick or full"))
    }
}

/// A part of the tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The kernel with the series.
    Ldt,
    /// Debian's kernel: the other mechanisms.
    Stock,
    /// The kernel of Debian 12: what works without the interfaces of newer kernels.
    Debian12,
    /// The kernel of Debian 11: the same.
    Debian11,
    /// The kernel without the series, built as that with it: the other mechanisms.
    Plain,
    /// The kernel with the series, which checks itself.
    Debug,
    /// A Redis server that is partly swapped out, on the kernel with the series.
    Redis,
    /// A machine in the machine: QEMU under KVM, tracked by KVM's log.
    KvmLog,
    /// Programs in machines of their own, on an emulated processor with SVM and nested paging.
    Svm,
    /// The same on one with VMX, EPT and page-modification logging.
    Vmx,
    /// Containers with Redis servers, which move from one machine to another.
    Migration,
    /// The kernel's own selftests on kernels with and without the series.
    Selftests,
    /// The series itself: each patch compiles on those before it.
    Series,
    /// The kernel with the series as the first guest of Xen, a paravirtualized one, which has none
    /// of it: the other mechanisms.
    Xen,
    /// The same kernel without Xen, on memory of devices that files and programs map.
    Dax,
    /// The same kernel, and a program whose memory is pinned, locked, advised, moved and reclaimed
    /// by others while it is written.
    Combined,
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 16] = [
        Part::Ldt,
        Part::Stock,
        Part::Debian12,
        Part::Debian11,
        Part::Plain,
        Part::Debug,
        Part::Redis,
        Part::KvmLog,
        Part::Svm,
        Part::Vmx,
        Part::Migration,
        Part::Selftests,
        Part::Series,
        Part::Xen,
        Part::Dax,
        Part::Combined,
    ];

    /// The parts of an extent, unless others are named.
    pub fn of(extent: Extent) -> &'static [Part] {
        match extent {
            Extent::Quick => &[Part::Ldt, Part::Stock, Part::Debian12],
            Extent::Full => &Part::ALL,
        }
    }

    /// The name that the command line uses.
    pub fn name(self) -> &'static str {
        match self {
            Part::Ldt => "ldt",
            Part::Stock => "stock",
            Part::Debian12 => "debian-12",
            Part::Debian11 => "debian-11",
            Part::Plain => "plain",
            Part::Debug => "debug",
            Part::Redis => "redis",
            Part::KvmLog => "kvm-log",
            Part::Svm => "svm",
            Part::Vmx => "vmx",
            Part::Migration => "migration",
            Part::Selftests => "selftests",
            Part::Series => "series",
            Part::Xen => "xen",
            Part::Dax => "dax",
            Part::Combined => "combined",
        }
    }

    /// Whether it runs tests that cargo builds.
    pub fn needs_binaries(self) -> bool {
        !matches!(self, Part::Debug | Part::Selftests | Part::Series | Part::Dax)
    }

    /// The kernels that it boots.
    pub fn kernels(self, extent: Extent) -> &'static [Kernel] {
        match (self, extent) {
            (Part::Ldt | Part::Redis | Part::Migration, _) => &[Kernel::Ldt],
            (Part::Stock, _) => &[Kernel::Stock],
            (Part::KvmLog | Part::Svm | Part::Vmx, _) => &[Kernel::Hypervisor],
            (Part::Debian12, _) => &[Kernel::Debian12],
            (Part::Debian11, _) => &[Kernel::Debian11],
            (Part::Plain, _) => &[Kernel::Plain],
            (Part::Debug, _) => &[Kernel::LdtDebug],
            (Part::Xen | Part::Dax | Part::Combined, _) => &[Kernel::LdtDistribution],
            // Debian's own kernel need not be built.
            (Part::Selftests, Extent::Quick) => &[Kernel::Stock, Kernel::Ldt],
            (Part::Selftests, Extent::Full) => &[Kernel::Plain, Kernel::Ldt],
            (Part::Series, _) => &[],
        }
    }
}

impl FromStr for Part {
    type Err = Error;

    fn from_str(name: &str) -> Result<Part> {
        Part::ALL.into_iter().find(|part| part.name() == name).ok_or_else(|| {
            let names = Part::ALL.map(Part::name).join(", ");
            Error::unmet(format!("no part of the tests has the name {name}"), format!("use any of: {names}"))
        })
    }
}

/// The programs that the tests run, and a directory in the cache for them. Machines have a /tmp of
/// their own.
pub struct Programs {
    directory: WorkDirectory,
    c: CPrograms,
    binaries: Option<TestBinaries>,
}

impl Programs {
    /// Compiles the tests in C. Without `binaries`, the tests that cargo builds are left out.
    ///
    /// # Errors
    /// If the kernel's source cannot be fetched, or a compiler fails.
    pub fn build(binaries: Option<TestBinaries>) -> Result<Programs> {
        crate::machine::set_up()?;
        let directory = WorkDirectory::new()?;
        Ok(Programs { c: CPrograms::build(&directory.0)?, directory, binaries })
    }

    /// Runs the tests of a part that are `named`, or all of them if none are, in machines of this
    /// niceness. What they print is appended to `log`.
    ///
    /// # Errors
    /// If a kernel cannot be built, or a machine cannot be started. A test that fails is a result.
    pub fn run(
        &self,
        part: Part,
        extent: Extent,
        named: &[String],
        niceness: u32,
        log: &Path,
    ) -> Result<Vec<TestResult>> {
        let is_meant = |test: &GuestTest| named.is_empty() || named.contains(&test.name);
        match part {
            Part::Selftests => return self.run_selftests(extent),
            Part::Series => return series::compile_each_patch(log),
            _ => {}
        }
        let mut machine = Machine::new(part.kernels(extent)[0]);
        machine.limit = Duration::from_secs(2 * extent.hangs_s());
        machine.niceness = niceness;
        match part {
            // Two nodes, so that pages can be made to migrate.
            Part::Ldt => machine.append = "numa=fake=2".to_owned(),
            Part::Xen => machine.on_xen = true,
            Part::Vmx => {
                machine.on_bochs = true;
                machine.memory = "1G".to_owned();
                machine.files = self.files_on_vmx()?;
            }
            Part::Dax => {
                machine.memory = DAX_MEMORY.to_owned();
                machine.append = DAX_REGIONS.map(|region| format!("memmap={region}")).join(" ");
            }
            Part::Combined => {
                machine.memory = "3G".to_owned();
                machine.append = "numa=fake=2 hugepagesz=1G hugepages=1".to_owned();
            }
            Part::Stock | Part::KvmLog | Part::Svm | Part::Debian12 | Part::Debian11 => {
                machine.processors = STOCK_PROCESSORS
            }
            _ => {}
        }
        // On Bochs, all of it would be copied.
        if let Some(directory) = self.binaries.as_ref().and_then(TestBinaries::directory)
            && !machine.on_bochs
        {
            // A build directory that the machine has of its own would hide this one.
            machine.shares.push(directory.to_owned());
        }
        let mut tests = tests(part, extent, self)?;
        // What prepares the machine for all that follows is no choice.
        tests.retain(|test| is_meant(test) || test.name == PRESSURE);
        let mut file = File::options().append(true).create(true).open(log).map_err(Error::file("open", log))?;
        writeln!(file, "\n== {}: {} tests", machine.kernel, tests.len()).map_err(Error::file("write", log))?;
        if tests.is_empty() {
            return Ok(Vec::new());
        }
        if extent == Extent::Full {
            // As many repetitions as the full tests of the host make, and no more cases than the short ones.
            for test in &mut tests {
                test.command.insert_str(0, "export PAGEMARK_CASES_FACTOR=1; ");
            }
        }
        // What moves arrives on another machine.
        let arriving =
            if part == Part::Migration && tests.len() > 1 { tests.split_off(tests.len() - 1) } else { Vec::new() };
        let mut results = batch::run(machine.clone(), &tests, extent.hangs_s(), &self.directory.0, log)?;
        let cost = self.cost();
        if part == Part::Ldt && is_meant(&cost) {
            let mut counting = machine.clone();
            counting.counts_instructions = true;
            results.extend(batch::run(counting, &[cost], extent.hangs_s(), &self.directory.0, log)?);
        }
        if !arriving.is_empty() {
            results.extend(batch::run(machine, &arriving, extent.hangs_s(), &self.directory.0, log)?);
        }
        Ok(results)
    }

    /// The names of the tests of a part, by what they depend on. A part that runs no single tests
    /// has none, and depends on all sources.
    ///
    /// # Errors
    /// If a test binary is missing.
    pub fn subjects(&self, part: Part, extent: Extent) -> Result<BTreeMap<Subject, Vec<String>>> {
        if matches!(part, Part::Selftests | Part::Series) {
            return Ok(BTreeMap::from([(Subject::Sources, Vec::new())]));
        }
        let mut subjects: BTreeMap<Subject, Vec<String>> = BTreeMap::new();
        let cost = (part == Part::Ldt).then(|| self.cost());
        for test in tests(part, extent, self)?.into_iter().filter(|test| test.name != PRESSURE).chain(cost) {
            subjects.entry(test.subject).or_default().push(test.name);
        }
        Ok(subjects)
    }

    /// Costs are compared where the clock counts instructions, which a busy host does not distort.
    fn cost(&self) -> GuestTest {
        let command = format!("{} cost", self.c.selftest());
        GuestTest::new("the series' selftest of costs", command).of(Subject::Kernel)
    }

    /// Where programs are compiled for a machine that has no compiler.
    fn compiled(&self) -> PathBuf {
        self.directory.0.join("compiled")
    }

    /// The program of a machine that QEMU has on Bochs.
    fn program_under_kvm(&self) -> PathBuf {
        self.compiled().join("under-kvm")
    }

    /// What the tests on Bochs need, with the programs that are compiled for them.
    fn files_on_vmx(&self) -> Result<Vec<PathBuf>> {
        let mut files = vec![crate::source_root().join("lab/guest/batch.sh")];
        if let Some(binaries) = &self.binaries {
            let tests = &binaries.find("pagemark-kvm", "programs")?.path;
            let mut compile = Command::new(tests);
            compile
                .args(["--ignored", "--exact", "all_programs_compile"])
                .env("PAGEMARK_TEST_PROGRAMS", self.compiled());
            command::output(&mut compile, "compiling the programs of the tests", "see the errors above")?;
            files.push(tests.clone());
            files.extend(["pagemark-kvm", "pagemark-bench"].map(|name| binaries.program(name)));
            files.push(binaries.library("libpagemark_kvm_preload.so"));
            files.push(self.program_under_kvm());
            let mut compile = Command::new(binaries.program("pagemark-bench"));
            compile.args(["vm", "--compile-only", "--program"]).arg(self.program_under_kvm());
            command::output(&mut compile, "compiling a machine's program", "see the errors above")?;
            packages::install(&QEMU_PACKAGES)?;
            files.extend(QEMU_FILES.map(PathBuf::from));
        }
        Ok(files)
    }

    fn run_selftests(&self, extent: Extent) -> Result<Vec<TestResult>> {
        let start = Instant::now();
        let &[unpatched, patched] = Part::Selftests.kernels(extent) else {
            unreachable!("the selftests are compared on two kernels")
        };
        let output = std::env::var_os("LDT_SELFTESTS_OUTPUT").map_or(self.directory.0.join("selftests"), PathBuf::from);
        cache::create(&output)?;
        let are_equal = selftests::compare_kernels(extent, unpatched, patched, &output)?;
        let name = format!("selftests of the kernel, the same on {patched} as on {unpatched}");
        let failure = (!are_equal).then(|| "results differ".to_owned());
        Ok(vec![TestResult::new(name, failure, Some(start.elapsed().as_secs()))])
    }
}

/// The memory of a machine of which a part is kept for devices. Above 4 GiB, all of it.
const DAX_MEMORY: &str = "6G";

/// The regions for devices, in the notation of the kernel's command line. Of the last, a page of 1
/// GiB remains beside what describes the region.
const DAX_REGIONS: [&str; 4] = ["1G!4G", "256M!5G", "256M!5376M", "2G!6G"];

/// The name of what prepares a machine: swap, KSM and khugepaged for all tests.
const PRESSURE: &str = "swap, KSM and khugepaged";

/// Tests of the trackers that are slow in emulation, and that no kernel of the lab changes.
const SAME_ON_THE_HOST: &[&str] = &[
    "on_older_kernels",
    "once_warm",
    "the_others_miss_nothing",
    "lose_nothing_with_pagemap_scan",
    "lose_nothing_with_adaptive",
    "lose_nothing_with_compare",
    "lose_nothing_with_mprotect",
];

/// The tests of `pagemark-kvm`, the machine of a process: what they are, their target, and options.
/// Left out is what compares stores with the processor: QEMU sets another overflow flag for `rcr`.
const MACHINE_TESTS: [(&str, &str, &str); 3] = [
    ("the machine of a process", "pagemark_kvm", ""),
    ("programs in the machine", "programs", "--skip random_stores --skip stores_that"),
    ("a heap in the machine", "heap", ""),
];

/// Tests of programs in the machine that are left out on Bochs: they run programs of the host, take
/// very long there, or need rings, which KVM does not have beside a processor's log.
const NOT_ON_BOCHS: [&str; 10] = [
    "dynamic_programs",
    "large_programs",
    "python",
    "the_arguments_of_a_program",
    "a_log_excludes_rings",
    "random_stores",
    "stores_that",
    "rings_that_are_full",
    "regions_of_programs",
    "calls_that_write",
];

/// Transactions on a region, by mechanism, that write more pages than the processor's log of
/// written pages has entries.
const TRANSACTIONS: &str = "region --mib 8 --wpp 1 --ppt 1024 --rounds 1 --tcount 3 --round-ms 1 \
                            --mechanism kvm-log,kvm-scan,pagemap-scan";

/// Checkpoints of a machine that QEMU has, by KVM's log. Times are short, because little time of
/// the machine on Bochs passes while QEMU's runs.
const CHECKPOINTS: &str = "vm --accel kvm --mechanism kvm-log --mib 8 --pages 1024 --every-ms 20 --alone-ms 60 \
                           --checkpoints 3 --turns 1 --peers 0";

/// QEMU, and what it reads, on Bochs.
const QEMU_PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-utils", "seabios"];
const QEMU_FILES: [&str; 5] = [
    "/usr/bin/qemu-system-x86_64",
    "/usr/bin/qemu-img",
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/multiboot_dma.bin",
];

/// The tests of a part, in order.
fn tests(part: Part, extent: Extent, programs: &Programs) -> Result<Vec<GuestTest>> {
    let (seconds, c) = (extent.seconds(), &programs.c);
    let selftest = || GuestTest::new("the series' selftest", c.selftest()).of(Subject::Kernel);
    let mut tests = Vec::new();
    if !matches!(part, Part::Redis | Part::KvmLog | Part::Svm | Part::Vmx | Part::Migration)
        && (extent == Extent::Full || part != Part::Debian12)
    {
        // Swap, KSM and khugepaged for all that follows.
        let script = crate::source_root().join("lab/guest/memory-pressure.sh");
        tests.push(GuestTest::new(PRESSURE, quoted(&script)));
    }
    match part {
        Part::Ldt => {
            tests.push(selftest());
            let stays = GuestTest::oracle("what is written after MADV_FREE stays", c.madv_free());
            tests.push(stays.of(Subject::Kernel));
            for &seed in extent.seeds() {
                tests.push(oracle(c, seed, seconds, ""));
                tests.push(oracle(c, 10 + seed, seconds, "-m written"));
                tests.push(oracle(c, 20 + seed, seconds, "-u"));
                tests.push(oracle(c, 30 + seed, seconds, "-m written -u"));
                tests.push(hostile(c, seed, seconds));
                tests.push(users(c, seed, seconds));
            }
            // These end as soon as the mistake that they make is found.
            for (name, program) in [
                ("the oracle notices a missed page", c.oracle()),
                ("the hostile caller notices a mistake", c.hostile()),
                ("a missed page is noticed as trackers come and go", c.users()),
            ] {
                tests.push(GuestTest::new(name, format!("{program} -b; [ $? = 1 ]")).of(Subject::Kernel));
            }
            if let Some(binaries) = &programs.binaries {
                let trackers = &binaries.find("pagemark", "pagemark")?.path;
                // The host runs most of them, too, with all cases of each property, and all of them once more as an
                // older Linux; they are slow in emulation. The short run leaves out what takes longest there, of
                // mechanisms that are the same on the host.
                let (cases, skipped) = match extent {
                    Extent::Quick => ("export PROPTEST_CASES=12; ", SAME_ON_THE_HOST),
                    Extent::Full => ("", [].as_slice()),
                };
                let skipped: String = skipped.iter().map(|name| format!(" --skip {name}")).collect();
                let command = libtest(trackers, &format!("--test-threads 2 track::{skipped}"));
                let trackers = Subject::Binary(trackers.clone());
                tests.push(GuestTest::new("Pagemark's trackers", format!("{cases}{command}")).of(trackers));
                tests.push(regions(binaries, "the dirty bits")?);
                let processes = &binaries.find("pagemark-testing", "comes_back")?.path;
                tests.push(match extent {
                    Extent::Quick => {
                        GuestTest::new("a process comes back", libtest(processes, "--exact a_family_with_ldt"))
                    }
                    Extent::Full => {
                        GuestTest::new("processes come back", libtest(processes, "--test-threads 1 with_ldt"))
                    }
                });
            }
        }
        Part::Debug => {
            tests.extend([selftest(), oracle(c, 41, seconds, ""), hostile(c, 41, seconds), users(c, 41, seconds)])
        }
        Part::Stock | Part::Plain => {
            if part == Part::Plain {
                let command = format!("{}; [ $? = 1 ]", c.madv_free());
                tests.push(GuestTest::new("what is written after MADV_FREE is lost without the fix", command));
            }
            for &seed in extent.seeds() {
                tests.push(oracle(c, seed, seconds, "-m soft-dirty"));
                tests.push(oracle(c, seed, seconds, "-m pagemap-scan"));
            }
            if let Some(binaries) = &programs.binaries {
                tests.push(regions(binaries, "soft-dirty")?);
            }
        }
        Part::Debian12 | Part::Debian11 => {
            if let Some(binaries) = &programs.binaries {
                tests.extend(older_kernel(binaries, extent)?);
            }
        }
        Part::Redis => {
            if let Some(binaries) = &programs.binaries {
                let redis = &binaries.find("pagemark-cli", "redis")?.path;
                let test = "a_redis_server_that_is_partly_swapped_out_comes_back";
                tests.push(GuestTest::new(
                    "Redis that swaps comes back",
                    libtest(redis, &format!("--exact {test} --nocapture")),
                ));
            }
        }
        Part::KvmLog => {
            if let Some(binaries) = &programs.binaries {
                let shared = &binaries.find("pagemark-kvm-preload", "preload")?.path;
                tests.push(GuestTest::new("KVM's log has two readers", libtest(shared, "--test-threads 1")));
                let under_kvm = [
                    ("machines under KVM come back", "pagemark-vm", "kvm_log", ""),
                    ("many checkpoints under KVM", "pagemark-vm", "load", " of_kvm"),
                    ("a machine under KVM is run", "pagemark-cli", "vm_kvm_log", ""),
                ];
                for (name, crate_name, target, selected) in under_kvm {
                    let arguments = format!("--ignored --test-threads 1{selected}");
                    tests.push(GuestTest::new(name, libtest(&binaries.find(crate_name, target)?.path, &arguments)));
                }
            }
        }
        Part::Svm => {
            if let Some(binaries) = &programs.binaries {
                for (name, target, options) in MACHINE_TESTS {
                    let tests_of_it = &binaries.find("pagemark-kvm", target)?.path;
                    tests.push(GuestTest::new(name, libtest(tests_of_it, &format!("--test-threads 1 {options}"))));
                }
            }
        }
        Part::Vmx => {
            if let Some(binaries) = &programs.binaries {
                tests.extend(on_vmx(binaries, programs)?);
            }
        }
        Part::Migration => {
            if let Some(binaries) = &programs.binaries {
                let migration = &binaries.find("pagemark-cli", "migration")?.path;
                let meeting = quoted(&programs.directory.0.join("migration"));
                for (name, half) in [("leave", "redis_containers_leave"), ("arrive", "redis_containers_arrive")] {
                    let command = libtest(migration, &format!("--exact {half} --include-ignored --nocapture"));
                    let command = format!("export PAGEMARK_MIGRATION={meeting}; mkdir -p {meeting}; {command}");
                    tests.push(GuestTest::new(format!("Redis containers {name}"), command));
                }
            }
        }
        Part::Xen => {
            // It has to notice that the interface is not there, and to leave out what needs it.
            let skips = "grep -q 'SKIP no lightweight dirty tracking'";
            let command = format!("found=$({}) && echo \"$found\" && echo \"$found\" | {skips}", c.selftest());
            tests.push(GuestTest::new("the series' selftest is refused, and skips the rest", command));
            tests.push(oracle(c, 1, seconds, "-m soft-dirty"));
            tests.push(oracle(c, 1, seconds, "-m pagemap-scan"));
            if let Some(binaries) = &programs.binaries {
                tests.extend(guest_of_xen(binaries)?);
            }
        }
        Part::Dax => {
            let script = quoted(&crate::source_root().join("lab/guest/dax.sh"));
            let dax = |arguments: &str| format!("{script} {} {arguments}", c.selftest());
            tests.push(GuestTest::new("DAX files", dax("0")));
            tests.push(GuestTest::new("a DAX device of pages of 4 KiB", dax("1 4096")));
            tests.push(GuestTest::new("a DAX device of pages of 2 MiB", dax("2 2097152")));
            tests.push(GuestTest::new("a DAX device of a page of 1 GiB", dax("3 1073741824")));
            // A kernel that can be a guest of Xen changes entries of page tables by other functions.
            tests.extend([selftest(), oracle(c, 51, seconds, ""), hostile(c, 51, seconds), users(c, 51, seconds)]);
        }
        Part::Combined => {
            if let Some(binaries) = &programs.binaries {
                tests.extend(combined(binaries, c, extent)?);
            }
        }
        Part::Selftests | Part::Series => {}
    }
    Ok(tests)
}

/// The trackers of the crate and a program to whose memory much happens at the same time. Every
/// other run has a huge page of 1 GiB, every third one another tracker.
fn combined(binaries: &TestBinaries, c: &CPrograms, extent: Extent) -> Result<Vec<GuestTest>> {
    let prepare = quoted(&crate::source_root().join("lab/guest/combined.sh"));
    let tests = &binaries.find("pagemark", "ldt_combined")?.path;
    let run = |seed: u32, test: &str| {
        let gib = if seed.is_multiple_of(2) { "PAGEMARK_COMBINED_GIB=1 " } else { "" };
        let rival = if seed.is_multiple_of(3) { "PAGEMARK_COMBINED_RIVAL=1 " } else { "" };
        let settings = format!("PAGEMARK_COMBINED_SECONDS={} PAGEMARK_COMBINED_SEED={seed}", 5 * extent.seconds());
        let command = libtest(tests, &format!("--ignored --exact --nocapture {test}"));
        format!("export {gib}{rival}{settings} PAGEMARK_COMBINED={}; {prepare} && {command}", c.combined())
    };
    let mut runs: Vec<_> = (extent.seeds().iter())
        .map(|&seed| GuestTest::oracle(format!("combined, seed {seed}"), run(seed, "no_write_is_missed")))
        .collect();
    let name = "a missed page is noticed among all that happens";
    runs.push(GuestTest::new(name, run(2, "a_report_that_is_ignored_is_noticed")));
    Ok(runs)
}

/// Programs in the machine, and a machine of QEMU, where there is no compiler.
fn on_vmx(binaries: &TestBinaries, programs: &Programs) -> Result<Vec<GuestTest>> {
    let skipped: String = NOT_ON_BOCHS.iter().map(|name| format!(" --skip {name}")).collect();
    let inside = libtest(&binaries.find("pagemark-kvm", "programs")?.path, &format!("--test-threads 1{skipped}"));
    let inside = format!("export PAGEMARK_TEST_PROGRAMS={}; {inside}", quoted(&programs.compiled()));
    let [machine, bench] = ["pagemark-kvm", "pagemark-bench"].map(|name| binaries.program(name));
    // A transaction that writes more pages than the processor's log has entries fills it.
    let events = format!(
        "found=$({} {} {TRANSACTIONS}) && echo \"$found\" && echo \"$found\" | \
         awk '/^events/ {{ within = 1 }} within && $1 == \"kvm-log\" && $NF >= 1 {{ full = 1 }} END {{ exit !full }}'",
        quoted(&machine),
        quoted(&bench)
    );
    // A pass fills the log and raises no fault; early activation raises fewer than late.
    let checkpoints = format!(
        "found=$({} {CHECKPOINTS} --program {}) && echo \"$found\" && echo \"$found\" | \
         awk '/counts for each pass/ {{ within = 1 }} within && /^pre-copy/ {{ full = $NF >= 1 && $5 == 0 }} \
         within && /early/ {{ early = $6 }} within && /late/ {{ late = $6 }} END {{ exit !(full && early < late) }}'",
        quoted(&bench),
        quoted(&programs.program_under_kvm())
    );
    Ok(vec![
        GuestTest::new("programs in the machine", inside),
        GuestTest::new("events of transactions", events),
        GuestTest::new("events of a machine", checkpoints),
    ])
}

/// The tests of an older kernel of a distribution: what works there, trackers, regions, a process
/// that comes back, and a Redis server.
fn older_kernel(binaries: &TestBinaries, extent: Extent) -> Result<Vec<GuestTest>> {
    // The machine has one of the older kernels; it need not imitate others. Before Linux 5.13, CRIU cannot save a
    // program with restartable sequences, which the host's C library uses and that of Debian 11 does not.
    let start = "export PAGEMARK_AS_LINUX=none GLIBC_TUNABLES=glibc.pthread.rseq=0";
    let quick = format!("{start} PROPTEST_CASES=4; ");
    let cases = if extent == Extent::Quick { quick } else { format!("{start}; ") };
    let test = |name: &str, crate_name: &str, target: &str, arguments: &str| -> Result<GuestTest> {
        let binary = &binaries.find(crate_name, target)?.path;
        // The others start programs that users do.
        let is_alone = ["pagemark", "pagemark-linux"].contains(&crate_name);
        let subject = if is_alone { Subject::Binary(binary.clone()) } else { Subject::Sources };
        Ok(GuestTest::new(name, cases.clone() + &libtest(binary, arguments)).of(subject))
    };
    if extent == Extent::Quick {
        // doctor itself takes minutes in emulation; these are the probes that it prints.
        let trackers = "--test-threads 1 track::probe track::tests::soft_dirty track::tests::uffd";
        return Ok(vec![
            test("interfaces of the kernel", "pagemark-linux", "pagemark_linux", "--test-threads 1 interface::")?,
            test("probes and Pagemark's trackers", "pagemark", "pagemark", trackers)?,
            test("regions", "pagemark", "region", "uffd_behaves mprotect_behaves the_others_behave")?,
            test("a process comes back", "pagemark-testing", "comes_back", "--exact a_family_with_soft_dirty")?,
        ]);
    }
    let processes = "--test-threads 1 with_soft_dirty compared in_full";
    Ok(vec![
        test("doctor", "pagemark-cli", "old_kernels", "--exact doctor_names_the_mechanisms_of_this_kernel")?,
        test("Pagemark's trackers", "pagemark", "pagemark", "--test-threads 1 track::")?,
        test("the kernel interface", "pagemark-linux", "pagemark_linux", "--test-threads 1")?,
        test("regions", "pagemark", "region", "")?,
        test("processes come back", "pagemark-testing", "comes_back", processes)?,
        test(
            "Redis comes back",
            "pagemark-cli",
            "redis",
            "--exact a_redis_server_under_load_is_killed_and_comes_back",
        )?,
    ])
}

/// The tests of a paravirtualized guest of Xen: what works there.
fn guest_of_xen(binaries: &TestBinaries) -> Result<Vec<GuestTest>> {
    let test = |name: &str, crate_name: &str, target: &str, arguments: &str| -> Result<GuestTest> {
        let command = libtest(&binaries.find(crate_name, target)?.path, arguments);
        // Imitated older kernels take long in emulation, and have nothing to do with Xen.
        Ok(GuestTest::new(name, format!("export PAGEMARK_AS_LINUX=none PROPTEST_CASES=12; {command}")))
    };
    Ok(vec![
        test("doctor", "pagemark-cli", "old_kernels", "--exact doctor_says_why_a_guest_of_xen_has_no_dirty_bits")?,
        test("Pagemark's trackers", "pagemark", "pagemark", "--test-threads 1 track::")?,
        regions(binaries, "soft-dirty")?,
        test("regions", "pagemark", "region", "uffd_behaves mprotect_behaves the_others_behave")?,
        test("a process comes back", "pagemark-testing", "comes_back", "--exact a_family_with_soft_dirty")?,
    ])
}

fn oracle(c: &CPrograms, seed: u32, seconds: u64, options: &str) -> GuestTest {
    let space = if options.is_empty() { "" } else { " " };
    let command = format!("{} -s {seconds} -t 4 -r {seed}{space}{options}", c.oracle());
    GuestTest::oracle(format!("oracle{space}{options}, seed {seed}"), command).of(Subject::Kernel)
}

fn hostile(c: &CPrograms, seed: u32, seconds: u64) -> GuestTest {
    let command = format!("{} -s {seconds} -r {seed}", c.hostile());
    GuestTest::oracle(format!("hostile callers, seed {seed}"), command).of(Subject::Kernel)
}

fn users(c: &CPrograms, seed: u32, seconds: u64) -> GuestTest {
    let command = format!("{} -s {seconds} -r {seed}", c.users());
    GuestTest::oracle(format!("trackers come and go, seed {seed}"), command).of(Subject::Kernel)
}

fn regions(binaries: &TestBinaries, mechanism: &str) -> Result<GuestTest> {
    let binary = &binaries.find("pagemark", "region")?.path;
    let command = libtest(binary, "--exact those_of_which_there_is_one_behave");
    Ok(GuestTest::new(format!("regions by {mechanism}"), command).of(Subject::Binary(binary.clone())))
}

/// A command that runs tests of a binary, and fails if the arguments select none.
fn libtest(binary: &Path, arguments: &str) -> String {
    let binary = quoted(binary);
    format!("{binary} --list {arguments} | grep -q ': test$' && {binary} {arguments}")
}

fn quoted(path: &Path) -> String {
    command::shell_word(path.as_os_str()).to_string_lossy().into_owned()
}

/// A directory in the cache, removed at its end.
struct WorkDirectory(PathBuf);

impl WorkDirectory {
    fn new() -> Result<WorkDirectory> {
        cache::remove_abandoned(&cache::lab(), "tests");
        let path = cache::lab().join(format!("tests.{}", std::process::id()));
        cache::remove(&path)?;
        cache::create(&path)?;
        Ok(WorkDirectory(path))
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        // Nothing can be done about a failure here; the next run removes it.
        let _ = cache::remove(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for part in Part::ALL {
            assert_eq!(part.name().parse::<Part>().unwrap(), part);
        }
        assert_eq!("full".parse::<Extent>().unwrap(), Extent::Full);
        assert!("all".parse::<Part>().is_err() && "slow".parse::<Extent>().is_err());
    }

    #[test]
    fn a_selection_without_tests_fails() {
        let this = std::env::current_exe().unwrap();
        let run = |arguments| command::succeeds(Command::new("bash").arg("-c").arg(libtest(&this, arguments)));
        assert!(run("--exact test_plan::tests::names_are_read_back"));
        assert!(!run("--exact test_plan::tests::no_such_test"));
    }

    #[test]
    fn the_full_extent_has_every_part_and_the_quick_one_no_slow_kernel() {
        assert_eq!(Part::of(Extent::Full), Part::ALL);
        for part in Part::of(Extent::Quick) {
            for kernel in part.kernels(Extent::Quick) {
                assert!(!kernel.checks_itself() && *kernel != Kernel::Plain);
            }
        }
    }
}
