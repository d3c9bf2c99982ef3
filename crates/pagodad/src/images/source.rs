//! The image that a VM is made of, from its choice until the VM has it.
//!
//! All that can be wrong with it is found here, before anything else is made or ended: it is read by somebody from now on, its
//! map is whole, and there is a file with which of its pages the VM has there. That file gets the VM's name when the VM's record
//! is on the disk ([`Source::give`]): until then another VM of the name may still have its own.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagoda_api::in_full;
use pagoda_image::{Image, ImageId, Manifest};
use pagoda_pager::tier::image::ImageTier;

use super::readers::Reading;
use crate::record::Operation;

/// What the tier of an image is called.
pub const TIER: &str = "image";
/// What the names of files end with, before a unique part, that are of VMs which were never made.
const NEW_MAP: &str = "image-new-";

/// See the module. Dropped, nothing of it is left.
#[derive(Debug)]
pub struct Source {
    image: Arc<Image>,
    tier: ImageTier,
    map: NewMap,
    reading: Reading,
}

/// What a VM has of the image that it was made of.
#[derive(Debug)]
pub struct Given {
    pub tier: ImageTier,
    pub reading: Reading,
}

/// A map that is no VM's yet. Dropped, its file is gone.
#[derive(Debug)]
struct NewMap(PathBuf);

impl Drop for NewMap {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

impl Source {
    /// Looks at the whole map of an image, and makes the VM's own beside `path`, where it is going to be. `unique` is what
    /// nobody else gives. `prefetches`: for the VM of this name, what one before needed first is read as well.
    ///
    /// # Errors
    /// The image lacks a page or is damaged; the disk's. In words.
    pub fn new(
        image: Arc<Image>,
        reading: Reading,
        path: &Path,
        unique: &str,
        prefetches: Option<&str>,
    ) -> Result<Source, String> {
        let map = NewMap(path.with_extension(format!("{NEW_MAP}{unique}")));
        image.check_state().map_err(|error| in_full(&error))?;
        let tier = ImageTier::create(Arc::clone(&image), &map.0).map_err(|error| in_full(&error))?;
        let tier = match prefetches {
            Some(vm) => tier.with_prefetch(Arc::clone(&image), vm),
            None => tier,
        };
        Ok(Source { image, tier, map, reading })
    }

    pub fn id(&self) -> ImageId {
        self.manifest().id
    }

    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    pub fn manifest(&self) -> &Manifest {
        self.image.manifest()
    }

    /// What is done with the VM until its guest runs.
    pub fn operation(&self) -> Operation {
        Operation::restore(self.manifest())
    }

    /// Gives the VM what it needs, and the map the path that the VM's record stands for.
    ///
    /// # Errors
    /// Those of rename(2).
    pub fn give(self, path: &Path) -> std::io::Result<Given> {
        let Source { tier, map, reading, .. } = self;
        std::fs::rename(&map.0, path)?;
        Ok(Given { tier, reading })
    }
}

/// Removes what daemons before this one left of VMs that they did not make. To be called at start, when none is being made.
pub fn clean(records: &Path) {
    let Ok(entries) = std::fs::read_dir(records) else { return };
    let paths = entries.flatten().map(|entry| entry.path());
    let is_new = |path: &PathBuf| {
        path.extension().and_then(OsStr::to_str).is_some_and(|extension| extension.starts_with(NEW_MAP))
    };
    paths.filter(is_new).for_each(|path| remove(&path));
}

fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!("remove {}: {error}", path.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use pagoda_image::Stage;
    use pagoda_pager::tier::Tier;

    use super::*;
    use crate::images::tests::{Bench, make, manifest};

    fn source(bench: &Bench, id: u128) -> Result<Source, String> {
        let image = Arc::new(bench.images.store().unwrap().image(ImageId(id)).unwrap());
        let reading = bench.images.readers().begin(image.manifest().id, "web1").unwrap();
        Source::new(image, reading, &bench.dir.join("web1.image"), "x", Some("web1"))
    }

    fn files(bench: &Bench) -> Vec<String> {
        let names = std::fs::read_dir(&bench.dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name != "images");
        names.sort();
        names
    }

    #[test]
    fn a_source_leaves_nothing_unless_it_is_given_to_a_vm() {
        let bench = Bench::new("source");
        let store = bench.images.store().unwrap();
        make(store, manifest(1, "web1", "filled"), Stage::Filled);
        make(store, manifest(2, "web1", "begun"), Stage::Begun);
        let first = source(&bench, 1).unwrap();
        assert_eq!(
            (files(&bench), bench.images.readers().of(ImageId(1))),
            (vec!["web1.image-new-x".into()], vec!["web1".into()])
        );
        assert_eq!(first.tier.name(), TIER);
        drop(first);
        assert_eq!((files(&bench), bench.images.readers().of(ImageId(1))), (vec![], vec![]));
        // An image that lacks pages is refused.
        assert!(source(&bench, 2).is_err());
        assert_eq!((files(&bench), bench.images.readers().of(ImageId(2))), (vec![], vec![]));

        let given = source(&bench, 1).unwrap().give(&bench.dir.join("web1.image")).unwrap();
        assert_eq!(files(&bench), ["web1.image"]);
        clean(&bench.dir);
        assert_eq!(files(&bench), ["web1.image"], "it is a VM's");
        assert_eq!(bench.images.readers().of(ImageId(1)), ["web1"]);
        drop(given);
        assert!(bench.images.readers().of(ImageId(1)).is_empty());
        std::fs::write(bench.dir.join("web2.image-new-y"), "left").unwrap();
        clean(&bench.dir);
        assert_eq!(files(&bench), ["web1.image"]);
    }
}
