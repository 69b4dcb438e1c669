//! Advice for processes.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use support::Pagemark;

#[test]
fn a_program_that_waits_may_be_checkpointed_often() {
    let pagemark = Pagemark::new();
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    // Once it has answered and waits in its next read, it writes nothing more.
    child.stdin.as_mut().expect("a pipe").write_all(b"?").expect("cat reads");
    child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("cat writes");
    let pid = child.id().to_string();
    let call = PathBuf::from("/proc").join(&pid).join("syscall");
    while !fs::read_to_string(&call).expect("cat runs").starts_with(&format!("{} ", libc::SYS_read)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let advice =
        pagemark.json(&["advise", "--memory-only", "--json", "--observe", "200ms", "--overhead", "100%", &pid]);
    let told = pagemark.output(&["advise", "--memory-only", "--observe", "200ms", "--mechanism", "compare", &pid]);
    let runs = child.try_wait().expect("our child").is_none();
    child.kill().expect("our child");
    child.wait().expect("our child");
    assert!(runs, "it is unharmed");
    // The forecasts multiply what was measured: one page in 200 ms becomes hundreds in a minute.
    let rows = advice["measured"].as_array().expect("what was measured");
    assert!(
        !rows.is_empty() && rows.iter().all(|row| row["pages"].as_f64() < Some(10.0)),
        "it writes nothing: {advice}"
    );
    assert!(!advice["forecasts"].as_array().expect("forecasts").is_empty());
    assert!(advice["interval_us"].as_u64() >= Some(50_000), "{advice}");
    assert!(!pagemark.repository().exists(), "nothing is stored");
    assert_eq!(told.status.code(), Some(2), "compare cannot be observed");
    let output = pagemark.output(&["advise", "--memory-only", "--overhead", "0%", &pid]);
    assert_eq!(output.status.code(), Some(2));
    let output = pagemark.output(&["advise", "--memory-only", &pid]);
    assert_eq!(output.status.code(), Some(1), "it is gone");
}

/// Writes shared memory again and again, as database servers do.
const WRITES_SHARED_MEMORY: &str = "
import mmap, sys
memory = mmap.mmap(-1, 4 << 20)
for number in range(1 << 40):
    for page in range(1024):
        memory[page << 12] = number & 255
    if number == 1:
        print('writes', flush=True)
";

#[test]
fn shared_memory_is_observed_as_a_checkpoint_tracks_it() {
    let pagemark = Pagemark::new();
    let mut command = Command::new("python3");
    command.args(["-c", WRITES_SHARED_MEMORY]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("python3");
    let mut line = [0; 7];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut line).expect("it writes");
    let pid = child.id().to_string();
    let advice = pagemark.json(&["advise", "--memory-only", "--json", "--observe", "1s", &pid]);
    child.kill().expect("our child");
    child.wait().expect("our child");
    let rows = advice["measured"].as_array().expect("what was measured");
    assert!(rows.iter().any(|row| row["pages"].as_f64() >= Some(1000.0)), "{advice}");
}
