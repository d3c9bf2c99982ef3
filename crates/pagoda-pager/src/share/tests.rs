//! A group's VMs share, take back, leave, come back and crash at random, on real pools and tables; what every entry
//! names must be what was shared.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use pagoda_abi::Token;
use pagoda_core::units::{PAGE_SIZE, PageIdx};

use super::frames::Content;
use super::{Group, Look, Member, table};

const VM_BYTES: u64 = 2 << 20;
const VM_PAGES: u64 = VM_BYTES / PAGE_SIZE;
const FRAMES: u32 = 4096;
const VMS: usize = 3;
const SEEDS: u64 = 20;
const STEPS: u32 = 3000;

/// xorshift64*, as good as needed to choose what comes next.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

fn content(value: u64) -> Content {
    let mut content = [value as u8; PAGE_SIZE as usize];
    content[..8].copy_from_slice(&value.to_le_bytes());
    content
}

fn token(vm: usize) -> Token {
    Token([vm as u8 + 1; 16])
}

/// What a VMM keeps.
struct Kept {
    files: [OwnedFd; 2],
    table: (u64, u64),
    pool: (u64, u64),
}

struct Vm {
    kept: Kept,
    member: Option<Member>,
    /// What its shared pages hold.
    truth: BTreeMap<u64, u64>,
}

struct Sim {
    group: Arc<Group>,
    vms: Vec<Vm>,
    chance: Chance,
    equal: u64,
}

impl Vm {
    fn new(group: &Arc<Group>, vm: usize) -> Vm {
        let file = table::create("test", VM_BYTES).unwrap();
        let frames = group.frames().unwrap();
        let files = table::keepsakes(&file, frames).unwrap();
        let kept = Kept { files, table: file.inode(), pool: frames.inode() };
        let member = Member::new(Arc::clone(group), file, token(vm), group.join(Weak::new()), true).unwrap();
        Vm { kept, member: Some(member), truth: BTreeMap::new() }
    }

    fn come_back(&mut self, group: &Arc<Group>, vm: usize) {
        let file = table::reopen(self.kept.files[0].as_fd(), VM_BYTES, self.kept.table).unwrap();
        group.adopt(self.kept.files[1].as_fd(), self.kept.pool).unwrap();
        let number = group.join(Weak::new());
        let mut member = Member::new(Arc::clone(group), file, token(vm), number, false).unwrap();
        member.count_references().unwrap();
        self.member = Some(member);
    }
}

impl Sim {
    fn new(seed: u64) -> Sim {
        let group = Arc::new(Group::create("test", FRAMES).unwrap());
        let vms = (0..VMS).map(|vm| Vm::new(&group, vm)).collect();
        Sim { group, vms, chance: Chance(seed * 2 + 1), equal: 0 }
    }

    fn share(&mut self, vm: usize) {
        let page = self.chance.below(VM_PAGES);
        let value = 1 + self.chance.below(40);
        let Vm { member: Some(member), truth, .. } = &mut self.vms[vm] else { return };
        if truth.contains_key(&page) {
            return;
        }
        match member.look(&content(value), PageIdx(page), |_| true) {
            Look::Equal(frame) | Look::Made(frame, _) => {
                self.equal += 1;
                member.enter(PageIdx(page), frame);
                truth.insert(page, value);
            }
            Look::New => {}
            Look::Collision => panic!("no two contents here have one hash"),
        }
    }

    fn take_back(&mut self, vm: usize) {
        let Vm { member: Some(member), truth, .. } = &mut self.vms[vm] else { return };
        let nth = self.chance.below(truth.len().max(1) as u64) as usize;
        let Some((&page, &value)) = truth.iter().nth(nth) else { return };
        let mut found = [0; PAGE_SIZE as usize];
        assert!(member.read(PageIdx(page), &mut found));
        assert_eq!(found, content(value), "page {page} of VM {vm}");
        member.clear(PageIdx(page));
        truth.remove(&page);
    }

    fn check(&self) {
        for (number, vm) in self.vms.iter().enumerate() {
            let Some(member) = &vm.member else { continue };
            let entries: u64 = member.entries().unwrap().iter().map(|(_, pages)| u64::from(pages.count())).sum();
            assert_eq!(entries, vm.truth.len() as u64);
            for (page, value) in &vm.truth {
                let mut found = [0; PAGE_SIZE as usize];
                assert!(member.read(PageIdx(*page), &mut found));
                assert_eq!(found, content(*value), "page {page} of VM {number}");
            }
        }
        if self.group.is_settled() && self.vms.iter().all(|vm| vm.member.is_some()) {
            let mut refs: BTreeMap<u32, u32> = BTreeMap::new();
            for vm in &self.vms {
                let frame = |page: &u64| vm.member.as_ref().unwrap().frame_of(PageIdx(*page)).unwrap();
                vm.truth.keys().for_each(|page| *refs.entry(frame(page)).or_default() += 1);
            }
            let frames = self.group.frames().unwrap();
            refs.iter().for_each(|(frame, refs)| assert_eq!(frames.count(*frame), *refs, "frame {frame}"));
        }
    }

