//! Reads an exported file, piece by piece. Each piece that it hands out was compared with its checksums.
//!
//! It believes nothing: lengths are compared with their limits before memory is taken for them, records have to come in the one
//! order that a writer has, and each chunk comes once. It keeps the payload of one record and the content of one chunk.

use std::io::{self, Read};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkCount, ChunkIdx, PAGE_SIZE, PageCount, PageIdx};

use xxhash_rust::xxh3::Xxh3;

use super::chunk::{Unpacker, check_pages, read_table};
use super::format::{
    END_PAYLOAD, HEADER_SIZE, Header, Kind, RECORD_HEADER_SIZE, RecordHead, STATE_PIECE_MAX, get_u64, sum_of_record,
};
use super::sums::Sums;
use crate::manifest::Manifest;

/// A place in a file that is not as a writer leaves it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {}{}: {what}", offset.0, of_page(*chunk, *page))]
pub struct Fault {
    /// Where in the file.
    pub offset: Bytes,
    /// The chunk of the VM's memory, if it is in one.
    pub chunk: Option<ChunkIdx>,
    /// The page of the VM, if it is one.
    pub page: Option<PageIdx>,
    /// What is wrong, in words.
    pub what: String,
}

fn of_page(chunk: Option<ChunkIdx>, page: Option<PageIdx>) -> String {
    match (chunk, page) {
        (_, Some(page)) => format!(", page {page}"),
        (Some(chunk), None) => format!(", chunk {}", chunk.0),
        (None, None) => String::new(),
    }
}

/// Why a file is not read on.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is damaged, cut, of another version, or made by somebody who means no good.
    #[error("{0}")]
    Bad(Fault),
    /// Where it comes from failed.
    #[error("byte {}: {source}", offset.0)]
    Io { offset: Bytes, source: io::Error },
}

impl From<Fault> for FileError {
    fn from(fault: Fault) -> FileError {
        FileError::Bad(fault)
    }
}

/// What a file has, in its order.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// The next bytes of QEMU's state.
    State(&'a [u8]),
    /// A chunk. `pages` have the checksums and the content, in order; all others are zero.
    Chunk { chunk: ChunkIdx, pages: PageSet, sums: &'a [u32], content: &'a [u8] },
    /// Chunks that are all zero.
    Zeros { first: ChunkIdx, count: ChunkCount },
    /// All of it was right, and nothing follows.
    End(Totals),
}

/// What a whole file has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of the file.
    pub bytes: u64,
    /// Number of pages that have content.
    pub blocks: u64,
    /// Number of pages that are all zero.
    pub zeros: u64,
}

/// Reads an exported file from its start to its end, without going back.
pub struct Reader<R> {
    input: R,
    header: Header,
    manifest: Manifest,
    sums: Sums,
    /// Bytes of the state that are not read yet.
    state_left: u64,
    state_pieces: u32,
    state_sum: Xxh3,
    next: ChunkIdx,
    is_over: bool,
    unpacker: Unpacker,
    payload: Vec<u8>,
    content: Vec<u8>,
    chunk_sums: Vec<u32>,
}

