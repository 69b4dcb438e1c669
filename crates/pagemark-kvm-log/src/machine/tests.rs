//! The machine, against a model of the kernel and of what each reader must be told.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// A slot, and the pages in its log if it has one.
type ModelSlot = (Region, Option<BTreeSet<u64>>);

/// The entries that were not read, and all whose pages are not protected again.
type ModelRings = (Vec<(u32, u64)>, BTreeSet<(u32, u64)>);

/// How many pages an interrupted reset leaves unprotected.
const INTERRUPTED_PAGES: usize = 2;

/// The entries of a ring, more than the slots of a trial have pages.
const RING_ENTRIES: usize = 512;

/// KVM as its documentation describes it.
#[derive(Default)]
struct Model {
    slots: RefCell<BTreeMap<u32, ModelSlot>>,
    options: RefCell<u64>,
    available: u64,
    /// If it keeps rings.
    rings: Option<RefCell<ModelRings>>,
    /// The next reset of the rings protects all pages but the last ones.
    is_interrupted: Cell<bool>,
    /// Calls that still succeed, if they are counted.
    remaining: RefCell<Option<u32>>,
}

impl Model {
    fn new() -> Model {
        Model { available: MANUAL_PROTECT | INITIALLY_SET, ..Model::default() }
    }

    fn may_fail(&self) -> Result<(), i32> {
        match &mut *self.remaining.borrow_mut() {
            Some(0) => Err(libc::ENOMEM),
            Some(count) => {
                *count -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn with_rings() -> Model {
        Model { rings: Some(RefCell::default()), ..Model::new() }
    }

    fn write(&self, slot: u32, page: u64) {
        if let Some(rings) = &self.rings {
            let (entries, open) = &mut *rings.borrow_mut();
            if self.is_logged(slot) && open.insert((slot, page)) {
                entries.push((slot, page));
            }
            return;
        }
        if let Some((_, Some(log))) = self.slots.borrow_mut().get_mut(&slot) {
            log.insert(page);
        }
    }

    fn is_logged(&self, slot: u32) -> bool {
        self.slots.borrow().get(&slot).is_some_and(|(_, log)| log.is_some())
    }
}

impl Kernel for Model {
    fn manual_options(&self) -> u64 {
        self.available
    }

    fn set_manual(&self, options: u64) -> Result<(), i32> {
        self.may_fail()?;
        let allowed = if options & MANUAL_PROTECT == 0 { 0 } else { self.available };
        if options & !allowed != 0 {
            return Err(libc::EINVAL);
        }
        *self.options.borrow_mut() = options;
        Ok(())
    }

    fn set_region(&self, region: &Region) -> Result<(), i32> {
        self.may_fail()?;
        let mut slots = self.slots.borrow_mut();
        if region.bytes == 0 {
            return slots.remove(&region.slot).map(drop).ok_or(libc::EINVAL);
        }
        let known = slots.remove(&region.slot);
        let was_logged = known.as_ref().is_some_and(|(_, log)| log.is_some());
        if let Some(rings) = self.rings.as_ref().filter(|_| !was_logged && region.flags & LOGGED != 0) {
            // What begins to be logged is protected.
            rings.borrow_mut().1.retain(|(slot, _)| *slot != region.slot);
        }
        if let Some((known, log)) = &known
            && (known.bytes != region.bytes || known.host_address != region.host_address)
        {
            slots.insert(region.slot, (*known, log.clone()));
            return Err(libc::EINVAL);
        }
        let log = (region.flags & LOGGED != 0).then(|| {
            let full = || (0..region.pages()).collect();
            let new = || if *self.options.borrow() & INITIALLY_SET != 0 { full() } else { BTreeSet::new() };
            known.and_then(|(_, log)| log).unwrap_or_else(new)
        });
        slots.insert(region.slot, (*region, log));
        Ok(())
    }

    fn dirty_log(&self, slot: u32, bits: &mut [u64]) -> Result<(), i32> {
        self.may_fail()?;
        let mut slots = self.slots.borrow_mut();
        assert!(self.rings.is_none(), "a kernel with rings has no log");
        let (region, log) = slots.get_mut(&slot).ok_or(libc::ENOENT)?;
        let log = log.as_mut().ok_or(libc::ENOENT)?;
        assert_eq!(bits.len(), words_of(region.pages()));
        bits.fill(0);
        log.iter().for_each(|page| bits[(page / 64) as usize] |= 1 << (page % 64));
        if *self.options.borrow() & MANUAL_PROTECT == 0 {
            log.clear();
        }
        Ok(())
    }

    fn clear(&self, slot: u32, first: u64, pages: u32, bits: &[u64]) -> Result<(), i32> {
        self.may_fail()?;
        let mut slots = self.slots.borrow_mut();
        let (region, log) = slots.get_mut(&slot).ok_or(libc::ENOENT)?;
        let log = log.as_mut().ok_or(libc::ENOENT)?;
        let (pages, rest) = (u64::from(pages), region.pages().checked_sub(first).ok_or(libc::EINVAL)?);
        if !first.is_multiple_of(64) || pages > rest || pages < rest && !pages.is_multiple_of(64) {
            return Err(libc::EINVAL);
        }
        (0..pages).filter(|page| bits[(page / 64) as usize] & 1 << (page % 64) != 0).for_each(|page| {
            log.remove(&(first + page));
        });
        Ok(())
    }

    fn take_rings(&self, each: &mut dyn FnMut(u32, u64)) -> Result<Taken, i32> {
        let Some(rings) = &self.rings else { return Ok(Taken::All) };
        let (entries, open) = &mut *rings.borrow_mut();
        let overwritten = entries.len().saturating_sub(RING_ENTRIES);
        let is_full = entries.len() >= RING_ENTRIES;
        let last: BTreeSet<(u32, u64)> = entries.iter().rev().take(INTERRUPTED_PAGES).copied().collect();
        entries.drain(..).skip(overwritten).for_each(|(slot, page)| each(slot, page));
        self.may_fail()?;
        let is_interrupted = self.is_interrupted.take();
        // Pages whose entries are lost are never protected again, which this does not model.
        open.retain(|page| is_interrupted && last.contains(page));
        Ok(match (is_full, is_interrupted) {
            (true, _) => Taken::Overwritten,
            (false, true) => Taken::Unprotected,
            (false, false) => Taken::All,
        })
    }
}

/// A machine, and what its readers must be told.
struct Trial {
    kernel: Model,
    machine: Machine,
    options: u64,
    /// What the owner must be told, of each slot that it logs.
    owner: BTreeMap<u32, BTreeSet<u64>>,
    /// What Pagemark must be told, by host page; None while it does not read.
    pagemark: Option<BTreeSet<u64>>,
}

const SLOTS: [u32; 3] = [0, 1, 1 << 16];
const PAGES: [u64; 3] = [70, 64, 200];
/// The last slot is an alias of the first.
const HOSTS: [u64; 3] = [0x10_0000, 0x80_0000, 0x10_0000];

#[derive(Clone, Debug)]
enum Step {
    Set(usize, bool, u64),
    Drop(usize),
    Write(usize, u64),
    Get(usize),
    Begin,
    Collect,
    End,
    Options(u64),
    Interrupt,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0usize..3, any::<bool>(), 0u64..3).prop_map(|(slot, logged, at)| Step::Set(slot, logged, at)),
        1 => (0usize..3).prop_map(Step::Drop),
        8 => (0usize..3, 0u64..200).prop_map(|(slot, page)| Step::Write(slot, page)),
        3 => (0usize..3).prop_map(Step::Get),
        1 => Just(Step::Begin),
        3 => Just(Step::Collect),
        1 => Just(Step::End),
        1 => prop_oneof![Just(0), Just(1), Just(3)].prop_map(Step::Options),
        1 => Just(Step::Interrupt),
    ]
}

impl Trial {
    fn new() -> Trial {
        Trial::of(Model::new(), Machine::new())
    }

