//! The copy is the memory in the stop, and the program notices nothing.

use std::collections::HashMap;

use pagemark::Address;
use pagemark_linux::proc::maps;
use pagemark_linux::ptrace::deaths;
use pagemark_testing::{assert_oracle, wait_for};

use super::super::tests::{ROLES, States, Waiting, Waits};
use super::*;

/// Stops all threads of a process, does something, and releases them.
fn while_stopped<T>(pid: i32, act: impl FnOnce() -> T) -> T {
    let threads = proc::threads(pid).unwrap();
    for &thread in &threads {
        ptrace::seize(thread, ptrace::TRACE_SYSGOOD).unwrap();
        ptrace::interrupt(thread).unwrap();
        assert_eq!(ptrace::wait_trap(thread, None), Ok(true));
    }
    let done = act();
    threads.into_iter().for_each(|thread| ptrace::detach(thread).unwrap());
    done
}

/// The populated pages of private writable mappings, and their content.
fn content(pid: i32) -> HashMap<u64, Vec<u8>> {
    let (pagemap, memory) = (Pagemap::of_process(pid).unwrap(), proc::open_memory(pid).unwrap());
    let mut content = HashMap::new();
    for mapping in maps::read(pid).unwrap().into_iter().filter(|mapping| mapping.writable && !mapping.shared) {
        let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
        let read = |run: pagemark::Range, _: u64| {
            let mut bytes = vec![0; (run.end - run.start).to_usize()];
            memory.read_exact_at(&mut bytes, run.start.get()).unwrap();
            content.insert(run.start.get(), bytes);
        };
        pagemap.find(&(mapping.start..mapping.end), filter, read).unwrap();
    }
    content
}

fn descriptor_links(pid: i32) -> Vec<Vec<u8>> {
    proc::descriptors(pid).unwrap().into_iter().map(|open| open.link).collect()
}

/// The children of a program that were made for copies. Those of its own block other signals.
fn left(pid: i32) -> Vec<i32> {
    let unblocked = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
    let blocks_all = |child: &i32| Status::read(*child).is_ok_and(|status| status.blocked_signals == !unblocked);
    proc::children(pid).unwrap().into_iter().filter(blocks_all).collect()
}

#[test]
fn a_copy_holds_what_the_memory_was_in_the_stop() {
    for role in ROLES {
        let states = States::start(role);
        let pid = states.pid();
        let (files, mappings) = (descriptor_links(pid), maps::read(pid).unwrap().len());
        for _ in 0..3 {
            let (before, copy, expected) =
                while_stopped(pid, || (content(pid), fork(&mut Tracee(pid)).unwrap(), content(pid)));
            let copy = MemoryCopy::hold(copy).unwrap();
            states.go_on("a copy");
            assert_eq!(left(pid), [0; 0], "{role}");
            for (&start, bytes) in &expected {
                let range = Address::new(start)..Address::new(start + bytes.len() as u64);
                let mut found = vec![0; bytes.len()];
                assert!(copy.read(std::slice::from_ref(&range), &mut found).unwrap().is_empty(), "{role}: {range:?}");
                // A child made by vfork, which is not stopped, writes to the same memory.
                let before = before.get(&start).filter(|before| before.len() == bytes.len());
                let differs = |at: &usize| {
                    let found = found[*at];
                    found != bytes[*at]
                        && before.is_some_and(|before| found != before[*at] && before[*at] == bytes[*at])
                };
                let first: Vec<u64> = (0..bytes.len()).filter(differs).map(|at| start + at as u64).collect();
                // The kernel records the processor of the thread when that executes the code.
                let block = first.first().map_or(0, |first| first / 32 * 32);
                let is_recorded = first.iter().all(|address| matches!(address.wrapping_sub(block), 0..8 | 20..28));
                assert_oracle!(is_recorded, "{role}: {range:?} is not as it was at {first:x?}");
                let pages = RangeSet::from(range);
                assert_eq!(copy.present(&pages).unwrap(), pages);
            }
            let pid = copy.pid;
            drop(copy);
            wait_for("the copy to end", || (!proc::exists(pid)).then_some(()));
        }
        assert_eq!((descriptor_links(pid), maps::read(pid).unwrap().len()), (files, mappings), "{role}");
        states.go_on("all copies");
    }
}

/// Forks a process that stops the program, makes a copy, and dies before its request `death`. It
/// sends the program SIGUSR2 before its request `signal`. True if it was done before its death.
fn is_done_before(pid: i32, signal: u32, death: u32) -> bool {
    // SAFETY: the child allocates, which the C library allows after a fork, and ends by _exit.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let made = while_stopped(pid, || {
                deaths::signal_before_request(signal, pid, libc::SIGUSR2);
                deaths::before_request(death);
                let made = fork(&mut Tracee(pid));
                deaths::before_request(u32::MAX);
                made
            });
            match &made {
                // It would end by itself only after some seconds.
                Ok(copy) => drop(copy.signal(libc::SIGKILL)),
                Err(error) => eprintln!("{error}"),
            }
            // SAFETY: it only ends the process.
            unsafe { libc::_exit(i32::from(made.is_err())) }
        }
        nix::unistd::ForkResult::Parent { child } => match nix::sys::wait::waitpid(child, None).unwrap() {
            nix::sys::wait::WaitStatus::Exited(_, status) => {
                assert_eq!(status, 0, "the copy before request {death} failed");
                true
            }
            _ => false,
        },
    }
}

fn die_at_requests(step: u32) {
    for (role, first) in ROLES.into_iter().zip((0..step).cycle()) {
        let states = States::start(role);
        let (mut number, mut deaths) = (first, 0);
        while !is_done_before(states.pid(), u32::MAX, number) {
            states.go_on(&format!("a death before request {number}"));
            // What was made ends by itself, and until then uses the place of the code.
            pagemark_testing::wait_until("the processes to end", || left(states.pid()).is_empty());
            (number, deaths) = (number + step, deaths + 1);
        }
        states.go_on("the last copy");
        eprintln!("{role}: {deaths} deaths");
        assert!(deaths > 0, "{role}");
    }
}

/// No signal that a call waits for is handled elsewhere, after which the call would wait for the
/// next one.
#[test]
fn a_signal_that_comes_before_a_death_ends_the_call_that_waits_for_it() {
    /// Later ones are made when the thread has forked.
    const REQUESTS: u32 = 7;
    for waits in [Waits::Sigsuspend, Waits::Epoll] {
        let mut waiting = Waiting::start(waits);
        assert_eq!(waiting.wait("its start"), 0);
        for (signal, death) in (0..REQUESTS).flat_map(|death| (0..=death).map(move |signal| (signal, death))) {
            assert!(!is_done_before(waiting.pid, signal, death));
            let after = format!("a signal before request {signal} and a death before request {death}");
            wait_for(&format!("{waits:?} to return after {after}"), || (waiting.wait(&after) == 1).then_some(()));
        }
    }
}

#[test]
fn whoever_traces_the_thread_may_die() {
    die_at_requests(ROLES.len() as u32);
}

#[test]
#[ignore = "some minutes"]
fn whoever_traces_the_thread_may_die_at_any_request() {
    die_at_requests(1);
}
