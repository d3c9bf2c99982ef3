//! What goes wrong in a run, and how its pager is set.

use pagoda_core::fault::{PageInPolicy, Replacement, Sharing};

use crate::image::Mistake;

/// How bad the world is, in chances per thousand.
#[derive(Clone, Debug)]
pub struct Weather {
    pub direct: bool,
    /// A page cannot be punched, only zeroed in place.
    pub unsplittable: usize,
    pub io_fails: usize,
    pub zap_fails: usize,
    /// The daemon dies before an action.
    pub crash: usize,
    /// The end of a punch is reported before the other actions are executed, or after them.
    pub punch_reported_at_once: bool,
    /// The kernel maps pages write-protected.
    pub protect: bool,
    pub page_in: PageInPolicy,
    pub replacement: Replacement,
    pub sharing: Sharing,
    /// A page without an equal frame becomes one.
    pub promotes: usize,
    /// A page-out takes another block.
    pub moves: usize,
    /// An image refers to a block that holds what it needs, instead of copying it.
    pub refers: bool,
    /// At a tick the newest image is filled a little.
    pub fills: usize,
    /// An image that is to begin has the one before it as its parent.
    pub parents: usize,
    /// A block is on its way from another host when the VM is armed.
    pub missing: usize,
    /// A page cannot be protected.
    pub protect_fails: usize,
    /// A borrowed chunk cannot be protected, or not be moved.
    pub own_fails: usize,
    /// The store of images cannot begin one, or cannot take a page.
    pub image_fails: usize,
    /// The rule that is broken.
    pub mistake: Option<Mistake>,
}
