//! Lets reads wait, and begins them again when they can be answered.

use crate::client::Failure;
use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::Operation;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::read_queue::QueuedRead;
use crate::units::SlabNo;

impl Pages {
    /// Takes a read out of the operations, with all that it has asked. `false` if it has to stay there.
    pub fn queue_read(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) -> bool {
        if self.ops.peek(op).is_own {
            self.put_back(pool, parity, op);
            return true;
        }
        let Operation { space, page, .. } = *self.ops.peek(op);
        if pool.map.slab_of(page).is_some_and(|slab| pool.is_out_of_reach(space, slab)) {
            self.fail_read(pool, parity, op, Failure::Silent);
            return true;
        }
        if self.read_queue.is_full() {
            return false;
        }
        self.drop_exchanges(pool, parity, op);
        let Operation { class, token, since, .. } = *self.ops.get(op);
        self.ops.leave(op);
        self.read_queue.push(QueuedRead { space, page, class, token, since });
        true
    }

    /// Has the slabs looked at that reads wait for.
    pub fn mark_queued(&self, pool: &mut Pool) {
        for at in 0..self.read_queue.len() {
            let Some(QueuedRead { space, page, .. }) = self.read_queue.get(at) else { return };
            pool.map.slab_of(page).into_iter().for_each(|slab| pool.map.mark(space, slab));
        }
    }

    /// Begins the reads of a slab that can end now.
    pub fn resume_slab(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, slab: SlabNo) {
        let size = pool.map.size;
        self.resume_where(pool, parity, |queued| queued.space == space && size.slab(queued.page) == Some(slab));
    }

    /// Another owner has the space.
    pub fn resume_space(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex) {
        self.resume_where(pool, parity, |queued| queued.space == space);
    }

    /// There is a slot again.
    pub fn resume_waiting(&mut self, pool: &mut Pool, parity: &mut Parity) {
        if self.read_queue.has_place(self.ops.has_room()) {
            self.resume_where(pool, parity, |_| true);
        }
    }

    fn resume_where(&mut self, pool: &mut Pool, parity: &mut Parity, fits: impl Fn(&QueuedRead) -> bool) {
        for _ in 0..self.read_queue.len() {
            let Some(queued) = self.read_queue.next() else { return };
            let ready = fits(&queued) && pool.is_answerable(&queued);
            let QueuedRead { space, page, class, token, since } = queued;
            if !ready {
                self.read_queue.push(queued);
            } else if !self.begin_again(pool, parity, space, page, class, (token, since)) {
                // Nor is there a slot for any other one.
                return self.read_queue.wait_for_place(queued);
            }
        }
    }
}
