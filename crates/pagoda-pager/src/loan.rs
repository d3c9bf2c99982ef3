//! What a VM borrows of its snapshot's template, as the kernel has it.
//!
//! What is mapped where is the truth, known by inode: it survives the daemon. Which pages of a borrowed chunk the VM has written
//! is found out by comparing them with the template, when nobody can write them any more. The kernel's page tables say which it
//! *may* have written, for the account of DRAM alone.

use std::sync::Arc;

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE};
use pagoda_sys::pagemap::{Entry, Pagemap};
use pagoda_sys::peek::{Mapping, Memory};
use pagoda_sys::template::Template;

use crate::space::Space;

/// Finds out what one VM borrows: its template, and the VMM's memory and page tables.
#[derive(Debug)]
pub struct Loan {
    template: Arc<Template>,
    memory: Memory,
    pagemap: Pagemap,
    /// Room for the content of a chunk.
    content: Vec<u8>,
}

/// Where the VMM maps what.
#[derive(Debug, Default)]
pub struct Places {
    /// Chunks whose place maps the template.
    pub borrowed: Vec<ChunkIdx>,
    /// The VMM's second mappings of RAM, of which pieces will be moved into place.
    pub spare: Vec<Mapping>,
}

impl Loan {
    /// Of the VMM `pid`.
    ///
    /// # Errors
    /// Its memory may not be read.
    pub fn open(template: Arc<Template>, pid: u32) -> std::io::Result<Loan> {
        let (memory, pagemap) = (Memory::open(pid)?, Pagemap::open(pid)?);
        Ok(Loan { template, memory, pagemap, content: vec![0; CHUNK_SIZE as usize] })
    }

    /// The template that the VM borrows of.
    pub fn template(&self) -> &Arc<Template> {
        &self.template
    }

    /// Looks where the VMM maps the template, and RAM a second time.
    ///
    /// # Errors
    /// The VMM is gone; or a place maps the template otherwise than it should.
    pub fn places(&self, space: &Space) -> std::io::Result<Places> {
        let mut inodes: Vec<(u64, u64)> = space.regions().map(|(_, region)| region.ram.inode()).collect();
        inodes.push(self.template.inode());
        let mut places = Places::default();
        for mapping in self.memory.mappings(&inodes)? {
            let is_place = space.page_at(mapping.addr).is_some();
            match mapping.inode == self.template.inode() {
                true if is_place => self.note_borrowed(space, &mapping, &mut places.borrowed)?,
                // A VMM may look at the template as it likes: nobody can change it.
                true => {}
                false if !is_place => places.spare.push(mapping),
                false => {}
            }
        }
        Ok(places)
    }

    /// Each chunk of a mapping has to be the one that the template has there.
    fn note_borrowed(&self, space: &Space, mapping: &Mapping, out: &mut Vec<ChunkIdx>) -> std::io::Result<()> {
        for at in (0..mapping.len).step_by(CHUNK_SIZE as usize) {
            let page = space.page_at(mapping.addr + at).filter(|page| page.index_in_chunk() == 0);
            let chunk = page.map(|page| page.chunk());
            let slot = chunk.and_then(|chunk| self.template.slot_of(chunk.0));
            let (Some(chunk), Some(slot)) = (chunk, slot) else { return Err(misplaced()) };
            if slot as u64 * CHUNK_SIZE != mapping.offset + at {
                return Err(misplaced());
            }
            out.push(chunk);
        }
        Ok(())
    }

    /// Where the VMM maps the RAM of a borrowed chunk that is to be moved into its place.
    pub fn spare_of(&self, space: &Space, chunk: ChunkIdx, places: &Places) -> Option<u64> {
        let location = space.locate_chunk(chunk);
        let has = |mapping: &&Mapping| {
            let is_file = mapping.inode == location.region.ram.inode();
            is_file && mapping.offset <= location.offset && location.offset - mapping.offset < mapping.len
        };
        let mapping = places.spare.iter().find(has)?;
        Some(mapping.addr + (location.offset - mapping.offset))
    }

    /// What the place of a chunk maps: true is the template, false the RAM file.
    ///
    /// # Errors
    /// `NotFound` if the VMM is gone; another if neither is mapped there.
    pub fn is_borrowed(&self, space: &Space, chunk: ChunkIdx) -> std::io::Result<bool> {
        let location = space.locate_chunk(chunk);
        let ram = location.region.ram.inode();
        let mappings = self.memory.mappings(&[ram, self.template.inode()])?;
        if mappings.is_empty() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let covers = |mapping: &&Mapping| mapping.addr <= location.addr && location.addr - mapping.addr < mapping.len;
        let mapping = mappings.iter().find(covers).ok_or_else(misplaced)?;
        let is_whole = mapping.addr + mapping.len >= location.addr + location.len;
        let offset = mapping.offset + (location.addr - mapping.addr);
        let slot = self.template.slot_of(chunk.0).ok_or_else(misplaced)?;
        match () {
            () if is_whole && mapping.inode == ram && offset == location.offset => Ok(false),
            () if is_whole && mapping.inode == self.template.inode() && offset == slot as u64 * CHUNK_SIZE => Ok(true),
            () => Err(misplaced()),
        }
    }

    /// Pages of a borrowed chunk that the VM may have written: the kernel has a copy of them for it.
    ///
    /// # Errors
    /// The VMM is gone.
    pub fn private(&self, space: &Space, chunk: ChunkIdx) -> std::io::Result<PageSet> {
        let mut entries = [Entry::default(); CHUNK_PAGES as usize];
        self.pagemap.read(space.locate_chunk(chunk).addr, &mut entries)?;
        Ok((0..=u8::MAX).filter(|index| entries[usize::from(*index)].is_anonymous()).collect())
    }

    /// Reads a borrowed chunk, which nobody can write to. What differs from the template, and the content of all of it.
    ///
    /// # Errors
    /// The VMM is gone, or the chunk is not the template's.
    pub fn read(&mut self, space: &Space, chunk: ChunkIdx) -> std::io::Result<(PageSet, &[u8])> {
        let slot = self.template.slot_of(chunk.0).ok_or_else(misplaced)?;
        self.memory.read(space.locate_chunk(chunk).addr, &mut self.content)?;
        Ok((PageSet::from_words(self.template.differing(slot, &self.content)), &self.content))
    }
}

/// A page of the content of a chunk.
pub fn page(content: &[u8], index: u8) -> &[u8] {
    let at = usize::from(index) * PAGE_SIZE as usize;
    &content[at..at + PAGE_SIZE as usize]
}

fn misplaced() -> std::io::Error {
    std::io::Error::other("the VMM does not map the template of its snapshot as it should")
}
