//! Random operations on a [`Space`], held against a reference that knows every byte and page by itself.

mod disk;
mod reference;

use std::time::Duration;

use disk::Disk;
use pagoda_outbox::{
    Access, Attributes, HandleId, Kind, Mode, NewNode, ROOT, ReaderId, Reclaim, Refusal, Replace, Selection, Space,
    Time, Write, XattrWrite,
};
use proptest::prelude::*;
use reference::{PAGE, Reference};

/// Few names, so that they meet.
const NAMES: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];

/// Where in a file something is done.
#[derive(Debug, Clone, Copy)]
enum Place {
    At(u64),
    /// One byte before the send cursor, there, or one behind it.
    NearCursor(u64),
}

#[derive(Debug, Clone)]
enum Op {
    Create {
        name: usize,
        on_close: bool,
        deliveries: u8,
        /// 0: as the space has it. Above 9: never.
        ttl: u32,
    },
    /// Sets an attribute to the value that it has.
    Repeat {
        name: usize,
    },
    Open {
        name: usize,
    },
    Release {
        pick: usize,
    },
    Write {
        pick: usize,
        at: Place,
        length: u64,
    },
    CompleteWrite {
        pick: usize,
        share: u64,
    },
    Resize {
        name: usize,
        size: Place,
    },
    Unlink {
        name: usize,
    },
    Rename {
        from: usize,
        to: usize,
    },
    Attach {
        name: usize,
        start: u64,
        length: Option<u64>,
    },
    Next {
        pick: usize,
        max: u64,
    },
    Acknowledge {
        pick: usize,
        share: u64,
    },
    Detach {
        pick: usize,
    },
    Reclaim {
        want: u64,
    },
    CompleteReclaim {
        pick: usize,
    },
    /// So many seconds pass, and files that are too old go.
    Expire {
        seconds: u64,
    },
    DefaultTtl {
        seconds: Option<u64>,
    },
    Budget {
        pages: u64,
    },
    Abandon,
    /// The process is killed, and another one goes on. How many bytes of its last batch were written before.
    Kill {
        written: usize,
    },
}

fn ops() -> impl Strategy<Value = Op> {
    let name = 0..NAMES.len();
    let place = prop_oneof![
        (0..10 * PAGE).prop_map(Place::At),
        (0_u64..10).prop_map(|page| Place::At(page * PAGE)),
        (0_u64..3).prop_map(Place::NearCursor),
    ];
    let pick = any::<usize>();
    let at = prop_oneof![0..10 * PAGE, (0_u64..10).prop_map(|page| page * PAGE)];
    prop_oneof![
        3 => (name.clone(), any::<bool>(), 1_u8..3, 0_u32..11).prop_map(|(name, on_close, deliveries, ttl)| {
            Op::Create { name, on_close, deliveries, ttl }
        }),
        3 => (0_u64..6).prop_map(|seconds| Op::Expire { seconds }),
        1 => prop::option::of(0_u64..6).prop_map(|seconds| Op::DefaultTtl { seconds }),
        2 => name.clone().prop_map(|name| Op::Repeat { name }),
        3 => name.clone().prop_map(|name| Op::Open { name }),
        2 => pick.prop_map(|pick| Op::Release { pick }),
        12 => (pick, place.clone(), 1..5 * PAGE).prop_map(|(pick, at, length)| Op::Write { pick, at, length }),
        10 => (pick, 0_u64..9).prop_map(|(pick, share)| Op::CompleteWrite { pick, share }),
        2 => (name.clone(), place).prop_map(|(name, size)| Op::Resize { name, size }),
        1 => name.clone().prop_map(|name| Op::Unlink { name }),
        1 => (name.clone(), name.clone()).prop_map(|(from, to)| Op::Rename { from, to }),
        5 => (name, at, prop::option::of(1..8 * PAGE)).prop_map(|(name, start, length)| {
            Op::Attach { name, start: start.saturating_sub(6 * PAGE), length }
        }),
        10 => (pick, 1..6 * PAGE).prop_map(|(pick, max)| Op::Next { pick, max }),
        10 => (pick, 1_u64..9).prop_map(|(pick, share)| Op::Acknowledge { pick, share }),
        2 => pick.prop_map(|pick| Op::Detach { pick }),
        5 => (0..4 * PAGE).prop_map(|want| Op::Reclaim { want }),
        6 => pick.prop_map(|pick| Op::CompleteReclaim { pick }),
        1 => (0_u64..24).prop_map(|pages| Op::Budget { pages }),
        1 => (0..40).prop_map(|_| Op::Abandon),
        2 => any::<usize>().prop_map(|written| Op::Kill { written }),
    ]
}

