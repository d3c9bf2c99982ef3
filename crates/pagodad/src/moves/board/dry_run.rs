//! What a move would come to: figures of the VM and of the way to its destination, for the arithmetic of [`pagoda_move::plan`].
//!
//! Nobody knows before a move how fast the guest writes, so it is taken to be idle. One that writes takes longer. Whether there is room
//! is seen as the destination's own policy would: its cap is no promise of DRAM, so what is reserved for the VM counts.

use std::time::Duration;

use pagoda_api::types::{AdmitReply, HostPing, MovePlan, MoveRemote, MoveRequest, MoveRoom, RemoteFate, VmInfo};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_move::plan::{Facts, Offer, Promise, plan_move};
use pagoda_move::rounds::{Mode, OnTimeout, Settings};
use pagoda_move::units::Rate;
use pagoda_move::wire::offer::Room;

use crate::moves::source::to_pool;

/// What QEMU has to say of devices: some hundred KiB, and more with a display.
const STATE: Bytes = Bytes::from_mib(1);

/// What a move of this VM would come to, on a way that was tried just now. `reserved`: what a host reserves for such a VM; `fate`: what
/// becomes of its remote tier, if it has one.
pub fn plan(
    vm: &VmInfo,
    ping: &HostPing,
    reserved: &AdmitReply,
    request: &MoveRequest,
    fate: Option<RemoteFate>,
    stop_cost: Duration,
) -> MovePlan {
    let in_pool = vm.remote.as_ref().map_or(0, |remote| remote.pool_bytes);
    let remote = fate.map(|fate| MoveRemote { bytes: in_pool, fate });
    let stays = if fate == Some(RemoteFate::HandedOver) { in_pool } else { 0 };
    let dram = Bytes(request.dram.unwrap_or(vm.dram_limit_bytes));
    let to_pool = request.split.map_or(0, |_| to_pool(vm, dram.0));
    let facts = Facts {
        pages: Bytes(vm.memory_bytes).pages_floor(),
        zero: Bytes(vm.zero_bytes).pages_floor(),
        freed: PageCount::ZERO,
        there: Bytes(stays.saturating_add(to_pool)).pages_floor(),
        written: Rate(0),
        write_set: PageCount::ZERO,
        rate: Rate(ping.bytes_per_second),
        compressed_per_mille: 1000,
        state: STATE,
    };
    let settings = Settings {
        mode: Mode::Precopy,
        downtime_max: Duration::from_millis(request.downtime_ms),
        stop_cost,
        bandwidth_max: request.bandwidth.map(Rate),
        time_max: request.max_time_s.map(Duration::from_secs),
        on_timeout: OnTimeout::Abort,
    };
    let planned = plan_move(&facts, &settings, &Offer { dram, pool: Bytes::ZERO, free: Room::default() });
    let lacks = MoveRoom {
        dram_bytes: reserved.memory_needed_bytes.saturating_sub(ping.look.memory_free_bytes),
        swap_bytes: reserved.swap_needed_bytes.saturating_sub(ping.look.swap_free_bytes),
    };
    MovePlan {
        vm: vm.name.clone(),
        host: ping.name.clone(),
        fits: lacks == MoveRoom::default(),
        needs: MoveRoom { dram_bytes: planned.needs.dram.0, swap_bytes: planned.needs.swap.0 },
        lacks,
        reserves: MoveRoom { dram_bytes: reserved.memory_needed_bytes, swap_bytes: reserved.swap_needed_bytes },
        free: MoveRoom { dram_bytes: ping.look.memory_free_bytes, swap_bytes: ping.look.swap_free_bytes },
        sends_bytes: planned.sends.0,
        spared_bytes: planned.spared.0.saturating_sub(to_pool),
        pool_bytes: to_pool,
        disk_bytes: 0,
        bytes_per_second: planned.rate.0,
        time_ms: planned.time.map(millis_ceil),
        downtime_ms: planned.pause.map(millis_ceil),
        keeps_downtime: planned.promise == Promise::Kept,
        remote,
        arbiter: None,
    }
}

/// The same for a VM whose disks are copied before its memory is sent.
pub fn with_disks(plan: MovePlan, disks: Bytes) -> MovePlan {
    let more_ms = (u128::from(disks.0) * 1000).div_ceil(u128::from(plan.bytes_per_second.max(1)));
    let more_ms = u64::try_from(more_ms).unwrap_or(u64::MAX);
    MovePlan { disk_bytes: disks.0, time_ms: plan.time_ms.map(|ms| ms.saturating_add(more_ms)), ..plan }
}

