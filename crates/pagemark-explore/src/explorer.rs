//! Explicit-state exploration: take a state, try each choice, go back, and recognise what was visited.

use std::collections::{HashMap, VecDeque, hash_map::Entry};
use std::fmt;

use pagemark::PAGE_SIZE;

use crate::keeper::{Keeper, State};
use crate::sys::alternate_stack::AlternateStack;
use crate::sys::arena::Arena;
use crate::sys::fiber::Label;
use crate::{ExploreError, Keep, Sizes, World};

/// In which order states are visited.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Order {
    /// The last found first: needs the least memory besides the states.
    #[default]
    DepthFirst,
    /// The first found first: what is wrong is found by a shortest trace.
    BreadthFirst,
}

/// How a program is explored, and how far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Explorer {
    /// How much memory the program has.
    pub sizes: Sizes,
    /// How states are held.
    pub keep: Keep,
    /// Bytes of a chunk of a snapshot, a power of two from 256 to 65 536.
    pub chunk_bytes: usize,
    /// Which state comes next.
    pub order: Order,
    /// Longest trace; states that need more choices are not visited.
    pub most_depth: Option<u32>,
    /// Most states.
    pub most_states: Option<u64>,
    /// Most bytes that all states may take. Snapshots are compressed before it is reached.
    pub budget_bytes: Option<u64>,
}

impl Default for Explorer {
    /// Depth-first without bounds, snapshots in chunks of a page, tracked as serves best.
    fn default() -> Self {
        Explorer {
            sizes: Sizes::default(),
            keep: Keep::Snapshots(None),
            chunk_bytes: PAGE_SIZE,
            order: Order::DepthFirst,
            most_depth: None,
            most_states: None,
            budget_bytes: None,
        }
    }
}

/// One thing that can happen in a state: an actor goes on, in one of its ways.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Choice {
    /// Which actor.
    pub actor: u32,
    /// Which of its ways, from 0.
    pub way: u32,
}

/// What is wrong with a state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// An actor asserted what does not hold.
    Assertion {
        /// Which one.
        actor: usize,
        /// What.
        property: &'static str,
    },
    /// An actor panicked.
    Panic {
        /// Which one.
        actor: usize,
        /// What it said.
        words: String,
    },
    /// A property of the program does not hold.
    Property {
        /// Which one.
        property: &'static str,
    },
    /// Some actors wait, and none can go on.
    Deadlock {
        /// Who waits, and for what.
        waiting: Vec<(usize, Label)>,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Assertion { actor, property } => write!(f, "actor {actor} finds that it does not hold: {property}"),
            Fault::Panic { actor, words } => write!(f, "actor {actor} panics: {words}"),
            Fault::Property { property } => write!(f, "it does not hold: {property}"),
            Fault::Deadlock { waiting } => {
                f.write_str("nobody can go on:")?;
                waiting.iter().try_for_each(|(actor, label)| write!(f, " actor {actor} {label};"))
            }
        }
    }
}

/// A transition, for [`World::watch`]. States have numbers, in the order in which they were found; the initial one is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The state before, and what was chosen there. None for the initial state.
    pub taken: Option<(u32, Choice)>,
    /// The state that this led to.
    pub to: u32,
    /// True if it was not visited before.
    pub is_new: bool,
}

/// How an exploration ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Every state was visited, and nothing is wrong with any.
    Exhausted,
    /// Something is wrong with a state.
    Found {
        /// What.
        fault: Fault,
        /// The choices that lead to it from the initial state.
        trace: Vec<Choice>,
    },
    /// A bound was reached. Nothing is wrong with the states that were visited.
    Bounded(Bound),
}

/// Which bound was reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// [`Explorer::most_depth`]: every state within it was visited.
    Depth,
    /// [`Explorer::most_states`]
    States,
    /// [`Explorer::budget_bytes`]
    Memory,
}

/// What an exploration found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exploration {
    /// How it ended.
    pub outcome: Outcome,
    /// Different states.
    pub states: u64,
    /// Choices that were tried.
    pub transitions: u64,
    /// Choices that lead to the deepest state, by the shortest traces that were found.
    pub depth: u32,
    /// Bytes that the states took.
    pub held_bytes: u64,
}

/// A step of a trace, in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// What was chosen.
    pub choice: Choice,
    /// Among how many ways of that actor.
    pub ways: u64,
    /// What the actor did.
    pub label: Label,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "actor {} {}", self.choice.actor, self.label)?;
        if self.ways > 1 { write!(f, " (way {} of {})", self.choice.way + 1, self.ways) } else { Ok(()) }
    }
}

