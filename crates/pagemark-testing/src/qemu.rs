//! A virtual machine whose program checks its own memory, and a monitor that is not Pagemark's.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::{assert_oracle, directory_until_exit, wait_for};

/// QEMU's program.
pub const QEMU: &str = "qemu-system-x86_64";

/// The memory of a machine whose arguments do not say otherwise.
pub const RAM_BYTES: u64 = 16 << 20;

/// The program that runs in the machine; none where there is no QEMU or no compiler for it.
pub fn guest_program() -> Option<&'static Path> {
    static PROGRAM: Program = Program::new();
    PROGRAM.get_or_init(|| compile("guest.c")).as_deref()
}

/// A program that writes to memory all the time, on as many processors as the last character of its
/// command line says. For the option `-kernel` among the further arguments of a machine, which
/// replaces the other program; none where that is none.
pub fn load_program() -> Option<&'static Path> {
    static PROGRAM: Program = Program::new();
    PROGRAM.get_or_init(|| compile("load.c")).as_deref()
}

/// A program that writes to disks by virtio-blk, and reads them. Used as [`load_program`].
pub fn disk_program() -> Option<&'static Path> {
    static PROGRAM: Program = Program::new();
    PROGRAM.get_or_init(|| compile("disk_guest.c")).as_deref()
}

/// A program that sends back each line that comes to its serial port. Used as [`load_program`].
pub fn console_program() -> Option<&'static Path> {
    static PROGRAM: Program = Program::new();
    PROGRAM.get_or_init(|| compile("console_guest.c")).as_deref()
}

/// A program that counts the packets that come to its network card, an e1000. Used as
/// [`load_program`].
pub fn network_program() -> Option<&'static Path> {
    static PROGRAM: Program = Program::new();
    PROGRAM.get_or_init(|| compile("network_guest.c")).as_deref()
}

/// A program, and the directory that has it.
type Program = OnceLock<Option<PathBuf>>;

fn compile(source: &str) -> Option<PathBuf> {
    Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().ok()?;
    let program = directory_until_exit().join("guest");
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-m32", "-O2", "-ffreestanding", "-fno-pic", "-fno-stack-protector", "-nostdlib", "-static"]);
    // The header must be at the begin of the file.
    compiler.args(["-Wl,--section-start=.multiboot=0x100000", "-Wl,-Ttext=0x101000", "-Wl,--build-id=none"]);
    compiler.args(["-Wl,-z,max-page-size=4096", "-Wl,-z,noexecstack", "-o"]).arg(&program).arg(path);
    assert!(compiler.status().ok()?.success(), "{source} does not compile");
    Some(program)
}

/// Paths of one machine, in a directory of its own.
pub struct MachinePaths {
    directory: tempfile::TempDir,
}

impl Default for MachinePaths {
    /// Makes the directory.
    fn default() -> MachinePaths {
        MachinePaths { directory: tempfile::tempdir().expect("a temporary directory") }
    }
}