    /// The daemon dies; one of the VMs may die before the next one finds it.
    fn crash(&mut self) {
        self.vms.iter_mut().for_each(|vm| drop(vm.member.take()));
        self.group = Arc::new(Group::recovered("test", FRAMES));
        (0..VMS).for_each(|vm| self.group.expect(token(vm)));
        let mut away: Vec<usize> = (0..VMS).collect();
        let dead = (self.chance.below(3) == 0).then(|| self.chance.below(VMS as u64) as usize);
        while !away.is_empty() {
            let vm = away.swap_remove(self.chance.below(away.len() as u64) as usize);
            assert!(!self.group.can_settle(), "VM {vm} is missing");
            self.group.settle();
            assert!(!self.group.is_settled());
            if Some(vm) == dead {
                self.group.account_for(token(vm));
            } else {
                self.vms[vm].come_back(&self.group, vm);
            }
            for _ in 0..20 {
                let other = self.chance.below(VMS as u64) as usize;
                self.take_back(other);
                self.share(other);
            }
            self.check();
        }
        self.group.settle();
        assert!(self.group.is_settled());
        if let Some(vm) = dead {
            self.vms[vm] = Vm::new(&self.group, vm);
        }
    }

    fn step(&mut self) {
        let vm = self.chance.below(VMS as u64) as usize;
        match self.chance.below(1000) {
            0..500 => self.share(vm),
            500..900 => self.take_back(vm),
            900..980 => {
                if let Some(member) = &mut self.vms[vm].member {
                    member.bury_dead();
                }
            }
            980..990 => {
                // An engine ends and another one takes over, or the VM ends with it.
                let Some(member) = self.vms[vm].member.take() else { return };
                let gone = self.chance.below(2) == 0;
                member.leave(gone);
                if gone {
                    self.vms[vm] = Vm::new(&self.group, vm);
                } else {
                    assert!(!self.group.is_settled());
                    self.vms[vm].come_back(&self.group, vm);
                    self.group.settle();
                }
            }
            990..993 => self.crash(),
            _ => self.check(),
        }
    }
}

#[test]
fn entries_name_what_was_shared_whatever_happens() {
    let mut equal = 0;
    for seed in 1..=SEEDS {
        let mut sim = Sim::new(seed);
        (0..STEPS).for_each(|_| sim.step());
        sim.check();
        // When all is taken back nothing is left.
        for vm in 0..VMS {
            while !sim.vms[vm].truth.is_empty() {
                sim.take_back(vm);
            }
            sim.vms[vm].member.as_mut().unwrap().bury_dead();
        }
        let frames = sim.group.frames().unwrap();
        assert_eq!((sim.group.frames_in_use(), frames.allocated()), (0, 0), "seed {seed}");
        equal += sim.equal;
    }
    assert!(equal > u64::from(STEPS), "{equal} pages were shared");
}

#[test]
fn a_hash_alone_shares_nothing() {
    let group = Arc::new(Group::create("test", FRAMES).unwrap());
    let vm = Vm::new(&group, 0);
    let member = vm.member.as_ref().unwrap();
    assert_eq!(member.look(&content(1), PageIdx(0), |_| true), Look::New);
    // A hint that does not deserve it makes no frame, nor does a page meet itself.
    assert_eq!(member.look(&content(1), PageIdx(1), |_| false), Look::New);
    assert_eq!(member.look(&content(1), PageIdx(1), |_| true), Look::New);
    let Look::Made(frame, hint) = member.look(&content(1), PageIdx(2), |_| true) else { panic!("a second page") };
    assert_eq!(hint.page, PageIdx(1));
    // Somebody overwrites the frame: the same hash, another content.
    group.frames().unwrap().write(frame, &content(2)).unwrap();
    assert_eq!(member.look(&content(1), PageIdx(3), |_| true), Look::Collision);
    assert_eq!(group.frames().unwrap().count(frame), 1);
}

#[test]
fn a_part_is_what_others_do_not_pay_for() {
    let group = Arc::new(Group::create("test", FRAMES).unwrap());
    let mut vms = [Vm::new(&group, 0), Vm::new(&group, 1)];
    for (vm, pages) in [(0, 0..4_u64), (1, 0..2)] {
        let member = vms[vm].member.as_mut().unwrap();
        for page in pages {
            let frame = group.frames().unwrap();
            frame.write(page as u32 + 1, &content(page)).unwrap();
            frame.add(page as u32 + 1);
            member.enter(PageIdx(page), page as u32 + 1);
        }
    }
    let (part, sole) = vms[0].member.as_ref().unwrap().part(8).unwrap();
    assert_eq!((part.pages, part.sole, sole), (3, 2, vec![PageIdx(2), PageIdx(3)]));
    assert_eq!(vms[1].member.as_ref().unwrap().part(8).unwrap().0.pages, 1);
}

#[test]
fn what_is_handed_over_is_looked_at() {
    let group = Arc::new(Group::create("test", FRAMES).unwrap());
    let kept = Vm::new(&group, 0).kept;
    let other = Group::create("other", FRAMES).unwrap();
    let recovered = Group::recovered("test", FRAMES);
    let wrong = other.frames().unwrap().keepsake().unwrap();
    assert!(recovered.adopt(wrong.as_fd(), kept.pool).is_err());
    assert!(recovered.adopt(kept.files[0].as_fd(), kept.pool).is_err());
    assert!(recovered.adopt(kept.files[1].as_fd(), kept.pool).is_ok());
    assert!(table::reopen(kept.files[1].as_fd(), VM_BYTES, kept.table).is_err());
    assert!(table::reopen(kept.files[0].as_fd(), 4 * VM_BYTES, kept.table).is_err());
    // An entry that no pool can have.
    let file = table::reopen(kept.files[0].as_fd(), VM_BYTES, kept.table).unwrap();
    let member = Member::new(group, file, token(0), 9, false).unwrap();
    member.enter(PageIdx(5), FRAMES);
    assert!(member.entries().is_err());
    assert_eq!(member.frame_of(PageIdx(5)), None);
}
