//! What layers take on their disks. A thread looks, for a file system may hang: who asks waits for it, and not for long.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::layer::NotedLayer;

/// Bytes of each layer that could be looked at, by the disk's path and the layer's name.
pub type Sizes = BTreeMap<(String, String), u64>;

/// The sizes that were found last, and whether a thread looks for them now.
#[derive(Debug, Default)]
pub struct LayerSizes {
    look: Mutex<Look>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Look {
    /// One at a time: one that hangs is not joined by others.
    is_under_way: bool,
    found: Sizes,
}

impl LayerSizes {
    /// The bytes of these layers. Empty if they are not known in time.
    pub fn of(self: &Arc<Self>, layers: Vec<NotedLayer>, max: Duration) -> Sizes {
        let deadline = Instant::now() + max;
        let Some(mut look) = self.wait(deadline) else { return Sizes::new() };
        look.is_under_way = true;
        drop(look);
        let looking = Arc::clone(self);
        let in_thread = move || {
            let found = sizes(&layers);
            *looking.lock() = Look { is_under_way: false, found };
            looking.ended.notify_all();
        };
        if std::thread::Builder::new().name("layer-sizes".into()).spawn(in_thread).is_err() {
            self.lock().is_under_way = false;
            return Sizes::new();
        }
        self.wait(deadline).map_or_else(Sizes::new, |look| look.found.clone())
    }

    /// Waits until no thread looks. `None`: the deadline came first.
    fn wait(&self, deadline: Instant) -> Option<MutexGuard<'_, Look>> {
        let mut look = self.lock();
        while look.is_under_way {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            look = self.ended.wait_timeout(look, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(look)
    }

    fn lock(&self) -> MutexGuard<'_, Look> {
        self.look.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn sizes(layers: &[NotedLayer]) -> Sizes {
    let of = |layer: &NotedLayer| {
        let stat = layer.user.act(|| layer.dir()?.stat(&layer.name)).ok().flatten();
        let stat = stat.filter(|stat| layer.noted().is(stat.id))?;
        Some(((layer.disk.file.clone(), layer.name.clone()), stat.allocated_bytes))
    };
    layers.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_look_that_hangs_holds_nobody_up() {
        let sizes = Arc::new(LayerSizes::default());
        sizes.lock().is_under_way = true;
        assert!(sizes.of(Vec::new(), Duration::ZERO).is_empty());
        assert!(sizes.lock().is_under_way, "no second one is begun");
        sizes.lock().is_under_way = false;
        sizes.of(Vec::new(), Duration::from_secs(600));
        assert!(!sizes.lock().is_under_way);
    }
}
