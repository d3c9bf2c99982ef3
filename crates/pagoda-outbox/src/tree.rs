//! Names: which file or directory is where. A file has one name or none; there are no links.

use std::collections::{BTreeMap, BTreeSet};

use crate::limits::{DEPTH_MAX, NAME_BYTES_MAX, NODES_MAX};
use crate::node::{Body, Directory, Ino, Kind, NewNode, Node, ROOT};
use crate::policy::Policy;
use crate::refusal::Refusal;

/// Whether a rename may take the place of a file that has the name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    Allowed,
    Refused,
}

#[derive(Debug)]
pub struct Tree {
    nodes: BTreeMap<Ino, Node>,
    next: Ino,
    /// Nodes that may have changed since [`Tree::take_touched`].
    touched: BTreeSet<Ino>,
}

fn check_name(name: &[u8]) -> Result<(), Refusal> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Refusal::NameTooLong);
    }
    if matches!(name, b"" | b"." | b"..") || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
        return Err(Refusal::BadName);
    }
    Ok(())
}

impl Tree {
    pub fn new() -> Tree {
        let root = Node::new(None, NewNode { mode: 0o1777, ..NewNode::default() }, Node::directory(Policy::default()));
        Tree::of(BTreeMap::from([(ROOT, root)]), Ino(ROOT.0 + 1))
    }

    /// Nodes that are in no directory yet.
    pub fn of(nodes: BTreeMap<Ino, Node>, next: Ino) -> Tree {
        let touched = nodes.keys().copied().collect();
        Tree { nodes, next, touched }
    }

    /// The number that the next node gets.
    pub fn next(&self) -> Ino {
        self.next
    }

