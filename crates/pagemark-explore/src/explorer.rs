//! Explicit-state exploration: restores a state, tries each of its choices, and recognizes visited
//! states.

use std::collections::{HashMap, VecDeque, hash_map::Entry};

use pagemark::PAGE_SIZE;

use crate::state_memory::{State, StateMemory};
use crate::sys::alternate_stack::AlternateStack;
use crate::sys::arena::Arena;
use crate::trace::{Choice, Event, Fault, Step};
use crate::{Error, Sizes, StateForm, World};

/// The order in which states are visited.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Order {
    /// The state that was found last comes first. Needs the least memory besides the states.
    #[default]
    DepthFirst,
    /// The state that was found first comes first. The trace to a fault is a shortest trace.
    BreadthFirst,
}

/// The options of an exploration, and its bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Explorer {
    /// Memory of the program.
    pub sizes: Sizes,
    /// The form in which states are held.
    pub state_form: StateForm,
    /// Bytes of a chunk of a snapshot, a power of two from 256 to 65 536.
    pub chunk_bytes: usize,
    /// The order in which states are visited.
    pub order: Order,
    /// Maximum number of choices of a trace; states that need more choices are not visited.
    pub max_depth: Option<u32>,
    /// Maximum number of states.
    pub max_states: Option<u64>,
    /// Maximum number of bytes that all states take. Snapshots are compressed before it is reached.
    pub budget_bytes: Option<u64>,
}

impl Default for Explorer {
    /// Depth-first without bounds; snapshots in chunks of a page, tracked by the best mechanism of
    /// this machine.
    fn default() -> Self {
        Explorer {
            sizes: Sizes::default(),
            state_form: StateForm::Snapshots(None),
            chunk_bytes: PAGE_SIZE,
            order: Order::DepthFirst,
            max_depth: None,
            max_states: None,
            budget_bytes: None,
        }
    }
}

/// How an exploration ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Every state was visited, and no state has a fault.
    Exhausted,
    /// A state has a fault.
    Found {
        /// The fault.
        fault: Fault,
        /// The choices that lead from the initial state to the fault.
        trace: Vec<Choice>,
    },
    /// A bound was reached. No visited state has a fault.
    Bounded(Bound),
}

/// The bound that was reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// [`Explorer::max_depth`]: every state within the bound was visited.
    Depth,
    /// [`Explorer::max_states`]
    States,
    /// [`Explorer::budget_bytes`]
    Memory,
}

/// The result of an exploration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exploration {
    /// How the exploration ended.
    pub outcome: Outcome,
    /// Number of different states.
    pub states: u64,
    /// Number of choices that were tried.
    pub transitions: u64,
    /// Number of choices that lead to the deepest state, by the shortest traces that were found.
    pub depth: u32,
    /// Bytes of memory that the states took.
    pub held_bytes: u64,
}

impl Explorer {
    /// Visits the states that a program can reach.
    ///
    /// `program` sets the program up: it places shared data, spawns actors, and states the
    /// properties. From then on the choices alone determine the states, so the result does not
    /// depend on the form in which states are held.
    ///
    /// # Errors
    /// Errors of `program`; [`ErrorKind::Core`](crate::ErrorKind::Core),
    /// [`ErrorKind::StackOverflow`](crate::ErrorKind::StackOverflow).
    pub fn explore(
        &self,
        program: impl for<'w> FnOnce(&mut World<'w>) -> Result<(), Error>,
    ) -> Result<Exploration, Error> {
        let memory = StateMemory::new(self.state_form, self.sizes.total_bytes(), self.chunk_bytes, self.budget_bytes)?;
        let _handlers = AlternateStack::ensure().map_err(Error::system("making a stack for signal handlers"))?;
        // SAFETY: `memory` lives longer than the world, which is created below and dropped within
        // this call, and changes its content only in calls, which are made while no fiber runs.
        let arena = unsafe { Arena::new(memory.memory()?) };
        let mut world = World::new(arena, self.sizes);
        program(&mut world)?;
        Search { explorer: self, world, memory, visited: HashMap::new(), nodes: Vec::new(), transitions: 0 }.run()
    }

    /// Follows a trace from the initial state, without any snapshot. Returns the steps of the
    /// trace, and the fault of its last state. At an earlier state that has a fault the trace ends.
    ///
    /// # Errors
    /// Those of [`Explorer::explore`], and
    /// [`ErrorKind::TraceDiffers`](crate::ErrorKind::TraceDiffers).
    pub fn replay(
        &self,
        program: impl for<'w> FnOnce(&mut World<'w>) -> Result<(), Error>,
        trace: &[Choice],
    ) -> Result<(Vec<Step>, Option<Fault>), Error> {
        let memory = StateMemory::new(StateForm::Copies, self.sizes.total_bytes(), self.chunk_bytes, None)?;
        let _handlers = AlternateStack::ensure().map_err(Error::system("making a stack for signal handlers"))?;
        // SAFETY: as in `explore`.
        let arena = unsafe { Arena::new(memory.memory()?) };
        let mut world = World::new(arena, self.sizes);
        program(&mut world)?;
        let mut fault = world.start()?;
        let mut steps = Vec::new();
        for (step, &choice) in trace.iter().enumerate() {
            if fault.is_some() {
                break;
            }
            let actor = choice.actor as usize;
            let (ways, label) = (world.ways(actor), world.label(actor));
            if u64::from(choice.way) >= ways {
                return Err(Error::trace_differs(step, actor, ways));
            }
            steps.push(Step { choice, ways, label });
            fault = world.take(choice)?;
        }
        Ok((steps, fault))
    }
}

