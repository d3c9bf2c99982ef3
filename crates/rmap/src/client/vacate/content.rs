//! How many pages of an open slab have content, and since when there are none.

use std::time::Duration;

use crate::units::{Time, Version};

/// What an owner counts of one of its slabs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Content {
    /// Number of pages that have content.
    pages: usize,
    empty_since: Time,
    /// It is in the queue of slabs that are looked at because they were empty.
    is_queued: bool,
}

impl Content {
    /// Counts the pages with content anew, from all versions of the slab.
    pub fn count(&mut self, versions: &[Version]) {
        self.pages = versions.iter().filter(|version| version.has_content()).count();
    }

    /// A page has another version.
    pub fn replace(&mut self, before: Version, after: Version) {
        let pages = self.pages + usize::from(after.has_content());
        self.pages = pages.saturating_sub(before.has_content().into());
    }

    /// The slab has left its servers.
    pub fn clear(&mut self) {
        self.pages = 0;
    }

    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Whether the slab may be given back soon.
    pub fn is_leaving(&self) -> bool {
        self.is_queued && self.is_empty()
    }

    /// From when on it has been empty for so long.
    pub fn empty_for_at(&self, after: Duration) -> Time {
        self.empty_since + after
    }

    /// It is empty as of now. `true` if it is to be queued, and was not.
    pub fn became_empty(&mut self, now: Time) -> bool {
        self.empty_since = now;
        self.queued()
    }

    /// `true` if it was not queued before.
    pub fn queued(&mut self) -> bool {
        !std::mem::replace(&mut self.is_queued, true)
    }

    pub fn left_queue(&mut self) {
        self.is_queued = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Generation;

    #[test]
    fn pages_with_content_are_counted_as_they_change() {
        let version = |sequence, trimmed| Version::new(Generation(1), sequence, trimmed);
        let mut content = Content::default();
        content.count(&[version(1, false), version(2, true), Version::NEVER]);
        assert!(!content.is_empty());
        content.replace(version(1, false), version(3, false));
        assert!(!content.is_empty());
        content.replace(version(3, false), version(4, true));
        assert!(content.is_empty() && !content.is_leaving());
        assert!(content.became_empty(Time(5)) && content.is_leaving());
        assert!(!content.became_empty(Time(7)), "it is queued already");
        assert_eq!(content.empty_for_at(Duration::from_nanos(3)), Time(10));
    }
}
