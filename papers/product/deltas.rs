//! `pagemark-bench deltas`: bytes and processor time of checkpoints that store what changed in a
//! page, beside checkpoints that store whole pages, for programs that change little in many pages.
//! It reproduces no experiment of the papers.

use std::hint::black_box;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use pagemark::repository::{Cost, Manifest, Repository, RepositoryOptions, SpaceRecord, TargetKind};
use pagemark::store::Piece;
use pagemark::{ContentId, Kind, Mechanism, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use crate::measuring::random::Xorshift;
use crate::measuring::usage::{processor_time, thread_cpu_ns};
use crate::{BenchError, print_json};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Pages that change between checkpoints
    #[arg(long, default_value_t = 8192)]
    pages: usize,
    /// Checkpoints in a measurement
    #[arg(long, default_value_t = 12)]
    checkpoints: u32,
    /// Directory for the repositories [default: the directory for temporary files]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a program writes into each page between two checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Writes {
    /// A counter of 8 bytes.
    Counter,
    /// Three values of 100 bytes at random places.
    Values,
    /// 100 bytes behind those of the interval before.
    Growth,
    /// All of it: nothing can be saved.
    Everything,
}

const VALUE_BYTES: usize = 100;
const WORD_BYTES: usize = 8;

impl Writes {
    const ALL: [Writes; 4] = [Writes::Counter, Writes::Values, Writes::Growth, Writes::Everything];

    fn description(self) -> &'static str {
        match self {
            Writes::Counter => "a counter of 8 bytes",
            Writes::Values => "3 values of 100 bytes",
            Writes::Growth => "100 bytes appended",
            Writes::Everything => "the whole page",
        }
    }

    fn change(self, page: &mut [u8; PAGE_SIZE], interval: usize, random: &mut Xorshift) {
        let fill = |bytes: &mut [u8], random: &mut Xorshift| {
            bytes
                .chunks_mut(WORD_BYTES)
                .for_each(|word| word.copy_from_slice(&random.next_u64().to_ne_bytes()[..word.len()]));
        };
        match self {
            Writes::Counter => fill(&mut page[..WORD_BYTES], random),
            Writes::Values => (0..3).for_each(|_| {
                let at = random.index(PAGE_SIZE - VALUE_BYTES);
                fill(&mut page[at..at + VALUE_BYTES], random);
            }),
            Writes::Growth => {
                let at = interval * VALUE_BYTES % (PAGE_SIZE - VALUE_BYTES);
                fill(&mut page[at..at + VALUE_BYTES], random);
            }
            Writes::Everything => fill(page, random),
        }
    }
}

/// A row of the result.
#[derive(serde::Serialize)]
struct Row {
    writes: Writes,
    whole_page_ns: Samples,
    delta_page_ns: Samples,
    /// Of the same checkpoint.
    time_ratio: Samples,
    whole_page_bytes: Samples,
    delta_page_bytes: Samples,
    /// Processor time of reading all pages of the last checkpoint, deltas to whole pages.
    read_time_ratio: Samples,
}

/// A job of one space.
struct Target {
    repository: Repository,
    tree: PageTree,
}

/// Checkpoints before the measured ones: the first two store each page whole.
const WARM_UP: u32 = 2;
/// Reads of each repository.
const READS: u32 = 5;

/// Measures and prints.
///
/// # Errors
/// A repository could not be written.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let rows = Writes::ALL.into_iter().map(|writes| measure(options, writes)).collect::<Result<Vec<_>, _>>()?;
    if options.json {
        return print_json(&rows);
    }
    print(&format!("{}\n{}", options.describe(), table(&rows)));
    Ok(())
}

impl Options {
    fn describe(&self) -> String {
        let (pages, checkpoints) = (self.pages, self.checkpoints);
        format!("{pages} pages change between checkpoints, {checkpoints} checkpoints of each kind in turn; medians")
    }
}

