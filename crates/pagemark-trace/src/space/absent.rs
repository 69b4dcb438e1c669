//! Shared memory that was written and has left the page table, as by reclaim. Its entry is empty
//! then, like that of a page that was never used, and tells of no write; the file has the data.

use std::fs::File;
use std::io;

use pagemark::{Address, AddressRangeExt, Range, RangeSet};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED, WP_ALLOWED};
use pagemark_linux::proc::{self, Mapping};
use pagemark_linux::sparse;

/// Adds those pages of `absent` to `dirty` that hold data in the file of `mapping`, which contains
/// them, and may have been written since the last call: all of them, but where `pagemap` is that of
/// registered memory. There each gets the marker of a protected page, with which it is no longer
/// absent, and only the pages that have left the page table since count.
///
/// # Errors
/// The file or the pagemap cannot be read.
pub(super) fn find_writes(
    thread: i32,
    mapping: &Mapping,
    absent: &RangeSet,
    registered: Option<&Pagemap>,
    dirty: &mut RangeSet,
) -> io::Result<()> {
    let file = File::open(proc::mapped_file(thread, &mapping.range()))?;
    let data = data(&file, mapping, absent)?;
    let Some(pagemap) = registered else {
        dirty.extend(&data);
        return Ok(());
    };
    let empty = PRESENT | SWAPPED;
    let unmarked = Filter { all: WP_ALLOWED, none: empty, protect: true, ..Filter::default() };
    let unregistered = Filter { none: empty | WP_ALLOWED, ..Filter::default() };
    data.iter().try_for_each(|range| {
        pagemap.scan(&range, unmarked, |run, _| dirty.insert(run))?;
        pagemap.scan(&range, unregistered, |run, _| dirty.insert(run)).map(drop)
    })
}

/// The pages of `wanted`, a part of a mapping, that are no holes of its file.
fn data(file: &File, mapping: &Mapping, wanted: &RangeSet) -> io::Result<RangeSet> {
    let begin = Address::new(mapping.offset);
    let mut found = RangeSet::new();
    // Of what is found behind a range, the next ones need not be looked for.
    let mut known: Range = begin..begin;
    let mut known_until = begin;
    for range in wanted.iter() {
        let start = begin + (range.start - mapping.start);
        let end = start + range.byte_count();
        let mut at = start;
        while at < end {
            if at >= known_until {
                let end_of_mapping = begin + mapping.range().byte_count();
                known = sparse::next_data(file, at, end_of_mapping)?;
                known_until = known.end;
            }
            let data = known.start.max(at)..known.end.min(end);
            if data.start < data.end {
                let first = mapping.start + (data.start - begin);
                found.insert(first..first + data.byte_count());
            }
            at = known_until.min(end);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

    use pagemark::track::Scope;
    use pagemark::{ByteCount, Mechanism};
    use pagemark_linux::proc::Process;
    use pagemark_testing::{assert_oracle, skip};

    use super::super::{AddressSpace, Moment, SharedScope};
    use super::*;

    /// Maps 64 pages of shared memory, of which the first three are holes, and for each line `w N`
    /// writes a page, which leaves the page table at once, or for `r N` reads one.
    const PROGRAM: &str = "
import mmap, os, sys
file = os.memfd_create('memory')
os.ftruncate(file, 64 * 4096)
memory = mmap.mmap(file, 64 * 4096)
for page in range(3, 64):
    memory[page * 4096] = 1
memory.madvise(mmap.MADV_DONTNEED)
maps = [line for line in open('/proc/self/maps') if 'memfd:memory' in line]
print(maps[0].split('-')[0], flush=True)
for number, line in enumerate(sys.stdin):
    what, page = line.split()
    if what == 'w':
        memory[int(page) * 4096] = 2 + number % 200
        memory.madvise(mmap.MADV_DONTNEED, int(page) * 4096, 4096)
    else:
        memory[int(page) * 4096]
    print(flush=True)
";

    struct Program {
        child: Child,
        input: ChildStdin,
        output: BufReader<ChildStdout>,
        start: Address,
    }

    impl Drop for Program {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    impl Program {
        fn start() -> Program {
            let mut command = Command::new("python3");
            command.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
            let mut program = Program { child, input, output: BufReader::new(output), start: Address::MIN };
            let line = program.line();
            program.start = Address::new(u64::from_str_radix(line.trim(), 16).unwrap());
            program
        }

        fn line(&mut self) -> String {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it has ended");
            line
        }

        fn does(&mut self, what: &str, page: u64) {
            writeln!(self.input, "{what} {page}").unwrap();
            self.line();
        }

        fn page(&self, page: u64) -> Range {
            let start = self.start + ByteCount::of_pages(page);
            start..start + ByteCount::PAGE
        }
    }

    #[test]
    fn what_is_written_and_leaves_the_page_table_is_found() {
        if !nix::unistd::geteuid().is_root() {
            skip!("not root");
        }
        for mechanism in Mechanism::of_scope(Scope::Process) {
            let mut program = Program::start();
            let process = Process::find(program.child.id() as i32).unwrap();
            let Ok(mut space) = AddressSpace::attach_with(process, mechanism, SharedScope::FilesAndMemory) else {
                continue;
            };
            let mut collected = || {
                let mut dirty = RangeSet::new();
                space.collect(Moment::Running, &mut dirty).unwrap();
                dirty
            };
            let first = collected();
            let has_data = |page: u64| page > 2;
            for page in 0..64 {
                let is_reported = first.covers(program.page(page));
                // What it was before tracking began, its reader knows from the file.
                assert!(mechanism == Mechanism::Ldt || is_reported == has_data(page), "{mechanism}, {page}");
            }
            let is_exact = space_is_registered(mechanism) || mechanism == Mechanism::Ldt;
            for round in 0..4 {
                // Also a page that has left the page table, and comes back without a write.
                program.does("r", 20);
                program.does("w", 2 + round);
                let dirty = collected();
                assert_oracle!(dirty.covers(program.page(2 + round)), "{mechanism}, {round}: a write was missed");
                assert!(!is_exact || round == 0 || !dirty.covers(program.page(20)), "{mechanism}: was only read");
                let dirty = collected();
                assert!(!is_exact || !dirty.covers(program.page(2 + round)), "{mechanism}: was not written again");
            }
            assert!(!collected().covers(program.page(0)), "{mechanism}: it is a hole");
        }
    }

    fn space_is_registered(mechanism: Mechanism) -> bool {
        mechanism.process_tracking().is_ok_and(|tracking| tracking.needs_userfaultfd)
    }
}
