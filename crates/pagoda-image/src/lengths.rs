//! Compares how long the files of an image are with what they can be. An impossible length is refused before anything is read or
//! allocated by it.

use std::fs::File;

use pagoda_core::units::{Bytes, PAGE_SIZE};

use crate::damage::{Damage, ImageError, ImageFile};
use crate::limits::IMAGE_PAGES_MAX;
use crate::manifest::Manifest;
use crate::map::{map_bytes, marks_bytes};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) map: Bytes,
    pub(crate) pages: Bytes,
    pub(crate) state: Bytes,
    /// Of `inherited`, if the image has a parent.
    pub(crate) marks: Option<Bytes>,
}

impl Lengths {
    pub(crate) fn of(
        map: &File,
        pages: &File,
        state: Option<&File>,
        marks: Option<&File>,
    ) -> Result<Lengths, ImageError> {
        Ok(Lengths {
            map: len(ImageFile::Map, map)?,
            pages: len(ImageFile::Pages, pages)?,
            state: state.map_or(Ok(Bytes::ZERO), |state| len(ImageFile::State, state))?,
            marks: marks.map(|marks| len(ImageFile::Inherited, marks)).transpose()?,
        })
    }

    /// Against what the manifest says. `pages` may end in a part of a block, and have blocks that no entry names: a daemon was
    /// killed there.
    pub(crate) fn check(self, manifest: &Manifest) -> Result<(), Damage> {
        let expect = |file: ImageFile, found: Bytes, expected: u64| {
            let what = format!("the file has {} bytes, and {expected} are expected", found.0);
            let is_right = found.0 == expected;
            if is_right { Ok(()) } else { Err(Damage::of_file(file, Bytes(found.0.min(expected)), what)) }
        };
        expect(ImageFile::State, self.state, manifest.state.bytes)?;
        let chunks = manifest.pages().chunks_ceil();
        expect(ImageFile::Map, self.map, map_bytes(chunks))?;
        self.marks.map_or(Ok(()), |marks| expect(ImageFile::Inherited, marks, marks_bytes(chunks)))?;
        let most = IMAGE_PAGES_MAX.0 * PAGE_SIZE;
        if self.pages.0 > most {
            let what = format!("the file has {} bytes, and it may have {most}", self.pages.0);
            return Err(Damage::of_file(ImageFile::Pages, Bytes(most), what));
        }
        Ok(())
    }
}

fn len(kind: ImageFile, file: &File) -> Result<Bytes, ImageError> {
    Ok(Bytes(file.metadata().map_err(ImageError::io(kind, 0))?.len()))
}
