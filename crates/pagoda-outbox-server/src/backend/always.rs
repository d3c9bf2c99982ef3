//! What another process has left and is carried out however many processes have ended over it, without the library: closing, and what has
//! no effect here.
//!
//! It may have been on its way by chance, while the processes ended over another request. The guest's kernel does not look at the answer
//! to RELEASE and never sends it again: a handle that stayed would keep its file from being sealed for ever, and its readers waiting.

use std::io;
use std::sync::Arc;

use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::filesystem::FileSystem;
use virtiofsd::fuse::{InHeader, Opcode, OutHeader, ReleaseIn};
use vm_memory::ByteValued;

use crate::filesystem::GuestFiles;
use crate::outbox::Outbox;

/// Carries it out, if it is such. `reader` is behind the header.
pub fn carry_out(
    outbox: &Arc<Outbox>,
    opcode: Opcode,
    header: &InHeader,
    reader: &mut Reader<'_>,
) -> Option<io::Result<()>> {
    let files = GuestFiles(Arc::clone(outbox));
    match opcode {
        // A handle that is gone stays gone.
        Opcode::Release => Some(reader.read_obj().and_then(|asked: ReleaseIn| {
            files.release((*header).into(), header.nodeid, asked.flags, asked.fh, false, false, None)
        })),
        Opcode::Destroy => {
            files.destroy();
            Some(Ok(()))
        }
        Opcode::Forget | Opcode::BatchForget => Some(Ok(())),
        Opcode::Flush | Opcode::Fsync | Opcode::Fsyncdir | Opcode::Releasedir | Opcode::Syncfs => Some(Ok(())),
        _ => None,
    }
}

/// Answers with success or the error alone. Gives the bytes of the answer: none, if there is no room for one.
pub fn answer(mut writer: Writer<'_>, header: &InHeader, done: io::Result<()>) -> io::Result<usize> {
    let bytes = size_of::<OutHeader>();
    if writer.available_bytes() < bytes {
        return Ok(0);
    }
    let error = done.err().map_or(0, |error| -error.raw_os_error().unwrap_or(libc::EIO));
    let answer = OutHeader { len: bytes as u32, error, unique: header.unique };
    io::Write::write_all(&mut writer, answer.as_slice())?;
    Ok(bytes)
}
