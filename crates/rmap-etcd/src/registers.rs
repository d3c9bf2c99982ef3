//! Registers: what an arbiter keeps of moves of VMs between hosts. There is one for each attempt, and it is changed by
//! compare-and-swap.
//!
//! The caller says which value may follow which. This module keeps the values. It also knows which registers these are, by a
//! random number that whoever comes first writes beside them. etcd's own number of a cluster is no such name, because two etcds
//! that were set up alike have the same one. Each transaction compares the random number. So nothing is read from registers that
//! have taken the place of others, or written to them. No call tries anything for longer than one request: its caller does that.

use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::config::EtcdConfig;
use crate::error::EtcdError;
use crate::gateway::{TxnReply, base64};
use crate::store::{Etcd, Slot, garbage, look, only, put, random, slot, version_is};
use crate::values::{Register, RegistersId, Value};

/// After this a request counts as lost: a VM may stand still meanwhile, and two members may be away one after the other.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a change is tried that another one was before. Two hosts ask, a few times each.
const TRIES: usize = 8;

/// A connection to the registers of a pool's etcd.
#[derive(Debug)]
pub struct Registers {
    etcd: Etcd,
    /// Which they are, since this has reached them first.
    id: Option<RegistersId>,
}

impl Registers {
    /// Without looking whether etcd is there.
    ///
    /// # Errors
    /// The configuration.
    pub fn open(config: EtcdConfig) -> Result<Registers, EtcdError> {
        let config = EtcdConfig { request_timeout: REQUEST_TIMEOUT, patience: Duration::ZERO, ..config };
        Ok(Registers { etcd: Etcd::open(config)?, id: None })
    }

    /// Looks which registers these are; new ones get a number. Never 0, and no others have it.
    ///
    /// # Errors
    /// etcd cannot say. They are others than before: from the next call on those are meant.
    pub fn look(&mut self) -> Result<u64, EtcdError> {
        let key = self.etcd.keys.registers();
        let looks = [look(&key)];
        let found = self.etcd.txn(&[], &looks, &[])?;
        let id = match slot::<RegistersId>(&key, &only(found))?.value {
            Some(id) => id,
            None => self.make()?,
        };
        match self.id.replace(id) {
            Some(before) if before != id => Err(self.replaced()),
            _ => Ok(self.number(id)),
        }
    }

    /// If two hosts do that at once, both have what the first has written.
    fn make(&mut self) -> Result<RegistersId, EtcdError> {
        let (key, id) = (self.etcd.keys.registers(), RegistersId { nonce: random()?.max(1) });
        let reply = self.etcd.txn(&[version_is(&key, 0)], &[put(&key, &id.encode(), None)], &[look(&key)])?;
        if reply.succeeded {
            return Ok(id);
        }
        slot::<RegistersId>(&key, &only(reply))?.value.ok_or_else(|| self.replaced())
    }

    /// With the cluster's: a copy of an etcd that was started as another cluster is another one.
    fn number(&self, id: RegistersId) -> u64 {
        let number = id.nonce ^ self.etcd.gateway.cluster().unwrap_or_default();
        if number == 0 { id.nonce } else { number }
    }

    /// Changes the register of an attempt in one step, and says what it has then. `decide` is given what it has, and says what it is to
    /// have instead, or nothing if it stays; it may be asked several times.
    ///
    /// # Errors
    /// Nobody knows whether it was changed, unless the registers are others than before, or hold what cannot be right.
    pub fn change(
        &mut self,
        attempt: u64,
        mut decide: impl FnMut(Option<&Register>) -> Result<Option<Register>, String>,
    ) -> Result<Option<Register>, EtcdError> {
        let (key, own) = (self.etcd.keys.register(attempt), self.is_same()?);
        let mut now = self.read(&key, &own)?;
        for _ in 0..TRIES {
            let wanted = decide(now.value.as_ref()).map_err(|what| garbage(&key, what))?;
            let Some(wanted) = wanted.filter(|wanted| Some(wanted) != now.value.as_ref()) else { return Ok(now.value) };
            // What is refused when it is read is not written.
            Register::decode(&wanted.encode()).map_err(|what| garbage(&key, what))?;
            let compare = [own.clone(), is_unchanged(&key, now.mod_revision)];
            let reply = self.etcd.txn(&compare, &[put(&key, &wanted.encode(), None)], &[look(&key)])?;
            if reply.succeeded {
                return Ok(Some(wanted));
            }
            // Changed meanwhile, or of other registers, which the next look finds.
            now = self.read(&key, &own)?;
        }
        Err(garbage(&key, "it is changed all the time"))
    }

    /// Removes the register of an attempt that nobody asks about any more.
    ///
    /// # Errors
    /// It may be there still.
    pub fn remove(&mut self, attempt: u64) -> Result<(), EtcdError> {
        let (key, own) = (self.etcd.keys.register(attempt), self.is_same()?);
        let delete = json!({ "request_delete_range": { "key": base64(&key) } });
        let reply = self.etcd.txn(&[own], &[delete], &[])?;
        if reply.succeeded { Ok(()) } else { Err(self.replaced()) }
    }

    fn read(&mut self, key: &str, own: &Json) -> Result<Slot<Register>, EtcdError> {
        let reply: TxnReply = self.etcd.txn(std::slice::from_ref(own), &[look(key)], &[])?;
        if !reply.succeeded {
            return Err(self.replaced());
        }
        slot(key, &only(reply))
    }

    /// A comparison that holds as long as the registers are those that this has reached first.
    fn is_same(&mut self) -> Result<Json, EtcdError> {
        if self.id.is_none() {
            self.look()?;
        }
        let id = self.id.ok_or_else(|| self.replaced())?;
        let mut compare = json!({ "key": base64(self.etcd.keys.registers()), "target": "VALUE", "result": "EQUAL" });
        compare["value"] = base64(id.encode()).into();
        Ok(compare)
    }

    fn replaced(&self) -> EtcdError {
        EtcdError::OtherRegisters { key: self.etcd.keys.registers() }
    }
}

/// The key is as it was at its last change; 0 if it was not there.
fn is_unchanged(key: &str, mod_revision: u64) -> Json {
    json!({ "key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": mod_revision.to_string() })
}
