//! Asks a control plane that takes its time, on a thread of its own. The registry makes every change durable, which needs a flush
//! of the disk. The driver that asks serves pages meanwhile.

use anyhow::{Context, Result};
use rmap::control::{ControlReply, ControlRequest};
use rmap_io::aside::REQUESTS_MAX;

/// How a client's driver asks.
pub type Control = Box<dyn FnMut(&ControlRequest) -> ControlReply + Send>;

/// Answers several requests at a time, in their order.
pub type Slow = Box<dyn FnMut(&[ControlRequest]) -> Vec<ControlReply> + Send>;

/// Asks `slow` on another thread, which ends with the driver. The driver gets [`ControlReply::Later`] until there is an answer.
/// What is asked while the last ones are being answered is answered together.
///
/// # Errors
/// There is no thread to be had.
pub fn aside(mut slow: Slow) -> Result<Control> {
    let (mut asker, (inbox, outbox)) = rmap_io::aside::pair();
    let work = move || {
        while let Ok(first) = inbox.recv() {
            let batch: Vec<ControlRequest> =
                std::iter::once(first).chain(inbox.try_iter()).take(REQUESTS_MAX).collect();
            let replies = slow(&batch);
            for answer in batch.into_iter().zip(replies) {
                if outbox.send(answer).is_err() {
                    return;
                }
            }
        }
    };
    std::thread::Builder::new().name("registry".into()).spawn(work).context("start a thread for the registry")?;
    Ok(Box::new(move |request| asker.ask(request)))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use rmap::control::{Change, MapEntry};
    use rmap::units::{Generation, SlabNo, SpaceId};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn request(slab: u32, revision: u64) -> ControlRequest {
        let entry = MapEntry { revision, ..MapEntry::default() };
        let (space, generation) = (SpaceId(1), Generation(1));
        ControlRequest::Change(Change { space, generation, slab: SlabNo(slab), entry })
    }

    fn answer(control: &mut Control, request: &ControlRequest) -> ControlReply {
        let began = Instant::now();
        loop {
            match control(request) {
                ControlReply::Later => assert!(began.elapsed() < PATIENCE, "no answer"),
                reply => return reply,
            }
            std::thread::yield_now();
        }
    }

    /// Nobody who asks is ever held up; each answer is that of its own question, and none is given twice.
    #[test]
    fn who_asks_does_not_wait() {
        let (release, held) = mpsc::channel::<ControlReply>();
        let slow = move |requests: &[ControlRequest]| requests.iter().map(|_| held.recv().unwrap()).collect();
        let mut control = aside(Box::new(slow)).unwrap();
        let (one, other) = (request(1, 1), request(2, 1));
        for request in [&one, &other, &one, &other] {
            assert_eq!(control(request), ControlReply::Later);
        }
        release.send(ControlReply::Done).unwrap();
        assert_eq!(control(&other), ControlReply::Later);
        release.send(ControlReply::Fenced).unwrap();
        assert_eq!(answer(&mut control, &one), ControlReply::Done);
        assert_eq!(answer(&mut control, &other), ControlReply::Fenced);
        // The slab's next change, and one that the disk could not take: it is asked anew.
        let next = request(1, 2);
        assert_eq!(control(&next), ControlReply::Later);
        release.send(ControlReply::Later).unwrap();
        release.send(ControlReply::Done).unwrap();
        assert_eq!(answer(&mut control, &next), ControlReply::Done);
    }
}
