//! What a move would do, before it does anything: what is sent, how long it takes, how long the VM stands still, and what it
//! needs.
//!
//! The plan takes a guest to write at one speed into a set of pages of one size. Its working set and its page-outs tell both. The
//! rounds are counted as [`crate::rounds`] makes them, without chance. All numbers are rounded to the worse side.

use std::fmt;
use std::time::Duration;

use pagoda_core::units::{Bytes, PageCount};

use crate::rounds::{Mode, OnTimeout, Settings};
use crate::units::Rate;
use crate::wire::offer::Room;

/// Rounds after which the rest of a move is as the last of them.
const ROUNDS_MAX: u32 = 30;
/// What a map of missing pages takes for a chunk, on the wire.
const MAP_BYTES_PER_CHUNK: u64 = 36;

/// What is known of the VM and of the way.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub pages: PageCount,
    /// Pages that hold zeros, that the guest gave back, and whose content the destination has. No page is in two of these.
    pub zero: PageCount,
    pub freed: PageCount,
    pub there: PageCount,
    /// How fast the guest writes to pages, each counted once in a round, and to how many different ones.
    pub written: Rate,
    pub write_set: PageCount,
    /// The slowest of link, source disk and destination disk.
    pub rate: Rate,
    /// What is left of content after compression, in thousandths. 1000 without it.
    pub compressed_per_mille: u32,
    /// Bytes of the device state, which is sent while the VM stands still.
    pub state: Bytes,
}

/// What the VM is given at its destination, and what that has.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// DRAM that the VM may use there.
    pub dram: Bytes,
    /// Memory of a pool for it.
    pub pool: Bytes,
    pub free: Room,
}

/// Whether the VM is stopped for no longer than promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    Kept,
    /// Only if writers are slowed.
    IfSlowed,
    /// The guest writes too fast. It would be sent afterwards, if the settings allow that.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DryRun {
    pub needs: Room,
    /// What of that is not free. All zero if the VM fits.
    pub lacks: Room,
    /// Content of pages, those counted again that are sent again, after compression.
    pub sends: Bytes,
    /// Pages whose content is not sent.
    pub spared: Bytes,
    pub rate: Rate,
    /// None: it never ends.
    pub time: Option<Duration>,
    pub pause: Option<Duration>,
    pub promise: Promise,
}

impl DryRun {
    pub fn fits(&self) -> bool {
        self.lacks == Room::default()
    }
}

/// What would come of a move.
pub fn plan_move(facts: &Facts, settings: &Settings, offer: &Offer) -> DryRun {
    let needs = needed(facts, offer);
    let lacks = Room {
        dram: needs.dram.saturating_sub(offer.free.dram),
        swap: needs.swap.saturating_sub(offer.free.swap),
        pool: needs.pool.saturating_sub(offer.free.pool),
    };
    let spared = facts.zero + facts.freed + facts.there;
    let content = facts.pages.saturating_sub(spared);
    let rate = settings.bandwidth_max.map_or(facts.rate, |cap| cap.min(facts.rate));
    let course = course_of(facts, settings, content, rate);
    DryRun {
        needs,
        lacks,
        sends: course.sends,
        spared: facts.pages.saturating_sub(content).bytes(),
        rate,
        time: course.time.and_then(|time| Some(time.saturating_add(course.pause?))),
        pause: course.pause,
        promise: course.promise,
    }
}

/// The VM's DRAM, its memory of a pool, and swap for all the rest: it may come to use each of its pages.
fn needed(facts: &Facts, offer: &Offer) -> Room {
    let all = facts.pages.bytes();
    let dram = offer.dram.min(all);
    let pool = offer.pool.min(all.saturating_sub(dram));
    Room { dram, pool, swap: all.saturating_sub(dram).saturating_sub(pool) }
}

struct Course {
    sends: Bytes,
    time: Option<Duration>,
    pause: Option<Duration>,
    promise: Promise,
}

