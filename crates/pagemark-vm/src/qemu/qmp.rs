//! A client of QEMU's monitor protocol, QMP.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, getsockopt, sendmsg, sockopt};
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command::{self, Command};
use crate::qemu::ending::Ending;
use crate::qemu::event::{self, MachineEvent, moves_the_machine};
use crate::qemu::monitor_place;

/// How long QEMU may take to send its greeting. It sends none while another client is connected.
const GREETING_LIMIT: Duration = Duration::from_secs(10);

/// How long a QEMU that was started for this connection may take to. It may first fill and lock all
/// its memory. If it ends, the connection ends, too.
const START_LIMIT: Duration = Duration::from_secs(15 * 60);

/// How long QEMU may take to carry out a command.
const REPLY_LIMIT: Duration = Duration::from_secs(60);

/// How long QEMU may take to send what it has to report.
const EVENT_LIMIT: Duration = Duration::from_secs(1);

/// Longest message.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The most events that wait to be taken. A machine that is reset again and again causes many.
const MAX_EVENTS: usize = 64;

/// A connection to the monitor of a QEMU.
#[derive(Debug)]
pub struct Monitor {
    stream: UnixStream,
    object: Object,
    received: Vec<u8>,
    last_id: u64,
    /// The ids of commands whose replies nobody waits for any more.
    given_up: BTreeSet<u64>,
    /// What QEMU has reported and nobody has taken.
    events: Vec<MachineEvent>,
    /// None if the process is not known.
    ending: Option<Ending>,
    /// True if QEMU has reported that the machine continued, or was changed by more than its own
    /// instructions, since it was stopped or [`Monitor::expect_no_move`] was called.
    has_moved: bool,
    /// When QEMU reported last that the machine was stopped.
    stopped_at: Option<SystemTime>,
    /// True if QEMU has reported that a device is gone, which another one may have replaced.
    has_unplugged: bool,
}

/// QEMU's reply to one of several commands.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) result: Value,
    pub(crate) at: Instant,
}

impl Monitor {
    /// Connects to a socket on which QEMU listens.
    pub(crate) fn connect(path: &Path) -> Result<Monitor> {
        let stream = monitor_place::connect(path)?;
        Monitor::begin(stream, Object::Monitor(path.to_owned()), GREETING_LIMIT)
    }

    /// Takes over the connection of a QEMU that has just been started.
    pub(crate) fn over(stream: UnixStream) -> Result<Monitor> {
        Monitor::begin(stream, Object::Monitor(PathBuf::from("of the new QEMU")), START_LIMIT)
    }

    fn begin(stream: UnixStream, object: Object, greeting_limit: Duration) -> Result<Monitor> {
        // A QEMU that reads nothing must not hold up this process either.
        stream.set_write_timeout(Some(REPLY_LIMIT)).map_err(Error::system("set up a monitor connection"))?;
        let (received, given_up, events, ending, has_moved, stopped_at) = Default::default();
        let (last_id, has_unplugged) = Default::default();
        let mut monitor = Monitor {
            stream,
            object,
            received,
            last_id,
            given_up,
            events,
            ending,
            has_moved,
            stopped_at,
            has_unplugged,
        };
        let greeting = monitor.read_message(Instant::now() + greeting_limit).map_err(|error| match error.kind() {
            ErrorKind::Gone => error,
            _ => error.help("a monitor serves one client at a time: disconnect the other one"),
        })?;
        let Some(offered) = greeting.get("QMP") else {
            return Err(monitor.garbled("it does not greet as QEMU does"));
        };
        // With it, QEMU reads commands while it executes others. It reads them byte by byte.
        let reads_ahead =
            offered["capabilities"].as_array().is_some_and(|names| names.iter().any(|name| name == "oob"));
        monitor.execute("qmp_capabilities", if reads_ahead { json!({"enable": ["oob"]}) } else { json!({}) })?;
        Ok(monitor)
    }

    /// The process that listens on the socket, and its user when it began to.
    pub(crate) fn peer(&self) -> Result<(i32, u32)> {
        let peer = getsockopt(&self.stream, sockopt::PeerCredentials);
        let failed = Error::system("find the process of the monitor");
        peer.map(|peer| (peer.pid(), peer.uid())).map_err(|error| failed(error.into()))
    }

