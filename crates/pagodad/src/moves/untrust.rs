//! What becomes of moves when a host is not trusted any more.
//!
//! | the move is | what is done |
//! |---|---|
//! | before the grant, from here or to here | it is given up, and the VM runs on at its source |
//! | granted from here | its streams end. The VM stands still here until the host is trusted again and answers, or an operator decides: the host may run it |
//! | granted to here | its streams end. The VM is this host's. Its source hears so when it is trusted again; what it lacks of its pages is there until then |

use pagoda_link::PublicKey;

use super::outgoing::Order;
use super::sessions::Input;
use crate::registry::Registry;

/// A host with this key and name has just been taken from the list of those that are trusted.
pub fn untrust(registry: &Registry, key: &PublicKey, name: &str) {
    registry.moves.outgoing.order_all_to(name, Order::Untrusted);
    registry.moves.streams.cut(key);
    let why = format!("{name} is not trusted any more");
    let mut sessions = registry.moves.sessions.all();
    sessions.retain(|session| session.peer == *key);
    // Whoever takes in much else is waited for by nobody. One that has just ended needs nothing.
    let tell = move || {
        for session in sessions {
            let _ = session.inputs.send(Input::Cancel(why.clone()));
            let _ = session.inputs.send(Input::Cut);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("untrust".into()).spawn(tell) {
        tracing::warn!("give up moves from {name}: {error}; its streams have ended, so they are given up in time");
    }
}
