//! The checkpoints of one target in a repository.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::Error;
use crate::checkpointer::{Capture, Checkpointer, Strategy};
use crate::model::{AutoInterval, OverheadGoal};
use crate::repository::{CheckpointHold, Cost, Manifest, ProgramRecord, PruneReport, Repository, Retention, Writer};
use crate::target::{Target, TargetDescription};

mod schedule;

pub use schedule::{End, JobEvent, Summary};

/// How long to wait for a prune of the repository that shows no progress.
const WRITER_WAIT: Duration = Duration::from_secs(30);

/// The pause between two prunes is at least this many times as long as the last prune took.
const PRUNE_PAUSE: u32 = 20;

/// How long a prune waits for other writers, at first and at most. Each time that is in vain the
/// next prune waits longer.
const FIRST_PRUNE_BUDGET: Duration = Duration::from_millis(250);
const MAX_PRUNE_BUDGET: Duration = Duration::from_secs(8);

/// When and how the checkpoints of a job are taken, and which are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Time from the begin of one checkpoint to the begin of the next; with a goal for the
    /// overhead, the first such time.
    pub every: Duration,
    /// What the target may lose to checkpoints: [`Job::run`] then chooses the interval by what the
    /// last checkpoints have cost.
    pub overhead: Option<OverheadGoal>,
    /// How memory is copied.
    pub strategy: Strategy,
    /// Which checkpoints are kept; None keeps all.
    pub retention: Option<Retention>,
    /// The most memory that copied pages take up until they are stored, bytes. See
    /// [`Checkpointer::limit_in_flight`].
    pub in_flight_bytes: Option<usize>,
}

impl Default for Policy {
    /// Every 10 seconds, pre-copy, all checkpoints kept.
    fn default() -> Self {
        Policy {
            every: Duration::from_secs(10),
            overhead: None,
            strategy: Strategy::default(),
            retention: None,
            in_flight_bytes: None,
        }
    }
}

/// Name and policy of a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JobOptions {
    /// The name under which the checkpoints are filed.
    pub name: String,
    /// When and how they are taken.
    pub policy: Policy,
    /// The program of the job, as its checkpoints record it.
    pub program: Option<ProgramRecord>,
}

impl JobOptions {
    /// A job with the default policy.
    pub fn new(name: impl Into<String>) -> JobOptions {
        JobOptions { name: name.into(), policy: Policy::default(), program: None }
    }
}

/// A target, and the repository that its checkpoints go to. Dropped, the target keeps running.
///
/// [`Job::checkpoint`] takes a single checkpoint; [`Job::run`] takes them at the interval of the
/// policy.
pub struct Job<T: Target> {
    target: T,
    repository: Repository,
    options: JobOptions,
    checkpointer: Checkpointer,
    last_prune: Option<Prune>,
    /// How long the next prune waits for other writers.
    prune_budget: Duration,
    /// The last checkpoint, on whose content the next one builds: it is not pruned.
    last: Option<CheckpointHold>,
    /// When the target was frozen for the last checkpoint, microseconds since 1970 UTC.
    last_taken_us: Option<u64>,
    auto: Option<AutoInterval>,
}

/// When the last prune ended, and how long it took.
struct Prune {
    end: Instant,
    took: Duration,
}

/// A checkpoint that was taken.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct Taken {
    /// Its number within the job.
    pub sequence: u64,
    /// When the target was frozen, microseconds since 1970 UTC.
    pub taken_unix_us: u64,
    /// What it cost.
    #[serde(flatten)]
    pub cost: Cost,
}

impl<T: Target> Job<T> {
    /// A job whose first checkpoint saves all of the target's memory.
    pub fn new(target: T, repository: Repository, options: JobOptions) -> Job<T> {
        Job::resumed(target, repository, options, Checkpointer::new())
    }

    /// A job whose target was captured before: `checkpointer` knows what was saved. The first
    /// checkpoint saves what has been written since.
    pub fn resumed(target: T, repository: Repository, options: JobOptions, checkpointer: Checkpointer) -> Job<T> {
        Job {
            target,
            repository,
            options,
            checkpointer,
            last_prune: None,
            prune_budget: FIRST_PRUNE_BUDGET,
            last: None,
            last_taken_us: None,
            auto: None,
        }
    }

    /// Lets go of the target, and returns what is known of its content.
    pub(crate) fn into_checkpointer(self) -> Checkpointer {
        self.checkpointer
    }

    /// The target.
    pub fn target(&self) -> &T {
        &self.target
    }

    /// The target, to change how it is captured.
    pub fn target_mut(&mut self) -> &mut T {
        &mut self.target
    }

    /// The policy, to change it between checkpoints.
    pub fn policy_mut(&mut self) -> &mut Policy {
        &mut self.options.policy
    }

    /// Takes a checkpoint. When this returns, the checkpoint is on disk.
    ///
    /// # Errors
    /// The target, the store or the repository failed. Nothing was added to the repository, and the
    /// target keeps running unless it has ended. Everything that was found written belongs to
    /// the next checkpoint.
    pub fn checkpoint(&mut self) -> Result<Taken, Error> {
        let description = self.target.description();
        let owner = format!("checkpoints of {} ({})", self.options.name, description.label);
        let mut writer = self.repository.writer(&owner, WRITER_WAIT)?;
        let policy = &self.options.policy;
        self.checkpointer.limit_in_flight(policy.in_flight_bytes);
        let captured = self.checkpointer.capture(&mut self.target, &mut writer, policy.strategy);
        let taken = captured.and_then(|capture| self.commit(writer, capture, description));
        match &taken {
            Ok(taken) => {
                self.checkpointer.committed();
                // It was pruned meanwhile only by who does not know that it is the job's last.
                self.last = self.repository.hold(&self.options.name, taken.sequence).ok();
            }
            Err(_) => self.checkpointer.aborted(&mut self.target),
        }
        taken
    }

