//! A search tree of objects: a treap, whose priorities are hashes of the keys.

use std::cell::Cell;

use super::objects::Objects;

type Link<'h, V> = Cell<Option<&'h Node<'h, V>>>;

struct Node<'h, V> {
    key: u64,
    value: V,
    left: Link<'h, V>,
    right: Link<'h, V>,
}

impl<V> Node<'_, V> {
    /// Nodes of a higher priority are above others, which balances the tree.
    fn priority(&self) -> u64 {
        self.key.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32).wrapping_mul(0xff51_afd7_ed55_8ccd)
    }
}

/// Values by their keys.
pub(super) struct Tree<'h, V> {
    objects: &'h Objects,
    root: Link<'h, V>,
}

impl<'h, V: Copy> Tree<'h, V> {
    /// An empty tree.
    pub fn new(objects: &'h Objects) -> Self {
        Tree { objects, root: Cell::new(None) }
    }

    /// The value of a key.
    pub fn get(&self, key: u64) -> Option<V> {
        let mut at = self.root.get();
        while let Some(node) = at {
            if node.key == key {
                return Some(node.value);
            }
            at = if key < node.key { node.left.get() } else { node.right.get() };
        }
        None
    }

    /// Adds a key that the tree does not have.
    pub fn insert(&self, key: u64, value: V) {
        let new = self.objects.make(Node { key, value, left: Cell::new(None), right: Cell::new(None) });
        let mut link = &self.root;
        while let Some(node) = link.get().filter(|node| node.priority() >= new.priority()) {
            link = if key < node.key { &node.left } else { &node.right };
        }
        // What is below is split in two at the key.
        let mut rest = link.replace(Some(new));
        let (mut less, mut greater) = (&new.left, &new.right);
        while let Some(node) = rest {
            let (end, next) = if node.key < key { (&mut less, &node.right) } else { (&mut greater, &node.left) };
            end.set(Some(node));
            *end = next;
            rest = next.get();
        }
        less.set(None);
        greater.set(None);
    }

    /// Removes a key. Returns its value.
    pub fn remove(&self, key: u64) -> Option<V> {
        let mut link = &self.root;
        let found = loop {
            let node = link.get()?;
            if node.key == key {
                break node;
            }
            link = if key < node.key { &node.left } else { &node.right };
        };
        let (mut left, mut right) = (found.left.get(), found.right.get());
        loop {
            match (left, right) {
                (Some(l), Some(r)) if l.priority() >= r.priority() => {
                    link.set(left);
                    link = &l.right;
                    left = link.get();
                }
                (Some(_), Some(r)) => {
                    link.set(right);
                    link = &r.left;
                    right = link.get();
                }
                (rest, None) | (None, rest) => {
                    link.set(rest);
                    break;
                }
            }
        }
        let value = found.value;
        // SAFETY: no link leads to the node any more, and it is not used again.
        unsafe { self.objects.free(std::ptr::from_ref(found)) };
        Some(value)
    }

    /// Calls `each` with all keys and values, in ascending order.
    pub fn each(&self, mut each: impl FnMut(u64, V)) {
        let (mut above, mut at) = (Vec::new(), self.root.get());
        loop {
            while let Some(node) = at {
                above.push(node);
                at = node.left.get();
            }
            let Some(node) = above.pop() else { return };
            each(node.key, node.value);
            at = node.right.get();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::fpm::objects::ObjectAllocator;
    use crate::measuring::random::Xorshift;

    #[test]
    fn it_is_a_map() {
        let objects = Objects::new(ObjectAllocator::System, false);
        let (tree, mut map) = (Tree::new(&objects), BTreeMap::new());
        let mut random = Xorshift::new(7);
        for step in 0..20_000 {
            let key = random.below(500);
            if tree.get(key).is_some() {
                assert_eq!(tree.remove(key), map.remove(&key));
            } else {
                tree.insert(key, step);
                assert!(map.insert(key, step).is_none());
            }
        }
        assert_eq!(tree.remove(1000), None);
        let mut all = Vec::new();
        tree.each(|key, value| all.push((key, value)));
        assert!(all.len() > 100 && all.iter().copied().eq(map));
    }
}