    fn with_rings() -> Trial {
        Trial::of(Model::with_rings(), Machine::with_rings(Ok(())))
    }

    fn of(kernel: Model, machine: Machine) -> Trial {
        Trial { kernel, machine, options: 0, owner: BTreeMap::new(), pagemark: None }
    }

    fn set(&mut self, index: usize, logged: bool, at: u64) -> Result<(), i32> {
        let region = Region {
            slot: SLOTS[index],
            flags: u32::from(logged),
            guest_address: at << 32,
            bytes: PAGES[index] * PAGE,
            host_address: HOSTS[index],
        };
        let Trial { kernel, machine, .. } = self;
        machine.set_region(kernel, &region, None, |flags| kernel.set_region(&Region { flags, ..region }))
    }

    fn drop_slot(&mut self, index: usize) -> Result<(), i32> {
        let region = Region { slot: SLOTS[index], ..Region::default() };
        let Trial { kernel, machine, .. } = self;
        machine.set_region(kernel, &region, None, |flags| kernel.set_region(&Region { flags, ..region }))
    }

    /// The owner reads, and clears as it does in its mode.
    fn get(&mut self, index: usize) -> Result<BTreeSet<u64>, i32> {
        let slot = SLOTS[index];
        let mut bits = vec![0; words_of(PAGES[index])];
        match self.machine.dirty_log(&self.kernel, slot) {
            Some(found) => bits = found?,
            None => self.kernel.dirty_log(slot, &mut bits)?,
        }
        if self.options & MANUAL_PROTECT != 0 {
            // In two parts, as QEMU clears.
            for (first, pages) in [(0u64, 64u32), (64, (PAGES[index] - 64) as u32)] {
                let part = &bits[(first / 64) as usize..];
                if pages == 0 {
                    continue;
                }
                match self.machine.words_to_clear(slot, first, pages) {
                    Some(words) => self.machine.clear(&self.kernel, slot, first, &part[..words])?,
                    None => self.kernel.clear(slot, first, pages, part)?,
                }
            }
        }
        Ok(pages_of(&bits, 0))
    }

