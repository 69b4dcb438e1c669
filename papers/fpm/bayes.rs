//! `bayes` of STAMP: learns the structure of a Bayesian network from records. Counts of records
//! come from an AD-tree, which leaves out the most common value of each variable; edges are added
//! one by one, the one that gains most first.

use std::cell::Cell;

use super::Size;
use super::monitor::Monitor;
use super::objects::Objects;
use crate::BenchError;
use crate::measuring::random::Xorshift;

/// `-r32768`.
const FULL_RECORDS: u64 = 1 << 15;
/// `-v32`.
const VARIABLES: usize = 32;
/// `-n4`: most parents of a variable that are learned.
const MOST_PARENTS: usize = 4;
/// `-p10`: probability of an edge of the network that the records are made by.
const EDGE_PERCENT: u64 = 10;

/// A node of the tree: the records in which some variables have given values.
struct Node<'h> {
    count: u32,
    /// For each variable beyond the last given one.
    vary: &'h [Vary<'h>],
}

/// The records of a node by the value of one more variable.
struct Vary<'h> {
    common: u8,
    /// The records with the other value; `None` if there are none.
    other: Option<&'h Node<'h>>,
}

/// A variable of the network that is learned.
struct Variable<'h> {
    parents: Cell<Option<&'h Parent<'h>>>,
    likelihood: Cell<f64>,
}

struct Parent<'h> {
    variable: usize,
    next: Option<&'h Parent<'h>>,
}

/// The best edge to a variable, in a list with the one first that gains most.
struct Task<'h> {
    to: usize,
    from: usize,
    gain: f64,
    likelihood: f64,
    next: Cell<Option<&'h Task<'h>>>,
}

/// A value that is asked for.
#[derive(Clone, Copy)]
struct Query {
    variable: usize,
    value: u8,
}

struct Learner<'m, 'h> {
    monitor: &'m Monitor<'h>,
    records: &'h [u32],
    tree: &'h Node<'h>,
    network: &'h [Variable<'h>],
}

/// Runs the program and checks its result.
pub(super) fn run(monitor: &Monitor<'_>, size: Size) -> Result<(), BenchError> {
    let objects = monitor.objects();
    let records = size.of(FULL_RECORDS).max(64) as usize;
    let records = make_records(objects, records, VARIABLES);
    let mut order: Vec<u32> = (0..records.len() as u32).collect();
    let tree = make_node(monitor, records, &mut order, 0, VARIABLES)?;
    let network = objects.make_all(VARIABLES, |_| Variable { parents: Cell::new(None), likelihood: Cell::new(0.0) });
    let learner = Learner { monitor, records, tree, network };
    learner.learn()?;
    monitor.finish()?;
    learner.check()
}

/// Records, bit k of which is the value of variable k, by a random network.
fn make_records(objects: &Objects, count: usize, variables: usize) -> &[u32] {
    let mut random = Xorshift::new(1);
    let parents: Vec<Vec<usize>> =
        (0..variables).map(|variable| (0..variable).filter(|_| random.below(100) < EDGE_PERCENT).collect()).collect();
    let seeds: Vec<u64> = (0..variables).map(|_| random.next_u64()).collect();
    objects.make_all(count, |_| {
        let mut record = 0;
        for (variable, parents) in parents.iter().enumerate() {
            let given = parents.iter().fold(1, |given, &parent| given << 1 | u64::from(record >> parent & 1));
            // The probability of a one, by the values of the parents.
            let threshold = Xorshift::new(seeds[variable] ^ given.wrapping_mul(0x9e37_79b9_7f4a_7c15)).below(100);
            record |= u32::from(random.below(100) < threshold) << variable;
        }
        record
    })
}

/// The node of the records `chosen`, with the variables from `first` on below it.
fn make_node<'h>(
    monitor: &Monitor<'h>,
    records: &[u32],
    chosen: &mut [u32],
    first: usize,
    variables: usize,
) -> Result<&'h Node<'h>, BenchError> {
    let mut vary = Vec::with_capacity(variables - first);
    for variable in first..variables {
        // The records with a zero first.
        let mut zeros = 0;
        for index in 0..chosen.len() {
            if records[chosen[index] as usize] >> variable & 1 == 0 {
                chosen.swap(index, zeros);
                zeros += 1;
            }
        }
        let (zeros, ones) = chosen.split_at_mut(zeros);
        let common = u8::from(ones.len() > zeros.len());
        let rest = if common == 1 { zeros } else { ones };
        let other = match rest.len() {
            0 => None,
            _ => Some(make_node(monitor, records, rest, variable + 1, variables)?),
        };
        vary.push((common, other));
    }
    monitor.step()?;
    let objects = monitor.objects();
    let vary = objects.make_all(vary.len(), |index| Vary { common: vary[index].0, other: vary[index].1 });
    Ok(objects.make(Node { count: chosen.len() as u32, vary }))
}

/// Number of records in which the variables have the values of `queries`, which are in ascending
/// order of the variables. `first` is the first variable below the node.
fn count(node: &Node<'_>, queries: &[Query], first: usize) -> u32 {
    let [Query { variable, value }, rest @ ..] = queries else { return node.count };
    let vary = &node.vary[variable - first];
    let other = vary.other.map_or(0, |other| count(other, rest, variable + 1));
    if *value != vary.common {
        return other;
    }
    // All records without those that have the other value.
    count(node, rest, first) - other
}

