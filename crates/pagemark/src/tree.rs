//! The page tree: a snapshot is an immutable radix tree whose leaves name pages.
//!
//! Each node has 16 children and covers 4 bits of the page number. The id of a node is the hash of
//! the ids of its children, and the tree is as high as its highest page needs: equal content has an
//! equal root. A changed copy shares each unchanged node with the original, in memory and in a
//! store, so it costs O(changed pages).

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use pagemark_linux::room;

use crate::error::Object;
use crate::{ContentId, Error, ErrorKind, Kind, PageNumber, PageRange, Store};

/// Number of children of a node.
const FAN_OUT: usize = 16;
/// Bits of the page number that one level covers.
const LEVEL_BITS: u32 = 4;
/// The level of the root of the highest possible tree; it covers all of `u64`.
const MAX_LEVEL: u8 = 15;

impl Error {
    fn too_many_pages(root: ContentId) -> Error {
        let reason = "is a page tree that names more pages than this machine can list in an eighth of its memory";
        let help = "Read it on a machine with more memory. If no memory of that length was saved, the repository \
                    is not to be trusted.";
        Error::about(ErrorKind::NoMemory, Object::Content(root), reason).help(help)
    }
}

/// The content of the pages of a space: a map from page number to content.
///
/// A page that is not in the tree holds [`ContentId::ZERO`]. Cloning is O(1); a clone shares
/// unchanged nodes with the original.
///
/// A node records that it was saved, so that [`PageTree::save`] puts only new nodes. Clones that
/// were made before the save do not have this record. Therefore a tree must be saved into one store
/// only. If the store may discard its content, keep a clone from before the save and continue with
/// the clone after a discard, or call [`PageTree::forget_saved`].
///
/// ```
/// use pagemark::{ContentId, PageNumber, PageTree};
/// let content = ContentId([1; 16]);
/// let page = PageNumber::new(0x7fff_0000);
/// let mut tree = PageTree::new();
/// tree.set(page, content);
/// let before = tree.clone();
/// tree.clear(PageNumber::MIN..PageNumber::MAX);
/// assert_eq!(before.get(page), content);
/// assert_eq!(tree.page_count(), 0);
/// ```
#[derive(Clone, Default)]
pub struct PageTree {
    root: Option<Arc<Node>>,
}

#[derive(Clone)]
struct Node {
    /// 0 for a leaf.
    level: u8,
    /// The id under which the present content was saved; zero if it was not saved.
    saved: ContentId,
    /// Number of pages below. A stored tree can name a subtree several times, so the number can
    /// exceed the number of different pages.
    pages: u64,
    children: Children,
}

#[derive(Clone)]
enum Children {
    Pages([ContentId; FAN_OUT]),
    Nodes([Option<Arc<Node>>; FAN_OUT]),
}

impl Node {
    fn empty(level: u8) -> Node {
        let children = match level {
            0 => Children::Pages([ContentId::ZERO; FAN_OUT]),
            _ => Children::Nodes(Default::default()),
        };
        Node { level, saved: ContentId::ZERO, pages: 0, children }
    }

    /// Sets a page. Returns the number of added pages.
    fn set(&mut self, page: u64, id: ContentId) -> u64 {
        self.saved = ContentId::ZERO;
        let child = child_of(page, self.level);
        let more = match &mut self.children {
            Children::Pages(ids) => u64::from(std::mem::replace(&mut ids[child], id).is_zero()),
            Children::Nodes(nodes) => {
                let node = nodes[child].get_or_insert_with(|| Arc::new(Node::empty(self.level - 1)));
                Arc::make_mut(node).set(page, id)
            }
        };
        self.pages = self.pages.saturating_add(more);
        more
    }

    /// Removes the pages from `first` to `last`. `base` is the first page that the node covers.
    fn clear(&mut self, base: u64, first: u64, last: u64) {
        self.saved = ContentId::ZERO;
        let level = self.level;
        let touched = |child: usize| {
            let (from, to) = span(base, level, child);
            (from <= last && to >= first).then_some((from, from >= first && to <= last))
        };
        match &mut self.children {
            Children::Pages(ids) => {
                for (child, id) in ids.iter_mut().enumerate() {
                    if touched(child).is_some() {
                        *id = ContentId::ZERO;
                    }
                }
                self.pages = ids.iter().filter(|id| !id.is_zero()).count() as u64;
            }
            Children::Nodes(nodes) => {
                for (child, slot) in nodes.iter_mut().enumerate() {
                    let (Some((from, whole)), Some(node)) = (touched(child), slot.as_mut()) else { continue };
                    if !whole {
                        Arc::make_mut(node).clear(from, first, last);
                    }
                    if whole || node.pages == 0 {
                        *slot = None;
                    }
                }
                self.pages = nodes.iter().flatten().fold(0, |sum: u64, node| sum.saturating_add(node.pages));
            }
        }
    }

