//! A real etcd, started by each test on the loopback, and stopped, killed, restarted, lied in the name of.
//! Needs etcd and etcdctl: `scripts/install-deps.sh test`.

mod behaviour;
mod data;
mod endpoints;
mod faults;
mod members;
mod registers;
mod relay;
mod rig;
mod store;
