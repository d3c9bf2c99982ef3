//! Which VM of a host that is drained goes to which other host.
//!
//! Two things have to fit, DRAM and swap, so this is packing boxes into bins, for which nobody knows a quick way that is always right.
//! First VMs are spread, the biggest first, each to the host that has the most room left: hosts are then about equally full. If some
//! find no place so, other ways are looked for: the biggest first again, and each first to where it leaves the least. The look is exact
//! for some ten VMs, and ends after [`LOOKS_MAX`] steps for more of them with the best that was found. Nothing here asks anybody or
//! waits.

use std::cmp::Reverse;

use pagoda_api::MoveRoom;

/// Steps of the look for a better plan: some milliseconds.
const LOOKS_MAX: u32 = 200_000;
/// Shares of room are compared in millionths.
const MILLIONTHS: u128 = 1_000_000;

/// A host by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostIdx(pub usize);

/// A VM, and for each host what it takes of that one's room, or why it cannot go there at all.
pub type Wanted = Vec<Result<MoveRoom, String>>;

/// Where each VM goes: `None` is nowhere. `free` is what the hosts have for all of them.
///
/// # Panics
/// If a VM says nothing of some host.
pub fn plan(vms: &[Wanted], free: &[MoveRoom]) -> Vec<Option<HostIdx>> {
    assert!(vms.iter().all(|vm| vm.len() == free.len()), "each VM says something of each host");
    let sum = free.iter().fold(MoveRoom::default(), |sum, room| add(sum, *room));
    // Whom no host could take is out of the way.
    let mut order: Vec<usize> = (0..vms.len()).filter(|vm| hosts_for(&vms[*vm], free).next().is_some()).collect();
    order.sort_by_key(|vm| Reverse(size(&vms[*vm], sum)));
    let mut found = spread(vms, &order, free);
    if order.iter().any(|vm| found[*vm].is_none()) {
        let best = (found.iter().flatten().count(), found);
        let places = vec![None; vms.len()];
        let mut look = Look { vms, order: &order, free: free.to_vec(), places, best, left: LOOKS_MAX };
        look.go_on(0, 0);
        found = look.best.1;
    }
    found
}

/// Whether it would have room on one of the hosts, were it the only one.
pub fn fits_alone(vm: &Wanted, free: &[MoveRoom]) -> bool {
    hosts_for(vm, free).next().is_some()
}

fn hosts_for<'a>(vm: &'a Wanted, free: &'a [MoveRoom]) -> impl Iterator<Item = (HostIdx, MoveRoom)> + 'a {
    let fitting = |(host, (needs, free)): (usize, (&Result<MoveRoom, String>, &MoveRoom))| {
        needs.as_ref().ok().filter(|needs| fits(**needs, *free)).map(|needs| (HostIdx(host), *needs))
    };
    vm.iter().zip(free).enumerate().filter_map(fitting)
}

/// The greatest part that it takes of what there is of something.
fn size(vm: &Wanted, sum: MoveRoom) -> u128 {
    vm.iter().flatten().map(|needs| share(*needs, sum)).max().unwrap_or(0)
}

fn share(part: MoveRoom, of: MoveRoom) -> u128 {
    let share = |part: u64, of: u64| u128::from(part) * MILLIONTHS / u128::from(of.max(1));
    share(part.dram_bytes, of.dram_bytes).max(share(part.swap_bytes, of.swap_bytes))
}

fn spread(vms: &[Wanted], order: &[usize], free: &[MoveRoom]) -> Vec<Option<HostIdx>> {
    let (mut left, mut places) = (free.to_vec(), vec![None; vms.len()]);
    for vm in order {
        // What is taken of a host then, in parts of what it had.
        let taken = |(HostIdx(host), needs): &(HostIdx, MoveRoom)| {
            share(add(minus(free[*host], left[*host]), *needs), free[*host])
        };
        let Some((host, needs)) = hosts_for(&vms[*vm], &left).min_by_key(taken) else { continue };
        left[host.0] = minus(left[host.0], needs);
        places[*vm] = Some(host);
    }
    places
}

/// The look for a plan with more VMs in it.
struct Look<'a> {
    vms: &'a [Wanted],
    order: &'a [usize],
    free: Vec<MoveRoom>,
    places: Vec<Option<HostIdx>>,
    best: (usize, Vec<Option<HostIdx>>),
    left: u32,
}

impl Look<'_> {
    /// Places VM after VM from `at` on, of which `count` before have a place. True: it need not be gone on.
    fn go_on(&mut self, at: usize, count: usize) -> bool {
        let Some(vm) = self.order.get(at).copied() else {
            if count > self.best.0 {
                self.best = (count, self.places.clone());
            }
            return count == self.order.len();
        };
        if count + self.order.len() - at <= self.best.0 || self.left == 0 {
            return false;
        }
        self.left -= 1;
        let mut hosts: Vec<(HostIdx, MoveRoom)> = hosts_for(&self.vms[vm], &self.free).collect();
        hosts.sort_by_key(|(host, needs)| Reverse(share(*needs, self.free[host.0])));
        for (host, needs) in hosts {
            self.free[host.0] = minus(self.free[host.0], needs);
            self.places[vm] = Some(host);
            let is_over = self.go_on(at + 1, count + 1);
            self.places[vm] = None;
            self.free[host.0] = add(self.free[host.0], needs);
            if is_over {
                return true;
            }
        }
        self.go_on(at + 1, count)
    }
}

fn fits(needs: MoveRoom, free: MoveRoom) -> bool {
    needs.dram_bytes <= free.dram_bytes && needs.swap_bytes <= free.swap_bytes
}

fn add(a: MoveRoom, b: MoveRoom) -> MoveRoom {
    MoveRoom {
        dram_bytes: a.dram_bytes.saturating_add(b.dram_bytes),
        swap_bytes: a.swap_bytes.saturating_add(b.swap_bytes),
    }
}

/// What is left of room in which it fits.
fn minus(room: MoveRoom, part: MoveRoom) -> MoveRoom {
    assert!(fits(part, room), "nothing is taken that is not there");
    MoveRoom { dram_bytes: room.dram_bytes - part.dram_bytes, swap_bytes: room.swap_bytes - part.swap_bytes }
}

#[cfg(test)]
mod tests;
