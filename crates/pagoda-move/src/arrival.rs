//! What has arrived of a VM that does not run here yet: rounds of pages, the map of what will be missing, the device state.
//!
//! The pages themselves go to their places elsewhere. This module says which of them count, when a round is acknowledged, and
//! when all is there. Input comes from the other host: what no source sends is refused by name.

use pagoda_core::units::{Bytes, PageCount};

use crate::map::{PageMap, PageRun};
use crate::units::{AttemptId, RoundNo};
use crate::wire::Malformed;
use crate::wire::control::MapPart;
use crate::wire::data::stream_of;
use crate::wire::limits::{MAP_CHUNKS_MAX, STATE_MAX, STREAMS_MAX};

#[derive(Clone, Debug)]
pub struct Arrival {
    attempt: AttemptId,
    /// By stream: the round that comes by it, and whether one has ended by it since it was opened. None until it is opened for this attempt on this connection, since it may still
    /// bring what an earlier attempt has sent.
    streams: Vec<Option<(RoundNo, bool)>>,
    /// Rounds that are whole, counted from the first.
    rounds: u32,
    missing: PageMap,
    map_is_whole: bool,
    /// Of a VM whose remote tier is handed over: the pages that are there, and whether all of these have been named.
    remote: Option<(PageMap, bool)>,
    state: Vec<u8>,
    end: Option<(Bytes, RoundNo)>,
}

impl Arrival {
    /// Nothing yet, of a VM of so many pages.
    pub fn new(attempt: AttemptId, pages: PageCount, streams: u16) -> Arrival {
        assert!((1..=STREAMS_MAX).contains(&streams), "1 to 16 streams");
        Arrival {
            attempt,
            streams: vec![None; streams.into()],
            rounds: 0,
            missing: PageMap::empty(pages),
            map_is_whole: false,
            remote: None,
            state: Vec::new(),
            end: None,
        }
    }

    /// Its remote tier is handed over: the map of what is there belongs to what it needs to run.
    #[must_use]
    pub fn with_remote_tier(mut self) -> Arrival {
        self.remote = Some((PageMap::empty(self.missing.pages()), false));
        self
    }

    /// A later connection: its streams are not open, and map and state are sent again.
    pub fn connect(&mut self) {
        self.streams.fill(None);
        self.restart_map();
    }

    /// A stream is opened, for some attempt.
    ///
    /// # Errors
    /// There is no such stream.
    pub fn open(&mut self, attempt: AttemptId, stream: u16, round: RoundNo) -> Result<(), Malformed> {
        let place = self.streams.get_mut(usize::from(stream)).ok_or(Malformed("stream"))?;
        *place = (attempt == self.attempt).then_some((round, false));
        Ok(())
    }

    /// What comes by this stream is of the attempt: it was opened for it on this connection.
    pub fn is_open(&self, stream: u16) -> bool {
        self.streams.get(usize::from(stream)).is_some_and(Option::is_some)
    }

    /// Whether a run that has come by this stream is one of the attempt's.
    ///
    /// # Errors
    /// It is, and leaves the VM or does not belong to this stream.
    pub fn counts(&self, stream: u16, run: PageRun) -> Result<bool, Malformed> {
        if self.streams.get(usize::from(stream)).is_none_or(Option::is_none) {
            return Ok(false);
        }
        if run.first().0 + run.count().0 > self.missing.pages().0 {
            return Err(Malformed("pages beyond the VM's end"));
        }
        if stream_of(run.chunk, self.streams.len() as u16) != stream {
            return Err(Malformed("pages by another stream than theirs"));
        }
        Ok(true)
    }

    /// A round has ended by this stream, and every page of it that has come by it is in its place. Gives the round that is whole
    /// now, which is acknowledged.
    ///
    /// # Errors
    /// Another round comes by this stream.
    pub fn end_round(&mut self, stream: u16, round: RoundNo) -> Result<Option<RoundNo>, Malformed> {
        let Some(Some((coming, has_ended))) = self.streams.get_mut(usize::from(stream)) else { return Ok(None) };
        if *coming != round || round.0 == u32::MAX {
            return Err(Malformed("round"));
        }
        (*coming, *has_ended) = (round.next(), true);
        let whole_by = |stream: &Option<(RoundNo, bool)>| match stream {
            Some((coming, true)) => coming.0,
            _ => 0,
        };
        let whole = self.streams.iter().map(whole_by).min().unwrap_or(0);
        if whole <= self.rounds {
            return Ok(None);
        }
        self.rounds = whole;
        Ok(Some(RoundNo(whole - 1)))
    }

    /// A part of the map of what will be missing. The first part after a whole one begins another.
    ///
    /// # Errors
    /// It has pages that the VM does not have.
    pub fn missing(&mut self, part: &MapPart) -> Result<(), Malformed> {
        if self.map_is_whole {
            self.restart_map();
        }
        add_part(&mut self.missing, part)?;
        self.map_is_whole = part.last;
        Ok(())
    }

