//! `intruder` of STAMP: finds attacks in a network's packets. Packets come in random order; a tree
//! holds the fragments of each flow until all are there; then the flow is put together and searched
//! for signatures.

use std::cell::Cell;

use super::Size;
use super::monitor::Monitor;
use super::objects::Objects;
use super::tree::Tree;
use crate::BenchError;
use crate::measuring::random::Xorshift;

/// `-n1048576`.
const FULL_FLOWS: u64 = 1 << 20;
/// `-a10`.
const ATTACK_PERCENT: u64 = 10;
/// `-i16`: longest flow, in bytes and in packets.
const LONGEST: u64 = 16;

/// Random text has none of the capitals, so that it holds no signature.
const SIGNATURES: [&[u8]; 8] =
    [b"ATTACK", b"OVERFLOW", b"SHELL", b"SELECT*", b"ROOT", b"EXPLOIT", b"INJECT", b"PASSWD"];

struct Packet<'h> {
    flow: u64,
    fragment: u32,
    fragments: u32,
    data: &'h [u8],
    /// The next fragment of the flow.
    next: Cell<Option<&'h Packet<'h>>>,
}

/// The packets of a flow that are there, by their numbers.
struct Flow<'h> {
    first: Cell<Option<&'h Packet<'h>>>,
    count: Cell<u32>,
}

/// Runs the program and checks its result.
pub(super) fn run(monitor: &Monitor<'_>, size: Size) -> Result<(), BenchError> {
    let (objects, mut random) = (monitor.objects(), Xorshift::new(1));
    let flows = size.of(FULL_FLOWS);
    let (mut packets, mut attacks) = (Vec::new(), Vec::new());
    for flow in 0..flows {
        let text = if random.below(100) < ATTACK_PERCENT {
            attacks.push(flow);
            SIGNATURES[random.index(SIGNATURES.len())].to_vec()
        } else {
            (0..random.below(LONGEST) + 1).map(|_| b'a' + random.below(26) as u8).collect()
        };
        split(objects, flow, &text, &mut random, &mut packets);
        monitor.step()?;
    }
    for index in (1..packets.len()).rev() {
        packets.swap(index, random.index(index + 1));
    }
    // The queue is an object, too, from which packets are taken.
    let queue = objects.make_all(packets.len(), |index| packets[index]);
    drop(packets);

    let (tree, mut found) = (Tree::new(objects), Vec::new());
    for &packet in queue {
        if let Some(text) = receive(objects, &tree, packet) {
            if SIGNATURES.iter().any(|signature| text.1.windows(signature.len()).any(|part| part == *signature)) {
                found.push(text.0);
            }
            // SAFETY: the text was made for this search.
            unsafe { objects.free_all(std::ptr::from_ref(text.1)) };
        }
        monitor.step()?;
    }
    monitor.finish()?;
    let mut left = 0;
    tree.each(|_, _| left += 1);
    found.sort_unstable();
    if found == attacks && left == 0 {
        return Ok(());
    }
    let reason = format!("{} of {} attacks were found, {left} flows are incomplete", found.len(), attacks.len());
    Err(BenchError::wrong_result("intruder", reason))
}

/// Splits a flow into a random number of packets.
fn split<'h>(objects: &'h Objects, flow: u64, text: &[u8], random: &mut Xorshift, packets: &mut Vec<&'h Packet<'h>>) {
    let fragments = random.index(text.len()) + 1;
    let cut = |fragment: usize| fragment * text.len() / fragments;
    for fragment in 0..fragments {
        let part = &text[cut(fragment)..cut(fragment + 1)];
        let data = objects.make_all(part.len(), |index| part[index]);
        let (fragment, fragments, next) = (fragment as u32, fragments as u32, Cell::new(None));
        packets.push(objects.make(Packet { flow, fragment, fragments, data, next }));
    }
}

/// Adds a packet to its flow. Returns the flow and its text if it is complete.
fn receive<'h>(objects: &'h Objects, tree: &Tree<'h, &'h Flow<'h>>, packet: &'h Packet<'h>) -> Option<(u64, &'h [u8])> {
    let flow = tree.get(packet.flow).unwrap_or_else(|| {
        let new = objects.make(Flow { first: Cell::new(None), count: Cell::new(0) });
        tree.insert(packet.flow, new);
        new
    });
    let mut link = &flow.first;
    while let Some(other) = link.get().filter(|other| other.fragment < packet.fragment) {
        link = &other.next;
    }
    packet.next.set(link.replace(Some(packet)));
    flow.count.set(flow.count.get() + 1);
    if flow.count.get() < packet.fragments {
        return None;
    }
    let (id, mut text, mut next) = (packet.flow, Vec::new(), flow.first.get());
    while let Some(packet) = next {
        next = packet.next.get();
        text.extend_from_slice(packet.data);
        // SAFETY: the queue is past the packets of the flow, and their list ends here.
        unsafe {
            objects.free_all(std::ptr::from_ref(packet.data));
            objects.free(std::ptr::from_ref(packet));
        }
    }
    tree.remove(id);
    // SAFETY: the tree does not have it any more.
    unsafe { objects.free(std::ptr::from_ref(flow)) };
    Some((id, objects.make_all(text.len(), |index| text[index])))
}
