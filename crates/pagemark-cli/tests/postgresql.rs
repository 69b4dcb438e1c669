//! A PostgreSQL cluster under load comes back from any of its checkpoints. It closes files between
//! their uses, so they belong to the job by `--data`, or because Pagemark watches what the job
//! writes. PostgreSQL's own checkers say whether it is whole.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, chown};
use pagemark_linux::proc::tree;
use pagemark_linux::{fanotify, forks};
use pagemark_testing::{SplitMix, assert_oracle, finding, skip, wait_for, wait_until};
use subject::{has_criu, is_root, public_directory};
use support::{Pagemark, free_port, is_alive, now_unix_us};

/// Clients that insert one row after the other, each acknowledged.
const CLIENTS: usize = 3;

/// Starts a server as the cluster's user. It has a segment of System V's shared memory attached.
const AS_SERVER: [&str; 4] = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"];

/// What drops, creates and truncates tables and indexes.
const CHURN: &str = "\\set n random(1,40)
begin;
drop table if exists churn_:client_id_:n;
create table churn_:client_id_:n as select g as id, md5(g::text) as t from generate_series(1,500) g;
create index on churn_:client_id_:n (id);
commit;
truncate churn_:client_id_:n;
insert into churn_:client_id_:n select g, md5(g::text) from generate_series(1,200) g;
";

/// A cluster, and its server.
struct Cluster {
    directory: tempfile::TempDir,
    programs: PathBuf,
    port: u16,
    server: Option<Child>,
    /// The process at the root of the server's tree.
    root: i32,
}

impl Cluster {
    /// Makes a cluster and starts its server. None without a server's programs or its user.
    fn start() -> Option<Cluster> {
        let mut cluster = Cluster::new()?;
        let data = cluster.data();
        let made = cluster.as_user("initdb").args(["-k", "-A", "trust", "-D"]).arg(&data).output().expect("initdb");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut settings = fs::File::options().append(true).open(data.join("postgresql.conf")).expect("its settings");
        settings.write_all(cluster.settings().as_bytes()).expect("room for settings");
        let mut command = Command::new(AS_SERVER[0]);
        command.args(&AS_SERVER[1..]).arg("setsid").arg(cluster.programs.join("postgres")).arg("-D").arg(&data);
        cluster.spawn(command);
        Some(cluster)
    }

    /// As `start`, by a shell that `pagemark run` starts: the cluster is made by the job. Also
    /// returns the process of Pagemark.
    fn start_under(pagemark: &Pagemark) -> Option<(Cluster, i32)> {
        let mut cluster = Cluster::new()?;
        fs::write(cluster.directory.path().join("settings"), cluster.settings()).expect("room for settings");
        let (programs, data) = (cluster.programs.display(), cluster.data());
        let data = data.display();
        let script = format!(
            "{programs}/initdb -k -A trust -D {data} && cat settings >> {data}/postgresql.conf && {programs}/postgres -D {data}; true"
        );
        let mut command = pagemark.command(&["run", "--job", "pg", "--every", "1500ms", "--"]);
        command.args(AS_SERVER).args(["sh", "-c", &script]);
        cluster.spawn(command);
        let run = cluster.root;
        cluster.root = tree::children(run).expect("a child")[0];
        Some((cluster, run))
    }

    fn spawn(&mut self, mut command: Command) {
        let log = fs::File::create(self.directory.path().join("log")).expect("a log");
        command.current_dir(self.directory.path());
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a descriptor")).stderr(log);
        let server = command.spawn().expect("the server starts");
        self.root = server.id() as i32;
        self.server = Some(server);
        self.wait_until_ready();
    }

    fn new() -> Option<Cluster> {
        let programs =
            fs::read_dir("/usr/lib/postgresql").ok()?.flatten().map(|entry| entry.path().join("bin")).max()?;
        let user = User::from_name("postgres").ok()??;
        let directory = public_directory();
        chown(directory.path(), Some(user.uid), Some(user.gid)).expect("root changes owners");
        Some(Cluster { directory, programs, port: free_port(), server: None, root: 0 })
    }

    /// Small, so that the server writes, flushes and removes files often.
    fn settings(&self) -> String {
        let sockets = self.directory.path().display();
        format!(
            "unix_socket_directories = '{sockets}'\nport = {}\nshared_buffers = 16MB\ncheckpoint_timeout = 30s\nmax_wal_size = 64MB\n",
            self.port
        )
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// The server's first process.
    fn postmaster(&self) -> i32 {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).expect("a server");
        text.lines().next().and_then(|line| line.parse().ok()).expect("its process id")
    }

    /// A program of PostgreSQL as the cluster's user.
    fn as_user(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(self.programs.join(program));
        command.current_dir(self.directory.path()).stdin(Stdio::null());
        command
    }

