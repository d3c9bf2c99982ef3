//! Looks through the beginning of a migration stream: as far as the end of its memory blocks. Pure: bytes in, places out.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `QEVM`, version 3 |
//! | 1, 4, n | 7: configuration; the machine's name; then its subsections, each 5, a name, a version and its content |
//! | 1, 4, 1 + 3, 4, 4 | 1: a section begins; its number; `ram`; instance; version 4 |
//! | 8 | bytes of all blocks, with the flag `MEM_SIZE` |
//! | 1 + n, 8, 8 | for each block: id, bytes, address (with `x-ignore-shared` alone) |
//! | 8 | the flag `EOS` |
//! | 5 | 0x7e and the section's number |
//! | 1, 4, pages, 8, 5 | 2, or 3 for the last: more of the section, up to `EOS` and the footer |

use std::io::Read;
use std::ops::Range;

use pagoda_core::units::PAGE_SIZE;

use super::pages::{CONTINUE, EOS, MEM_SIZE, PAGE, SECTION_FOOTER, SECTION_PART, ZERO};

const MAGIC: &[u8; 4] = b"QEVM";
const VERSION: u32 = 3;
const SECTION_START: u8 = 0x01;
const SECTION_END: u8 = 0x03;
const SUBSECTION: u8 = 0x05;
const CONFIGURATION: u8 = 0x07;
const COMMAND: u8 = 0x08;
/// Version of the section `ram`.
const RAM_VERSION: u32 = 4;
/// Bits of an offset that are flags.
const FLAGS: u64 = PAGE_SIZE - 1;
const PAGE_BITS: u32 = 12;
const UUID_SIZE: usize = 16;
/// The one capability of which it is known what it changes.
const IGNORE_SHARED: &str = "x-ignore-shared";
/// Memory blocks of a QEMU: a machine has about ten.
const BLOCKS_MAX: usize = 1024;
/// Subsections of the configuration: QEMU 10 has three.
const SUBSECTIONS_MAX: usize = 16;
/// Bytes of a machine's name.
const MACHINE_MAX: u32 = 255;
/// Bytes that are read of the state at once.
const WINDOW: usize = 64 << 10;

/// A memory block of QEMU's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) id: String,
    pub(super) len: u64,
    /// The stream has pages of it.
    pub(super) was_sent: bool,
}

/// Where in the stream what is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The subsection with the capabilities.
    pub(super) capabilities: Range<u64>,
    pub(super) ram: Ram,
    pub(super) blocks: Vec<Block>,
}

/// The section `ram` of the stream, as far as the end of its list of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ram {
    /// The number that the stream gives the section.
    pub(super) id: u32,
    /// Where the list of blocks begins.
    pub(super) blocks_at: u64,
    /// Where what follows its footer begins.
    pub(super) end: u64,
    /// Bytes of all blocks.
    total: u64,
}

impl Layout {
    /// The list of blocks with all that follows it up to the footer's end, as a QEMU has it that leaves no memory out.
    pub(super) fn setup_without_addresses(&self) -> Vec<u8> {
        let mut bytes = (self.ram.total | MEM_SIZE).to_be_bytes().to_vec();
        for block in &self.blocks {
            bytes.push(block.id.len() as u8);
            bytes.extend_from_slice(block.id.as_bytes());
            bytes.extend_from_slice(&block.len.to_be_bytes());
        }
        bytes.extend_from_slice(&EOS.to_be_bytes());
        bytes.push(SECTION_FOOTER);
        bytes.extend_from_slice(&self.ram.id.to_be_bytes());
        bytes
    }
}

/// Looks through a state.
///
/// # Errors
/// What is not known, and where.
pub(super) fn scan(input: &mut impl Read) -> Result<Layout, String> {
    let mut input = Input { input, window: vec![0; WINDOW], range: 0..0, offset: 0 };
    scan_all(&mut input).map_err(|what| format!("QEMU's state, byte {}: {what}", input.offset))
}

fn scan_all(input: &mut Input<'_, impl Read>) -> Result<Layout, String> {
    if input.bytes::<4>()? != *MAGIC || input.u32()? != VERSION {
        return Err("it is no migration stream of version 3".to_owned());
    }
    expect(input.u8()?, CONFIGURATION, "the configuration")?;
    let machine = input.u32()?;
    if machine > MACHINE_MAX {
        return Err(format!("a machine's name of {machine} bytes"));
    }
    input.skip(u64::from(machine))?;
    let (capabilities, kind) = subsections(input)?;
    expect(kind, SECTION_START, "the section ram")?;
    let id = input.u32()?;
    let (name, instance, version) = (input.text()?, input.u32()?, input.u32()?);
    if (&*name, instance, version) != ("ram", 0, RAM_VERSION) {
        return Err(format!("section {name:?} {instance} of version {version}, where memory should begin"));
    }
    let blocks_at = input.offset;
    let (total, mut blocks) = list_of_blocks(input)?;
    footer(input, id)?;
    let ram = Ram { id, blocks_at, end: input.offset, total };
    loop {
        match input.u8()? {
            kind @ (SECTION_PART | SECTION_END) => {
                let of = input.u32()?;
                if of != id {
                    return Err(format!("a part of section {of}, which is not ram"));
                }
                parts(input, &mut blocks)?;
                footer(input, id)?;
                if kind == SECTION_END {
                    return Ok(Layout { capabilities, ram, blocks });
                }
            }
            COMMAND => {
                let (command, len) = (input.u16()?, input.u16()?);
                // A command without content says that the source has stopped, or asks for nothing.
                if len != 0 {
                    return Err(format!("command {command} with {len} bytes"));
                }
            }
            other => return Err(format!("something of type {other} among the parts of memory")),
        }
    }
}

