//! `pagemark top`: where a process writes, live.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::Args;
use crossterm::event::{self, Event as Input, KeyCode, KeyEvent, KeyModifiers};
use crossterm::{cursor, execute, terminal};
use nix::unistd::Pid;
use pagemark::{Mechanism, PAGE_SIZE, RangeSet};
use pagemark_process::space::{AddressSpace, SpaceError};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::heat::{self, Area};
use crate::output::print;
use crate::signals::{Event, Signals, announce_exit};
use crate::text::{self, clean};

/// Show where a process writes: dirty pages a second by mapping, and a heat map of its memory
///
/// On a terminal, q ends it; elsewhere a line an interval is printed. The process runs on, untouched.
#[derive(Args, Debug)]
pub struct Top {
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = text::parse_duration)]
    every: Duration,
    /// End after so many intervals
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// A line of JSON an interval
    #[arg(long)]
    json: bool,
    /// How written pages are found; `compare` where Pagemark checkpoints the process already
    #[arg(long, default_value = "pagemap-scan")]
    mechanism: Mechanism,
    /// Process id; this process alone, without its children
    pid: i32,
}

/// One interval, as one line of `--json`.
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
        let mut space = AddressSpace::attach(self.pid, self.mechanism).map_err(|error| {
            Failure::new(format!("cannot watch process {}", self.pid), error)
                .help("`pagemark doctor` tells what works on this machine")
        })?;
        let (sender, events) = mpsc::channel();
        announce_exit(Pid::from_raw(self.pid), sender.clone())?;
        signals.stop_at(sender)?;
        if !self.json && io::stdout().is_terminal() {
            let screen = Screen::enter()?;
            let ended = self.draw(&mut space, &events);
            drop(screen);
            return self.end(ended?);
        }
        let ended = self.lines(&mut space, &events)?;
        self.end(ended)
    }

    fn end(&self, event: Event) -> Outcome {
        if event == Event::Exited {
            eprintln!("pagemark: process {} has exited", self.pid);
        }
        Ok(ExitCode::SUCCESS)
    }

    /// A line an interval.
    fn lines(&self, space: &mut AddressSpace, events: &Receiver<Event>) -> Result<Event, Failure> {
        let mut watch = Watch::begin(space, self.pid)?;
        for _ in 0..self.count.unwrap_or(u64::MAX) {
            match events.recv_timeout(self.every) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(event) => return Ok(event),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let Some((interval, _)) = watch.next()? else { return Ok(Event::Exited) };
            let line = if self.json {
                serde_json::to_string(&interval).map_err(|error| Failure::new("cannot write JSON", error))?
            } else {
                plain(&interval)
            };
            print(&(line + "\n"));
        }
        Ok(Event::Stop)
    }

    /// The whole terminal, until a key ends it.
    fn draw(&self, space: &mut AddressSpace, events: &Receiver<Event>) -> Result<Event, Failure> {
        let mut watch = Watch::begin(space, self.pid)?;
        let mut heat = Vec::new();
        for _ in 0..self.count.unwrap_or(u64::MAX) {
            let next = Instant::now() + self.every;
            while let Some(left) = next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                // Short waits: what happens to the process and what signals ask for is to be seen too.
                if key_ends(left.min(Duration::from_millis(100)))? {
                    return Ok(Event::Stop);
                }
                if let Ok(event) = events.try_recv() {
                    return Ok(event);
                }
            }
            let Some((interval, dirty)) = watch.next()? else { return Ok(Event::Exited) };
            let size = terminal::size().map_err(|error| Failure::new("the terminal has no size", error))?;
            paint(&interval, &watch.areas, &dirty, &mut heat, size)?;
        }
        Ok(Event::Stop)
    }
}

/// Looks at one address space again and again.
struct Watch<'a> {
    space: &'a mut AddressSpace,
    pid: i32,
    areas: Vec<Area>,
    since: Instant,
}

impl<'a> Watch<'a> {
    /// What was written before does not count.
    fn begin(space: &'a mut AddressSpace, pid: i32) -> Result<Self, Failure> {
        let mut watch = Watch { space, pid, areas: Vec::new(), since: Instant::now() };
        watch.next()?;
        Ok(watch)
    }

