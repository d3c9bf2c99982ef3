//! A control plane that takes its time is asked on a thread of its own. This is what stays with the driver: it never waits, and
//! asking needs no memory.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

use rmap::control::{ControlReply, ControlRequest};
use rmap::units::{SlabNo, SpaceId};

/// Requests on their way to the thread: the slabs of a disk of 64 GiB, all of which may have had a copy at a server that died. One
/// more is asked again, as if there were no answer yet.
pub const REQUESTS_MAX: usize = 1024;

#[derive(Debug)]
struct Asked {
    request: ControlRequest,
    reply: Option<ControlReply>,
}

/// Requests of a client's driver, and their answers as they come.
#[derive(Debug)]
pub struct Asker {
    requests: SyncSender<ControlRequest>,
    replies: Receiver<(ControlRequest, ControlReply)>,
    /// At most one a slab and one a space, as the client asks.
    asked: HashMap<(SpaceId, Option<SlabNo>), Asked>,
}

/// What the thread has: requests, until the driver is gone, and where their answers go.
pub type Answerer = (Receiver<ControlRequest>, Sender<(ControlRequest, ControlReply)>);

/// The two ends of a new connection: the driver's, and that of the thread which answers.
pub fn pair() -> (Asker, Answerer) {
    let (requests, inbox) = mpsc::sync_channel(REQUESTS_MAX);
    let (outbox, replies) = mpsc::channel();
    // Twice the room, so that the table never grows for what was in it before.
    (Asker { requests, replies, asked: HashMap::with_capacity(2 * REQUESTS_MAX) }, (inbox, outbox))
}

impl Asker {
    /// The answer to a request, if there is one; if not, it is on its way.
    pub fn ask(&mut self, request: &ControlRequest) -> ControlReply {
        for (request, reply) in self.replies.try_iter() {
            if let Some(asked) = self.asked.get_mut(&request.subject()).filter(|asked| asked.request == request) {
                asked.reply = Some(reply);
            }
        }
        let slot = request.subject();
        if let Some(asked) = self.asked.get_mut(&slot).filter(|asked| asked.request == *request) {
            let Some(reply) = asked.reply.take() else { return ControlReply::Later };
            self.asked.remove(&slot);
            return reply;
        }
        // Should the thread have ended, there is never an answer.
        if self.requests.try_send(request.clone()).is_ok() {
            self.asked.insert(slot, Asked { request: request.clone(), reply: None });
        }
        ControlReply::Later
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the thread has no room for is not lost: it is asked again.
    #[test]
    fn more_than_are_on_their_way_wait() {
        let (mut asker, (inbox, outbox)) = pair();
        let look = |space: usize| ControlRequest::Look { space: SpaceId(space as u64) };
        let mut ask = |spaces: std::ops::Range<usize>| spaces.map(|space| asker.ask(&look(space))).collect::<Vec<_>>();
        let all = |replies: &[ControlReply], reply: ControlReply| replies.iter().all(|one| *one == reply);
        let answer_all = |expected: usize| {
            let asked: Vec<ControlRequest> = inbox.try_iter().collect();
            assert_eq!(asked.len(), expected);
            asked.into_iter().for_each(|request| outbox.send((request, ControlReply::Gone)).unwrap());
        };
        assert!(all(&ask(0..REQUESTS_MAX + 3), ControlReply::Later));
        answer_all(REQUESTS_MAX);
        let replies = ask(0..REQUESTS_MAX + 3);
        let (first, others) = replies.split_at(REQUESTS_MAX);
        assert!(all(first, ControlReply::Gone) && all(others, ControlReply::Later));
        answer_all(3);
        assert!(all(&ask(REQUESTS_MAX..REQUESTS_MAX + 3), ControlReply::Gone));
    }
}