    /// A client program of PostgreSQL.
    fn client(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.env("PGHOST", "127.0.0.1").env("PGPORT", self.port.to_string());
        command.env("PGUSER", "postgres").env("PGDATABASE", "postgres").stdin(Stdio::null());
        command
    }

    fn wait_until_ready(&self) {
        wait_until("the server", || self.client("pg_isready").arg("-q").status().expect("pg_isready starts").success());
    }

    /// What a program prints, or how it failed.
    fn output(&self, command: &mut Command) -> Result<String, String> {
        let output = command.output().expect("it starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let failure = || format!("{command:?}: {} {}", text(&output.stdout), text(&output.stderr));
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(failure()) }
    }

    fn query(&self, statement: &str) -> Result<String, String> {
        self.output(self.client("psql").args(["-q", "-A", "-t", "-c", statement]))
    }

    /// Ends the server by `signal`, with all its processes.
    fn end(&mut self, signal: Signal) {
        let members: Vec<i32> =
            tree::members(self.root).expect("a tree").iter().map(|member| member.process.pid).collect();
        let _ = kill(Pid::from_raw(self.postmaster()), signal);
        if signal == Signal::SIGKILL {
            for &member in &members {
                let _ = kill(Pid::from_raw(member), signal);
            }
        }
        wait_until("the server's processes to end", || {
            let _ = self.server.as_mut().map(Child::try_wait);
            !members.iter().any(|&member| Path::new(&format!("/proc/{member}")).exists())
        });
    }

    /// Checks the running server with each client's last acknowledged row, then ends it and checks
    /// its files.
    fn check(&mut self, acknowledged: &[u64]) {
        self.wait_until_ready();
        for (client, needed) in acknowledged.iter().enumerate() {
            let rows = self.query(&format!("select count(*), coalesce(max(n), 0) from committed_{client}")).unwrap();
            let (count, last) = rows.split_once('|').expect("two columns");
            let (count, last): (u64, u64) = (count.parse().expect("a number"), last.parse().expect("a number"));
            assert_oracle!(
                count == last && last >= *needed,
                "client {client}: {count} rows, last {last}, needed {needed}"
            );
        }
        let is_sound = self.output(self.client("pg_amcheck").args(["--heapallindexed", "-d", "postgres"]));
        is_sound.unwrap_or_else(|problem| finding(&problem));
        self.query("insert into committed_0 values (1000000)").unwrap();
        self.query("create table later as select 1").unwrap();
        self.query("drop table later").unwrap();
        self.query("checkpoint").unwrap();
        self.end(Signal::SIGINT);
        let data = self.data();
        let is_sound = self.output(self.as_user("pg_checksums").args(["--check", "-D"]).arg(&data));
        is_sound.unwrap_or_else(|problem| finding(&problem));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.server.is_some() && is_alive(self.root) {
            self.end(Signal::SIGKILL);
        }
    }
}

/// Clients whose rows count, and pgbench beside them, until dropped.
struct Load {
    stop: Arc<AtomicBool>,
    /// The number of each client's last acknowledged row.
    acknowledged: Vec<Arc<AtomicU64>>,
    clients: Vec<JoinHandle<()>>,
    benchmarks: Vec<Child>,
}

