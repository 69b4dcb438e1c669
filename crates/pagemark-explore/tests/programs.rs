//! The example programs: messages, compared with a model without memory, and the queue with and
//! without its errors.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::rc::Rc;

use pagemark_explore::programs::{Flaw, Messages, Pattern, Queue};
use pagemark_explore::{Bound, Exploration, Explorer, Fault, Order, Outcome, StateForm};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

/// The next act of a process of the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Act {
    Send(usize, u64),
    ReceiveFrom(usize),
    ReceiveFromAnybody,
    Probe,
    ReceiveProbed,
    AnswerProbed,
}

/// A state of the model.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
struct Model {
    next: Vec<usize>,
    /// The received messages of each process, in no order.
    received: Vec<BTreeSet<u64>>,
    probed: Vec<Option<usize>>,
    /// The last message of a probed sender, until it is answered.
    asked: Vec<Option<u64>>,
    /// At `to * processes + from`.
    boxes: Vec<VecDeque<u64>>,
}

/// The observable part of a state.
type Seen = (Vec<u64>, Vec<Vec<u64>>);

/// Transitions: the observation before, the process of the step, and the observation after.
type Edges = HashSet<(Seen, u32, Seen)>;

impl Model {
    fn seen(&self) -> Seen {
        let counts = self.received.iter().map(|received| received.len() as u64).collect();
        (counts, self.boxes.iter().map(|waiting| waiting.iter().copied().collect()).collect())
    }
}

/// The processes' acts, from the program's description.
fn scripts(program: &Messages) -> Vec<Vec<Act>> {
    let (processes, rounds) = (program.processes, program.rounds);
    let script = |own: usize| -> Vec<Act> {
        let round = |round: usize| match program.pattern {
            Pattern::SendReceive => vec![
                Act::Send((own + 1) % processes, Messages::message(own, round)),
                Act::ReceiveFrom((own + processes - 1) % processes),
            ],
            Pattern::Probe if own == 0 => [Act::Probe, Act::ReceiveProbed, Act::AnswerProbed].repeat(processes - 1),
            Pattern::Probe => vec![Act::Send(0, Messages::message(own, round)), Act::ReceiveFrom(0)],
            Pattern::SendAll => {
                let others = (1..processes).map(|distance| (own + distance) % processes);
                let sends = others.map(|other| Act::Send(other, Messages::message(own, round)));
                sends.chain(std::iter::repeat_n(Act::ReceiveFromAnybody, processes - 1)).collect()
            }
        };
        (0..rounds).flat_map(round).collect()
    };
    (0..processes).map(script).collect()
}

/// The states that follow from each possible step of a process.
fn successors(program: &Messages, scripts: &[Vec<Act>], state: &Model, own: usize) -> Vec<Model> {
    let processes = program.processes;
    let Some(&act) = scripts[own].get(state.next[own]) else { return Vec::new() };
    let mut after = state.clone();
    after.next[own] += 1;
    let has_room = |to: usize| state.boxes[to * processes + own].len() < Messages::ROOM;
    let senders = || (0..processes).filter(|from| !state.boxes[own * processes + from].is_empty());
    let receive = |from: usize| {
        let mut after = after.clone();
        let message = after.boxes[own * processes + from].pop_front()?;
        after.received[own].insert(message);
        Some((after, message))
    };
    match act {
        Act::Send(to, message) if has_room(to) => {
            after.boxes[to * processes + own].push_back(message);
            vec![after]
        }
        Act::Send(..) => Vec::new(),
        Act::ReceiveFrom(from) => receive(from).map(|(after, _)| after).into_iter().collect(),
        Act::ReceiveFromAnybody => senders().filter_map(receive).map(|(after, _)| after).collect(),
        Act::Probe => senders()
            .map(|from| {
                let mut after = after.clone();
                after.probed[own] = Some(from);
                after
            })
            .collect(),
        Act::ReceiveProbed => {
            let received = receive(state.probed[own].unwrap());
            let asked = received.map(|(mut after, message)| {
                after.asked[own] = Some(message);
                after
            });
            asked.into_iter().collect()
        }
        Act::AnswerProbed => {
            let (to, asked) = (state.probed[own].unwrap(), state.asked[own].unwrap());
            if !has_room(to) {
                return Vec::new();
            }
            let round = (0..program.rounds).find(|&round| Messages::message(to, round) == asked).unwrap();
            after.boxes[to * processes + own].push_back(Messages::message(0, round));
            (after.probed[own], after.asked[own]) = (None, None);
            vec![after]
        }
    }
}

