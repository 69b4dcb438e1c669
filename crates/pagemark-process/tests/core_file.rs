//! A core file of a checkpoint, opened with gdb.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use pagemark::repository::{MappingRecord, Repository};
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_linux::proc::Process;
use pagemark_process::ErrorKind;
use pagemark_process::core_file::export_core;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::RegisterSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{skip, wait_until};
use support::{Program, criu, take};

const PROGRAM: &str = r#"
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <stdlib.h>
#include <unistd.h>

struct node { int value; struct node *next; };
static struct node *list;
static char text[5000];
static double ratio = 0.375;

static void *wait_here(void *argument)
{
	volatile long thread_number = (long)argument;
	volatile char buffer[64] = "in the thread";
	for (;;) { usleep(1000); (void)thread_number; (void)buffer; }
	return NULL;
}

__attribute__((noinline)) static void deep(int depth, const char *why)
{
	volatile int here = depth * 11;
	if (depth) { deep(depth - 1, why); here++; return; }
	close(open("count", O_CREAT | O_WRONLY, 0600));
	for (;;) { usleep(1000); (void)here; }
}

int main(void)
{
	for (int i = 0; i < 5; i++) {
		struct node *node = malloc(sizeof *node);
		node->value = i * i;
		node->next = list;
		list = node;
	}
	memset(text, 'x', sizeof text - 1);
	pthread_t thread;
	for (long i = 0; i < 3; i++)
		pthread_create(&thread, NULL, wait_here, (void *)(i + 1000));
	deep(4, "because");
	return ratio > 1;
}
"#;

#[test]
fn gdb_reads_registers_threads_and_variables() {
    let Some(criu) = criu() else { return };
    let gdb = Command::new("gdb").arg("--version").stdout(Stdio::null()).status();
    if gdb.is_err() {
        skip!("no gdb");
    }
    let Some(mut program) = Program::c(PROGRAM) else { return };
    wait_until("the program is there", || program.read("count").is_some());
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid())).unwrap();
    let mut taken = take(&criu, program.pid(), &DumpOptions::default());
    taken.manifest.spaces[0].mappings = maps.lines().map(mapping).collect();
    taken.manifest.command = vec!["program".into()];
    program.kill();

    let core = program.directory().join("core");
    let mut file = std::fs::File::create(&core).unwrap();
    export_core(&taken.manifest, &taken.store, None, &mut file).unwrap();
    let refused = export_core(&taken.manifest, &taken.store, Some(1), &mut file);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoProcess);
    gdb_reads_all(&program, &core);
}

#[test]
fn gdb_reads_the_same_of_memory_and_registers_alone() {
    if Command::new("gdb").arg("--version").stdout(Stdio::null()).status().is_err() {
        skip!("no gdb");
    }
    let Some(mut program) = Program::c(PROGRAM) else { return };
    wait_until("the program is there", || program.read("count").is_some());
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let target =
        ProcessTarget::attach(Process::find(program.pid()).unwrap(), Mechanism::Compare, Arc::new(RegisterSaver))
            .unwrap();
    let mut job = Job::new(target, repository.clone(), JobOptions::new("program"));
    let taken = job.checkpoint().unwrap();
    job.detach();
    program.kill();
    let checkpoint = repository.read("program", taken.sequence).unwrap();
    let core = program.directory().join("core");
    export_core(&checkpoint.manifest, &checkpoint, None, &mut std::fs::File::create(&core).unwrap()).unwrap();
    gdb_reads_all(&program, &core);
}

/// Opens a core of [`PROGRAM`], which is at another address than in its file, and looks for the
/// values of its variables.
fn gdb_reads_all(program: &Program, core: &Path) {
    let commands = [
        "info threads",
        "bt",
        "print *list",
        "print list->next->next->value",
        "print ratio",
        "print text[4998]",
        "print text[4999]",
        "thread apply all bt",
        "frame function main",
        "info auxv",
    ];
    let mut gdb = Command::new("gdb");
    gdb.args(["-batch", "-nx"]).args(commands.iter().flat_map(|command| ["-ex", command]));
    let output = gdb.arg(program.directory().join("program")).arg(core).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let expect = |text: &str| assert!(said.contains(text), "no {text:?} in\n{said}");
    expect("value = 16");
    expect("= 4\n");
    expect("= 0.375");
    expect("= 120 'x'");
    expect("= 0 '\\000'");
    for depth in 0..=4 {
        expect(&format!("deep (depth={depth}, why=0x"));
    }
    expect("\"because\"");
    for number in 1000..1003 {
        expect(&format!("wait_here (argument={:#x})", number));
    }
    expect("AT_ENTRY");
    assert!(said.matches("LWP").count() >= 4, "{said}");
}

fn mapping(line: &str) -> MappingRecord {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next().unwrap().split_once('-').unwrap();
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    let permissions = fields.next().unwrap().to_string();
    let offset = number(fields.next().unwrap());
    let name = fields.nth(2).unwrap_or("").to_string();
    MappingRecord { start: number(start), end: number(end), permissions, offset, name, exception: None, memory: None }
}
