//! Pages on their way into a data stream: copies of the engine's become frames, in the order in which they come. Pages of zeros are
//! named. The others are compressed where that pays ([`packing`]), on the stream's own thread.

mod packer;
mod packing;

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use pagoda_core::bits::Run;
use pagoda_core::units::PAGE_SIZE;
use pagoda_move::map::PageRun;
use pagoda_move::units::{Rate, RoundNo};
use pagoda_move::wire::{Codec, Data, RunKind};
use pagoda_pager::handle::{Content, Copied};

use self::packer::Packer;
use self::packing::Sent;
use crate::moves::channel::{ChannelError, DataSender};

const PAGE: usize = PAGE_SIZE as usize;

/// What goes into a stream.
#[derive(Debug)]
pub enum Item {
    /// Pages may be compressed from now on. The stream may send so much, if that is limited.
    Compress {
        cap: Option<Rate>,
        /// The other host unpacks zstd, too, and not only LZ4.
        has_zstd: bool,
    },
    /// Copies. The destination has had nothing of this VM before if it `is_fresh`, so it has zeros.
    Pages {
        copied: Copied,
        is_fresh: bool,
    },
    RoundEnd(RoundNo),
}

/// What has gone into it: bytes of pages, those of them that were named only, and by how many bytes compression has made the others
/// smaller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gone {
    pub bytes: u64,
    pub zeros: u64,
    pub saved: u64,
}

impl Gone {
    /// Bytes of pages on the wire.
    #[cfg(test)]
    pub const fn wire(&self) -> u64 {
        self.bytes - self.zeros - self.saved
    }
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
    let mut packer = Packer::off();
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
            Item::Compress { cap, has_zstd } => packer.begin(cap, has_zstd),
            Item::RoundEnd(round) => {
                sender.send(&Data::RoundEnd { round })?;
                packer.note_gap();
            }
            Item::Pages { copied, is_fresh } => {
                report(send_pages(&copied, is_fresh, &mut packer, |data| sender.send(data))?);
            }
        }
    }
}

/// Gives the frames of some pages to `send`.
fn send_pages<E>(
    copied: &Copied,
    is_fresh: bool,
    packer: &mut Packer,
    mut send: impl FnMut(&Data<'_>) -> Result<(), E>,
) -> Result<Gone, E> {
    let pages = PageRun { chunk: copied.pages.chunk, run: copied.pages.run };
    let bytes = u64::from(pages.run.len) * PAGE_SIZE;
    let mut gone = Gone { bytes, ..Gone::default() };
    let content = match &copied.content {
        Content::Bytes(content) => content,
        Content::Zeros => {
            if !is_fresh {
                send(&Data::Run { pages, kind: RunKind::Zero })?;
            }
            return Ok(Gone { zeros: bytes, ..gone });
        }
        // Whoever orders copies does not hand it on.
        Content::Failed(why) => panic!("pages that could not be read: {why}"),
        Content::HandedOver | Content::Placed => panic!("pages of a tier that is handed over"),
    };
    let each: Vec<&[u8]> = content.chunks(PAGE).collect();
    assert_eq!((each.len(), content.len() % PAGE), (pages.run.len.into(), 0), "content of another size than its pages");
    let mut at = 0;
    for same in each.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let start = pages.run.start + at as u8;
        let run = PageRun { chunk: pages.chunk, run: Run { start, len: same.len() as u16 } };
        let content = &content[at * PAGE..(at + same.len()) * PAGE];
        if !is_zero(same[0]) {
            gone.saved += send_content(run, content, packer, &mut send)?;
        } else {
            gone.zeros += content.len() as u64;
            if !is_fresh {
                send(&Data::Run { pages: run, kind: RunKind::Zero })?;
            }
        }
        at += same.len();
    }
    Ok(gone)
}

