//! The lock-free queue of Michael and Scott (PODC 1996): a linked list whose head and tail are
//! moved by compare-and-exchange.
//!
//! Nodes are reused. Each pointer therefore carries a count of its changes: without the count, an
//! actor that slept can find the pointer that it saw although the node was freed and allocated
//! again meanwhile (ABA).

use std::cell::Cell;

use super::{Table, scramble};
use crate::{Actor, Atomic, Error, Heap, Plain, Sizes, World};

/// What is wrong with the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// Nothing: as published.
    None,
    /// Pointers are not counted.
    NoCounts,
    /// Who dequeues does not look again whether the head that it read is still the head.
    NoSecondLook,
}

/// Producers and consumers at a queue. Items are in the heap; who takes one checks it and frees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queue {
    /// What is wrong with it.
    pub flaw: Flaw,
    /// Actors that put items in.
    pub producers: usize,
    /// Items that each puts in.
    pub items: usize,
    /// Actors that take items out.
    pub consumers: usize,
    /// How often each tries to.
    pub tries: usize,
    /// Data that is only read, bytes.
    pub table_bytes: usize,
}

/// A node, in a pool: what was a node stays one, so that who comes late reads no nonsense.
#[repr(C)]
struct Node {
    value: Atomic,
    next: Atomic,
}

// SAFETY: two numbers in cells, side by side.
unsafe impl Plain for Node {}

/// What is put in: a number, and what must go with it.
type Item = [Cell<u64>; 16];

/// A pointer to a node and its count, in a word. Node 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Counted {
    node: u32,
    count: u32,
}

impl Counted {
    fn of(word: u64) -> Counted {
        Counted { node: word as u32, count: (word >> 32) as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.node) | u64::from(self.count) << 32
    }
}

/// The queue itself, where the actors find it.
#[derive(Clone, Copy)]
struct List<'w> {
    flaw: Flaw,
    head: &'w Atomic,
    tail: &'w Atomic,
    nodes: &'w [Node],
    /// A bit for each node that is in use.
    used: &'w Cell<u64>,
}

impl<'w> List<'w> {
    fn new(world: &mut World<'w>, flaw: Flaw, nodes: usize) -> Result<List<'w>, Error> {
        let first = Counted { node: 1, count: 0 }.word();
        Ok(List {
            flaw,
            head: world.place(Atomic::new(first))?,
            tail: world.place(Atomic::new(first))?,
            nodes: world.place_all(nodes, |_| Node { value: Atomic::new(0), next: Atomic::new(0) })?,
            used: world.place(Cell::new(1))?,
        })
    }

    fn node(self, pointer: Counted) -> &'w Node {
        &self.nodes[pointer.node as usize - 1]
    }

    /// A pointer that replaces `old`.
    fn instead_of(self, old: Counted, node: u32) -> u64 {
        let count = if self.flaw == Flaw::NoCounts { 0 } else { old.count + 1 };
        Counted { node, count }.word()
    }

    fn take_node(self, actor: &Actor<'w>) -> u32 {
        actor.step("takes a node");
        let free = self.used.get().trailing_ones();
        actor.assert((free as usize) < self.nodes.len(), "there are nodes enough");
        self.used.set(self.used.get() | 1 << free);
        free + 1
    }

    fn give_node_back(self, actor: &Actor<'w>, node: u32) {
        actor.step("gives a node back");
        actor.assert(self.used.get() >> (node - 1) & 1 == 1, "a node is given back once");
        self.used.set(self.used.get() & !(1 << (node - 1)));
    }

    fn enqueue(self, actor: &Actor<'w>, value: u64) {
        let node = self.take_node(actor);
        let taken = &self.nodes[node as usize - 1];
        taken.value.set(value);
        // The count stays: who read the pointer when the node was another one must not find it
        // again.
        taken.next.set(Counted { node: 0, ..Counted::of(taken.next.get()) }.word());
        let tail = loop {
            let tail = Counted::of(self.tail.load(actor, "the tail"));
            let next = Counted::of(self.node(tail).next.load(actor, "the tail's next"));
            if Counted::of(self.tail.load(actor, "the tail again")) != tail {
                continue;
            }
            if next.node != 0 {
                let moved = self.instead_of(tail, next.node);
                self.tail.compare_exchange(actor, "the tail that lags", tail.word(), moved);
                continue;
            }
            let linked = self.instead_of(next, node);
            if self.node(tail).next.compare_exchange(actor, "the tail's next", next.word(), linked) {
                break tail;
            }
        };
        self.tail.compare_exchange(actor, "the tail", tail.word(), self.instead_of(tail, node));
    }

