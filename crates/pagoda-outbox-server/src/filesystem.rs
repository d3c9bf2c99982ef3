//! What the guest's kernel asks by FUSE, answered from the space. Every request may be hostile.
//!
//! `virtiofsd` has parsed it, and bounded names, sizes and lists by the request's own length (1 MiB). Numbers in it are the
//! guest's: those of files and handles are looked up, offsets and sizes are checked by the space.

mod bytes;
mod convert;
mod listing;
pub mod session;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pagoda_outbox::limits::{NAME_BYTES_MAX, NODES_MAX, PAGE_BYTES};
use pagoda_outbox::{Access, Attributes, HandleId, Ino, Kind, NewNode, Refusal, Replace, XattrWrite};
use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SerializableFileSystem, SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse;

use self::bytes::Bytes;
use self::convert::{attr, new_node, owner};
use self::listing::{Blank, Listing};
use crate::errno::error;
use crate::locked::Locked;
use crate::outbox::{Again, Outbox, now};

/// The longest write that is taken in one request, as `virtiofsd` tells the guest (`max_write`).
const WRITE_BYTES_MAX: u64 = 1 << 20;
/// For how long the guest need not ask again: nobody but the guest changes names and sizes, except that old files go.
const VALID: Duration = Duration::from_secs(1);

/// The request that a thread carries out.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Files that it opens are its own until it was answered.
    pub number: u64,
    /// A process has been killed that carried it out.
    pub is_again: bool,
}

impl Now {
    const NONE: Now = Now { number: 0, is_again: false };
    /// No guest's: what was agreed at the mount is said again.
    pub const RESUME: Now = Now { number: 0, is_again: true };
}

thread_local! {
    static NOW: Cell<Now> = const { Cell::new(Now::NONE) };
}

/// Does something as this request.
pub fn as_request<T>(now: Now, what: impl FnOnce() -> T) -> T {
    NOW.set(now);
    let done = what();
    NOW.set(Now::NONE);
    done
}

#[derive(Debug)]
pub struct GuestFiles(pub Arc<Outbox>);

impl SerializableFileSystem for GuestFiles {}

fn refused<T>(number: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(number))
}

fn entry(attributes: &Attributes) -> Entry {
    Entry { inode: attributes.ino.0, generation: 0, attr: attr(attributes), attr_timeout: VALID, entry_timeout: VALID }
}

impl GuestFiles {
    fn space(&self) -> Locked<'_> {
        self.0.space()
    }

    fn open_file(&self, ino: Ino, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        let access = match flags as i32 & libc::O_ACCMODE {
            libc::O_RDONLY => Access::Read,
            _ => Access::Write,
        };
        if self.space().attributes(ino).map_err(error)?.kind == Kind::Directory {
            return Err(error(Refusal::IsADirectory));
        }
        let handle = self.space().open_by(ino, access, NOW.get().number).map_err(error)?;
        if flags as i32 & libc::O_TRUNC != 0
            && let Err(refused) = self.0.truncate(ino, 0)
        {
            self.space().release(handle).map_err(error)?;
            return Err(refused);
        }
        if access == Access::Write {
            self.0.job_opened(ino);
        }
        // No copy in the guest's page cache: each byte is in memory once.
        Ok((Some(handle.0), OpenOptions::DIRECT_IO))
    }
}

