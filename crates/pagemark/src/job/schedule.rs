//! Checkpoints at the interval of a policy.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::{Job, JobOptions, Taken};
use crate::Error;
use crate::repository::{PruneReport, Repository};
use crate::target::{Target, TargetError};

/// The first checkpoint is taken after at most this time, so that a target that is killed early can
/// be restored too.
const MAX_FIRST_DELAY: Duration = Duration::from_secs(1);

/// A failure that repeats is reported again after this time.
const REPORT_AGAIN: Duration = Duration::from_secs(10 * 60);

/// The part of the interval that at least remains between two checkpoints, as a divisor.
const MIN_PAUSE_DIVISOR: u32 = 10;

/// What happens while a job runs.
#[derive(Debug)]
pub enum JobEvent<'a> {
    /// The first checkpoint begins. It saves all memory.
    FirstCheckpoint,
    /// A checkpoint was taken.
    Taken(&'a Taken),
    /// The target cannot keep the pages of a checkpoint beyond the freeze, which its strategy
    /// ([`Strategy::Auto`](crate::checkpointer::Strategy::Auto)) had it try: from now on they are
    /// copied in the freeze.
    NotKept(&'a Error),
    /// The target could not be attached to. The next interval tries again.
    AttachFailed(&'a Error),
    /// A checkpoint could not be taken. The next interval tries again.
    CheckpointFailed(&'a Error),
    /// Checkpoints that the policy does not keep were removed.
    Pruned(&'a PruneReport),
    /// Checkpoints that the policy does not keep could not be removed.
    PruneFailed(&'a Error),
}

/// Why a job no longer runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The target has ended.
    TargetGone,
    /// The caller stopped the job. The target keeps running.
    Stopped,
}

/// What a job did while it ran.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// Why it ended.
    pub end: End,
    /// Number of checkpoints taken.
    pub checkpoints: u64,
    /// The last checkpoint.
    pub last: Option<Taken>,
}

impl<T: Target> Job<T> {
    /// Takes checkpoints at the interval of the policy, or one that keeps its goal, until the
    /// target ends, or `stop` gives a reason or is disconnected. Then lets go of the target, which
    /// keeps running.
    ///
    /// A checkpoint that fails is taken again at the next interval; the same failure several times
    /// in a row is reported once every ten minutes. Everything that happens is reported to
    /// `events`.
    pub fn run(mut self, stop: &Receiver<End>, events: &mut dyn FnMut(JobEvent<'_>)) -> Summary {
        let mut progress = Progress::default();
        let every = self.interval(None);
        let end = repeat(every, stop, &mut || self.take_next(&mut progress, events));
        progress.summary(end)
    }

    /// Like [`Job::run`], for a target that may not yet be attachable: `attach` is called when the
    /// first checkpoint is due, and again at each interval until it succeeds.
    pub fn attach_and_run(
        attach: &mut dyn FnMut() -> Result<T, T::Error>,
        repository: &Repository,
        options: &JobOptions,
        stop: &Receiver<End>,
        events: &mut dyn FnMut(JobEvent<'_>),
    ) -> Summary {
        let mut job = None;
        let mut progress = Progress::default();
        let end = repeat(options.policy.every, stop, &mut || {
            if job.is_none() {
                match attach() {
                    Ok(target) => job = Some(Job::new(target, repository.clone(), options.clone())),
                    Err(error) if error.is_gone() => return Next::Stop,
                    Err(error) => {
                        let error = error.into_error();
                        if progress.reports_failure(format!("attach: {error}"), Instant::now()) {
                            events(JobEvent::AttachFailed(&error));
                        }
                    }
                }
            }
            let every = options.policy.every;
            job.as_mut().map_or(Next::After(every), |job| job.take_next(&mut progress, events))
        });
        progress.summary(end)
    }

    /// Takes the next checkpoint, and reports what came of it.
    fn take_next(&mut self, progress: &mut Progress, events: &mut dyn FnMut(JobEvent<'_>)) -> Next {
        if progress.last.is_none() {
            events(JobEvent::FirstCheckpoint);
        }
        let mut last = None;
        match self.checkpoint() {
            Ok(taken) => {
                last = Some(taken);
                progress.taken(taken);
                events(JobEvent::Taken(&taken));
                if let Some(error) = self.take_not_kept() {
                    events(JobEvent::NotKept(&error));
                }
                match self.prune() {
                    Some(Ok(report)) => events(JobEvent::Pruned(&report)),
                    Some(Err(error)) => events(JobEvent::PruneFailed(&error)),
                    None => {}
                }
            }
            Err(error) if error.is_gone() => return Next::Stop,
            Err(error) => {
                if progress.reports_failure(format!("checkpoint: {error}"), Instant::now()) {
                    events(JobEvent::CheckpointFailed(&error));
                }
            }
        }
        Next::After(self.interval(last.as_ref()))
    }
}

/// What a run has come to so far.
#[derive(Default)]
struct Progress {
    checkpoints: u64,
    last: Option<Taken>,
    /// The last failure, if no checkpoint was taken since, and when it was reported last.
    failure: Option<(String, Instant)>,
}

impl Progress {
    fn taken(&mut self, taken: Taken) {
        self.checkpoints += 1;
        self.last = Some(taken);
        self.failure = None;
    }

    /// True if a failure is to be reported: it is another one than the last time, or was not
    /// reported for long.
    fn reports_failure(&mut self, failure: String, now: Instant) -> bool {
        if let Some((last, reported_at)) = &self.failure
            && *last == failure
            && now.saturating_duration_since(*reported_at) < REPORT_AGAIN
        {
            return false;
        }
        self.failure = Some((failure, now));
        true
    }

    fn summary(self, end: End) -> Summary {
        Summary { end, checkpoints: self.checkpoints, last: self.last }
    }
}

/// What follows on a step.
enum Next {
    /// The next interval, which is so long.
    After(Duration),
    /// Nothing: the target is gone.
    Stop,
}

/// Calls `step` after `every` and then at each interval that `step` asks for, until `step` or
/// `stop` ends it.
fn repeat(every: Duration, stop: &Receiver<End>, step: &mut dyn FnMut() -> Next) -> End {
    let mut due = after(Instant::now(), every.min(MAX_FIRST_DELAY));
    loop {
        match stop.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(end) => return end,
            Err(RecvTimeoutError::Disconnected) => return End::Stopped,
            Err(RecvTimeoutError::Timeout) => {}
        }
        let begin = Instant::now();
        let Next::After(every) = step() else { return End::TargetGone };
        due = next_due(begin, Instant::now(), every);
    }
}

/// When a checkpoint is due after one that took from `begin` to `end`. An interval that has passed
/// meanwhile is left out, so that the target gets its time.
fn next_due(begin: Instant, end: Instant, every: Duration) -> Instant {
    after(begin, every).max(after(end, every / MIN_PAUSE_DIVISOR))
}

/// The instant that much later, or a day later where that is too far away for the clock.
fn after(instant: Instant, time: Duration) -> Instant {
    instant.checked_add(time).unwrap_or(instant + Duration::from_secs(24 * 60 * 60))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::mpsc;

    use super::*;
    use crate::PageNumber;
    use crate::job::Policy;
    use crate::model::{Costs, Overhead, OverheadGoal};
    use crate::repository::{Cost, Retention};
    use crate::target::scripted::{Act, Failed, Scripted};

    const EVERY: Duration = Duration::from_millis(2);

    fn name(event: &JobEvent<'_>) -> String {
        match event {
            JobEvent::FirstCheckpoint => "first".into(),
            JobEvent::Taken(taken) => format!("taken {}", taken.sequence),
            JobEvent::NotKept(error) => format!("not kept: {error}"),
            JobEvent::AttachFailed(error) => format!("attach: {error}"),
            JobEvent::CheckpointFailed(error) => format!("checkpoint: {error}"),
            JobEvent::Pruned(report) => format!("pruned {}", report.removed.len()),
            JobEvent::PruneFailed(error) => format!("prune: {error}"),
        }
    }

    fn options(retention: Option<Retention>) -> JobOptions {
        JobOptions { policy: Policy { every: EVERY, retention, ..Policy::default() }, ..JobOptions::new("script") }
    }

    fn repository(directory: &tempfile::TempDir) -> Repository {
        Repository::create(&directory.path().join("repository")).unwrap()
    }

    #[test]
    fn a_run_takes_and_prunes_checkpoints_until_it_is_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let repository = repository(&directory);
        let target = Scripted::new(vec![Act::Write(0, PageNumber::new(1), 1)]);
        let retention = Retention { keep_last: Some(1), keep_every: None };
        let job = Job::new(target, repository.clone(), options(Some(retention)));
        let (stop, stopped) = mpsc::channel();
        let mut seen = Vec::new();
        let summary = job.run(&stopped, &mut |event| {
            if matches!(event, JobEvent::Taken(Taken { sequence: 3, .. })) {
                stop.send(End::Stopped).unwrap();
            }
            seen.push(name(&event));
        });
        assert_eq!(seen, ["first", "taken 1", "pruned 0", "taken 2", "pruned 1", "taken 3", "pruned 1"]);
        assert_eq!((summary.end, summary.checkpoints), (End::Stopped, 3));
        assert_eq!(summary.last.unwrap().sequence, 3);
        let kept = repository.checkpoints("script").unwrap();
        assert_eq!(kept.iter().map(|checkpoint| checkpoint.sequence).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn with_a_goal_the_interval_follows_the_costs() {
        let directory = tempfile::tempdir().unwrap();
        let mut options = options(None);
        let overhead = Overhead::from_share(0.5).unwrap();
        options.policy.overhead = Some(OverheadGoal { overhead, costs: Costs::default() });
        options.policy.every = Duration::from_secs(3);
        let mut job = Job::new(Scripted::new(Vec::new()), repository(&directory), options);
        assert_eq!(job.interval(None), Duration::from_secs(3));
        let taken = |sequence: u64, state_downtime_us| {
            let cost = Cost { state_downtime_us, downtime_us: state_downtime_us, ..Cost::default() };
            Taken { sequence, taken_unix_us: sequence * 1_000_000, cost }
        };
        // The first checkpoint says nothing.
        assert_eq!(job.interval(Some(&taken(1, 900_000))), Duration::from_secs(3));
        for sequence in 2..9 {
            job.interval(Some(&taken(sequence, 1_000_000)));
        }
        // Half of the time is lost at twice the downtime.
        let interval = job.interval(None).as_secs_f64();
        assert!((1.99..2.01).contains(&interval), "{interval}");
    }

    #[test]
    fn a_failure_is_reported_once_and_a_target_that_is_gone_ends_the_run() {
        let directory = tempfile::tempdir().unwrap();
        let (_stop, stopped) = mpsc::channel();
        let attempts = RefCell::new(0);
        let mut seen = Vec::new();
        let summary = Job::attach_and_run(
            &mut || {
                *attempts.borrow_mut() += 1;
                match *attempts.borrow() {
                    1..=3 => Err(Failed { is_gone: false }),
                    _ => {
                        let mut target = Scripted::new(Vec::new());
                        // Some checkpoints fail, all with the same error; after a number of further calls the target is
                        // gone.
                        target.calls_left = 0;
                        target.failures_until_gone = Some(4);
                        Ok(target)
                    }
                }
            },
            &repository(&directory),
            &options(None),
            &stopped,
            &mut |event| seen.push(name(&event)),
        );
        let said = "the script says so";
        let firsts = vec!["first".to_owned(); 3];
        assert_eq!(seen[0], format!("attach: {said}"));
        assert_eq!(seen[1..3], ["first".to_owned(), format!("checkpoint: {said}")]);
        assert_eq!(seen[3..], firsts);
        assert_eq!(*attempts.borrow(), 4);
        assert_eq!((summary.end, summary.checkpoints, summary.last), (End::TargetGone, 0, None));
    }

    #[test]
    fn a_failure_that_repeats_is_reported_again_after_a_while() {
        let mut progress = Progress::default();
        let begin = Instant::now();
        let mut reports = |failure: &str, seconds: u64| {
            progress.reports_failure(failure.to_owned(), begin + Duration::from_secs(seconds))
        };
        assert!(reports("the disk is full", 0));
        assert!(!reports("the disk is full", 10) && !reports("the disk is full", 599));
        assert!(reports("the disk is full", 600));
        assert!(!reports("the disk is full", 1199));
        assert!(reports("it is gone", 1200) && reports("the disk is full", 1201));
        assert!(reports("the disk is full", 1801));
    }

    #[test]
    fn a_missed_interval_is_left_out() {
        let begin = Instant::now();
        let every = Duration::from_secs(10);
        let seconds = Duration::from_secs;
        assert_eq!(next_due(begin, begin + seconds(2), every), begin + seconds(10));
        assert_eq!(next_due(begin, begin + Duration::from_millis(9_500), every), begin + Duration::from_millis(10_500));
        assert_eq!(next_due(begin, begin + seconds(35), every), begin + seconds(36));
        assert!(next_due(begin, begin, Duration::MAX) > begin);
    }
}
