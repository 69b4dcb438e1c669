//! The command `pagemark`: checkpoints running programs and restores them.
//!
//! Each subcommand is a module. Options are parsed here, and the work is done by the crates
//! `pagemark`, `pagemark-process` and `pagemark-vm`.
//!
//! # Example
//!
//! ```text
//! pagemark run --every 10s -- ./simulate --steps 1000000
//! pagemark restore simulate
//! ```

// They panic where stderr or stdout cannot be written.
#![deny(clippy::print_stderr, clippy::print_stdout)]

mod advise;
mod asides;
mod attach;
mod costs;
mod diff;
mod doctor;
mod documents;
mod examples;
mod export;
mod failure;
mod fork;
mod heap;
mod heat_map;
mod job;
mod live;
mod log;
mod machine;
mod moved;
mod options;
mod output;
mod prune;
mod reference;
mod report;
mod repository;
mod restore;
mod run;
mod show;
mod signals;
mod simulate;
mod space;
mod top;
mod verify;
mod vm;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use pagemark_report::escape::is_steering;
use pagemark_report::message;

/// Keeps a running, unmodified program checkpointed, and brings it back
///
/// Saves only the memory pages that the program has written since the last checkpoint.
#[derive(Parser, Debug)]
#[command(name = "pagemark", version, max_term_width = 120, subcommand_required = true, arg_required_else_help = true)]
struct Pagemark {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Subcommand, Debug)]
enum Subcommands {
    Run(run::Run),
    Attach(attach::Attach),
    Checkpoint(attach::Checkpoint),
    Restore(restore::Restore),
    Fork(fork::Fork),
    Log(log::Log),
    Show(show::Show),
    Diff(diff::Diff),
    Verify(verify::Verify),
    Prune(prune::Prune),
    Asides(asides::Asides),
    Export(export::Export),
    Top(top::Top),
    Advise(advise::Advise),
    Vm(vm::Vm),
    Simulate(simulate::Simulate),
    Doctor(doctor::Doctor),
    #[command(hide = true)]
    Bench(moved::Bench),
    Completions(documents::Completions),
    Man(documents::Man),
}

/// Parses the command line, or ends the process. An argument may be a name from elsewhere, so what
/// clap says of it does not steer the terminal either.
fn parse() -> Pagemark {
    let matches = examples::added_to(Pagemark::command()).try_get_matches();
    let error = match matches.and_then(|matches| Pagemark::from_arg_matches(&matches)) {
        Ok(parsed) => return parsed,
        Err(error) => error,
    };
    let arguments: Vec<String> = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
    if !arguments.iter().any(|argument| argument.contains(is_steering)) {
        error.exit();
    }
    let mut text = error.render().to_string();
    for argument in &arguments {
        for line in argument.split('\n').skip(1).filter(|line| !line.is_empty()) {
            text = text.replace(&format!("\n{line}"), &format!("\\n{line}"));
        }
    }
    text.lines().for_each(|line| message!("{line}"));
    std::process::exit(error.exit_code());
}

/// Has a panic reported as all messages are.
fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
        let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
        message!("pagemark: panicked{place}: {}", text.unwrap_or("no reason is given"));
        message!("help: this is a fault of Pagemark; please report it with what led to it");
    }));
}

fn main() -> ExitCode {
    report_panics();
    let outcome = match parse().command {
        Subcommands::Run(command) => command.run(),
        Subcommands::Attach(command) => command.run(),
        Subcommands::Checkpoint(command) => command.run(),
        Subcommands::Restore(command) => command.run(),
        Subcommands::Fork(command) => command.run(),
        Subcommands::Log(command) => command.run(),
        Subcommands::Show(command) => command.run(),
        Subcommands::Diff(command) => command.run(),
        Subcommands::Verify(command) => command.run(),
        Subcommands::Prune(command) => command.run(),
        Subcommands::Asides(command) => command.run(),
        Subcommands::Export(command) => command.run(),
        Subcommands::Top(command) => command.run(),
        Subcommands::Advise(command) => command.run(),
        Subcommands::Vm(command) => command.run(),
        Subcommands::Simulate(command) => command.run(),
        Subcommands::Doctor(command) => command.run(),
        Subcommands::Bench(command) => command.run(),
        Subcommands::Completions(command) => command.run(examples::added_to(Pagemark::command())),
        Subcommands::Man(command) => command.run(examples::added_to(Pagemark::command())),
    };
    outcome.unwrap_or_else(failure::Failure::report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Pagemark::command().debug_assert();
    }
}
