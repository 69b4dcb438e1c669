//! `pagemark doctor`: what works on this machine.

use std::process::ExitCode;

use clap::Args;
use pagemark::Mechanism;
use pagemark::track::{Cost, MachineTracking, Probe, Scope, probe};
use pagemark_linux::interface::{self, Interface};
use pagemark_process::criu::{Criu, missing_capability};
use pagemark_report::escape::printable;
use pagemark_report::table::Table;
use serde::Serialize;

use crate::failure::Outcome;
use crate::output::{print, print_json};

/// Report which mechanisms work here, what each costs, and what would enable the others
///
/// Each mechanism is measured on memory of this command, with the tracker that regions get and with
/// the one that other processes get.
#[derive(Args, Debug)]
pub struct Doctor {
    /// One JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Findings {
    kernel: String,
    root: bool,
    criu: Finding,
    /// The virtual machine for one process, under KVM.
    process_machine: Finding,
    /// Interfaces that this kernel lacks, or that this process may not use.
    missing: Vec<Missing>,
    /// What root may not do here, and what would enable it.
    missing_capability: Option<&'static str>,
    mechanisms: Vec<MechanismFinding>,
    /// What `--mechanism auto` takes for other processes.
    auto: Option<Mechanism>,
    /// What regions take unless a mechanism is named.
    auto_own_memory: Option<Mechanism>,
    /// The same for virtual machines, with the strategies that need no copy before a write.
    auto_machine: Option<Mechanism>,
}

/// Something that works, or does not.
#[derive(Serialize)]
struct Finding {
    works: bool,
    /// Where and which it is, or why it does not work and what would help.
    text: String,
}

/// An interface of the kernel that Pagemark does without.
#[derive(Serialize)]
struct Missing {
    interface: &'static str,
    /// The first version of Linux that has it.
    since: &'static str,
    /// False if the kernel has it, and this process may not use it.
    is_unknown: bool,
    /// The error that its use gives.
    error: String,
    /// What is slower, or not possible, without it.
    without: &'static str,
}

#[derive(Serialize)]
struct MechanismFinding {
    mechanism: Mechanism,
    /// How it finds written pages.
    description: &'static str,
    /// What it needs of the machine.
    requirement: &'static str,
    /// For other processes if the mechanism can track them, and else for the program's own memory.
    #[serde(flatten)]
    main: ScopeFinding,
    /// For regions of a program's own memory.
    own_memory: ScopeFinding,
    /// For other processes, if the mechanism can track them.
    process: Option<ScopeFinding>,
    /// For virtual machines, if the mechanism can track them.
    machine: Option<ScopeFinding>,
}

#[derive(Clone, Serialize)]
struct ScopeFinding {
    works: bool,
    /// Nanoseconds a page; none if it does not work.
    first_write_ns: Option<f64>,
    hot_write_ns: Option<f64>,
    collect_ns: Option<f64>,
    /// Type of the tracker that was measured.
    tracker: Option<&'static str>,
    /// Why it does not work, and what would enable it.
    reason: Option<String>,
}

impl Doctor {
    pub fn run(self) -> Outcome {
        let probes = [Scope::OwnMemory, Scope::Process].map(probe);
        let mechanisms: Vec<_> =
            Mechanism::ALL.into_iter().filter_map(|mechanism| finding(mechanism, &probes)).collect();
        let findings = Findings {
            kernel: kernel(),
            root: nix::unistd::geteuid().is_root(),
            criu: criu(),
            process_machine: process_machine(),
            missing: interface::ALL.iter().filter_map(|interface| Missing::of(interface)).collect(),
            missing_capability: missing_capability().filter(|_| nix::unistd::geteuid().is_root()),
            auto: auto(&probes, Scope::Process),
            auto_own_memory: auto(&probes, Scope::OwnMemory),
            auto_machine: auto_machine(&mechanisms),
            mechanisms,
        };
        if self.json {
            return print_json(&findings);
        }
        print(&report(&findings));
        Ok(ExitCode::SUCCESS)
    }
}

/// The mechanism that is chosen for a scope.
fn auto(probes: &[Vec<Probe>], scope: Scope) -> Option<Mechanism> {
    let mut of_scope = probes.iter().flatten().filter(|probe| probe.scope == scope);
    of_scope.find(|probe| probe.result.is_ok() && probe.mechanism.may_be_chosen(scope)).map(|probe| probe.mechanism)
}

/// The mechanism that is chosen for virtual machines.
fn auto_machine(findings: &[MechanismFinding]) -> Option<Mechanism> {
    let works = |found: &&MechanismFinding| found.machine.as_ref().is_some_and(|machine| machine.works);
    let mut of_scope = findings.iter().filter(works).map(|found| found.mechanism);
    of_scope.find(|mechanism| mechanism.may_be_chosen(Scope::Machine))
}

fn finding(mechanism: Mechanism, probes: &[Vec<Probe>]) -> Option<MechanismFinding> {
    let of_scope = |scope: Scope| {
        let mut probes = probes.iter().flatten();
        probes
            .find(|probe| probe.mechanism == mechanism && probe.scope == scope)
            .map(|probe| ScopeFinding::of(&probe.result))
    };
    let own_memory = of_scope(Scope::OwnMemory)?;
    let process = of_scope(Scope::Process);
    let entry = mechanism.entry();
    let machine = match entry.machine {
        None => None,
        // The same tracker.
        Some(MachineTracking::OfProcess) => process.clone(),
        Some(MachineTracking::HoldsWrites) => Some(ScopeFinding::of(&pagemark_vm::cost(mechanism))),
        // It works in a machine, where alone its cost is known.
        Some(MachineTracking::ByHypervisor) => Some(ScopeFinding::without_cost(&pagemark_vm::check_kvm(mechanism))),
    };
    Some(MechanismFinding {
        mechanism,
        description: entry.description,
        requirement: entry.requirement,
        main: process.clone().unwrap_or_else(|| own_memory.clone()),
        own_memory,
        process,
        machine,
    })
}

