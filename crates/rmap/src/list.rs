//! Lists that are indexed by a type of their own, and by nothing else: a server cannot be passed where a space is due.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// A position in a list of one kind of things.
pub trait ListIndex: Copy {
    fn from_usize(at: usize) -> Self;
    fn to_usize(self) -> usize;

    /// The one after it, whether there is one or not.
    fn next(self) -> Self {
        Self::from_usize(self.to_usize() + 1)
    }
}

macro_rules! list_index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub usize);

        impl $crate::list::ListIndex for $name {
            fn from_usize(at: usize) -> $name {
                $name(at)
            }

            fn to_usize(self) -> usize {
                self.0
            }
        }
    };
}
pub(crate) use list_index;

/// A list that only `I` indexes.
#[derive(Debug)]
pub struct List<I, T> {
    all: Vec<T>,
    index: PhantomData<fn(I)>,
}

impl<I, T> Default for List<I, T> {
    fn default() -> List<I, T> {
        List { all: Vec::new(), index: PhantomData }
    }
}

impl<I, T> FromIterator<T> for List<I, T> {
    fn from_iter<All: IntoIterator<Item = T>>(all: All) -> List<I, T> {
        List { all: all.into_iter().collect(), index: PhantomData }
    }
}

impl<I: ListIndex, T> List<I, T> {
    pub fn with_capacity(items: usize) -> List<I, T> {
        List { all: Vec::with_capacity(items), index: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn push(&mut self, item: T) -> I {
        self.all.push(item);
        I::from_usize(self.all.len() - 1)
    }

    pub fn get(&self, at: I) -> Option<&T> {
        self.all.get(at.to_usize())
    }

    pub fn get_mut(&mut self, at: I) -> Option<&mut T> {
        self.all.get_mut(at.to_usize())
    }

    /// All indices, as of now: the list may be changed meanwhile.
    pub fn indices(&self) -> impl DoubleEndedIterator<Item = I> + Clone + use<I, T> {
        (0..self.all.len()).map(I::from_usize)
    }

    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.all.iter()
    }

    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.all.iter_mut()
    }

    pub fn enumerate(&self) -> impl Iterator<Item = (I, &T)> {
        self.all.iter().enumerate().map(|(at, item)| (I::from_usize(at), item))
    }

    pub fn enumerate_mut(&mut self) -> impl Iterator<Item = (I, &mut T)> {
        self.all.iter_mut().enumerate().map(|(at, item)| (I::from_usize(at), item))
    }

    /// The first that fits.
    pub fn position(&self, fits: impl Fn(&T) -> bool) -> Option<I> {
        self.all.iter().position(fits).map(I::from_usize)
    }

    /// Two different ones. `None` if they are the same, or not there.
    pub fn pair_mut(&mut self, one: I, other: I) -> Option<[&mut T; 2]> {
        self.all.get_disjoint_mut([one.to_usize(), other.to_usize()]).ok()
    }
}

impl<I: ListIndex, T> Index<I> for List<I, T> {
    type Output = T;

    fn index(&self, at: I) -> &T {
        &self.all[at.to_usize()]
    }
}

impl<I: ListIndex, T> IndexMut<I> for List<I, T> {
    fn index_mut(&mut self, at: I) -> &mut T {
        &mut self.all[at.to_usize()]
    }
}

impl<'a, I, T> IntoIterator for &'a List<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> std::slice::Iter<'a, T> {
        self.all.iter()
    }
}

impl<'a, I, T> IntoIterator for &'a mut List<I, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> std::slice::IterMut<'a, T> {
        self.all.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    list_index! {
        Place
    }

    #[test]
    fn a_list_is_indexed_by_what_it_gave() {
        let mut list: List<Place, &str> = List::default();
        let (one, other) = (list.push("one"), list.push("other"));
        assert_eq!((list[one], list[other], list.len()), ("one", "other", 2));
        assert_eq!(list.indices().collect::<Vec<_>>(), [one, other]);
        assert_eq!(list.position(|item| *item == "other"), Some(other));
        assert_eq!(list.get(Place(2)), None);
        assert!(list.pair_mut(one, one).is_none() && list.pair_mut(one, other).is_some());
    }
}