impl MachinePaths {
    /// The path of a file of the machine.
    pub fn join(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The monitor socket for Pagemark.
    pub fn monitor(&self) -> PathBuf {
        self.join("vm.qmp")
    }

    /// The number of steps that the program in the machine has made.
    pub fn steps(&self) -> u64 {
        let text = fs::read_to_string(self.join("serial")).unwrap_or_default();
        let last = || &text[text.len().saturating_sub(200)..];
        assert_oracle!(!text.contains("WRONG"), "the machine has found its data wrong: {}", last());
        // Not the number in the last line: a restored machine begins with a smaller one.
        text.matches('\n').count() as u64
    }

    /// Waits until the program in the machine goes on.
    pub fn wait_for_steps(&self, more: u64) {
        let before = self.steps();
        wait_for("the machine to go on", || (self.steps() > before + more).then_some(()));
    }

    /// The arguments of QEMU: a machine that writes to the file `serial`, with a monitor for
    /// Pagemark and one for the test.
    pub fn arguments(&self, further: &[impl AsRef<str>]) -> Vec<String> {
        let path = |name: &str| self.join(name).display().to_string();
        let guest = guest_program().expect("a guest").display().to_string();
        let mib = (RAM_BYTES >> 20).to_string();
        let mut arguments: Vec<String> =
            ["-nodefaults", "-display", "none", "-m", &mib, "-kernel", &guest].map(str::to_owned).into();
        // Appended: the file is that of the machine's whole life.
        arguments.extend(["-chardev".into(), format!("file,id=s,append=on,path={}", path("serial"))]);
        arguments.extend(["-serial".into(), "chardev:s".into()]);
        for name in ["vm.qmp", "test.qmp"] {
            arguments.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", path(name))]);
        }
        arguments.extend(further.iter().map(|argument| argument.as_ref().to_owned()));
        arguments
    }
}

/// The further arguments of a machine that needs none.
pub const PLAIN: [&str; 0] = [];

/// The further arguments of a machine whose program writes to the disk `image`. `options` are those
/// of the drive, each after a comma.
pub fn with_disk(image: &Path, format: &str, options: &str) -> Vec<String> {
    let drive = format!("file={},format={format},if=ide,index=0{options}", image.display());
    ["-machine", "pc", "-drive", &drive].map(str::to_owned).into()
}

/// A QEMU that runs, killed when dropped.
pub struct Qemu {
    child: Child,
}

impl Qemu {
    /// Starts a machine, and waits until its program runs.
    pub fn start(paths: &MachinePaths, further: &[impl AsRef<str>]) -> Qemu {
        let mut command = Command::new(QEMU);
        let child = command.args(paths.arguments(further)).stdin(Stdio::null()).spawn().expect("QEMU starts");
        let qemu = Qemu { child };
        wait_for("the machine to start", || (paths.steps() > 3).then_some(()));
        qemu
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection to a monitor of the test's own.
pub struct TestMonitor {
    stream: BufReader<UnixStream>,
    /// The names of what QEMU has reported.
    events: Vec<String>,
}

impl TestMonitor {
    /// Connects to the monitor socket `path`, once it is there.
    pub fn connect(path: &Path) -> TestMonitor {
        let stream = wait_for("the monitor", || UnixStream::connect(path).ok());
        let mut monitor = TestMonitor { stream: BufReader::new(stream), events: Vec::new() };
        let mut greeting = String::new();
        monitor.stream.read_line(&mut greeting).expect("a greeting");
        monitor.run("qmp_capabilities", json!({}));
        monitor
    }

    /// Executes a command, and returns its result.
    ///
    /// # Panics
    /// If QEMU refuses it.
    pub fn run(&mut self, command: &str, arguments: Value) -> Value {
        self.try_run(command, arguments).unwrap_or_else(|reason| panic!("{command}: {reason}"))
    }

    /// Executes a command, and returns its result, or QEMU's reason to refuse it.
    pub fn try_run(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let message = json!({"execute": command, "arguments": arguments});
        // In one piece: QEMU executes what is complete, and may have ended before a line break comes.
        self.stream.get_mut().write_all(format!("{message}\n").as_bytes()).expect("QEMU reads");
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).expect("a reply");
            let reply: Value = serde_json::from_str(&line).expect("JSON");
            match reply["event"].as_str() {
                Some(event) => self.events.push(event.to_owned()),
                None => {
                    return match reply.get("error") {
                        Some(error) => Err(error.to_string()),
                        None => Ok(reply["return"].clone()),
                    };
                }
            }
        }
    }

    /// Waits until QEMU has reported `event`, since the connection was made or the last call.
    pub fn wait_for_event(&mut self, event: &str) {
        wait_for(event, || {
            self.run("query-version", json!({}));
            self.events.iter().any(|reported| reported == event).then_some(())
        });
        self.events.clear();
    }

    /// The content of the machine's physical memory, by QEMU's own command.
    pub fn physical_memory(&mut self, bytes: u64, file: &Path) -> Vec<u8> {
        self.run("pmemsave", json!({"val": 0, "size": bytes, "filename": file.display().to_string()}));
        let content = fs::read(file).expect("QEMU wrote it");
        fs::remove_file(file).expect("it is there");
        content
    }

    /// True if the machine's processors run.
    pub fn is_running(&mut self) -> bool {
        self.run("query-status", json!({}))["running"] == true
    }
}
