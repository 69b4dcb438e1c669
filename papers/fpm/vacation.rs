//! `vacation` of STAMP: a travel agency. Four trees hold cars, flights, rooms and customers; a task
//! books what is dearest among some offers, deletes a customer, or changes what is offered.

use std::cell::Cell;

use super::Size;
use super::monitor::Monitor;
use super::objects::Objects;
use super::tree::Tree;
use crate::BenchError;
use crate::measuring::random::Xorshift;

/// `-r1048576 -t524288`.
const FULL_RECORDS: u64 = 1 << 20;
const FULL_TASKS: u64 = 1 << 19;
/// `-n10`, `-q90`, `-u80`.
const QUERIES: u64 = 10;
const QUERIED_PERCENT: u64 = 90;
const BOOKING_PERCENT: u64 = 80;

const KINDS: usize = 3;

/// The cars, flights or rooms of one kind: how many there are, are booked and are free, and their
/// price.
struct Offer {
    used: Cell<u64>,
    free: Cell<u64>,
    total: Cell<u64>,
    price: Cell<u64>,
}

struct Customer<'h> {
    bookings: Cell<Option<&'h Booking<'h>>>,
}

struct Booking<'h> {
    kind: usize,
    id: u64,
    /// The price when it was booked, as in the original; nothing else depends on it.
    _price: u64,
    next: Cell<Option<&'h Booking<'h>>>,
}

struct Agency<'h> {
    objects: &'h Objects,
    offers: [Tree<'h, &'h Offer>; KINDS],
    customers: Tree<'h, &'h Customer<'h>>,
    bookings: Cell<u64>,
}

/// Runs the program and checks its result.
pub(super) fn run(monitor: &Monitor<'_>, size: Size) -> Result<(), BenchError> {
    let (records, tasks) = (size.of(FULL_RECORDS), size.of(FULL_TASKS));
    let objects = monitor.objects();
    let agency = Agency {
        objects,
        offers: std::array::from_fn(|_| Tree::new(objects)),
        customers: Tree::new(objects),
        bookings: Cell::new(0),
    };
    let mut random = Xorshift::new(1);
    for kind in 0..=KINDS {
        let mut ids: Vec<u64> = (1..=records).collect();
        for index in (1..ids.len()).rev() {
            ids.swap(index, random.index(index + 1));
        }
        for id in ids {
            match agency.offers.get(kind) {
                Some(_) => agency.add(kind, id, (random.below(5) + 1) * 100, random.below(5) * 10 + 50),
                None => agency.customers.insert(id, objects.make(Customer { bookings: Cell::new(None) })),
            }
            monitor.step()?;
        }
    }
    let queried = (records * QUERIED_PERCENT / 100).max(1);
    for _ in 0..tasks {
        agency.task(&mut random, queried);
        monitor.step()?;
    }
    monitor.finish()?;
    agency.check()
}

impl<'h> Agency<'h> {
    fn task(&self, random: &mut Xorshift, queried: u64) {
        let action = random.below(100);
        if action < BOOKING_PERCENT {
            let mut dearest = [None; KINDS];
            for _ in 0..random.below(QUERIES) + 1 {
                let (kind, id) = (random.index(KINDS), random.below(queried) + 1);
                let Some(offer) = self.offers[kind].get(id).filter(|offer| offer.free.get() > 0) else { continue };
                if dearest[kind].is_none_or(|(price, _)| offer.price.get() > price) {
                    dearest[kind] = Some((offer.price.get(), id));
                }
            }
            let customer = random.below(queried) + 1;
            for (kind, dearest) in dearest.into_iter().enumerate() {
                if let Some((_, id)) = dearest {
                    self.book(customer, kind, id);
                }
            }
        } else if action % 2 == 1 {
            self.delete_customer(random.below(queried) + 1);
        } else {
            for _ in 0..random.below(QUERIES) + 1 {
                let (kind, id) = (random.index(KINDS), random.below(queried) + 1);
                if random.below(2) == 0 {
                    self.add(kind, id, 100, random.below(5) * 10 + 50);
                } else {
                    self.take_away(kind, id, 100);
                }
            }
        }
    }

