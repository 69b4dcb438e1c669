//! The measured program, as the measuring process sees it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pagemark_linux::proc::{self, Fields};

use crate::BenchError;
use crate::product::workload::Workload;

/// The running workload. It is killed when this is dropped.
pub struct Trackee {
    child: Child,
    memory: File,
    counter_address: u64,
}

impl Trackee {
    /// Starts this executable again as the workload, and waits until its memory is set up.
    ///
    /// # Errors
    /// The workload could not be started, or did not print the address of its counter.
    pub fn start(workload: &Workload) -> Result<Trackee, BenchError> {
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["workload"])
            .args(["--mib", &workload.mib.to_string(), "--percent", &workload.percent.to_string()])
            .args(["--run-pages", &workload.run_pages.to_string(), "--pass-ms", &workload.pass_ms.to_string()])
            .args(["--children", &workload.children.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        // SAFETY: only setsid, which is async-signal-safe, runs between fork and exec.
        unsafe { command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into)) };
        let mut child = command.spawn().map_err(BenchError::on("start the workload"))?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line).map_err(BenchError::on("read from the workload"))?;
        }
        let counter_address = u64::from_str_radix(line.trim().trim_start_matches("0x"), 16);
        let memory = proc::open_memory(child.id() as i32).map_err(BenchError::on("open the workload's memory"));
        let mut trackee = Trackee { child, memory: memory?, counter_address: 0 };
        match counter_address {
            Ok(address) => trackee.counter_address = address,
            Err(_) => return Err(BenchError::Workload { output: line }),
        }
        Ok(trackee)
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Address of its counter of page updates.
    pub fn counter_address(&self) -> u64 {
        self.counter_address
    }

    /// Memory of the program and its children, bytes. Each shared page counts once.
    ///
    /// # Errors
    /// A process has exited.
    pub fn proportional_bytes(&self) -> Result<u64, BenchError> {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "it has no Pss");
        let of_process = |pid: i32| Fields::read(proc::path(pid, "smaps_rollup"))?.bytes("Pss").ok_or_else(missing);
        let members = proc::tree::members(self.pid()).map_err(BenchError::on("list the processes of the workload"))?;
        let bytes: io::Result<u64> = members.iter().map(|member| of_process(member.process.pid)).sum();
        bytes.map_err(BenchError::on("read the memory of the workload"))
    }

    /// Page updates a second while `meanwhile` runs.
    ///
    /// # Errors
    /// The workload has exited, or `meanwhile` failed.
    pub fn updates_per_second(&self, meanwhile: impl FnOnce() -> Result<(), BenchError>) -> Result<f64, BenchError> {
        let (begin, before) = (Instant::now(), self.updates()?);
        meanwhile()?;
        Ok((self.updates()? - before) as f64 / begin.elapsed().as_secs_f64())
    }

    fn updates(&self) -> Result<u64, BenchError> {
        let mut value = [0; 8];
        self.memory
            .read_exact_at(&mut value, self.counter_address)
            .map_err(BenchError::on("read the workload's counter"))?;
        Ok(u64::from_ne_bytes(value))
    }
}

impl Drop for Trackee {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Work for [`Trackee::updates_per_second`] that only sleeps.
pub fn idle(time: Duration) -> impl FnOnce() -> Result<(), BenchError> {
    move || {
        std::thread::sleep(time);
        Ok(())
    }
}
