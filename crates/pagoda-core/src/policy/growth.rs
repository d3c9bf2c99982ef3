//! How far each VM may grow before somebody looks again: no further than free memory backs.
//!
//! A plan says what a VM may have at today's price; a VM that is not held may have all its memory. Between two plans a
//! guest touches gigabytes. So where the VMs together could outgrow free memory, each gets a part of it as its limit, and
//! its engine says when it comes near ([`NearLimit`]), so that the next plan is made before it has to page.
//!
//! * Where all that the plan allows fits free memory, limits are the plan's: a VM that is not held stays unarmed.
//! * Else room is dealt out in three rounds, to everybody's min, target and cap, in each to those first who want least.
//! * Nobody's limit is below what it has, unless the plan itself takes memory from it.

use crate::fault::{headroom_max, page_out_leaves};
use crate::units::PageCount;

/// VMs are held until what they may have leaves this part of the pool free: an allowance that breathes must not arm and
/// disarm them.
const RELEASE_PART: u64 = 64;

/// What a VM asks for, so that it can grow until the next plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitRequest {
    /// Its pages in DRAM.
    pub resident: PageCount,
    /// What it is guaranteed.
    pub min: PageCount,
    /// The plan has this target for it.
    pub target: PageCount,
    /// Above this it is paged out.
    pub cap: PageCount,
}

/// The room says how much is free, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Of the pool, and of the host where that is less.
    pub free: PageCount,
    /// For guarantees, which the pool has lent to others perhaps: all that the host has.
    pub for_mins: PageCount,
    /// The pool has this size now.
    pub pool: PageCount,
}

/// Whether growth is held back now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Growth {
    is_held: bool,
}

impl Growth {
    /// Somebody's limit is below what the plan allows.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// The limit of each VM until the next plan, in the order of `requests`.
    pub fn plan_limits(&mut self, requests: &[LimitRequest], room: &Room) -> Vec<PageCount> {
        let asked: PageCount = requests.iter().map(|request| request.cap.saturating_sub(request.resident)).sum();
        let margin = if self.is_held { room.pool.0 / RELEASE_PART } else { 0 };
        self.is_held = asked > PageCount::ZERO && asked > room.free.saturating_sub(PageCount(margin));
        if !self.is_held {
            return requests.iter().map(|request| request.cap).collect();
        }
        let mut limits: Vec<PageCount> = requests.iter().map(|request| request.resident.min(request.cap)).collect();
        let to_mins = deal(&mut limits, requests, |request| request.min, room.for_mins);
        let left = deal(&mut limits, requests, |request| request.target, room.free.saturating_sub(to_mins));
        deal(&mut limits, requests, |request| request.cap, room.free.saturating_sub(to_mins + left));
        limits
    }
}

/// Raises limits toward `goal`, those that lack least first; what that took of `room`.
fn deal(
    limits: &mut [PageCount],
    requests: &[LimitRequest],
    goal: fn(&LimitRequest) -> PageCount,
    room: PageCount,
) -> PageCount {
    let lack = |limit: PageCount, request: &LimitRequest| goal(request).min(request.cap).saturating_sub(limit);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&index| lack(limits[index], &requests[index]));
    let mut left = room;
    for (dealt, &index) in order.iter().enumerate() {
        let part = PageCount(left.0 / (order.len() - dealt) as u64);
        let given = lack(limits[index], &requests[index]).min(part);
        limits[index] += given;
        left = left.saturating_sub(given);
    }
    room.saturating_sub(left)
}

/// When an engine says that its VM comes near its limit: once for each limit it is given, for a VM that lives at its
/// limit would say nothing else.
#[derive(Clone, Copy, Debug, Default)]
pub struct NearLimit {
    said_for: Option<PageCount>,
}

impl NearLimit {
    /// Whether to say so now: `resident` is within twice `headroom` of `limit`.
    pub fn look(&mut self, resident: PageCount, limit: PageCount, headroom: PageCount) -> bool {
        let is_near = resident + headroom + headroom >= limit;
        is_near && self.said_for.replace(limit) != Some(limit)
    }
}

/// What a VM counts as having: at its limit it has all of that, the headroom its engine keeps free below the limit
/// included. Else the limit of a VM that is held to what it has would fall by a headroom with each plan.
pub fn charged(resident: PageCount, limit: PageCount, headroom: PageCount) -> PageCount {
    if resident + headroom >= limit { resident.max(limit) } else { resident }
}

/// The lowest limit under which page-out leaves `min` in DRAM ([`page_out_leaves`]).
pub fn limit_for_min(min: PageCount) -> PageCount {
    if min == PageCount::ZERO {
        return min;
    }
    let mut limit = min;
    while page_out_leaves(limit) < min {
        limit += min - page_out_leaves(limit);
    }
    limit
}