impl Load {
    fn start(cluster: &Cluster) -> Load {
        cluster.output(cluster.client("pgbench").args(["-i", "-q", "-s", "2"])).unwrap();
        let churn = cluster.directory.path().join("churn.sql");
        fs::write(&churn, CHURN).expect("a script");
        let benchmark = |script: Option<&Path>| {
            let mut command = cluster.client("pgbench");
            command.args(["-n", "-c", "2", "-T", "3000"]).stdout(Stdio::null()).stderr(Stdio::null());
            script.map(|script| command.arg("-f").arg(script));
            command.spawn().expect("pgbench starts")
        };
        let stop = Arc::new(AtomicBool::new(false));
        let mut load = Load {
            stop: stop.clone(),
            acknowledged: Vec::new(),
            clients: Vec::new(),
            benchmarks: vec![benchmark(None), benchmark(Some(&churn))],
        };
        for client in 0..CLIENTS {
            let acknowledged = Arc::new(AtomicU64::new(0));
            let mut psql = cluster.client("psql");
            psql.args(["-q", "-A", "-t"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            let psql = psql.spawn().expect("psql starts");
            load.acknowledged.push(acknowledged.clone());
            load.clients.push(std::thread::spawn({
                let stop = stop.clone();
                move || insert_rows(client, psql, &acknowledged, &stop)
            }));
        }
        wait_until("rows of each client", || load.acknowledged().iter().all(|&row| row > 10));
        load
    }

    fn acknowledged(&self) -> Vec<u64> {
        self.acknowledged.iter().map(|row| row.load(Ordering::SeqCst)).collect()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for benchmark in &mut self.benchmarks {
            let _ = benchmark.kill();
            let _ = benchmark.wait();
        }
        // Clients end at their next row, or when the server has ended.
        self.clients.drain(..).for_each(|client| drop(client.join()));
    }
}

fn insert_rows(client: usize, mut psql: Child, acknowledged: &AtomicU64, stop: &AtomicBool) {
    let mut input = psql.stdin.take().expect("a pipe");
    let mut replies = BufReader::new(psql.stdout.take().expect("a pipe")).lines();
    let mut is_inserted = writeln!(input, "create table committed_{client} (n int primary key, t text);").is_ok();
    for row in 1.. {
        if stop.load(Ordering::SeqCst) || !is_inserted {
            break;
        }
        let statement =
            format!("insert into committed_{client} values ({row}, repeat('x', {})) returning n;", row % 900);
        is_inserted = writeln!(input, "{statement}").is_ok()
            && replies.next().and_then(Result::ok).is_some_and(|reply| reply.trim() == row.to_string());
        if is_inserted {
            acknowledged.store(row, Ordering::SeqCst);
        }
    }
    let _ = psql.kill();
    let _ = psql.wait();
}

/// The number of checkpoints that a test takes. None if the test cannot run.
fn checkpoints() -> Option<usize> {
    let number = || std::env::var("PAGEMARK_CHECKPOINTS").map_or(20, |text| text.parse().expect("a number"));
    (has_criu() && is_root()).then(number)
}

#[test]
#[ignore = "some minutes; PAGEMARK_CHECKPOINTS is the number of checkpoints"]
fn a_cluster_in_a_data_directory_comes_back_from_any_checkpoint() {
    let Some(checkpoints) = checkpoints() else { skip!("no CRIU, or no right to use it") };
    let Some(cluster) = Cluster::start() else { skip!("no PostgreSQL server is installed") };
    let pagemark = Pagemark::new();
    let log = fs::File::create(pagemark.directory().join("pagemark.log")).expect("a log");
    let mut attach = pagemark.command(&["attach", "--job", "pg", "--every", "1500ms", "--files", "open", "--data"]);
    attach.arg(cluster.data()).arg(cluster.root.to_string());
    let mut attach = attach.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("pagemark starts");
    let end = |_: &Cluster| {
        kill(Pid::from_raw(attach.id() as i32), Signal::SIGINT).expect("it runs");
        attach.wait().expect("our child");
    };
    comes_back_from_any(cluster, &pagemark, checkpoints, end);
}

#[test]
#[ignore = "some minutes; PAGEMARK_CHECKPOINTS is the number of checkpoints"]
fn a_cluster_that_is_watched_comes_back_from_any_checkpoint() {
    let Some(checkpoints) = checkpoints() else { skip!("no CRIU, or no right to use it") };
    if let Some(error) = fanotify::NAMES.refusal().or(forks::RECORDS.refusal()) {
        skip!("files cannot be watched ({error})");
    }
    let pagemark = Pagemark::new();
    let Some((cluster, run)) = Cluster::start_under(&pagemark) else { skip!("no PostgreSQL server is installed") };
    // The server runs on, and what it writes from then on is not recorded.
    let end = |_: &Cluster| kill(Pid::from_raw(run), Signal::SIGKILL).expect("it runs");
    comes_back_from_any(cluster, &pagemark, checkpoints, end);
}

/// Takes that many checkpoints under load, calls `end`, kills the server, and restores and checks
/// each checkpoint, in a random order.
fn comes_back_from_any(mut cluster: Cluster, pagemark: &Pagemark, checkpoints: usize, end: impl FnOnce(&Cluster)) {
    cluster.query("create extension amcheck").unwrap();
    let load = Load::start(&cluster);
    let begin = now_unix_us();
    // What was acknowledged before a checkpoint is in it.
    let mut samples = Vec::new();
    let mut taken = Vec::new();
    while taken.len() < checkpoints {
        let last = taken.len();
        taken = wait_for("the next checkpoint", || {
            samples.push((now_unix_us(), load.acknowledged()));
            // A list takes longer than a sample.
            let mut taken = if samples.len() % 50 == 0 { pagemark.checkpoints("pg") } else { Vec::new() };
            taken.retain(|checkpoint| checkpoint.taken_unix_us > begin);
            (taken.len() > last).then_some(taken)
        });
    }
    end(&cluster);
    cluster.end(Signal::SIGKILL);
    drop(load);
    let mut order = taken;
    let mut random = SplitMix(5);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    for checkpoint in order {
        let name = format!("pg@{}", checkpoint.sequence);
        // An instant of processor time may lie between an acknowledgement and its sample.
        let before = samples.iter().take_while(|(time, _)| time + 20_000 < checkpoint.taken_unix_us);
        let acknowledged = before.last().map_or(vec![0; CLIENTS], |(_, rows)| rows.clone());
        pagemark.done(&["restore", "--detach", "--yes", &name]);
        eprintln!("{name}: at least {acknowledged:?} rows");
        cluster.check(&acknowledged);
    }
}
