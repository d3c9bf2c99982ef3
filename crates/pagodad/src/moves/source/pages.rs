//! Pages on their way into a data stream: copies of the engine's become frames, in the order in which they come.

use std::sync::mpsc::{Receiver, TryRecvError};

use pagoda_core::bits::Run;
use pagoda_core::units::PAGE_SIZE;
use pagoda_move::map::PageRun;
use pagoda_move::units::RoundNo;
use pagoda_move::wire::{Codec, Data, RunKind};
use pagoda_pager::handle::{Content, Copied};

use crate::moves::channel::{ChannelError, DataSender};

const PAGE: usize = PAGE_SIZE as usize;

/// What goes into a stream.
#[derive(Debug)]
pub enum Item {
    /// Copies. The destination has had nothing of this VM before if it `is_fresh`, so it has zeros.
    Pages {
        copied: Copied,
        is_fresh: bool,
    },
    RoundEnd(RoundNo),
}

/// What has gone into it: bytes of pages, and those of them that were named only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gone {
    pub bytes: u64,
    pub spared: u64,
}

/// Sends until nobody gives it anything more.
///
/// # Errors
/// The stream has ended.
pub fn send_all(
    mut sender: DataSender,
    items: &Receiver<Item>,
    mut report: impl FnMut(Gone),
) -> Result<(), ChannelError> {
    loop {
        let item = match items.try_recv() {
            Ok(item) => item,
            Err(TryRecvError::Disconnected) => return sender.flush(),
            Err(TryRecvError::Empty) => {
                sender.flush()?;
                match items.recv() {
                    Ok(item) => item,
                    Err(_) => return Ok(()),
                }
            }
        };
        match item {
            Item::RoundEnd(round) => sender.send(&Data::RoundEnd { round })?,
            Item::Pages { copied, is_fresh } => report(send_pages(&copied, is_fresh, |data| sender.send(data))?),
        }
    }
}

/// Gives the frames of some pages to `send`.
fn send_pages<E>(copied: &Copied, is_fresh: bool, mut send: impl FnMut(&Data<'_>) -> Result<(), E>) -> Result<Gone, E> {
    let pages = PageRun { chunk: copied.pages.chunk, run: copied.pages.run };
    let bytes = u64::from(pages.run.len) * PAGE_SIZE;
    let mut gone = Gone { bytes, spared: 0 };
    let content = match &copied.content {
        Content::Bytes(content) => content,
        Content::Zeros => {
            if !is_fresh {
                send(&Data::Run { pages, kind: RunKind::Zero })?;
            }
            return Ok(Gone { bytes, spared: bytes });
        }
        // Whoever orders copies does not hand it on.
        Content::Failed(why) => panic!("pages that could not be read: {why}"),
    };
    let each: Vec<&[u8]> = content.chunks(PAGE).collect();
    assert_eq!((each.len(), content.len() % PAGE), (pages.run.len.into(), 0), "content of another size than its pages");
    let mut at = 0;
    for same in each.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let start = pages.run.start + at as u8;
        let run = PageRun { chunk: pages.chunk, run: Run { start, len: same.len() as u16 } };
        let content = &content[at * PAGE..(at + same.len()) * PAGE];
        if !is_zero(same[0]) {
            send(&Data::Run { pages: run, kind: RunKind::Content(Codec::Raw, content) })?;
        } else {
            gone.spared += content.len() as u64;
            if !is_fresh {
                send(&Data::Run { pages: run, kind: RunKind::Zero })?;
            }
        }
        at += same.len();
    }
    Ok(gone)
}

fn is_zero(page: &[u8]) -> bool {
    page == [0; PAGE]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::fault::Pages;
    use pagoda_core::units::ChunkIdx;

    const CHUNK: ChunkIdx = ChunkIdx(3);

    fn sent(content: Content, is_fresh: bool) -> (Vec<(Run, u8)>, Gone) {
        let pages = Pages { chunk: CHUNK, run: Run { start: 250, len: 6 } };
        let mut runs = Vec::new();
        let gone = send_pages(&Copied { pages, content }, is_fresh, |data| {
            let Data::Run { pages, kind } = data else { panic!("{data:?}") };
            assert_eq!(pages.chunk, CHUNK);
            runs.push(match kind {
                RunKind::Zero => (pages.run, 0),
                RunKind::Content(Codec::Raw, bytes) => {
                    assert_eq!(bytes.len(), usize::from(pages.run.len) * PAGE);
                    (pages.run, bytes[0])
                }
                other => panic!("{other:?}"),
            });
            Ok::<_, std::convert::Infallible>(())
        });
        (runs, gone.unwrap())
    }

    #[test]
    fn pages_of_zeros_are_named() {
        let run = |start, len| Run { start, len };
        let content = |pages: [u8; 6]| Content::Bytes(pages.iter().flat_map(|byte| vec![*byte; PAGE]).collect());
        let page = PAGE_SIZE;
        let (runs, gone) = sent(content([7, 7, 0, 0, 0, 7]), false);
        assert_eq!(runs, [(run(250, 2), 7), (run(252, 3), 0), (run(255, 1), 7)]);
        assert_eq!(gone, Gone { bytes: 6 * page, spared: 3 * page });
        let (runs, gone) = sent(content([0, 7, 7, 7, 7, 0]), true);
        assert_eq!((runs, gone.spared), (vec![(run(251, 4), 7)], 2 * page));
        assert_eq!(sent(content([1; 6]), true), (vec![(run(250, 6), 1)], Gone { bytes: 6 * page, spared: 0 }));
        // One byte at its end counts.
        let mut last = vec![0; 6 * PAGE];
        last[6 * PAGE - 1] = 1;
        assert_eq!(sent(Content::Bytes(last), false).0, [(run(250, 5), 0), (run(255, 1), 0)]);
        assert_eq!(sent(Content::Zeros, false).0, [(run(250, 6), 0)]);
        assert_eq!(sent(Content::Zeros, true), (vec![], Gone { bytes: 6 * page, spared: 6 * page }));
    }
}
