//! What a thread gets next, and what becomes of it.

use pagoda_core::units::ChunkIdx;

use super::*;

fn job(number: u16, demand: bool) -> Job {
    let asker = Asker::Op { op: OpId(number), target: Target::Ram, demand };
    Job { asker, chunk: ChunkIdx(0), pages: PageSet::range(0, 2), asked: Instant::now() }
}

fn call(number: u64) -> Job {
    Job { asker: Asker::Caller(number), ..job(0, true) }
}

fn number(job: &Job) -> u16 {
    match job.asker {
        Asker::Op { op, .. } => op.0,
        Asker::Caller(_) => panic!("{job:?}"),
    }
}

fn done(job: Job, buffer: Option<DirectBuffer>) -> Done {
    let content = buffer.unwrap_or_else(|| DirectBuffer::new(PAGE_SIZE as usize));
    Done { job, content, failed: PageSet::EMPTY, failure: None }
}

const ONE: WorkerIdx = WorkerIdx(0);

#[test]
fn demand_goes_first_and_what_is_read_ahead_has_a_turn_now_and_then() {
    let mut queue = Queue::new();
    (0..40).for_each(|number| queue.push(job(100 + number, false)));
    (0..40).for_each(|number| queue.push(job(number, true)));
    let mut order = Vec::new();
    while let Some((job, buffer)) = queue.take(ONE) {
        order.push(number(&job));
        queue.give(done(job, buffer).content);
    }
    let ahead: Vec<usize> = (0..40).filter(|at| order[*at] >= 100).collect();
    assert_eq!(ahead, [15, 31], "of the first 40");
    let of = |ahead: bool| order.iter().copied().filter(|number| (*number >= 100) == ahead).collect::<Vec<_>>();
    assert_eq!((of(false), of(true)), ((0..40).collect(), (100..140).collect()), "each in its order");
}

#[test]
fn no_more_is_read_than_there_are_buffers_but_a_caller_waits_for_none() {
    let mut queue = Queue::new();
    (0..20).for_each(|number| queue.push(job(number, true)));
    let mut buffers = 0;
    while let Some((job, buffer)) = queue.take(ONE) {
        queue.end(ONE, done(job, buffer));
        buffers += 1;
    }
    assert_eq!((buffers, queue.memory_bytes()), (BUFFERS_MAX, (BUFFERS_MAX * BUFFER_BYTES) as u64));
    queue.push(call(1));
    let (question, buffer) = queue.take(ONE).expect("a question needs no buffer");
    assert_eq!((question.asker, buffer.is_none()), (Asker::Caller(1), true));
    assert!(queue.take_answer().is_none());
    queue.end(ONE, done(question, None));
    assert!(queue.take_answer().is_some_and(|answer| answer.job.asker == Asker::Caller(1)));
    // The engine takes in what was done: as many are read again.
    let mut taken = VecDeque::new();
    queue.take_done(&mut taken);
    assert_eq!(taken.len(), BUFFERS_MAX);
    taken.into_iter().for_each(|done| queue.give(done.content));
    assert_eq!(std::iter::from_fn(|| queue.take(ONE)).count(), BUFFERS_MAX);
    assert_eq!(queue.memory_bytes(), (BUFFERS_MAX * BUFFER_BYTES) as u64);
}

#[test]
fn an_answer_that_nobody_waits_for_is_dropped() {
    let mut queue = Queue::new();
    queue.push(call(1));
    let (first, _) = queue.take(ONE).unwrap();
    queue.forget_call();
    queue.push(call(2));
    queue.end(ONE, done(first, None));
    assert!(queue.take_answer().is_none(), "that was the answer to another question");
    let (second, _) = queue.take(ONE).unwrap();
    queue.end(ONE, done(second, None));
    assert!(queue.take_answer().is_some_and(|answer| answer.job.asker == Asker::Caller(2)));
    queue.push(call(3));
    queue.forget_call();
    assert!(queue.take(ONE).is_none());
}

#[test]
fn there_is_a_thread_for_the_next_job_and_those_beyond_the_first_end() {
    let mut queue = Queue::new();
    let first: Vec<_> = std::iter::from_fn(|| queue.add_worker()).collect();
    assert_eq!(first, [0, 1].map(WorkerIdx));
    (0..20).for_each(|number| queue.push(job(number, true)));
    let mut busy = vec![(WorkerIdx(0), queue.take(WorkerIdx(0)).unwrap().0)];
    assert_eq!(queue.add_worker(), None, "one is free");
    for next in 1..WORKERS_MAX as u8 {
        busy.push((WorkerIdx(next), queue.take(WorkerIdx(next)).unwrap().0));
        let added = queue.add_worker();
        assert_eq!(added, (usize::from(next) + 1 < WORKERS_MAX).then_some(WorkerIdx(next + 1)));
    }
    assert!(!queue.retire(WorkerIdx(0)), "there is something to do");
    let jobs: Vec<Job> = queue.demand.drain(..).collect();
    assert_eq!(jobs.len(), 20 - WORKERS_MAX);
    (0..BUFFERS_MAX).for_each(|_| queue.give(DirectBuffer::new(BUFFER_BYTES)));
    let (last, job) = busy.pop().unwrap();
    queue.end(last, done(job, None));
    assert!(!queue.retire(last), "all others may wait for a disk, and something may come");
    busy.into_iter().for_each(|(worker, job)| queue.end(worker, done(job, None)));
    let retired = (0..WORKERS_MAX as u8).filter(|worker| queue.retire(WorkerIdx(*worker))).count();
    assert_eq!((retired, queue.workers()), (WORKERS_MAX - WORKERS, WORKERS));
    assert_eq!(queue.memory_bytes(), (WORKERS * BUFFER_BYTES) as u64);
}

#[test]
fn what_is_late_is_told() {
    let mut queue = Queue::new();
    let start = Instant::now();
    let at = |ms| start + std::time::Duration::from_millis(ms);
    for (number, asked) in [(0, 5), (1, 10), (2, 20)] {
        queue.push(Job { asked: at(asked), ..job(number, number != 1) });
    }
    assert_eq!(queue.late(start), None);
    assert_eq!(queue.late(at(15)), Some((4, at(5))));
    queue.take(ONE).unwrap();
    assert_eq!(queue.late(at(15)), Some((4, at(5))), "being read is not read");
    assert_eq!(queue.late(at(30)), Some((6, at(5))));
}

#[test]
fn there_is_room_for_as_many_jobs_as_operations() {
    let mut queue = Queue::new();
    (1..JOBS_MAX as u16).for_each(|number| queue.push(job(number, true)));
    assert_eq!([1, 2].map(|jobs| queue.has_room_for(jobs)), [true, false]);
}
