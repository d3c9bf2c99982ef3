//! Spaces by name, and the nodes that are there now.

use rmap::units::{Generation, SpaceId};
use serde_json::json;

use crate::error::EtcdError;
use crate::gateway::base64;
use crate::keys::end_of;
use crate::store::{Etcd, garbage, invalid, look, only, put, random, slot, version_is};
use crate::values::{Node, Owner, Space, Value};

/// A space that is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSpace {
    pub name: String,
    pub pages: u64,
    pub copies: usize,
    /// Slabs that are to be kept free for it at every server.
    pub reserve: u32,
}

impl Etcd {
    /// Makes a space, without an owner, under a number that nothing had before.
    ///
    /// # Errors
    /// The name is taken, or something about it cannot be.
    pub fn create_space(&mut self, new: &NewSpace) -> Result<Space, EtcdError> {
        // 64 random bits: a number is never used twice, and with it no seal of a page is.
        let id = SpaceId(random()?);
        self.create_space_numbered(new, id)
    }

    /// The same under a number that the caller has made of 64 random bits, and noted, so that it knows the space for its own
    /// even if it ends before the answer comes.
    ///
    /// # Errors
    /// As of [`Etcd::create_space`].
    pub fn create_space_numbered(&mut self, new: &NewSpace, id: SpaceId) -> Result<Space, EtcdError> {
        let NewSpace { name, pages, copies, reserve } = new.clone();
        let space = Space { name, id, pages, copies, reserve };
        space.check().or_else(invalid)?;
        let (name, owner) = (self.keys.name(&space.name), self.keys.owner(space.id));
        let nobody =
            Owner { generation: Generation(0), sealed: false, host: self.config.host.clone(), nonce: random()? };
        let compare = [version_is(&name, 0), version_is(&owner, 0)];
        let puts = [put(&name, &space.encode(), None), put(&owner, &nobody.encode(), None)];
        let looks = [look(&name)];
        let reply = self.patiently(|etcd| etcd.txn(&compare, &puts, &looks))?;
        // Its own record, if an answer was lost.
        if !reply.succeeded && slot::<Space>(&name, &only(reply))?.value.as_ref() != Some(&space) {
            return Err(EtcdError::NameTaken { name: space.name });
        }
        Ok(space)
    }

    /// The space of this name.
    ///
    /// # Errors
    /// There is none, or etcd cannot say.
    pub fn space(&mut self, name: &str) -> Result<Space, EtcdError> {
        crate::values::check_name(name).or_else(invalid)?;
        let key = self.keys.name(name);
        let space = self.get::<Space>(&key)?.value.ok_or_else(|| EtcdError::NoSuchSpace { name: name.to_owned() })?;
        self.named(&key, space)
    }

    /// All spaces, by name.
    ///
    /// # Errors
    /// etcd cannot say.
    pub fn spaces(&mut self) -> Result<Vec<Space>, EtcdError> {
        let mut spaces = Vec::new();
        self.all(&self.keys.names(), |key, _, space: Space| {
            spaces.push((key.to_owned(), space));
            Ok(())
        })?;
        spaces.into_iter().map(|(key, space)| self.named(&key, space)).collect()
    }

    fn named(&self, key: &str, space: Space) -> Result<Space, EtcdError> {
        if self.keys.name(&space.name) != key {
            return Err(garbage(key, format!("it is of the space {}", space.name)));
        }
        Ok(space)
    }

    /// Removes a space and its map. Only its owner may: it has given its slabs back to the servers before.
    ///
    /// # Errors
    /// Another owner has it; nothing is removed.
    pub fn remove_space(&mut self, space: &Space, generation: Generation) -> Result<(), EtcdError> {
        let (name, owner, all) = (self.keys.name(&space.name), self.keys.owner(space.id), self.keys.space(space.id));
        let compare = [version_is(&owner, u64::from(generation.0) + 1)];
        let delete = |body| json!({ "request_delete_range": body });
        let removes = [
            delete(json!({ "key": base64(&name) })),
            delete(json!({ "key": base64(&all), "range_end": base64(end_of(&all)) })),
        ];
        let looks = [look(&owner)];
        let reply = self.patiently(|etcd| etcd.txn(&compare, &removes, &looks))?;
        // Nothing of it is there: removed, and the answer was lost.
        if reply.succeeded || slot::<Owner>(&owner, &only(reply))?.value.is_none() {
            return Ok(());
        }
        Err(EtcdError::NotOwner { generation: generation.0 })
    }

    /// The servers whose leases are alive. A record that cannot be right is left out and told as the second part: one
    /// bad server is no reason to know none.
    ///
    /// # Errors
    /// etcd cannot say.
    pub fn nodes(&mut self) -> Result<(Vec<Node>, Vec<EtcdError>), EtcdError> {
        let prefix = self.keys.nodes();
        let (mut nodes, mut bad) = (Vec::new(), Vec::new());
        self.all(&prefix, |key, _, node: Checked<Node>| {
            match node.0 {
                Ok(node) => nodes.push((key.to_owned(), node)),
                Err(what) => bad.push(garbage(key, what)),
            }
            Ok(())
        })?;
        let (right, wrong): (Vec<_>, Vec<_>) =
            nodes.into_iter().partition(|(key, node)| self.keys.node(node.id) == *key);
        bad.extend(wrong.iter().map(|(key, node)| garbage(key, format!("it is of server {}", node.id.0))));
        Ok((right.into_iter().map(|(_, node)| node).collect(), bad))
    }
}

/// A value, or what is wrong with it.
struct Checked<T>(Result<T, String>);

impl<T: Value> Value for Checked<T> {
    fn encode(&self) -> Vec<u8> {
        self.0.as_ref().map_or_else(|_| Vec::new(), Value::encode)
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        Ok(Checked(T::decode(bytes)))
    }
}
