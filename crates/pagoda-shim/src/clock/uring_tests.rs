//! A fake ring: the kernel's side in ordinary memory, with its overflow list.

use std::collections::VecDeque;

use super::*;
use crate::clock::testing::{Rng, boxed_table, shared};

const SQ: usize = 8;
const CQ: usize = 16;

#[repr(C)]
struct Queues {
    sq_head: AtomicU32,
    sq_tail: AtomicU32,
    sq_mask: u32,
    sq_entries: u32,
    cq_head: AtomicU32,
    cq_tail: AtomicU32,
    cq_mask: u32,
    cq_entries: u32,
    cqes: [[u64; 2]; CQ],
    sqes: [[u64; 8]; SQ],
}

struct Kernel {
    queues: Box<Queues>,
    ring: Ring,
    overflow: VecDeque<u64>,
}

impl Kernel {
    fn new() -> Kernel {
        let queues = Box::new(Queues {
            sq_head: AtomicU32::new(0),
            sq_tail: AtomicU32::new(0),
            sq_mask: SQ as u32 - 1,
            sq_entries: SQ as u32,
            cq_head: AtomicU32::new(0),
            cq_tail: AtomicU32::new(0),
            cq_mask: CQ as u32 - 1,
            cq_entries: CQ as u32,
            cqes: [[0; 2]; CQ],
            sqes: [[0; 8]; SQ],
        });
        let at = &raw const *queues;
        let (start, size) = (at as usize, size_of::<Queues>());
        let ring = Ring {
            sq: Submission {
                khead: &raw const queues.sq_head,
                ktail: &raw const queues.sq_tail,
                kring_mask: &raw const queues.sq_mask,
                kring_entries: &raw const queues.sq_entries,
                kflags: std::ptr::null(),
                kdropped: std::ptr::null(),
                array: std::ptr::null(),
                sqes: (&raw const queues.sqes).cast(),
                sqe_head: 0,
                sqe_tail: 0,
                ring_sz: size,
                ring_ptr: start,
                pad: [0; 4],
            },
            cq: Completion {
                khead: &raw const queues.cq_head,
                ktail: &raw const queues.cq_tail,
                kring_mask: &raw const queues.cq_mask,
                kring_entries: &raw const queues.cq_entries,
                kflags: std::ptr::null(),
                koverflow: std::ptr::null(),
                cqes: (&raw const queues.cqes).cast(),
                ring_sz: size,
                ring_ptr: start,
                pad: [0; 4],
            },
            flags: 0,
            ring_fd: -1,
            features: FEAT_EXT_ARG,
            enter_ring_fd: -1,
            int_flags: 0,
            pad: 0,
        };
        Kernel { queues, ring, overflow: VecDeque::new() }
    }

    fn prepare(&mut self, opcode: u8, flags: u8, key: u64) {
        let sqe = &mut self.queues.sqes[self.ring.sq.sqe_tail as usize % SQ];
        *sqe = [u64::from(opcode) | u64::from(flags) << 8, 0, 0, 0, key, 0, 0, 0];
        self.ring.sq.sqe_tail += 1;
    }

    /// What liburing's submit does after the hook.
    fn flush(&mut self) {
        self.ring.sq.sqe_head = self.ring.sq.sqe_tail;
    }

    fn complete(&mut self, key: u64) {
        self.overflow.push_back(key);
        self.drain();
    }

    fn drain(&mut self) {
        let head = self.queues.cq_head.load(Ordering::Relaxed);
        let mut tail = self.queues.cq_tail.load(Ordering::Relaxed);
        while tail - head < CQ as u32 {
            let Some(key) = self.overflow.pop_front() else { break };
            self.queues.cqes[tail as usize % CQ] = [key, 0];
            tail += 1;
        }
        self.queues.cq_tail.store(tail, Ordering::Relaxed);
    }

    fn consume(&mut self) {
        let tail = self.queues.cq_tail.load(Ordering::Relaxed);
        self.queues.cq_head.store(tail, Ordering::Relaxed);
        // What overflowed would come at the next enter.
        self.drain();
    }

    fn reader(&self) -> Reader {
        // SAFETY: the queues outlive the reader in every test.
        unsafe { Reader::new(&self.ring) }.expect("a plausible ring")
    }
}

