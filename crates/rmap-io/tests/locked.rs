//! Locked memory, in a process of its own: all of the process is locked.

use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, SEALED_SIZE, ServerId, SlabSize};
use rmap::wire::message::Pressure;
use rmap_io::SystemEntropy;
use rmap_io::host::{HostError, lock_memory};
use rustix::process::{Resource, getrlimit};

const SLABS: usize = 8;
const SLAB_PAGES: usize = 4096;
const LENT: u64 = (SLABS * SLAB_PAGES * SEALED_SIZE) as u64;

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn what_is_lent_is_locked_and_comes_back_to_the_host() {
    match lock_memory(LENT) {
        Ok(()) => {}
        // Not everybody may: then it is said before anything is lent.
        Err(HostError::LockLimit { needed, limit }) => {
            assert_eq!(Some(limit), getrlimit(Resource::Memlock).current);
            assert!(needed > limit && status("VmLck:") == 0);
            return;
        }
        Err(error) => panic!("{error}"),
    }
    let keys = Keypair::from_private([1; KEY_SIZE]);
    let config = ServerConfig {
        id: ServerId(1),
        keys,
        pool: PoolKey::new([2; KEY_SIZE]),
        admitted: Vec::new(),
        slabs: SLABS,
        slab_size: SlabSize::new(SLAB_PAGES as u32).unwrap(),
        quota: u32::MAX,
        epoch: BootEpoch(1),
        medium: None,
    };
    let before = status("VmRSS:");
    let mut server = Server::new(config, Box::new(SystemEntropy::default())).unwrap();
    assert!(status("VmLck:") >= LENT && status("VmRSS:") >= before + LENT, "locked and there");
    server.set_pressure(Pressure::Yellow);
    assert!(!server.adjust_memory(), "yellow keeps what it has");
    server.set_pressure(Pressure::Orange);
    while server.adjust_memory() {}
    assert!(status("VmRSS:") < before + LENT / 4, "the host has it again");
    assert_eq!((server.free_slabs(), server.held_slabs()), (0, 0));
    server.set_pressure(Pressure::None);
    while server.adjust_memory() {}
    assert!(status("VmRSS:") >= before + LENT && server.free_slabs() == SLABS);
}