impl Missing {
    /// None if the interface is there.
    fn of(interface: &Interface) -> Option<Missing> {
        let error = interface.refusal()?;
        let is_unknown = matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ENOTTY | libc::EINVAL));
        let Interface { name, since, without, .. } = interface;
        Some(Missing { interface: name, since, is_unknown, error: error.to_string(), without })
    }
}

impl ScopeFinding {
    fn without_cost(result: &Result<(), pagemark::Error>) -> ScopeFinding {
        let reason = result.as_ref().err().map(ToString::to_string);
        let (first_write_ns, hot_write_ns, collect_ns, tracker) = Default::default();
        ScopeFinding { works: result.is_ok(), first_write_ns, hot_write_ns, collect_ns, tracker, reason }
    }

    fn of(result: &Result<Cost, pagemark::Error>) -> ScopeFinding {
        let cost = |part: fn(&Cost) -> f64| result.as_ref().ok().map(part);
        ScopeFinding {
            works: result.is_ok(),
            first_write_ns: cost(|cost| cost.first_write_ns),
            hot_write_ns: cost(|cost| cost.hot_write_ns),
            collect_ns: cost(|cost| cost.collect_ns),
            tracker: result.as_ref().ok().map(|cost| cost.tracker),
            reason: result.as_ref().err().map(ToString::to_string),
        }
    }
}

fn kernel() -> String {
    let name = nix::sys::utsname::uname();
    name.map_or("unknown".into(), |name| {
        format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy())
    })
}

fn criu() -> Finding {
    match Criu::find_anew() {
        Ok(criu) => Finding { works: true, text: format!("{} at {}", criu.version(), criu.path().display()) },
        Err(error) => Finding { works: false, text: error.to_string() },
    }
}

fn process_machine() -> Finding {
    match pagemark_kvm::check() {
        Ok(()) => {
            let time = match pagemark_kvm::tells_time() {
                Ok(true) => "",
                Ok(false) | Err(_) => {
                    "; there it needs a system call to tell the time (without it: KVM of Linux 5.16, and a time-stamp \
                     counter that is the host's clock)"
                }
            };
            let text = format!("pagemark-kvm runs a program in a virtual machine of its own{time}");
            Finding { works: true, text }
        }
        Err(error) => Finding { works: false, text: error.to_string() },
    }
}

/// The findings as text.
fn report(findings: &Findings) -> String {
    let mut out = format!("kernel      {}\n", findings.kernel);
    out += if findings.root {
        "user        root\n"
    } else {
        "user        not root: only processes of your own can be watched, and CRIU needs root to save or restore them\n"
    };
    out += &format!("CRIU        {}{}\n", if findings.criu.works { "" } else { "✗ " }, printable(&findings.criu.text));
    if !findings.criu.works {
        out += "            without it, `--memory-only` still works\n";
    }
    let machine = &findings.process_machine;
    out += &format!("KVM         {}{}\n", if machine.works { "" } else { "✗ " }, printable(&machine.text));
    for (index, missing) in findings.missing.iter().enumerate() {
        let label = if index == 0 { "missing" } else { "" };
        let Missing { interface, since, is_unknown, error, without } = missing;
        let reason = if *is_unknown { String::new() } else { format!("; refused: {error}") };
        out += &format!("{label:<12}{interface} (Linux {since}{reason}): {without}\n");
    }
    if let Some(missing) = findings.missing_capability {
        out += &format!("rights      ✗ {missing}\n");
    }
    let name = |mechanism: Option<Mechanism>| mechanism.map_or("none works", Mechanism::name);
    out += &format!("auto        {} for processes, ", name(findings.auto));
    out += &format!("{} for regions, ", name(findings.auto_own_memory));
    out += &format!("{} for virtual machines\n\n", name(findings.auto_machine));
    let mut table = Table::new(&["mechanism", "memory of", "works", ">first write", ">when hot", ">collect", ""]);
    let cost = |ns: Option<f64>| ns.map_or("-".into(), |ns| format!("{ns:.0} ns"));
    for found in &findings.mechanisms {
        let mut row = |name: &str, scope: &str, found: &ScopeFinding| {
            table.row([
                name.into(),
                scope.into(),
                if found.works { "✓" } else { "✗" }.into(),
                cost(found.first_write_ns),
                cost(found.hot_write_ns),
                cost(found.collect_ns),
                found.reason.clone().unwrap_or_default(),
            ]);
        };
        match &found.process {
            // What does not work at all is said once.
            Some(process) if process.works || found.own_memory.works => {
                row(found.mechanism.name(), "processes", process);
                row("", "regions", &found.own_memory);
            }
            Some(process) => row(found.mechanism.name(), "both", process),
            None => row(found.mechanism.name(), "regions", &found.own_memory),
        }
        // Other mechanisms track machines as processes, by the same trackers.
        let is_of_process = found.mechanism.entry().machine == Some(MachineTracking::OfProcess);
        if let Some(machine) = found.machine.as_ref().filter(|_| !is_of_process) {
            row("", "machines", machine);
        }
    }
    out += &table.to_string();
    out += "\nCosts are per page: the program's first write to it in an interval, the same for a page that is written in every\n\
         interval, and collecting it. All are measured on memory of this command, with the trackers that are used.\n";
    out
}