fn measure(options: &Options, writes: Writes) -> Result<Row, BenchError> {
    let directory = match &options.directory {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir(),
    };
    let directory = directory.map_err(BenchError::on("make a directory for the repositories"))?;
    let target = |name: &str, whole_pages: bool| -> Result<Target, BenchError> {
        let repository = RepositoryOptions::default().whole_pages(whole_pages);
        let repository = repository.create(&directory.path().join(name)).map_err(BenchError::pagemark)?;
        Ok(Target { repository, tree: PageTree::new() })
    };
    let (mut whole, mut deltas) = (target("whole", true)?, target("deltas", false)?);
    let mut random = Xorshift::new(1);
    let mut memory = vec![[0; PAGE_SIZE]; options.pages];
    for page in &mut memory {
        // Half of a page compresses well: the memory of most programs compresses to some degree.
        Writes::Everything.change(page, 0, &mut random);
        page[PAGE_SIZE / 2..].fill(random.next_u64() as u8);
    }
    let mut row = Row {
        writes,
        whole_page_ns: Samples::default(),
        delta_page_ns: Samples::default(),
        time_ratio: Samples::default(),
        whole_page_bytes: Samples::default(),
        delta_page_bytes: Samples::default(),
        read_time_ratio: Samples::default(),
    };
    for checkpoint in 0..WARM_UP + options.checkpoints {
        memory.iter_mut().for_each(|page| writes.change(page, checkpoint as usize, &mut random));
        let (whole_ns, whole_bytes) = whole.checkpoint(&memory)?;
        let (delta_ns, delta_bytes) = deltas.checkpoint(&memory)?;
        if checkpoint >= WARM_UP {
            row.whole_page_ns.push(whole_ns);
            row.delta_page_ns.push(delta_ns);
            row.time_ratio.push(delta_ns / whole_ns);
            row.whole_page_bytes.push(whole_bytes);
            row.delta_page_bytes.push(delta_bytes);
        }
    }
    for _ in 0..READS {
        let whole = whole.read()?;
        row.read_time_ratio.push(deltas.read()?.as_secs_f64() / whole.as_secs_f64());
    }
    Ok(row)
}

impl Target {
    /// Reads all pages, with all threads of this process. Returns the processor time.
    fn read(&self) -> Result<Duration, BenchError> {
        let last = self.repository.checkpoints("bench").map_err(BenchError::pagemark)?.len() as u64;
        let checkpoint = self.repository.read("bench", last).map_err(BenchError::pagemark)?;
        let ids: Vec<ContentId> = self.tree.iter().map(|(_, id)| id).collect();
        let begin = processor_time()?;
        let visit = |_: &[Piece], content: &[u8]| {
            black_box(content);
            ControlFlow::Continue(())
        };
        checkpoint.get_many(Kind::Page, &ids, &visit).map_err(BenchError::pagemark)?;
        Ok(processor_time()? - begin)
    }

    /// Takes a checkpoint. Returns its processor time and its bytes, both for a page.
    fn checkpoint(&mut self, memory: &[[u8; PAGE_SIZE]]) -> Result<(f64, f64), BenchError> {
        let begin_ns = thread_cpu_ns()?;
        let mut writer = self.repository.writer("a measurement", Duration::ZERO).map_err(BenchError::pagemark)?;
        for (number, page) in memory.iter().enumerate() {
            let number = PageNumber::new(number as u64);
            let last: ContentId = self.tree.get(number);
            self.tree.set(number, writer.put_changed(last, page).map_err(BenchError::pagemark)?);
        }
        let root = self.tree.save(&mut writer).map_err(BenchError::pagemark)?;
        let manifest = Manifest {
            job: "bench".into(),
            sequence: 0,
            taken_unix_us: 0,
            command: Vec::new(),
            program: None,
            mechanism: Mechanism::Full,
            kind: TargetKind::Memory,
            spaces: vec![SpaceRecord::of_process(1, "bench".into(), root, self.tree.page_count(), Vec::new())],
            files: Vec::new(),
            state: Vec::new(),
            cost: Cost::default(),
        };
        let info = writer.commit(manifest).map_err(BenchError::pagemark)?;
        let pages = memory.len() as f64;
        Ok(((thread_cpu_ns()? - begin_ns) / pages, info.written_bytes as f64 / pages))
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        "written in a page",
        ">whole ns",
        ">delta ns",
        ">ratio",
        ">spread",
        ">whole bytes",
        ">delta bytes",
        ">read ratio",
    ]);
    for row in rows {
        table.row([
            row.writes.description().into(),
            format!("{:.0}", row.whole_page_ns.median()),
            format!("{:.0}", row.delta_page_ns.median()),
            format!("{:.2}", row.time_ratio.median()),
            format!("{:.2} to {:.2}", row.time_ratio.least(), row.time_ratio.greatest()),
            format!("{:.0}", row.whole_page_bytes.median()),
            format!("{:.0}", row.delta_page_bytes.median()),
            format!("{:.2}", row.read_time_ratio.median()),
        ]);
    }
    table
}
