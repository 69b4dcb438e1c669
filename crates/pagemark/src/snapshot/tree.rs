//! The trees of all snapshots: they map positions to chunks.
//!
//! A tree is immutable, and equal subtrees are the same node (hash-consing). Two trees of one
//! height are therefore equal if their roots are the same number, a diff does not read shared
//! subtrees, and the cost of a changed copy follows the changes.

use std::io;
use std::ops::Range;

use super::chunks::Chunks;
use super::nodes::{Children, FAN_OUT, MAX_NODES, Nodes};

/// Bits of a position that one level covers.
const LEVEL_BITS: u32 = FAN_OUT.trailing_zeros();

/// A root, and the number of levels of its tree. The root of a tree of zeros is 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Root {
    pub node: u32,
    pub height: u32,
}

/// Positions that get another chunk: a single position, or a run that becomes zeros.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub positions: Range<u64>,
    /// 0 unless there is a single position.
    pub chunk: u32,
}

/// The nodes of all trees, level by level from the leaves up.
pub(super) struct Trees {
    seed: u64,
    levels: Vec<Nodes>,
}

/// Positions that a node of a level covers.
fn span(level: u32) -> u64 {
    1 << (LEVEL_BITS * (level + 1))
}

/// The maximum number of nodes of a level that changes replace.
fn touched_nodes(level: u32, changes: &[Change]) -> u64 {
    let (mut touched, mut last) = (0, None);
    let ends = changes.iter().flat_map(|change| [change.positions.start, change.positions.end - 1]);
    for node in ends.map(|position| position / span(level)) {
        touched += u64::from(last != Some(node));
        last = Some(node);
    }
    touched
}

impl Trees {
    pub fn new(seed: u64) -> Trees {
        Trees { seed, levels: Vec::new() }
    }

    /// The tree of zeros with room for `positions` positions.
    pub fn zeros(&mut self, positions: u64) -> Root {
        let height = (0..).find(|&level| span(level) >= positions).unwrap_or(0) + 1;
        while self.levels.len() < height as usize {
            self.levels.push(Nodes::new(self.seed));
        }
        Root { node: 0, height }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.levels.iter().map(Nodes::used).sum()
    }

    /// Bytes that nodes and tables take.
    pub fn table_bytes(&self) -> u64 {
        self.levels.iter().map(Nodes::table_bytes).sum()
    }

    /// The leaf of a position.
    pub fn leaf(&self, root: Root, position: u64) -> Children {
        let mut node = root.node;
        for level in (1..root.height).rev() {
            let child = (position >> (LEVEL_BITS * level)) as usize % FAN_OUT;
            node = self.levels[level as usize].children(node)[child];
        }
        self.levels[0].children(node)
    }

    /// The chunk at a position.
    pub fn chunk(&self, root: Root, position: u64) -> u32 {
        self.leaf(root, position)[position as usize % FAN_OUT]
    }

    /// The maximum number of nodes that [`Trees::update`] adds for these changes to each level, or
    /// `None` if a level might not have numbers for them.
    pub fn most_new_nodes(&self, height: u32, changes: &[Change]) -> Option<Vec<u64>> {
        let of_level = |(level, nodes): (u32, &Nodes)| {
            let touched = touched_nodes(level, changes);
            (nodes.used() as u64 + touched <= MAX_NODES as u64).then_some(touched)
        };
        (0..height).zip(&self.levels).map(of_level).collect()
    }

