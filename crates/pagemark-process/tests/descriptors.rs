//! Programs that have something open which no checkpoint can have: the refusal names the process,
//! the descriptor and the kind.

mod support;

use std::sync::Arc;

use pagemark::Mechanism;
use pagemark_linux::proc::Process;
use pagemark_process::ErrorKind;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{skip, skipped, wait_until};
use support::{Checkpoints, Program, is_running};

/// How a program opens a descriptor of a kind, and what the refusal says of it.
const KINDS: [(&str, &str); 14] = [
    ("syscall(425, 4, memory)", "an io_uring"),
    ("secret()", "secret memory (memfd_secret)"),
    ("secret() < 0 ? -1 : close(3) + 900", "secret memory (memfd_secret)"),
    ("queue()", "a POSIX message queue"),
    ("counter()", "a performance counter"),
    ("syscall(444, &(long){2}, 8, 0)", "a set of rules for Landlock"),
    ("listener()", "a listener to a seccomp filter"),
    ("syscall(430, \"tmpfs\", 0)", "a file system that is being configured"),
    ("open(\"/dev/fuse\", O_RDWR)", "a connection of a FUSE file system"),
    ("socket(40, SOCK_STREAM, 0)", "(AF_VSOCK)"),
    ("socket(38, SOCK_SEQPACKET, 0)", "(AF_ALG)"),
    ("socket(44, SOCK_RAW, 0)", "(AF_XDP)"),
    ("socket(AF_INET, SOCK_STREAM, 262)", "a socket of Multipath TCP"),
    ("socket(AF_INET, SOCK_STREAM, 132)", "a socket of SCTP"),
];

const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/perf_event.h>
#include <linux/seccomp.h>
#include <mqueue.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static char memory[4096];

static int secret(void) {
	int secret = syscall(447, 0);
	if (secret < 0 || ftruncate(secret, 4096))
		return -1;
	return mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0) == MAP_FAILED ? -1 : secret;
}

static int queue(void) {
	char name[32];
	snprintf(name, sizeof name, "/pagemark-%d", getpid());
	int queue = mq_open(name, O_CREAT | O_RDWR, 0600, 0);
	mq_unlink(name);
	return queue;
}

static int counter(void) {
	struct perf_event_attr event = {
		.type = PERF_TYPE_SOFTWARE, .size = sizeof event, .config = PERF_COUNT_SW_PAGE_FAULTS
	};
	return syscall(SYS_perf_event_open, &event, 0, -1, -1, 0);
}

static int listener(void) {
	struct sock_filter allow[] = { { 0x06, 0, 0, SECCOMP_RET_ALLOW } };
	struct sock_fprog program = { 1, allow };
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 8, &program);
}

int main(void) {
	int number = OPEN;
	FILE *file = fopen("new", "w");
	fprintf(file, "%d\n", number);
	fclose(file);
	rename("new", "opened");
	for (;;)
		pause();
}
"#;

#[test]
fn what_cannot_be_saved_is_refused_by_name() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    for (open, words) in KINDS {
        let Some(program) = Program::c(&format!("#define OPEN ({open})\n{PROGRAM}")) else { skip!("no C compiler") };
        wait_until("the program has opened it", || program.read("opened").is_some());
        let number: i32 = program.read("opened").unwrap().trim().parse().unwrap();
        if number < 0 {
            skipped(&format!("the kernel lacks {open}"));
            continue;
        }
        let saver = Arc::new(CriuSaver::new(checkpoints.criu.clone(), DumpOptions::default()));
        let mechanism: Mechanism = "compare".parse().unwrap();
        let refused = ProcessTarget::attach(Process::find(program.pid()).unwrap(), mechanism, saver).map(drop);
        let error = refused.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::CannotSave, "{open}: {text}");
        // One was closed, and its mapping is left.
        let place = if number >= 900 { "(mapped at 0x".to_owned() } else { format!("(descriptor {number})") };
        let is_named = [&format!("process {} ", program.pid()), words, &place].iter().all(|part| text.contains(*part));
        assert!(is_named && !text.contains("CRIU"), "{open}: {text}");
        assert!(is_running(program.pid()));
    }
}

/// CRIU is asked about what some CRIUs save.
#[test]
fn what_criu_refuses_is_named_without_its_words() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = "import time\nfile = open('/dev/loop-control', 'r+b', 0)\nopen('opened', 'w').write(str(file.fileno()))\n\
                time.sleep(1000)";
    if !std::path::Path::new("/dev/loop-control").exists() {
        skip!("there is no /dev/loop-control");
    }
    let program = Program::python(text);
    wait_until("the program has opened it", || program.read("opened").is_some_and(|text| !text.is_empty()));
    let refused = checkpoints.refusal(&program);
    let number = program.read("opened").unwrap();
    let named = format!("has /dev/loop-control open (descriptor {number}), which cannot be saved");
    assert!(refused.contains(&named) && !refused.contains("Can't dump"), "{refused}");
    assert!(is_running(program.pid()));
}
