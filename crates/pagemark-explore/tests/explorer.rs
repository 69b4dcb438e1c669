//! Compares explorations of random programs with an interpreter that has no model of memory, and
//! tests limits.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use pagemark_explore::{
    Actor, Bound, Choice, Error, ErrorKind, Explorer, Fault, Heap, Label, Network, Order, Outcome, Sender, Sizes,
    StateForm, World,
};
use proptest::prelude::*;

const CELLS: usize = 3;

/// An act of a random program; each act is a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Act {
    /// Adds a number to a cell, modulo 5.
    Add(usize, u64),
    /// Reads a cell.
    Read(usize),
    /// Writes the number that was last read or chosen.
    Write(usize),
    /// Chooses a number below this limit.
    Choose(u64),
    /// Waits until a cell is not zero, then chooses one of that many ways.
    Wait(usize),
}

type Script = [Option<Act>; 4];

/// The position and the number of each actor, and the cells.
type Seen = (Vec<u64>, Vec<u64>, Vec<u64>);

fn ways(act: Act, (_, _, cells): &Seen) -> u64 {
    match act {
        Act::Choose(ways) => ways,
        Act::Wait(cell) => cells[cell],
        _ => 1,
    }
}

fn act(act: Act, way: u64, actor: usize, (next, held, cells): &mut Seen) {
    next[actor] += 1;
    match act {
        Act::Add(cell, number) => cells[cell] = (cells[cell] + number) % 5,
        Act::Read(cell) => held[actor] = cells[cell],
        Act::Write(cell) => cells[cell] = held[actor],
        Act::Choose(_) | Act::Wait(_) => held[actor] = way,
    }
}

/// All states and transitions up to a depth, found by interpreting; and whether a state has no
/// actor that can make a step.
fn interpret(scripts: &[Script], max_depth: u32) -> (BTreeSet<Seen>, HashSet<(Seen, Choice, Seen)>, bool) {
    let first = (vec![0; scripts.len()], vec![0; scripts.len()], vec![0; CELLS]);
    let (mut visited, mut edges) = (BTreeSet::from([first.clone()]), HashSet::new());
    let (mut layer, mut has_deadlock) = (vec![first], false);
    for _ in 0..=max_depth {
        let mut deeper = Vec::new();
        for state in &layer {
            let next_act = |actor: usize| scripts[actor].get(state.0[actor] as usize).copied().flatten();
            let waiting: Vec<_> = (0..scripts.len()).filter_map(|actor| Some((actor, next_act(actor)?))).collect();
            has_deadlock |= !waiting.is_empty() && waiting.iter().all(|&(_, act)| ways(act, state) == 0);
            for (actor, next) in waiting {
                for way in 0..ways(next, state) {
                    let mut after = state.clone();
                    act(next, way, actor, &mut after);
                    deeper.push(after.clone());
                    edges.insert((state.clone(), Choice { actor: actor as u32, way: way as u32 }, after));
                }
            }
        }
        layer = deeper.into_iter().filter(|state| visited.insert(state.clone())).collect();
    }
    (visited, edges, has_deadlock)
}

/// Spawns an actor of these tests, which hold plain data only across their steps.
fn spawn<'w>(world: &mut World<'w>, run: impl FnOnce(&Actor<'w>) + Copy + 'w) -> Result<usize, Error> {
    // SAFETY: the actors hold plain data only across their steps.
    unsafe { world.spawn(run) }
}

/// Sets the same program up as code; returns its observable state.
fn set_up<'w>(world: &mut World<'w>, scripts: &[Script]) -> Result<impl Fn() -> Seen + 'w, Error> {
    let next = world.place_all(scripts.len(), |_| Cell::new(0u64))?;
    let held = world.place_all(scripts.len(), |_| Cell::new(0u64))?;
    let cells = world.place_all(CELLS, |_| Cell::new(0u64))?;
    for &script in scripts {
        spawn(world, move |actor| {
            let own = actor.number();
            for act in script.into_iter().flatten() {
                match act {
                    Act::Add(cell, number) => {
                        actor.step("adds");
                        cells[cell].set((cells[cell].get() + number) % 5);
                    }
                    Act::Read(cell) => {
                        actor.step("reads");
                        held[own].set(cells[cell].get());
                    }
                    Act::Write(cell) => {
                        actor.step("writes");
                        cells[cell].set(held[own].get());
                    }
                    Act::Choose(ways) => held[own].set(actor.choose("chooses", ways)),
                    Act::Wait(cell) => {
                        let what = Label { verb: "waits", object: "" };
                        held[own].set(actor.wait_for(what, || cells[cell].get()));
                    }
                }
                next[own].set(next[own].get() + 1);
            }
        })?;
    }
    let numbers = |cells: &[Cell<u64>]| cells.iter().map(Cell::get).collect::<Vec<_>>();
    Ok(move || (numbers(next), numbers(held), numbers(cells)))
}