/// All reachable states of the model, their observations, and those of the transitions.
fn all_of_model(program: &Messages) -> (usize, u64, BTreeSet<Seen>, Edges) {
    let (processes, scripts) = (program.processes, scripts(program));
    let first = Model {
        next: vec![0; processes],
        received: vec![BTreeSet::new(); processes],
        probed: vec![None; processes],
        asked: vec![None; processes],
        boxes: vec![VecDeque::new(); processes * processes],
    };
    let (mut visited, mut open) = (HashSet::from([first.clone()]), vec![first]);
    let (mut transitions, mut edges) = (0, HashSet::new());
    while let Some(state) = open.pop() {
        for own in 0..processes {
            for after in successors(program, &scripts, &state, own) {
                transitions += 1;
                edges.insert((state.seen(), own as u32, after.seen()));
                if visited.insert(after.clone()) {
                    open.push(after);
                }
            }
        }
    }
    (visited.len(), transitions, visited.iter().map(Model::seen).collect(), edges)
}

fn explore(program: &Messages, order: Order, state_form: StateForm) -> Exploration {
    let explorer = Explorer { sizes: program.sizes(), order, state_form, ..Explorer::default() };
    explorer.explore(|world| program.set_up(world).map(drop)).unwrap()
}

const MESSAGES: [Messages; 6] = {
    const fn of(pattern: Pattern, processes: usize, rounds: usize) -> Messages {
        Messages { pattern, processes, rounds, vector_words: 100, table_bytes: 8192 }
    }
    [
        of(Pattern::SendReceive, 3, 2),
        of(Pattern::SendReceive, 4, 3),
        of(Pattern::Probe, 3, 2),
        of(Pattern::Probe, 4, 1),
        of(Pattern::SendAll, 2, 3),
        of(Pattern::SendAll, 3, 1),
    ]
};

#[test]
fn messages_behave_as_the_model_does() {
    for program in MESSAGES {
        let (model_states, model_transitions, model_seen, model_edges) = all_of_model(&program);
        for order in [Order::DepthFirst, Order::BreadthFirst] {
            let seen: Rc<RefCell<HashMap<u32, Seen>>> = Rc::default();
            let edges: Rc<RefCell<Edges>> = Rc::default();
            let explorer = Explorer { sizes: program.sizes(), order, ..Explorer::default() };
            let (watched_seen, watched_edges) = (seen.clone(), edges.clone());
            let found = explorer.explore(move |world| {
                let standing = program.set_up(world)?;
                world.watch(move |event| {
                    let now: Seen = (standing.received(), standing.waiting());
                    let mut seen = watched_seen.borrow_mut();
                    let known = seen.entry(event.to).or_insert_with(|| now.clone());
                    assert_oracle_eq!(*known, now, "what is called the same state is the same");
                    if let Some((from, choice)) = event.taken {
                        watched_edges.borrow_mut().insert((seen[&from].clone(), choice.actor, now));
                    }
                });
                Ok(())
            });
            let found = found.unwrap();
            assert_eq!(found.outcome, Outcome::Exhausted, "{program:?}");
            println!("{program:?}: {} states of memory, {model_states} of the model", found.states);
            let all_seen: BTreeSet<Seen> = seen.borrow().values().cloned().collect();
            assert_oracle!(
                all_seen == model_seen,
                "{program:?}: {} are seen, {} should be",
                all_seen.len(),
                model_seen.len()
            );
            assert_oracle!(*edges.borrow() == model_edges, "{program:?}: transitions differ");
            // Memory can distinguish more states: a stack may hold values that no step will use.
            assert!(found.states as usize >= model_states && found.transitions >= model_transitions, "{program:?}");
            if program.pattern == Pattern::SendReceive {
                assert_eq!((found.states as usize, found.transitions), (model_states, model_transitions));
            }
        }
    }
}