    /// How many pages from `first` to `last` are named. `base` is the first page that the node
    /// covers.
    fn count(&self, base: u64, first: u64, last: u64) -> u64 {
        let touched = |child: usize| {
            let (from, to) = span(base, self.level, child);
            (from <= last && to >= first).then_some((from, from >= first && to <= last))
        };
        let of_child = |child: usize| match &self.children {
            Children::Pages(ids) => u64::from(!ids[child].is_zero() && touched(child).is_some()),
            Children::Nodes(nodes) => match (&nodes[child], touched(child)) {
                (Some(node), Some((_, true))) => node.pages,
                (Some(node), Some((from, false))) => node.count(from, first, last),
                _ => 0,
            },
        };
        (0..FAN_OUT).map(of_child).fold(0, u64::saturating_add)
    }

    /// True if the root could be lower: it has no child but the first.
    fn is_too_high(&self) -> bool {
        matches!(&self.children, Children::Nodes(nodes) if nodes[1..].iter().all(Option::is_none))
    }

    fn save(node: &mut Arc<Node>, store: &mut dyn Store) -> Result<ContentId, Error> {
        if !node.saved.is_zero() {
            return Ok(node.saved);
        }
        let node = Arc::make_mut(node);
        let mut record = NodeRecord { level: node.level, children: [ContentId::ZERO; FAN_OUT] };
        match &mut node.children {
            Children::Pages(ids) => record.children = *ids,
            Children::Nodes(nodes) => {
                for (id, child) in record.children.iter_mut().zip(nodes) {
                    if let Some(child) = child {
                        *id = Node::save(child, store)?;
                    }
                }
            }
        }
        node.saved = record.put(store)?;
        Ok(node.saved)
    }

    fn forget_saved(node: &mut Arc<Node>) {
        let node = Arc::make_mut(node);
        node.saved = ContentId::ZERO;
        if let Children::Nodes(nodes) = &mut node.children {
            nodes.iter_mut().flatten().for_each(Node::forget_saved);
        }
    }

    /// Makes a node of its record. `below` has the nodes of the next lower level that it names.
    fn of_record(id: ContentId, record: &NodeRecord, below: &HashMap<ContentId, Arc<Node>>) -> Arc<Node> {
        let mut node = Node { saved: id, ..Node::empty(record.level) };
        match &mut node.children {
            Children::Pages(ids) => {
                *ids = record.children;
                node.pages = ids.iter().filter(|id| !id.is_zero()).count() as u64;
            }
            Children::Nodes(nodes) => {
                for (slot, child) in nodes.iter_mut().zip(&record.children) {
                    *slot = below.get(child).cloned();
                    node.pages = node.pages.saturating_add(slot.as_ref().map_or(0, |child| child.pages));
                }
            }
        }
        Arc::new(node)
    }
}

impl PageTree {
    /// The empty tree.
    pub fn new() -> Self {
        Self::default()
    }

    /// The content of a page; [`ContentId::ZERO`] for a page that is not in the tree.
    pub fn get(&self, page: PageNumber) -> ContentId {
        let page = page.get();
        let mut node = match &self.root {
            Some(root) if level_for(page) <= root.level => root,
            _ => return ContentId::ZERO,
        };
        loop {
            let child = child_of(page, node.level);
            match &node.children {
                Children::Pages(ids) => return ids[child],
                Children::Nodes(nodes) => match &nodes[child] {
                    Some(next) => node = next,
                    None => return ContentId::ZERO,
                },
            }
        }
    }

    /// Sets the content of a page. [`ContentId::ZERO`] removes the page.
    pub fn set(&mut self, page: PageNumber, id: ContentId) {
        // An unchanged page stays shared and saved.
        if self.get(page) == id {
            return;
        }
        let page = page.get();
        if id.is_zero() {
            return self.clear_inclusive(page, page);
        }
        let level = level_for(page);
        let mut root = self.root.take().unwrap_or_else(|| Arc::new(Node::empty(level)));
        while root.level < level {
            let mut higher = Node::empty(root.level + 1);
            higher.pages = root.pages;
            if let Children::Nodes(nodes) = &mut higher.children {
                nodes[0] = Some(root);
            }
            root = Arc::new(higher);
        }
        Arc::make_mut(&mut root).set(page, id);
        self.root = Some(root);
    }

    /// Forgets pages. Costs O(levels) and what is freed, however many pages the range has.
    pub fn clear(&mut self, pages: PageRange) {
        if !pages.is_empty() && self.range(pages.clone()).next().is_some() {
            self.clear_inclusive(pages.start.get(), pages.end.get() - 1);
        }
    }

    fn clear_inclusive(&mut self, first: u64, last: u64) {
        let Some(mut root) = self.root.take() else { return };
        Arc::make_mut(&mut root).clear(0, first, last);
        while root.pages > 0 && root.is_too_high() {
            let Children::Nodes(nodes) = &root.children else { break };
            let Some(lower) = nodes[0].clone() else { break };
            root = lower;
        }
        self.root = (root.pages > 0).then_some(root);
    }

