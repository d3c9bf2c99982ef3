//! The bytes between two hosts: golden frames, round trips, and input that somebody made up.

mod golden;
mod hostile;
mod round_trip;

use pagoda_core::bits::Run;
use pagoda_core::units::ChunkIdx;
use pagoda_move::map::PageRun;
use pagoda_move::wire::limits::HEADER_SIZE;
use pagoda_move::wire::{Control, ControlHeader, Data, DataHeader, Malformed};

fn run(chunk: u32, start: u8, len: u16) -> PageRun {
    PageRun { chunk: ChunkIdx(chunk), run: Run { start, len } }
}

/// The header, and what follows it.
fn split(frame: &[u8]) -> ([u8; HEADER_SIZE], &[u8]) {
    let (header, payload) = frame.split_first_chunk().expect("a whole header");
    (*header, payload)
}

fn decode_control(frame: &[u8]) -> Result<Control, Malformed> {
    let (header, payload) = split(frame);
    Control::decode(ControlHeader::decode(header)?, payload)
}

fn decode_data(frame: &[u8]) -> Result<Data<'_>, Malformed> {
    let (header, payload) = split(frame);
    Data::decode(DataHeader::decode(header)?, payload)
}
