//! Moves of RAM into the place of what is borrowed: the agent does them, one at a time.

use super::Engine;
use super::broken::Broken;

impl Engine {
    /// Orders the next move, if none is under way.
    pub(super) fn go_on_owning(&mut self) -> Result<(), Broken> {
        if let Some(order) = self.paging.next_move()? {
            self.link.agent.send(&mut self.ring, &order);
        }
        Ok(())
    }

    /// The agent says that it has carried out an order, or not.
    pub(super) fn owned(&mut self, order: u64, errno: u32) {
        if !self.paging.is_moving(order) {
            // Of a daemon before this one, taken back, or found to be done before the answer was read. Others wait all the same.
            let went_on = self.go_on_owning();
            self.or_halt(went_on);
            return self.settle();
        }
        let finished = self.paging.finish_move(order).and_then(|is_done| match is_done {
            true => Ok(()),
            false => {
                tracing::warn!(vm = %self.name, errno, "RAM was not moved into the place of what is borrowed");
                self.paging.give_up_move(order)
            }
        });
        let went_on = finished.and_then(|()| self.go_on_owning());
        self.or_halt(went_on);
        self.settle();
    }

    /// A new connection to the agent: what was ordered on the last one may be lost.
    pub(super) fn repeat_move(&mut self) {
        if !self.paging.may_borrow() {
            return;
        }
        let repeated = self.paging.repeat_move();
        match self.or_halt(repeated) {
            Some(Some(order)) => self.link.agent.send(&mut self.ring, &order),
            Some(None) => {
                // It may have been done, and whoever is next waits.
                let went_on = self.go_on_owning();
                self.or_halt(went_on);
            }
            None => {}
        }
        self.settle();
    }
}