    /// A part of the map of what is in the remote tier. The first part after a whole one begins another.
    ///
    /// # Errors
    /// No tier is handed over; it has pages that the VM does not have.
    pub fn remote_map(&mut self, part: &MapPart) -> Result<(), Malformed> {
        let (map, is_whole) = self.remote.as_mut().ok_or(Malformed("a remote tier that was not offered"))?;
        if *is_whole {
            map.take();
        }
        add_part(map, part)?;
        *is_whole = part.last;
        Ok(())
    }

    /// What is in the remote tier, wherever else it was before; nothing if none is handed over.
    pub fn remote(&self) -> Option<&PageMap> {
        self.remote.as_ref().map(|(map, _)| map)
    }

    /// A part of the device state. What does not follow the part before is not taken in.
    ///
    /// # Errors
    /// The state is longer than any may be.
    pub fn state(&mut self, offset: Bytes, bytes: &[u8]) -> Result<(), Malformed> {
        let len = self.state.len() as u64;
        if len + bytes.len() as u64 > STATE_MAX.0 {
            return Err(Malformed("size of the state"));
        }
        if offset.0 == len {
            self.state.extend_from_slice(bytes);
        }
        Ok(())
    }

    /// The state ends here. With all rounds until this one, and with the map, it is all that the VM needs.
    pub fn end_state(&mut self, total: Bytes, round: RoundNo) {
        self.end = Some((total, round));
    }

    /// The state, and what will be missing, if all is here.
    pub fn all(&self) -> Option<(&[u8], &PageMap)> {
        let (total, round) = self.end?;
        let has_maps = self.map_is_whole && self.remote.as_ref().is_none_or(|(_, is_whole)| *is_whole);
        let is_here = has_maps && total.0 == self.state.len() as u64 && self.rounds > round.0;
        is_here.then_some((&self.state[..], &self.missing))
    }

    fn restart_map(&mut self) {
        self.missing.take();
        if let Some((map, is_whole)) = &mut self.remote {
            map.take();
            *is_whole = false;
        }
        self.state.clear();
        (self.map_is_whole, self.end) = (false, None);
    }
}

/// Adds a part of a map that has come from the other host.
///
/// # Errors
/// It has pages that the VM does not have.
pub fn add_part(map: &mut PageMap, part: &MapPart) -> Result<(), Malformed> {
    let chunks = map.pages().chunks_ceil().0;
    for (chunk, pages) in &part.chunks {
        if chunk.0 >= chunks || !map.valid(*chunk).contains_all(*pages) {
            return Err(Malformed("pages beyond the VM's end"));
        }
        map.insert_in(*chunk, *pages);
    }
    Ok(())
}