    fn dequeue(self, actor: &Actor<'w>) -> Option<u64> {
        loop {
            let head = Counted::of(self.head.load(actor, "the head"));
            let tail = Counted::of(self.tail.load(actor, "the tail"));
            let next = Counted::of(self.node(head).next.load(actor, "the head's next"));
            let looks_again = self.flaw != Flaw::NoSecondLook;
            if looks_again && Counted::of(self.head.load(actor, "the head again")) != head {
                continue;
            }
            if head.node == tail.node {
                if next.node == 0 {
                    return None;
                }
                let moved = self.instead_of(tail, next.node);
                self.tail.compare_exchange(actor, "the tail that lags", tail.word(), moved);
                continue;
            }
            actor.assert(next.node != 0, "before the tail, each node has a next");
            let value = self.node(next).value.load(actor, "the value");
            if self.head.compare_exchange(actor, "the head", head.word(), self.instead_of(head, next.node)) {
                self.give_node_back(actor, head.node);
                return Some(value);
            }
        }
    }

    /// What is in the queue, for whoever is alone.
    fn values(self) -> Vec<u64> {
        let mut values = Vec::new();
        let mut next = Counted::of(self.node(Counted::of(self.head.get())).next.get());
        while next.node != 0 && values.len() < self.nodes.len() {
            values.push(self.node(next).value.get());
            next = Counted::of(self.node(next).next.get());
        }
        values
    }
}

impl Queue {
    /// How much memory it takes.
    pub fn sizes(&self) -> Sizes {
        Sizes {
            actors: self.producers + self.consumers,
            heap_bytes: (self.total() + 1) * size_of::<Item>(),
            data_bytes: self.table_bytes + (64 << 10),
            ..Sizes::default()
        }
    }

    fn total(&self) -> usize {
        self.producers * self.items
    }

    /// Sets the program up.
    ///
    /// # Errors
    /// The sizes are not [`Queue::sizes`].
    pub fn set_up<'w>(&self, world: &mut World<'w>) -> Result<(), Error> {
        let Queue { producers, items, tries, .. } = *self;
        let list = List::new(world, self.flaw, self.total() + 1)?;
        let table = Table::new(world, self.table_bytes)?;
        let taken = world.place_all(self.total(), |_| Cell::new(0u64))?;
        let heap = world.heap();
        for producer in 0..producers {
            let run = move |actor: &Actor<'w>| {
                for number in 0..items {
                    let item = make(actor, heap, &table, (producer * items + number) as u64);
                    list.enqueue(actor, item);
                }
            };
            // SAFETY: across its steps the producer holds numbers and references to placed data.
            unsafe { world.spawn(run)? };
        }
        for _ in 0..self.consumers {
            let last = world.place_all(producers, |_| Cell::new(0u64))?;
            let consumer = Consumer { heap, table, taken, last, items };
            let run = move |actor: &Actor<'w>| {
                for _ in 0..tries {
                    if let Some(item) = list.dequeue(actor) {
                        consumer.take(actor, item);
                    }
                }
            };
            // SAFETY: as for the producers.
            unsafe { world.spawn(run)? };
        }
        world.at_end("each item was taken, or is in the queue", move || {
            let left = list.values();
            let is_left = |number: usize| {
                left.iter()
                    .filter(|&&item| heap.get::<Item>(item).is_some_and(|item| item[0].get() == number as u64))
                    .count()
            };
            taken.iter().enumerate().all(|(number, taken)| taken.get() as usize + is_left(number) == 1)
        });
        Ok(())
    }
}

fn make(actor: &Actor<'_>, heap: Heap<'_>, table: &Table<'_>, number: u64) -> u64 {
    let address = heap.allocate::<Item>().unwrap_or(0);
    let item = heap.get::<Item>(address);
    actor.assert(item.is_some(), "there is room for an item");
    if let Some([own, rest @ ..]) = item {
        own.set(number);
        rest.iter().enumerate().for_each(|(index, word)| word.set(content(table, number, index)));
    }
    address
}

/// Where a consumer keeps its account of what it took.
#[derive(Clone, Copy)]
struct Consumer<'w> {
    heap: Heap<'w>,
    table: Table<'w>,
    /// For each item, whether anybody took it.
    taken: &'w [Cell<u64>],
    /// For each producer, how many of its items were put in up to the last one that this consumer
    /// took.
    last: &'w [Cell<u64>],
    /// Of each producer.
    items: usize,
}

impl<'w> Consumer<'w> {
    fn take(self, actor: &Actor<'w>, address: u64) {
        let whole = self.heap.get::<Item>(address).filter(|[own, rest @ ..]| {
            rest.iter().enumerate().all(|(index, word)| word.get() == content(&self.table, own.get(), index))
        });
        actor.assert(whole.is_some(), "what is taken is a whole item");
        let number = whole.map_or(0, |item| item[0].get()) as usize;
        actor.assert(self.taken[number].replace(1) == 0, "an item is taken once");
        let place = (number % self.items + 1) as u64;
        let before = self.last[number / self.items].replace(place);
        actor.assert(before < place, "a producer's items come in their order");
        actor.assert(self.heap.free::<Item>(address).is_ok(), "an item is freed once");
    }
}

fn content(table: &Table<'_>, number: u64, index: usize) -> u64 {
    table.look_up(scramble(number) ^ index as u64)
}
