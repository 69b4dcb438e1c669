//! A part of the program with a stack of its own, and its description: both within the arena.
//!
//! ```text
//! low                                            top
//!  │ unused: zeros │ what the fiber has stacked │ closure │ block │
//! ```

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::arena::{Arena, clear};
use super::switch;

/// What a fiber waits to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Label {
    /// What it does.
    pub verb: &'static str,
    /// With what; may be empty.
    pub object: &'static str,
}

impl Label {
    pub(crate) const NONE: Label = Label { verb: "", object: "" };
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.object {
            "" => f.write_str(self.verb),
            object => write!(f, "{} {object}", self.verb),
        }
    }
}

/// How far a fiber is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(crate) enum Phase {
    /// It waits to be resumed.
    Waiting,
    /// It has returned.
    Finished,
    /// It found that something does not hold that should.
    Failed,
}

/// The control block of a fiber. It is in the arena, and thus part of the state, and has no
/// padding, so that equal states have equal bytes.
#[repr(C)]
pub(crate) struct Block {
    /// The stack pointer of the fiber; while the fiber runs, the stack pointer of the code that
    /// resumed it.
    slot: Cell<usize>,
    phase: Cell<Phase>,
    number: Cell<u64>,
    label: Cell<Label>,
    /// The function that counts the ways in which the fiber can continue, and its closure.
    count_ways: Cell<CountWays>,
    ways: Cell<*const ()>,
    /// The chosen way.
    way: Cell<u64>,
    /// The property that does not hold.
    failure: Cell<&'static str>,
    /// The message of a panic, until the fiber is suspended.
    panic: Cell<*mut String>,
}

type CountWays = unsafe fn(*const ()) -> u64;

/// # Safety
/// None is needed.
unsafe fn no_ways(_: *const ()) -> u64 {
    0
}

/// # Safety
/// `ways` points to an `F`.
unsafe fn call<F: Fn() -> u64>(ways: *const ()) -> u64 {
    // SAFETY: the caller guarantees it.
    unsafe { (*ways.cast::<F>())() }
}

impl Block {
    /// Number of the fiber.
    pub fn number(&self) -> usize {
        self.number.get() as usize
    }

    /// Suspends the fiber until it is resumed, and returns the chosen way. Must be called on the
    /// stack of the fiber.
    pub fn wait<F: Fn() -> u64>(&self, label: Label, ways: &F) -> u64 {
        self.label.set(label);
        self.count_ways.set(call::<F>);
        self.ways.set(std::ptr::from_ref(ways).cast());
        self.change();
        self.way.take()
    }

    /// Suspends the fiber for ever, with a reason. Must be called on the stack of the fiber.
    pub fn fail(&self, failure: &'static str) -> ! {
        self.failure.set(failure);
        self.leave(Phase::Failed)
    }

    fn leave(&self, phase: Phase) -> ! {
        self.phase.set(phase);
        self.change();
        unreachable!("only a fiber that waits is resumed")
    }

    fn change(&self) {
        // SAFETY: the fiber runs, so the slot holds the pointer of the stack that resumed it and
        // waits in `Fiber::resume`.
        unsafe { switch::change(self.slot.as_ptr()) }
    }
}

/// A fiber, as the code that resumes it uses it.
#[derive(Clone)]
pub(crate) struct Fiber<'w> {
    block: &'w Block,
    /// All of the stack below the closure.
    stack: &'w [Cell<u64>],
}

/// Number of the lowest words of a stack. A write there shows that the stack overflows.
const MARGIN_WORDS: usize = 32;

