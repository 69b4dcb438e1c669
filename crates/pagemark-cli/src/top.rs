//! `pagemark top`: shows where a process writes while it runs.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::Args;
use crossterm::event::{self, Event as Input, KeyCode, KeyEvent, KeyModifiers};
use crossterm::{cursor, execute, terminal};
use pagemark::job::End;
use pagemark::{AddressRangeExt, ByteCount, Mechanism, PAGE_SIZE, PageRangeExt, RangeSet};
use pagemark_report::escape::{printable, printable_json};
use pagemark_report::message;
use pagemark_report::table::Table;
use pagemark_report::text;
use pagemark_trace::attach;
use pagemark_trace::space::{AddressSpace, Moment};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::heat_map::{WatchedMapping, dirty_pages_by_mapping, heat_map};
use crate::output::print;
use crate::signals::{Signals, announce_exit};

/// Show where a process writes: dirty pages a second by mapping, and a heat map of its memory
///
/// On a terminal, q ends it; elsewhere it prints a line for each interval. The process keeps
/// running.
#[derive(Args, Debug)]
pub struct Top {
    /// Length of an interval
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = text::parse_duration)]
    every: Duration,
    /// End after N intervals
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Print a line of JSON for each interval
    #[arg(long)]
    json: bool,
    /// How written pages are found; `compare` where Pagemark checkpoints the process already
    #[arg(long, default_value = "pagemap-scan")]
    mechanism: Mechanism,
    /// Process id; this process alone, without its children
    pid: i32,
}

/// An interval, as a line of `--json`.
#[derive(Serialize)]
struct Interval {
    pid: i32,
    seconds: f64,
    dirty_pages: u64,
    dirty_pages_per_s: f64,
    mappings: Vec<MappingRate>,
    #[serde(skip)]
    tracked_pages: u64,
}

#[derive(Serialize)]
struct MappingRate {
    start: u64,
    end: u64,
    permissions: String,
    name: String,
    dirty_pages_per_s: f64,
}

impl Top {
    pub fn run(self) -> Outcome {
        let signals = Signals::hold_for_stop()?;
        let mut space = attach::check(self.pid)
            .and_then(|process| AddressSpace::attach(process, self.mechanism))
            .map_err(|error| Failure::of(format!("cannot watch process {}", self.pid), error))?;
        let (sender, events) = mpsc::channel();
        announce_exit(space.process(), sender.clone())?;
        signals.stop_at(sender)?;
        if !self.json && io::stdout().is_terminal() {
            let screen = Screen::enter()?;
            let ended = self.draw(&mut space, &events);
            drop(screen);
            return self.end(ended?);
        }
        let ended = self.print_lines(&mut space, &events)?;
        self.end(ended)
    }

    fn end(&self, end: End) -> Outcome {
        if end == End::TargetGone {
            message!("pagemark: process {} has exited", self.pid);
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Prints a line for each interval.
    fn print_lines(&self, space: &mut AddressSpace, events: &Receiver<End>) -> Result<End, Failure> {
        let mut watch = Watch::begin(space, self.pid)?;
        for _ in 0..self.count.unwrap_or(u64::MAX) {
            match events.recv_timeout(self.every) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(event) => return Ok(event),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let Some((interval, _)) = watch.next_interval()? else { return Ok(End::TargetGone) };
            let line = if self.json {
                serde_json::to_string(&interval).map_err(|error| Failure::new("cannot write JSON", error))?
            } else {
                line(&interval)
            };
            print(&(printable_json(&line) + "\n"));
        }
        Ok(End::Stopped)
    }

    /// Draws on the whole terminal until a key ends it.
    fn draw(&self, space: &mut AddressSpace, events: &Receiver<End>) -> Result<End, Failure> {
        let mut watch = Watch::begin(space, self.pid)?;
        let mut shares = Vec::new();
        for _ in 0..self.count.unwrap_or(u64::MAX) {
            let next = Instant::now() + self.every;
            while let Some(left) = next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                // The waits are short, so that signals and the exit of the process are noticed,
                // too.
                if key_ends(left.min(Duration::from_millis(100)))? {
                    return Ok(End::Stopped);
                }
                if let Ok(event) = events.try_recv() {
                    return Ok(event);
                }
            }
            let Some((interval, dirty)) = watch.next_interval()? else { return Ok(End::TargetGone) };
            let size = terminal::size().map_err(|error| Failure::new("the terminal has no size", error))?;
            draw_interval(&interval, &watch.mappings, &dirty, &mut shares, size)?;
        }
        Ok(End::Stopped)
    }
}

/// Collects the written pages of an address space in intervals.
struct Watch<'a> {
    space: &'a mut AddressSpace,
    pid: i32,
    mappings: Vec<WatchedMapping>,
    interval_begin: Instant,
}