fn any_act() -> impl Strategy<Value = Option<Act>> {
    let cell = 0..CELLS;
    prop_oneof![
        (cell.clone(), 1u64..4).prop_map(|(cell, number)| Some(Act::Add(cell, number))),
        cell.clone().prop_map(|cell| Some(Act::Read(cell))),
        cell.clone().prop_map(|cell| Some(Act::Write(cell))),
        (1u64..4).prop_map(|ways| Some(Act::Choose(ways))),
        cell.prop_map(|cell| Some(Act::Wait(cell))),
        Just(None),
    ]
}

/// A script executes its acts one after the other, and leaves out impossible acts.
fn any_script() -> impl Strategy<Value = Script> {
    prop::array::uniform4(any_act()).prop_map(|mut script| {
        script.sort_by_key(Option::is_none);
        script
    })
}

proptest! {
    #![proptest_config(pagemark_testing::cases(60))]

    #[test]
    fn every_state_and_transition_is_found_and_no_other(
        scripts in prop::collection::vec(any_script(), 1..4), max_depth in prop_oneof![0u32..6, Just(u32::MAX - 1)],
    ) {
        let steps: usize = scripts.iter().map(|script| script.iter().flatten().count()).sum();
        let max_depth = max_depth.min(steps as u32);
        let (states, edges, has_deadlock) = interpret(&scripts, max_depth);
        for (order, state_form) in [
            (Order::DepthFirst, StateForm::Copies),
            (Order::DepthFirst, StateForm::Snapshots(None)),
            (Order::BreadthFirst, StateForm::Snapshots(None)),
        ] {
            let seen: Rc<RefCell<HashMap<u32, Seen>>> = Rc::default();
            let found_edges: Rc<RefCell<HashSet<(Seen, Choice, Seen)>>> = Rc::default();
            let (watched, watched_edges) = (seen.clone(), found_edges.clone());
            let explorer = Explorer { order, state_form, max_depth: Some(max_depth), ..Explorer::default() };
            let program = |world: &mut World<'_>| {
                let now = set_up(world, &scripts)?;
                world.watch(move |event| {
                    watched.borrow_mut().entry(event.to).or_insert_with(&now);
                    if let Some((from, choice)) = event.taken {
                        let before = watched.borrow()[&from].clone();
                        watched_edges.borrow_mut().insert((before, choice, now()));
                    }
                });
                Ok(())
            };
            let found = explorer.explore(program).unwrap();
            if let Outcome::Found { fault, trace } = found.outcome {
                prop_assert!(matches!(fault, Fault::Deadlock { .. }) && has_deadlock, "{fault}");
                let (_, again) = explorer.replay(|world| set_up(world, &scripts).map(drop), &trace).unwrap();
                prop_assert_eq!(again, Some(fault));
                continue;
            }
            // States one choice beyond the bound were interpreted to find deadlocks.
            let within = |state: &Seen| state.0.iter().sum::<u64>() <= max_depth.into();
            let expected: BTreeSet<Seen> = states.iter().filter(|state| within(state)).cloned().collect();
            prop_assert_eq!(seen.borrow().values().cloned().collect::<BTreeSet<_>>(), expected);
            let expected: HashSet<_> = edges.iter().filter(|(_, _, after)| within(after)).cloned().collect();
            prop_assert!(*found_edges.borrow() == expected, "{} transitions, {} expected", found_edges.borrow().len(), expected.len());
            prop_assert_eq!(found.outcome == Outcome::Exhausted, max_depth as usize >= steps || expected.len() == edges.len());
        }
    }
}

fn explore_default(program: impl for<'w> FnOnce(&mut World<'w>) -> Result<(), Error>) -> Outcome {
    Explorer::default().explore(program).unwrap().outcome
}

