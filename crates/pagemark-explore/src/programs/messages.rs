//! Processes that exchange messages, in the three patterns of SPM, "Results".

use std::cell::Cell;

use super::{Table, scramble};
use crate::{Actor, Error, Network, Sender, Sizes, World};

/// Who sends what to whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Each process sends to the next and receives from the previous: point to point (`sendrecv2`).
    SendReceive,
    /// One process probes for a message of any sender, receives it, and answers (`mprobe`).
    Probe,
    /// Each process sends to all others, then receives from any (`sendall`).
    SendAll,
}

/// Processes that exchange vectors. Each adds up what it receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Messages {
    /// Who sends what to whom.
    pub pattern: Pattern,
    /// Number of ways in which the actor can continue.
    pub processes: usize,
    /// How often each does it all.
    pub rounds: usize,
    /// Numbers in a vector.
    pub vector_words: usize,
    /// Data that is only read, bytes.
    pub table_bytes: usize,
}

/// A process's part of the data.
#[derive(Clone, Copy, Debug)]
struct Process<'w> {
    network: Network<'w>,
    table: Table<'w>,
    /// How many messages it received.
    received: &'w Cell<u64>,
    /// The sum of what came: a vector.
    sum: &'w [Cell<u64>],
}

impl Messages {
    /// Messages from one process to another that can wait.
    pub const ROOM: usize = 2;

    /// How much memory it takes.
    pub fn sizes(&self) -> Sizes {
        let vectors = self.processes * (self.vector_words + 1) * 8;
        let boxes = self.processes * self.processes * (1 + Self::ROOM) * 8;
        Sizes {
            actors: self.processes,
            heap_bytes: 0,
            data_bytes: vectors + boxes + self.table_bytes + (64 << 10),
            ..Sizes::default()
        }
    }

    /// The message that a process sends in a round.
    pub fn message(from: usize, round: usize) -> u64 {
        scramble((from * 1000 + round) as u64)
    }

    /// Sets the program up. The result shows after each transition what the processes know.
    ///
    /// # Errors
    /// The sizes are not [`Messages::sizes`].
    pub fn set_up<'w>(&self, world: &mut World<'w>) -> Result<Standing<'w>, Error> {
        let Messages { pattern, processes, rounds, .. } = *self;
        let network = Network::new(world, processes, Self::ROOM)?;
        let table = Table::new(world, self.table_bytes)?;
        let received = world.place_all(processes, |_| Cell::new(0))?;
        let sums = world.place_all(processes * self.vector_words, |_| Cell::new(0))?;
        for (number, received) in received.iter().enumerate() {
            let sum = &sums[number * self.vector_words..][..self.vector_words];
            let process = Process { network, table, received, sum };
            let run = move |actor: &Actor<'w>| match pattern {
                Pattern::SendReceive => process.send_and_receive(actor, processes, rounds),
                Pattern::Probe if number == 0 => process.serve(actor, processes, rounds),
                Pattern::Probe => process.ask(actor, rounds),
                Pattern::SendAll => process.send_to_all(actor, processes, rounds),
            };
            // SAFETY: across its steps the process holds numbers and references to placed data.
            unsafe { world.spawn(run)? };
        }
        let (program, words) = (*self, self.vector_words);
        world.at_end("each has received what was sent to it", move || {
            (0..processes).all(|to| {
                let expected: Vec<u64> = (0..processes).flat_map(|from| program.sent(from, to)).collect();
                let is_sum = |(index, held): (usize, &Cell<u64>)| {
                    let values = expected.iter().map(|&message| entry(&table, message, index));
                    values.fold(0, u64::wrapping_add) == held.get()
                };
                received[to].get() == expected.len() as u64
                    && sums[to * words..][..words].iter().enumerate().all(is_sum)
            })
        });
        Ok(Standing { network, processes, received })
    }

    /// What one sends to another.
    fn sent(&self, from: usize, to: usize) -> Vec<u64> {
        let sends = match self.pattern {
            Pattern::SendReceive => to == (from + 1) % self.processes,
            Pattern::Probe => (from == 0) != (to == 0),
            Pattern::SendAll => from != to,
        };
        (0..self.rounds).filter(|_| sends).map(|round| Self::message(from, round)).collect()
    }
}

/// A number of the vector that a message stands for.
fn entry(table: &Table<'_>, message: u64, index: usize) -> u64 {
    match index % 64 {
        0 => table.look_up(message ^ index as u64),
        _ => message.wrapping_mul(index as u64 | 1),
    }
}

impl<'w> Process<'w> {
    fn send_and_receive(self, actor: &Actor<'w>, processes: usize, rounds: usize) {
        let own = actor.number();
        let before = (own + processes - 1) % processes;
        for round in 0..rounds {
            self.network.send(actor, (own + 1) % processes, Messages::message(own, round));
            let (_, message) = self.network.receive(actor, Sender::Actor(before));
            actor.assert(message == Messages::message(before, round), "messages of a sender come in their order");
            self.add(message);
        }
    }

    fn serve(self, actor: &Actor<'w>, processes: usize, rounds: usize) {
        for _ in 0..(processes - 1) * rounds {
            let sender = self.network.probe(actor, Sender::Any);
            let (_, message) = self.network.receive(actor, Sender::Actor(sender));
            let answered = (0..rounds).find(|&round| message == Messages::message(sender, round));
            actor.assert(answered.is_some(), "what is probed is what is received");
            self.add(message);
            self.network.send(actor, sender, Messages::message(0, answered.unwrap_or(0)));
        }
    }

    fn ask(self, actor: &Actor<'w>, rounds: usize) {
        for round in 0..rounds {
            self.network.send(actor, 0, Messages::message(actor.number(), round));
            let (_, answer) = self.network.receive(actor, Sender::Actor(0));
            actor.assert(answer == Messages::message(0, round), "the answer is that to the question");
            self.add(answer);
        }
    }

    fn send_to_all(self, actor: &Actor<'w>, processes: usize, rounds: usize) {
        let own = actor.number();
        for round in 0..rounds {
            for other in (1..processes).map(|distance| (own + distance) % processes) {
                self.network.send(actor, other, Messages::message(own, round));
            }
            for _ in 1..processes {
                let (_, message) = self.network.receive(actor, Sender::Any);
                self.add(message);
            }
        }
    }

    fn add(self, message: u64) {
        for (index, sum) in self.sum.iter().enumerate() {
            sum.set(sum.get().wrapping_add(entry(&self.table, message, index)));
        }
        self.received.set(self.received.get() + 1);
    }
}

/// How the processes stand, for whoever watches.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'w> {
    network: Network<'w>,
    processes: usize,
    received: &'w [Cell<u64>],
}

impl Standing<'_> {
    /// How many messages each has received.
    pub fn received(&self) -> Vec<u64> {
        self.received.iter().map(Cell::get).collect()
    }

    /// What waits in each box, at `to * processes + from`.
    pub fn waiting(&self) -> Vec<Vec<u64>> {
        let pairs = (0..self.processes).flat_map(|to| (0..self.processes).map(move |from| (from, to)));
        pairs.map(|(from, to)| self.network.messages(from, to).collect()).collect()
    }
}
