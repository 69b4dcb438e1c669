//! A program under exploration: its actors, and the memory that its state consists of.
//!
//! ```text
//! ┌──────────┬──────┬─────────┬─────────┬───
//! │ its heap │ data │ stack 0 │ stack 1 │ …
//! └──────────┴──────┴─────────┴─────────┴───
//! ```

use std::ops::Range;

use pagemark::PAGE_SIZE;

use crate::explorer::{Choice, Event, Fault};
use crate::heap::Heap;
use crate::sys::arena::Arena;
use crate::sys::fiber::{Fiber, Label, Phase, Stopped};
use crate::{Actor, ExploreError, Plain};

/// How much memory a state consists of. What is never written costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Most actors.
    pub actors: usize,
    /// Of each actor's stack, bytes; rounded up to whole pages.
    pub stack_bytes: usize,
    /// What can be allocated in the heap, bytes.
    pub heap_bytes: usize,
    /// What can be placed in the set-up, bytes.
    pub data_bytes: usize,
}

impl Default for Sizes {
    /// Eight actors with stacks of 64 KiB, 64 KiB of heap and of data.
    fn default() -> Self {
        Sizes { actors: 8, stack_bytes: 64 << 10, heap_bytes: 64 << 10, data_bytes: 64 << 10 }
    }
}

impl Sizes {
    fn heap(&self) -> Range<usize> {
        0..Heap::footprint(self.heap_bytes).next_multiple_of(PAGE_SIZE)
    }

    fn data(&self) -> Range<usize> {
        let start = self.heap().end;
        start..start + self.data_bytes.next_multiple_of(PAGE_SIZE)
    }

    fn stack(&self, actor: usize) -> Range<usize> {
        // What the block and the first frames take does not count as the program's.
        let bytes = self.stack_bytes.next_multiple_of(PAGE_SIZE) + PAGE_SIZE;
        let start = self.data().end + actor * bytes;
        start..start + bytes
    }

    /// All of it.
    pub fn total_bytes(&self) -> usize {
        self.stack(self.actors).start.max(PAGE_SIZE)
    }
}

/// A program that is being set up: what it shares, its actors, and what must hold.
///
/// Its whole state must lie in what is placed here, in the heap, and on the actors' stacks. What a program changes elsewhere (in
/// a vector, a static variable, a file) does not go back when the exploration does.
pub struct World<'w> {
    arena: Arena<'w>,
    sizes: Sizes,
    heap: Heap<'w>,
    /// Where there is room for data.
    free_data: Range<usize>,
    fibers: Vec<Fiber<'w>>,
    always: Vec<Property<'w>>,
    at_end: Vec<Property<'w>>,
    watchers: Vec<Watcher<'w>>,
}

type Watcher<'w> = Box<dyn FnMut(&Event) + 'w>;

struct Property<'w> {
    name: &'static str,
    holds: Box<dyn Fn() -> bool + 'w>,
}

impl<'w> World<'w> {
    /// An empty one in an arena of [`Sizes::total_bytes`], which holds zeros.
    pub(crate) fn new(arena: Arena<'w>, sizes: Sizes) -> World<'w> {
        World {
            arena,
            sizes,
            heap: Heap::new(arena, sizes.heap().start, sizes.heap_bytes),
            free_data: sizes.data(),
            fibers: Vec::new(),
            always: Vec::new(),
            at_end: Vec::new(),
            watchers: Vec::new(),
        }
    }

    /// Places data that actors share, for as long as the program exists.
    ///
    /// # Errors
    /// [`ExploreError::DataFull`]
    pub fn place<T: Plain>(&mut self, value: T) -> Result<&'w T, ExploreError> {
        let offset = self.take_data(size_of::<T>(), align_of::<T>())?;
        let left_bytes = self.free_data.len();
        self.arena.put(offset, value).ok_or(ExploreError::DataFull { needed_bytes: size_of::<T>(), left_bytes })
    }

