//! The command `pagemark-bench`.

use std::process::ExitCode;

use clap::Parser;
use pagemark_bench::Bench;

/// Measures what tracking and checkpoints cost on this machine, beside their peers
#[derive(Parser, Debug)]
#[command(
    name = "pagemark-bench",
    version,
    max_term_width = 120,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct PagemarkBench {
    #[command(subcommand)]
    bench: Bench,
}

fn main() -> ExitCode {
    match PagemarkBench::parse().bench.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagemark-bench: the measurement failed: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        PagemarkBench::command().debug_assert();
    }

    #[test]
    fn documents_list_each_measurement() {
        let read = |name| std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../").to_owned() + name);
        let (measured, contributing) = (read("docs/measured.md").unwrap(), read("CONTRIBUTING.md").unwrap());
        for command in PagemarkBench::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            assert!(measured.contains(&format!("`{name}`")), "docs/measured.md does not name {name}");
            assert!(contributing.contains(&format!("pagemark-bench {name} ")), "CONTRIBUTING.md does not name {name}");
        }
    }
}
