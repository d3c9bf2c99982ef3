//! The templates of images: memory that all clones of a snapshot read (`pagoda_abi::template`).
//!
//! A template has every chunk of the image that is not all zero, each page compared with its checksum. It is filled by a thread of
//! its own, and nobody has it before it is whole. It stays when the last VM that borrows of it has ended, until somebody needs
//! its memory or nobody has wanted it for [`KEEP`]: [`Templates::drop_unused`].
//!
//! One that a VM borrows of is never dropped: whoever has it holds an [`Arc`] of it, and the last of these frees it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx};
use pagoda_image::{Image, ImageId};
use pagoda_sys::template::{Draft, Template};

/// A template that no VM borrows of stays so long, if nobody needs its memory.
pub const KEEP: Duration = Duration::from_secs(600);
/// After one was given up, the next one is not begun before that: a hundred clones would all try.
const AGAIN: Duration = Duration::from_secs(10);

/// The templates of all images, and those that an earlier daemon made.
#[derive(Debug, Default)]
pub struct Templates(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_image: BTreeMap<ImageId, Arc<Place>>,
    /// Of VMs that an earlier daemon gave them. What they hold is known of no image.
    adopted: Vec<Weak<Template>>,
}

/// Where the template of one image is, if there is one.
#[derive(Debug, Default)]
pub struct Place {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    /// When one was given up last.
    Absent(Option<Instant>),
    /// A thread fills it. It takes so many bytes, or will.
    Filling(u64),
    /// `used`: when a VM was last seen to borrow of it.
    Whole { template: Arc<Template>, used: Instant },
}

impl Default for State {
    fn default() -> State {
        State::Absent(None)
    }
}

/// A template of which this is the one that fills it. Dropped before it is whole, there is none.
#[derive(Debug)]
pub struct Filling(Arc<Place>);

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_borrowed(template: &Arc<Template>) -> bool {
    Arc::strong_count(template) > 1
}

impl Templates {
    /// The place of an image's template.
    pub fn place(&self, image: ImageId) -> Arc<Place> {
        Arc::clone(lock(&self.0).by_image.entry(image).or_default())
    }

    /// What a VM has kept of an earlier daemon's template. Several may have the same.
    pub fn adopt(&self, theirs: Template) -> Arc<Template> {
        let mut known = lock(&self.0);
        known.adopted.retain(|template| template.strong_count() > 0);
        let ours = known.adopted.iter().filter_map(Weak::upgrade).find(|ours| ours.inode() == theirs.inode());
        ours.unwrap_or_else(|| {
            let theirs = Arc::new(theirs);
            known.adopted.push(Arc::downgrade(&theirs));
            theirs
        })
    }

    /// What all of them take of DRAM, and will when they are whole.
    pub fn bytes(&self) -> u64 {
        let known = lock(&self.0);
        let adopted = known.adopted.iter().filter_map(Weak::upgrade).map(|template| template.bytes());
        known.by_image.values().map(|place| place.bytes()).chain(adopted).sum()
    }

    /// The same for the template of one image.
    pub fn bytes_of(&self, image: ImageId) -> u64 {
        lock(&self.0).by_image.get(&image).map_or(0, |place| place.bytes())
    }

    /// Drops those that no VM has borrowed of for so long. How many bytes are free now.
    pub fn drop_unused(&self, unused: Duration) -> u64 {
        let mut dropped = Vec::new();
        let mut known = lock(&self.0);
        known.by_image.retain(|image, place| {
            if let Some(template) = place.take_unused(unused) {
                tracing::info!(%image, bytes = template.bytes(), "dropped the template that no clone borrows of");
                dropped.push(template);
            }
            Arc::strong_count(place) > 1 || !place.is_absent()
        });
        drop(known);
        // Memory is freed here, without the lock.
        dropped.iter().map(|template| template.bytes()).sum()
    }

