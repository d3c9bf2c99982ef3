//! Connections of the attach socket that have not said yet what they are: how many there may be, and who goes first.
//!
//! Whoever may connect could otherwise take all the daemon's threads and descriptors by saying nothing, and no running VM
//! could come back to a new daemon.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagoda_sys::socket::Connection;

/// Silent connections at a time.
const SILENT_MAX: usize = 64;
/// Silent connections of one user, root and the daemon's own excepted.
const SILENT_MAX_USER: usize = 16;

/// The connections that are silent, the oldest first.
#[derive(Debug, Default)]
pub struct Handshakes(Mutex<Vec<Silent>>);

#[derive(Debug)]
struct Silent {
    uid: u32,
    connection: Arc<Connection>,
}

impl Handshakes {
    fn lock(&self) -> MutexGuard<'_, Vec<Silent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection, by a user whose connections are limited or not. Where there are too many, the oldest of that user,
    /// or of the user who has most, is shut down. Its peer, if it is well, connects again.
    pub fn came(&self, connection: &Arc<Connection>, uid: u32, is_limited: bool) {
        let mut silent = self.lock();
        let users: Vec<u32> = silent.iter().map(|one| one.uid).collect();
        if let Some(oldest) = leaves(&users, uid, is_limited) {
            silent.remove(oldest).connection.shut_down();
        }
        silent.push(Silent { uid, connection: Arc::clone(connection) });
    }

    /// It has said what it is, or has gone.
    pub fn spoke(&self, connection: &Arc<Connection>) {
        self.lock().retain(|one| !Arc::ptr_eq(&one.connection, connection));
    }
}

/// Which of the silent connections leaves when one of `uid` comes; they are given by their users, the oldest first.
fn leaves(users: &[u32], uid: u32, is_limited: bool) -> Option<usize> {
    let count = |user: u32| users.iter().filter(|other| **other == user).count();
    let oldest_of = |user: u32| users.iter().position(|other| *other == user);
    if is_limited && count(uid) >= SILENT_MAX_USER {
        return oldest_of(uid);
    }
    if users.len() < SILENT_MAX {
        return None;
    }
    let greediest = users.iter().copied().max_by_key(|user| count(*user))?;
    oldest_of(greediest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_greediest_leaves() {
        assert_eq!(leaves(&[], 7, true), None);
        let mut users = vec![0, 7, 8];
        users.extend([7; SILENT_MAX_USER - 1]);
        assert_eq!(leaves(&users, 7, true), Some(1), "a user at the limit loses its own oldest");
        assert_eq!(leaves(&users, 8, true), None);
        assert_eq!(leaves(&users, 7, false), None, "who is not limited may have more");
        users.extend([0; SILENT_MAX]);
        assert_eq!(leaves(&users, 8, true), Some(0), "all together are too many: root has most");
    }

    #[test]
    fn who_has_to_leave_hears_it_and_others_do_not() {
        let handshakes = Handshakes::default();
        let pairs: Vec<_> = (0..=SILENT_MAX_USER).map(|_| Connection::pair().unwrap()).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let ours: Vec<_> = ours.into_iter().map(Arc::new).collect();
        // The first has spoken, so it is not in anybody's way.
        handshakes.came(&ours[0], 7, true);
        handshakes.spoke(&ours[0]);
        ours[1..].iter().for_each(|connection| handshakes.came(connection, 7, true));
        assert!(theirs.iter().all(|peer| !peer.is_readable()));
        handshakes.came(&ours[0], 7, true);
        let closed: Vec<usize> = (0..theirs.len()).filter(|index| theirs[*index].is_readable()).collect();
        assert_eq!(closed, [1]);
    }
}
