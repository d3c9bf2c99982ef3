//! An image that a daemon before this one began: whether its VM can still fill it.

use std::sync::Arc;

use pagoda_image::{ImageError, Ledger, Stage, Writer};

use crate::engine::paging::Paging;

/// What is left to be done for the image.
#[derive(Debug)]
pub enum Found {
    /// The VM holds what it lacks, unchanged.
    Unfilled(Writer),
    /// Nothing is to be done: the image has all pages.
    Filled,
    /// Nothing is to be done: the image was lost before.
    LostBefore(String),
    /// It is lost, which has to be noted before the VM changes any page.
    Lost(String),
}

/// Looks at the image. The VM does not run yet, or stands still where it needs a page. `taken_over`: it ran before.
pub fn look(ledger: &Arc<Ledger>, taken_over: bool, paging: &Paging) -> Found {
    let manifest = ledger.manifest();
    match manifest.as_ref().map(|manifest| manifest.stage) {
        Some(Stage::Filled | Stage::Durable) => return Found::Filled,
        Some(Stage::Lost) => return Found::LostBefore(manifest.and_then(|manifest| manifest.why).unwrap_or_default()),
        Some(Stage::Begun) | None => {}
    }
    let lost = |why: &str| Found::Lost(why.to_owned());
    if paging.lost_image() == Some(ledger.id()) {
        return lost("its disk failed when the VM ran with an earlier daemon");
    }
    if !taken_over {
        return lost("the VM that held its pages has ended");
    }
    if ledger.pages() != paging.space().chunks().pages() {
        return lost("it is of a VM with more or less memory");
    }
    let boot_id = match pagoda_sys::host::boot_id() {
        Ok(boot_id) => boot_id,
        Err(error) => return Found::Lost(format!("whether the host was restarted is not known: {error}")),
    };
    match Writer::resume(Arc::clone(ledger), &boot_id) {
        Ok(writer) => Found::Unfilled(writer),
        Err(ImageError::Lost { why }) => Found::Lost(why),
        Err(error) => Found::Lost(error.to_string()),
    }
}
