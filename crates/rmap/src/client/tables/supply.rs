//! Takes in tables that were made ahead.

use super::SpareTable;
use crate::client::Client;
use crate::units::SlabSize;

impl Client {
    pub fn slab_size(&self) -> SlabSize {
        self.pool.map.size
    }

    /// How many tables are to be added, so that there are as many as are kept ready.
    pub fn wanted_spares(&self) -> usize {
        self.pool.map.tables.wanted()
    }

    /// Takes a table for a slab that is written to later. Beyond those that are wanted, or of another size, it is dropped.
    pub fn add_spare(&mut self, table: SpareTable) {
        self.pool.map.tables.give_back(table.0);
    }
}