    /// Makes room for `new_nodes[level]` nodes of each level.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn reserve(&mut self, new_nodes: &[u64]) -> io::Result<()> {
        let mut levels = self.levels.iter_mut().zip(new_nodes);
        levels.try_for_each(|(nodes, &new)| nodes.reserve(new as usize))
    }

    /// Makes a tree that differs from `old` by the changes, which are in ascending order and
    /// disjoint. There must be room for the new nodes: [`Trees::reserve`]. The caller owns a
    /// reference to the new root, and keeps its references to the chunks of the changes.
    pub fn update(&mut self, old: Root, changes: &[Change], chunks: &mut Chunks) -> Root {
        Root { node: self.update_node(old.height - 1, old.node, 0, changes, chunks), ..old }
    }

    fn update_node(&mut self, level: u32, old: u32, base: u64, changes: &[Change], chunks: &mut Chunks) -> u32 {
        if let [Change { positions, chunk: 0 }] = changes
            && positions.start <= base
            && positions.end >= base + span(level)
        {
            return 0;
        }
        let children = match level {
            0 => self.changed_leaf(old, base, changes, chunks),
            _ => self.changed_children(level, old, base, changes, chunks),
        };
        let tag = self.levels[level as usize].tag(&children);
        self.replace_node(level, old, &children, tag, chunks)
    }

    /// The children of a leaf after the changes, with a reference to each.
    fn changed_leaf(&mut self, old: u32, base: u64, changes: &[Change], chunks: &mut Chunks) -> Children {
        let mut children = self.levels[0].children(old);
        let mut rest = changes;
        for (position, child) in (base..).zip(&mut children) {
            let first = rest.iter().take_while(|change| change.positions.end <= position).count();
            rest = &rest[first..];
            if let Some(change) = rest.first().filter(|change| change.positions.start <= position) {
                *child = change.chunk;
            }
            chunks.retain(*child);
        }
        children
    }

    /// The children of a node above the leaves after the changes, with a reference to each.
    fn changed_children(
        &mut self,
        level: u32,
        old: u32,
        base: u64,
        changes: &[Change],
        chunks: &mut Chunks,
    ) -> Children {
        let mut children = self.levels[level as usize].children(old);
        let child_span = span(level - 1);
        let (mut touched, mut count) = ([(0, base, changes); FAN_OUT], 0);
        let mut rest = changes;
        for (index, &child) in children.iter().enumerate() {
            let child_base = base + index as u64 * child_span;
            let first = rest.iter().take_while(|change| change.positions.end <= child_base).count();
            rest = &rest[first..];
            let changed = rest.partition_point(|change| change.positions.start < child_base + child_span);
            if changed == 0 {
                // The new node takes over a reference to each unchanged child.
                self.retain_child(level, child, chunks);
            } else {
                self.levels[level as usize - 1].prefetch([child, 0]);
                touched[count] = (index, child_base, &rest[..changed]);
                count += 1;
            }
        }
        let touched = &touched[..count];
        if level > 1 {
            for &(index, child_base, changes) in touched {
                children[index] = self.update_node(level - 1, children[index], child_base, changes, chunks);
            }
            return children;
        }
        // The leaves are many, and each waits for the same three lines: all are fetched first.
        for &(index, ..) in touched {
            chunks.prefetch_references(&self.levels[0].children(children[index]));
        }
        let mut leaves = [([0; FAN_OUT], 0); FAN_OUT];
        for ((leaf, tag), &(index, child_base, changes)) in leaves.iter_mut().zip(touched) {
            *leaf = self.changed_leaf(children[index], child_base, changes, chunks);
            *tag = self.levels[0].tag(leaf);
            self.levels[0].prefetch_tag(*tag);
        }
        for ((leaf, tag), &(index, ..)) in leaves.iter().zip(touched) {
            children[index] = self.replace_node(0, children[index], leaf, *tag, chunks);
        }
        children
    }

    /// The node with these children, in place of the node `old`, with one more reference. It takes
    /// over the references to the children.
    fn replace_node(&mut self, level: u32, old: u32, children: &Children, tag: u32, chunks: &mut Chunks) -> u32 {
        let nodes = &mut self.levels[level as usize];
        let (node, is_new) = if *children == nodes.children(old) {
            nodes.retain(old);
            (old, false)
        } else {
            nodes.intern(children, tag)
        };
        if !is_new {
            children.iter().for_each(|&child| self.release_child(level, child, chunks));
        }
        node
    }

    fn retain_child(&mut self, level: u32, child: u32, chunks: &mut Chunks) {
        match level {
            0 => chunks.retain(child),
            _ => self.levels[level as usize - 1].retain(child),
        }
    }

    fn release_child(&mut self, level: u32, child: u32, chunks: &mut Chunks) {
        match level {
            0 => chunks.release(child),
            _ => self.release_node(level - 1, child, chunks),
        }
    }

    /// Releases a reference to a root.
    pub fn release(&mut self, root: Root, chunks: &mut Chunks) {
        self.release_node(root.height - 1, root.node, chunks);
    }

    fn release_node(&mut self, level: u32, node: u32, chunks: &mut Chunks) {
        if let Some(children) = self.levels[level as usize].release(node) {
            children.iter().for_each(|&child| self.release_child(level, child, chunks));
        }
    }

    /// Calls `each` with the positions at which two trees of one height differ, in ascending order,
    /// and their chunks there.
    pub fn diff(&self, a: Root, b: Root, each: &mut dyn FnMut(u64, u32, u32)) {
        self.diff_nodes(a.height - 1, a.node, b.node, 0, each);
    }

    fn diff_nodes(&self, level: u32, a: u32, b: u32, base: u64, each: &mut dyn FnMut(u64, u32, u32)) {
        if a == b {
            return;
        }
        let nodes = &self.levels[level as usize];
        let child_span = span(level) / FAN_OUT as u64;
        let pairs = nodes.children(a).into_iter().zip(nodes.children(b));
        if level > 0 {
            let below = &self.levels[level as usize - 1];
            pairs.clone().filter(|(a, b)| a != b).for_each(|(a, b)| below.prefetch([a, b]));
        }
        for (index, (a, b)) in pairs.enumerate() {
            let position = base + index as u64 * child_span;
            match level {
                0 if a != b => each(position, a, b),
                0 => {}
                _ => self.diff_nodes(level - 1, a, b, position, each),
            }
        }
    }
}
