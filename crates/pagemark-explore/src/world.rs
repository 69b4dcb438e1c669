//! A program under exploration: its actors, and the memory that its state consists of.
//!
//! ```text
//! ┌──────────┬──────┬─────────┬─────────┬───
//! │ its heap │ data │ stack 0 │ stack 1 │ …
//! └──────────┴──────┴─────────┴─────────┴───
//! ```

use std::ops::Range;

use pagemark::PAGE_SIZE;

use crate::heap::Heap;
use crate::sys::arena::Arena;
use crate::sys::fiber::{Fiber, Label, Phase, Stopped};
use crate::trace::{Choice, Event, Fault};
use crate::{Actor, Error, Plain};

/// The sizes of the memory of a state. Memory that is never written costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Maximum number of actors.
    pub actors: usize,
    /// Bytes of each actor's stack, rounded up to whole pages.
    pub stack_bytes: usize,
    /// Bytes that can be allocated in the heap.
    pub heap_bytes: usize,
    /// Bytes that can be placed during set-up.
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
        // The control block and the first frames take one page, which the size does not include.
        let bytes = self.stack_bytes.next_multiple_of(PAGE_SIZE) + PAGE_SIZE;
        let start = self.data().end + actor * bytes;
        start..start + bytes
    }

    /// Bytes of the whole state.
    pub fn total_bytes(&self) -> usize {
        self.stack(self.actors).start.max(PAGE_SIZE)
    }
}

