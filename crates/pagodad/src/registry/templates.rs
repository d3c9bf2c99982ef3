//! Which VMs borrow of a template, when one is made, and whose memory it takes: the pool's, which is charged with it.
//!
//! A template is made only of memory that is free, beside all that VMs were promised, and takes nothing from a VM. When memory
//! runs short, those that no VM borrows of go before any VM loses a page.
//!
//! Clones that are made together wait until it is filled, for that is done once for all of them. One that is made alone does
//! not: the template is filled when its guest runs, for those that come after it.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagoda_api::in_full;
use pagoda_core::policy::round::Last;
use pagoda_core::policy::{ReclaimState, VmId};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_image::Image;
use pagoda_sys::template::Template;

use super::Registry;
use crate::images::templates::{Filling, KEEP, Place};
use crate::policy::host::read_memory;

/// Of the host's memory, this part stays available when a template is made.
const SPARE_PART: u64 = 8;
/// How long a clone waits for a template that is being filled. Measured: 3 GiB are filled in that time from the page cache.
const PATIENCE: Duration = Duration::from_secs(2);

impl Registry {
    /// Has VMs that were just made of an image, and that nobody has attached to, share what they read of it. Without room each has
    /// its memory to itself.
    pub fn lend(self: &Arc<Self>, names: &[&str], image: &Arc<Image>) {
        if !self.config.clone_sharing || !self.protect {
            return;
        }
        let place = self.images.templates().place(image.manifest().id);
        let mut vms = self.lock();
        for name in names {
            if let Some(vm) = vms.get_mut(*name) {
                vm.template = Some(Arc::clone(&place));
            }
        }
        drop(vms);
        if names.len() > 1 {
            self.fill_template(&place, image);
        }
    }

    /// The template that a VM maps when it attaches.
    pub fn template_of(&self, name: &str) -> Option<Arc<Template>> {
        let place = self.lock().get(name).and_then(|vm| vm.template.clone())?;
        place.wait(PATIENCE)
    }

    /// The guest of a clone runs: others that are made of its snapshot will want a template.
    pub fn lend_to_others(self: &Arc<Self>, id: VmId) {
        let place = self.find_by_id(id, |vm| Some((vm.template.take()?, vm.record.reads?))).flatten();
        let Some((place, image)) = place else { return };
        match self.images.of_reader(image) {
            Ok(image) => self.fill_template(&place, &image),
            Err(error) => tracing::warn!(%image, "clones of it will share no memory: {}", in_full(error.as_ref())),
        }
    }

    fn fill_template(self: &Arc<Self>, place: &Arc<Place>, image: &Arc<Image>) {
        let Some(filling) = place.begin() else { return };
        let (registry, image) = (Arc::clone(self), Arc::clone(image));
        let fill = move || {
            let filled = filling.fill(&image, |filling, bytes| registry.admit_template(filling, bytes));
            if let Err(error) = filled {
                tracing::warn!(
                    image = %image.manifest().id,
                    "its clones share no memory: {}", in_full(error.as_ref())
                );
                registry.count_templates();
            }
        };
        if let Err(error) = thread::Builder::new().name("template".into()).spawn(fill) {
            tracing::warn!("clones share no memory: start a thread: {error}");
        }
    }

    /// Takes the memory of a template out of the pool.
    fn admit_template(&self, filling: &Filling, bytes: u64) -> Result<()> {
        let memory = read_memory()?;
        let free = memory.available.0.saturating_sub(memory.total.0 / SPARE_PART);
        ensure!(bytes <= free, "a template takes {}, and the host has {} to spare", Bytes(bytes), Bytes(free));
        let has_room = self.reserve_template(filling, bytes)
            || (self.drop_templates(Wanted::Now) && self.reserve_template(filling, bytes));
        ensure!(has_room, "a template takes {}, and the pool does not have that free", Bytes(bytes));
        Ok(())
    }

    fn reserve_template(&self, filling: &Filling, bytes: u64) -> bool {
        // Whoever is promised memory meanwhile waits for this lock.
        let mut policy = self.governor.lock();
        let rounds = &mut policy.rounds;
        let (taken, pages) = (Bytes(self.images.templates().bytes()).pages_ceil(), Bytes(bytes).pages_ceil());
        rounds.policy.set_templates(taken);
        if !rounds.has_room_for_template(pages) {
            return false;
        }
        rounds.policy.set_templates(taken + pages);
        filling.reserve(bytes);
        true
    }

    /// What templates take of the pool, for a round. The policy hears of it.
    pub fn count_templates(&self) -> PageCount {
        let mut policy = self.governor.lock();
        let pages = Bytes(self.images.templates().bytes()).pages_ceil();
        policy.rounds.policy.set_templates(pages);
        pages
    }

    /// Drops templates that no VM borrows of: all of them if they are in anybody's way, else those that nobody has wanted for long.
    /// Whether there are fewer now.
    pub fn drop_templates(&self, wanted: Wanted) -> bool {
        let unused = if wanted == Wanted::Now { Duration::ZERO } else { KEEP };
        let dropped = self.images.templates().drop_unused(unused) > 0;
        if dropped {
            self.count_templates();
        }
        dropped
    }
}

/// Whether somebody needs the memory of templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Now,
    NotNow,
}

impl Wanted {
    /// What is wanted of a template, as the last round has found it.
    pub fn by(last: &Last) -> Wanted {
        let is_short = last.plan.state > ReclaimState::High || last.plan.restrained || last.pool.reason.is_some();
        if is_short { Wanted::Now } else { Wanted::NotNow }
    }
}
