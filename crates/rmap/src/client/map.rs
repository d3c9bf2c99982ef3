//! The spaces of a client: where their slabs are, and which version each page has.
//!
//! Owns the spaces, the tables of versions that are kept ready, the slabs that are to be looked at ([`Agenda`]), the questions
//! to the control plane ([`Questions`]), what is still to be asked of earlier owners' leftovers, and which sealed spaces are
//! watched. It knows no session. An entry of the map changes only when the control plane has confirmed it; until then the
//! change is the slab's pending one, and the slab asks for no other.

use super::agenda::Agenda;
use super::leftovers::Leftovers;
use super::questions::Questions;
use super::slab::Space;
use super::tables::Tables;
use crate::client::index::{List, SpaceIndex};
use crate::units::{PageNo, SlabNo, SlabSize};

#[derive(Debug)]
pub struct Map {
    pub size: SlabSize,
    pub spaces: List<SpaceIndex, Space>,
    pub tables: Tables,
    pub agenda: Agenda,
    pub questions: Questions,
    pub leftovers: Leftovers,
    /// Sealed spaces that are not as they should be.
    pub watched: Vec<SpaceIndex>,
}

impl Map {
    pub fn new(size: SlabSize) -> Map {
        Map {
            size,
            spaces: List::default(),
            tables: Tables::new(size),
            agenda: Agenda::default(),
            questions: Questions::default(),
            leftovers: Leftovers::default(),
            watched: Vec::new(),
        }
    }

    pub fn slab_of(&self, page: PageNo) -> Option<SlabNo> {
        self.size.slab(page)
    }
}
