//! What the schedulers know of threads beside their policies and priorities, which CRIU saves: the
//! processors on which they may run, the priority of their input and output, their slices, and how
//! late their timers may be.

use std::io;

use nix::errno::Errno;
use pagemark_linux::scheduling::{self, IoPriority, Processors};
use pagemark_trace::{PidsHere, RecordedPid};

use super::name;

/// What threads have in common.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Scheduling {
    /// Their ids in the images.
    threads: Vec<RecordedPid>,
    /// The processors on which they may run, a list of ranges. None where that is every processor
    /// in use: then the restoring command decides.
    processors: Option<String>,
    /// None if it follows their niceness.
    io_priority: Option<IoPriority>,
    /// How late their timers may be. None where the kernel does not say.
    timer_slack_ns: Option<u64>,
    /// For how long they run before others may. None where the kernel does not say, or it has
    /// chosen that itself. Earlier versions noted none.
    #[serde(default)]
    slice_ns: Option<u64>,
}

/// Observes threads that are frozen.
pub(super) fn observe(threads: &[i32], image_pid: fn(i32) -> RecordedPid) -> Vec<Scheduling> {
    let online = Processors::online().unwrap_or_default();
    let usual_slice_ns = usual_slice_ns();
    let mut all: Vec<Scheduling> = Vec::new();
    for &thread in threads {
        // A thread that was killed meanwhile has none.
        let Ok(processors) = scheduling::processors(thread) else { continue };
        let found = Scheduling {
            threads: Vec::new(),
            processors: (!processors.contains(&online)).then(|| processors.to_string()),
            io_priority: IoPriority::of_thread(thread).unwrap_or_default(),
            timer_slack_ns: scheduling::timer_slack_ns(thread),
            slice_ns: usual_slice_ns.and_then(|usual| scheduling::slice_ns(thread).ok()?.filter(|&own| own != usual)),
        };
        let index = all.iter().position(|known| known.has_same(&found)).unwrap_or(all.len());
        if index == all.len() {
            all.push(found);
        }
        all[index].threads.push(image_pid(thread));
    }
    all
}

impl Scheduling {
    fn has_same(&self, other: &Scheduling) -> bool {
        let values = |of: &Scheduling| (of.processors.clone(), of.io_priority, of.timer_slack_ns, of.slice_ns);
        values(self) == values(other)
    }

    /// Gives it to the threads, and adds to `missing` what they do not have then.
    pub(super) fn give_back(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let threads: Vec<(RecordedPid, i32)> =
            self.threads.iter().filter_map(|&thread| Some((thread, here.get(thread)?))).collect();
        let mut give = |give_one: &dyn Fn(i32) -> io::Result<()>, what: &str| {
            let mut refused: Vec<RecordedPid> = Vec::new();
            let mut reason = None;
            for &(thread, id_here) in &threads {
                match give_one(id_here) {
                    // It has ended, as the threads of a machine that a program has left.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => {
                        refused.push(thread);
                        reason.get_or_insert(error);
                    }
                    Ok(()) => {}
                }
            }
            if let Some(reason) = reason {
                missing.push(format!("{} {what}: {reason}", name("thread", &refused)));
            }
        };
        // What a damaged checkpoint has is no list, and asks for nothing.
        if let Some(list) = &self.processors
            && let Ok(wanted) = list.parse::<Processors>()
        {
            give(&|thread| give_processors(thread, &wanted), &format!("may run on other processors than {wanted}"));
        }
        let described = self.io_priority.map_or_else(|| "none".into(), |priority| priority.to_string());
        give(&|thread| give_io_priority(thread, self.io_priority), &format!("lost the I/O priority {described}"));
        if let Some(slack_ns) = self.timer_slack_ns {
            give(&|thread| give_timer_slack(thread, slack_ns), &format!("lost the timer slack {slack_ns} ns"));
        }
        if let Some(slice_ns) = self.slice_ns {
            give(&|thread| give_slice(thread, slice_ns), &format!("lost the slice of {slice_ns} ns"));
        }
    }
}

/// Lets a thread run on these processors alone, as far as this command itself may run on them.
fn give_processors(thread: i32, wanted: &Processors) -> io::Result<()> {
    let own = scheduling::processors(0)?;
    let possible = wanted.intersection(&own);
    if possible.is_empty() {
        return Err(io::Error::other(format!("this command may run on {own} alone")));
    }
    let before = scheduling::processors(thread)?;
    if before != possible {
        scheduling::set_processors(thread, &possible)?;
    }
    match scheduling::processors(thread)? {
        after if after == *wanted => Ok(()),
        after => Err(io::Error::other(format!("of them, it may use {after} here"))),
    }
}

