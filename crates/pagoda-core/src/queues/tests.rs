//! Tables of the paper's rules, and random operations against a naive model of them.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

fn order(queues: &ChunkQueues) -> Vec<u32> {
    queues.iter().map(|chunk| chunk.0).collect()
}

fn with_first(chunks: u32) -> ChunkQueues {
    let mut queues = ChunkQueues::new(ChunkCount(chunks));
    ChunkCount(chunks).iter().for_each(|chunk| queues.insert_first(chunk));
    queues
}

/// One step on chunk 0, and the queue it is in afterwards.
enum Step {
    First,
    PageIn,
    Touch,
    Age(u32),
    PageOut,
}

#[test]
fn a_chunk_moves_as_the_paper_says() {
    use Step::*;
    let check = |steps: &[(Step, Option<u8>)]| {
        let mut queues = ChunkQueues::new(ChunkCount(1));
        for (nth, (step, expected)) in steps.iter().enumerate() {
            match step {
                First => queues.insert_first(ChunkIdx(0)),
                PageIn => queues.insert_tail_last(ChunkIdx(0)),
                Touch => _ = queues.touch(ChunkIdx(0)),
                Age(times) => (0..*times).for_each(|_| queues.age()),
                PageOut => _ = queues.remove(ChunkIdx(0)),
            }
            assert_eq!(queues.queue_of(ChunkIdx(0)), *expected, "after step {nth}");
        }
    };
    check(&[(First, Some(0)), (Touch, Some(128)), (Age(1), Some(64)), (Touch, Some(192)), (Age(1), Some(96))]);
    // In the upper half already: saturates.
    check(&[(First, Some(0)), (Touch, Some(128)), (Touch, Some(255)), (Touch, Some(255)), (Age(1), Some(127))]);
    check(&[(PageIn, Some(255)), (Touch, Some(255)), (Age(7), Some(1)), (Age(1), Some(0)), (Age(1000), Some(0))]);
    check(&[(PageIn, Some(255)), (Age(1), Some(127)), (Touch, Some(255)), (PageOut, None), (Touch, None)]);
    check(&[(PageIn, Some(255)), (PageIn, Some(255)), (First, Some(0)), (PageOut, None), (PageOut, None)]);
}

#[test]
fn aging_keeps_the_order() {
    let mut queues = with_first(4);
    queues.touch(ChunkIdx(1));
    queues.age();
    queues.touch(ChunkIdx(0));
    assert_eq!(order(&queues), [2, 3, 1, 0]);
    (0..20).for_each(|_| queues.age());
    assert_eq!(order(&queues), [2, 3, 1, 0], "all in the first queue now, still the least recent first");
    assert_eq!(queues.histogram()[0], 4);
}

#[test]
fn a_chunk_used_often_outlives_one_paged_in_once() {
    let mut queues = with_first(2);
    queues.touch(ChunkIdx(0));
    queues.remove(ChunkIdx(1));
    queues.insert_tail_last(ChunkIdx(1));
    queues.touch(ChunkIdx(0));
    assert_eq!(order(&queues), [1, 0]);
}

#[test]
fn busy_victims_are_passed_over() {
    let mut queues = with_first(3);
    queues.touch(ChunkIdx(0));
    assert_eq!(queues.victim(), Some(ChunkIdx(1)));
    assert_eq!(queues.victim_from(ChunkIdx(1)), Some(ChunkIdx(2)));
    assert_eq!(queues.victim_from(ChunkIdx(2)), Some(ChunkIdx(0)));
    assert_eq!(queues.victim_from(ChunkIdx(0)), None);
    assert_eq!(queues.peek_victims(ChunkCount(2)).collect::<Vec<_>>(), [ChunkIdx(1), ChunkIdx(2)]);
    queues.remove(ChunkIdx(1));
    assert_eq!(queues.victim_from(ChunkIdx(1)), None);
}

#[test]
fn division_counts_from_the_cold_end() {
    let mut queues = with_first(3);
    queues.touch(ChunkIdx(0));
    let check = |hot: u32, expected: [Heat; 3]| {
        let (chunks, heats): (Vec<_>, Vec<_>) = queues.divide(ChunkCount(hot)).unzip();
        assert_eq!((chunks, heats), (vec![ChunkIdx(0), ChunkIdx(1), ChunkIdx(2)], expected.to_vec()));
    };
    use Heat::*;
    check(0, [Cold, Cold, Cold]);
    check(1, [Hot, Cold, Cold]);
    check(2, [Hot, Cold, Hot]);
    check(3, [Hot, Hot, Hot]);
    check(4, [Hot, Hot, Hot]);
}

#[test]
fn division_follows_the_order_of_eviction() {
    const CHUNKS: u32 = 70;
    let mut queues = with_first(CHUNKS);
    for step in 0..200_u32 {
        queues.touch(ChunkIdx(step * step % CHUNKS));
        if step % 9 == 0 {
            queues.age();
            queues.remove(ChunkIdx(step % CHUNKS));
        }
    }
    for hot in 0..=CHUNKS {
        let cold = queues.len().0.saturating_sub(hot) as usize;
        let mut expected: Vec<_> = (queues.iter().enumerate())
            .map(|(nth, chunk)| (chunk, if nth < cold { Heat::Cold } else { Heat::Hot }))
            .collect();
        expected.sort_by_key(|(chunk, _)| *chunk);
        assert_eq!(queues.divide(ChunkCount(hot)).collect::<Vec<_>>(), expected, "{hot} hot");
    }
}