#[test]
fn actors_wait_deep_in_their_stacks_with_their_locals() {
    fn descend(actor: &Actor<'_>, depth: u64, total: f64) -> f64 {
        let buffer = [depth; 50];
        if depth == 0 {
            actor.step("is at the bottom");
            return total;
        }
        let found = descend(actor, depth - 1, total + depth as f64 / 2.0);
        actor.step("comes up");
        actor.assert(std::hint::black_box(buffer).iter().all(|&value| value == depth), "locals are as they were");
        found
    }
    for state_form in [StateForm::Copies, StateForm::Snapshots(None)] {
        let explorer = Explorer { state_form, ..Explorer::default() };
        let found = explorer.explore(|world| {
            let results = world.place_all(2, |_| Cell::new(0.0f64))?;
            for depth in [6u64, 9] {
                spawn(world, move |actor| results[actor.number()].set(descend(actor, depth, 0.25)))?;
            }
            world.at_end("sums are right", move || (results[0].get(), results[1].get()) == (10.75, 22.75));
            Ok(())
        });
        let found = found.unwrap();
        // One actor is at one of 8 positions, the other at one of 11, regardless of earlier steps.
        assert_eq!((found.outcome, found.states), (Outcome::Exhausted, 8 * 11), "{state_form:?}");
    }
}

#[test]
fn a_state_does_not_depend_on_what_was_on_the_stack_before() {
    fn dirty_the_stack(number: u64) -> u64 {
        std::hint::black_box([number; 2000]).iter().sum()
    }
    let found = Explorer::default().explore(|world| {
        let sum = world.place(Cell::new(0u64))?;
        spawn(world, move |actor| {
            let chosen = actor.choose("chooses", 5);
            sum.set(dirty_the_stack(chosen) & 1);
            actor.step("goes on");
            sum.set(0);
        })?;
        Ok(())
    });
    // The beginning, two sums, and the end.
    assert!(found.unwrap().states <= 1 + 5 + 1);
}

#[test]
fn a_failure_names_the_thread_and_the_operation() {
    let found = explore_default(|world| {
        spawn(world, |actor| actor.assert(false, "the first thing"))?;
        Ok(())
    });
    let fault = Fault::Assertion { actor: 0, property: "the first thing" };
    assert_eq!(found, Outcome::Found { fault, trace: vec![] });

    let found = explore_default(|world| {
        spawn(world, |actor| {
            let chosen = actor.choose("chooses", 3);
            assert!(chosen < 2, "it chose {chosen}");
        })?;
        Ok(())
    });
    let fault = Fault::Panic { actor: 0, words: "it chose 2".to_owned() };
    assert_eq!(found, Outcome::Found { fault, trace: vec![Choice { actor: 0, way: 2 }] });

    let found = explore_default(|world| {
        let network = Network::new(world, 2, 1)?;
        for other in [1, 0] {
            spawn(world, move |actor| {
                network.receive(actor, Sender::Actor(other));
            })?;
        }
        Ok(())
    });
    let waits = |object| Label { verb: "receives", object };
    let fault = Fault::Deadlock { waiting: vec![(0, waits("actor 1")), (1, waits("actor 0"))] };
    assert_eq!(found, Outcome::Found { fault, trace: vec![] });

    let found = explore_default(|world| {
        let counter = world.place(Cell::new(0u64))?;
        spawn(world, move |actor| {
            actor.step("sets the counter");
            counter.set(1);
            actor.step("goes on");
        })?;
        world.always("the counter stays", move || counter.get() == 0);
        Ok(())
    });
    let fault = Fault::Property { property: "the counter stays" };
    assert_eq!(found, Outcome::Found { fault, trace: vec![Choice { actor: 0, way: 0 }] });
}

#[test]
fn freed_memory_makes_no_difference() {
    let found = Explorer::default().explore(|world| {
        let heap = world.heap();
        let allocate = move |actor: &Actor<'_>, heap: Heap<'_>, number: u64| {
            let address = heap.allocate::<[Cell<u64>; 40]>().unwrap();
            heap.get::<[Cell<u64>; 40]>(address).unwrap().iter().for_each(|word| word.set(number));
            actor.step("frees");
            heap.free::<[Cell<u64>; 40]>(address).unwrap();
            actor.step("ends");
        };
        spawn(world, move |actor| allocate(actor, heap, 1))?;
        spawn(world, move |actor| allocate(actor, heap, 2))?;
        Ok(())
    });
    let found = found.unwrap();
    // Each actor has its memory, has freed it, or has ended. In all states the first began first.
    assert_eq!((found.outcome, found.states, found.transitions), (Outcome::Exhausted, 9, 12));
}