    fn collect(&mut self) -> Result<BTreeSet<u64>, Refusal> {
        let found = self.machine.collect(&self.kernel)?;
        Ok(found.iter().flat_map(|part| pages_of(&part.pages, part.host_address / PAGE)).collect())
    }

    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Set(index, logged, at) => {
                self.set(index, logged, at).unwrap();
                match logged {
                    true => _ = self.owner.entry(SLOTS[index]).or_default(),
                    false => _ = self.owner.remove(&SLOTS[index]),
                }
                prop_assert_eq!(self.kernel.is_logged(SLOTS[index]), logged || self.pagemark.is_some());
            }
            Step::Drop(index) => {
                let is_there = self.kernel.slots.borrow().contains_key(&SLOTS[index]);
                prop_assert_eq!(self.drop_slot(index).is_ok(), is_there);
                self.owner.remove(&SLOTS[index]);
            }
            Step::Write(index, page) => {
                let page = page % PAGES[index];
                if !self.kernel.slots.borrow().contains_key(&SLOTS[index]) {
                    return Ok(());
                }
                self.kernel.write(SLOTS[index], page);
                if let Some(must) = self.owner.get_mut(&SLOTS[index]) {
                    must.insert(page);
                }
                if let Some(must) = &mut self.pagemark {
                    must.insert(HOSTS[index] / PAGE + page);
                }
            }
            Step::Get(index) => {
                let Some(must) = self.owner.get_mut(&SLOTS[index]).map(std::mem::take) else {
                    return Ok(());
                };
                let found = self.get(index).unwrap();
                prop_assert!(must.is_subset(&found), "the owner lost {:?}", &must - &found);
            }
            Step::Begin if self.pagemark.is_none() => {
                self.machine.begin(&self.kernel).unwrap();
                self.pagemark = Some(BTreeSet::new());
            }
            Step::Collect => {
                let Some(must) = self.pagemark.as_mut().map(std::mem::take) else {
                    prop_assert_eq!(self.collect(), Err(Refusal::NotBegun));
                    return Ok(());
                };
                let found = self.collect().unwrap();
                prop_assert!(must.is_subset(&found), "Pagemark lost {:?}", &must - &found);
            }
            Step::End => {
                self.machine.end(&self.kernel);
                self.pagemark = None;
                for slot in SLOTS {
                    prop_assert_eq!(self.kernel.is_logged(slot), self.owner.contains_key(&slot));
                }
            }
            Step::Options(options) => {
                let Trial { kernel, machine, .. } = self;
                machine.set_owner_options(options, |options| kernel.set_manual(options)).unwrap();
                self.options = options;
            }
            Step::Interrupt => self.kernel.is_interrupted.set(true),
            Step::Begin => {}
        }
        Ok(())
    }
}