    pub fn take_touched(&mut self) -> BTreeSet<Ino> {
        std::mem::take(&mut self.touched)
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn node(&self, ino: Ino) -> Result<&Node, Refusal> {
        self.nodes.get(&ino).ok_or(Refusal::NotFound)
    }

    /// Counts as a change of it.
    pub fn node_mut(&mut self, ino: Ino) -> Result<&mut Node, Refusal> {
        let node = self.nodes.get_mut(&ino).ok_or(Refusal::NotFound)?;
        self.touched.insert(ino);
        Ok(node)
    }

    pub fn nodes(&self) -> impl Iterator<Item = (Ino, &Node)> {
        self.nodes.iter().map(|(ino, node)| (*ino, node))
    }

    pub fn nodes_mut(&mut self) -> impl Iterator<Item = (Ino, &mut Node)> {
        self.nodes.iter_mut().map(|(ino, node)| (*ino, node))
    }

    pub fn inos(&self) -> Vec<Ino> {
        self.nodes.keys().copied().collect()
    }

    pub fn directory(&self, ino: Ino) -> Result<&Directory, Refusal> {
        match &self.node(ino)?.body {
            Body::Directory(directory) => Ok(directory),
            Body::File(_) => Err(Refusal::NotADirectory),
        }
    }

    fn directory_mut(&mut self, ino: Ino) -> Result<&mut Directory, Refusal> {
        match &mut self.node_mut(ino)?.body {
            Body::Directory(directory) => Ok(directory),
            Body::File(_) => Err(Refusal::NotADirectory),
        }
    }

    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Ino, Refusal> {
        if name.len() > NAME_BYTES_MAX {
            return Err(Refusal::NameTooLong);
        }
        self.directory(parent)?.names.get(name).copied().ok_or(Refusal::NotFound)
    }

    /// Directories above `ino`; an error if it, or one of them, has been removed.
    fn depth(&self, ino: Ino) -> Result<usize, Refusal> {
        let (mut depth, mut at) = (0, ino);
        while at != ROOT {
            at = self.node(at)?.parent.ok_or(Refusal::NotFound)?;
            depth += 1;
        }
        Ok(depth)
    }

    /// How many directories are below one another in `ino`, itself included; 0 of a file.
    fn height(&self, ino: Ino) -> usize {
        let mut height = 0;
        let mut level = vec![ino];
        loop {
            level.retain(|ino| self.directory(*ino).is_ok());
            if level.is_empty() {
                return height;
            }
            height += 1;
            level = level
                .iter()
                .filter_map(|ino| self.directory(*ino).ok())
                .flat_map(|dir| dir.names.values().copied())
                .collect();
        }
    }

    pub fn add(&mut self, parent: Ino, name: &[u8], new: NewNode, kind: Kind) -> Result<Ino, Refusal> {
        check_name(name)?;
        let directory = self.directory(parent)?;
        if directory.names.contains_key(name) {
            return Err(Refusal::Exists);
        }
        if self.nodes.len() >= NODES_MAX {
            return Err(Refusal::TooManyFiles);
        }
        let policy = directory.policy;
        let depth = self.depth(parent)?;
        let body = match kind {
            Kind::Directory if depth >= DEPTH_MAX => return Err(Refusal::TooDeep),
            Kind::Directory => Node::directory(policy),
            Kind::File => Body::File(Box::new(crate::content::Content::new(policy))),
        };
        let ino = self.next;
        self.next = Ino(ino.0 + 1);
        self.nodes.insert(ino, Node::new(Some(parent), new, body));
        self.touched.insert(ino);
        self.link(parent, name, ino, new.now)?;
        Ok(ino)
    }

    fn link(&mut self, parent: Ino, name: &[u8], ino: Ino, now: crate::node::Time) -> Result<(), Refusal> {
        self.put(parent, name, ino)?;
        let node = self.node_mut(parent)?;
        (node.modified, node.changed) = (now, now);
        Ok(())
    }

    /// Gives a name that no other has. Nothing else changes.
    pub fn put(&mut self, parent: Ino, name: &[u8], ino: Ino) -> Result<(), Refusal> {
        check_name(name)?;
        let directory = self.directory_mut(parent)?;
        if directory.names.contains_key(name) {
            return Err(Refusal::Exists);
        }
        directory.names.insert(name.into(), ino);
        directory.by_ino.insert(ino, name.into());
        Ok(())
    }

    /// Whether going up from `ino` ends at the root, or at what has no name, after no more directories than there may be.
    pub fn is_in_place(&self, ino: Ino) -> bool {
        let mut at = ino;
        for _ in 0..=DEPTH_MAX + 1 {
            match self.node(at).map(|node| node.parent) {
                Ok(Some(parent)) => at = parent,
                Ok(None) => return at == ROOT || at == ino,
                Err(_) => return false,
            }
        }
        false
    }

    /// Takes the name away from what has it; the node stays.
    pub fn unlink(&mut self, parent: Ino, name: &[u8], kind: Kind, now: crate::node::Time) -> Result<Ino, Refusal> {
        let ino = self.lookup(parent, name)?;
        match (kind, &self.node(ino)?.body) {
            (Kind::File, Body::Directory(_)) => return Err(Refusal::IsADirectory),
            (Kind::Directory, Body::File(_)) => return Err(Refusal::NotADirectory),
            (Kind::Directory, Body::Directory(directory)) if !directory.names.is_empty() => {
                return Err(Refusal::NotEmpty);
            }
            _ => {}
        }
        self.take_name(parent, name, ino, now)?;
        Ok(ino)
    }

    fn take_name(&mut self, parent: Ino, name: &[u8], ino: Ino, now: crate::node::Time) -> Result<(), Refusal> {
        let directory = self.directory_mut(parent)?;
        directory.names.remove(name);
        directory.by_ino.remove(&ino);
        let above = self.node_mut(parent)?;
        (above.modified, above.changed) = (now, now);
        let node = self.node_mut(ino)?;
        node.parent = None;
        node.changed = now;
        Ok(())
    }

    /// Takes away the name of `ino`, wherever it is.
    pub fn unlink_node(&mut self, ino: Ino, now: crate::node::Time) -> Result<(), Refusal> {
        let Some(parent) = self.node(ino)?.parent else { return Ok(()) };
        let name = self.directory(parent)?.by_ino.get(&ino).cloned().ok_or(Refusal::NotFound)?;
        self.take_name(parent, &name, ino, now)
    }

    /// Gives the file whose name was taken over, if there was one.
    pub fn rename(
        &mut self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        replace: Replace,
        now: crate::node::Time,
    ) -> Result<Option<Ino>, Refusal> {
        check_name(to.1)?;
        let ino = self.lookup(from.0, from.1)?;
        let height = self.height(ino);
        let mut above = to.0;
        let depth = self.depth(to.0)?;
        while above != ROOT {
            if above == ino {
                return Err(Refusal::Loop);
            }
            above = self.node(above)?.parent.ok_or(Refusal::NotFound)?;
        }
        if depth + height > DEPTH_MAX {
            return Err(Refusal::TooDeep);
        }
        let replaced = match self.lookup(to.0, to.1) {
            Err(Refusal::NotFound) => None,
            Err(other) => return Err(other),
            Ok(same) if same == ino => return Ok(None),
            Ok(_) if replace == Replace::Refused => return Err(Refusal::Exists),
            Ok(_) => {
                let kind = if height > 0 { Kind::Directory } else { Kind::File };
                Some(self.unlink(to.0, to.1, kind, now)?)
            }
        };
        self.take_name(from.0, from.1, ino, now)?;
        self.node_mut(ino)?.parent = Some(to.0);
        self.link(to.0, to.1, ino, now)?;
        Ok(replaced)
    }

    /// Forgets a node that has no name.
    pub fn remove(&mut self, ino: Ino) -> Option<Node> {
        debug_assert!(ino != ROOT && self.nodes.get(&ino).is_none_or(|node| node.parent.is_none()));
        self.touched.insert(ino);
        self.nodes.remove(&ino)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Time;

    const NOW: Time = Time { seconds: 1, nanos: 0 };

    fn add(tree: &mut Tree, parent: Ino, name: &str, kind: Kind) -> Result<Ino, Refusal> {
        tree.add(parent, name.as_bytes(), NewNode::default(), kind)
    }

    #[test]
    fn names() {
        let mut tree = Tree::new();
        for bad in ["", ".", "..", "a/b", "a\0b"] {
            assert_eq!(add(&mut tree, ROOT, bad, Kind::File), Err(Refusal::BadName), "{bad:?}");
        }
        assert_eq!(add(&mut tree, ROOT, &"n".repeat(256), Kind::File), Err(Refusal::NameTooLong));
        add(&mut tree, ROOT, &"n".repeat(255), Kind::File).unwrap();
        let file = add(&mut tree, ROOT, "a", Kind::File).unwrap();
        assert_eq!(add(&mut tree, ROOT, "a", Kind::Directory), Err(Refusal::Exists));
        assert_eq!(add(&mut tree, file, "b", Kind::File), Err(Refusal::NotADirectory));
        assert_eq!(tree.lookup(ROOT, b"a"), Ok(file));
        assert_eq!(tree.lookup(Ino(99), b"a"), Err(Refusal::NotFound));
    }

    #[test]
    fn moving_directories() {
        let mut tree = Tree::new();
        let mut at = ROOT;
        for _ in 0..DEPTH_MAX {
            at = add(&mut tree, at, "d", Kind::Directory).unwrap();
        }
        assert_eq!(add(&mut tree, at, "d", Kind::Directory), Err(Refusal::TooDeep));
        add(&mut tree, at, "f", Kind::File).unwrap();
        let rename =
            |tree: &mut Tree, from: (Ino, &[u8]), to: (Ino, &[u8]), replace| tree.rename(from, to, replace, NOW);
        let top = tree.lookup(ROOT, b"d").unwrap();
        assert_eq!(rename(&mut tree, (ROOT, b"d"), (at, b"x"), Replace::Allowed), Err(Refusal::Loop));
        assert_eq!(rename(&mut tree, (ROOT, b"d"), (top, b"x"), Replace::Allowed), Err(Refusal::Loop));
        let side = add(&mut tree, ROOT, "side", Kind::Directory).unwrap();
        assert_eq!(rename(&mut tree, (ROOT, b"d"), (side, b"x"), Replace::Allowed), Err(Refusal::TooDeep));
        assert_eq!(rename(&mut tree, (ROOT, b"side"), (ROOT, b"d"), Replace::Allowed), Err(Refusal::NotEmpty));
        assert_eq!(rename(&mut tree, (ROOT, b"side"), (top, b"d"), Replace::Refused), Err(Refusal::Exists));
        let file = add(&mut tree, ROOT, "file", Kind::File).unwrap();
        assert_eq!(rename(&mut tree, (ROOT, b"side"), (ROOT, b"file"), Replace::Allowed), Err(Refusal::NotADirectory));
        assert_eq!(rename(&mut tree, (ROOT, b"file"), (ROOT, b"side"), Replace::Allowed), Err(Refusal::IsADirectory));
        assert_eq!(rename(&mut tree, (ROOT, b"file"), (ROOT, b"file"), Replace::Allowed), Ok(None));
        let other = add(&mut tree, side, "file", Kind::File).unwrap();
        assert_eq!(rename(&mut tree, (ROOT, b"file"), (side, b"file"), Replace::Allowed), Ok(Some(other)));
        assert_eq!(tree.lookup(side, b"file"), Ok(file));
        assert_eq!(tree.lookup(ROOT, b"file"), Err(Refusal::NotFound));
        assert_eq!(tree.node(other).unwrap().parent, None);
    }

    #[test]
    fn a_removed_directory_takes_nothing_in() {
        let mut tree = Tree::new();
        let dir = add(&mut tree, ROOT, "d", Kind::Directory).unwrap();
        tree.unlink(ROOT, b"d", Kind::Directory, NOW).unwrap();
        assert_eq!(add(&mut tree, dir, "f", Kind::File), Err(Refusal::NotFound));
        add(&mut tree, ROOT, "f", Kind::File).unwrap();
        assert_eq!(tree.rename((ROOT, b"f"), (dir, b"f"), Replace::Allowed, NOW), Err(Refusal::NotFound));
    }

    #[test]
    fn the_number_of_nodes_is_bounded() {
        let mut tree = Tree::new();
        for index in 1..NODES_MAX {
            add(&mut tree, ROOT, &index.to_string(), Kind::File).unwrap();
        }
        assert_eq!(add(&mut tree, ROOT, "more", Kind::File), Err(Refusal::TooManyFiles));
        let gone = tree.unlink(ROOT, b"7", Kind::File, NOW).unwrap();
        assert_eq!(add(&mut tree, ROOT, "more", Kind::File), Err(Refusal::TooManyFiles), "it is still there");
        tree.remove(gone);
        add(&mut tree, ROOT, "more", Kind::File).unwrap();
    }
}