    /// The named pages in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (PageNumber, ContentId)> + '_ {
        self.walk(0, u64::MAX)
    }

    /// The named pages of a range in ascending order.
    pub fn range(&self, pages: PageRange) -> impl Iterator<Item = (PageNumber, ContentId)> + '_ {
        // An empty range must give nothing: its first page is behind its last.
        let (first, last) = if pages.is_empty() { (1, 0) } else { (pages.start.get(), pages.end.get() - 1) };
        self.walk(first, last)
    }

    fn walk(&self, first: u64, last: u64) -> Walk<'_> {
        Walk { path: self.root.as_deref().map(|root| (root, 0, 0)).into_iter().collect(), first, last }
    }

    /// How many pages of a range are named. Costs O(levels), however many they are.
    pub fn count(&self, pages: PageRange) -> u64 {
        match &self.root {
            Some(root) if !pages.is_empty() => root.count(0, pages.start.get(), pages.end.get() - 1),
            _ => 0,
        }
    }

    /// True if all pages are before `end`. Costs O(levels), however many they are: a small tree
    /// that was loaded can name any number of pages.
    pub fn is_before(&self, end: PageNumber) -> bool {
        self.walk(end.get(), u64::MAX).next().is_none()
    }

    /// How many pages are named.
    pub fn page_count(&self) -> u64 {
        self.root.as_ref().map_or(0, |root| root.pages)
    }

    /// Puts the nodes that were not saved before, and returns the id of the root;
    /// [`ContentId::ZERO`] for the empty tree. [`PageTree`] describes what to do if the store
    /// discards the nodes later.
    ///
    /// # Errors
    /// The errors of [`Store::put`]. Nodes that were put before the error count as saved.
    pub fn save(&mut self, store: &mut dyn Store) -> Result<ContentId, Error> {
        self.root.as_mut().map_or(Ok(ContentId::ZERO), |root| Node::save(root, store))
    }

    /// Makes the next [`PageTree::save`] put every node.
    pub fn forget_saved(&mut self) {
        self.root.iter_mut().for_each(Node::forget_saved);
    }

    /// Loads a saved tree. Each node is read once, so memory and time are bounded by the content of
    /// the store.
    ///
    /// # Errors
    /// The errors of [`Store::get`], and `ErrorKind::Damaged` for content that is not a tree.
    pub fn load(root: ContentId, store: &dyn Store) -> Result<PageTree, Error> {
        if root.is_zero() {
            return Ok(PageTree::new());
        }
        // The records of each level, the root's first. A subtree that is named several times is one record.
        let mut levels = vec![vec![(root, NodeRecord::get_root(root, store)?)]];
        while let Some(above) = levels.last()
            && let Some((_, NodeRecord { level: 1.., .. })) = above.first()
        {
            let level = above[0].1.level - 1;
            let named = above.iter().flat_map(|(_, record)| record.children).filter(|id| !id.is_zero());
            let mut ids: Vec<ContentId> = named.collect();
            ids.sort_unstable();
            ids.dedup();
            levels.push(NodeRecord::get_many(ids, level, store)?);
        }
        let mut nodes = HashMap::new();
        for records in levels.iter().rev() {
            nodes = records.iter().map(|(id, record)| (*id, Node::of_record(*id, record, &nodes))).collect();
        }
        Ok(PageTree { root: nodes.remove(&root) })
    }

    /// The pages of `ranges` that a saved tree names, in ascending order. `ranges` must be
    /// ascending and disjoint. Nodes that name other pages alone are not read.
    ///
    /// # Errors
    /// Those of [`PageTree::load`]. `ErrorKind::NoMemory` for more pages than this machine can list
    /// in an eighth of its memory: a small tree can name any number of pages.
    ///
    /// ```
    /// use pagemark::{ContentId, MemoryStore, PageNumber, PageTree};
    /// let (mut tree, mut store) = (PageTree::new(), MemoryStore::new());
    /// (0..100).for_each(|page| tree.set(PageNumber::new(page), ContentId([1; 16])));
    /// let root = tree.save(&mut store)?;
    /// let range = PageNumber::new(98)..PageNumber::new(200);
    /// let pages = PageTree::read_pages(root, &[range], &store)?;
    /// assert_eq!(pages.iter().map(|(page, _)| page.get()).collect::<Vec<_>>(), [98, 99]);
    /// # Ok::<(), pagemark::Error>(())
    /// ```
    pub fn read_pages(
        root: ContentId,
        ranges: &[PageRange],
        store: &dyn Store,
    ) -> Result<Vec<(PageNumber, ContentId)>, Error> {
        let most = room::most_values::<(PageNumber, ContentId)>().map_err(Error::system("asking for the memory"))?;
        PageTree::read_pages_up_to(most, root, ranges, store)
    }

    /// Like [`PageTree::read_pages`], if there are no more than `most` pages.
    fn read_pages_up_to(
        most: usize,
        root: ContentId,
        ranges: &[PageRange],
        store: &dyn Store,
    ) -> Result<Vec<(PageNumber, ContentId)>, Error> {
        let mut pages = Vec::new();
        if root.is_zero() || ranges.iter().all(|range| range.is_empty()) {
            return Ok(pages);
        }
        let is_wanted = |(first, last): (u64, u64)| {
            let behind = ranges.partition_point(|range| range.end.get() <= first);
            ranges.get(behind).is_some_and(|range| range.start.get() <= last)
        };
        let record = NodeRecord::get_root(root, store)?;
        let mut level = record.level;
        let mut records = HashMap::from([(root, record)]);
        // The nodes of a level, each with the first page that it covers.
        let mut nodes = vec![(0, root)];
        loop {
            let mut below = Vec::new();
            for (base, id) in nodes {
                let record = records.get(&id).ok_or_else(|| Error::missing(id))?;
                for (child, &id) in record.children.iter().enumerate().filter(|(_, id)| !id.is_zero()) {
                    let covered = record.child_span(base, child);
                    match is_wanted(covered) {
                        true if level == 0 => pages.push((PageNumber::new(covered.0), id)),
                        true => below.push((covered.0, id)),
                        false => {}
                    }
                }
                if pages.len().max(below.len()) > most {
                    return Err(Error::too_many_pages(root));
                }
            }
            if level == 0 {
                return Ok(pages);
            }
            level -= 1;
            let mut ids: Vec<ContentId> = below.iter().map(|(_, id)| *id).collect();
            ids.sort_unstable();
            ids.dedup();
            records = NodeRecord::get_many(ids, level, store)?.into_iter().collect();
            nodes = below;
        }
    }

    /// Calls `visit` for each page that differs between two saved trees, in ascending order, with
    /// its content in `a` and in `b`. Shared subtrees are not read.
    ///
    /// # Errors
    /// Those of [`PageTree::load`], and the errors of `visit`. `ErrorKind::NoMemory` if more pages
    /// differ than this machine can list in an eighth of its memory: a small tree can name any
    /// number of pages. `visit` may have been called before.
    pub fn diff(
        store: &dyn Store,
        a: ContentId,
        b: ContentId,
        visit: &mut dyn FnMut(PageNumber, ContentId, ContentId) -> Result<(), Error>,
    ) -> Result<(), Error> {
        type Differing = (PageNumber, ContentId, ContentId);
        let most = room::most_values::<Differing>().map_err(Error::system("asking for the memory"))?;
        PageTree::diff_up_to(most as u64, store, a, b, visit)
    }

    /// Like [`PageTree::diff`], if no more than `most` pages differ.
    fn diff_up_to(
        most: u64,
        store: &dyn Store,
        a: ContentId,
        b: ContentId,
        visit: &mut dyn FnMut(PageNumber, ContentId, ContentId) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if a == b {
            return Ok(());
        }
        let level_of = |id: ContentId| match id.is_zero() {
            true => Ok(0),
            false => NodeRecord::get_root(id, store).map(|record| record.level),
        };
        let roots = (Subtree { id: a, level: level_of(a)? }, Subtree { id: b, level: level_of(b)? });
        let level = roots.0.level.max(roots.1.level);
        // So that trees of few nodes that name many pages are refused at once, not after many pages.
        let mut leaves = LeafCount { store, most, known: HashMap::new() };
        if leaves.of_root(level, roots)?.is_none() {
            return Err(too_many_of(a, b, store)?);
        }
        let mut count = 0;
        diff_subtrees(store, level, 0, roots, &mut |page, old, new| {
            count += 1;
            if count > most {
                return Err(too_many_of(a, b, store)?);
            }
            visit(page, old, new)
        })
    }
}