impl<R> std::fmt::Debug for Reader<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reader(at byte {})", self.sums.bytes)
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header and the manifest.
    ///
    /// # Errors
    /// They are not right, or cannot be read.
    pub fn open(mut input: R) -> Result<Reader<R>, FileError> {
        let mut bytes = [0; HEADER_SIZE];
        fill(&mut input, &mut bytes, 0)?;
        let header = Header::decode(&bytes).map_err(|(at, what)| fault(at as u64, None, what))?;
        let mut sums = Sums::default();
        sums.add(HEADER_SIZE, get_u64(&bytes, HEADER_SIZE - 8));
        let unpacker = Unpacker::new().map_err(|source| FileError::Io { offset: Bytes(0), source })?;
        let (start, mut payload) = (HEADER_SIZE as u64, Vec::new());
        let (head, sum) = read_record(&mut input, start, &mut payload)?;
        if head.kind != Kind::Manifest || head.payload_len != header.manifest_len || (head.index, head.count) != (0, 0)
        {
            return Err(
                fault(start, None, format!("a manifest of {} bytes should be here", header.manifest_len)).into()
            );
        }
        let manifest = Manifest::read(&payload).map_err(|damage| {
            let at = start + RECORD_HEADER_SIZE as u64 + damage.offset.0;
            fault(at, None, format!("the manifest: {}", damage.what))
        })?;
        check_manifest(&header, &manifest).map_err(|what| fault(start, None, format!("the manifest: {what}")))?;
        sums.add(RECORD_HEADER_SIZE + payload.len(), sum);
        let (state_left, content) = (header.state.0, vec![0; Bytes(CHUNK_SIZE).as_usize()]);
        Ok(Reader {
            input,
            header,
            manifest,
            sums,
            state_left,
            state_pieces: 0,
            state_sum: Xxh3::new(),
            next: ChunkIdx(0),
            is_over: false,
            unpacker,
            payload,
            content,
            chunk_sums: Vec::new(),
        })
    }

    /// What the snapshot is of, as the file says: it is of stage `durable`, and refers to no other.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Pages with content, as the file says. It has no more.
    pub fn blocks(&self) -> PageCount {
        PageCount(self.header.blocks)
    }

    /// Bytes that were read.
    pub fn offset(&self) -> Bytes {
        Bytes(self.sums.bytes)
    }

    /// The next piece. After [`Piece::End`] there is none.
    ///
    /// # Errors
    /// It is not right, or cannot be read. The reader is not to be used any more then.
    pub fn next_piece(&mut self) -> Result<Piece<'_>, FileError> {
        assert!(!self.is_over, "nothing follows the end");
        let start = self.sums.bytes;
        let (head, sum) = read_record(&mut self.input, start, &mut self.payload)?;
        self.check_order(start, head)?;
        let before = self.sums.clone();
        self.sums.add(RECORD_HEADER_SIZE + head.payload_len, sum);
        match head.kind {
            Kind::Manifest => unreachable!("there is one, and it comes first"),
            Kind::State => self.state(start, head),
            Kind::Chunk => self.chunk(start, head),
            Kind::Zeros => self.zeros(start, head),
            Kind::End => self.end(start, &before),
        }
    }

    /// Manifest, state, chunks, end.
    fn check_order(&self, start: u64, head: RecordHead) -> Result<(), Fault> {
        let expected = match head.kind {
            _ if self.state_left > 0 && head.kind != Kind::State => Kind::State,
            Kind::State if self.state_left > 0 => return Ok(()),
            Kind::Chunk | Kind::Zeros if self.next.0 < self.header.chunks.0 => return Ok(()),
            Kind::End if self.next.0 == self.header.chunks.0 => return Ok(()),
            _ if self.next.0 < self.header.chunks.0 => Kind::Chunk,
            _ => Kind::End,
        };
        Err(fault(start, None, format!("{} comes where {} should be", head.kind.name(), expected.name())))
    }

    fn state(&mut self, start: u64, head: RecordHead) -> Result<Piece<'_>, FileError> {
        let len = self.state_left.min(STATE_PIECE_MAX as u64);
        if (u64::from(head.count), head.index) != (len, self.state_pieces) {
            let what = format!("piece {} of QEMU's state, of {len} bytes, should be here", self.state_pieces);
            return Err(fault(start, None, what).into());
        }
        let content = &mut self.content[..len as usize];
        let unpacked = self.unpacker.unpack(&self.payload, content);
        unpacked.map_err(|what| fault(start + RECORD_HEADER_SIZE as u64, None, what))?;
        (self.state_left, self.state_pieces) = (self.state_left - len, self.state_pieces + 1);
        self.state_sum.update(content);
        if self.state_left == 0 && self.state_sum.digest() != self.manifest.state.xxh3 {
            return Err(fault(start, None, "QEMU's state does not match the manifest's checksum".to_owned()).into());
        }
        Ok(Piece::State(content))
    }

    fn chunk(&mut self, start: u64, head: RecordHead) -> Result<Piece<'_>, FileError> {
        let chunk = self.next;
        let wrong = |at: usize, what: String| fault(start + (RECORD_HEADER_SIZE + at) as u64, Some(chunk), what);
        if head.index != chunk.0 {
            return Err(fault(start + 4, Some(chunk), format!("chunk {} comes here", head.index)).into());
        }
        let table = read_table(&self.payload, head.count).map_err(|(at, what)| wrong(at, what))?;
        let content = &mut self.content[..usize::from(table.pages.count()) * PAGE_SIZE as usize];
        let unpacked = self.unpacker.unpack(&self.payload[table.content_at..], content);
        unpacked.map_err(|what| wrong(table.content_at, what))?;
        check_pages(chunk, &table, content).map_err(|page| {
            let what = "the content does not match its checksum".to_owned();
            Fault { page: Some(page), ..wrong(table.content_at, what) }
        })?;
        self.sums.add_chunk(u64::from(head.count));
        if self.sums.blocks > self.header.blocks {
            return Err(wrong(0, self.header.too_many_or_few()).into());
        }
        self.next.0 += 1;
        self.chunk_sums = table.sums;
        Ok(Piece::Chunk { chunk, pages: table.pages, sums: &self.chunk_sums, content })
    }

    fn zeros(&mut self, start: u64, head: RecordHead) -> Result<Piece<'_>, FileError> {
        let (first, left) = (self.next, self.header.chunks.0 - self.next.0);
        if head.index != first.0 || !(1..=left).contains(&head.count) {
            let what = format!("{} zero chunks from chunk {} on, and {left} are left", head.count, head.index);
            return Err(fault(start, Some(first), what).into());
        }
        (0..head.count).for_each(|_| self.sums.add_chunk(0));
        self.next.0 += head.count;
        Ok(Piece::Zeros { first, count: ChunkCount(head.count) })
    }

    fn end(&mut self, start: u64, before: &Sums) -> Result<Piece<'_>, FileError> {
        let at = start + RECORD_HEADER_SIZE as u64;
        if self.payload.len() != END_PAYLOAD {
            return Err(fault(at, None, format!("an end of {} bytes: it has {END_PAYLOAD}", self.payload.len())).into());
        }
        if self.sums.blocks != self.header.blocks {
            return Err(fault(at, None, self.header.too_many_or_few()).into());
        }
        before.check(&self.payload).map_err(|what| fault(at, None, what))?;
        let bytes = self.sums.bytes;
        let mut more = [0];
        match read_some(&mut self.input, &mut more) {
            Ok(0) => {}
            Ok(_) => return Err(fault(bytes, None, "something follows the end".to_owned()).into()),
            Err(source) => return Err(FileError::Io { offset: Bytes(bytes), source }),
        }
        self.is_over = true;
        Ok(Piece::End(Totals { bytes, blocks: self.sums.blocks, zeros: self.sums.zeros }))
    }
}

