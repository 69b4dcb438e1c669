//! Lines on the terminal that are rewritten while work goes on.

use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::sys::termios::{LocalFlags, tcgetattr};
use pagemark_report::bar::bar;
use pagemark_report::escape::printable;
use pagemark_report::text;

/// A line at the bottom of the terminal, which stays while a program scrolls its output above it.
///
/// The line is drawn on stderr. It makes the scrolling region of the terminal one line shorter,
/// until [`BottomLine::remove`] or drop.
pub struct BottomLine {
    /// Columns and rows for which the scrolling region is set; None while no line is drawn.
    drawn_for: Option<(u16, u16)>,
    /// The terminal of the program, if that is another.
    program_terminal: Option<OwnedFd>,
}

impl BottomLine {
    /// Returns None if stderr is no terminal.
    pub fn new(program_terminal: Option<OwnedFd>) -> Option<Self> {
        io::stderr().is_terminal().then_some(BottomLine { drawn_for: None, program_terminal })
    }

    /// Shows `line`, unless the program uses the whole screen.
    pub fn show(&mut self, line: &str) {
        // A program that reads single keys draws the whole screen.
        let mode = self.program_terminal.as_ref().map_or_else(|| tcgetattr(io::stderr()), tcgetattr);
        let full_screen = mode.is_ok_and(|mode| !mode.local_flags.contains(LocalFlags::ICANON));
        let Ok((columns, rows)) = crossterm::terminal::size() else { return };
        if full_screen || rows < 3 || columns < 20 {
            self.remove();
            return;
        }
        let mut out = String::new();
        if self.drawn_for != Some((columns, rows)) {
            // The cursor moves down and up in its column first, which scrolls if it is in the last
            // line. It is saved and restored, because setting the region moves it.
            out += &format!("\x1bD\x1b[A\x1b7\x1b[1;{}r\x1b8", rows - 1);
            self.drawn_for = Some((columns, rows));
        }
        let shown: String = printable(line).chars().take(usize::from(columns) - 1).collect();
        out += &format!("\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{shown}\x1b[0m\x1b8");
        write(&out);
    }

    /// Removes the line, and makes the scrolling region the whole terminal again.
    pub fn remove(&mut self) {
        if let Some((_, rows)) = self.drawn_for.take() {
            write(&format!("\x1b7\x1b[{rows};1H\x1b[2K\x1b[r\x1b8"));
        }
    }
}

impl Drop for BottomLine {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Width of the bar that shows progress.
const BAR_CELLS: usize = 20;

/// Progress of long work, on stderr if that is a terminal.
pub struct Progress {
    work: &'static str,
    begin: Instant,
    last_shown: Option<Instant>,
    is_terminal: bool,
}

impl Progress {
    /// Begins to measure the time of `work`, a verb such as `verifying`. The first line is shown
    /// after 100 ms.
    pub fn new(work: &'static str) -> Self {
        Progress { work, begin: Instant::now(), last_shown: None, is_terminal: io::stderr().is_terminal() }
    }

    /// Shows that `done` of `total` is done. `unit` formats both.
    pub fn at(&mut self, done: u64, total: u64, unit: fn(u64) -> String) {
        let due = self.last_shown.unwrap_or(self.begin).elapsed() >= Duration::from_millis(100);
        if !self.is_terminal || !due {
            return;
        }
        self.last_shown = Some(Instant::now());
        let share = if total == 0 { 0.0 } else { done as f64 / total as f64 };
        let left = if share > 0.02 {
            let left = self.begin.elapsed().mul_f64((1.0 / share - 1.0).max(0.0));
            format!(", {} left", text::duration(left))
        } else {
            String::new()
        };
        let bar = bar(share, BAR_CELLS);
        write(&format!("\r\x1b[K{} {bar} {} of {}{left}", self.work, unit(done), unit(total)));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.last_shown.is_some() {
            write("\r\x1b[K");
        }
    }
}

fn write(text: &str) {
    // If stderr is closed, there is nowhere to report the error.
    let _ = io::stderr().write_all(text.as_bytes());
}