impl<'h> Learner<'_, 'h> {
    /// Adds edges as long as one gains anything.
    fn learn(&self) -> Result<(), BenchError> {
        for (index, variable) in self.network.iter().enumerate() {
            variable.likelihood.set(self.likelihood(index, None));
        }
        let tasks = Cell::new(None);
        for to in 0..self.network.len() {
            self.add_task(&tasks, to)?;
        }
        while let Some(task) = tasks.get() {
            tasks.set(task.next.get());
            let (to, from) = (task.to, task.from);
            // Edges that were added since may have closed the way.
            if !self.leads(to, from) {
                let variable = &self.network[to];
                let parent = Parent { variable: from, next: variable.parents.get() };
                variable.parents.set(Some(self.monitor.objects().make(parent)));
                variable.likelihood.set(task.likelihood);
            }
            // SAFETY: the list does not have the task any more.
            unsafe { self.monitor.objects().free(std::ptr::from_ref(task)) };
            self.add_task(&tasks, to)?;
        }
        Ok(())
    }

    /// Adds the best edge to a variable to the list, if one gains anything.
    fn add_task(&self, tasks: &Cell<Option<&'h Task<'h>>>, to: usize) -> Result<(), BenchError> {
        let parents = self.parents(to);
        if parents.len() >= MOST_PARENTS {
            return Ok(());
        }
        let records = self.records.len() as f64;
        let penalty = 0.5 * records.ln() * (1 << parents.len()) as f64;
        let mut best: Option<(usize, f64)> = None;
        for from in 0..self.network.len() {
            if from != to && !parents.contains(&from) && !self.leads(to, from) {
                let likelihood = self.likelihood(to, Some(from));
                if best.is_none_or(|(_, other)| likelihood > other) {
                    best = Some((from, likelihood));
                }
                self.monitor.step()?;
            }
        }
        let Some((from, likelihood)) = best else { return Ok(()) };
        let gain = likelihood - self.network[to].likelihood.get() - penalty;
        if gain <= 0.0 {
            return Ok(());
        }
        let new = self.monitor.objects().make(Task { to, from, gain, likelihood, next: Cell::new(None) });
        let mut link = tasks;
        while let Some(task) = link.get().filter(|task| task.gain >= gain) {
            link = &task.next;
        }
        new.next.set(link.replace(Some(new)));
        Ok(())
    }

    fn parents(&self, variable: usize) -> Vec<usize> {
        let (mut parents, mut next) = (Vec::new(), self.network[variable].parents.get());
        while let Some(parent) = next {
            parents.push(parent.variable);
            next = parent.next;
        }
        parents
    }

    /// True if edges lead from `from` to `to`.
    fn leads(&self, from: usize, to: usize) -> bool {
        let mut parents = self.parents(to);
        let mut seen = 0u32;
        while let Some(variable) = parents.pop() {
            if variable == from {
                return true;
            }
            if seen >> variable & 1 == 0 {
                seen |= 1 << variable;
                parents.extend(self.parents(variable));
            }
        }
        false
    }

    /// The logarithm of the likelihood of the variable's values, with one more parent.
    fn likelihood(&self, variable: usize, more: Option<usize>) -> f64 {
        let counter = |queries: &[Query]| {
            // As in the original, queries are objects.
            let queries = self.monitor.objects().make_all(queries.len(), |index| queries[index]);
            let count = count(self.tree, queries, 0);
            // SAFETY: the queries are not used again.
            unsafe { self.monitor.objects().free_all(std::ptr::from_ref(queries)) };
            count
        };
        self.likelihood_by(variable, more, counter)
    }

    fn likelihood_by(&self, variable: usize, more: Option<usize>, counter: impl Fn(&[Query]) -> u32) -> f64 {
        let mut parents = self.parents(variable);
        parents.extend(more);
        let mut sum = 0.0;
        for values in 0..1u32 << parents.len() {
            let value_of = |parent: usize| (values >> parent & 1) as u8;
            let query = |parent: usize| Query { variable: parents[parent], value: value_of(parent) };
            let mut queries: Vec<Query> = (0..parents.len()).map(query).collect();
            queries.sort_by_key(|query| query.variable);
            let all = f64::from(counter(&queries));
            for value in 0..2 {
                let mut queries = queries.clone();
                let at = queries.partition_point(|query| query.variable < variable);
                queries.insert(at, Query { variable, value });
                let count = f64::from(counter(&queries));
                if count > 0.0 {
                    sum += count * (count / all).ln();
                }
            }
        }
        sum
    }

    /// The likelihoods must be those that counting records gives, and the network has no cycle.
    fn check(&self) -> Result<(), BenchError> {
        let counter = |queries: &[Query]| {
            let fits =
                |record: &&u32| queries.iter().all(|query| (**record >> query.variable & 1) as u8 == query.value);
            self.records.iter().filter(fits).count() as u32
        };
        let (mut edges, mut is_right) = (0, true);
        for (index, variable) in self.network.iter().enumerate() {
            let expected = self.likelihood_by(index, None, counter);
            is_right &= (variable.likelihood.get() - expected).abs() <= 1e-9 * expected.abs();
            is_right &= !self.leads(index, index);
            edges += self.parents(index).len();
        }
        if is_right && edges > 0 {
            return Ok(());
        }
        Err(BenchError::wrong_result("bayes", "the learned network does not fit the records"))
    }
}