/// Random submissions and completions; `in_flight_max` above the queue's size makes it go blind at times.
/// Answers whether it ever was.
fn run(seed: u64, in_flight_max: usize, shared_keys: bool) -> bool {
    let (clock, mut table, mut rng) = (shared(), boxed_table(), Rng::new(seed));
    let mut kernel = Kernel::new();
    let mut reader = kernel.reader();
    let mut in_flight: Vec<(u64, u64)> = Vec::new();
    let (mut next_key, mut was_blind) = (1, false);
    for step in 0..60_000 {
        match rng.below(4) {
            0 => {
                for _ in 0..(rng.below(SQ as u64) as usize).min(in_flight_max - in_flight.len()) {
                    next_key = if shared_keys { 1 + rng.below(3) } else { next_key + 64 };
                    // READ_FIXED always touches RAM.
                    kernel.prepare(op::READ_FIXED, 0, next_key);
                    in_flight.push((next_key, clock.epoch.load(Ordering::SeqCst)));
                }
                // SAFETY: the ring is the reader's own.
                unsafe { reader.register(&kernel.ring, &mut table, Some(&clock)) }.unwrap();
                kernel.flush();
            }
            1 if !in_flight.is_empty() => {
                let (key, _) = in_flight.swap_remove(rng.below(in_flight.len() as u64) as usize);
                kernel.complete(key);
            }
            2 => kernel.consume(),
            _ => {
                reader.scan(&mut table, Some(&clock)).unwrap();
                clock.advance();
            }
        }
        was_blind |= reader.blind.is_some();
        let oldest = in_flight.iter().map(|io| io.1).min().unwrap_or(u64::MAX);
        assert!(clock.oldest_io() <= oldest, "early release: seed {seed:#x} step {step}");
    }
    for (key, _) in in_flight.drain(..) {
        kernel.complete(key);
        kernel.consume();
        reader.scan(&mut table, Some(&clock)).unwrap();
    }
    while !kernel.overflow.is_empty() {
        kernel.consume();
        reader.scan(&mut table, Some(&clock)).unwrap();
    }
    reader.scan(&mut table, Some(&clock)).unwrap();
    assert_eq!(clock.oldest_io(), u64::MAX, "seed {seed:#x}: everything ended, everything is released");
    was_blind
}

#[test]
fn a_sighted_queue_never_releases_early_and_forgets_nothing() {
    assert!(!run(0x5eed_0003, CQ / 2, false));
}

#[test]
fn keys_used_twice_are_held_to_the_last() {
    assert!(!run(0x5eed_0004, CQ / 2, true));
}

#[test]
fn a_queue_with_more_in_flight_than_cells_goes_blind_and_recovers() {
    assert!(run(0x5eed_0005, 3 * CQ, false));
}

#[test]
fn what_breaks_one_request_one_completion_is_a_fault() {
    for (opcode, flags) in [(op::MSG_RING, 0), (op::READ, SQE_CQE_SKIP_SUCCESS)] {
        let mut kernel = Kernel::new();
        let mut reader = kernel.reader();
        kernel.prepare(opcode, flags, 5);
        // SAFETY: the ring is the reader's own.
        let noted = unsafe { reader.register(&kernel.ring, &mut boxed_table(), Some(&shared())) };
        assert_eq!(noted, Err(Fault::Surprise), "opcode {opcode} flags {flags:#x}");
    }
    let mut kernel = Kernel::new();
    let (mut reader, mut table) = (kernel.reader(), boxed_table());
    kernel.prepare(op::READ_MULTISHOT, 0, 5);
    // SAFETY: the ring is the reader's own.
    unsafe { reader.register(&kernel.ring, &mut table, Some(&shared())) }.unwrap();
    kernel.complete(5);
    kernel.queues.cqes[0][1] = u64::from(CQE_MORE) << 32;
    assert_eq!(reader.scan(&mut table, None), Err(Fault::Surprise));
}

#[test]
fn a_flush_around_the_hooks_is_noticed() {
    let mut kernel = Kernel::new();
    let mut reader = kernel.reader();
    kernel.prepare(op::READ, 0, 5);
    kernel.flush();
    // SAFETY: the ring is the reader's own.
    let noted = unsafe { reader.register(&kernel.ring, &mut boxed_table(), None) };
    assert_eq!(noted, Err(Fault::Surprise));
}

#[test]
fn a_ring_of_another_layout_is_not_read() {
    let breaks: [fn(&mut Kernel); 6] = [
        |k| k.ring.flags = 1 << 18,
        |k| k.ring.features = 0,
        |k| k.ring.cq.ring_sz = 64,
        |k| k.queues.cq_mask = 14,
        |k| k.queues.cq_tail = AtomicU32::new(1),
        |k| k.ring.sq.khead = std::ptr::dangling(),
    ];
    for (index, break_it) in breaks.into_iter().enumerate() {
        let mut kernel = Kernel::new();
        break_it(&mut kernel);
        // SAFETY: the queues are mapped while they are looked at.
        assert!(unsafe { Reader::new(&kernel.ring) }.is_none(), "break {index}");
    }
}
