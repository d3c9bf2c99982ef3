//! Tests with real VMMs; `README.md` of this crate says what each needs and how to run one.

mod attach;
mod balloon;
mod disk;
mod far;
mod far_cluster;
mod features;
mod guards;
mod kvm;
mod libvirt;
mod optional;
mod options;
mod overcommit;
mod pins;
mod policy;
mod remote_disk;
mod rewriting;
mod sampling;
mod share;
mod squeeze;
mod storm;
mod survival;
mod swapdisk;
mod tools;
mod toy;
mod unmanaged;
mod vhost_user;