/// The error for two trees that differ in too many pages: it names the one with more pages.
fn too_many_of(a: ContentId, b: ContentId, store: &dyn Store) -> Result<Error, Error> {
    let pages = |root| PageTree::load(root, store).map(|tree| tree.page_count());
    Ok(Error::too_many_pages(if pages(a)? > pages(b)? { a } else { b }))
}

/// Iterates over the pages of a tree.
struct Walk<'a> {
    /// From the root down: a node, the first page that it covers, and the index of the next child.
    path: Vec<(&'a Node, u64, usize)>,
    first: u64,
    last: u64,
}

impl Iterator for Walk<'_> {
    type Item = (PageNumber, ContentId);

    fn next(&mut self) -> Option<(PageNumber, ContentId)> {
        while let Some((node, base, child)) = self.path.last_mut() {
            if *child == FAN_OUT {
                self.path.pop();
                continue;
            }
            let (node, index) = (*node, *child);
            let (from, to) = span(*base, node.level, index);
            *child += 1;
            if from > self.last {
                self.path.clear();
                return None;
            }
            if to < self.first {
                continue;
            }
            match &node.children {
                Children::Pages(ids) if !ids[index].is_zero() => return Some((PageNumber::new(from), ids[index])),
                Children::Nodes(nodes) => {
                    if let Some(next) = &nodes[index] {
                        self.path.push((next, from, 0));
                    }
                }
                Children::Pages(_) => {}
            }
        }
        None
    }
}

