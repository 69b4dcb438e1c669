//! Messages between actors, as in MPI: ordered between two actors, in any order between more.

use std::cell::Cell;

use crate::sys::fiber::Label;
use crate::{Actor, Error, World};

/// The sender of a message that is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// The actor with this number.
    Actor(usize),
    /// Any actor: each actor that has sent a message leads to a state of its own.
    Any,
}

/// Mailboxes, one for each ordered pair of actors, each with the same capacity. Copies are the same
/// network.
///
/// A mailbox holds its messages from its beginning on, and zeros behind them, so that equal states
/// have equal bytes.
#[derive(Clone, Copy, Debug)]
pub struct Network<'w> {
    actors: usize,
    room: usize,
    /// At `to * actors + from`.
    counts: &'w [Cell<u64>],
    messages: &'w [Cell<u64>],
}

impl<'w> Network<'w> {
    /// A network of `actors` actors, with room for `room` messages from each actor to each. A
    /// sender waits for room.
    ///
    /// # Errors
    /// [`ErrorKind::DataFull`](crate::ErrorKind::DataFull)
    pub fn new(world: &mut World<'w>, actors: usize, room: usize) -> Result<Network<'w>, Error> {
        let counts = world.place_all(actors * actors, |_| Cell::new(0))?;
        let messages = world.place_all(actors * actors * room, |_| Cell::new(0))?;
        Ok(Network { actors, room, counts, messages })
    }

    /// Waits for room, and sends a message.
    pub fn send(self, actor: &Actor<'w>, to: usize, message: u64) {
        let pair = self.pair(actor.number(), to);
        let count = &self.counts[pair];
        actor.wait_for(Label { verb: "sends", object: name(to) }, || u64::from((count.get() as usize) < self.room));
        self.messages[pair * self.room + count.get() as usize].set(message);
        count.set(count.get() + 1);
    }

    /// Waits for a message and receives it. Returns the number of its sender, and the message.
    pub fn receive(self, actor: &Actor<'w>, from: Sender) -> (usize, u64) {
        let sender = self.choose_sender(actor, "receives", from);
        (sender, self.take(sender, actor.number()))
    }

    /// Waits for a message and returns the number of its sender, without receiving it: MPI's probe.
    pub fn probe(self, actor: &Actor<'w>, from: Sender) -> usize {
        self.choose_sender(actor, "probes", from)
    }

    /// Number of messages that wait in a mailbox.
    pub fn waiting(self, from: usize, to: usize) -> usize {
        self.counts[self.pair(from, to)].get() as usize
    }

    /// The messages that wait in a mailbox, the oldest first.
    pub fn messages(self, from: usize, to: usize) -> impl Iterator<Item = u64> + 'w {
        let first = self.pair(from, to) * self.room;
        self.messages[first..first + self.waiting(from, to)].iter().map(Cell::get)
    }

    fn choose_sender(self, actor: &Actor<'w>, verb: &'static str, from: Sender) -> usize {
        let to = actor.number();
        match from {
            Sender::Actor(sender) => {
                let what = Label { verb, object: name(sender) };
                actor.wait_for(what, || u64::from(self.waiting(sender, to) > 0));
                sender
            }
            Sender::Any => {
                let senders = move || (0..self.actors).filter(move |&from| self.waiting(from, to) > 0);
                let way = actor.wait_for(Label { verb, object: "any actor" }, || senders().count() as u64);
                senders().nth(way as usize).unwrap_or_else(|| unreachable!("only the receiver takes its messages"))
            }
        }
    }

    /// Removes the oldest message.
    fn take(self, from: usize, to: usize) -> u64 {
        let pair = self.pair(from, to);
        let held = &self.messages[pair * self.room..][..self.room];
        let message = held[0].get();
        (1..self.room).for_each(|index| held[index - 1].set(held[index].get()));
        held[self.room - 1].set(0);
        self.counts[pair].set(self.counts[pair].get() - 1);
        message
    }

    fn pair(self, from: usize, to: usize) -> usize {
        assert!(from < self.actors && to < self.actors, "a message from {from} to {to} among {}", self.actors);
        to * self.actors + from
    }
}

/// The name of an actor in traces.
fn name(actor: usize) -> &'static str {
    const NAMES: [&str; 8] = ["actor 0", "actor 1", "actor 2", "actor 3", "actor 4", "actor 5", "actor 6", "actor 7"];
    NAMES.get(actor).unwrap_or(&"another actor")
}