    /// Places so many values side by side; `value` says which.
    ///
    /// # Errors
    /// [`ExploreError::DataFull`]
    pub fn place_all<T: Plain>(
        &mut self,
        count: usize,
        mut value: impl FnMut(usize) -> T,
    ) -> Result<&'w [T], ExploreError> {
        let needed_bytes = size_of::<T>().saturating_mul(count);
        let offset = self.take_data(needed_bytes, align_of::<T>())?;
        for index in 0..count {
            self.arena.put(offset + index * size_of::<T>(), value(index));
        }
        let left_bytes = self.free_data.len();
        self.arena.slice(offset, count).ok_or(ExploreError::DataFull { needed_bytes, left_bytes })
    }

    fn take_data(&mut self, needed_bytes: usize, align: usize) -> Result<usize, ExploreError> {
        // The arena begins at a page, so that offsets are aligned as addresses are.
        let offset = self.free_data.start.next_multiple_of(align.max(8));
        let left_bytes = self.free_data.end.saturating_sub(offset);
        if align > PAGE_SIZE || needed_bytes > left_bytes {
            return Err(ExploreError::DataFull { needed_bytes, left_bytes });
        }
        self.free_data.start = offset + needed_bytes;
        Ok(offset)
    }

    /// The heap from which actors allocate.
    pub fn heap(&self) -> Heap<'w> {
        self.heap
    }

    /// Adds an actor, which runs `run` on a stack of its own. Returns its number; the first has 0.
    ///
    /// What an actor owns when it calls its [`Actor`] must be plain data too: going back does not drop it.
    ///
    /// # Errors
    /// [`ExploreError::TooManyActors`]
    pub fn spawn<F: FnOnce(&Actor<'w>) + Copy + 'w>(&mut self, run: F) -> Result<usize, ExploreError> {
        let number = self.fibers.len();
        if number == self.sizes.actors {
            return Err(ExploreError::TooManyActors { actors: number });
        }
        let begin = move |block| run(&Actor::new(block));
        self.fibers.push(Fiber::new(self.arena, self.sizes.stack(number), number, begin));
        Ok(number)
    }

    /// Says what must hold in each state.
    pub fn always(&mut self, name: &'static str, holds: impl Fn() -> bool + 'w) {
        self.always.push(Property { name, holds: Box::new(holds) });
    }

    /// Says what must hold when all actors have returned.
    pub fn at_end(&mut self, name: &'static str, holds: impl Fn() -> bool + 'w) {
        self.at_end.push(Property { name, holds: Box::new(holds) });
    }

    /// Has `watch` called after each transition, when the memory holds the state that it led to.
    pub fn watch(&mut self, watch: impl FnMut(&Event) + 'w) {
        self.watchers.push(Box::new(watch));
    }

    /// Lets every actor run to where it first waits.
    pub(crate) fn start(&self) -> Result<Option<Fault>, ExploreError> {
        for actor in 0..self.fibers.len() {
            if let Some(fault) = self.resume(Choice { actor: actor as u32, way: 0 })? {
                return Ok(Some(fault));
            }
        }
        Ok(self.fault_of_state())
    }

    /// What can happen now.
    pub(crate) fn choices(&self) -> Vec<Choice> {
        let ways = (0..self.fibers.len()).map(|actor| (actor as u32, self.ways(actor)));
        ways.flat_map(|(actor, ways)| (0..ways).map(move |way| Choice { actor, way: way as u32 })).collect()
    }

    /// In how many ways an actor can go on. 0 for one that there is not.
    pub(crate) fn ways(&self, actor: usize) -> u64 {
        self.fibers.get(actor).filter(|fiber| fiber.phase() == Phase::Waiting).map_or(0, Fiber::ways)
    }

    /// What an actor waits to do.
    pub(crate) fn label(&self, actor: usize) -> Label {
        self.fibers.get(actor).map_or(Label::NONE, Fiber::label)
    }

    /// Does what was chosen. Returns what is wrong with the state then.
    pub(crate) fn go(&self, choice: Choice) -> Result<Option<Fault>, ExploreError> {
        Ok(self.resume(choice)?.or_else(|| self.fault_of_state()))
    }

    /// Tells the watchers.
    pub(crate) fn tell(&mut self, event: &Event) {
        self.watchers.iter_mut().for_each(|watch| watch(event));
    }

    fn resume(&self, choice: Choice) -> Result<Option<Fault>, ExploreError> {
        let actor = choice.actor as usize;
        let fiber = &self.fibers[actor];
        match fiber.resume(choice.way.into()) {
            Ok(()) if fiber.phase() == Phase::Failed => Ok(Some(Fault::Assertion { actor, property: fiber.failure() })),
            Ok(()) => Ok(None),
            Err(Stopped::Panic(words)) => Ok(Some(Fault::Panic { actor, words })),
            Err(Stopped::Overflow) => Err(ExploreError::StackOverflow { actor, stack_bytes: self.sizes.stack_bytes }),
        }
    }

    fn fault_of_state(&self) -> Option<Fault> {
        let broken =
            |properties: &[Property<'w>]| properties.iter().find(|property| !(property.holds)()).map(|it| it.name);
        if let Some(property) = broken(&self.always) {
            return Some(Fault::Property { property });
        }
        let waiting: Vec<usize> =
            (0..self.fibers.len()).filter(|&actor| self.fibers[actor].phase() == Phase::Waiting).collect();
        if waiting.is_empty() {
            return broken(&self.at_end).map(|property| Fault::Property { property });
        }
        if waiting.iter().any(|&actor| self.ways(actor) > 0) {
            return None;
        }
        Some(Fault::Deadlock { waiting: waiting.into_iter().map(|actor| (actor, self.label(actor))).collect() })
    }
}