fn course_of(facts: &Facts, settings: &Settings, content: PageCount, rate: Rate) -> Course {
    let packed = |pages: PageCount| {
        let bytes = u128::from(pages.bytes().0) * u128::from(facts.compressed_per_mille);
        Bytes(u64::try_from(bytes.div_ceil(1000)).unwrap_or(u64::MAX))
    };
    let pause_of = |pages: PageCount| {
        let bytes = Bytes(packed(pages).0.saturating_add(facts.state.0));
        Some(settings.stop_cost.saturating_add(rate.time_ceil(bytes)?))
    };
    let map = Bytes(u64::from(content.chunks_ceil().0) * MAP_BYTES_PER_CHUNK);
    let without_pages = Bytes(map.0.saturating_add(facts.state.0));
    let pause_without = rate.time_ceil(without_pages).map(|time| settings.stop_cost.saturating_add(time));
    if settings.mode == Mode::Postcopy {
        let (sends, time) = (packed(content), rate.time_ceil(packed(content)));
        return Course {
            sends,
            time,
            pause: pause_without,
            promise: promise(pause_without, settings, Promise::Broken),
        };
    }
    let (mut left, mut sends, mut time) = (content, Bytes::ZERO, Some(Duration::ZERO));
    let mut round = 0;
    loop {
        let span = rate.time_ceil(packed(left));
        sends = Bytes(sends.0.saturating_add(packed(left).0));
        time = time.zip(span).map(|(time, span)| time.saturating_add(span));
        let written = span.map_or(facts.write_set, |span| facts.written.bytes_floor(span).pages_ceil());
        let next = written.min(facts.write_set).min(facts.pages);
        let pause = pause_of(next);
        round += 1;
        let is_short = pause.is_some_and(|pause| pause <= settings.downtime_max);
        if is_short {
            sends = Bytes(sends.0.saturating_add(packed(next).0));
            return Course { sends, time, pause, promise: Promise::Kept };
        }
        // It does not become less, or hardly.
        if next.0 >= left.0 - left.0 / 8 || round == ROUNDS_MAX {
            return stalled(
                settings,
                Course { sends, time, pause, promise: Promise::Broken },
                packed(next),
                pause_without,
            );
        }
        left = next;
    }
}

/// The guest writes as fast as the link sends: writers are slowed, or the rest is sent afterwards.
fn stalled(settings: &Settings, course: Course, rest: Bytes, pause_without: Option<Duration>) -> Course {
    let goes_afterwards = settings.mode == Mode::Hybrid || settings.on_timeout == OnTimeout::Postcopy;
    let is_slowed = settings.time_max.is_some() && settings.on_timeout == OnTimeout::SlowGuest;
    let sends = Bytes(course.sends.0.saturating_add(rest.0));
    if goes_afterwards {
        let promise = promise(pause_without, settings, Promise::Broken);
        return Course { sends, pause: pause_without, promise, ..course };
    }
    let promise = if is_slowed { Promise::IfSlowed } else { Promise::Broken };
    Course { sends, promise, ..course }
}

fn promise(pause: Option<Duration>, settings: &Settings, otherwise: Promise) -> Promise {
    if pause.is_some_and(|pause| pause <= settings.downtime_max) { Promise::Kept } else { otherwise }
}

