//! Lines about the work that goes on: one that is rewritten in place where a person watches, plain ones elsewhere.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::text;

/// A line at the bottom of the terminal that stays there while a program scrolls its output above it.
///
/// Drawn on stderr. The terminal's scrolling region is made one line shorter for it; ends with [`BottomLine::remove`] or drop.
pub struct BottomLine {
    /// Columns and rows for which the scrolling region was set; none while nothing is drawn.
    drawn_for: Option<(u16, u16)>,
}

impl BottomLine {
    /// None where stderr is no terminal.
    pub fn new() -> Option<Self> {
        io::stderr().is_terminal().then_some(BottomLine { drawn_for: None })
    }

    /// Shows `line`, unless the program has the whole screen for itself.
    pub fn show(&mut self, line: &str) {
        // A program that reads single keys draws its own screen.
        let full_screen = tcgetattr(io::stderr()).is_ok_and(|mode| !mode.local_flags.contains(LocalFlags::ICANON));
        let Ok((columns, rows)) = crossterm::terminal::size() else { return };
        if full_screen || rows < 3 || columns < 20 {
            self.remove();
            return;
        }
        let mut out = String::new();
        if self.drawn_for != Some((columns, rows)) {
            // Down and up first, in the same column, for the case that the cursor is in the last line. Setting the region
            // moves the cursor.
            out += &format!("\x1bD\x1b[A\x1b7\x1b[1;{}r\x1b8", rows - 1);
            self.drawn_for = Some((columns, rows));
        }
        let shown: String = line.chars().take(usize::from(columns) - 1).collect();
        out += &format!("\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{shown}\x1b[0m\x1b8");
        write(&out);
    }

    /// Takes the line away and gives the whole terminal back.
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

/// Progress of long work, on stderr where that is a terminal.
pub struct Progress {
    what: &'static str,
    begin: Instant,
    shown: Option<Instant>,
    terminal: bool,
}

impl Progress {
    /// Nothing is shown before a moment has passed.
    pub fn new(what: &'static str) -> Self {
        Progress { what, begin: Instant::now(), shown: None, terminal: io::stderr().is_terminal() }
    }

    /// Says how far it is: `done` of `total` bytes or pages or whatever `unit` writes.
    pub fn at(&mut self, done: u64, total: u64, unit: fn(u64) -> String) {
        let due = self.shown.unwrap_or(self.begin).elapsed() >= Duration::from_millis(100);
        if !self.terminal || !due {
            return;
        }
        self.shown = Some(Instant::now());
        let share = if total == 0 { 0.0 } else { done as f64 / total as f64 };
        let left = if share > 0.02 {
            let left = self.begin.elapsed().mul_f64((1.0 / share - 1.0).max(0.0));
            format!(", {} left", text::duration(left))
        } else {
            String::new()
        };
        let filled = (share.clamp(0.0, 1.0) * 20.0) as usize;
        let bar: String = (0..20).map(|cell| if cell < filled { '█' } else { '·' }).collect();
        write(&format!("\r\x1b[K{} {bar} {} of {}{left}", self.what, unit(done), unit(total)));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            write("\r\x1b[K");
        }
    }
}

fn write(text: &str) {
    // Nothing can be told where stderr is gone.
    let _ = io::stderr().write_all(text.as_bytes());
}