/// Against the header, and what a file that stands alone cannot have.
fn check_manifest(header: &Header, manifest: &Manifest) -> Result<(), String> {
    if manifest.pages().chunks_ceil() != header.chunks || !manifest.pages().bytes().is_multiple_of_chunk() {
        return Err(format!("{} pages, and the header has {} chunks", manifest.pages(), header.chunks.0));
    }
    if manifest.state.bytes != header.state.0 {
        return Err(format!("a state of {} bytes, and the header has {}", manifest.state.bytes, header.state.0));
    }
    manifest.check_exported()
}

/// Reads a record's header and its payload, and compares them with the checksum, which is returned.
fn read_record(input: &mut impl Read, start: u64, payload: &mut Vec<u8>) -> Result<(RecordHead, u64), FileError> {
    let mut bytes = [0; RECORD_HEADER_SIZE];
    fill(input, &mut bytes, start)?;
    let (head, sum) = RecordHead::decode(&bytes).map_err(|(at, what)| fault(start + at as u64, None, what))?;
    payload.resize(head.payload_len, 0);
    fill(input, payload, start + RECORD_HEADER_SIZE as u64)?;
    if sum_of_record(&bytes, payload) != sum {
        let what = format!("{} does not match its checksum", head.kind.name());
        let chunk = (head.kind == Kind::Chunk).then_some(ChunkIdx(head.index));
        return Err(fault(start, chunk, what).into());
    }
    Ok((head, sum))
}

/// Fills `bytes`, which begin at `offset` of the file.
fn fill(input: &mut impl Read, bytes: &mut [u8], offset: u64) -> Result<(), FileError> {
    let mut done = 0;
    while done < bytes.len() {
        let at = offset + done as u64;
        match read_some(input, &mut bytes[done..]) {
            Ok(0) => return Err(fault(at, None, "the file ends here, before its end marker".to_owned()).into()),
            Ok(len) => done += len,
            Err(source) => return Err(FileError::Io { offset: Bytes(at), source }),
        }
    }
    Ok(())
}

fn read_some(input: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

fn fault(offset: u64, chunk: Option<ChunkIdx>, what: String) -> Fault {
    Fault { offset: Bytes(offset), chunk, page: None, what }
}