fn give_io_priority(thread: i32, wanted: Option<IoPriority>) -> io::Result<()> {
    let current = match IoPriority::of_thread(thread) {
        // A kernel without has none to give.
        Err(error) if wanted.is_none() && error.raw_os_error() == Some(libc::ENOSYS) => return Ok(()),
        current => current?,
    };
    if current != wanted { wanted.unwrap_or(IoPriority(0)).give(thread) } else { Ok(()) }
}

fn give_timer_slack(thread: i32, wanted_ns: u64) -> io::Result<()> {
    // One of real time has none, and CRIU has given the policy back.
    if scheduling::timer_slack_ns(thread) != Some(wanted_ns) {
        scheduling::set_timer_slack_ns(thread, wanted_ns).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Errno::ESRCH.into(),
            _ => error,
        })?;
    }
    Ok(())
}

fn give_slice(thread: i32, wanted_ns: u64) -> io::Result<()> {
    if scheduling::slice_ns(thread)? != Some(wanted_ns) {
        scheduling::set_slice_ns(thread, wanted_ns)?;
    }
    match scheduling::slice_ns(thread)? {
        Some(after) if after == wanted_ns => Ok(()),
        Some(after) => Err(io::Error::other(format!("it is {after} ns"))),
        None => Err(io::Error::other("this kernel has no slices before Linux 6.12")),
    }
}

/// The slice of threads that have asked for none. None if that is not known.
fn usual_slice_ns() -> Option<u64> {
    // This command may have inherited one; the value ends with the thread.
    let of_new_thread = || {
        scheduling::set_slice_ns(0, 0).ok()?;
        scheduling::slice_ns(0).ok()?
    };
    std::thread::Builder::new().spawn(of_new_thread).ok()?.join().ok()?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_gets_back_what_it_had() {
        let (ready, is_ready) = mpsc::channel();
        let (end, is_ended) = mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            ready.send(nix::unistd::gettid().as_raw()).unwrap();
            let _ = is_ended.recv();
        });
        let thread = is_ready.recv().unwrap();
        let all = scheduling::processors(thread).unwrap();
        let first: Processors = all.numbers().next().unwrap().to_string().parse().unwrap();

        scheduling::set_processors(thread, &first).unwrap();
        IoPriority(2 << 13 | 7).give(thread).unwrap();
        let has_slack = scheduling::timer_slack_ns(thread).is_some();
        if has_slack {
            scheduling::set_timer_slack_ns(thread, 123_456).unwrap();
        }
        let usual_slice_ns = scheduling::slice_ns(thread).unwrap();
        if usual_slice_ns.is_some() {
            scheduling::set_slice_ns(thread, 7_000_000).unwrap();
            assert_eq!(scheduling::slice_ns(thread).unwrap(), Some(7_000_000));
        }
        let noted = observe(&[thread], RecordedPid::new);
        let text = serde_json::to_string(&noted).unwrap();
        let noted: Vec<Scheduling> = serde_json::from_str(&text).unwrap();
        assert_eq!(noted[0].threads, [RecordedPid::new(thread)]);

        scheduling::set_processors(thread, &all).unwrap();
        IoPriority(0).give(thread).unwrap();
        if has_slack {
            scheduling::set_timer_slack_ns(thread, 50_000).unwrap();
        }
        if let Some(usual) = usual_slice_ns {
            assert_eq!(noted[0].slice_ns, Some(7_000_000));
            scheduling::set_slice_ns(thread, usual).unwrap();
        }
        let mut missing = Vec::new();
        noted[0].give_back(&PidsHere::as_recorded(), &mut missing);
        assert_eq!(missing, Vec::<String>::new());
        assert_eq!(observe(&[thread], RecordedPid::new), noted);
        drop(end);
        other.join().unwrap();
    }

    #[test]
    fn what_cannot_come_back_is_named() {
        // The calling thread stays as it is: nothing of this is possible.
        let own = nix::unistd::gettid().as_raw();
        let before = scheduling::processors(own).unwrap();
        let noted = Scheduling {
            threads: vec![RecordedPid::new(own)],
            processors: Some("60000".into()),
            io_priority: IoPriority::of_thread(own).unwrap(),
            timer_slack_ns: None,
            slice_ns: None,
        };
        let mut missing = Vec::new();
        noted.give_back(&PidsHere::as_recorded(), &mut missing);
        let expected =
            format!("thread {own} may run on other processors than 60000: this command may run on {before} alone");
        assert_eq!(missing, [expected]);
        assert_eq!(scheduling::processors(own).unwrap(), before);
        // Threads that are not there any more are no loss.
        missing.clear();
        noted.give_back(&PidsHere::unknown(), &mut missing);
        assert!(missing.is_empty());
    }
}
