//! Files that a program writes through a mapping while it runs.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use pagemark::target::TargetMemory;
use pagemark::{Mechanism, MemoryStore, RangeSet};
use pagemark_linux::proc::Process;
use pagemark_process::saver::RegisterSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{assert_oracle, skip};

const FILE_BYTES: u64 = 16 << 20;

/// Maps the file "mapped", writes to each of its pages, and then at the offset in each line of its
/// input.
const WRITER: &str = "
import mmap, sys
with open('mapped', 'r+b') as file:
    memory = mmap.mmap(file.fileno(), 0)
for at in range(0, len(memory), 4096):
    memory[at] = 1
print('ready', flush=True)
for line in sys.stdin:
    memory[int(line)] = 7
    print('ready', flush=True)
";

#[test]
fn a_mapped_file_is_read_again_only_when_it_was_written() {
    read_again_when_written(Mechanism::PagemapScan);
}

#[test]
fn a_mapped_file_is_read_again_only_when_it_was_written_with_ldt() {
    read_again_when_written(Mechanism::Ldt);
}

fn read_again_when_written(mechanism: Mechanism) {
    let directory = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(directory.path().join("mapped")).unwrap();
    file.set_len(FILE_BYTES).unwrap();
    let mut python = Command::new("python3");
    python.args(["-c", WRITER]).current_dir(directory.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    // The output of the tests may be a file, which would count as a file that the program writes.
    python.stderr(Stdio::null());
    let Ok(mut writer) = python.spawn() else { skip!("no python3") };
    let mut said = BufReader::new(writer.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");

    let attached =
        ProcessTarget::attach(Process::find(writer.id() as i32).unwrap(), mechanism, Arc::new(RegisterSaver));
    let Ok(mut target) = attached else {
        writer.kill().unwrap();
        writer.wait().unwrap();
        skip!("{}", attached.err().unwrap());
    };
    // New mappings are registered while the process is frozen, which happens in a collect that finds
    // many pages in them.
    for space in target.spaces().unwrap() {
        target.collect(space, &mut RangeSet::new()).unwrap();
    }
    let mut store = MemoryStore::new();
    // A second change could follow so soon that the times of the file are the same.
    let mut precopy = || {
        std::thread::sleep(Duration::from_millis(100));
        target.precopy_files(&mut store).unwrap()
    };
    assert_eq!(precopy(), FILE_BYTES, "the first time, all of it");
    assert_eq!(precopy(), 0);
    writeln!(writer.stdin.as_mut().unwrap(), "{}", 5 << 20).unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    assert_oracle!(precopy() > 0, "the write was missed");
    assert_eq!(precopy(), 0);
    drop(target);
    drop(writer.stdin.take());
    assert!(writer.wait().unwrap().success());
}