fn pages_of(words: &[u64], first: u64) -> BTreeSet<u64> {
    let is_set = |page: &u64| words[(page / 64) as usize] & 1 << (page % 64) != 0;
    (0..words.len() as u64 * 64).filter(is_set).map(|page| first + page).collect()
}

proptest! {
    /// Slots come, go, move and are aliases; owner and Pagemark begin and end at any time.
    #[test]
    fn each_reader_is_told_what_was_written_in_all_slots(
        has_rings in any::<bool>(),
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let mut trial = if has_rings { Trial::with_rings() } else { Trial::new() };
        for step in steps {
            trial.apply(step)?;
        }
    }

    /// Calls that fail change nothing, and lose nothing.
    #[test]
    fn a_call_that_fails_loses_nothing(writes in prop::collection::btree_set(0u64..64, 1..20), fails_at in 0u32..4) {
        let mut rings = Trial::with_rings();
        rings.set(0, false, 0).unwrap();
        rings.machine.begin(&rings.kernel).unwrap();
        writes.iter().for_each(|&page| rings.kernel.write(0, page));
        *rings.kernel.remaining.borrow_mut() = Some(0);
        prop_assert_eq!(rings.machine.take_rings(&rings.kernel), Err(libc::ENOMEM));
        prop_assert_eq!(rings.collect(), Err(Refusal::Call(libc::ENOMEM)));
        *rings.kernel.remaining.borrow_mut() = None;
        let first = HOSTS[0] / PAGE;
        prop_assert_eq!(rings.collect().unwrap(), writes.iter().map(|page| first + page).collect());
        writes.iter().for_each(|&page| rings.kernel.write(0, page));
        prop_assert_eq!(rings.collect().unwrap().len(), writes.len());
        prop_assert!(rings.collect().unwrap().is_empty());

        let mut trial = Trial::new();
        for index in 0..3 {
            trial.set(index, false, 0).unwrap();
        }
        trial.machine.begin(&trial.kernel).unwrap();
        for slot in &SLOTS[..2] {
            writes.iter().for_each(|&page| trial.kernel.write(*slot, page));
        }
        *trial.kernel.remaining.borrow_mut() = Some(fails_at);
        let first = trial.collect();
        *trial.kernel.remaining.borrow_mut() = None;
        if fails_at < 4 {
            prop_assert_eq!(first, Err(Refusal::Call(libc::ENOMEM)));
        }
        let expected: BTreeSet<u64> =
            (0..2).flat_map(|index| writes.iter().map(move |page| HOSTS[index] / PAGE + page)).collect();
        prop_assert_eq!(trial.collect().unwrap(), expected);
        prop_assert!(trial.collect().unwrap().is_empty());
    }
}

#[test]
fn calls_are_unchanged_until_pagemark_reads() {
    let mut trial = Trial::new();
    trial.set(0, true, 0).unwrap();
    trial.kernel.write(0, 5);
    assert!(trial.machine.dirty_log(&trial.kernel, 0).is_none());
    assert_eq!(trial.machine.words_to_clear(0, 0, 64), None);
    assert_eq!(*trial.kernel.options.borrow(), 0);
    trial.machine.begin(&trial.kernel).unwrap();
    assert_eq!(*trial.kernel.options.borrow(), MANUAL_PROTECT);
    // The owner's log goes on where it was, and is read without being asked to clear.
    assert_eq!(trial.get(0).unwrap(), BTreeSet::from([5]));
    assert_eq!(trial.get(0).unwrap(), BTreeSet::new());
    // A part that the kernel would refuse is left to it.
    assert_eq!(trial.machine.words_to_clear(0, 1, 64), None);
    assert_eq!(trial.machine.words_to_clear(0, 64, 64), None);
    assert_eq!(trial.machine.words_to_clear(0, 64, 6), Some(1));
    assert_eq!(trial.machine.words_to_clear(0, 128, 64), None);
}

