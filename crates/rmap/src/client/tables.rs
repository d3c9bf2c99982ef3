//! Tables of versions: 8 bytes for each page of a slab, 128 KiB for one of the usual size.
//!
//! A slab that is written to for the first time needs one, and who serves a disk that may be swapped to must not wait for memory
//! then. So some are kept ready. They are made by somebody else, who may wait, and are given to the client by
//! [`super::Client::add_spare`]; where there is none, memory is asked for as it is needed.

use crate::units::{SlabSize, Version};

/// Tables kept ready, 8 MiB: for 4 GiB of slabs never written to, which takes one exporter more than a second to fill.
pub const SPARES_MAX: usize = 64;

/// Room for the versions of a slab.
#[derive(Debug)]
pub struct SpareTable(Vec<Version>);

impl SpareTable {
    /// All of it is written to, so that it is there.
    pub fn new(size: SlabSize) -> SpareTable {
        SpareTable(vec![Version::NEVER; size.pages()])
    }
}

#[derive(Debug)]
pub struct Tables {
    pages: usize,
    spares: Vec<SpareTable>,
}

impl Tables {
    pub fn new(size: SlabSize) -> Tables {
        Tables { pages: size.pages(), spares: Vec::with_capacity(SPARES_MAX) }
    }

    /// A table of pages that were never written.
    pub fn take(&mut self) -> Box<[Version]> {
        let mut table = self.take_empty();
        table.resize(self.pages, Version::NEVER);
        table.into()
    }

    /// Room for a table.
    pub fn take_empty(&mut self) -> Vec<Version> {
        let mut table = self.spares.pop().map_or_else(|| Vec::with_capacity(self.pages), |spare| spare.0);
        table.clear();
        table
    }

    /// Takes a table that was made ahead. Beyond those that are wanted, or of another size, it is dropped.
    pub fn add_spare(&mut self, table: SpareTable) {
        self.give_back(table.0);
    }

    /// Keeps a table for the next one, if it is one and there is room.
    pub fn give_back(&mut self, table: Vec<Version>) {
        if self.wanted() > 0 && table.capacity() == self.pages {
            self.spares.push(SpareTable(table));
        }
    }

    /// How many are to be added, so that there are as many as are kept ready.
    pub fn wanted(&self) -> usize {
        SPARES_MAX - self.spares.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Generation;

    #[test]
    fn a_table_that_comes_back_is_a_new_one() {
        let (size, other) = (SlabSize::new(8).unwrap(), SlabSize::new(16).unwrap());
        let mut tables = Tables::new(size);
        let used = vec![Version::new(Generation(1), 5, false); 8];
        let address = used.as_ptr();
        tables.give_back(used);
        let table = tables.take();
        assert!(table.as_ptr() == address && *table == [Version::NEVER; 8]);
        // Of another size, and more than are kept.
        tables.give_back(SpareTable::new(other).0);
        assert_eq!((tables.wanted(), tables.take().len()), (SPARES_MAX, 8));
        (0..SPARES_MAX + 1).for_each(|_| tables.give_back(SpareTable::new(size).0));
        assert_eq!((tables.wanted(), tables.take_empty().len()), (0, 0));
    }
}
