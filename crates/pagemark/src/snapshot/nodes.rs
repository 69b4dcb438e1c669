//! The nodes of one level of all trees, each held once.

use std::io;

use pagemark_linux::room;
use pagemark_linux::shared_bytes::prefetch;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::index::Index;

/// Number of children of a node.
pub(super) const FAN_OUT: usize = 16;

/// The numbers of the children: chunks on the lowest level, nodes of the level below on the other
/// levels. 0 stands for zeros only.
pub(super) type Children = [u32; FAN_OUT];

/// Maximum number of nodes of a level. The references to a node then fit into 32 bits.
pub(super) const MAX_NODES: usize = 1 << 27;

/// Bytes that a node takes, with its reference count and its slot in the index.
pub(super) const NODE_BYTES: u64 = (size_of::<Children>() + 4 + 8) as u64;

/// Nodes by number. Node 0 has no entry: it stands for all zeros. Equal nodes have equal numbers.
pub(super) struct Nodes {
    seed: u64,
    /// At `number - 1`. The first child of a free node is the next free node.
    children: Vec<Children>,
    /// At `number - 1`; 0 for a free node.
    references: Vec<u32>,
    index: Index,
    free: u32,
    used: usize,
}

impl Nodes {
    pub fn new(seed: u64) -> Nodes {
        Nodes { seed, children: Vec::new(), references: Vec::new(), index: Index::default(), free: 0, used: 0 }
    }

    /// The number in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes that the tables take.
    pub fn table_bytes(&self) -> u64 {
        let nodes = self.children.capacity() * size_of::<Children>() + self.references.capacity() * size_of::<u32>();
        nodes as u64 + self.index.bytes()
    }

    pub fn children(&self, node: u32) -> Children {
        match node {
            0 => [0; FAN_OUT],
            _ => self.children[node as usize - 1],
        }
    }

    /// Prefetches nodes into the cache that are read soon.
    pub fn prefetch(&self, nodes: [u32; 2]) {
        for node in nodes.into_iter().filter(|&node| node != 0) {
            // A node may lie in two lines.
            let children = &self.children[node as usize - 1];
            prefetch(&children[..1]);
            prefetch(&children[FAN_OUT - 1..]);
        }
    }

    /// Prefetches the slots of the index that [`Nodes::intern`] reads.
    pub fn prefetch_tag(&self, tag: u32) {
        self.index.prefetch(tag);
    }

    /// Makes room for `nodes` new nodes.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn reserve(&mut self, nodes: usize) -> io::Result<()> {
        let more = nodes.saturating_sub(self.children.len() - self.used);
        room::reserve(&mut self.children, more)?;
        room::reserve(&mut self.references, more)?;
        self.index.reserve(nodes)
    }

    /// Returns the node with these children, whose tag is `tag`, with one more reference, and true
    /// if the node is new. A new node takes over one reference of the caller to each child, and a
    /// part of the room that [`Nodes::reserve`] has made.
    pub fn intern(&mut self, children: &Children, tag: u32) -> (u32, bool) {
        if *children == [0; FAN_OUT] {
            return (0, false);
        }
        if let Some(node) = self.index.find(tag, |node| self.children[node as usize - 1] == *children) {
            self.retain(node);
            return (node, false);
        }
        let node = if self.free != 0 {
            let node = self.free;
            self.free = self.children[node as usize - 1][0];
            self.children[node as usize - 1] = *children;
            self.references[node as usize - 1] = 1;
            node
        } else {
            self.children.push(*children);
            self.references.push(1);
            self.children.len() as u32
        };
        self.index.insert(tag, node);
        self.used += 1;
        (node, true)
    }

    pub fn retain(&mut self, node: u32) {
        if node != 0 {
            self.references[node as usize - 1] += 1;
        }
    }

    /// Releases a reference. Releasing the last reference frees the node and returns its children,
    /// whose references the caller must release.
    pub fn release(&mut self, node: u32) -> Option<Children> {
        if node == 0 {
            return None;
        }
        let at = node as usize - 1;
        self.references[at] -= 1;
        if self.references[at] > 0 {
            return None;
        }
        let children = self.children[at];
        self.index.remove(self.tag(&children), node);
        self.children[at][0] = self.free;
        self.free = node;
        self.used -= 1;
        Some(children)
    }

    /// The part of the hash of the children that the index holds.
    pub fn tag(&self, children: &Children) -> u32 {
        let mut bytes = [0; size_of::<Children>()];
        for (to, child) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(children) {
            *to = child.to_ne_bytes();
        }
        xxh3_64_with_seed(&bytes, self.seed) as u32
    }
}
