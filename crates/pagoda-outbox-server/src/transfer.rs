//! The guest's WRITE and READ, by which files get and give their bytes.
//!
//! They are not the library's to answer: it moves whole parts of the guest's memory, though fewer bytes were asked for, and it reads
//! what was asked for once more, while the guest may change it. So it would write more to a file than the space has room for.
//! Here numbers are read once, and parts are cut to what is moved.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};

use pagoda_outbox::{HandleId, Ino};
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::fuse::{InHeader, OutHeader, ReadIn, WriteIn, WriteOut};
use vm_memory::ByteValued;

use crate::outbox::{Again, Incoming, Outbox, Progress};

/// The longest write that is taken in one request, as `virtiofsd` tells the guest (`max_write`).
const WRITE_BYTES_MAX: u32 = 1 << 20;

/// The bytes of a WRITE that are still to be moved.
struct Payload<'a, N> {
    rest: Reader<'a>,
    note: N,
}

impl<N: FnMut(Progress)> Incoming for Payload<'_, N> {
    fn put(&mut self, file: &File, at: u64, count: usize) -> io::Result<usize> {
        let count = self.rest.available_bytes().min(count);
        let behind = self.rest.split_at(count).map_err(io::Error::other)?;
        let mut part = std::mem::replace(&mut self.rest, behind);
        all_of(count, |done| part.write_to_file_at(file, count - done, at + done as u64, None))
    }

    fn take(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.rest.available_bytes().min(count)];
        self.rest.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn note(&mut self, progress: Progress) {
        (self.note)(progress);
    }
}

/// Does a step after another, each of which says how many bytes it has moved, until it is `count` or there are no more.
fn all_of(count: usize, mut step: impl FnMut(usize) -> io::Result<usize>) -> io::Result<usize> {
    let mut done = 0;
    while done < count {
        match step(done)? {
            0 => break,
            moved => done += moved,
        }
    }
    Ok(done)
}

fn reply(writer: &mut Writer<'_>, header: &InHeader, error: i32, body: &[u8], behind: usize) -> io::Result<usize> {
    let length = size_of::<OutHeader>() + body.len() + behind;
    let answer = OutHeader { len: length as u32, error: -error, unique: header.unique };
    writer.write_all(answer.as_slice())?;
    writer.write_all(body)?;
    Ok(length)
}

fn refuse(writer: &mut Writer<'_>, header: &InHeader, refused: &io::Error) -> io::Result<usize> {
    reply(writer, header, refused.raw_os_error().unwrap_or(libc::EIO), &[], 0)
}

/// Carries out a WRITE, of which `reader` has what is behind the header. `note` is told how far it is.
/// Gives the bytes of the answer.
///
/// # Errors
/// It is no WRITE, or has no room for the answer.
pub fn write(
    outbox: &Outbox,
    header: &InHeader,
    mut reader: Reader<'_>,
    mut writer: Writer<'_>,
    again: Again,
    note: impl FnMut(Progress),
) -> io::Result<usize> {
    let asked: WriteIn = reader.read_obj()?;
    if asked.size > WRITE_BYTES_MAX {
        return refuse(&mut writer, header, &io::Error::from_raw_os_error(libc::EINVAL));
    }
    let payload = Payload { rest: reader, note };
    let (handle, ino) = (HandleId(asked.fh), Ino(header.nodeid));
    match outbox.write(handle, ino, asked.offset, u64::from(asked.size), again, payload) {
        Ok(written) => {
            let body = WriteOut { size: written as u32, ..WriteOut::default() };
            reply(&mut writer, header, 0, body.as_slice(), 0)
        }
        Err(refused) => refuse(&mut writer, header, &refused),
    }
}

/// Carries out a READ, of which `reader` has what is behind the header. Gives the bytes of the answer.
///
/// # Errors
/// It is no READ, or has no room for the answer.
pub fn read(outbox: &Outbox, header: &InHeader, mut reader: Reader<'_>, mut writer: Writer<'_>) -> io::Result<usize> {
    let asked: ReadIn = reader.read_obj()?;
    if writer.available_bytes() < size_of::<OutHeader>() {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut data = writer.split_at(size_of::<OutHeader>()).map_err(io::Error::other)?;
    let room = data.available_bytes().min(asked.size as usize);
    let (handle, ino) = (HandleId(asked.fh), Ino(header.nodeid));
    let given = outbox.read(handle, ino, asked.offset, room as u64, |file, at, count| {
        data.split_at(count).map_err(io::Error::other)?;
        all_of(count, |done| data.read_from_file_at(file, count - done, at + done as u64, None))
    });
    match given {
        Ok(bytes) => reply(&mut writer, header, 0, &[], bytes),
        Err(refused) => refuse(&mut writer, header, &refused),
    }
}

#[cfg(test)]
mod tests;