impl<'w> Fiber<'w> {
    /// Makes a fiber that waits to run `run`, on the stack at these offsets of the arena, which
    /// holds zeros.
    ///
    /// # Panics
    /// If these are not whole pages within the arena, or the closure takes more than half of them.
    pub fn new<F: FnOnce(&'w Block) + Copy + 'w>(arena: Arena<'w>, stack: Range<usize>, number: usize, run: F) -> Self {
        let all = arena.words(stack.start, stack.len() / 8);
        let top = arena.base() + stack.end;
        let block_at = (top - size_of::<Block>()) & !15;
        let closure_at = closure_below::<F>(block_at);
        let below = (closure_at - arena.base() - stack.start) / 8;
        assert!(below > all.len() / 2, "a closure of {} bytes on a stack of {}", size_of::<F>(), stack.len());
        let block = Block {
            slot: Cell::new(0),
            phase: Cell::new(Phase::Waiting),
            number: Cell::new(number as u64),
            label: Cell::new(Label { verb: "starts", object: "" }),
            count_ways: Cell::new(no_ways),
            ways: Cell::new(std::ptr::null()),
            way: Cell::new(0),
            failure: Cell::new(""),
            panic: Cell::new(std::ptr::null_mut()),
        };
        // SAFETY: block, closure and stack lie one below the other within the words of the arena,
        // aligned, and no other code has references to them: the caller gives them to this fiber.
        let block: &'w Block = unsafe {
            (closure_at as *mut F).write(run);
            (block_at as *mut Block).write(block);
            &*(block_at as *const Block)
        };
        // SAFETY: below the closure there is more than half of the stack, and its address is a
        // multiple of 16.
        block.slot.set(unsafe { switch::prepare(closure_at, enter::<F>, block_at) });
        Fiber { block, stack: &all[..below] }
    }

    pub fn phase(&self) -> Phase {
        self.block.phase.get()
    }

    /// The operation that the fiber waits for.
    pub fn label(&self) -> Label {
        self.block.label.get()
    }

    /// The property that does not hold, if the fiber failed.
    pub fn failure(&self) -> &'static str {
        self.block.failure.get()
    }

    /// The number of ways in which the fiber can continue.
    pub fn ways(&self) -> u64 {
        // SAFETY: while the fiber waits, its closure is on its suspended stack; before and after
        // that, `no_ways` needs no closure.
        unsafe { (self.block.count_ways.get())(self.block.ways.get()) }
    }

    /// Runs the fiber until it is suspended again. The memory below its stack pointer is then zero.
    ///
    /// # Errors
    /// The fiber panicked or its stack overflowed; it cannot be resumed.
    pub fn resume(&self, way: u64) -> Result<(), Stopped> {
        let block = self.block;
        assert_eq!(block.phase.get(), Phase::Waiting, "fiber {} cannot be resumed", block.number());
        block.way.set(way);
        block.label.set(Label::NONE);
        block.count_ways.set(no_ways);
        block.ways.set(std::ptr::null());
        // SAFETY: the fiber waits, so the slot holds the pointer that `prepare` or its last change
        // left.
        unsafe { switch::change(block.slot.as_ptr()) };
        if self.stack[..MARGIN_WORDS].iter().any(|word| word.get() != 0) {
            return Err(Stopped::Overflow);
        }
        let used_from = (block.slot.get() - self.stack.as_ptr() as usize) / 8;
        if block.phase.get() != Phase::Waiting {
            block.slot.set(0);
            block.label.set(Label::NONE);
            clear(self.stack);
        } else {
            clear(&self.stack[..used_from]);
        }
        let panic = block.panic.replace(std::ptr::null_mut());
        if panic.is_null() {
            return Ok(());
        }
        // SAFETY: the fiber created the pointer from a box, and it is taken once.
        Err(Stopped::Panic(*unsafe { Box::from_raw(panic) }))
    }
}

/// The reason why a fiber cannot be resumed.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The fiber panicked.
    Panic(String),
    /// The stack is too small. Memory below it may have been overwritten.
    Overflow,
}

/// Where the closure lies below a block.
fn closure_below<F>(block_at: usize) -> usize {
    (block_at - size_of::<F>()) & !(align_of::<F>().max(16) - 1)
}

/// The function that runs on a new stack.
extern "C" fn enter<'w, F: FnOnce(&'w Block) + Copy + 'w>(block: usize) -> ! {
    // SAFETY: `Fiber::new` gave the address of the block, and wrote the closure below it, which is
    // data that can be copied.
    let (block, run): (&'w Block, F) = unsafe { (&*(block as *const Block), *(closure_below::<F>(block) as *const F)) };
    // A panic must not unwind beyond the first frame of a stack.
    match catch_unwind(AssertUnwindSafe(|| run(block))) {
        Ok(()) => block.leave(Phase::Finished),
        Err(payload) => {
            let words = payload.downcast_ref::<&str>().map(|words| (*words).to_owned());
            let words = words.or_else(|| payload.downcast_ref::<String>().cloned());
            drop(payload);
            block.panic.set(Box::into_raw(Box::new(words.unwrap_or_else(|| "a value that is not text".to_owned()))));
            block.leave(Phase::Failed)
        }
    }
}