/// A node as it is stored: the level in one byte, two bytes of which bit `i` (least significant
/// first) says that child `i` exists, then the ids of the children that exist.
pub(crate) struct NodeRecord {
    /// 0 for a leaf, whose children are pages.
    pub(crate) level: u8,
    /// [`ContentId::ZERO`] for a child that does not exist.
    pub(crate) children: [ContentId; FAN_OUT],
}

impl NodeRecord {
    fn put(&self, store: &mut dyn Store) -> Result<ContentId, Error> {
        let mut bytes = [0; 3 + FAN_OUT * 16];
        let (mut present, mut length) = (0u16, 3);
        for (child, id) in self.children.iter().enumerate().filter(|(_, id)| !id.is_zero()) {
            present |= 1 << child;
            bytes[length..length + 16].copy_from_slice(&id.0);
            length += 16;
        }
        bytes[0] = self.level;
        bytes[1..3].copy_from_slice(&present.to_le_bytes());
        store.put(Kind::Node, &bytes[..length])
    }

    fn decode(bytes: &[u8]) -> Option<NodeRecord> {
        let ([level, low, high], ids) = bytes.split_first_chunk()?;
        let present = u16::from_le_bytes([*low, *high]);
        let (ids, rest) = ids.as_chunks::<16>();
        if *level > MAX_LEVEL || present == 0 || ids.len() != present.count_ones() as usize || !rest.is_empty() {
            return None;
        }
        let mut ids = ids.iter();
        let mut children = [ContentId::ZERO; FAN_OUT];
        for child in (0..FAN_OUT).filter(|child| present & 1 << child != 0) {
            children[child] = ContentId(*ids.next()?);
        }
        let named = children.iter().filter(|id| !id.is_zero()).count();
        (named == present.count_ones() as usize).then_some(NodeRecord { level: *level, children })
    }

    /// Reads a root of any level.
    pub(crate) fn get_root(id: ContentId, store: &dyn Store) -> Result<NodeRecord, Error> {
        let damaged = |reason: &str| Error::damaged_content(id, reason);
        let record = NodeRecord::decode(&store.get(Kind::Node, id)?).ok_or_else(|| damaged("not a tree node"))?;
        if record.level > 0 && record.children[1..].iter().all(|id| id.is_zero()) {
            return Err(damaged("the tree is higher than its pages need"));
        }
        Ok(record)
    }

    /// Reads a node below the root.
    pub(crate) fn get(id: ContentId, level: u8, store: &dyn Store) -> Result<NodeRecord, Error> {
        NodeRecord::decode_at(&store.get(Kind::Node, id)?, id, level)
    }

    /// Reads the nodes of one level. The ids differ.
    fn get_many(ids: Vec<ContentId>, level: u8, store: &dyn Store) -> Result<Vec<(ContentId, NodeRecord)>, Error> {
        let decoded = Mutex::new((Vec::with_capacity(ids.len()), None));
        store.get_many(Kind::Node, &ids, &|pieces, content| {
            let records = pieces.iter().map(|piece| {
                let id = ids[piece.position];
                Ok((id, NodeRecord::decode_at(&content[piece.bytes.clone()], id, level)?))
            });
            let records: Result<Vec<_>, Error> = records.collect();
            let mut decoded = decoded.lock().unwrap_or_else(PoisonError::into_inner);
            match records {
                Ok(records) => decoded.0.extend(records),
                Err(error) => decoded.1 = Some(error),
            }
            if decoded.1.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        match decoded.into_inner().unwrap_or_else(PoisonError::into_inner) {
            (_, Some(error)) => Err(error),
            (records, None) if records.len() < ids.len() => {
                let unread = ids.iter().find(|id| records.iter().all(|(read, _)| read != *id));
                Err(Error::missing(unread.copied().unwrap_or_default()))
            }
            (records, None) => Ok(records),
        }
    }

    /// Decodes a node of a level.
    fn decode_at(bytes: &[u8], id: ContentId, level: u8) -> Result<NodeRecord, Error> {
        match NodeRecord::decode(bytes) {
            Some(record) if record.level == level => Ok(record),
            Some(record) => {
                let check = format!("a tree node of level {} at level {level}", record.level);
                Err(Error::damaged_content(id, check))
            }
            None => Err(Error::damaged_content(id, "not a tree node")),
        }
    }

    /// The first and the last page that a child covers, if `base` is the first page that the node
    /// covers.
    pub(crate) fn child_span(&self, base: u64, child: usize) -> (u64, u64) {
        span(base, self.level, child)
    }
}

/// A subtree to compare. The id of a missing subtree is zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Subtree {
    id: ContentId,
    level: u8,
}

impl Subtree {
    /// The children of the subtree, extended to the height `level`.
    fn children(self, level: u8, store: &dyn Store) -> Result<[Subtree; FAN_OUT], Error> {
        let mut children = [Subtree { id: ContentId::ZERO, level: 0 }; FAN_OUT];
        if self.id.is_zero() {
        } else if self.level < level {
            children[0] = self;
        } else {
            let record = NodeRecord::get(self.id, level, store)?;
            for (child, id) in children.iter_mut().zip(record.children) {
                *child = Subtree { id, level: level.saturating_sub(1) };
            }
        }
        Ok(children)
    }
}

/// The children that differ of two subtrees, with their indexes.
fn differing_children(
    store: &dyn Store,
    level: u8,
    (a, b): (Subtree, Subtree),
) -> Result<impl Iterator<Item = (usize, (Subtree, Subtree))>, Error> {
    let pairs = a.children(level, store)?.into_iter().zip(b.children(level, store)?);
    Ok(pairs.enumerate().filter(|(_, (a, b))| a.id != b.id))
}

fn diff_subtrees(
    store: &dyn Store,
    level: u8,
    base: u64,
    pair: (Subtree, Subtree),
    visit: &mut dyn FnMut(PageNumber, ContentId, ContentId) -> Result<(), Error>,
) -> Result<(), Error> {
    for (child, pair) in differing_children(store, level, pair)? {
        let (first, _) = span(base, level, child);
        match level {
            0 => visit(PageNumber::new(first), pair.0.id, pair.1.id)?,
            _ => diff_subtrees(store, level - 1, first, pair, visit)?,
        }
    }
    Ok(())
}

/// Counts the leaves in which two trees differ, each of which names a page that differs. Each pair
/// of subtrees is compared once, however often the trees name it; leaves are not read.
struct LeafCount<'a> {
    store: &'a dyn Store,
    most: u64,
    /// The pairs that were compared, with the number of leaves of each.
    known: HashMap<(Subtree, Subtree), u64>,
}

