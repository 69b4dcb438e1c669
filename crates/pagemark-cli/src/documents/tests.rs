//! Tests that the command parses what the pages and the manual show of it.

use std::fs;

use clap::error::ErrorKind;
use clap::{Command, CommandFactory, Parser};
use pagemark_testing::{ShownCommands, pages_of_commands};

use crate::Pagemark;

/// The programs besides `pagemark` that commands of the pages start.
const OTHERS: [&str; 7] = ["make", "kill", "cargo", "qemu-system-x86_64", "crash", "out/run.sh", "lab/lab"];

/// The lines of the blocks of commands, which are in no language, with those joined that go on, and
/// the spans of code in the text.
fn shown(page: &str) -> (Vec<String>, Vec<String>) {
    let page = page.replace("\\\n", "");
    let shown = ShownCommands::of_page(&page);
    let mut text = String::new();
    for line in shown.text {
        text.push_str(line);
        text.push(if line.is_empty() { '`' } else { ' ' });
        // A paragraph ends its spans.
        if line.is_empty() && text.matches('`').count() % 2 == 1 {
            text.push('`');
        }
    }
    let lines = shown.commands.into_iter().map(str::to_owned).collect();
    (lines, text.split('`').skip(1).step_by(2).map(str::to_owned).collect())
}

/// The words of a command as a shell makes them: without comments, redirections, what follows, and
/// what stands for more. The output of another command is a process id.
fn words(line: &str) -> Vec<String> {
    let mut line = line.split(" #").next().unwrap_or_default().replace('…', "");
    while let Some((before, (_, after))) =
        line.split_once("$(runc").map(|(a, b)| (a, b.split_once(')').unwrap_or((b, ""))))
    {
        line = format!("{before}4711{after}");
    }
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for character in line.chars() {
        match (quote, character) {
            (Some(open), _) if open == character => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    let end = words.iter().position(|word| ["&&", "|", ">", "<", "&"].contains(&&word[..])).unwrap_or(words.len());
    words.truncate(end);
    words
}

/// Why the command does not parse a line. Of a part of a command, only the names of options and
/// commands are examined.
fn problem(line: &str, is_part: bool) -> Option<String> {
    let words = words(line);
    let error = Pagemark::try_parse_from(&words).err()?;
    let is_name = matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand);
    (!is_part || is_name).then(|| format!("{line}: {error}"))
}

#[test]
fn every_command_of_the_pages_is_parsed() {
    let (mut problems, mut commands, mut parts) = (Vec::new(), 0, 0);
    for page in pages_of_commands() {
        let (lines, spans) = shown(&fs::read_to_string(&page).expect("a page"));
        for line in lines {
            match words(&line).first().map(String::as_str) {
                Some("pagemark") => {
                    commands += 1;
                    problems.extend(problem(&line, false));
                }
                Some(program) if OTHERS.contains(&program) || program.starts_with("PAGEMARK_") => {}
                _ => problems.push(format!("{}: {line}: another program", page.display())),
            }
        }
        for span in spans.iter().filter(|span| span.starts_with("pagemark ")) {
            parts += 1;
            problems.extend(problem(span, true));
        }
    }
    assert!(commands > 40 && parts > 20, "too few commands were found: {commands}, {parts}");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// What the manual says of a command and its options, and of all commands in it.
fn manual(command: &Command) -> Vec<String> {
    let about =
        [command.get_about(), command.get_long_about(), command.get_after_help(), command.get_after_long_help()];
    let options = command.get_arguments().flat_map(|option| [option.get_help(), option.get_long_help()]);
    let mut texts: Vec<String> = about.into_iter().chain(options).flatten().map(ToString::to_string).collect();
    texts.extend(command.get_subcommands().flat_map(manual));
    texts
}

/// The commands in a text of the manual: spans of code, what follows "For …:" to its line's end,
/// and the examples.
fn in_manual(text: &str) -> Vec<String> {
    let spans = text.split('`').skip(1).step_by(2).map(|span| span.split_whitespace().collect::<Vec<_>>().join(" "));
    let examples = text.lines().filter(|line| line.starts_with("For ")).filter_map(|line| line.split_once(": "));
    let shown = text.lines().filter(|line| line.starts_with("  pagemark ")).map(|line| line.trim().to_owned());
    let all = spans.chain(examples.map(|(_, example)| example.to_owned())).chain(shown);
    all.filter(|command| command.starts_with("pagemark ")).collect()
}

#[test]
fn every_command_of_the_manual_is_parsed() {
    let commands: Vec<String> =
        manual(&crate::examples::added_to(Pagemark::command())).iter().flat_map(|text| in_manual(text)).collect();
    assert!(commands.iter().any(|command| command.starts_with("pagemark man ")), "too few: {commands:?}");
    assert!(commands.len() > 40, "too few: {commands:?}");
    let problems: Vec<String> = commands.iter().filter_map(|command| problem(command, true)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn a_renamed_option_is_found() {
    assert_eq!(problem("pagemark attach 4711 --every 1m   # text", false), None);
    assert!(problem("pagemark attach 4711 --each 1m", false).is_some());
    assert!(problem("pagemark attach --each", true).is_some());
    assert!(problem("pagemark append", true).is_some());
    assert_eq!(problem("pagemark attach", true), None, "a part of a command");
    assert!(problem("pagemark attach", false).is_some(), "no process");
}

#[test]
fn words_are_those_of_a_shell() {
    assert_eq!(words("a 'b c'd \"e\" > f # g"), ["a", "b cd", "e"]);
    assert_eq!(words("a $(runc state web | jq .pid) b && c"), ["a", "4711", "b"]);
    assert_eq!(words("a '' …"), ["a", ""]);
    let (lines, spans) = shown("x `a` y `b\nc`\n\n```\nd \\\n e\n```\n```text\nf\n```\n");
    assert_eq!(
        (lines, spans[0].clone(), spans[1].clone()),
        (vec!["d  e".to_owned()], "a".to_owned(), "b c".to_owned())
    );
}