    /// The image is gone, so nobody borrows of its template any more, nor will.
    pub fn forget(&self, image: ImageId) {
        let place = lock(&self.0).by_image.remove(&image);
        drop(place);
    }
}

impl Place {
    /// Who fills the template, if nobody does, there is none, and none was given up just now.
    pub fn begin(self: &Arc<Place>) -> Option<Filling> {
        let mut state = lock(&self.state);
        let may_begin = match *state {
            State::Absent(given_up) => given_up.is_none_or(|at| at.elapsed() >= AGAIN),
            _ => false,
        };
        may_begin.then(|| {
            *state = State::Filling(0);
            Filling(Arc::clone(self))
        })
    }

    /// The template. While it is being filled, that is waited for, but no longer than so.
    pub fn wait(&self, patience: Duration) -> Option<Arc<Template>> {
        let is_filling = |state: &mut State| matches!(state, State::Filling(_));
        let waited = self.changed.wait_timeout_while(lock(&self.state), patience, is_filling);
        match &mut *waited.unwrap_or_else(PoisonError::into_inner).0 {
            State::Whole { template, used } => {
                *used = Instant::now();
                Some(Arc::clone(template))
            }
            _ => None,
        }
    }

    fn is_absent(&self) -> bool {
        matches!(*lock(&self.state), State::Absent(_))
    }

    fn bytes(&self) -> u64 {
        match &*lock(&self.state) {
            State::Absent(_) => 0,
            State::Filling(bytes) => *bytes,
            State::Whole { template, .. } => template.bytes(),
        }
    }

    fn take_unused(&self, unused: Duration) -> Option<Arc<Template>> {
        let mut state = lock(&self.state);
        let State::Whole { template, used } = &mut *state else { return None };
        if is_borrowed(template) {
            *used = Instant::now();
            return None;
        }
        if used.elapsed() < unused {
            return None;
        }
        match std::mem::take(&mut *state) {
            State::Whole { template, .. } => Some(template),
            _ => None,
        }
    }

    fn set(&self, state: State) {
        *lock(&self.state) = state;
        self.changed.notify_all();
    }
}

impl Filling {
    /// Makes the template of an image. `admit` is asked for the memory once it is known how much that is, and enters what it has
    /// admitted by [`Filling::reserve`].
    ///
    /// # Errors
    /// There is no room; a page of the image is missing or damaged, or cannot be read.
    pub fn fill(self, image: &Image, admit: impl FnOnce(&Filling, u64) -> Result<()>) -> Result<()> {
        let mut chunks = Vec::new();
        for chunk in image.chunks().iter() {
            let content = image.look_at(chunk)?;
            ensure!(content.missing.is_empty(), "the snapshot lacks pages");
            if content.zero != PageSet::FULL {
                chunks.push(chunk.0);
            }
        }
        let mut draft = Draft::create("pagoda-template", chunks)?;
        admit(&self, draft.bytes())?;
        let mut content = vec![0; CHUNK_SIZE as usize];
        for chunk in draft.chunks().to_vec() {
            // Compares each page with its checksum.
            let found = image.read_chunk(ChunkIdx(chunk), &mut content)?;
            ensure!(found.missing.is_empty(), "the snapshot lacks pages");
            draft.push(&content)?;
        }
        let template = Arc::new(draft.seal()?);
        tracing::info!(image = %image.manifest().id, bytes = template.bytes(), "clones share what they read of it");
        self.0.set(State::Whole { template, used: Instant::now() });
        Ok(())
    }

    /// From now on its memory counts as taken.
    pub fn reserve(&self, bytes: u64) {
        self.0.set(State::Filling(bytes));
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let is_whole = matches!(*lock(&self.0.state), State::Whole { .. });
        if !is_whole {
            self.0.set(State::Absent(Some(Instant::now())));
        }
    }
}

#[cfg(test)]
mod tests {
    use pagoda_image::Stage;

    use super::*;
    use crate::images::tests::{Bench, make as make_image, manifest};