#[test]
fn whatever_holds_the_states_finds_the_same() {
    let program = Messages { pattern: Pattern::SendAll, processes: 3, rounds: 1, vector_words: 512, table_bytes: 8192 };
    let expected = explore(&program, Order::DepthFirst, StateForm::Copies);
    for probe in pagemark::track::probe(pagemark::track::Scope::OwnMemory) {
        let mechanism = probe.mechanism;
        if let Err(reason) = probe.result {
            println!("skipped {mechanism}: {reason}");
            continue;
        }
        for order in [Order::DepthFirst, Order::BreadthFirst] {
            let found = explore(&program, order, StateForm::Snapshots(Some(mechanism)));
            let differing = Exploration { depth: expected.depth, held_bytes: expected.held_bytes, ..found };
            assert_oracle_eq!(differing, expected, "{mechanism}, {order:?}: what was explored");
        }
    }
    for chunk_bytes in [256, 1024, 16384] {
        let explorer = Explorer { sizes: program.sizes(), chunk_bytes, ..Explorer::default() };
        let found = explorer.explore(|world| program.set_up(world).map(drop)).unwrap();
        assert_eq!((found.states, found.transitions), (expected.states, expected.transitions), "{chunk_bytes}");
    }
}

fn queue(flaw: Flaw) -> (Queue, Explorer) {
    let program = Queue { flaw, producers: 1, items: 2, consumers: 2, tries: 2, table_bytes: 4096 };
    (program, Explorer { sizes: program.sizes(), ..Explorer::default() })
}

#[test]
fn nothing_is_found_in_the_queue_as_published() {
    let (program, explorer) = queue(Flaw::None);
    let depth_first = explorer.explore(|world| program.set_up(world)).unwrap();
    assert_eq!(depth_first.outcome, Outcome::Exhausted);
    let breadth_first = Explorer { order: Order::BreadthFirst, ..explorer };
    let breadth_first = breadth_first.explore(|world| program.set_up(world)).unwrap();
    assert_eq!(breadth_first.outcome, Outcome::Exhausted);
    assert_eq!(
        (depth_first.states, depth_first.transitions),
        (breadth_first.states, breadth_first.transitions),
        "both orders see the same"
    );
}

#[test]
fn the_flaws_of_the_queue_are_found_by_traces_that_lead_to_them() {
    for flaw in [Flaw::NoCounts, Flaw::NoSecondLook] {
        let (program, explorer) = queue(flaw);
        for order in [Order::DepthFirst, Order::BreadthFirst] {
            let explorer = Explorer { order, ..explorer };
            let found = explorer.explore(|world| program.set_up(world)).unwrap();
            let Outcome::Found { fault, trace } = found.outcome else { panic!("{flaw:?} was not found") };
            assert!(matches!(fault, Fault::Assertion { .. }), "{fault}");
            let (steps, again) = explorer.replay(|world| program.set_up(world), &trace).unwrap();
            assert_eq!(again, Some(fault), "the trace leads to what was found");
            assert_eq!(steps.len(), trace.len());
            let (_, before) = explorer.replay(|world| program.set_up(world), &trace[..trace.len() - 1]).unwrap();
            assert_eq!(before, None, "and only its last step does");
            if order == Order::BreadthFirst {
                let bounded = Explorer { max_depth: Some(trace.len() as u32 - 1), ..explorer };
                let found = bounded.explore(|world| program.set_up(world)).unwrap();
                assert_eq!(found.outcome, Outcome::Bounded(Bound::Depth), "no trace is shorter");
            }
        }
    }
}