/// `fits: 512 MiB DRAM + 3.5 GiB swap; sends 2.1 GiB (1.4 GiB zero, freed or there); 19 s at 119 MiB/s, pause 25 ms`.
impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let room = |f: &mut fmt::Formatter<'_>, room: &Room| {
            let parts = [(room.dram, "DRAM"), (room.swap, "swap"), (room.pool, "pool")];
            let mut parts = parts.into_iter().filter(|(size, _)| *size > Bytes::ZERO);
            if let Some((size, name)) = parts.next() {
                write!(f, "{size} {name}")?;
            }
            parts.try_for_each(|(size, name)| write!(f, " + {size} {name}"))
        };
        f.write_str(if self.fits() { "fits: " } else { "does not fit: " })?;
        room(f, &self.needs)?;
        if !self.fits() {
            f.write_str(", of which are not free: ")?;
            room(f, &self.lacks)?;
        }
        write!(f, "; sends {} ({} zero, freed or there); ", self.sends, self.spared)?;
        match (self.time, self.pause) {
            (Some(time), Some(pause)) => {
                // Whole seconds and milliseconds, rounded up.
                let (seconds, ms) = (time.as_millis().div_ceil(1000), pause.as_micros().div_ceil(1000));
                write!(f, "{seconds} s at {}/s, pause {ms} ms", Bytes(self.rate.0))?;
            }
            _ => f.write_str("never ends")?,
        }
        f.write_str(match self.promise {
            Promise::Kept => "",
            Promise::IfSlowed => ", less if writers are slowed",
            Promise::Broken => ", longer than promised",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const GIB: PageCount = PageCount(1 << 18);

    fn facts() -> Facts {
        Facts {
            pages: PageCount(4 * GIB.0),
            zero: GIB,
            freed: PageCount(GIB.0 / 2),
            there: PageCount(GIB.0 / 2),
            written: Rate(0),
            write_set: PageCount::ZERO,
            rate: Rate(125_000_000),
            compressed_per_mille: 1000,
            state: Bytes::from_kib(384),
        }
    }

    fn settings() -> Settings {
        Settings {
            mode: Mode::Precopy,
            downtime_max: 30 * MS,
            stop_cost: 15 * MS,
            bandwidth_max: None,
            time_max: None,
            on_timeout: OnTimeout::Abort,
        }
    }

    fn offer() -> Offer {
        let free = Room { dram: Bytes::from_gib(1), swap: Bytes::from_gib(10), pool: Bytes::ZERO };
        Offer { dram: Bytes::from_mib(512), pool: Bytes::ZERO, free }
    }

    #[test]
    fn an_idle_vm_is_sent_once_without_what_is_not_sent() {
        let plan = plan_move(&facts(), &settings(), &offer());
        assert_eq!((plan.sends, plan.spared, plan.promise), (Bytes::from_gib(2), Bytes::from_gib(2), Promise::Kept));
        let expected = "fits: 512 MiB DRAM + 3.5 GiB swap; sends 2 GiB (2 GiB zero, freed or there); 18 s at 119.2 MiB/s, pause 19 ms";
        assert_eq!(plan.to_string(), expected);
        let halved = plan_move(&Facts { compressed_per_mille: 500, ..facts() }, &settings(), &offer());
        assert_eq!(halved.sends, Bytes::from_gib(1));
        let capped = Settings { bandwidth_max: Some(Rate(25_000_000)), ..settings() };
        assert_eq!(plan_move(&facts(), &capped, &offer()).time.map(|time| time.as_secs()), Some(85));
    }

    #[test]
    fn what_is_missing_at_the_destination_is_named() {
        let offer = Offer { dram: Bytes::from_gib(3), pool: Bytes::from_mib(512), ..offer() };
        let plan = plan_move(&facts(), &settings(), &offer);
        assert!(!plan.fits());
        let text = plan.to_string();
        assert!(text.starts_with("does not fit: 3 GiB DRAM + 512 MiB swap + 512 MiB pool, of which are not free: 2 GiB DRAM + 512 MiB pool;"), "{text}");
        // More than it has is not needed.
        let large = Offer { dram: Bytes::from_gib(9), ..offer };
        assert_eq!(plan_move(&facts(), &settings(), &large).needs.dram, Bytes::from_gib(4));
    }

    #[test]
    fn a_guest_that_writes_slower_than_the_link_sends_is_caught_up_with() {
        let busy = Facts { written: Rate(60_000_000), write_set: GIB, ..facts() };
        let plan = plan_move(&busy, &settings(), &offer());
        assert_eq!(plan.promise, Promise::Kept);
        assert!(plan.pause.is_some_and(|pause| pause <= 30 * MS) && plan.sends > Bytes::from_gib(3), "{plan:?}");
        // A small set of pages, however fast, is little to send.
        let small = Facts { written: Rate(u64::MAX), write_set: PageCount(100), ..facts() };
        assert_eq!(plan_move(&small, &settings(), &offer()).promise, Promise::Kept);
    }

    #[test]
    fn a_guest_that_writes_faster_breaks_the_promise_or_is_helped() {
        let fast = Facts { written: Rate(200_000_000), write_set: GIB, ..facts() };
        let check = |settings: Settings, expected| {
            let plan = plan_move(&fast, &settings, &offer());
            assert_eq!(plan.promise, expected, "{plan}");
            plan
        };
        let plan = check(settings(), Promise::Broken);
        assert!(plan.to_string().ends_with("longer than promised"), "{plan}");
        let slowed =
            Settings { time_max: Some(Duration::from_secs(600)), on_timeout: OnTimeout::SlowGuest, ..settings() };
        check(slowed, Promise::IfSlowed);
        for helped in [
            Settings { mode: Mode::Hybrid, ..settings() },
            Settings { mode: Mode::Postcopy, ..settings() },
            Settings { on_timeout: OnTimeout::Postcopy, ..settings() },
        ] {
            let plan = check(helped, Promise::Kept);
            assert!(plan.pause.is_some_and(|pause| pause < 25 * MS), "{plan}");
        }
        let dead = plan_move(&Facts { rate: Rate(0), ..fast }, &settings(), &offer());
        assert!(dead.to_string().contains("never ends"), "{dead}");
    }
}
