//! What the driver does while the VM runs at its destination and lacks pages, or may.

use std::time::{Duration, Instant};

use anyhow::Result;
use pagoda_api::in_full;
use pagoda_core::units::Bytes;
use pagoda_move::map::PageMap;
use pagoda_move::rounds::Pace;
use pagoda_move::units::ConnectionNo;
use pagoda_move::wire::Control;
use pagoda_move::wire::control::MapPart;
use pagoda_pager::handle::Copied;

use super::super::copying::hot_first;
use super::super::progress::Progress;
use super::super::tail::Tail;
use super::{Driver, Stage};

/// After so long without a word the destination hears of this connection once more: its daemon may have begun to listen before it knew of
/// the attempt again.
const SILENCE: Duration = Duration::from_secs(1);

impl Driver {
    /// A copy goes into its stream.
    pub(super) fn copied(&mut self, no: ConnectionNo, copied: Copied, is_demanded: bool) {
        let now = self.now();
        let Some(line) = &self.line else { return };
        let is_of_tail = is_demanded || self.begun.owner.serves();
        match (&mut self.tail, &mut self.copying) {
            (Some(tail), _) if is_of_tail => tail.copied(no, copied, is_demanded, line, now),
            (_, Some(copying)) if !is_of_tail => {
                if let Err(error) = copying.copied(no, copied, line) {
                    self.give_up(in_full(error.as_ref()));
                }
            }
            _ => {}
        }
    }

    /// `missing`: what the VM lacks at its destination; None if the destination is to say so.
    pub(super) fn begin_tail(&mut self, missing: Option<PageMap>) {
        if self.tail.is_some() {
            return;
        }
        let Some(engine) = self.begun.guest.engine() else { return };
        let pages = self.shown().total.pages_floor();
        let offer = self.begun.offer.as_ref();
        let dram = offer.map_or(pages, |(offer, _)| offer.room.dram.pages_floor());
        let in_order = |_| pages.chunks_ceil().iter().collect();
        let hot_first = hot_first(&engine, pages, dram).unwrap_or_else(in_order);
        let pace = Pace::new(offer.and_then(|(_, settings)| settings.bandwidth_max), self.now());
        self.tail = Some(Tail::new(engine, pages, missing, hot_first, pace, &self.begun.own));
    }

    /// A part of what the destination says that it lacks.
    pub(super) fn take_map(&mut self, part: &MapPart) -> Result<()> {
        self.begin_tail(None);
        self.tail.as_mut().map_or(Ok(()), |tail| tail.missing(part))
    }

    pub(super) fn pump_tail(&mut self) {
        let (runs_there, now) = (self.begun.owner.serves(), self.now());
        if let (Some(tail), Some(line)) = (&mut self.tail, &self.line) {
            self.wait_until = tail.pump(line, runs_there, now);
        }
    }

    /// A destination whose daemon was started again may have been deaf when this connection began, or may have been ending what it had
    /// of this attempt. It hears once more what it has not answered.
    pub(super) fn remind(&mut self) {
        let Some(line) = self.line.as_ref().filter(|_| self.heard.elapsed() > SILENCE) else { return };
        if self.begun.owner.is_granted() {
            line.send(&Control::Resume { attempt: self.begun.owner.offered().attempt, connection: line.no });
        } else if matches!(self.begun.stage, Stage::Greeting | Stage::Reserving) {
            self.greet();
        } else {
            return;
        }
        self.heard = Instant::now();
    }

    /// `rounds`: what was sent before.
    pub(super) fn show_tail(&self, shown: &mut Progress, rounds: Bytes) {
        let Some(tail) = &self.tail else { return };
        (shown.left, shown.sent) = (tail.left().bytes(), Bytes(rounds.0 + tail.sent_bytes()));
        if !self.begun.guest.is_here() && self.begun.owner.serves() {
            let lost =
                "its QEMU here has ended, and with it pages that nobody else has: `pagoda moves resolve` there ends it";
            shown.waits = Some(lost.to_owned());
        } else if let Some(why) = tail.trouble() {
            shown.waits = Some(format!("pages of it cannot be read here: {why}"));
        }
    }
}
