//! Feeds the miss-ratio curve ([`crate::policy::mrc`]) of an armed VM.
//!
//! Some hundred pages chosen by hash are watched ([`super::watch`]), wherever they are: a use counts for all pages its page
//! stands for, at its distance among the watched ones. At first nobody knows when a page was used before; it is taken to be
//! when the curve began, so a young curve is too low, and fades quickly.
//!
//! After a use a page is watched again when its turn comes: with a bounded number of uses a second, in one zap each
//! [`TURN_MS`]. Uses of a page in between go unseen, and if pages waited long for their turn, their order would say nothing.
//! So when the queue grows, pages with the largest hash are left out for good; what was counted stays, for each use counts by the
//! rate of its time (SHARDS section 4.2).
//!
//! What is published is what this pager makes of those distances: chunks leave whole, and some room is kept free below the
//! cap ([`crate::policy::mrc::Curve::of_chunks`]).
//!
//! **Limits.** What moves within a turn is one distance, "small". An unarmed VM has no faults: until it is armed its curve
//! comes from ages ([`crate::policy::mrc::footprint`]).

use crate::policy::mrc::Curve;
use crate::units::PageIdx;

use super::action::Now;
use super::headroom::headroom_at;
use super::machine::Machine;
use super::state::curve::{CurveWatch, DECAY_MS, TURN_MS, WAIT_MS, YOUNG_MS};
use super::state::watch::Purpose;

impl Machine {
    /// Switches the miss-ratio curve on, anew, or off.
    pub fn watch_curve(&mut self, on: bool) {
        self.watch.drop_all(Purpose::Curve);
        self.curve = on.then(|| Box::new(CurveWatch::new(self.config.chunks.pages())));
    }

    /// What each cap would have meant so far, in pages read from swap; `None` while it is off, or nothing was seen.
    pub fn curve(&self) -> Option<Curve> {
        let watch = self.curve.as_ref()?;
        let curve = watch.mrc.curve();
        let wide = watch.read[1] / (watch.read[0] + watch.read[1]).max(1.0);
        (curve.accesses() > 0.0).then(|| self.by_caps(&curve, wide).over(watch.observed_s))
    }

    /// The same while the VM is not armed, from its curve under LRU.
    pub fn curve_of(&self, lru: &Curve) -> Curve {
        self.by_caps(lru, 0.0)
    }

    /// What this pager makes of a curve under LRU, with the wide headroom kept for so much of the time.
    fn by_caps(&self, lru: &Curve, wide: f64) -> Curve {
        let memory = self.config.chunks.pages();
        lru.of_chunks(|cap| match cap >= memory {
            true => 0.0,
            false => headroom_at(cap.0, true) as f64 * wide + headroom_at(cap.0, false) as f64 * (1.0 - wide),
        })
    }

    /// A watched page of the curve was used.
    pub(super) fn note_curve_use(&mut self, page: PageIdx) {
        let c = self.chunk(page.chunk());
        let has_content = (c.ram | c.swap | c.shared).contains(page.index_in_chunk());
        let Some(curve) = &mut self.curve else { return };
        if has_content {
            curve.mrc.used_again(page);
        } else {
            // The guest had given it back, or never used it.
            curve.mrc.forget(page);
            curve.mrc.sampled(page);
        }
        if curve.mrc.watches(page) {
            curve.again.push_back(page);
        }
    }

    /// Pages came from swap.
    pub(super) fn note_read(&mut self, pages: u16) {
        let wide = usize::from(self.wide);
        if let Some(curve) = &mut self.curve {
            curve.read[wide] += f64::from(pages);
        }
    }

    pub(super) fn tick_curve(&mut self, now: Now) {
        let Some(curve) = &mut self.curve else { return };
        let waited = now.ms.saturating_sub(curve.turn_ms);
        if waited < TURN_MS {
            return;
        }
        curve.turn_ms = now.ms;
        if curve.decay_ms == 0 {
            (curve.began_ms, curve.decay_ms) = (now.ms, now.ms + YOUNG_MS);
        } else if now.ms >= curve.decay_ms {
            curve.mrc.decay();
            curve.read = curve.read.map(|pages| pages / 2.0);
            curve.observed_s /= 2.0;
            curve.decay_ms = now.ms + (now.ms - curve.began_ms).clamp(YOUNG_MS, DECAY_MS);
        }
        curve.observed_s += waited.min(WAIT_MS) as f64 / 1000.0;
        let mut pages = Vec::new();
        curve.turn(waited.min(WAIT_MS), &mut pages);
        curve.choose(&mut pages);
        self.watch.add(pages, Purpose::Curve);
    }
}
