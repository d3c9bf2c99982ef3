//! What a process that serves leaves to the next one.

use std::collections::HashMap;
use std::fs::File;
use std::io;

use pagoda_outbox::{FileMemory, Ino};
use rustix::fs::FallocateFlags;

use crate::keeper::line::Line;

/// What a process left that served before, or empty ones.
#[derive(Debug)]
pub struct Left {
    pub journal: [File; 2],
    pub memory: HashMap<Ino, File>,
    pub line: Line,
}

/// Has memory have nothing behind a file's end and nothing of what was given back.
pub fn fit(memory: &File, file: FileMemory) -> io::Result<()> {
    memory.set_len(file.size)?;
    if file.freed > 0 {
        rustix::fs::fallocate(memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, file.freed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::time::Duration;

    use pagoda_outbox::{Access, HandleId, Kind, NewNode, Next, ROOT, Selection};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::MemfdFlags;

    use super::*;
    use crate::keeper::line::Told;
    use crate::outbox::{Again, Outbox, now};

    const PAGE: u64 = 4096;

    /// A keeper without processes.
    struct Keeper {
        journal: [File; 2],
        memory: HashMap<Ino, OwnedFd>,
        line: Option<Line>,
    }

    impl Keeper {
        fn new() -> Keeper {
            let memory = || File::from(rustix::fs::memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
            Keeper { journal: [memory(), memory()], memory: HashMap::new(), line: None }
        }

        fn hear(&mut self) {
            let Some(line) = &self.line else { return };
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            while poll(&mut [PollFd::new(line, PollFlags::IN)], Some(&at_once)).unwrap() > 0 {
                match line.hear().unwrap() {
                    Told::Keep(ino, memory) => drop(self.memory.insert(ino, memory)),
                    Told::Forget(ino) => drop(self.memory.remove(&ino)),
                    Told::Ended => return,
                }
            }
        }

        /// What came before is as if killed.
        fn start(&mut self) -> Outbox {
            self.hear();
            let (theirs, ours) = Line::pair().unwrap();
            self.line = Some(ours);
            let memory = self.memory.iter().map(|(ino, fd)| (*ino, File::from(fd.try_clone().unwrap()))).collect();
            let left =
                Left { journal: self.journal.each_ref().map(|file| file.try_clone().unwrap()), memory, line: theirs };
            let outbox = Outbox::take_over(left, 1 << 20, Duration::ZERO).unwrap();
            self.hear();
            outbox
        }

        fn blocks(&self, ino: Ino) -> u64 {
            File::from(self.memory[&ino].try_clone().unwrap()).metadata().unwrap().blocks() * 512
        }
    }

    fn create(outbox: &Outbox, name: &str) -> (Ino, HandleId) {
        let mut space = outbox.space();
        let ino = space.create(ROOT, name.as_bytes(), NewNode::default()).unwrap().ino;
        let handle = space.open(ino, Access::Write).unwrap();
        (ino, handle)
    }

    fn write(outbox: &Outbox, (ino, handle): (Ino, HandleId), at: u64, bytes: &[u8]) -> io::Result<u64> {
        again(outbox, (ino, handle), at, bytes, Again::No)
    }

    fn again(outbox: &Outbox, (ino, handle): (Ino, HandleId), at: u64, bytes: &[u8], again: Again) -> io::Result<u64> {
        let mut rest = bytes;
        outbox.write(handle, ino, at, bytes.len() as u64, again, |file: &File, at: u64, count: usize| {
            file.write_all_at(&rest[..count], at)?;
            rest = &rest[count..];
            Ok(count)
        })
    }

    fn bytes(outbox: &Outbox, (ino, handle): (Ino, HandleId), at: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        outbox.read(handle, ino, at, length, |file, at, count| file.read_at(&mut bytes[..count], at)).unwrap();
        bytes
    }

    #[test]
    fn another_process_has_all_of_it() {
        let mut keeper = Keeper::new();
        let outbox = keeper.start();
        let (sealed, grows) = (create(&outbox, "sealed"), create(&outbox, "grows"));
        let content: Vec<u8> = (0..5 * PAGE).map(|at| (at / 7) as u8).collect();
        write(&outbox, sealed, 0, &content).unwrap();
        outbox.space().release(sealed.1).unwrap();
        write(&outbox, grows, 0, &content[..10_000]).unwrap();
        // The process is killed while it writes.
        let _torn = outbox.space().plan_write(grows.1, grows.0, 10_000, 3 * PAGE).unwrap();
        outbox.memory_files().iter().for_each(|file| file.write_all_at(&[9; 3 * PAGE as usize], 5 * PAGE).unwrap());

        let outbox = keeper.start();
        let figures = outbox.space().figures();
        assert_eq!((figures.used, figures.bytes_written), (5 * PAGE + 3 * PAGE, 5 * PAGE + 10_000));
        assert_eq!(
            (keeper.blocks(sealed.0), keeper.blocks(grows.0)),
            (5 * PAGE, 3 * PAGE),
            "memory that is not counted"
        );
        assert_eq!(bytes(&outbox, grows, 0, 10_000), content[..10_000]);
        write(&outbox, grows, 10_000, b"more").unwrap();
        let reader = outbox.space().open(sealed.0, Access::Read).unwrap();
        assert_eq!(bytes(&outbox, (sealed.0, reader), 0, 5 * PAGE), content);
        assert!(outbox.space().open(sealed.0, Access::Write).is_err(), "it is not sealed any more");
        outbox.space().release(reader).unwrap();

        // Delivered and given back; and the process is killed before the kernel has the memory.
        let client = outbox.space().attach(sealed.0, Selection { start: 0, end: None }).unwrap();
        outbox.space().next(client, 4 * PAGE).unwrap();
        outbox.space().acknowledge(client, 3 * PAGE).unwrap();
        assert_eq!(outbox.space().plan_reclaim(2 * PAGE).len(), 1);
        let outbox = keeper.start();
        assert_eq!(keeper.blocks(sealed.0), 3 * PAGE);
        assert_eq!(outbox.space().figures().used, 3 * PAGE + 3 * PAGE);
        assert_eq!(outbox.space().attributes(sealed.0).unwrap().freed, 2 * PAGE);
        let reader = outbox.space().open(sealed.0, Access::Read).unwrap();
        assert_eq!(bytes(&outbox, (sealed.0, reader), 2 * PAGE, 3 * PAGE), content[2 * PAGE as usize..]);
        assert!(outbox.space().attach(sealed.0, Selection { start: PAGE, end: None }).is_err());

        // Removed; and the process is killed before the keeper was told.
        outbox.space().release(reader).unwrap();
        outbox.space().unlink(ROOT, b"sealed", Kind::File, now()).unwrap();
        let outbox = keeper.start();
        assert!(!keeper.memory.contains_key(&sealed.0), "its memory is kept for ever");
        assert_eq!(outbox.space().figures().used, 3 * PAGE);
        outbox.space().release(grows.1).unwrap();
        assert!(outbox.space().attributes(grows.0).unwrap().is_complete);
    }

    #[test]
    fn a_write_is_done_again_behind_what_was_sent() {
        let mut keeper = Keeper::new();
        let outbox = keeper.start();
        let file = create(&outbox, "grows");
        write(&outbox, file, 0, &[1; 6000]).unwrap();
        let client = outbox.space().attach(file.0, Selection { start: 0, end: None }).unwrap();
        outbox.space().next(client, 4000).unwrap();
        let outbox = keeper.start();
        assert!(write(&outbox, file, 0, &[1; 6000]).is_err());
        assert_eq!(again(&outbox, file, 0, &[1; 6000], Again::Yes { done: 0 }).unwrap(), 6000);
        assert_eq!(bytes(&outbox, file, 0, 6000), [1; 6000]);
    }

    /// The process was killed before it had planned the write, or in the midst of it.
    #[test]
    fn a_write_is_not_done_if_others_were_sent() {
        let mut keeper = Keeper::new();
        let outbox = keeper.start();
        let file = create(&outbox, "grows");
        write(&outbox, file, 0, &[1; 6000]).unwrap();
        let client = outbox.space().attach(file.0, Selection { start: 0, end: None }).unwrap();
        outbox.space().next(client, 5000).unwrap();
        outbox.deliver(|space| space.acknowledge(client, 5000).unwrap());
        outbox.space().detach(client);
        let outbox = keeper.start();
        let refused = |at, byte| again(&outbox, file, at, &[byte; 1000], Again::Yes { done: 0 }).unwrap_err();
        assert_eq!(refused(4000, 2).raw_os_error(), Some(libc::EPERM));
        assert_eq!(again(&outbox, file, 4000, &[1; 1000], Again::Yes { done: 0 }).unwrap(), 1000);
        outbox.reclaim(PAGE);
        assert_eq!(outbox.space().attributes(file.0).unwrap().freed, PAGE);
        assert_eq!(refused(0, 1).raw_os_error(), Some(libc::EIO), "nobody knows any more");
        assert_eq!(again(&outbox, file, 0, &[1; 6000], Again::Yes { done: 5000 }).unwrap(), 6000);
    }

    /// Half of a write may be in the file.
    #[test]
    fn readers_get_nothing_before_what_was_left_is_done() {
        let mut keeper = Keeper::new();
        let outbox = keeper.start();
        let (growing, sealed) = (create(&outbox, "grows"), create(&outbox, "sealed"));
        write(&outbox, growing, 0, &[1; 6000]).unwrap();
        write(&outbox, sealed, 0, &[1; 6000]).unwrap();
        outbox.space().release(sealed.1).unwrap();
        let outbox = keeper.start();
        outbox.space().hold();
        let next = |ino| {
            let client = outbox.space().attach(ino, Selection { start: 0, end: None }).unwrap();
            outbox.space().next(client, 4000).unwrap()
        };
        assert_eq!(next(growing.0), Next::Wait);
        assert_eq!(next(sealed.0), Next::Bytes { offset: 0, length: 4000 });
        // The only writer is opened anew, and the file is not at its end meanwhile.
        outbox.forget_request(0, true);
        assert_eq!(next(growing.0), Next::Wait);
        outbox.let_go();
        outbox.space().open(growing.0, Access::Write).unwrap();
        assert_eq!(next(growing.0), Next::Bytes { offset: 0, length: 4000 });
    }

    #[test]
    fn a_file_whose_memory_is_gone_is_gone() {
        let mut keeper = Keeper::new();
        let outbox = keeper.start();
        let file = create(&outbox, "lost");
        write(&outbox, file, 0, b"bytes").unwrap();
        keeper.hear();
        keeper.memory.clear();
        let outbox = keeper.start();
        assert!(outbox.space().lookup(ROOT, b"lost").is_err());
        outbox.space().release(file.1).unwrap();
        assert_eq!(outbox.space().figures().nodes, 1);
        outbox.reclaim(0);
        assert_eq!(outbox.space().figures().used, 0);
    }

    #[test]
    fn journals_of_nobody_are_refused() {
        let mut keeper = Keeper::new();
        drop(keeper.start());
        keeper.journal.iter().for_each(|file| file.write_all_at(&[0xff; 100], 0).unwrap());
        let (line, _) = Line::pair().unwrap();
        let left = Left { journal: keeper.journal, memory: HashMap::new(), line };
        assert!(Outbox::take_over(left, 1 << 20, Duration::ZERO).is_err());
    }
}