#[test]
fn bounds_are_kept() {
    let counter = |world: &mut World<'_>| {
        let numbers = world.place_all(4096, |_| Cell::new(0u64))?;
        spawn(world, move |actor| {
            for round in 1..=200u64 {
                actor.step("fills a page with what does not compress");
                let mut number = round;
                for word in numbers {
                    number = number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    word.set(number ^ (number >> 29));
                }
            }
        })?;
        Ok(())
    };
    let unbounded = Explorer::default();
    let all = unbounded.explore(counter).unwrap();
    assert_eq!((all.outcome, all.states, all.depth), (Outcome::Exhausted, 201, 200));
    let found = Explorer { max_states: Some(50), ..unbounded }.explore(counter).unwrap();
    assert_eq!((found.outcome, found.states), (Outcome::Bounded(Bound::States), 50));
    let found = Explorer { max_depth: Some(50), ..unbounded }.explore(counter).unwrap();
    assert_eq!((found.outcome, found.states), (Outcome::Bounded(Bound::Depth), 51));
    for state_form in [StateForm::Copies, StateForm::Snapshots(None)] {
        let found = Explorer { state_form, budget_bytes: Some(3 << 20), ..unbounded }.explore(counter).unwrap();
        assert_eq!(found.outcome, Outcome::Bounded(Bound::Memory), "{state_form:?}");
        assert!(found.states > 0 && found.states < 201, "{state_form:?}");
    }
}

fn kind<T>(result: &Result<T, Error>) -> Option<ErrorKind> {
    result.as_ref().err().map(Error::kind)
}

#[test]
fn limits_are_enforced() {
    let sizes = Sizes { actors: 1, stack_bytes: 16 << 10, heap_bytes: 0, data_bytes: 4096 };
    let explorer = Explorer { sizes, ..Explorer::default() };
    let refused = explorer.explore(|world| {
        spawn(world, |_| {})?;
        spawn(world, |_| {}).map(drop)
    });
    assert!(matches!(kind(&refused), Some(ErrorKind::TooManyActors { actors: 1 })), "{refused:?}");
    let refused = explorer.explore(|world| world.place_all(1000, |_| Cell::new(0u64)).map(drop));
    assert!(
        matches!(kind(&refused), Some(ErrorKind::DataFull { needed_bytes: 8000, left_bytes: 4096 })),
        "{refused:?}"
    );
    let refused = explorer.explore(|world| world.place_all(usize::MAX, |_| Cell::new(0u64)).map(drop));
    assert!(matches!(kind(&refused), Some(ErrorKind::DataFull { .. })), "{refused:?}");
    let overflow = explorer.explore(|world| {
        spawn(world, |actor| {
            fn descend_to(lowest: usize) -> u64 {
                let mut local = [lowest as u64; 4];
                let local = std::hint::black_box(&mut local);
                if (local.as_ptr() as usize) < lowest { 0 } else { descend_to(lowest) + local[3] }
            }
            actor.step("descends");
            let local = 0u8;
            // The word after the end of the stack, which is unused.
            std::hint::black_box(descend_to(std::ptr::from_ref(&local) as usize - (20 << 10)));
        })?;
        Ok(())
    });
    assert!(matches!(kind(&overflow), Some(ErrorKind::StackOverflow { actor: 0, .. })), "{overflow:?}");
}

#[test]
fn a_trace_of_another_program_is_refused() {
    let program = |world: &mut World<'_>| spawn(world, |actor| actor.step("goes on")).map(drop);
    let explorer = Explorer::default();
    let other = [Choice::default(), Choice::default()];
    let refused = explorer.replay(program, &other);
    assert!(matches!(kind(&refused), Some(ErrorKind::TraceDiffers { step: 1, actor: 0, ways: 0 })), "{refused:?}");
    let refused = explorer.replay(program, &[Choice { actor: 7, way: 0 }]);
    assert!(matches!(kind(&refused), Some(ErrorKind::TraceDiffers { step: 0, actor: 7, ways: 0 })), "{refused:?}");
}