    fn add(&self, kind: usize, id: u64, count: u64, price: u64) {
        match self.offers[kind].get(id) {
            Some(offer) => {
                offer.free.set(offer.free.get() + count);
                offer.total.set(offer.total.get() + count);
                offer.price.set(price);
            }
            None => {
                let cell = Cell::new;
                let offer = Offer { used: cell(0), free: cell(count), total: cell(count), price: cell(price) };
                self.offers[kind].insert(id, self.objects.make(offer));
            }
        }
    }

    fn take_away(&self, kind: usize, id: u64, count: u64) {
        let Some(offer) = self.offers[kind].get(id).filter(|offer| offer.free.get() >= count) else { return };
        offer.free.set(offer.free.get() - count);
        offer.total.set(offer.total.get() - count);
        if offer.total.get() == 0 {
            self.offers[kind].remove(id);
            // SAFETY: nobody has booked it, and no tree has it.
            unsafe { self.objects.free(std::ptr::from_ref(offer)) };
        }
    }

    fn book(&self, customer: u64, kind: usize, id: u64) {
        let customer = self.customers.get(customer).unwrap_or_else(|| {
            let new = self.objects.make(Customer { bookings: Cell::new(None) });
            self.customers.insert(customer, new);
            new
        });
        let Some(offer) = self.offers[kind].get(id).filter(|offer| offer.free.get() > 0) else { return };
        let mut booked = customer.bookings.get();
        while let Some(booking) = booked {
            if (booking.kind, booking.id) == (kind, id) {
                return;
            }
            booked = booking.next.get();
        }
        offer.free.set(offer.free.get() - 1);
        offer.used.set(offer.used.get() + 1);
        let (price, next) = (offer.price.get(), Cell::new(customer.bookings.get()));
        customer.bookings.set(Some(self.objects.make(Booking { kind, id, _price: price, next })));
        self.bookings.set(self.bookings.get() + 1);
    }

    fn delete_customer(&self, id: u64) {
        let Some(customer) = self.customers.remove(id) else { return };
        let mut next = customer.bookings.get();
        while let Some(booking) = next {
            if let Some(offer) = self.offers[booking.kind].get(booking.id) {
                offer.free.set(offer.free.get() + 1);
                offer.used.set(offer.used.get() - 1);
            }
            next = booking.next.get();
            self.bookings.set(self.bookings.get() - 1);
            // SAFETY: its customer, who alone has it, is gone.
            unsafe { self.objects.free(std::ptr::from_ref(booking)) };
        }
        // SAFETY: the tree does not have the customer any more.
        unsafe { self.objects.free(std::ptr::from_ref(customer)) };
    }

    /// Each booking is counted once by what it books, and what is offered is used or free.
    fn check(&self) -> Result<(), BenchError> {
        let mut booked: [std::collections::HashMap<u64, u64>; KINDS] = Default::default();
        let mut bookings = 0;
        self.customers.each(|_, customer| {
            let mut next = customer.bookings.get();
            while let Some(booking) = next {
                *booked[booking.kind].entry(booking.id).or_default() += 1;
                bookings += 1;
                next = booking.next.get();
            }
        });
        let mut is_right = bookings == self.bookings.get() && bookings > 0;
        for (offers, booked) in self.offers.iter().zip(&mut booked) {
            offers.each(|id, offer| {
                is_right &= offer.used.get() + offer.free.get() == offer.total.get();
                is_right &= booked.remove(&id).unwrap_or(0) == offer.used.get();
            });
            is_right &= booked.is_empty();
        }
        if is_right { Ok(()) } else { Err(BenchError::wrong_result("vacation", "bookings and offers differ")) }
    }
}
