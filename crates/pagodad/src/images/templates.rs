//! The templates of images: memory that all clones of a snapshot read (`pagoda_abi::template`).
//!
//! A template has every chunk of the image that is not all zero, each page compared with its checksum. It is made with the first
//! clone that can borrow of it, and is gone with the last VM that does. Who comes meanwhile waits until it is filled.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result, ensure};
use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkIdx};
use pagoda_image::{Image, ImageId};
use pagoda_sys::template::{Draft, Template};

use crate::policy::host::read_memory;

/// Of the host's memory, this part stays available when a template is made.
const SPARE_PART: u64 = 8;

/// See the module.
#[derive(Debug, Default)]
pub struct Templates(Mutex<BTreeMap<ImageId, Weak<Template>>>);

impl Templates {
    /// The template of an image.
    ///
    /// # Errors
    /// The host has no room for it; a page of the image is damaged, or cannot be read.
    pub fn of(&self, image: &Image) -> Result<Arc<Template>> {
        let mut templates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        templates.retain(|_, template| template.strong_count() > 0);
        let id = image.manifest().id;
        if let Some(template) = templates.get(&id).and_then(Weak::upgrade) {
            return Ok(template);
        }
        let template = Arc::new(make(image)?);
        templates.insert(id, Arc::downgrade(&template));
        Ok(template)
    }
}

fn make(image: &Image) -> Result<Template> {
    let mut chunks = Vec::new();
    for chunk in image.chunks().iter() {
        let content = image.look_at(chunk)?;
        ensure!(content.missing.is_empty(), "the snapshot lacks pages");
        if content.zero != PageSet::FULL {
            chunks.push(chunk.0);
        }
    }
    let memory = read_memory().context("look how much memory the host has")?;
    let (needed, spare) = (chunks.len() as u64 * CHUNK_SIZE, memory.total.0 / SPARE_PART);
    let free = memory.available.0.saturating_sub(spare);
    ensure!(needed <= free, "it takes {}, and the host has {} to spare", Bytes(needed), Bytes(free));
    let mut draft = Draft::create("pagoda-template", chunks)?;
    let mut content = vec![0; CHUNK_SIZE as usize];
    for chunk in draft.chunks().to_vec() {
        image.read_chunk(ChunkIdx(chunk), &mut content)?;
        draft.push(&content)?;
    }
    let template = draft.seal()?;
    tracing::info!(image = %image.manifest().id, bytes = template.bytes(), "clones share what they read of it");
    Ok(template)
}

#[cfg(test)]
mod tests {
    use pagoda_image::Stage;

    use super::*;
    use crate::images::tests::{Bench, make as make_image, manifest};

    #[test]
    fn a_template_is_made_once_while_somebody_has_it() {
        let bench = Bench::new("templates");
        let store = bench.images.store().unwrap();
        make_image(store, manifest(1, "web1", "filled"), Stage::Filled);
        let image = store.image(ImageId(1)).unwrap();
        let templates = Templates::default();
        let first = templates.of(&image).unwrap();
        assert!(Arc::ptr_eq(&first, &templates.of(&image).unwrap()));
        let inode = first.inode();
        drop(first);
        assert_ne!(templates.of(&image).unwrap().inode(), inode, "nobody had it");
        for (slot, chunk) in templates.of(&image).unwrap().chunks().iter().enumerate() {
            let mut content = vec![0; CHUNK_SIZE as usize];
            image.read_chunk(ChunkIdx(*chunk), &mut content).unwrap();
            assert!(templates.of(&image).unwrap().content(slot) == content);
        }
    }
}