#[test]
fn chunks_are_counted_by_idle_periods() {
    let mut queues = with_first(5);
    for chunk in 0..3 {
        queues.touch(ChunkIdx(chunk));
        queues.age();
    }
    queues.touch(ChunkIdx(0));
    assert_eq!(queues.chunks_by_idle_periods().map(|count| count.0), [1, 1, 1, 0, 0, 0, 0, 0, 2]);
}

#[test]
fn random_victims_are_resident_and_even() {
    const DRAWS: u64 = 30_000;
    let mut queues = ChunkQueues::new(ChunkCount(64));
    assert_eq!(queues.random_victim(1), None);
    let resident = [3, 17, 18, 40, 62];
    resident.into_iter().for_each(|chunk| queues.insert_first(ChunkIdx(chunk)));
    let mut drawn = [0u64; 64];
    for seed in 0..DRAWS {
        let victim = queues.random_victim(seed.wrapping_mul(0xd134_2543_de82_ef95)).expect("chunks are resident");
        drawn[victim.as_usize()] += 1;
    }
    assert_eq!(resident.map(|chunk| drawn[chunk as usize]).iter().sum::<u64>(), DRAWS);
    for chunk in resident {
        let share = drawn[chunk as usize] * 5 * 100 / DRAWS;
        assert!((90..=110).contains(&share), "chunk {chunk} has {share} % of its share");
    }
}

#[test]
#[should_panic(expected = "beyond the space")]
fn a_chunk_beyond_the_space_is_a_bug() {
    ChunkQueues::new(ChunkCount(4)).insert_first(ChunkIdx(4));
}

const CHUNKS: u32 = 24;

/// The queues as the paper words them.
struct Model {
    queues: Vec<VecDeque<u32>>,
}

impl Model {
    fn new() -> Model {
        Model { queues: vec![VecDeque::new(); QUEUES] }
    }

    fn remove(&mut self, chunk: u32) -> Option<usize> {
        let queue = self.queue_of(chunk)?;
        self.queues[queue].retain(|&other| other != chunk);
        Some(queue)
    }

    fn queue_of(&self, chunk: u32) -> Option<usize> {
        self.queues.iter().position(|queue| queue.contains(&chunk))
    }

    fn insert(&mut self, chunk: u32, queue: usize) {
        self.remove(chunk);
        self.queues[queue].push_back(chunk);
    }

    fn touch(&mut self, chunk: u32) -> bool {
        let Some(queue) = self.remove(chunk) else { return false };
        self.queues[(queue + QUEUES / 2).min(QUEUES - 1)].push_back(chunk);
        true
    }

    fn age(&mut self) {
        let old = std::mem::replace(&mut self.queues, vec![VecDeque::new(); QUEUES]);
        for (number, chunks) in old.into_iter().enumerate() {
            self.queues[number / 2].extend(chunks);
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    First(u32),
    PageIn(u32),
    Touch(u32),
    Remove(u32),
    PageOut { skip: usize },
    Age(u8),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => (0..CHUNKS).prop_map(Op::First),
        4 => (0..CHUNKS).prop_map(Op::PageIn),
        6 => (0..CHUNKS).prop_map(Op::Touch),
        1 => (0..CHUNKS).prop_map(Op::Remove),
        2 => (0..4usize).prop_map(|skip| Op::PageOut { skip }),
        3 => (1..4u8).prop_map(Op::Age),
        1 => (7..12u8).prop_map(Op::Age),
    ]
}

proptest! {
    /// Starts shortly before the age counter wraps, so that most cases run across it.
    #[test]
    fn random_operations_agree_with_the_model(
        ops in prop::collection::vec(any_op(), 1..200),
        ages_to_wrap in 0..60u32,
    ) {
        let mut queues = ChunkQueues::with_age(ChunkCount(CHUNKS), 0u32.wrapping_sub(ages_to_wrap));
        let mut model = Model::new();
        for op in ops {
            match op {
                Op::First(chunk) => {
                    queues.insert_first(ChunkIdx(chunk));
                    model.insert(chunk, 0);
                }
                Op::PageIn(chunk) => {
                    queues.insert_tail_last(ChunkIdx(chunk));
                    model.insert(chunk, QUEUES - 1);
                }
                Op::Touch(chunk) => prop_assert_eq!(queues.touch(ChunkIdx(chunk)), model.touch(chunk)),
                Op::Remove(chunk) => {
                    prop_assert_eq!(queues.remove(ChunkIdx(chunk)), model.remove(chunk).is_some());
                }
                Op::PageOut { skip } => {
                    let victim = queues.peek_victims(ChunkCount(CHUNKS)).nth(skip);
                    let expected = model.queues.iter().flatten().nth(skip).copied();
                    prop_assert_eq!(victim.map(|chunk| chunk.0), expected);
                    if let Some(chunk) = victim {
                        queues.remove(chunk);
                        model.remove(chunk.0);
                    }
                }
                Op::Age(times) => for _ in 0..times {
                    queues.age();
                    model.age();
                }
            }
            let expected: Vec<u32> = model.queues.iter().flatten().copied().collect();
            prop_assert_eq!(queues.victim().map(|chunk| chunk.0), expected.first().copied());
            prop_assert_eq!(queues.len().as_usize(), expected.len());
            prop_assert_eq!(order(&queues), expected);
            for chunk in ChunkCount(CHUNKS).iter() {
                prop_assert_eq!(queues.queue_of(chunk).map(usize::from), model.queue_of(chunk.0));
            }
            let lengths: Vec<u32> = model.queues.iter().map(|queue| queue.len() as u32).collect();
            prop_assert_eq!(&queues.histogram()[..], lengths);
        }
    }
}