impl<'a> Watch<'a> {
    /// Begins the first interval.
    fn begin(space: &'a mut AddressSpace, pid: i32) -> Result<Self, Failure> {
        let mut watch = Watch { space, pid, mappings: Vec::new(), interval_begin: Instant::now() };
        watch.next_interval()?;
        Ok(watch)
    }

    /// Ends the interval and begins the next. Returns its rates and its written ranges, or None if
    /// the process has exited.
    fn next_interval(&mut self) -> Result<Option<(Interval, RangeSet)>, Failure> {
        let failed = |pid: i32, error: pagemark_process::Error| {
            Failure::new(format!("cannot watch process {pid} any longer"), error)
        };
        self.mappings = match self.space.refresh_mappings() {
            Ok(mappings) => mappings.iter().filter(|mapping| mapping.is_tracked()).map(watched).collect(),
            Err(error) if error.is_gone() => return Ok(None),
            Err(error) => return Err(failed(self.pid, error)),
        };
        let mut dirty = RangeSet::new();
        match self.space.collect(Moment::Running, &mut dirty) {
            Ok(()) => {}
            Err(error) if error.is_gone() => return Ok(None),
            Err(error) => return Err(failed(self.pid, error)),
        }
        let seconds = self.interval_begin.elapsed().as_secs_f64();
        self.interval_begin = Instant::now();
        let per_second = |pages: u64| pages as f64 / seconds;
        let counts = dirty_pages_by_mapping(&self.mappings, &dirty);
        let mut mappings: Vec<_> = self
            .mappings
            .iter()
            .zip(counts)
            .filter(|(_, pages)| *pages > 0)
            .map(|(mapping, pages)| MappingRate {
                start: mapping.range.start.get(),
                end: mapping.range.end.get(),
                permissions: mapping.permissions.clone(),
                name: mapping.name.clone(),
                dirty_pages_per_s: per_second(pages),
            })
            .collect();
        mappings.sort_by(|a, b| b.dirty_pages_per_s.total_cmp(&a.dirty_pages_per_s));
        let dirty_pages = dirty.page_count();
        let tracked_pages = self.mappings.iter().map(|mapping| mapping.range.page_range().page_count()).sum();
        let dirty_pages_per_s = per_second(dirty_pages);
        let interval = Interval { pid: self.pid, seconds, dirty_pages, dirty_pages_per_s, mappings, tracked_pages };
        Ok(Some((interval, dirty)))
    }
}

fn watched(mapping: &pagemark_linux::proc::Mapping) -> WatchedMapping {
    WatchedMapping {
        range: mapping.range(),
        permissions: mapping.permissions(),
        name: String::from_utf8_lossy(&mapping.name).into_owned(),
    }
}

/// `2 345 pages/s (9.2 MiB/s): 2 300 in [heap], 45 in /usr/lib/…`
fn line(interval: &Interval) -> String {
    let hottest: Vec<_> = interval
        .mappings
        .iter()
        .take(3)
        .map(|mapping| format!("{} in {}", text::count(mapping.dirty_pages_per_s.round() as u64), name(mapping)))
        .collect();
    let colon = if hottest.is_empty() { "" } else { ": " };
    format!("{}{colon}{}", rate(interval.dirty_pages_per_s), hottest.join(", "))
}

/// `2 345 pages/s (9.2 MiB/s)`.
fn rate(pages_per_s: f64) -> String {
    let bytes = text::bytes((pages_per_s * PAGE_SIZE as f64) as u64);
    format!("{} pages/s ({bytes}/s)", text::count(pages_per_s.round() as u64))
}

fn name(mapping: &MappingRate) -> String {
    if mapping.name.is_empty() { format!("{:x}", mapping.start) } else { printable(&mapping.name) }
}

/// Most rows of the table of mappings.
const TABLE_ROWS: usize = 8;