    /// From now on, QEMU is woken if it does not answer while it ends. Its process is `pid`.
    pub(crate) fn expect_end_of(&mut self, pid: i32) {
        self.ending = Ending::of(pid);
    }

    /// The connection, for a guard that outlives this process.
    pub(crate) fn descriptor(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    /// From now on, what moves the machine is taken note of.
    pub(crate) fn expect_no_move(&mut self) {
        self.has_moved = false;
    }

    /// True if the machine, which was stopped, has stood still since then.
    pub(crate) fn stood_still(&mut self) -> Result<bool> {
        // QEMU sends its reports before the reply.
        self.execute("query-status", json!({}))?;
        Ok(!self.has_moved)
    }

    /// Lets a machine continue that was stopped. True if it has stood still until then.
    pub(crate) fn resume(&mut self) -> Result<bool> {
        // In one message, so that the machine is not stopped for longer.
        let (asked, question) = self.message("query-status", &json!({}));
        let (resumed, command) = self.message("cont", &json!({}));
        self.send((question + &command).as_bytes(), None)?;
        if let Err(error) = self.reply(asked, "query-status") {
            self.given_up.insert(resumed);
            return Err(error);
        }
        let stood_still = !self.has_moved;
        self.reply(resumed, "cont").map(|_| stood_still)
    }

    /// Since when the machine is stopped: since QEMU has replied to the command before `stop`, at
    /// `replied`, or, if that was read late, since QEMU says so. The commands were sent at `sent`.
    pub(crate) fn stopped_since(&self, sent: Instant, replied: Instant) -> Instant {
        let stopped = self.stopped_at.and_then(|at| at.elapsed().ok()).and_then(|ago| Instant::now().checked_sub(ago));
        stopped.map_or(replied, |stopped| stopped.clamp(sent, replied))
    }

    /// True if QEMU has reported since [`Monitor::take_unplugged`] that a device is gone.
    pub(crate) fn has_unplugged(&self) -> bool {
        self.has_unplugged
    }

    /// True if QEMU has reported since the last call that a device is gone.
    pub(crate) fn take_unplugged(&mut self) -> bool {
        std::mem::take(&mut self.has_unplugged)
    }

    fn keep_event(&mut self, message: &Value) {
        if message["event"] == "STOP" {
            self.stopped_at = event::time(message);
        }
        self.has_moved |= moves_the_machine(message);
        self.has_unplugged |= message["event"] == "DEVICE_DELETED";
        self.ending.iter_mut().for_each(|ending| ending.observe(message));
        let event = MachineEvent::of_message(message).filter(|_| self.events.len() < MAX_EVENTS);
        self.events.extend(event);
    }

    /// Takes what QEMU has reported until now without being asked.
    pub(crate) fn take_events(&mut self) -> Vec<MachineEvent> {
        // What fails here fails at the next command. A monitor that never stops sending is not waited for.
        let deadline = Instant::now() + EVENT_LIMIT;
        while self.has_message()
            && Instant::now() < deadline
            && let Ok(message) = self.read_message(deadline)
        {
            self.keep_event(&message);
        }
        std::mem::take(&mut self.events)
    }

    /// True if a message, or a part of one, can be read at once.
    fn has_message(&self) -> bool {
        let mut watched = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
        !self.received.is_empty() || poll(&mut watched, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Executes a command and returns its result.
    ///
    /// # Errors
    /// [`ErrorKind::Command`] with QEMU's own words, [`ErrorKind::Gone`], [`ErrorKind::Monitor`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.execute_with(command, arguments, None)
    }

    /// Like [`Monitor::execute`], with a descriptor that QEMU gets.
    pub(crate) fn execute_with(
        &mut self,
        command: &str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value> {
        let (id, message) = self.message(command, &arguments);
        self.send(message.as_bytes(), descriptor)?;
        self.reply(id, command)
    }

    /// Like [`Monitor::execute`], and does `meanwhile` between the command and its reply.
    pub fn execute_while(&mut self, command: &str, meanwhile: impl FnOnce() -> Result<()>) -> Result<Value> {
        let (id, message) = self.message(command, &json!({}));
        self.send(message.as_bytes(), None)?;
        if let Err(error) = meanwhile() {
            self.given_up.insert(id);
            return Err(error);
        }
        self.reply(id, command)
    }

    /// Executes commands one after the other, without waiting for the reply to one before the next
    /// is sent. Also after a failure, the others are executed.
    ///
    /// # Errors
    /// Of the first that failed.
    pub(crate) fn execute_all(&mut self, commands: &[Command]) -> Result<Vec<Reply>> {
        self.try_all(commands)?.into_iter().collect()
    }

    /// Like [`Monitor::execute_all`], of questions: the answer to each, or why QEMU gives none.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], but for [`ErrorKind::Command`].
    pub(crate) fn ask<const N: usize>(&mut self, questions: [Command; N]) -> Result<[Result<Value>; N]> {
        let mut answers = self.try_all(&questions)?.into_iter().map(|answer| answer.map(|reply| reply.result));
        // There are as many as there were questions.
        Ok(std::array::from_fn(|_| answers.next().unwrap_or(Ok(Value::Null))))
    }

    /// Like [`Monitor::execute_all`]: the reply to each command, or why QEMU refuses it.
    ///
    /// # Errors
    /// Those of [`Monitor::execute`], but for [`ErrorKind::Command`].
    pub(crate) fn try_all(&mut self, commands: &[Command]) -> Result<Vec<Result<Reply>>> {
        let (mut ids, mut messages) = (Vec::new(), String::new());
        for command in commands {
            let (id, message) = self.message(command.name, &command.arguments);
            ids.push(id);
            messages += &message;
        }
        self.send(messages.as_bytes(), None)?;
        let mut replies = Vec::with_capacity(commands.len());
        for (&id, command) in ids.iter().zip(commands) {
            match self.reply(id, command.name) {
                Err(error) if error.kind() != ErrorKind::Command => {
                    self.given_up.extend(ids.iter().filter(|&&later| later > id));
                    return Err(error);
                }
                reply => replies.push(reply.map(|result| Reply { result, at: Instant::now() })),
            }
        }
        Ok(replies)
    }

    /// A command as a line, with its id.
    fn message(&mut self, command: &str, arguments: &Value) -> (u64, String) {
        self.last_id += 1;
        (self.last_id, command::line(command, arguments, Some(self.last_id.into())))
    }

    /// The reply to a command.
    fn reply(&mut self, id: u64, command: &str) -> Result<Value> {
        let deadline = Instant::now() + REPLY_LIMIT;
        loop {
            let mut reply = match self.read_message(deadline) {
                Ok(reply) => reply,
                Err(error) => {
                    self.given_up.insert(id);
                    return Err(error);
                }
            };
            if Instant::now() >= deadline {
                self.given_up.insert(id);
                return Err(self.no_answer());
            }
            if reply.get("event").is_some() {
                self.keep_event(&reply);
                continue;
            }
            match reply.get("id").and_then(Value::as_u64) {
                Some(answered) if answered == id => {}
                // To a command that was given up: it took too long, or a reply before could not be understood.
                Some(answered) if answered < id && self.given_up.remove(&answered) => continue,
                _ => {
                    self.given_up.insert(id);
                    return Err(self.garbled("it replies to what was not asked"));
                }
            }
            if let Some(error) = reply.get("error") {
                let words = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
                return Err(Error::of(ErrorKind::Command, "QEMU refuses", Object::Command(command.to_owned()), words));
            }
            // What QEMU reported before was before the stop.
            self.has_moved &= command != "stop";
            return match reply.get_mut("return") {
                Some(result) => Ok(result.take()),
                None => Err(self.garbled("a reply has neither a result nor an error")),
            };
        }
    }

    /// Executes a command of the human monitor and returns its text.
    pub fn human(&mut self, command_line: &str) -> Result<String> {
        let Command { name, arguments } = Command::of_human(command_line);
        let result = self.execute(name, arguments)?;
        self.text_of_human(&result)
    }

    /// What the human monitor has written, of a reply to [`Command::of_human`].
    pub(crate) fn text_of_human(&self, result: &Value) -> Result<String> {
        result.as_str().map(str::to_owned).ok_or_else(|| self.garbled("the reply of the human monitor is no text"))
    }

    fn send(&self, message: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<()> {
        let number = descriptor.map(|descriptor| [descriptor.as_raw_fd()]);
        let mut sent = 0;
        while sent < message.len() {
            let rights = number.as_ref().filter(|_| sent == 0).map(|number| ControlMessage::ScmRights(number));
            let parts = [IoSlice::new(&message[sent..])];
            match sendmsg::<()>(self.stream.as_raw_fd(), &parts, rights.as_slice(), MsgFlags::MSG_NOSIGNAL, None) {
                Ok(bytes) => sent += bytes,
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(self.failed("write to", error.into())),
            }
        }
        Ok(())
    }

    /// Reads one message, which is a line.
    fn read_message(&mut self, deadline: Instant) -> Result<Value> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.received[searched..].iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=searched + end).collect();
                searched = 0;
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return match serde_json::from_slice::<Value>(&line) {
                    Ok(message) if message.is_object() => Ok(message),
                    _ => Err(self.garbled("a message is no JSON object")),
                };
            }
            searched = self.received.len();
            if searched > MAX_MESSAGE_BYTES {
                return Err(self.garbled("a message is longer than 16 MiB"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.no_answer());
            }
            let patience = self.ending.as_ref().and_then(Ending::patience);
            self.stream
                .set_read_timeout(Some(patience.map_or(left, |patience| patience.min(left))))
                .map_err(|error| self.failed("read from", error))?;
            let mut buffer = [0; 16384];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Error::about(ErrorKind::Gone, self.object.clone(), "was closed: QEMU has ended")),
                Ok(bytes) => self.received.extend_from_slice(&buffer[..bytes]),
                Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind()) => {
                    self.ending.iter_mut().for_each(Ending::wake);
                }
                Err(error) => return Err(self.failed("read from", error)),
            }
        }
    }

    fn no_answer(&self) -> Error {
        Error::about(ErrorKind::Monitor, self.object.clone(), "does not answer")
    }

    fn failed(&self, operation: &'static str, error: io::Error) -> Error {
        let is_closed = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset].contains(&error.kind());
        let kind = if is_closed { ErrorKind::Gone } else { ErrorKind::Monitor };
        Error::of(kind, operation, self.object.clone(), error)
    }

    fn garbled(&self, reason: &'static str) -> Error {
        Error::of(ErrorKind::Monitor, "understand", self.object.clone(), reason)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";

    /// A monitor whose other end sends these bytes and closes the connection.
    fn monitor_that_gets(bytes: Vec<u8>) -> (Result<Monitor>, std::thread::JoinHandle<()>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || {
            // The other end may close first.
            let _ = theirs.write_all(&bytes);
            let _ = theirs.shutdown(std::net::Shutdown::Write);
            let _ = io::copy(&mut theirs, &mut io::sink());
        });
        (Monitor::over(ours), sender)
    }

    fn first_reply(replies: &str) -> Result<Value> {
        let bytes = format!("{GREETING}{{\"return\": {{}}, \"id\": 1}}\n{replies}");
        let (monitor, sender) = monitor_that_gets(bytes.into_bytes());
        let mut monitor = monitor.unwrap();
        let reply = monitor.execute("query-status", json!({}));
        drop(monitor);
        sender.join().unwrap();
        reply
    }

    #[test]
    fn a_reply_is_found_among_events() {
        let reply = first_reply("{\"event\": \"STOP\", \"data\": {}}\r\n\r\n{\"return\": {\"a\": 7}, \"id\": 2}\r\n");
        assert_eq!(reply.unwrap(), json!({"a": 7}));
    }

    #[test]
    fn qemu_is_asked_to_read_ahead_if_it_offers_that() {
        for (offered, arguments) in [("\"oob\"", json!({"enable": ["oob"]})), ("", Value::Null), ("7", Value::Null)] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let greeting = format!("{{\"QMP\": {{\"capabilities\": [{offered}]}}}}\n{{\"return\": {{}}, \"id\": 1}}\n");
            theirs.write_all(greeting.as_bytes()).unwrap();
            drop(Monitor::over(ours).unwrap());
            let asked: Value = serde_json::from_reader(theirs).unwrap();
            assert_eq!(asked["arguments"], arguments, "{offered}");
        }
    }

    #[test]
    fn a_reply_that_is_read_late_does_not_shorten_the_stop() {
        let sent = Instant::now();
        let long_ago = SystemTime::now() - Duration::from_secs(100);
        std::thread::sleep(Duration::from_millis(2));
        let between = SystemTime::now();
        std::thread::sleep(Duration::from_millis(2));
        let replied = Instant::now();
        let since = |stopped_at: Option<SystemTime>| {
            let (monitor, sender) =
                monitor_that_gets(format!("{GREETING}{{\"return\": {{}}, \"id\": 1}}\n").into_bytes());
            let mut monitor = monitor.unwrap();
            if let Some(at) = stopped_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok()) {
                let timestamp = json!({"seconds": at.as_secs(), "microseconds": at.subsec_micros()});
                monitor.keep_event(&json!({"event": "STOP", "timestamp": timestamp}));
            }
            let since = monitor.stopped_since(sent, replied);
            drop(monitor);
            sender.join().unwrap();
            since
        };
        assert_eq!(since(None), replied);
        assert_eq!(since(Some(SystemTime::now() + Duration::from_secs(100))), replied);
        assert_eq!(since(Some(long_ago)), sent);
        let since_report = since(Some(between));
        assert!(sent < since_report && since_report < replied);
    }

    #[test]
    fn a_reply_that_came_too_late_is_not_taken_for_another() {
        let bytes = format!("{GREETING}{{\"return\": {{}}, \"id\": 1}}\nnonsense\n{{\"return\": 1, \"id\": 2}}\n");
        let more = "{\"return\": 2, \"id\": 3}\n{\"return\": 3, \"id\": 4}\n{\"return\": 3, \"id\": 4}\n";
        let (monitor, sender) = monitor_that_gets([bytes.as_bytes(), more.as_bytes()].concat());
        let mut monitor = monitor.unwrap();
        let commands = ["stop", "query-version"].map(|name| Command::new(name, json!({})));
        assert_eq!(monitor.execute_all(&commands).unwrap_err().kind(), ErrorKind::Monitor);
        assert_eq!(monitor.execute("cont", json!({})).unwrap(), 3);
        // Twice is once too often.
        assert_eq!(monitor.execute("cont", json!({})).unwrap_err().kind(), ErrorKind::Monitor);
        drop(monitor);
        sender.join().unwrap();
    }

    #[test]
    fn a_monitor_that_never_stops_reporting_is_not_read_for_ever() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || {
            theirs.write_all(format!("{GREETING}{{\"return\": {{}}, \"id\": 1}}\n").as_bytes()).unwrap();
            while theirs.write_all(b"{\"event\": \"RESET\", \"data\": {}}\n").is_ok() {}
        });
        let mut monitor = Monitor::over(ours).unwrap();
        // The first calls may be earlier than the sender.
        let counts = std::iter::repeat_with(|| {
            std::thread::sleep(Duration::from_millis(1));
            monitor.take_events().len()
        });
        assert_eq!(counts.take(10_000).find(|count| *count >= MAX_EVENTS), Some(MAX_EVENTS));
        drop(monitor);
        sender.join().unwrap();
    }

    #[test]
    fn the_words_of_a_refusal_are_kept() {
        let error =
            first_reply("{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}, \"id\": 2}\n").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Command);
        assert_eq!(error.to_string(), "QEMU refuses query-status: no");
    }

    #[test]
    fn a_monitor_that_misbehaves_is_an_error() {
        for (replies, kind) in [
            ("", ErrorKind::Gone),
            ("{\"return\": {}", ErrorKind::Gone),
            ("nonsense\n", ErrorKind::Monitor),
            ("7\n", ErrorKind::Monitor),
            ("{\"return\": {}, \"id\": 7}\n", ErrorKind::Monitor),
            ("{\"return\": {}}\n", ErrorKind::Monitor),
            ("{\"id\": 2}\n", ErrorKind::Monitor),
        ] {
            assert_eq!(first_reply(replies).unwrap_err().kind(), kind, "{replies}");
        }
        let deep = format!("{}\n", "[".repeat(1 << 20));
        assert_eq!(first_reply(&deep).unwrap_err().kind(), ErrorKind::Monitor);
        let endless = "x".repeat(MAX_MESSAGE_BYTES + 100_000);
        assert_eq!(first_reply(&endless).unwrap_err().kind(), ErrorKind::Monitor);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_reply_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (monitor, sender) = monitor_that_gets(bytes);
            if let Ok(mut monitor) = monitor {
                let _ = monitor.execute("query-status", json!({}));
            }
            sender.join().unwrap();
        }
    }
}