/// What a server would hold.
struct Run {
    space: Space,
    reference: Reference,
    now: Time,
    handles: Vec<(HandleId, pagoda_outbox::Ino)>,
    writes: Vec<Write>,
    reclaims: Vec<Reclaim>,
    readers: Vec<ReaderId>,
    fill: u8,
    /// So many seconds have passed since the start.
    seconds: u64,
    disk: Disk,
}

fn pick<T>(list: &[T], pick: usize) -> Option<usize> {
    (!list.is_empty()).then(|| pick % list.len())
}

impl Run {
    fn new(pages: u64) -> Run {
        Run {
            space: Space::new(pages * PAGE),
            reference: Reference::default(),
            now: Time { seconds: 1, nanos: 0 },
            handles: Vec::new(),
            writes: Vec::new(),
            reclaims: Vec::new(),
            readers: Vec::new(),
            fill: 0,
            seconds: 0,
            disk: Disk::default(),
        }
    }

    fn find(&self, name: usize) -> Option<Attributes> {
        self.space.lookup(ROOT, NAMES[name]).ok()
    }

    fn apply(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Create { name, on_close, deliveries, ttl } => self.create(name, on_close, deliveries, ttl)?,
            Op::Expire { seconds } => self.expire(seconds)?,
            Op::DefaultTtl { seconds } => {
                self.space.set_default_ttl(seconds.map(Duration::from_secs));
                self.reference.default_ttl = seconds;
            }
            Op::Repeat { name } => {
                let Some(file) = self.find(name) else { return Ok(()) };
                let before = self.space.figures();
                let value = self.space.xattr(file.ino, b"user.pagoda.readers").unwrap().to_vec();
                self.space.set_xattr(file.ino, b"user.pagoda.readers", &value, XattrWrite::Any).unwrap();
                prop_assert_eq!(self.space.figures(), before);
            }
            Op::Open { name } => {
                let Some(file) = self.find(name) else { return Ok(()) };
                let expected = self.reference.check_open(file.ino);
                let opened = self.space.open(file.ino, Access::Write);
                prop_assert_eq!(opened.err(), expected.err());
                if let Ok(handle) = opened {
                    self.reference.open(file.ino);
                    self.handles.push((handle, file.ino));
                }
            }
            Op::Release { pick: at } => {
                let Some(at) = pick(&self.handles, at) else { return Ok(()) };
                let (handle, ino) = self.handles.swap_remove(at);
                self.space.release(handle).unwrap();
                self.reference.release(ino);
            }
            Op::Write { pick: at, at: place, length } => {
                let Some(at) = pick(&self.handles, at) else { return Ok(()) };
                let (handle, ino) = self.handles[at];
                let offset = self.reference.offset(ino, place);
                let free = self.space.figures().budget.saturating_sub(self.space.figures().used);
                let expected = self.reference.room(ino, offset, length, free);
                let planned = self.space.plan_write(handle, ino, offset, length);
                prop_assert_eq!(
                    planned.as_ref().map(|write| write.range.end - write.range.start),
                    expected.as_ref().copied()
                );
                if let Ok(write) = planned {
                    self.reference.begin_write(ino, write.range.clone());
                    self.writes.push(write);
                }
            }
            Op::CompleteWrite { pick: at, share } => {
                let Some(at) = pick(&self.writes, at) else { return Ok(()) };
                let write = self.writes.swap_remove(at);
                let written = (write.range.end - write.range.start) * share / 8;
                let written = written.min(write.range.end - write.range.start);
                self.fill = self.fill.wrapping_add(1);
                self.reference.write(write.ino, write.range.clone(), written, self.fill);
                self.space.complete_write(&write, written, self.now);
            }
            Op::Resize { name, size } => {
                let Some(file) = self.find(name) else { return Ok(()) };
                let size = self.reference.offset(file.ino, size);
                let expected = self.reference.check_resize(file.ino, size);
                let planned = self.space.plan_resize(file.ino, size);
                prop_assert_eq!(planned, expected);
                if planned.is_ok() {
                    self.reference.resize(file.ino, size);
                    self.space.complete_resize(file.ino, true, self.now);
                }
            }
            Op::Unlink { name } => {
                let file = self.find(name);
                let result = self.space.unlink(ROOT, NAMES[name], Kind::File, self.now);
                prop_assert_eq!(result.is_ok(), file.is_some());
            }
            Op::Rename { from, to } => {
                let there = self.find(from).is_some();
                let renamed = self.space.rename((ROOT, NAMES[from]), (ROOT, NAMES[to]), Replace::Allowed, self.now);
                prop_assert_eq!(renamed.is_ok(), there);
            }
            Op::Kill { written } => self.kill(written)?,
            Op::Budget { pages } => self.space.set_budget(pages * PAGE),
            Op::Abandon => {
                self.space.abandon(self.now);
                self.reference.abandon();
                self.handles.clear();
            }
            other => self.transmit(other)?,
        }
        Ok(())
    }

    fn expire(&mut self, seconds: u64) -> Result<(), TestCaseError> {
        self.seconds += seconds;
        let names: Vec<Option<Attributes>> = (0..NAMES.len()).map(|name| self.find(name)).collect();
        let before = self.space.figures();
        let any = self.space.expire(Duration::from_secs(self.seconds), self.now);
        let mut gone = 0;
        for (name, file) in names.into_iter().enumerate() {
            let Some(file) = file else { continue };
            let is_gone = self.reference.is_too_old(file.ino, self.seconds);
            prop_assert_eq!(self.find(name).is_none(), is_gone, "{} at {} s", name, self.seconds);
            gone += u64::from(is_gone);
        }
        prop_assert_eq!((any, self.space.figures().expired), (gone > 0, before.expired + gone));
        Ok(())
    }

    fn create(&mut self, name: usize, on_close: bool, deliveries: u8, ttl: u32) -> Result<(), TestCaseError> {
        let exists = self.find(name).is_some();
        let new = NewNode { mode: 0o644, now: self.now, ..NewNode::default() };
        let created = self.space.create(ROOT, NAMES[name], new);
        prop_assert_eq!(created.is_err(), exists);
        let Ok(file) = created else { return Ok(()) };
        let (mode, value) = if on_close { (Mode::OnClose, "on-close") } else { (Mode::Stream, "stream") };
        self.space.set_xattr(file.ino, b"user.pagoda.mode", value.as_bytes(), XattrWrite::Create).unwrap();
        let value = deliveries.to_string();
        self.space.set_xattr(file.ino, b"user.pagoda.readers", value.as_bytes(), XattrWrite::Any).unwrap();
        let value = if ttl > 9 { "never".into() } else { ttl.to_string() };
        if ttl > 0 {
            self.space.set_xattr(file.ino, b"user.pagoda.ttl", value.as_bytes(), XattrWrite::Any).unwrap();
        }
        self.reference.create(file.ino, mode, deliveries, ttl);
        Ok(())
    }

    /// Another process goes on with what the journals say.
    fn kill(&mut self, written: usize) -> Result<(), TestCaseError> {
        self.disk.tear(written);
        let mut restored = self.disk.restore().space;
        // It is all that was said: it says the same of itself.
        prop_assert_eq!(self.disk.restore().space.snapshot(0), restored.snapshot(0));
        let files = restored.file_memory();
        self.reference.kill(&files, |ino| restored.attributes(ino).is_ok());
        for reclaim in restored.plan_reclaim(0) {
            restored.complete_reclaim(reclaim);
        }
        (self.writes, self.reclaims, self.readers) = Default::default();
        self.handles.retain(|(_, ino)| restored.attributes(*ino).is_ok());
        self.disk.begin(&mut restored);
        // By whoever starts the process, as at the first time.
        restored.set_default_ttl(self.reference.default_ttl.map(Duration::from_secs));
        self.space = restored;
        Ok(())
    }

    fn transmit(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Attach { name, start, length } => {
                let Some(file) = self.find(name) else { return Ok(()) };
                let selection = Selection { start, end: length.map(|length| start + length) };
                let attached = self.space.attach(file.ino, selection);
                prop_assert_eq!(attached.is_ok(), self.reference.may_attach(file.ino, start), "{:?}", attached);
                if let Ok(reader) = attached {
                    self.reference.attach(reader, file.ino, selection);
                    self.readers.push(reader);
                }
            }
            Op::Next { pick: at, max } => {
                let Some(at) = pick(&self.readers, at) else { return Ok(()) };
                let next = self.space.next(self.readers[at], max).unwrap();
                self.reference.next(self.readers[at], max, next)?;
            }
            Op::Acknowledge { pick: at, share } => {
                let Some(at) = pick(&self.readers, at) else { return Ok(()) };
                let position = self.reference.share_of(self.readers[at], share);
                self.space.acknowledge(self.readers[at], position).unwrap();
                self.reference.acknowledge(self.readers[at], position);
            }
            Op::Detach { pick: at } => {
                let Some(at) = pick(&self.readers, at) else { return Ok(()) };
                let reader = self.readers.swap_remove(at);
                self.space.detach(reader);
                self.reference.detach(reader);
            }
            Op::Reclaim { want } => {
                for reclaim in self.space.plan_reclaim(want) {
                    self.reference.plan_reclaim(&reclaim)?;
                    self.reclaims.push(reclaim);
                }
            }
            Op::CompleteReclaim { pick: at } => {
                let Some(at) = pick(&self.reclaims, at) else { return Ok(()) };
                let reclaim = self.reclaims.swap_remove(at);
                self.reference.reclaim(&reclaim);
                self.space.complete_reclaim(reclaim);
            }
            other => unreachable!("{other:?}"),
        }
        Ok(())
    }

    fn check(&self, used_before: u64) -> Result<(), TestCaseError> {
        let figures = self.space.figures();
        prop_assert!(self.reference.real_bytes() <= figures.used, "memory that is not charged");
        prop_assert!(figures.used <= figures.budget.max(used_before), "charged above the budget");
        prop_assert!(figures.disposable <= figures.used);
        for name in 0..NAMES.len() {
            if let Some(file) = self.find(name) {
                self.reference.check_file(&file)?;
            }
        }
        Ok(())
    }

    /// Everyone lets go; then all memory can be had back.
    fn end(mut self) -> Result<(), TestCaseError> {
        for write in std::mem::take(&mut self.writes) {
            self.space.complete_write(&write, 0, self.now);
        }
        self.handles.drain(..).for_each(|(handle, _)| self.space.release(handle).unwrap());
        self.readers.drain(..).for_each(|reader| self.space.detach(reader));
        for name in NAMES {
            match self.space.unlink(ROOT, name, Kind::File, self.now) {
                Ok(()) | Err(Refusal::NotFound) => {}
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
        let rest = self.space.plan_reclaim(u64::MAX);
        self.reclaims.drain(..).chain(rest).for_each(|reclaim| self.space.complete_reclaim(reclaim));
        let figures = self.space.figures();
        prop_assert_eq!((figures.used, figures.nodes, figures.readers), (0, 1, 0));
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn like_the_reference(pages in 1_u64..24, ops in prop::collection::vec(ops(), 1..200)) {
        let mut run = Run::new(pages);
        run.disk.begin(&mut run.space);
        for op in ops {
            let before = run.space.figures().used;
            run.apply(op)?;
            run.disk.commit(&mut run.space);
            run.check(before)?;
        }
        run.end()?;
    }
}