fn millis_ceil(span: Duration) -> u64 {
    u64::try_from(span.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use pagoda_api::types::{HostLook, MoveSplit};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn vm() -> VmInfo {
        serde_json::from_str(
            r#"{"name":"web1","kind":"qemu","state":{"kind":"running"},"memory_bytes":4294967296,
            "dram_limit_bytes":1073741824,"resident_bytes":1073741824,"swapped_bytes":1073741824,
            "zero_bytes":2147483648,"swap_used_bytes":1073741824,"armed":true,"huge":false}"#,
        )
        .unwrap()
    }

    fn ping() -> HostPing {
        let look = HostLook { memory_free_bytes: GIB, swap_free_bytes: 10 * GIB, ..HostLook::default() };
        HostPing {
            name: "host2".into(),
            address: "10.0.0.2:7075".into(),
            look,
            round_trip_us: 100,
            bytes_per_second: 125_000_000,
        }
    }

    fn reserved() -> AdmitReply {
        AdmitReply {
            admitted: true,
            memory_needed_bytes: GIB / 8,
            memory_free_bytes: 0,
            swap_needed_bytes: 4 * GIB,
            swap_free_bytes: 0,
            missing: String::new(),
        }
    }

    #[test]
    fn what_is_zero_is_not_sent() {
        let stop_cost = Duration::from_millis(15);
        let planned = plan(&vm(), &ping(), &reserved(), &MoveRequest::new("host2"), None, stop_cost);
        assert!(planned.fits && planned.keeps_downtime, "{planned:?}");
        assert_eq!((planned.sends_bytes, planned.spared_bytes), (2 * GIB, 2 * GIB));
        assert_eq!(planned.needs, MoveRoom { dram_bytes: GIB, swap_bytes: 3 * GIB });
        assert_eq!(planned.reserves, MoveRoom { dram_bytes: GIB / 8, swap_bytes: 4 * GIB });
        assert_eq!(planned.free, MoveRoom { dram_bytes: GIB, swap_bytes: 10 * GIB });
        assert_eq!((planned.time_ms, planned.downtime_ms), (Some(17_204), Some(24)));

        let with = with_disks(planned.clone(), Bytes(125_000_001));
        assert_eq!((with.disk_bytes, with.time_ms), (125_000_001, planned.time_ms.map(|ms| ms + 1001)));

        let slow = MoveRequest { bandwidth: Some(12_500_000), ..MoveRequest::new("host2") };
        let planned = plan(&vm(), &ping(), &reserved(), &slow, None, stop_cost);
        assert!(planned.time_ms > Some(170_000), "{planned:?}");

        // What is in the pool stays there, or is sent.
        let remote = Some(pagoda_api::types::RemoteInfo { copies: 1, pool_bytes: GIB, pool: None });
        let with_tier = VmInfo { remote, ..vm() };
        let sends = |fate| {
            let planned = plan(&with_tier, &ping(), &reserved(), &MoveRequest::new("host2"), Some(fate), stop_cost);
            (planned.sends_bytes, planned.remote)
        };
        for (fate, sent) in [(RemoteFate::HandedOver, GIB), (RemoteFate::Copied, 2 * GIB)] {
            assert_eq!(sends(fate), (sent, Some(MoveRemote { bytes: GIB, fate })));
        }

        // What does not fit goes there too, and not over the link.
        let split = MoveRequest { dram: Some(GIB / 4), split: Some(MoveSplit::default()), ..MoveRequest::new("host2") };
        let planned = plan(&with_tier, &ping(), &reserved(), &split, Some(RemoteFate::HandedOver), stop_cost);
        assert_eq!((planned.sends_bytes, planned.pool_bytes), (GIB / 4, GIB - GIB / 4));
        assert_eq!(planned.spared_bytes, 3 * GIB, "zeros, and what is there");
        let all = MoveRequest { dram: Some(GIB), ..split };
        let planned = plan(&with_tier, &ping(), &reserved(), &all, Some(RemoteFate::HandedOver), stop_cost);
        assert_eq!((planned.sends_bytes, planned.pool_bytes), (GIB, 0));

        // More than is free, but nobody is promised it.
        let large = MoveRequest { dram: Some(2 * GIB), ..MoveRequest::new("host2") };
        let planned = plan(&vm(), &ping(), &reserved(), &large, None, stop_cost);
        assert!(planned.fits && planned.needs.dram_bytes == 2 * GIB, "{planned:?}");
        let more = AdmitReply { memory_needed_bytes: 2 * GIB, swap_needed_bytes: 11 * GIB, ..reserved() };
        let planned = plan(&vm(), &ping(), &more, &large, None, stop_cost);
        assert!(!planned.fits, "{planned:?}");
        assert_eq!(planned.lacks, MoveRoom { dram_bytes: GIB, swap_bytes: GIB });
    }
}