#[test]
fn a_slot_that_is_dropped_leaves_what_was_written_in_it() {
    let mut trial = Trial::new();
    trial.set(1, false, 0).unwrap();
    trial.machine.begin(&trial.kernel).unwrap();
    trial.kernel.write(1, 9);
    trial.drop_slot(1).unwrap();
    assert!(!trial.machine.has_slots());
    assert_eq!(trial.collect().unwrap(), BTreeSet::from([HOSTS[1] / PAGE + 9]));
    // Where the log cannot be read, all of the slot.
    trial.set(1, false, 0).unwrap();
    trial.kernel.slots.borrow_mut().get_mut(&1).unwrap().1 = None;
    trial.drop_slot(1).unwrap();
    assert_eq!(trial.collect().unwrap().len(), 64);
}

#[test]
fn a_slot_with_a_view_keeps_it_and_counts_as_written_when_it_is_dropped() {
    let mut trial = Trial::new();
    let region = Region { slot: 2, bytes: 70 * PAGE, host_address: 0x10_0000, ..Region::default() };
    let view = 0x7000_0000;
    let Trial { kernel, machine, .. } = &mut trial;
    let kernel = &*kernel;
    let seen_by_kernel = |flags| kernel.set_region(&Region { flags, host_address: view, ..region });
    machine.set_region(kernel, &region, Some(view), seen_by_kernel).unwrap();
    assert_eq!((machine.view(&region), machine.has(2), machine.has(3)), (Some(view), true, false));
    assert_eq!(machine.view(&Region { slot: 2, ..Region::default() }), Some(view));
    assert_eq!(machine.view(&Region { host_address: 0x20_0000, ..region }), None);
    assert_eq!(machine.view(&Region { slot: 3, ..region }), None);
    assert!(machine.views(0x10_0000 + 69 * PAGE, u64::MAX) && machine.views(0, 0x10_0001));
    assert!(!machine.views(0, 0x10_0000) && !machine.views(0x10_0000 + 70 * PAGE, u64::MAX));
    // The model refuses a change of the address.
    machine.begin(kernel).unwrap();
    kernel.write(2, 3);
    let found = machine.collect(kernel).unwrap();
    assert_eq!(found, [Written { host_address: 0x10_0000, pages: vec![8, 0] }]);
    machine.end(kernel);
    assert!(!kernel.is_logged(2));
    machine.begin(kernel).unwrap();
    let nothing = Region { slot: 2, ..Region::default() };
    machine.set_region(kernel, &nothing, None, |_| kernel.set_region(&nothing)).unwrap();
    assert_eq!(trial.collect().unwrap().len(), 128);
}

#[test]
fn what_cannot_be_logged_is_refused_or_left_out() {
    let mut trial = Trial::new();
    let region = Region { slot: 4, flags: READ_ONLY, bytes: PAGE, ..Region::default() };
    let mut flags_seen = Vec::new();
    let Trial { kernel, machine, .. } = &mut trial;
    let kernel = &*kernel;
    let mut set = |machine: &mut Machine, region: Region| {
        machine.set_region(kernel, &region, None, |flags| {
            flags_seen.push(flags);
            kernel.set_region(&Region { flags, ..region })
        })
    };
    set(machine, region).unwrap();
    machine.begin(kernel).unwrap();
    machine.end(kernel);
    // Also of a slot that comes later.
    machine.begin(kernel).unwrap();
    set(machine, Region { slot: 5, ..region }).unwrap();
    set(machine, Region { slot: 6, flags: 0, ..region }).unwrap();
    machine.end(kernel);
    set(machine, Region { slot: 7, flags: OF_GUEST_MEMORY, ..region }).unwrap();
    assert_eq!(flags_seen, [READ_ONLY, READ_ONLY, LOGGED, OF_GUEST_MEMORY]);
    assert_eq!(trial.machine.begin(&trial.kernel), Err(Refusal::GuestMemory));
    let mut other = Trial::new();
    other.kernel.available = 0;
    assert_eq!(other.machine.begin(&other.kernel), Err(Refusal::NoLog));
    other.machine.set_ring();
    assert_eq!(other.machine.begin(&other.kernel), Err(Refusal::Ring));
    let mut without = Trial::of(Model::new(), Machine::with_rings(Err(libc::EOPNOTSUPP)));
    without.set(0, true, 0).unwrap();
    assert_eq!(without.machine.begin(&without.kernel), Err(Refusal::NoRings));
    // The owner's log is the kernel's.
    without.kernel.write(0, 5);
    assert_eq!(without.get(0).unwrap(), BTreeSet::from([5]));
}