/// A map in as many frames as it needs: at least one, and only the last one says that it is.
pub fn map_parts(map: &PageMap) -> Vec<MapPart> {
    let filled: Vec<_> = map.filled().collect();
    let mut parts: Vec<MapPart> =
        filled.chunks(MAP_CHUNKS_MAX).map(|chunks| MapPart { chunks: chunks.to_vec(), last: false }).collect();
    match parts.last_mut() {
        Some(part) => part.last = true,
        None => parts.push(MapPart { chunks: Vec::new(), last: true }),
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::bits::{PageSet, Run};
    use pagoda_core::units::ChunkIdx;

    const ATTEMPT: AttemptId = AttemptId(9);

    fn arrival() -> Arrival {
        let mut arrival = Arrival::new(ATTEMPT, PageCount(300), 2);
        arrival.open(ATTEMPT, 0, RoundNo(0)).unwrap();
        arrival.open(ATTEMPT, 1, RoundNo(0)).unwrap();
        arrival
    }

    fn part(chunk: u32, pages: PageSet, last: bool) -> MapPart {
        MapPart { chunks: vec![(ChunkIdx(chunk), pages)], last }
    }

    fn run(chunk: u32, start: u8, len: u16) -> PageRun {
        PageRun { chunk: ChunkIdx(chunk), run: Run { start, len } }
    }

    #[test]
    fn a_round_is_whole_when_it_has_ended_by_every_stream_of_this_attempt() {
        let mut arrival = arrival();
        assert_eq!(arrival.end_round(0, RoundNo(0)), Ok(None));
        assert_eq!(arrival.end_round(0, RoundNo(1)), Ok(None));
        assert_eq!(arrival.end_round(1, RoundNo(0)), Ok(Some(RoundNo(0))));
        assert_eq!(arrival.end_round(1, RoundNo(5)), Err(Malformed("round")));
        // A stream that an earlier attempt has opened says nothing.
        arrival.open(AttemptId(8), 1, RoundNo(7)).unwrap();
        assert_eq!(arrival.end_round(1, RoundNo(7)), Ok(None));
        assert_eq!(arrival.end_round(0, RoundNo(2)), Ok(None));
        assert_eq!(arrival.counts(1, run(1, 0, 1)), Ok(false));
        // After a cut the source goes on with a later round.
        arrival.connect();
        arrival.open(ATTEMPT, 0, RoundNo(4)).unwrap();
        arrival.open(ATTEMPT, 1, RoundNo(4)).unwrap();
        assert_eq!(arrival.end_round(1, RoundNo(4)), Ok(None));
        assert_eq!(arrival.end_round(0, RoundNo(4)), Ok(Some(RoundNo(4))));
    }

    #[test]
    fn all_is_here_with_the_rounds_the_map_and_the_whole_state() {
        let mut arrival = arrival();
        arrival.missing(&part(0, PageSet::single(3), false)).unwrap();
        arrival.missing(&part(1, PageSet::single(4), true)).unwrap();
        arrival.state(Bytes(0), &[1, 2]).unwrap();
        arrival.state(Bytes(7), &[9]).unwrap();
        arrival.state(Bytes(2), &[3]).unwrap();
        arrival.end_state(Bytes(3), RoundNo(0));
        assert!(arrival.all().is_none());
        arrival.end_round(0, RoundNo(0)).unwrap();
        arrival.end_round(1, RoundNo(0)).unwrap();
        let (state, missing) = arrival.all().expect("all is here");
        assert_eq!((state, missing.count()), (&[1, 2, 3][..], PageCount(2)));
        // Sent again after a cut: neither twice nor half.
        arrival.connect();
        assert!(arrival.all().is_none());
        arrival.missing(&MapPart { chunks: Vec::new(), last: true }).unwrap();
        arrival.state(Bytes(0), &[7]).unwrap();
        arrival.end_state(Bytes(1), RoundNo(0));
        assert_eq!(
            arrival.all().map(|(state, missing)| (state.to_vec(), missing.count())),
            Some((vec![7], PageCount(0)))
        );
    }

    #[test]
    fn a_remote_tier_that_is_handed_over_comes_with_its_map() {
        let mut arrival = arrival().with_remote_tier();
        arrival.missing(&MapPart { chunks: Vec::new(), last: true }).unwrap();
        arrival.remote_map(&part(0, PageSet::single(3), false)).unwrap();
        for stream in [0, 1] {
            arrival.end_round(stream, RoundNo(0)).unwrap();
        }
        arrival.end_state(Bytes(0), RoundNo(0));
        assert!(arrival.all().is_none(), "half of its map");
        arrival.remote_map(&part(1, PageSet::single(4), true)).unwrap();
        assert!(arrival.all().is_some());
        assert_eq!(arrival.remote().map(PageMap::count), Some(PageCount(2)));
        assert!(arrival.remote_map(&part(1, PageSet::single(44), true)).is_err());
        // Sent again after a cut.
        arrival.connect();
        arrival.missing(&MapPart { chunks: Vec::new(), last: true }).unwrap();
        arrival.end_state(Bytes(0), RoundNo(0));
        assert!(arrival.all().is_none());
        arrival.remote_map(&MapPart { chunks: Vec::new(), last: true }).unwrap();
        assert!(arrival.all().is_some());
        assert_eq!(arrival.remote().map(PageMap::count), Some(PageCount(0)));
    }

    #[test]
    fn what_no_source_sends_is_refused() {
        let mut arrival = arrival();
        assert_eq!(arrival.open(ATTEMPT, 2, RoundNo(0)), Err(Malformed("stream")));
        assert_eq!(arrival.counts(1, run(1, 0, 44)), Ok(true));
        assert_eq!(arrival.counts(1, run(1, 0, 45)), Err(Malformed("pages beyond the VM's end")));
        assert_eq!(arrival.counts(0, run(1, 0, 1)), Err(Malformed("pages by another stream than theirs")));
        assert!(arrival.missing(&part(1, PageSet::single(44), true)).is_err());
        assert!(arrival.missing(&part(1 << 20, PageSet::single(0), true)).is_err());
        assert!(arrival.remote_map(&part(0, PageSet::single(0), true)).is_err(), "not offered");
        let much = vec![0; STATE_MAX.as_usize()];
        arrival.state(Bytes(0), &much).unwrap();
        assert_eq!(arrival.state(STATE_MAX, &[0]), Err(Malformed("size of the state")));
    }

    #[test]
    fn a_map_goes_in_as_many_frames_as_it_needs() {
        let last = |parts: &[MapPart]| parts.iter().map(|part| (part.chunks.len(), part.last)).collect::<Vec<_>>();
        assert_eq!(last(&map_parts(&PageMap::empty(PageCount(512)))), [(0, true)]);
        let of = |chunks: u64| map_parts(&PageMap::full(PageCount(chunks * 256)));
        assert_eq!(last(&of(1024)), [(1024, true)]);
        assert_eq!(last(&of(1025)), [(1024, false), (1, true)]);
    }
}
