//! Tests with a real etcd. Each test starts one on the loopback. It stops, kills and restarts it, and answers in its place. Needs
//! etcd and etcdctl: `scripts/install-deps.sh test`.

mod behaviour;
mod data;
mod endpoints;
mod faults;
mod members;
mod registers;
mod relay;
mod rig;
mod store;