    /// See [`Checkpointer::take_not_kept`].
    pub fn take_not_kept(&mut self) -> Option<Error> {
        self.checkpointer.take_not_kept()
    }

    /// Lets go of the target, which keeps running.
    pub fn detach(self) {}

    /// The interval that the policy asks for now. `taken` is a checkpoint that was taken.
    fn interval(&mut self, taken: Option<&Taken>) -> Duration {
        let policy = &self.options.policy;
        let Some(goal) = policy.overhead else { return policy.every };
        let auto = self.auto.get_or_insert_with(|| AutoInterval::new(goal, policy.strategy, policy.every));
        if let Some(taken) = taken {
            // The first one saves all memory, so that it says nothing of the later ones.
            if let Some(last) = self.last_taken_us {
                auto.taken(Duration::from_micros(taken.taken_unix_us.saturating_sub(last)), taken.cost);
            }
            self.last_taken_us = Some(taken.taken_unix_us);
        }
        auto.interval()
    }

    fn commit(&self, writer: Writer, capture: Capture, description: TargetDescription) -> Result<Taken, Error> {
        let cost = cost(&capture);
        let info = writer.commit(Manifest {
            job: self.options.name.clone(),
            // The writer numbers it.
            sequence: 0,
            taken_unix_us: unix_us(capture.taken_at),
            command: description.command,
            program: self.options.program.clone(),
            mechanism: description.mechanism,
            kind: description.kind,
            spaces: capture.spaces,
            files: capture.files,
            state: capture.state,
            cost,
        })?;
        Ok(Taken {
            sequence: info.sequence,
            taken_unix_us: info.taken_unix_us,
            cost: Cost { written_bytes: info.written_bytes, ..cost },
        })
    }

    /// Removes the checkpoints that the policy does not keep. To give their space back takes
    /// longer, so that is left out while the last time was a short while ago, and where others
    /// write all the time. None if the policy keeps all.
    fn prune(&mut self) -> Option<Result<PruneReport, Error>> {
        let retention = self.options.policy.retention.as_ref()?;
        let name = Some(self.options.name.as_str());
        let is_due = self.last_prune.as_ref().is_none_or(|last| last.end.elapsed() >= last.took * PRUNE_PAUSE);
        if !is_due {
            return Some(self.repository.expire(retention, name));
        }
        let begin = Instant::now();
        let pruned = self.repository.prune_within(self.prune_budget, retention, name).transpose();
        self.prune_budget = match pruned {
            Some(_) => FIRST_PRUNE_BUDGET,
            None => (self.prune_budget * 2).min(MAX_PRUNE_BUDGET),
        };
        let pruned = pruned.unwrap_or_else(|| self.repository.expire(retention, name));
        self.last_prune = Some(Prune { end: Instant::now(), took: begin.elapsed() });
        Some(pruned)
    }
}

fn cost(capture: &Capture) -> Cost {
    let us = |time: Duration| time.as_micros() as u64;
    Cost {
        dirty_pages: capture.dirty_pages,
        frozen_pages: capture.frozen_pages,
        concurrent_pages: capture.kept.concurrent_pages,
        cow_pages: capture.kept.cow_pages,
        write_faults: capture.kept.write_faults,
        rounds: capture.rounds,
        downtime_us: us(capture.downtime),
        memory_downtime_us: us(capture.memory_downtime),
        state_downtime_us: us(capture.downtime.saturating_sub(capture.memory_downtime)),
        peak_flight_bytes: capture.peak_flight_bytes,
        written_bytes: 0,
    }
}

fn unix_us(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::scripted::{Act, Scripted};
    use crate::{ErrorKind, PAGE_SIZE, PageNumber, PageTree, Store};

    #[test]
    fn what_a_failed_checkpoint_found_is_in_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let repository = Repository::create(&directory.path().join("repository")).unwrap();
        let mut target = Scripted::new(vec![Act::Write(0, PageNumber::new(1), 11)]);
        target.run();
        target.calls_left = 4;
        let mut job = Job::new(target, repository.clone(), JobOptions::new("script"));
        let error = job.checkpoint().unwrap_err();
        assert!(error.kind() == ErrorKind::Target && !error.is_gone());
        assert!(job.target().is_failure_reported);
        assert!(repository.checkpoints("script").unwrap().is_empty());

        job.target_mut().calls_left = u32::MAX;
        let taken = job.checkpoint().unwrap();
        assert_eq!((taken.sequence, taken.cost.dirty_pages), (1, 1));
        let checkpoint = repository.read("script", 1).unwrap();
        let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();
        let mut page = [0; PAGE_SIZE];
        checkpoint.get_page(tree.get(PageNumber::new(1)), &mut page).unwrap();
        assert_eq!(page, [11; PAGE_SIZE]);
        assert_eq!(job.checkpoint().unwrap().cost.dirty_pages, 0);
    }
}