    /// What was written since the last call. None if the process is gone.
    fn next(&mut self) -> Result<Option<(Interval, RangeSet)>, Failure> {
        let failed =
            |pid: i32, error: SpaceError| Failure::new(format!("cannot watch process {pid} any longer"), error);
        let areas = match self.space.refresh_mappings() {
            Ok(mappings) => mappings.iter().filter(|mapping| mapping.is_tracked()).map(area).collect(),
            Err(SpaceError::Gone { .. }) => return Ok(None),
            Err(error) => return Err(failed(self.pid, error)),
        };
        self.areas = areas;
        let mut dirty = RangeSet::new();
        match self.space.collect(&mut dirty) {
            Ok(()) => {}
            Err(SpaceError::Gone { .. }) => return Ok(None),
            Err(error) => return Err(failed(self.pid, error)),
        }
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        let per_second = |pages: u64| pages as f64 / seconds;
        let counts = heat::by_area(&self.areas, &dirty);
        let mut mappings: Vec<_> = self
            .areas
            .iter()
            .zip(counts)
            .filter(|(_, pages)| *pages > 0)
            .map(|(area, pages)| MappingRate {
                start: area.range.start,
                end: area.range.end,
                permissions: area.permissions.clone(),
                name: area.name.clone(),
                dirty_pages_per_s: per_second(pages),
            })
            .collect();
        mappings.sort_by(|a, b| b.dirty_pages_per_s.total_cmp(&a.dirty_pages_per_s));
        let dirty_pages = dirty.total_bytes() / PAGE_SIZE as u64;
        let tracked_pages = self.areas.iter().map(|area| (area.range.end - area.range.start) / PAGE_SIZE as u64).sum();
        let dirty_pages_per_s = per_second(dirty_pages);
        let interval = Interval { pid: self.pid, seconds, dirty_pages, dirty_pages_per_s, mappings, tracked_pages };
        Ok(Some((interval, dirty)))
    }
}

fn area(mapping: &pagemark_process::mappings::Mapping) -> Area {
    Area {
        range: mapping.start..mapping.end,
        permissions: mapping.permissions(),
        name: String::from_utf8_lossy(&mapping.name).into_owned(),
    }
}

/// `2 345 pages/s (9.2 MiB/s): 2 300 in [heap], 45 in /usr/lib/…`
fn plain(interval: &Interval) -> String {
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
    if mapping.name.is_empty() { format!("{:x}", mapping.start) } else { clean(&mapping.name) }
}

/// Lines of the table of mappings.
const TABLE_ROWS: usize = 8;

/// Draws everything. `heat` cools slowly, so that the eye can follow.
fn paint(
    interval: &Interval,
    areas: &[Area],
    dirty: &RangeSet,
    heat: &mut Vec<f32>,
    (columns, rows): (u16, u16),
) -> Result<(), Failure> {
    let (columns, rows) = (usize::from(columns).max(20), usize::from(rows));
    let mut lines = vec![format!(
        "\x1b[1mprocess {}\x1b[0m  {} written  {} mapped  (q ends)",
        interval.pid,
        rate(interval.dirty_pages_per_s),
        text::bytes(interval.tracked_pages * PAGE_SIZE as u64)
    )];
    lines.push(String::new());
    lines.push(format!("\x1b[2m{:>12}  {:<12}  {:<4}  {:>9}  what\x1b[0m", "pages/s", "address", "", "size"));
    for mapping in interval.mappings.iter().take(TABLE_ROWS.min(rows.saturating_sub(8))) {
        let line = format!(
            "{:>12}  {:012x}  {}  {:>9}  {}",
            text::count(mapping.dirty_pages_per_s.round() as u64),
            mapping.start,
            mapping.permissions,
            text::bytes(mapping.end - mapping.start),
            name(mapping)
        );
        lines.push(line.chars().take(columns).collect());
    }
    lines.resize_with((TABLE_ROWS + 4).min(rows.saturating_sub(4)), String::new);

    let map_rows = rows.saturating_sub(lines.len() + 1);
    let now = heat::map(areas, dirty, columns * map_rows);
    if heat.len() != now.len() {
        *heat = now;
    } else {
        heat.iter_mut().zip(now).for_each(|(heat, now)| *heat = now.max(*heat * 0.6));
    }
    for row in heat.chunks(columns) {
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

/// One cell of the map: the hotter, the brighter.
fn cell(share: f32) -> String {
    /// Share of dirty pages from which on, colour of the terminal's 256, and the character.
    const SHADES: [(f32, u8, char); 7] = [
        (0.75, 196, '█'),
        (0.50, 202, '█'),
        (0.25, 214, '▓'),
        (0.10, 220, '▓'),
        (0.02, 71, '▒'),
        (1e-6, 30, '░'),
        (f32::MIN, 237, '·'),
    ];
    let (_, colour, letter) = SHADES.into_iter().find(|(from, ..)| share >= *from).unwrap_or(SHADES[6]);
    format!("\x1b[38;5;{colour}m{letter}")
}

/// Waits for a key at most so long. True if it is one that ends the view.
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

/// The alternate screen in raw mode, left again on drop.
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
        // Nothing can be done where the terminal is gone.
        let _ = execute!(io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}