/// Compressed if that pays. By how many bytes it is smaller then.
fn send_content<E>(
    pages: PageRun,
    content: &[u8],
    packer: &mut Packer,
    send: &mut impl FnMut(&Data<'_>) -> Result<(), E>,
) -> Result<u64, E> {
    let began = Instant::now();
    let packed = packer.pack(content);
    let packed_at = Instant::now();
    let (codec, bytes) = packed.unwrap_or((Codec::Raw, content));
    let wire = bytes.len() as u64;
    send(&Data::Run { pages, kind: RunKind::Content(codec, bytes) })?;
    let content = content.len() as u64;
    packer.note(Sent { content, wire, packing: packed_at - began, sending: packed_at.elapsed() });
    Ok(content - wire)
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
        let gone = send_pages(&Copied { pages, content }, is_fresh, &mut Packer::off(), |data| {
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
        assert_eq!(gone, Gone { bytes: 6 * page, zeros: 3 * page, saved: 0 });
        let (runs, gone) = sent(content([0, 7, 7, 7, 7, 0]), true);
        assert_eq!((runs, gone.zeros), (vec![(run(251, 4), 7)], 2 * page));
        assert_eq!(sent(content([1; 6]), true), (vec![(run(250, 6), 1)], Gone { bytes: 6 * page, zeros: 0, saved: 0 }));
        // One byte at its end counts.
        let mut last = vec![0; 6 * PAGE];
        last[6 * PAGE - 1] = 1;
        assert_eq!(sent(Content::Bytes(last), false).0, [(run(250, 5), 0), (run(255, 1), 0)]);
        assert_eq!(sent(Content::Zeros, false).0, [(run(250, 6), 0)]);
        assert_eq!(sent(Content::Zeros, true), (vec![], Gone { bytes: 6 * page, zeros: 6 * page, saved: 0 }));
    }

    #[test]
    fn pages_are_compressed_where_both_hosts_can_and_it_makes_them_smaller() {
        let mut chance = pagoda_core::chance::Chance::new(1);
        let noise: Vec<u8> = (0..PAGE * 32).map(|_| chance.within(0, 255) as u8).collect();
        let mut packer = Packer::off();
        let send = |packer: &mut Packer, content: Vec<u8>| {
            let len = (content.len() / PAGE) as u16;
            let copied =
                Copied { pages: Pages { chunk: CHUNK, run: Run { start: 0, len } }, content: Content::Bytes(content) };
            let mut codecs = Vec::new();
            let gone = send_pages(&copied, false, packer, |data| {
                let Data::Run { kind: RunKind::Content(codec, bytes), .. } = data else { panic!("{data:?}") };
                codecs.push((*codec, bytes.len() as u64));
                Ok::<_, std::convert::Infallible>(())
            });
            let gone = gone.unwrap();
            let [(codec, wire)] = codecs[..] else { panic!("{codecs:?}") };
            assert_eq!((gone.wire(), gone.zeros), (wire, 0));
            (codec, gone.saved)
        };
        let text = |pages: usize| (0..pages * PAGE).map(|at| (at / 7) as u8).collect::<Vec<u8>>();
        assert_eq!(send(&mut packer, text(32)), (Codec::Raw, 0));
        for (has_zstd, expected) in [(false, Codec::Lz4), (true, Codec::Zstd)] {
            packer.begin(None, has_zstd);
            for pages in [1, 3, 32] {
                let (codec, saved) = send(&mut packer, text(pages));
                assert!(codec == expected && saved > (pages * PAGE / 3) as u64, "{codec:?}, {saved}");
            }
            assert_eq!(send(&mut packer, noise[..PAGE].to_vec()), (Codec::Raw, 0));
            assert_eq!(send(&mut packer, noise.clone()), (Codec::Raw, 0));
        }
        // No byte sequence comes twice, but of each byte four bits say nothing: LZ4 cannot use that, and is not asked about it.
        let digits: Vec<u8> = noise.iter().map(|byte| byte & 15).collect();
        let (codec, saved) = send(&mut packer, digits.clone());
        assert!(codec == Codec::Zstd && saved > 32 * PAGE_SIZE / 3, "{codec:?}, {saved}");
        packer.begin(None, false);
        assert_eq!(send(&mut packer, digits), (Codec::Raw, 0));
    }
}
