//! Files that are removed because of their age.

use std::time::Duration;

use crate::node::{Body, Ino, Time};
use crate::space::Space;

impl Space {
    /// For how long files stay after they were sealed, unless they have their own `user.pagoda.ttl`. `None`: until they are removed.
    pub fn set_default_ttl(&mut self, ttl: Option<Duration>) {
        self.default_ttl = ttl;
    }

    /// Removes the files that have been sealed for longer than they may stay, delivered or not. Who has one open or reads it
    /// keeps it. To be called from time to time, for an age counts from the call that first saw the file sealed: none goes too
    /// early. `since_start` never goes back; `now` is what directories say of their change. Whether there were any.
    pub fn expire(&mut self, since_start: Duration, now: Time) -> bool {
        let default_ttl = self.default_ttl;
        let expired: Vec<(Ino, bool)> = self
            .tree
            .nodes_mut()
            .filter_map(|(ino, node)| match &mut node.body {
                Body::File(content) if node.parent.is_some() => {
                    content.is_expired(since_start, default_ttl).then(|| (ino, content.is_delivered()))
                }
                _ => None,
            })
            .collect();
        for (ino, is_delivered) in &expired {
            self.tree.unlink_node(*ino, now).expect("a file with a parent has its name in it");
            self.expired += 1;
            self.expired_undelivered += u64::from(!is_delivered);
            self.drop_if_unused(*ino);
        }
        !expired.is_empty()
    }
}
