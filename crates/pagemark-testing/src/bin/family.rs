//! `family DIRECTORY`: a parent and its children, which exchange numbers through pipes. The parent
//! checks every answer.

use std::io::{self, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use pagemark_testing::{Report, SplitMix, VIOLATED};

const CHILDREN: u64 = 3;

fn main() {
    if std::env::args().nth(1).as_deref() == Some("--child") {
        std::process::exit(child().map_or(VIOLATED, |()| 0));
    }
    let mut report = Report::from_arguments();
    let mut children: Vec<Peer> = (0..CHILDREN).map(Peer::new).collect::<io::Result<_>>().unwrap_or_else(|error| {
        eprintln!("start a child: {error}");
        std::process::exit(2);
    });
    loop {
        for child in &mut children {
            let answer = child.ask();
            let is_correct = matches!(answer, Ok((got, expected)) if got == expected);
            report.require(is_correct, format_args!("child {} answered {answer:?}", child.process.id()));
        }
        report.ok();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Answers each number with the sum of all numbers so far.
fn child() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin(), io::stdout());
    let (mut number, mut sum) = ([0; 8], 0u64);
    loop {
        input.read_exact(&mut number)?;
        sum = sum.wrapping_add(u64::from_le_bytes(number));
        output.write_all(&sum.to_le_bytes())?;
        output.flush()?;
    }
}

/// The parent's side of a child.
struct Peer {
    process: Child,
    input: ChildStdin,
    output: ChildStdout,
    numbers: SplitMix,
    sum: u64,
}

impl Peer {
    fn new(seed: u64) -> io::Result<Peer> {
        let piped = || Stdio::piped();
        let mut process =
            Command::new(std::env::current_exe()?).arg("--child").stdin(piped()).stdout(piped()).spawn()?;
        let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
        let input = process.stdin.take().ok_or_else(missing)?;
        let output = process.stdout.take().ok_or_else(missing)?;
        Ok(Peer { process, input, output, numbers: SplitMix(seed), sum: 0 })
    }

    /// The answer of the child, and the correct answer.
    fn ask(&mut self) -> io::Result<(u64, u64)> {
        let number = self.numbers.draw();
        self.sum = self.sum.wrapping_add(number);
        self.input.write_all(&number.to_le_bytes())?;
        let mut answer = [0; 8];
        self.output.read_exact(&mut answer)?;
        Ok((u64::from_le_bytes(answer), self.sum))
    }
}