impl LeafCount<'_> {
    /// None for more than `most`.
    fn of_root(&mut self, level: u8, roots: (Subtree, Subtree)) -> Result<Option<u64>, Error> {
        // So many pages are below a root of this level.
        match 16u64.checked_pow(u32::from(level) + 1).is_some_and(|pages| pages <= self.most) {
            true => Ok(Some(0)),
            false => self.of(level, roots),
        }
    }

    fn of(&mut self, level: u8, pair: (Subtree, Subtree)) -> Result<Option<u64>, Error> {
        if level == 0 {
            return Ok(Some(1));
        }
        if let Some(count) = self.known.get(&pair) {
            return Ok(Some(*count));
        }
        let mut count: u64 = 0;
        for (_, pair) in differing_children(self.store, level, pair)? {
            match self.of(level - 1, pair)? {
                Some(more) if count.saturating_add(more) <= self.most => count += more,
                _ => return Ok(None),
            }
        }
        self.known.insert(pair, count);
        Ok((self.known.len() as u64 <= self.most).then_some(count))
    }
}

/// The level of the root of the lowest tree that covers `page`.
fn level_for(page: u64) -> u8 {
    (page.checked_ilog2().unwrap_or(0) / LEVEL_BITS) as u8
}

fn child_of(page: u64, level: u8) -> usize {
    (page >> (LEVEL_BITS * u32::from(level))) as usize % FAN_OUT
}

