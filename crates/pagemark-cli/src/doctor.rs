//! `pagemark doctor`: what works on this machine.

use std::process::ExitCode;

use clap::Args;
use pagemark::Mechanism;
use pagemark::tracker::{Probe, probe};
use pagemark_process::criu::Criu;
use serde::Serialize;

use crate::failure::Outcome;
use crate::output::{print, print_json};
use crate::text::{Table, clean};

/// Tell which mechanisms work here, what each costs, and what would enable the others
///
/// Every mechanism is tried out on memory of Pagemark's own.
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
    mechanisms: Vec<MechanismFinding>,
    /// What `--mechanism auto` takes.
    auto: Option<Mechanism>,
}

/// Something that works, or does not.
#[derive(Serialize)]
struct Finding {
    works: bool,
    /// Where and which it is, or why it does not work and what would help.
    text: String,
}

#[derive(Serialize)]
struct MechanismFinding {
    mechanism: Mechanism,
    works: bool,
    /// Nanoseconds a page; none if it does not work.
    first_write_ns: Option<f64>,
    hot_write_ns: Option<f64>,
    collect_ns: Option<f64>,
    /// Why it does not work, and what would enable it.
    reason: Option<String>,
}

impl Doctor {
    pub fn run(self) -> Outcome {
        let mechanisms: Vec<_> = probe().into_iter().map(finding).collect();
        let findings = Findings {
            kernel: kernel(),
            root: nix::unistd::geteuid().is_root(),
            criu: criu(),
            auto: mechanisms
                .iter()
                .find(|found| found.works && found.mechanism.reaches_other_processes())
                .map(|found| found.mechanism),
            mechanisms,
        };
        if self.json {
            return print_json(&findings);
        }
        print(&told(&findings));
        Ok(ExitCode::SUCCESS)
    }
}

fn finding(probe: Probe) -> MechanismFinding {
    let Probe { mechanism, result } = probe;
    match result {
        Ok(cost) => MechanismFinding {
            mechanism,
            works: true,
            first_write_ns: Some(cost.first_write_ns),
            hot_write_ns: Some(cost.hot_write_ns),
            collect_ns: Some(cost.collect_ns),
            reason: None,
        },
        Err(reason) => MechanismFinding {
            mechanism,
            works: false,
            first_write_ns: None,
            hot_write_ns: None,
            collect_ns: None,
            reason: Some(reason.to_string()),
        },
    }
}

fn kernel() -> String {
    let name = nix::sys::utsname::uname();
    name.map_or("unknown".into(), |name| {
        format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy())
    })
}

fn criu() -> Finding {
    match Criu::find() {
        Ok(criu) => Finding { works: true, text: format!("{} at {}", criu.version(), criu.path().display()) },
        Err(error) => Finding { works: false, text: error.to_string() },
    }
}

fn told(findings: &Findings) -> String {
    let mut out = format!("kernel      {}\n", findings.kernel);
    out += if findings.root {
        "user        root\n"
    } else {
        "user        not root: only processes of your own can be watched, and CRIU needs root to save or restore them\n"
    };
    out += &format!("CRIU        {}{}\n", if findings.criu.works { "" } else { "✗ " }, clean(&findings.criu.text));
    if !findings.criu.works {
        out += "            without it, `--memory-only` still works\n";
    }
    match findings.auto {
        Some(auto) => out += &format!("auto        {auto}\n\n"),
        None => out += "auto        none works\n\n",
    }
    let mut table = Table::new(&["mechanism", "works", ">first write", ">when hot", ">collect", ""]);
    let cost = |ns: Option<f64>| ns.map_or("-".into(), |ns| format!("{ns:.0} ns"));
    for found in &findings.mechanisms {
        table.row([
            found.mechanism.name().into(),
            if found.works { "✓" } else { "✗" }.into(),
            cost(found.first_write_ns),
            cost(found.hot_write_ns),
            cost(found.collect_ns),
            clean(found.reason.as_deref().unwrap_or("")),
        ]);
    }
    out += &table.to_string();
    out += "\nCosts are for each page: the program's first write to it in an interval, the same for a page that is written in every\n\
         interval, and collecting it.\n";
    out
}