/// The subsections of the configuration: where that with the capabilities is. And the type of what follows.
fn subsections(input: &mut Input<'_, impl Read>) -> Result<(Range<u64>, u8), String> {
    let mut capabilities = None;
    for _ in 0..=SUBSECTIONS_MAX {
        let start = input.offset;
        let kind = input.u8()?;
        if kind != SUBSECTION {
            let found = capabilities.ok_or("it was not saved without memory: there are no capabilities")?;
            return Ok((found, kind));
        }
        let (name, _version) = (input.text()?, input.u32()?);
        match &*name {
            "configuration/capabilities" => {
                let count = input.u32()?;
                let first = input.text()?;
                if count != 1 || first != IGNORE_SHARED {
                    return Err(format!("{count} capabilities, {first:?} among them: {IGNORE_SHARED} alone is known"));
                }
                capabilities = Some(start..input.offset);
            }
            "configuration/target-page-bits" => {
                let bits = input.u32()?;
                if bits != PAGE_BITS {
                    return Err(format!("pages of 2^{bits} bytes"));
                }
            }
            "configuration/uuid" => input.skip(UUID_SIZE as u64)?,
            other => return Err(format!("the subsection {other:?}, which is not known")),
        }
    }
    Err(format!("more than {SUBSECTIONS_MAX} subsections of the configuration"))
}

fn list_of_blocks(input: &mut Input<'_, impl Read>) -> Result<(u64, Vec<Block>), String> {
    let first = input.u64()?;
    if first & FLAGS != MEM_SIZE {
        return Err(format!("flags {:#x} where the list of memory blocks should begin", first & FLAGS));
    }
    let total = first & !FLAGS;
    let (mut left, mut blocks) = (total, Vec::<Block>::new());
    while left > 0 {
        let (id, len, _address) = (input.text()?, input.u64()?, input.u64()?);
        if id.is_empty() || len == 0 || len > left || len & FLAGS != 0 || blocks.iter().any(|block| block.id == id) {
            return Err(format!("memory block {id:?} of {len} bytes, and {left} are left"));
        }
        if blocks.len() == BLOCKS_MAX {
            return Err(format!("more than {BLOCKS_MAX} memory blocks"));
        }
        left -= len;
        blocks.push(Block { id, len, was_sent: false });
    }
    match input.u64()? {
        EOS => Ok((total, blocks)),
        other => Err(format!("flags {other:#x} behind the list of memory blocks")),
    }
}

/// Pages, up to the mark that ends them.
fn parts(input: &mut Input<'_, impl Read>, blocks: &mut [Block]) -> Result<(), String> {
    let mut current = None;
    loop {
        let word = input.u64()?;
        if word == EOS {
            return Ok(());
        }
        let (at, flags) = (word & !FLAGS, word & FLAGS);
        if flags & CONTINUE == 0 {
            let id = input.text()?;
            let found = blocks.iter().position(|block| block.id == id);
            current = Some(found.ok_or_else(|| format!("a page of the memory block {id:?}, which is not listed"))?);
        }
        let block = current.map(|index| &mut blocks[index]).ok_or("a page of no memory block")?;
        if at >= block.len {
            return Err(format!("a page at {at} of the memory block {:?}, which has {} bytes", block.id, block.len));
        }
        block.was_sent = true;
        match flags & !CONTINUE {
            PAGE => input.skip(PAGE_SIZE)?,
            ZERO => expect(input.u8()?, 0, "a page of zeros")?,
            other => return Err(format!("a page with the flags {other:#x}, which are not known")),
        }
    }
}

fn footer(input: &mut Input<'_, impl Read>, section: u32) -> Result<(), String> {
    expect(input.u8()?, SECTION_FOOTER, "the footer of the section ram")?;
    match input.u32()? {
        of if of == section => Ok(()),
        of => Err(format!("the footer of section {of}, in section {section}")),
    }
}

fn expect(found: u8, expected: u8, what: &str) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{found:#04x} where {what} should be, {expected:#04x}")) }
}

/// Bytes with the offset of the next one.
struct Input<'a, R> {
    input: &'a mut R,
    window: Vec<u8>,
    /// What of `window` is there.
    range: Range<usize>,
    offset: u64,
}

impl<R: Read> Input<'_, R> {
    fn fill(&mut self) -> Result<(), String> {
        if self.range.is_empty() {
            let len = self.input.read(&mut self.window).map_err(|error| error.to_string())?;
            if len == 0 {
                return Err("it ends here".to_owned());
            }
            self.range = 0..len;
        }
        Ok(())
    }

    fn u8(&mut self) -> Result<u8, String> {
        self.fill()?;
        let byte = self.window[self.range.start];
        self.range.start += 1;
        self.offset += 1;
        Ok(byte)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.u8()?;
        }
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.bytes().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.bytes().map(u64::from_be_bytes)
    }

    /// A byte with the length, and text of that.
    fn text(&mut self) -> Result<String, String> {
        let len = self.u8()?;
        let bytes: Vec<u8> = (0..len).map(|_| self.u8()).collect::<Result<_, _>>()?;
        match String::from_utf8(bytes) {
            Ok(text) if !text.contains(char::is_control) => Ok(text),
            _ => Err("a name that is no text".to_owned()),
        }
    }

    fn skip(&mut self, mut len: u64) -> Result<(), String> {
        while len > 0 {
            self.fill()?;
            let step = len.min(self.range.len() as u64);
            self.range.start += step as usize;
            (self.offset, len) = (self.offset + step, len - step);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
