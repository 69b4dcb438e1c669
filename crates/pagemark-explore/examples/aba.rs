//! Finds the bug in a queue without locks whose pointers are not counted, and prints how it comes
//! about.

use pagemark_explore::programs::{Flaw, Queue};
use pagemark_explore::{Error, Explorer, Order, Outcome};

fn main() -> Result<(), Error> {
    let queue = Queue { flaw: Flaw::NoCounts, producers: 1, items: 2, consumers: 2, tries: 2, table_bytes: 4096 };
    let explorer = Explorer { sizes: queue.sizes(), order: Order::BreadthFirst, ..Explorer::default() };
    let found = explorer.explore(|world| queue.set_up(world))?;
    println!("{} states, {} transitions, {} KiB", found.states, found.transitions, found.held_bytes >> 10);
    if let Outcome::Found { trace, .. } = found.outcome {
        let (steps, fault) = explorer.replay(|world| queue.set_up(world), &trace)?;
        steps.iter().enumerate().for_each(|(number, step)| println!("{:3}. {step}", number + 1));
        fault.iter().for_each(|fault| println!("     {fault}"));
    }
    Ok(())
}