#[test]
fn a_begin_that_fails_leaves_no_log_behind() {
    let mut trial = Trial::new();
    (0..3).for_each(|index| trial.set(index, false, 0).unwrap());
    // The mode and one slot are set, the next is refused.
    *trial.kernel.remaining.borrow_mut() = Some(2);
    assert_eq!(trial.machine.begin(&trial.kernel), Err(Refusal::Call(libc::ENOMEM)));
    *trial.kernel.remaining.borrow_mut() = None;
    assert!(!trial.machine.is_read());
    trial.machine.begin(&trial.kernel).unwrap();
    assert!(SLOTS.iter().all(|&slot| trial.kernel.is_logged(slot)));
}

#[test]
fn all_pages_count_as_written_once_after_an_interrupted_reset() {
    let mut trial = Trial::with_rings();
    trial.set(1, true, 0).unwrap();
    trial.machine.begin(&trial.kernel).unwrap();
    let first = HOSTS[1] / PAGE;
    trial.kernel.write(1, 9);
    trial.kernel.is_interrupted.set(true);
    // As where a ring is full: what is read next is all.
    trial.machine.take_rings(&trial.kernel).unwrap();
    trial.kernel.write(1, 9);
    let all: BTreeSet<u64> = (first..first + PAGES[1]).collect();
    // The slot cannot be protected.
    *trial.kernel.remaining.borrow_mut() = Some(2);
    assert_eq!(trial.collect(), Err(Refusal::Call(libc::ENOMEM)));
    *trial.kernel.remaining.borrow_mut() = None;
    assert_eq!(trial.collect().unwrap(), all);
    assert_eq!(trial.get(1).unwrap().len() as u64, PAGES[1]);
    trial.kernel.write(1, 9);
    assert_eq!(trial.collect().unwrap(), BTreeSet::from([first + 9]));
    assert_eq!(trial.get(1).unwrap(), BTreeSet::from([9]));
    // A slot that is dropped before it is protected.
    trial.kernel.write(1, 9);
    trial.kernel.is_interrupted.set(true);
    trial.machine.take_rings(&trial.kernel).unwrap();
    trial.kernel.write(1, 9);
    *trial.kernel.remaining.borrow_mut() = Some(1);
    assert!(trial.drop_slot(1).is_err());
    *trial.kernel.remaining.borrow_mut() = None;
    trial.drop_slot(1).unwrap();
    assert_eq!(trial.collect().unwrap(), all);
}

#[test]
fn rings_whose_entries_were_overwritten_are_refused_and_the_owner_copies_all() {
    let mut trial = Trial::with_rings();
    let large = Region { slot: 9, flags: LOGGED, bytes: 1024 * PAGE, host_address: 0x100_0000, ..Region::default() };
    let Trial { kernel, machine, .. } = &mut trial;
    let kernel = &*kernel;
    machine.set_region(kernel, &large, None, |flags| kernel.set_region(&Region { flags, ..large })).unwrap();
    machine.begin(kernel).unwrap();
    (0..RING_ENTRIES as u64 - 1).for_each(|page| kernel.write(9, page));
    let found = machine.collect(kernel).unwrap();
    assert_eq!(found.iter().flat_map(|part| &part.pages).map(|word| word.count_ones()).sum::<u32>(), 511);
    machine.dirty_log(kernel, 9).unwrap().unwrap();
    (0..RING_ENTRIES as u64 + 7).for_each(|page| kernel.write(9, page));
    assert_eq!(machine.collect(kernel), Err(Refusal::Overwritten));
    for _ in 0..2 {
        // The owner has not asked for the manual mode, in which a read does not clear.
        assert_eq!(machine.dirty_log(kernel, 9).unwrap().unwrap(), vec![u64::MAX; 16]);
    }
    assert_eq!(machine.collect(kernel), Err(Refusal::Overwritten));
    machine.end(kernel);
    assert_eq!(machine.begin(kernel), Err(Refusal::Overwritten));
}