impl Explorer {
    /// Visits the states that a program can get into.
    ///
    /// `program` sets it up: it places what is shared, spawns actors, and says what must hold. From then on everything is
    /// determined by the choices, and so is what is found, whatever holds the states.
    ///
    /// # Errors
    /// What `program` returns; [`ExploreError::Region`], [`ExploreError::StackOverflow`].
    pub fn explore(
        &self,
        program: impl for<'w> FnOnce(&mut World<'w>) -> Result<(), ExploreError>,
    ) -> Result<Exploration, ExploreError> {
        let keeper = Keeper::new(self.keep, self.sizes.total_bytes(), self.chunk_bytes, self.budget_bytes)?;
        let _handlers = AlternateStack::ensure().map_err(ExploreError::system("making a stack for signal handlers"))?;
        // SAFETY: the keeper holds the memory longer than the world, which begins below and ends within this call; it changes
        // the memory only when it is asked to, which is while no fiber runs.
        let arena = unsafe { Arena::new(keeper.memory()?) };
        let mut world = World::new(arena, self.sizes);
        program(&mut world)?;
        Search { explorer: self, world, keeper, visited: HashMap::new(), nodes: Vec::new(), transitions: 0 }.run()
    }

    /// Follows a trace from the initial state, without any snapshot. Returns its steps, and what is wrong with the state at its end,
    /// or at the first one before it with which something is.
    ///
    /// # Errors
    /// As [`Explorer::explore`], and [`ExploreError::TraceDiffers`].
    pub fn replay(
        &self,
        program: impl for<'w> FnOnce(&mut World<'w>) -> Result<(), ExploreError>,
        trace: &[Choice],
    ) -> Result<(Vec<Step>, Option<Fault>), ExploreError> {
        let keeper = Keeper::new(Keep::Copies, self.sizes.total_bytes(), self.chunk_bytes, None)?;
        let _handlers = AlternateStack::ensure().map_err(ExploreError::system("making a stack for signal handlers"))?;
        // SAFETY: as above.
        let arena = unsafe { Arena::new(keeper.memory()?) };
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
                return Err(ExploreError::TraceDiffers { step, actor, ways });
            }
            steps.push(Step { choice, ways, label });
            fault = world.go(choice)?;
        }
        Ok((steps, fault))
    }
}

/// How a state was found, at its number.
struct Node {
    parent: u32,
    choice: Choice,
    depth: u32,
}

/// A state with choices that are still to be tried.
struct Open {
    node: u32,
    state: State,
    choices: Vec<Choice>,
    tried: usize,
}

struct Search<'w, 'e> {
    explorer: &'e Explorer,
    // Before the keeper, so that it is dropped first.
    world: World<'w>,
    keeper: Keeper,
    visited: HashMap<State, u32>,
    nodes: Vec<Node>,
    transitions: u64,
}

/// What a transition led to.
enum Reached {
    /// A state to go on from: new, or found by a shorter trace than before.
    Open(Open),
    /// A state that was visited.
    Known,
    /// The end of the exploration.
    End(Outcome),
}

impl Search<'_, '_> {
    fn run(mut self) -> Result<Exploration, ExploreError> {
        let outcome = self.search()?;
        Ok(Exploration {
            outcome,
            states: self.nodes.len() as u64,
            transitions: self.transitions,
            depth: self.nodes.iter().map(|node| node.depth).max().unwrap_or(0),
            held_bytes: self.keeper.held_bytes(),
        })
    }

    fn search(&mut self) -> Result<Outcome, ExploreError> {
        let fault = self.world.start()?;
        let mut open = VecDeque::new();
        // The state that the memory holds.
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
            let is_cut = self.explorer.most_depth.is_some_and(|most_depth| depth >= most_depth);
            let Some(&choice) = current.choices.get(current.tried).filter(|_| !is_cut) else {
                was_cut |= is_cut && !current.choices.is_empty();
                open.remove(index);
                continue;
            };
            current.tried += 1;
            if at != current.node {
                self.keeper.restore(&current.state)?;
            }
            let from = current.node;
            let fault = self.world.go(choice)?;
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

    /// Which of the open states comes next.
    fn next(&self, open: &VecDeque<Open>) -> Option<usize> {
        match self.explorer.order {
            Order::DepthFirst => open.len().checked_sub(1),
            Order::BreadthFirst => (!open.is_empty()).then_some(0),
        }
    }

    /// Takes note of the state that the memory holds.
    fn reach(&mut self, taken: Option<(u32, Choice)>, fault: Option<Fault>) -> Result<Reached, ExploreError> {
        if let Some(fault) = fault {
            let trace = taken.map_or_else(Vec::new, |(from, choice)| self.trace(from, choice));
            return Ok(Reached::End(Outcome::Found { fault, trace }));
        }
        let depth = taken.map_or(0, |(from, _)| self.nodes[from as usize].depth + 1);
        let (parent, choice) = taken.unwrap_or_default();
        let Some(state) = self.keeper.save()? else { return Ok(Reached::End(Outcome::Bounded(Bound::Memory))) };
        let number = self.nodes.len() as u32;
        let (node, is_new) = match self.visited.entry(state.clone()) {
            Entry::Occupied(known) => (*known.get(), false),
            Entry::Vacant(_) if self.explorer.most_states.is_some_and(|most| u64::from(number) >= most) => {
                return Ok(Reached::End(Outcome::Bounded(Bound::States)));
            }
            Entry::Vacant(place) => (*place.insert(number), true),
        };
        self.world.tell(&Event { taken, to: node, is_new });
        if is_new {
            self.keeper.hold(&state);
            self.nodes.push(Node { parent, choice, depth });
        } else if self.explorer.most_depth.is_some() && depth < self.nodes[node as usize].depth {
            // From here, the bound allows more than it did.
            self.nodes[node as usize] = Node { parent, choice, depth };
        } else {
            return Ok(Reached::Known);
        }
        Ok(Reached::Open(Open { node, state, choices: self.world.choices(), tried: 0 }))
    }

    /// The choices that lead to a state, and one more.
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
