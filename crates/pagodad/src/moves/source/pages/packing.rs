//! Whether compression pays on a stream: decided from what was measured, without I/O and without a clock.
//!
//! Raw, a byte of pages costs the thread that sends it what a byte on the wire costs. Compressed, it costs the time to compress it,
//! and of that only a part. The latter is measured while pages are compressed, and by a sample now and then while they are not. What a
//! byte on the wire costs depends on the link: as long as compressed bytes fill it, raw ones would take longer, and nothing has to be tried.
//! When they do not, some raw ones show what the link takes, less and less often.
//!
//! What is sent first, and first after a round's end, only fills buffers: it says nothing of the link.
//!
//! Of the two codecs zstd makes less of pages and takes several times as long as LZ4. So it is used while the thread waits for the link
//! anyway, and LZ4 otherwise. A stream begins with zstd, and learns on its first few MiB
//! whether there is time for it.

use std::time::Duration;

use pagoda_core::units::Bytes;
use pagoda_move::units::Rate;
use pagoda_move::wire::Codec;

/// What sockets and the network hold: Linux gives a TCP connection at most 4 MiB to send (`tcp_wmem`), unless its administrator
/// says otherwise.
const BUFFERS: u64 = 4 << 20;
/// Content by which the cost is judged: 16 copies of the engine, and some 30 ms at 1 Gbit/s.
const WINDOW: u64 = 4 << 20;
/// Content between two samples: one run of up to 256 KiB, so that sampling costs 3 % of what compression does.
const SAMPLE_EVERY: u64 = 8 << 20;
/// Content between two trials of a link that compressed pages do not fill: the least, and the most.
const TRIAL_EVERY_MIN: u64 = 32 << 20;
const TRIAL_EVERY_MAX: u64 = 512 << 20;
/// Compression pays if it takes at most so many tenths of the time: what is measured differs by as much from one window to the next.
const PAYS_TENTHS: u64 = 9;
/// zstd is left for LZ4 when the link is waited for less than a quarter of the time that it takes...
const ZSTD_WAITS_PART: u64 = 4;
/// ... and LZ4 for zstd when it is waited for three times as long as LZ4 takes: zstd takes about as much more.
const LZ4_WAITS_TIMES: u64 = 3;
/// In which costs are counted: a nanosecond a byte is a million of them.
const MIB: u64 = 1 << 20;

/// Nanoseconds for a MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost(u64);