    const NO_TIME: Duration = Duration::ZERO;

    fn admitted(filling: &Filling, bytes: u64) -> Result<()> {
        filling.reserve(bytes);
        Ok(())
    }

    fn image(bench: &Bench) -> Image {
        let store = bench.images.store().unwrap();
        make_image(store, manifest(1, "web1", "filled"), Stage::Filled);
        store.image(ImageId(1)).unwrap()
    }

    #[test]
    fn a_template_is_made_once_and_has_what_the_image_has() {
        let bench = Bench::new("templates");
        let image = image(&bench);
        let templates = Templates::default();
        let place = templates.place(ImageId(1));
        assert!(place.wait(NO_TIME).is_none() && templates.bytes() == 0);
        let filling = place.begin().unwrap();
        assert!(place.begin().is_none(), "it is being filled");
        assert!(place.wait(NO_TIME).is_none(), "it is not whole");
        filling.fill(&image, admitted).unwrap();
        assert!(place.begin().is_none(), "there is one");
        let template = templates.place(ImageId(1)).wait(NO_TIME).unwrap();
        assert_eq!((templates.bytes(), templates.bytes_of(ImageId(1))), (template.bytes(), template.bytes()));
        for (slot, chunk) in template.chunks().iter().enumerate() {
            let mut content = vec![0; CHUNK_SIZE as usize];
            image.read_chunk(ChunkIdx(*chunk), &mut content).unwrap();
            assert!(template.content(slot) == content);
        }
    }

    #[test]
    fn who_waits_gets_it_when_it_is_whole() {
        let bench = Bench::new("templates-wait");
        let image = image(&bench);
        let place = Templates::default().place(ImageId(1));
        let filling = place.begin().unwrap();
        let got = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| place.wait(Duration::from_secs(60)));
            filling.fill(&image, admitted).unwrap();
            waiting.join().unwrap()
        });
        assert!(got.is_some());
    }

    #[test]
    fn one_that_is_borrowed_stays_and_another_one_goes() {
        let bench = Bench::new("templates-drop");
        let image = image(&bench);
        let templates = Templates::default();
        let place = templates.place(ImageId(1));
        place.begin().unwrap().fill(&image, admitted).unwrap();
        let borrowed = place.wait(NO_TIME).unwrap();
        assert_eq!(templates.drop_unused(NO_TIME), 0, "a VM may map it");
        let bytes = borrowed.bytes();
        drop(borrowed);
        assert_eq!(templates.drop_unused(KEEP), 0, "it may be wanted again");
        assert_eq!(templates.bytes(), bytes);
        assert_eq!(templates.drop_unused(NO_TIME), bytes);
        assert!(place.wait(NO_TIME).is_none() && templates.bytes() == 0);
        assert!(place.begin().is_some(), "the next clone has another one made");
    }

    #[test]
    fn without_room_there_is_none() {
        let bench = Bench::new("templates-room");
        let image = image(&bench);
        let templates = Templates::default();
        let place = templates.place(ImageId(1));
        let refused = place.begin().unwrap().fill(&image, |filling, bytes| {
            filling.reserve(bytes);
            anyhow::bail!("no room")
        });
        assert!(refused.is_err() && templates.bytes() == 0);
        assert!(place.begin().is_none(), "not at once again");
    }

    #[test]
    fn what_several_vms_have_kept_counts_once() {
        let templates = Templates::default();
        let mut draft = Draft::create("test", vec![3]).unwrap();
        draft.push(&vec![1; CHUNK_SIZE as usize]).unwrap();
        let template = draft.seal().unwrap();
        let again = || Template::from_fd(template.as_fd().try_clone_to_owned().unwrap(), 9).unwrap();
        let (first, second) = (templates.adopt(again()), templates.adopt(again()));
        assert!(Arc::ptr_eq(&first, &second) && templates.bytes() == template.bytes());
        drop((first, second));
        assert_eq!(templates.bytes(), 0);
    }
}
