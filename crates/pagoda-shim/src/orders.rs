//! What the daemon wants moved: from the agent, which hears it, to the mover.

use std::sync::{Condvar, Mutex, PoisonError};

/// A piece of RAM for its place.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub number: u64,
    pub region: u32,
    pub offset: u64,
    pub len: u64,
}

static ORDER: Mutex<Option<Order>> = Mutex::new(None);
static ORDERED: Condvar = Condvar::new();

/// Has an order carried out. One that was not begun is forgotten: its daemon is gone.
pub fn order(order: Order) {
    *ORDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(order);
    ORDERED.notify_one();
}

/// Waits for the next one.
pub fn next() -> Order {
    let mut slot = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        match slot.take() {
            Some(order) => return order,
            None => slot = ORDERED.wait(slot).unwrap_or_else(PoisonError::into_inner),
        }
    }
}
