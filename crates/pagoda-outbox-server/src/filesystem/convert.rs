//! Between the space's words and FUSE's.

use pagoda_outbox::{Attributes, Kind, NewNode, Owner, Time};
use virtiofsd::filesystem::{Context, SetattrValid};
use virtiofsd::fuse;
use virtiofsd::soft_idmap::Id;

use crate::outbox::now;

/// `stat` counts blocks of this size.
const BLOCK_BYTES: u64 = 512;
const NANOS_PER_SECOND: u32 = 1_000_000_000;

pub fn attr(attributes: &Attributes) -> fuse::Attr {
    let kind = match attributes.kind {
        Kind::Directory => libc::S_IFDIR,
        Kind::File => libc::S_IFREG,
    };
    let Time { seconds: mtime, nanos: mtimensec } = attributes.modified;
    let Time { seconds: ctime, nanos: ctimensec } = attributes.changed;
    fuse::Attr {
        ino: attributes.ino.0,
        size: attributes.size,
        blocks: attributes.charged / BLOCK_BYTES,
        atime: mtime,
        mtime,
        ctime,
        atimensec: mtimensec,
        mtimensec,
        ctimensec,
        mode: kind | attributes.mode,
        nlink: attributes.links,
        uid: attributes.owner.uid.into(),
        gid: attributes.owner.gid.into(),
        blksize: pagoda_outbox::limits::PAGE_BYTES as u32,
        ..fuse::Attr::default()
    }
}

pub fn new_node(context: Context, mode: u32, umask: u32) -> NewNode {
    let owner = Owner { uid: context.uid.into_inner(), gid: context.gid.into_inner() };
    NewNode { mode: mode & !umask & 0o7777, owner, now: now() }
}

pub fn owner(before: &Attributes, wanted: &fuse::SetattrIn, valid: SetattrValid) -> Option<Owner> {
    let uid = valid.contains(SetattrValid::UID).then(|| wanted.uid.into_inner());
    let gid = valid.contains(SetattrValid::GID).then(|| wanted.gid.into_inner());
    (uid.is_some() || gid.is_some())
        .then(|| Owner { uid: uid.unwrap_or(before.owner.uid), gid: gid.unwrap_or(before.owner.gid) })
}

pub fn modified(wanted: &fuse::SetattrIn, valid: SetattrValid, now: Time) -> Option<Time> {
    if valid.contains(SetattrValid::MTIME_NOW) {
        return Some(now);
    }
    let given = Time { seconds: wanted.mtime, nanos: wanted.mtimensec.min(NANOS_PER_SECOND - 1) };
    valid.contains(SetattrValid::MTIME).then_some(given)
}
