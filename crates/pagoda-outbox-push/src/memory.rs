//! A file in the memory of this process that grows while it is pushed, and gives back what was acknowledged.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::body::Bytes;
use tokio::sync::Notify;

use crate::source::{Next, Source};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Sealed,
    Broken,
}

#[derive(Debug)]
struct Inner {
    /// The bytes from `freed` on.
    bytes: Vec<u8>,
    freed: u64,
    state: State,
    upload: Option<String>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    changed: Notify,
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end that is pushed. Each clone reads the same file.
#[derive(Debug, Clone)]
pub struct Growing {
    shared: Arc<Shared>,
}

/// The end that writes. If it goes before [`seal`](Grower::seal), the file is broken.
#[derive(Debug)]
pub struct Grower {
    shared: Arc<Shared>,
}

/// The two ends of a new file.
pub fn growing() -> (Grower, Growing) {
    let inner = Inner { bytes: Vec::new(), freed: 0, state: State::Open, upload: None };
    let shared = Arc::new(Shared { inner: Mutex::new(inner), changed: Notify::new() });
    (Grower { shared: Arc::clone(&shared) }, Growing { shared })
}

impl Grower {
    pub fn write(&self, bytes: &[u8]) {
        self.shared.inner().bytes.extend_from_slice(bytes);
        self.shared.changed.notify_waiters();
    }

    pub fn seal(self) {
        self.shared.inner().state = State::Sealed;
    }
}

impl Drop for Grower {
    fn drop(&mut self) {
        let mut inner = self.shared.inner();
        if inner.state == State::Open {
            inner.state = State::Broken;
        }
        drop(inner);
        self.shared.changed.notify_waiters();
    }
}

impl Growing {
    /// Everything below was given back.
    pub fn freed(&self) -> u64 {
        self.shared.inner().freed
    }

    fn look(&self, offset: u64, most: usize) -> Option<Next> {
        let inner = self.shared.inner();
        let Some(at) = offset.checked_sub(inner.freed) else { return Some(Next::Gone { oldest: inner.freed }) };
        let rest = usize::try_from(at).ok().and_then(|at| inner.bytes.get(at..)).unwrap_or_default();
        match inner.state {
            State::Broken => Some(Next::Broken),
            _ if !rest.is_empty() => Some(Next::Bytes(Bytes::copy_from_slice(&rest[..rest.len().min(most)]))),
            State::Sealed => Some(Next::End),
            State::Open => None,
        }
    }
}

impl Source for Growing {
    async fn next(&mut self, offset: u64, most: usize) -> Next {
        loop {
            let changed = self.shared.changed.notified();
            if let Some(next) = self.look(offset, most) {
                return next;
            }
            changed.await;
        }
    }

    fn length(&self) -> Option<u64> {
        let inner = self.shared.inner();
        (inner.state == State::Sealed).then(|| inner.freed + inner.bytes.len() as u64)
    }

    fn acknowledge(&mut self, up_to: u64) {
        let mut inner = self.shared.inner();
        let more = up_to.saturating_sub(inner.freed).min(inner.bytes.len() as u64);
        inner.bytes.drain(..more as usize);
        inner.freed += more;
    }

    fn remember(&mut self, upload: Option<&str>) {
        self.shared.inner().upload = upload.map(str::to_owned);
    }

    fn remembered(&self) -> Option<String> {
        self.shared.inner().upload.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(growing: &Growing, offset: u64) -> Option<Next> {
        growing.look(offset, 2)
    }

    #[test]
    fn bytes_stay_until_they_are_acknowledged() {
        let (grower, mut file) = growing();
        assert_eq!(look(&file, 0), None);
        grower.write(b"abc");
        let bytes = |text: &'static [u8]| Some(Next::Bytes(Bytes::from_static(text)));
        assert_eq!((look(&file, 0), look(&file, 2), look(&file, 3)), (bytes(b"ab"), bytes(b"c"), None));
        file.acknowledge(1);
        file.acknowledge(1);
        assert_eq!((look(&file, 0), look(&file, 1)), (Some(Next::Gone { oldest: 1 }), bytes(b"bc")));
        assert_eq!(file.length(), None);
        grower.seal();
        assert_eq!((look(&file, 3), file.length(), file.freed()), (Some(Next::End), Some(3), 1));
        file.acknowledge(100);
        assert_eq!(file.freed(), 3);
    }

    #[test]
    fn a_writer_that_goes_breaks_the_file() {
        let (grower, file) = growing();
        grower.write(b"abc");
        drop(grower);
        assert_eq!((look(&file, 0), file.length()), (Some(Next::Broken), None));
    }
}
