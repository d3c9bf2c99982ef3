//! Frames of a move and notes about one: refused, or read so that they are written as they came.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagoda_move::note::{NOTE_SIZE, Note};
use pagoda_move::wire::{Control, ControlHeader, Data, DataHeader};

fuzz_target!(|bytes: &[u8]| {
    if let Some(note) = bytes.first_chunk::<NOTE_SIZE>()
        && let Ok(note) = Note::decode(*note)
    {
        assert_eq!(Note::decode(note.encode()), Ok(note));
    }
    let Some((header, payload)) = bytes.split_first_chunk() else { return };
    if let Ok(header) = ControlHeader::decode(*header)
        && let Ok(message) = Control::decode(header, payload)
    {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, bytes);
    }
    if let Ok(header) = DataHeader::decode(*header)
        && let Ok(message) = Data::decode(header, payload)
    {
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(again, bytes);
    }
});
