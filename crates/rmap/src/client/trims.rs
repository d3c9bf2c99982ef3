//! Trims that one copy of a slab lists and another does not.
//!
//! Whether content was written shows when its seal is opened. A trim has no seal, so a copy that lists one proves nothing. What
//! is known is how writes are acknowledged. A trim, like any write, is acknowledged when every copy that the map names has it. A
//! copy comes into the map when it has all that was acknowledged. So if a copy of the map lists content that is older than the
//! trim of another copy, then that trim was never acknowledged, or one of the two copies is wrong.
//!
//! # The rule
//!
//! * A page reads as zeros if the ledger says so, or if no copy of the map that has listed its versions lists content of it.
//! * A new owner finds trims that the last one had begun. It may drop them, because nobody was told that they are done. It keeps
//!   the content, once that was opened, and writes it again in a version of its own ([`Version::taken_over`]). That version comes
//!   after the trim at every copy, and before what is asked for while the slab is opened.
//! * In a sealed space nothing was begun: all copies were alike when it was sealed. Copies that differ there are damaged or lie,
//!   and no fact says which. The page is *disputed*: an error, never zeros. A keeper writes neither version to the other copy,
//!   drops no copy that it could keep, and makes no parity of the slab. Once disputed, a page stays so for this client until all
//!   that list it list content.
//! * A trim makes no other copy a bad one.
//!
//! A copy that is the only one in the map, or the only one that answers, is believed, as what it lists of any page is.

use crate::client::open::Listing;
use crate::client::slab::Slab;
use crate::units::Version;

/// The newest content of a page that lies beneath a trim: the copy that lists it. `None` if the newest version that is listed is no trim,
/// or no copy lists content.
pub fn beneath<'a>(listings: impl Iterator<Item = &'a Listing> + Clone, index: usize) -> Option<&'a Listing> {
    let newest = listings.clone().map(|listing| listing.list[index]).max()?;
    if newest.has_content() {
        return None;
    }
    listings.filter(|listing| listing.list[index].has_content()).max_by_key(|listing| listing.list[index])
}

impl Slab {
    /// Whether copies differ in whether a page is trimmed, and no fact says which of them is right.
    pub fn is_disputed(&self, index: usize) -> bool {
        self.disputed.binary_search(&index).is_ok()
    }

    /// Takes what the copies of a sealed space list of the next page: the newest version, and the newest content if a trim stands before
    /// it. `true` if the page is disputed.
    pub fn take_listed(&mut self, index: usize, newest: Version, beneath: Option<Version>) -> bool {
        let version = beneath.unwrap_or(newest);
        self.versions[index] = version;
        beneath.is_some() || !version.has_content() && self.is_disputed(index)
    }
}