/// What a VM counts as having in a plan if its limit may be that of [`limit_for_min`]: the room above its min is not its
/// own, so it is not above its target for it.
pub fn charged_for_min(resident: PageCount, limit: PageCount, min: PageCount) -> PageCount {
    let is_lifted = limit <= limit_for_min(min) && resident <= limit;
    if is_lifted { resident.min(min) } else { charged(resident, limit, headroom_max(limit)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(resident: u64, min: u64, target: u64, cap: u64) -> LimitRequest {
        let [resident, min, target, cap] = [resident, min, target, cap].map(PageCount);
        LimitRequest { resident, min, target, cap }
    }

    fn room(free: u64) -> Room {
        Room { free: PageCount(free), for_mins: PageCount(free), pool: PageCount(6400) }
    }

    fn limits(requests: &[LimitRequest], room: &Room) -> Vec<u64> {
        Growth::default().plan_limits(requests, room).iter().map(|limit| limit.0).collect()
    }

    #[test]
    fn room_is_dealt_to_mins_targets_and_caps() {
        let all = [request(100, 0, 200, 1000), request(500, 0, 500, 600)];
        assert_eq!(limits(&all, &room(1000)), [1000, 600], "all fits");
        assert_eq!(limits(&all, &room(999)), [999, 600], "who wants least has it all");
        assert_eq!(limits(&all, &room(100)), [200, 500], "below their targets first");
        assert_eq!(limits(&all, &room(0)), [100, 500]);
        let promised = [request(100, 0, 400, 400), request(0, 300, 300, 300)];
        assert_eq!(limits(&promised, &room(200)), [100, 200]);
        let host = Room { for_mins: PageCount(1000), ..room(0) };
        assert_eq!(limits(&promised, &host), [100, 300], "a min is not bounded by the pool");
    }

    #[test]
    fn who_is_paged_out_is_not_raised() {
        assert_eq!(limits(&[request(900, 0, 100, 500), request(0, 0, 0, 800)], &room(100)), [500, 100]);
        assert_eq!(limits(&[request(900, 0, 100, 500)], &room(0)), [500]);
    }

    #[test]
    fn held_until_there_is_room_to_spare() {
        let mut growth = Growth::default();
        let all = [request(0, 0, 0, 1000)];
        let held = [(1000, false), (999, true), (1000, true), (1099, true), (1100, false), (1000, false)];
        for (free, expected) in held {
            growth.plan_limits(&all, &room(free));
            assert_eq!(growth.is_held(), expected, "{free}");
        }
    }

    #[test]
    fn near_is_said_once_for_each_limit() {
        let mut near = NearLimit::default();
        let mut look = |resident, limit| near.look(PageCount(resident), PageCount(limit), PageCount(10));
        let said = [look(979, 1000), look(980, 1000), look(1000, 1000), look(1000, 1200), look(1190, 1200)];
        assert_eq!(said, [false, true, false, false, true]);
    }

    #[test]
    fn a_vm_at_its_limit_has_all_of_it() {
        let check = |resident, expected| {
            assert_eq!(charged(PageCount(resident), PageCount(1000), PageCount(30)), PageCount(expected));
        };
        check(969, 969);
        check(970, 1000);
        check(1000, 1000);
        check(1200, 1200);
    }

    #[test]
    fn a_min_stays_below_the_headroom() {
        assert_eq!(limit_for_min(PageCount::ZERO), PageCount::ZERO);
        let limit = limit_for_min(PageCount(27_136));
        let charged = |resident, limit| charged_for_min(PageCount(resident), limit, PageCount(27_136)).0;
        assert_eq!((charged(20_000, limit), charged(27_500, limit), charged(limit.0, limit)), (20_000, 27_136, 27_136));
        assert_eq!(charged(40_000, limit), 40_000, "on its way out");
        assert_eq!(charged(39_000, PageCount(40_000)), 40_000, "at another limit");
    }

    proptest! {
        #[test]
        fn nobody_outgrows_what_is_free(
            vms in prop::collection::vec((0..5000u64, 0..2000u64, 0..5000u64, 1..5000u64), 1..20),
            free in 0..20_000u64,
        ) {
            let requests: Vec<LimitRequest> = vms.iter().map(|(a, b, c, d)| request(*a, *b, *c, *d)).collect();
            let limits = Growth::default().plan_limits(&requests, &room(free));
            let mut grown = 0;
            for (limit, request) in limits.iter().zip(&requests) {
                prop_assert!(*limit <= request.cap && *limit >= request.resident.min(request.cap));
                grown += limit.saturating_sub(request.resident).0;
            }
            prop_assert!(grown <= free, "{grown} of {free}");
        }

        #[test]
        fn a_min_stays_below_the_lowest_limit_that_is_high_enough(min in 1..1u64 << 34) {
            let min = PageCount(min);
            let limit = limit_for_min(min);
            prop_assert!(page_out_leaves(limit) >= min);
            prop_assert!(page_out_leaves(limit - PageCount(2)) < min, "{limit:?}");
        }
    }
}