/// The first and the last page that a child covers.
fn span(base: u64, level: u8, child: usize) -> (u64, u64) {
    let shift = LEVEL_BITS * u32::from(level);
    let first = base + ((child as u64) << shift);
    (first, first + ((1 << shift) - 1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::MemoryStore;

    fn id(number: u8) -> ContentId {
        ContentId(if number == 0 { [0; 16] } else { [number; 16] })
    }

    #[derive(Debug, Clone)]
    enum Change {
        Set(PageNumber, u8),
        Clear(PageRange),
        Save,
    }

    fn page() -> impl Strategy<Value = PageNumber> {
        prop_oneof![0u64..40, 0x7_ffff_fff0u64..0x8_0000_0020, any::<u64>(), Just(u64::MAX)].prop_map(PageNumber::new)
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            6 => (page(), 0u8..4).prop_map(|(page, id)| Change::Set(page, id)),
            2 => (page(), page()).prop_map(|(a, b)| Change::Clear(a.min(b)..a.max(b))),
            1 => (page(), 0u64..40).prop_map(|(a, n)| Change::Clear(a..a.saturating_add(n))),
            1 => Just(Change::Save),
        ]
    }

    fn content(tree: &PageTree) -> Vec<(PageNumber, ContentId)> {
        tree.iter().collect()
    }

    fn build(model: &BTreeMap<PageNumber, ContentId>) -> PageTree {
        let mut tree = PageTree::new();
        model.iter().rev().for_each(|(&page, &id)| tree.set(page, id));
        tree
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(changes in prop::collection::vec(change(), 0..60), a in page(), b in page()) {
            let mut store = MemoryStore::new();
            let (mut tree, mut model) = (PageTree::new(), BTreeMap::new());
            let mut saved: Vec<(ContentId, BTreeMap<PageNumber, ContentId>)> = Vec::new();
            for change in changes {
                let before = (tree.clone(), content(&tree));
                match change {
                    Change::Set(page, 0) => { tree.set(page, ContentId::ZERO); model.remove(&page); }
                    Change::Set(page, n) => { tree.set(page, id(n)); model.insert(page, id(n)); }
                    Change::Clear(pages) => { tree.clear(pages.clone()); model.retain(|p, _| !pages.contains(p)); }
                    Change::Save => saved.push((tree.save(&mut store).unwrap(), model.clone())),
                }
                prop_assert_eq!(content(&before.0), before.1, "a clone changed");
                prop_assert_eq!(content(&tree), model.clone().into_iter().collect::<Vec<_>>());
                prop_assert_eq!(tree.page_count(), model.len() as u64);
            }
            for page in model.keys().copied().chain([a, b]) {
                prop_assert_eq!(tree.get(page), model.get(&page).copied().unwrap_or_default());
            }
            let range = a.min(b)..a.max(b);
            let expected: Vec<_> = model.range(range.clone()).map(|(&page, &id)| (page, id)).collect();
            prop_assert_eq!(tree.range(range.clone()).collect::<Vec<_>>(), expected.clone());
            prop_assert_eq!(tree.count(range.clone()), expected.len() as u64);
            prop_assert_eq!(tree.is_before(a), model.keys().all(|&page| page < a));

            let root = tree.save(&mut store).unwrap();
            prop_assert_eq!(build(&model).save(&mut store).unwrap(), root, "equal content, another root");
            prop_assert_eq!(PageTree::read_pages(root, std::slice::from_ref(&range), &store).unwrap(), expected);
            let behind = range.end..PageNumber::MAX;
            let expected: Vec<_> = model.iter().map(|(&page, &id)| (page, id))
                .filter(|(page, _)| range.contains(page) || behind.contains(page)).collect();
            prop_assert_eq!(PageTree::read_pages(root, &[range, behind], &store).unwrap(), expected);
            saved.push((root, model));
            for (root, model) in &saved {
                let loaded = PageTree::load(*root, &store).unwrap();
                prop_assert_eq!(content(&loaded), model.clone().into_iter().collect::<Vec<_>>());
                prop_assert_eq!(loaded.page_count(), model.len() as u64);
            }
            for pair in saved.windows(2) {
                let mut found = Vec::new();
                PageTree::diff(&store, pair[0].0, pair[1].0, &mut |page, a, b| { found.push((page, a, b)); Ok(()) }).unwrap();
                let pages: std::collections::BTreeSet<PageNumber> = pair[0].1.keys().chain(pair[1].1.keys()).copied().collect();
                let in_model = |side: usize, page| pair[side].1.get(&page).copied().unwrap_or_default();
                let expected: Vec<_> = pages.into_iter().map(|page| (page, in_model(0, page), in_model(1, page)))
                    .filter(|(_, a, b)| a != b).collect();
                prop_assert_eq!(found, expected);
            }
        }

        #[test]
        fn any_bytes_are_a_node_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut store = MemoryStore::new();
            let id = store.put(Kind::Node, &bytes).unwrap();
            if let Ok(tree) = PageTree::load(id, &store) {
                prop_assert!(tree.page_count() > 0);
            }
        }
    }

    #[test]
    fn a_change_saves_only_its_path() {
        let mut store = MemoryStore::new();
        let mut tree = PageTree::new();
        (0..4096).for_each(|page| tree.set(PageNumber::new(page), ContentId([(page % 251) as u8 + 1; 16])));
        tree.save(&mut store).unwrap();
        let before = store.content_count();
        tree.set(PageNumber::new(17), id(255));
        tree.save(&mut store).unwrap();
        assert_eq!(store.content_count() - before, 3, "a leaf and the two nodes above it");
    }

    #[test]
    fn a_part_of_a_tree_is_read_without_the_nodes_of_the_rest() {
        let mut tree = PageTree::new();
        (0..4096).for_each(|page| tree.set(PageNumber::new(page), ContentId([(page % 251) as u8 + 1; 16])));
        let mut whole = MemoryStore::with_key([1; 32]);
        let root = tree.save(&mut whole).unwrap();
        // The path to a single page.
        let mut part = MemoryStore::with_key([1; 32]);
        let mut id = root;
        for level in (0..3).rev() {
            let record = match level {
                2 => NodeRecord::get_root(id, &whole).unwrap(),
                _ => NodeRecord::get(id, level, &whole).unwrap(),
            };
            record.put(&mut part).unwrap();
            id = record.children[child_of(17, level)];
        }
        let page = |number| PageNumber::new(number)..PageNumber::new(number + 1);
        let pages = PageTree::read_pages(root, &[page(17)], &part).unwrap();
        assert_eq!(pages, [(PageNumber::new(17), tree.get(PageNumber::new(17)))]);
        let error = PageTree::read_pages(root, &[page(17), page(32)], &part).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Missing);
    }

    #[test]
    fn what_was_saved_into_a_discarded_store_is_saved_again() {
        let mut tree = PageTree::new();
        tree.set(PageNumber::new(5), id(1));
        let mut before = tree.clone();
        let root = tree.save(&mut MemoryStore::with_key([1; 32])).unwrap();
        let mut store = MemoryStore::with_key([1; 32]);
        assert_eq!(before.save(&mut store).unwrap(), root);
        assert_eq!(store.content_count(), 1);
        let mut store = MemoryStore::with_key([1; 32]);
        tree.forget_saved();
        assert_eq!(tree.save(&mut store).unwrap(), root);
        assert_eq!(store.content_count(), 1);
    }

    #[test]
    fn a_small_tree_that_names_itself_very_often_loads_at_once() {
        let mut store = MemoryStore::new();
        let mut child = id(1);
        for level in 0..=MAX_LEVEL {
            child = NodeRecord { level, children: [child; FAN_OUT] }.put(&mut store).unwrap();
        }
        assert_eq!(PageTree::load(child, &store).unwrap().page_count(), u64::MAX);
    }

    #[test]
    fn of_a_small_tree_that_names_itself_very_often_only_what_is_wanted_is_listed() {
        let mut store = MemoryStore::new();
        let mut child = id(1);
        for level in 0..=MAX_LEVEL {
            child = NodeRecord { level, children: [child; FAN_OUT] }.put(&mut store).unwrap();
        }
        let range = PageNumber::new(1 << 40)..PageNumber::new((1 << 40) + 1000);
        let pages = PageTree::read_pages_up_to(1000, child, std::slice::from_ref(&range), &store).unwrap();
        assert_eq!(pages.len(), 1000);
        assert_eq!(PageTree::load(child, &store).unwrap().count(range.clone()), 1000);
        let error = PageTree::read_pages_up_to(999, child, &[range], &store).unwrap_err();
        assert_eq!((error.kind(), error.object()), (ErrorKind::NoMemory, &Object::Content(child)));
        let all = PageNumber::MIN..PageNumber::MAX;
        assert_eq!(PageTree::load(child, &store).unwrap().count(all.clone()), u64::MAX);
        assert_eq!(PageTree::read_pages(child, &[all], &store).unwrap_err().kind(), ErrorKind::NoMemory);
    }

    #[test]
    fn small_trees_that_name_themselves_very_often_are_compared_where_few_pages_differ() {
        let mut store = MemoryStore::new();
        let mut bombs = [id(1), id(2)];
        for level in 0..=MAX_LEVEL {
            bombs = bombs.map(|child| NodeRecord { level, children: [child; FAN_OUT] }.put(&mut store).unwrap());
        }
        let [a, b] = bombs;
        for (from, to, named) in [(ContentId::ZERO, a, a), (a, ContentId::ZERO, a), (a, b, b)] {
            let compared = PageTree::diff(&store, from, to, &mut |page, _, _| panic!("{page} of very many"));
            let error = compared.unwrap_err();
            assert_eq!((error.kind(), error.object()), (ErrorKind::NoMemory, &Object::Content(named)));
        }

        let mut tree = PageTree::load(a, &store).unwrap();
        let changed: Vec<PageNumber> = [0, 17, 1 << 40, u64::MAX].map(PageNumber::new).into();
        changed.iter().for_each(|&page| tree.set(page, id(2)));
        let (root, mut found) = (tree.save(&mut store).unwrap(), Vec::new());
        let mut compare = |most| {
            found.clear();
            PageTree::diff_up_to(most, &store, a, root, &mut |page, _, _| {
                found.push(page);
                Ok(())
            })
        };
        assert_eq!(compare(3).unwrap_err().kind(), ErrorKind::NoMemory);
        compare(100).unwrap();
        assert_eq!(found, changed);
    }

    /// Leaves are counted before they are read, and pages as they are found.
    #[test]
    fn no_more_pages_are_compared_than_were_asked_for() {
        let mut store = MemoryStore::new();
        let mut tree = PageTree::new();
        (0..1000).for_each(|page| tree.set(PageNumber::new(page), id(1)));
        let root = tree.save(&mut store).unwrap();
        for most in [0, 1, 62, 63, 999, 1000, 4096] {
            let mut count = 0;
            let compared = PageTree::diff_up_to(most, &store, ContentId::ZERO, root, &mut |_, _, _| {
                count += 1;
                Ok(())
            });
            assert!(count <= most);
            assert_eq!(
                compared.map_err(|error| error.kind()),
                if most < 1000 { Err(ErrorKind::NoMemory) } else { Ok(()) }
            );
        }
    }

    #[test]
    fn refuses_levels_that_do_not_descend() {
        let mut store = MemoryStore::new();
        let leaf = NodeRecord { level: 0, children: [id(1); FAN_OUT] }.put(&mut store).unwrap();
        let high = NodeRecord { level: 2, children: [leaf; FAN_OUT] }.put(&mut store).unwrap();
        assert!(matches!(PageTree::load(high, &store), Err(error) if error.kind() == ErrorKind::Damaged));
        let mut children = [ContentId::ZERO; FAN_OUT];
        children[0] = leaf;
        let lone = NodeRecord { level: 1, children }.put(&mut store).unwrap();
        assert!(matches!(PageTree::load(lone, &store), Err(error) if error.kind() == ErrorKind::Damaged));
    }
}