impl FileSystem for GuestFiles {
    type Inode = u64;
    type Handle = u64;
    type DirIter = Listing;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let now = NOW.get();
        if !(now.number == 0 && now.is_again) {
            self.0.abandon();
            self.space().set_session(capable.bits());
        }
        Ok(FsOptions::empty())
    }

    fn destroy(&self) {
        self.0.abandon();
        self.space().set_session(0);
    }

    fn lookup(&self, _: Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let space = self.space();
        let found = match name.to_bytes() {
            b"." => space.attributes(Ino(parent)),
            b".." => space.parent(Ino(parent)).and_then(|parent| space.attributes(parent)),
            name => space.lookup(Ino(parent), name),
        };
        found.map(|attributes| entry(&attributes)).map_err(error)
    }

    // Numbers are never used again, so nothing has to be kept for one that the guest remembers.
    fn forget(&self, _: Context, _: u64, _: u64) {}

    fn batch_forget(&self, _: Context, _: Vec<(u64, u64)>) {}

    fn getattr(&self, _: Context, inode: u64, _: Option<u64>) -> io::Result<(fuse::Attr, Duration)> {
        let attributes = self.space().attributes(Ino(inode)).map_err(error)?;
        Ok((attr(&attributes), VALID))
    }

    fn setattr(
        &self,
        context: Context,
        inode: u64,
        wanted: fuse::SetattrIn,
        _: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(fuse::Attr, Duration)> {
        let ino = Ino(inode);
        if valid.contains(SetattrValid::SIZE) {
            self.0.truncate(ino, wanted.size)?;
        }
        let now = now();
        let before = self.space().attributes(ino).map_err(error)?;
        let mode = valid.contains(SetattrValid::MODE).then_some(wanted.mode);
        let owner = owner(&before, &wanted, valid);
        let modified = convert::modified(&wanted, valid, now);
        self.space().set_attributes(ino, mode, owner, modified, now).map_err(error)?;
        self.getattr(context, inode, None)
    }

    fn symlink(&self, _: Context, _: &CStr, _: u64, _: &CStr, _: Extensions) -> io::Result<Entry> {
        refused(libc::EPERM)
    }

    fn mknod(&self, _: Context, _: u64, _: &CStr, _: u32, _: u32, _: u32, _: Extensions) -> io::Result<Entry> {
        refused(libc::EPERM)
    }

    fn link(&self, _: Context, _: u64, _: u64, _: &CStr) -> io::Result<Entry> {
        refused(libc::EPERM)
    }

    fn mkdir(
        &self,
        context: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        umask: u32,
        _: Extensions,
    ) -> io::Result<Entry> {
        let new = new_node(context, mode, umask);
        let made = self.space().make_directory(Ino(parent), name.to_bytes(), new);
        made.map(|attributes| entry(&attributes)).map_err(error)
    }

    fn unlink(&self, _: Context, parent: u64, name: &CStr) -> io::Result<()> {
        let done = self.space().unlink(Ino(parent), name.to_bytes(), Kind::File, now());
        self.0.settle();
        done.map_err(error)
    }

    fn rmdir(&self, _: Context, parent: u64, name: &CStr) -> io::Result<()> {
        self.space().unlink(Ino(parent), name.to_bytes(), Kind::Directory, now()).map_err(error)
    }

    fn rename(
        &self,
        _: Context,
        olddir: u64,
        oldname: &CStr,
        newdir: u64,
        newname: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let replace = match flags {
            0 => Replace::Allowed,
            libc::RENAME_NOREPLACE => Replace::Refused,
            _ => return refused(libc::EINVAL),
        };
        let from = (Ino(olddir), oldname.to_bytes());
        let to = (Ino(newdir), newname.to_bytes());
        let done = self.space().rename(from, to, replace, now());
        let renamed = self.space().lookup(to.0, to.1);
        if let (Ok(()), Ok(renamed)) = (done, renamed) {
            self.0.job_settled(renamed.ino);
        }
        self.0.settle();
        done.map_err(error)
    }

    fn open(&self, _: Context, inode: u64, _: bool, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_file(Ino(inode), flags)
    }

    fn create(
        &self,
        context: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        _: bool,
        flags: u32,
        umask: u32,
        _: Extensions,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions)> {
        let new: NewNode = new_node(context, mode, umask);
        let access = if flags as i32 & libc::O_ACCMODE == libc::O_RDONLY { Access::Read } else { Access::Write };
        let mut space = self.space();
        let made = match space.create(Ino(parent), name.to_bytes(), new) {
            // Made meanwhile by another process of the guest, which opens it then.
            Err(Refusal::Exists) if flags as i32 & libc::O_EXCL == 0 => {
                let found = space.lookup(Ino(parent), name.to_bytes()).map_err(error)?;
                drop(space);
                let (handle, options) = self.open_file(found.ino, flags)?;
                return Ok((entry(&found), handle, options));
            }
            made => made.map_err(error)?,
        };
        // Under the same lock: a reader never sees the file before it has its writer, or it would be told that this is all.
        match space.open_by(made.ino, access, NOW.get().number) {
            Ok(handle) => {
                drop(space);
                if access == Access::Write {
                    self.0.job_opened(made.ino);
                }
                Ok((entry(&made), Some(handle.0), OpenOptions::DIRECT_IO))
            }
            Err(refusal) => {
                space.unlink(Ino(parent), name.to_bytes(), Kind::File, now()).map_err(error)?;
                Err(error(refusal))
            }
        }
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        _: Context,
        inode: u64,
        handle: u64,
        mut w: W,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        self.0.read(HandleId(handle), Ino(inode), offset, u64::from(size), |file, at, count| {
            w.read_from_file_at(file, count, at, None)
        })
    }

    fn write<R: ZeroCopyReader>(
        &self,
        _: Context,
        inode: u64,
        handle: u64,
        r: R,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: bool,
        _: bool,
        _: u32,
    ) -> io::Result<usize> {
        if u64::from(size) > WRITE_BYTES_MAX {
            return refused(libc::EINVAL);
        }
        let mut bytes = Bytes::new(r, size as usize);
        let put = |file: &std::fs::File, at, count| bytes.put(file, at, count);
        let again = if NOW.get().is_again { Again::Yes } else { Again::No };
        let written = self.0.write(HandleId(handle), Ino(inode), offset, u64::from(size), again, put);
        written.map(|bytes| bytes as usize)
    }

    fn flush(&self, _: Context, _: u64, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn fsync(&self, _: Context, _: u64, _: bool, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn fallocate(&self, _: Context, inode: u64, _: u64, _: u32, offset: u64, _: u64) -> io::Result<()> {
        self.space().check_hole(Ino(inode), offset).map_err(error)?;
        refused(libc::EOPNOTSUPP)
    }

    fn release(&self, _: Context, inode: u64, _: u32, handle: u64, _: bool, _: bool, _: Option<u64>) -> io::Result<()> {
        let done = self.space().release(HandleId(handle));
        self.0.job_settled(Ino(inode));
        self.0.settle();
        done.map_err(error)
    }

    fn statfs(&self, context: Context, inode: u64) -> io::Result<libc::statvfs64> {
        let figures = self.space().figures();
        // The library's own answer gives a structure of zeros without unsafe code.
        let mut st = Blank.statfs(context, inode)?;
        st.f_bsize = PAGE_BYTES;
        st.f_frsize = PAGE_BYTES;
        st.f_blocks = figures.budget / PAGE_BYTES;
        st.f_bfree = figures.available() / PAGE_BYTES;
        st.f_bavail = st.f_bfree;
        st.f_files = NODES_MAX as u64;
        st.f_ffree = st.f_files.saturating_sub(figures.nodes);
        st.f_namemax = NAME_BYTES_MAX as u64;
        Ok(st)
    }

    fn setxattr(
        &self,
        _: Context,
        inode: u64,
        name: &CStr,
        value: &[u8],
        flags: u32,
        _: SetxattrFlags,
    ) -> io::Result<()> {
        let how = match flags as i32 {
            0 => XattrWrite::Any,
            libc::XATTR_CREATE => XattrWrite::Create,
            libc::XATTR_REPLACE => XattrWrite::Replace,
            _ => return refused(libc::EINVAL),
        };
        let done = self.space().set_xattr(Ino(inode), name.to_bytes(), value, how);
        self.0.settle();
        done.map_err(error)
    }

    fn getxattr(&self, _: Context, inode: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        let space = self.space();
        let value = space.xattr(Ino(inode), name.to_bytes()).map_err(error)?;
        match size {
            0 => Ok(GetxattrReply::Count(value.len() as u32)),
            size if (size as usize) < value.len() => refused(libc::ERANGE),
            _ => Ok(GetxattrReply::Value(value.to_vec())),
        }
    }

    fn listxattr(&self, _: Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        let space = self.space();
        let names = space.xattr_names(Ino(inode)).map_err(error)?;
        let names: Vec<u8> = names.flat_map(|name| name.iter().copied().chain([0])).collect();
        match size {
            0 => Ok(ListxattrReply::Count(names.len() as u32)),
            size if (size as usize) < names.len() => refused(libc::ERANGE),
            _ => Ok(ListxattrReply::Names(names)),
        }
    }

    fn removexattr(&self, _: Context, inode: u64, name: &CStr) -> io::Result<()> {
        let done = self.space().remove_xattr(Ino(inode), name.to_bytes());
        self.0.settle();
        done.map_err(error)
    }

    fn readdir(&self, _: Context, inode: u64, _: u64, size: u32, offset: u64) -> io::Result<Listing> {
        Listing::new(&self.space(), Ino(inode), size, offset).map_err(error)
    }

    fn fsyncdir(&self, _: Context, _: u64, _: bool, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn releasedir(&self, _: Context, _: u64, _: u32, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn syncfs(&self, _: Context, _: u64) -> io::Result<()> {
        Ok(())
    }
}
