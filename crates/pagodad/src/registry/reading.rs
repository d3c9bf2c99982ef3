//! VMs that were made of an image and have nothing there any more: they let go of it, and it may be removed.
//!
//! The image tier takes no pages, so it only gets emptier: once it is empty it stays so. That is a fact for the daemons that come
//! next too, for the tier's map on the disk says it before the engine does.

use std::collections::BTreeMap;

use anyhow::Context;
use pagoda_api::in_full;
use pagoda_core::policy::VmId;
use pagoda_image::ImageId;

use super::{Registry, Vm};
use crate::images::source::TIER;
use crate::record::Record;

impl Registry {
    /// Has VMs let go of images in which they have no page any more.
    pub fn let_images_go(&self) {
        let over: Vec<(VmId, ImageId)> =
            self.lock().values().filter_map(|vm| Some((vm.governed.id, unread(vm)?))).collect();
        for (id, image) in over {
            self.let_image_go(id, image);
        }
    }

    fn let_image_go(&self, id: VmId, image: ImageId) {
        let plan = |_: &BTreeMap<String, Vm>, vm: &Vm| match unread(vm) {
            Some(unread) if unread == image => Ok(Record { reads: None, ..vm.record.clone() }),
            _ => Err(None::<anyhow::Error>),
        };
        let commit = |vm: &mut Vm, written: anyhow::Result<()>| {
            // The image is needed for as long as the record on the disk says so.
            written.context("write the VM's record").map_err(Some)?;
            drop(vm.reading.take());
            tracing::info!(vm = %vm.record.name, %image, "it has all its memory, and reads its snapshot no more");
            Ok(())
        };
        if let Some(Err(Some(error))) = self.change(id, plan, commit) {
            tracing::warn!(%image, "let go of a snapshot that is not read any more, tried again: {}", in_full(error.as_ref()));
        }
    }
}

/// The image that a VM was made of, if it is a fact that it has nothing there any more.
fn unread(vm: &Vm) -> Option<ImageId> {
    // Its state is in the image too.
    let image = vm.record.reads.filter(|_| vm.record.operation.is_none())?;
    let status = vm.handle.as_ref()?.status();
    // An engine that has not said yet what it holds names no tier.
    let tier = status.tiers.iter().find(|tier| tier.name == TIER)?;
    (tier.counts.pages == 0).then_some(image)
}
