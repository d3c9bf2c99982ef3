//! VMs of which another host says something that this host's note cannot tell: that it runs a VM of a name which is here too, or was
//! given one. Nothing is ended by such a word, since it may be of another VM. Users see it ([`super::board`]).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagoda_link::PublicKey;

/// What is not repeated for so long is over. A host without a stream calls every few seconds.
const SAID_FOR: Duration = Duration::from_secs(60);
/// VMs of which it is kept: no more than a host can have streams of.
const UNCLEAR_MAX: usize = 64;

/// Who said it last, and when.
#[derive(Clone, Debug)]
struct Said {
    peer: PublicKey,
    at: Instant,
}

/// The names of such VMs, each with the host that has spoken of it last.
#[derive(Debug, Default)]
pub struct Unclear(Mutex<BTreeMap<String, Said>>);

impl Unclear {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Said>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, said| said.at.elapsed() < SAID_FOR);
        all
    }

    /// Another host has spoken of a VM so. It is logged once.
    pub fn note(&self, vm: &str, peer: &PublicKey) {
        let mut all = self.lock();
        if all.len() >= UNCLEAR_MAX && !all.contains_key(vm) {
            return;
        }
        let before = all.insert(vm.to_owned(), Said { peer: *peer, at: Instant::now() });
        if before.is_none_or(|before| before.peer != *peer) {
            tracing::error!(
                %vm,
                "the host with the key {peer:?} speaks of a VM of this name that moved between the two, and it cannot be told whether that is \
                 the one here: nothing is done. Look at `pagoda ls` and `pagoda moves` on both hosts"
            );
        }
    }

    /// The names of late, and the hosts that have spoken of them.
    pub fn all(&self) -> Vec<(String, PublicKey)> {
        self.lock().iter().map(|(vm, said)| (vm.clone(), said.peer)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_only_so_many() {
        let unclear = Unclear::default();
        for number in 0..UNCLEAR_MAX + 3 {
            unclear.note(&format!("web{number}"), &PublicKey([1; 32]));
            unclear.note("web0", &PublicKey([2; 32]));
        }
        let all = unclear.all();
        assert_eq!((all.len(), &all[0]), (UNCLEAR_MAX, &("web0".to_owned(), PublicKey([2; 32]))));
    }
}