impl Cost {
    fn of(span: Duration, bytes: u64) -> Cost {
        let nanos = span.as_nanos() * u128::from(MIB) / u128::from(bytes.max(1));
        Cost(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn plus(self, other: Cost) -> Cost {
        Cost(self.0.saturating_add(other.0))
    }

    fn times(self, part: u64, of: u64) -> Cost {
        let nanos = u128::from(self.0) * u128::from(part) / u128::from(of.max(1));
        Cost(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Compression at this cost is better than none at that cost.
    fn pays(self, raw: Cost) -> bool {
        u128::from(self.0) * 10 < u128::from(raw.0) * u128::from(PAYS_TENTHS)
    }
}

/// What became of a run, or of several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    pub content: u64,
    pub wire: u64,
    pub packing: Duration,
    pub sending: Duration,
}

impl Sent {
    fn add(&mut self, other: Sent) {
        self.content += other.content;
        self.wire += other.wire;
        self.packing += other.packing;
        self.sending += other.sending;
    }

    /// What it costs to compress a byte of content.
    fn pack_cost(&self) -> Cost {
        Cost::of(self.packing, self.content)
    }

    /// To send a byte of content compressed, if a byte on the wire costs so much.
    fn packed_cost(&self, wire: Cost) -> Cost {
        self.pack_cost().plus(wire.times(self.wire, self.content))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Compress,
    Raw,
    /// Raw for a while, after compression at this cost.
    Trial(Cost),
}

/// What one stream has measured, and what it does by that.
#[derive(Clone, Debug)]
pub struct Packing {
    way: Way,
    /// What compresses, when something is compressed.
    codec: Codec,
    /// The other host unpacks zstd.
    has_zstd: bool,
    until_zstd: u64,
    zstd_every: u64,
    /// What a byte on the wire costs at least, by a cap on bandwidth.
    floor: Cost,
    /// Bytes on the wire that only fill buffers.
    settling: u64,
    window: Sent,
    /// Samples while pages go raw: the newest counts as much as all before.
    samples: Option<Sent>,
    until_sample: u64,
    until_trial: u64,
    trial_every: u64,
}

impl Packing {
    /// `cap`: what the stream may send, if that is limited. `has_zstd`: the other host unpacks it, and not only LZ4.
    pub fn new(cap: Option<Rate>, has_zstd: bool) -> Packing {
        Packing {
            way: Way::Compress,
            codec: if has_zstd { Codec::Zstd } else { Codec::Lz4 },
            has_zstd,
            until_zstd: 0,
            zstd_every: TRIAL_EVERY_MIN,
            floor: cap.and_then(|cap| cap.time_ceil(Bytes(MIB))).map_or(Cost(0), |span| Cost::of(span, MIB)),
            settling: BUFFERS,
            window: Sent::default(),
            samples: None,
            until_sample: 0,
            until_trial: 0,
            trial_every: TRIAL_EVERY_MIN,
        }
    }

    /// How the next run is to be compressed, if it can be.
    pub fn codec(&self) -> Codec {
        let compresses = match self.way {
            Way::Compress => true,
            Way::Raw => self.until_sample == 0,
            Way::Trial(_) => false,
        };
        if compresses { self.codec } else { Codec::Raw }
    }

    /// What became of that run.
    pub fn note(&mut self, sent: Sent) {
        if self.way == Way::Raw {
            self.note_sample(sent);
        }
        if self.settling > 0 {
            self.settling = self.settling.saturating_sub(sent.wire.max(sent.content / 2));
            return;
        }
        self.window.add(sent);
        if self.window.content < WINDOW || self.window.wire == 0 {
            return;
        }
        let window = std::mem::take(&mut self.window);
        let codec = self.codec;
        let wire = Cost::of(window.sending, window.wire).max(self.floor);
        let way = match self.way {
            Way::Compress => self.after_compression(window, wire),
            Way::Trial(packed) => self.after_trial(packed, wire),
            Way::Raw => self.after_raw(window, wire),
        };
        if way == Way::Raw && self.has_zstd {
            // It is sampled by what is tried first then.
            self.codec = Codec::Lz4;
        }
        if way != self.way || codec != self.codec {
            (self.way, self.settling) = (way, BUFFERS);
            (self.samples, self.until_sample) = (None, 0);
        }
    }

    /// Nothing comes for a while: buffers become empty.
    pub fn note_gap(&mut self) {
        self.settling = BUFFERS;
        self.window = Sent::default();
    }

    fn after_compression(&mut self, window: Sent, wire: Cost) -> Way {
        let packed = window.packed_cost(wire);
        // If the link was full all the time. It cannot be slower than that.
        let raw_max = packed.times(window.content, window.wire);
        if !packed.pays(raw_max) {
            return Way::Raw;
        }
        let waits = wire.times(window.wire, window.content);
        if self.choose_codec(window, waits) == Codec::Zstd || waits >= window.pack_cost() {
            // Most of the time the link is waited for.
            self.restart_trials();
            return Way::Compress;
        }
        if self.is_trial_due(window) { Way::Trial(packed) } else { Way::Compress }
    }

    /// zstd while there is time for it: the link is waited for at this cost.
    fn choose_codec(&mut self, window: Sent, waits: Cost) -> Codec {
        let pack = window.pack_cost();
        self.until_zstd = self.until_zstd.saturating_sub(window.content);
        match self.codec {
            Codec::Zstd if waits.0.saturating_mul(ZSTD_WAITS_PART) < pack.0 => {
                self.codec = Codec::Lz4;
                self.until_zstd = self.zstd_every;
                self.zstd_every = (self.zstd_every * 2).min(TRIAL_EVERY_MAX);
            }
            Codec::Lz4
                if self.has_zstd && self.until_zstd == 0 && waits.0 >= pack.0.saturating_mul(LZ4_WAITS_TIMES) =>
            {
                self.codec = Codec::Zstd;
            }
            _ => {}
        }
        self.codec
    }

    /// The link takes raw bytes at this cost.
    fn after_trial(&mut self, packed: Cost, wire: Cost) -> Way {
        self.until_trial = self.trial_every;
        self.trial_every = (self.trial_every * 2).min(TRIAL_EVERY_MAX);
        if packed.pays(wire) { Way::Compress } else { Way::Raw }
    }

    fn after_raw(&mut self, window: Sent, wire: Cost) -> Way {
        let is_trial_due = self.is_trial_due(window);
        let Some(samples) = self.samples else { return Way::Raw };
        if samples.packed_cost(wire).pays(wire) {
            self.restart_trials();
            return Way::Compress;
        }
        // If compression goes on while the link takes what came before. Whether it does is seen by trying it.
        let packed_min = samples.pack_cost().max(wire.times(samples.wire, samples.content));
        if packed_min.pays(wire) && is_trial_due { Way::Compress } else { Way::Raw }
    }

    /// Compressed and raw pages are to be compared once more.
    fn is_trial_due(&mut self, window: Sent) -> bool {
        self.until_trial = self.until_trial.saturating_sub(window.content);
        self.until_trial == 0
    }

    fn note_sample(&mut self, sent: Sent) {
        if self.until_sample > 0 {
            self.until_sample = self.until_sample.saturating_sub(sent.content);
            return;
        }
        self.until_sample = SAMPLE_EVERY;
        let mut samples = sent;
        if let Some(Sent { content, wire, packing, sending }) = self.samples {
            samples.add(Sent { content: content / 2, wire: wire / 2, packing: packing / 2, sending: sending / 2 });
        }
        self.samples = Some(samples);
    }

    fn restart_trials(&mut self) {
        (self.trial_every, self.until_trial) = (TRIAL_EVERY_MIN, TRIAL_EVERY_MIN);
    }
}

#[cfg(test)]
mod tests;