/// How a state was found. The index of a node is the number of its state.
struct Node {
    parent: u32,
    choice: Choice,
    depth: u32,
}

/// A state with choices that were not tried yet.
struct Open {
    node: u32,
    state: State,
    choices: Vec<Choice>,
    tried: usize,
}

struct Search<'w, 'e> {
    explorer: &'e Explorer,
    // Declared before the memory, and therefore dropped before it.
    world: World<'w>,
    memory: StateMemory,
    visited: HashMap<State, u32>,
    nodes: Vec<Node>,
    transitions: u64,
}

/// The result of a transition.
enum Reached {
    /// A state to continue from: it is new, or was found by a shorter trace than before.
    Open(Open),
    /// A visited state.
    Known,
    /// The end of the exploration.
    End(Outcome),
}

impl Search<'_, '_> {
    fn run(mut self) -> Result<Exploration, Error> {
        let outcome = self.search()?;
        Ok(Exploration {
            outcome,
            states: self.nodes.len() as u64,
            transitions: self.transitions,
            depth: self.nodes.iter().map(|node| node.depth).max().unwrap_or(0),
            held_bytes: self.memory.held_bytes(),
        })
    }

    fn search(&mut self) -> Result<Outcome, Error> {
        let fault = self.world.start()?;
        let mut open = VecDeque::new();
        // Number of the state that the memory holds.
        let mut at = 0;
        match self.reach(None, fault)? {
            Reached::Open(first) => open.push_back(first),
            Reached::Known => {}
            Reached::End(outcome) => return Ok(outcome),
        }
        let mut was_cut = false;
        while let Some(index) = self.next(&open) {
            let current = &mut open[index];
            let depth = self.nodes[current.node as usize].depth;
            let is_cut = self.explorer.max_depth.is_some_and(|max_depth| depth >= max_depth);
            let Some(&choice) = current.choices.get(current.tried).filter(|_| !is_cut) else {
                was_cut |= is_cut && !current.choices.is_empty();
                open.remove(index);
                continue;
            };
            current.tried += 1;
            if at != current.node {
                self.memory.restore(&current.state)?;
            }
            let from = current.node;
            let fault = self.world.take(choice)?;
            self.transitions += 1;
            at = u32::MAX;
            match self.reach(Some((from, choice)), fault)? {
                Reached::Open(next) => {
                    at = next.node;
                    open.push_back(next);
                }
                Reached::Known => {}
                Reached::End(outcome) => return Ok(outcome),
            }
        }
        Ok(if was_cut { Outcome::Bounded(Bound::Depth) } else { Outcome::Exhausted })
    }

    /// The index of the open state that comes next.
    fn next(&self, open: &VecDeque<Open>) -> Option<usize> {
        match self.explorer.order {
            Order::DepthFirst => open.len().checked_sub(1),
            Order::BreadthFirst => (!open.is_empty()).then_some(0),
        }
    }

    /// Records the state that the memory holds.
    fn reach(&mut self, taken: Option<(u32, Choice)>, fault: Option<Fault>) -> Result<Reached, Error> {
        if let Some(fault) = fault {
            let trace = taken.map_or_else(Vec::new, |(from, choice)| self.trace(from, choice));
            return Ok(Reached::End(Outcome::Found { fault, trace }));
        }
        let depth = taken.map_or(0, |(from, _)| self.nodes[from as usize].depth + 1);
        let (parent, choice) = taken.unwrap_or_default();
        let Some(state) = self.memory.save()? else { return Ok(Reached::End(Outcome::Bounded(Bound::Memory))) };
        let number = self.nodes.len() as u32;
        let (node, is_new) = match self.visited.entry(state.clone()) {
            Entry::Occupied(known) => (*known.get(), false),
            Entry::Vacant(_) if self.explorer.max_states.is_some_and(|max| u64::from(number) >= max) => {
                return Ok(Reached::End(Outcome::Bounded(Bound::States)));
            }
            Entry::Vacant(place) => (*place.insert(number), true),
        };
        self.world.notify_watchers(&Event { taken, to: node, is_new });
        if is_new {
            self.memory.hold(&state);
            self.nodes.push(Node { parent, choice, depth });
        } else if self.explorer.max_depth.is_some() && depth < self.nodes[node as usize].depth {
            // From here, the bound allows more choices than before.
            self.nodes[node as usize] = Node { parent, choice, depth };
        } else {
            return Ok(Reached::Known);
        }
        Ok(Reached::Open(Open { node, state, choices: self.world.choices(), tried: 0 }))
    }

    /// The choices that lead to a state, followed by `last`.
    fn trace(&self, mut node: u32, last: Choice) -> Vec<Choice> {
        let mut trace = vec![last];
        while node != 0 {
            let Node { parent, choice, .. } = self.nodes[node as usize];
            trace.push(choice);
            node = parent;
        }
        trace.reverse();
        trace
    }
}