/// A program that is being set up: its shared data, its actors and its properties.
///
/// Its whole state must be in the data that is placed here, in the heap, and on the stacks of the
/// actors. The explorer does not restore other memory, or files, that the program changes (a
/// vector, a static variable).
pub struct World<'w> {
    arena: Arena<'w>,
    sizes: Sizes,
    heap: Heap<'w>,
    /// Offsets in the arena that are free for data.
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
    /// An empty program in an arena of [`Sizes::total_bytes`], which holds zeros.
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
    /// [`ErrorKind::DataFull`](crate::ErrorKind::DataFull)
    pub fn place<T: Plain>(&mut self, value: T) -> Result<&'w T, Error> {
        let offset = self.take_data(size_of::<T>(), align_of::<T>())?;
        let left_bytes = self.free_data.len();
        self.arena.put(offset, value).ok_or(Error::data_full(size_of::<T>(), left_bytes))
    }

    /// Places `count` values side by side; `value` returns each by its index.
    ///
    /// # Errors
    /// [`ErrorKind::DataFull`](crate::ErrorKind::DataFull)
    pub fn place_all<T: Plain>(&mut self, count: usize, mut value: impl FnMut(usize) -> T) -> Result<&'w [T], Error> {
        let needed_bytes = size_of::<T>().saturating_mul(count);
        let offset = self.take_data(needed_bytes, align_of::<T>())?;
        for index in 0..count {
            self.arena.put(offset + index * size_of::<T>(), value(index));
        }
        let left_bytes = self.free_data.len();
        self.arena.slice(offset, count).ok_or(Error::data_full(needed_bytes, left_bytes))
    }

    fn take_data(&mut self, needed_bytes: usize, align: usize) -> Result<usize, Error> {
        // The arena begins at a page, so an aligned offset is an aligned address.
        let offset = self.free_data.start.next_multiple_of(align.max(8));
        let left_bytes = self.free_data.end.saturating_sub(offset);
        if align > PAGE_SIZE || needed_bytes > left_bytes {
            return Err(Error::data_full(needed_bytes, left_bytes));
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
    /// ```
    /// # use pagemark_explore::Explorer;
    /// let found = Explorer::default().explore(|world| {
    ///     // SAFETY: the actor holds nothing across its step.
    ///     unsafe { world.spawn(|actor| actor.step("waits"))? };
    ///     Ok(())
    /// })?;
    /// assert_eq!(found.states, 2);
    /// # Ok::<(), pagemark_explore::Error>(())
    /// ```
    ///
    /// Safe code cannot spawn an actor, because a value with a destructor that is held across a
    /// step would be dropped once in each state that continues from there:
    ///
    /// ```compile_fail,E0133
    /// # use pagemark_explore::Explorer;
    /// Explorer::default().explore(|world| {
    ///     world.spawn(|actor| {
    ///         let held = vec![1];
    ///         actor.step("waits");
    ///         drop(held);
    ///     })?;
    ///     Ok(())
    /// });
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::TooManyActors`](crate::ErrorKind::TooManyActors)
    ///
    /// # Safety
    /// Whenever `run` calls its [`Actor`], also through other types of this crate, everything that
    /// its stack frames hold is plain data: values without a destructor, references into the arena
    /// and the stack itself, and shared references to memory that lives as long as the world and is
    /// not changed. In particular they hold no box, vector, string, lock guard or open file. The
    /// explorer suspends a frame once and continues it any number of times, or never.
    pub unsafe fn spawn<F: FnOnce(&Actor<'w>) + Copy + 'w>(&mut self, run: F) -> Result<usize, Error> {
        let number = self.fibers.len();
        if number == self.sizes.actors {
            return Err(Error::too_many_actors(number));
        }
        let begin = move |block| run(&Actor::new(block));
        self.fibers.push(Fiber::new(self.arena, self.sizes.stack(number), number, begin));
        Ok(number)
    }

    /// Adds a property that must hold in each state.
    pub fn always(&mut self, name: &'static str, holds: impl Fn() -> bool + 'w) {
        self.always.push(Property { name, holds: Box::new(holds) });
    }

    /// Adds a property that must hold when all actors have returned.
    pub fn at_end(&mut self, name: &'static str, holds: impl Fn() -> bool + 'w) {
        self.at_end.push(Property { name, holds: Box::new(holds) });
    }

    /// Calls `watch` after each transition, while the memory holds the new state.
    pub fn watch(&mut self, watch: impl FnMut(&Event) + 'w) {
        self.watchers.push(Box::new(watch));
    }

    /// Runs every actor until it waits for the first time.
    pub(crate) fn start(&self) -> Result<Option<Fault>, Error> {
        for actor in 0..self.fibers.len() {
            if let Some(fault) = self.resume(Choice { actor: actor as u32, way: 0 })? {
                return Ok(Some(fault));
            }
        }
        Ok(self.fault_of_state())
    }

    /// The choices of the present state.
    pub(crate) fn choices(&self) -> Vec<Choice> {
        let ways = (0..self.fibers.len()).map(|actor| (actor as u32, self.ways(actor)));
        ways.flat_map(|(actor, ways)| (0..ways).map(move |way| Choice { actor, way: way as u32 })).collect()
    }

    /// The number of ways in which an actor can continue; 0 if there is no such actor.
    pub(crate) fn ways(&self, actor: usize) -> u64 {
        self.fibers.get(actor).filter(|fiber| fiber.phase() == Phase::Waiting).map_or(0, Fiber::ways)
    }

    /// The operation that an actor waits for.
    pub(crate) fn label(&self, actor: usize) -> Label {
        self.fibers.get(actor).map_or(Label::NONE, Fiber::label)
    }

    /// Takes a choice. Returns the fault of the state that it leads to.
    pub(crate) fn take(&self, choice: Choice) -> Result<Option<Fault>, Error> {
        Ok(self.resume(choice)?.or_else(|| self.fault_of_state()))
    }

    /// Reports a transition to the watchers.
    pub(crate) fn notify_watchers(&mut self, event: &Event) {
        self.watchers.iter_mut().for_each(|watch| watch(event));
    }

    fn resume(&self, choice: Choice) -> Result<Option<Fault>, Error> {
        let actor = choice.actor as usize;
        let fiber = &self.fibers[actor];
        match fiber.resume(choice.way.into()) {
            Ok(()) if fiber.phase() == Phase::Failed => Ok(Some(Fault::Assertion { actor, property: fiber.failure() })),
            Ok(()) => Ok(None),
            Err(Stopped::Panic(words)) => Ok(Some(Fault::Panic { actor, words })),
            Err(Stopped::Overflow) => Err(Error::stack_overflow(actor, self.sizes.stack_bytes)),
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