/// Least widths of its columns, so that the columns do not move from one drawing to the next.
const COLUMN_WIDTHS: [usize; 4] = [12, 12, 4, 9];

/// Draws the terminal. `shares`, the heat map that was drawn last, cools slowly, so that the eye
/// can follow.
fn draw_interval(
    interval: &Interval,
    mappings: &[WatchedMapping],
    dirty: &RangeSet,
    shares: &mut Vec<f32>,
    (columns, rows): (u16, u16),
) -> Result<(), Failure> {
    let (columns, rows) = (usize::from(columns).max(20), usize::from(rows));
    let mut lines = vec![format!(
        "\x1b[1mprocess {}\x1b[0m  {} written  {} mapped  (q ends)",
        interval.pid,
        rate(interval.dirty_pages_per_s),
        text::bytes(ByteCount::of_pages(interval.tracked_pages).get())
    )];
    lines.push(String::new());
    let mut table = Table::new([">pages/s", "address", "", ">size", "what"]).min_widths(COLUMN_WIDTHS);
    for mapping in interval.mappings.iter().take(TABLE_ROWS.min(rows.saturating_sub(8))) {
        table.row([
            text::count(mapping.dirty_pages_per_s.round() as u64),
            format!("{:012x}", mapping.start),
            mapping.permissions.clone(),
            text::bytes(mapping.end - mapping.start),
            name(mapping),
        ]);
    }
    for (row, line) in table.to_string().lines().enumerate() {
        let line: String = line.chars().take(columns).collect();
        lines.push(if row == 0 { format!("\x1b[2m{line}\x1b[0m") } else { line });
    }
    lines.resize_with((TABLE_ROWS + 4).min(rows.saturating_sub(4)), String::new);

    let map_rows = rows.saturating_sub(lines.len() + 1);
    let now = heat_map(mappings, dirty, columns * map_rows);
    if shares.len() != now.len() {
        *shares = now;
    } else {
        shares.iter_mut().zip(now).for_each(|(share, now)| *share = now.max(*share * 0.6));
    }
    for row in shares.chunks(columns) {
        lines.push(row.iter().map(|&share| cell(share)).collect::<String>() + "\x1b[0m");
    }
    let mut out = String::from("\x1b[H");
    for (index, line) in lines.iter().take(rows).enumerate() {
        out += line;
        out += "\x1b[K";
        if index + 1 < lines.len().min(rows) {
            out += "\r\n";
        }
    }
    out += "\x1b[J";
    let mut stdout = io::stdout().lock();
    stdout.write_all(out.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| Failure::new("cannot draw", error))
}

/// A cell of the map, brighter for a greater share of dirty pages.
fn cell(share: f32) -> String {
    /// Least share of dirty pages, colour (of 256), character.
    const SHADES: [(f32, u8, char); 7] = [
        (0.75, 196, '█'),
        (0.50, 202, '█'),
        (0.25, 214, '▓'),
        (0.10, 220, '▓'),
        (0.02, 71, '▒'),
        (1e-6, 30, '░'),
        (f32::MIN, 237, '·'),
    ];
    let (_, colour, character) = SHADES.into_iter().find(|(from, ..)| share >= *from).unwrap_or(SHADES[6]);
    format!("\x1b[38;5;{colour}m{character}")
}

/// Waits for a key, for `wait` at most. Returns true for a key that ends the program.
fn key_ends(wait: Duration) -> Result<bool, Failure> {
    let failed = |error| Failure::new("cannot read the keyboard", error);
    if !event::poll(wait).map_err(failed)? {
        return Ok(false);
    }
    Ok(match event::read().map_err(failed)? {
        Input::Key(KeyEvent { code: KeyCode::Char('q') | KeyCode::Esc, .. }) => true,
        Input::Key(KeyEvent { code: KeyCode::Char('c'), modifiers, .. }) => modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    })
}

/// The alternate screen in raw mode. Drop restores the terminal.
struct Screen;

impl Screen {
    fn enter() -> Result<Self, Failure> {
        let failed = |error| Failure::new("cannot use the terminal", error);
        terminal::enable_raw_mode().map_err(failed)?;
        let screen = Screen;
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide).map_err(failed)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone, there is nothing to restore.
        let _ = execute!(io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}
