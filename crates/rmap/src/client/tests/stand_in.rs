//! A server of the map that nobody could say the place of is known as a silent one, until somebody can.

use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::SlabNo;

/// Its copies that are still in the map count then, and it is used again.
#[test]
fn a_stand_in_becomes_the_server() {
    let mut pool = Pool::new(2, 1, 4);
    let id = pool.servers[1].id();
    let real = pool.client.pool.sessions.peers[PeerIndex(1)].info().clone();
    assert_eq!((id, pool.client.add_server(pool.now, real.clone())), (real.id, known(1)));
    // As the next owner, who does not know where the second is.
    for page in [0, 8, 16, 24] {
        assert_eq!(pool.write(page, 1 + page as u8), Ok(()));
    }
    let map: Vec<(SlabNo, MapEntry)> = (0..4)
        .map(|slab| (SlabNo(slab), pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(slab)].entry.clone()))
        .collect();
    assert!(map.iter().any(|(_, entry)| entry.replicas[0].server == real.id), "{map:?}");
    pool.client.pool.sessions.peers[PeerIndex(1)] = Peer::new(ServerInfo { addr: addr(77), ..real.clone() }, pool.now);
    pool.client.pool.config.error_after = None;
    let spec = SpaceSpec { id: SpaceId(1), pages: 64, copies: 1, reserve: 0, key: [2; KEY_SIZE] };
    pool.space = pool.client.attach(&spec, Generation(2), &map).unwrap();
    pool.pass(Duration::from_secs(1));
    assert!(
        pool.client.pool.sessions.peers[PeerIndex(1)].is_down()
            && !pool.client.pool.sessions.peers[PeerIndex(0)].is_down()
    );
    assert_eq!(pool.client.add_server(pool.now, real.clone()), Ok(()));
    pool.pass(Duration::from_secs(1));
    assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_up());
    for page in [0, 8, 16, 24] {
        assert_eq!(pool.read(page), Ok(1 + page as u8));
    }
    assert_eq!(pool.client.add_server(pool.now, real), known(1));
    assert_eq!(pool.client.pool.sessions.peers.iter().len(), 2);
}

fn known(node: usize) -> Result<(), ClientError> {
    Err(ClientError::KnownServer { addr: addr(node) })
}
