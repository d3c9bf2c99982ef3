//! What the daemon is told of jobs: [`Outbox`] with a clock for [`pagoda_outbox::Jobs`] and [`pagoda_outbox::Meter`].

use pagoda_abi::attach::{JOBS_MAX, LABEL_BYTES, List, OutboxCounts, OutboxJob};
use pagoda_outbox::{EndedJob, Ino, Mode};

use crate::outbox::Outbox;

/// A label as a packet has it.
fn padded(label: &[u8]) -> [u8; LABEL_BYTES] {
    let mut bytes = [0; LABEL_BYTES];
    bytes.iter_mut().zip(label).for_each(|(byte, from)| *byte = *from);
    bytes
}

fn packed(job: &EndedJob) -> OutboxJob {
    OutboxJob {
        number: job.number,
        began_ms: job.began_ms,
        ended_ms: job.ended_ms,
        blocked_us: job.blocked_us,
        output: job.output,
        backlog: job.backlog,
        is_on_close: job.labels.mode == Mode::OnClose,
        priority: job.labels.priority.into(),
        id: padded(&job.labels.id),
        destination: padded(&job.labels.destination),
    }
}

impl Outbox {
    /// The guest has opened a file for writing.
    pub fn job_opened(&self, ino: Ino) {
        let now_ms = self.now_ms();
        self.space().job_opened(ino, now_ms);
    }

    /// The guest has closed or renamed a file.
    pub fn job_settled(&self, ino: Ino) {
        let now_ms = self.now_ms();
        self.space().job_settled(ino, now_ms);
    }

    /// Counts, and jobs behind the one with the number `after`, oldest first.
    pub fn jobs(&self, after: u64) -> (OutboxCounts, List<OutboxJob, JOBS_MAX>) {
        self.observe();
        let (meter, refused, now_ms) = (self.meter(), self.refused_writes(), self.now_ms());
        let space = self.space();
        let (counts, figures) = (space.job_counts(), space.figures());
        let mut jobs = List::default();
        for job in space.jobs().after(after, JOBS_MAX) {
            jobs.push(packed(job));
        }
        let counts = OutboxCounts {
            now_ms,
            oldest: counts.oldest,
            last: counts.last,
            written: figures.bytes_written,
            acknowledged: figures.bytes_acknowledged,
            sending_us: meter.sending_us,
            blocked_us: meter.blocked_us,
            reading_us: meter.reading_us,
            began: counts.began,
            given_up: counts.given_up,
            refused,
        };
        (counts, jobs)
    }
}
