//! What is measured of one way in one round, with a guest of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_guest::lines::Line;
use testkit::results::report::{NO_VALUE, median};

use super::client::{self, Digest};
use super::machine::{Delivery, Machine, OUT, Product, SPACE_MIB, VM};
use super::memory::Peak;
use super::network::Network;
use super::way::Way;
use crate::Setup;
use crate::balloon::guest::Start;

/// A link that a sender does not fill with the whole of a CPU.
pub const GIGABIT: &str = "1gbit";
/// A client's link on which a job's output needs about as long as the job.
const SLOW: &str = "50mbit";
pub const SLOW_TEXT: &str = "a link of 50 Mbit/s";
/// What gzip reads: libraries of the image. Too little of it, and timing is all that is measured.
const INPUT: &str = "cat /lib/x86_64-linux-gnu/* 2> /dev/null | dd of=/tmp/input bs=64k iflag=fullblock count=";
const INPUT_MIB: u64 = 24;
/// A film for the transcoder, made by the transcoder. It has noise, as one from a camera has.
const FILM: &str = "ffmpeg -v error -f lavfi -i testsrc2=size=640x360:rate=25,noise=alls=20:allf=t -threads 1 -c:v mpeg4 -q:v 2 -y -t ";
const FILM_FILE: &str = "/tmp/film.avi";
const FILM_SECONDS: f64 = 8.0;
const GZIP: &str = "gzip -n -1 < /tmp/input >";
/// Into what editors work on, each picture by itself, and what can be sent while it grows: a transport stream is written from its
/// beginning to its end.
const TRANSCODE: &str =
    "ffmpeg -v error -i /tmp/film.avi -threads 1 -c:v mpeg2video -g 1 -q:v 2 -bitexact -f mpegts -y";
/// Of a guest of 1 GiB, whose programs and libraries are in its memory too: together more than half of that.
const COLD_MIB: u64 = 384;
const COLD_FILE: &str = "/cold/file";
/// In a round; an even number, so that the space is the same again.
const RESIZES: usize = 10;
/// What is published and served while a job runs.
const SERVED_MIB: u64 = 48;

/// What may be measured of a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Delivery,
    Beside,
    Served,
    Gzip,
    Ffmpeg,
    Memory,
    Paged,
    Resize,
}

impl Part {
    pub const ALL: [Part; 8] =
        [Self::Delivery, Self::Beside, Self::Served, Self::Gzip, Self::Ffmpeg, Self::Memory, Self::Resize, Self::Paged];

    /// As `--only` has it.
    fn text(self) -> &'static str {
        match self {
            Self::Delivery => "delivery",
            Self::Beside => "beside",
            Self::Served => "served",
            Self::Gzip => "gzip",
            Self::Ffmpeg => "ffmpeg",
            Self::Memory => "memory",
            Self::Paged => "paged",
            Self::Resize => "resize",
        }
    }

    /// Whether it is asked for, and there is a row for it.
    pub fn is_of(self, way: Way, setup: &Setup) -> bool {
        let has_row = match self {
            Self::Delivery => way != Way::Paged,
            Self::Beside | Self::Served | Self::Gzip | Self::Ffmpeg => matches!(way, Way::Outbox | Way::Staged),
            Self::Memory => matches!(way, Way::Outbox | Way::Shared),
            Self::Resize => way == Way::Outbox,
            Self::Paged => way.has_outbox(),
        };
        has_row && setup.wants(self.text())
    }
}

/// How much is delivered and computed.
#[derive(Debug, Clone, Copy)]
pub struct Amount {
    pub stream_mib: u64,
    /// How often the job compresses its input.
    job_passes: u64,
    input_mib: u64,
    film_seconds: f64,
}

impl Amount {
    pub fn of(setup: &Setup) -> Amount {
        if setup.quick {
            return Amount {
                stream_mib: 96,
                job_passes: 1,
                input_mib: INPUT_MIB / 2,
                film_seconds: FILM_SECONDS / 4.0,
            };
        }
        Amount { stream_mib: 384, job_passes: 4, input_mib: INPUT_MIB, film_seconds: FILM_SECONDS }
    }

    /// The job that only computes.
    fn job(self) -> String {
        let passes: Vec<String> = (0..self.job_passes).map(|pass| pass.to_string()).collect();
        format!("for i in {}; do gzip < /tmp/input > /dev/null; done", passes.join(" "))
    }
}

/// One round of one way. What was not measured has no value.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub delivery: Delivery,
    pub beside: Delivery,
    /// The job that computes: beside a stream that is written and delivered, beside one that is served, and alone.
    pub beside_job_s: f64,
    pub served_job_s: f64,
    pub alone_job_s: f64,
    /// How much was served meanwhile.
    pub served_mib_per_s: f64,
    pub gzip: Delivery,
    pub slow_gzip: Delivery,
    pub ffmpeg: Delivery,
    pub slow_ffmpeg: Delivery,
    pub memory: Peak,
    /// A stream, and what was written into the guest's memory before that, which has left DRAM where the VM is paged.
    pub paged: Delivery,
    pub cold: Delivery,
    /// How much had left DRAM before the stream.
    pub out_mib: f64,
    pub resize_ms: f64,
    /// Between two looks of the guest's at its space.
    pub look_ms: f64,
}

const NO_DELIVERY: Delivery =
    Delivery { seconds: NO_VALUE, first_byte_s: NO_VALUE, cpu_s: NO_VALUE, client_cpu_s: NO_VALUE, bytes: 0 };

const NOTHING: Measured = Measured {
    delivery: NO_DELIVERY,
    beside: NO_DELIVERY,
    beside_job_s: NO_VALUE,
    served_job_s: NO_VALUE,
    alone_job_s: NO_VALUE,
    served_mib_per_s: NO_VALUE,
    gzip: NO_DELIVERY,
    slow_gzip: NO_DELIVERY,
    ffmpeg: NO_DELIVERY,
    slow_ffmpeg: NO_DELIVERY,
    memory: Peak { bytes: NO_VALUE },
    paged: NO_DELIVERY,
    cold: NO_DELIVERY,
    out_mib: NO_VALUE,
    resize_ms: NO_VALUE,
    look_ms: NO_VALUE,
};

/// Measures one way with a guest of its own, in all parts that are for it.
///
/// # Errors
/// Something does not start or end; wrong bytes were delivered.
pub fn measure(way: Way, setup: &Setup, network: &Network, start: &Start<'_>) -> Result<Measured> {
    let mut leg = Leg { machine: Machine::start(way, setup, network, start)?, network, amount: Amount::of(setup) };
    let mut measured = NOTHING;
    let parts: Vec<Part> = Part::ALL.into_iter().filter(|part| part.is_of(way, setup)).collect();
    leg.prepare(&parts)?;
    for part in parts {
        leg.one(part, &mut measured).with_context(|| part.text())?;
    }
    leg.machine.end()?;
    Ok(measured)
}

struct Leg<'a> {
    machine: Machine<'a>,
    network: &'a Network,
    amount: Amount,
}

impl Leg<'_> {
    /// All that a job reads, and a delivery before those that count: memory that was never touched is slow, and so is code that QEMU
    /// translates for the first time.
    fn prepare(&mut self, parts: &[Part]) -> Result<()> {
        let Amount { input_mib, film_seconds, .. } = self.amount;
        if parts.iter().any(|part| matches!(part, Part::Beside | Part::Served | Part::Gzip)) {
            self.machine.sh(&format!("{INPUT}{}", input_mib * 16))?;
            self.machine.sh("gzip < /tmp/input > /dev/null")?;
        }
        if parts.contains(&Part::Ffmpeg) {
            self.machine.sh(&format!("{FILM}{film_seconds} {FILM_FILE}"))?;
        }
        self.stream("").map(drop)
    }

    fn one(&mut self, part: Part, measured: &mut Measured) -> Result<()> {
        match part {
            Part::Delivery => measured.delivery = self.stream("")?.0,
            Part::Beside => self.beside(measured)?,
            Part::Served => self.served(measured)?,
            Part::Gzip => (measured.gzip, measured.slow_gzip) = self.output(GZIP, "gzip -n -1 < /tmp/input")?,
            Part::Ffmpeg => {
                (measured.ffmpeg, measured.slow_ffmpeg) = self.output(TRANSCODE, &format!("{TRANSCODE} -"))?;
            }
            Part::Memory => measured.memory = self.memory()?,
            Part::Paged => self.paged(measured)?,
            Part::Resize => self.resize(measured)?,
        }
        Ok(())
    }

    fn stream(&mut self, beside: &str) -> Result<(Delivery, Vec<String>)> {
        let mib = self.amount.stream_mib;
        self.machine.deliver(Product::Stream { mib, beside }, &Digest::of_stream(mib), |_| Ok(()))
    }

    /// A stream is written and delivered while a job computes in the guest, which lasts longer.
    fn beside(&mut self, measured: &mut Measured) -> Result<()> {
        let job = self.amount.job();
        let (delivery, lines) = self.stream(&job)?;
        let done = lines.iter().filter_map(|line| Line::parse(line)).find(|line| line.get("phase") == Some("job"));
        let us = done.and_then(|line| line.number("us")).context("what the job took")?;
        measured.beside_job_s = us as f64 / 1e6;
        ensure!(
            measured.beside_job_s >= delivery.seconds,
            "the job took {:.1} s and the stream {:.1}: it was not beside all of it",
            measured.beside_job_s,
            delivery.seconds
        );
        measured.beside = delivery;
        Ok(())
    }

    /// A job computes while a client fetches what was written before, over and over.
    fn served(&mut self, measured: &mut Measured) -> Result<()> {
        let job = self.amount.job();
        measured.alone_job_s = self.machine.time(&job)?;
        let expected = Digest::of_stream(SERVED_MIB);
        let (network, name) = (self.network, "served");
        self.machine.guest.command(&format!("publish {OUT}/{name} {SERVED_MIB}"))?;
        let source = self.machine.source(name);
        let machine = &mut self.machine;
        let is_over = AtomicBool::new(false);
        let served = network.limited(GIGABIT, || {
            std::thread::scope(|scope| {
                let client = scope.spawn(|| {
                    network.at_client(|| {
                        let mut bytes = 0;
                        while !is_over.load(Ordering::Relaxed) {
                            bytes += client::fetch(&source, &expected)?.bytes;
                        }
                        Ok(bytes)
                    })
                });
                let began = Instant::now();
                let time = machine.time(&job);
                is_over.store(true, Ordering::Relaxed);
                let bytes = client.join().map_err(|_| anyhow!("the client has panicked"))??;
                let mib = bytes as f64 / f64::from(1 << 20);
                anyhow::Ok((time?, mib / began.elapsed().as_secs_f64()))
            })
        });
        (measured.served_job_s, measured.served_mib_per_s) = served?;
        self.machine.sh(&format!("rm {OUT}/{name}"))
    }

    /// A program's output is delivered: by a link as fast as there is, and by a slow one. It says the same to a pipe before, which gives
    /// the digest.
    fn output(&mut self, line: &str, to_pipe: &str) -> Result<(Delivery, Delivery)> {
        let digest = self.machine.ask(&format!("{to_pipe} | sha256sum"))?;
        let expected = Digest::Sha256(digest.split(' ').next().unwrap_or_default().to_owned());
        let (machine, network) = (&mut self.machine, self.network);
        let mut one = || machine.deliver(Product::Output { line }, &expected, |_| Ok(()));
        let (fast, _) = one()?;
        let (slow, _) = network.limited(SLOW, one)?;
        Ok((fast, slow))
    }

    fn memory(&mut self) -> Result<Peak> {
        let mib = self.amount.stream_mib;
        let product = Product::Stream { mib, beside: "" };
        Peak::of(&mut self.machine, product, &Digest::of_stream(mib))
    }

    /// The guest fills most of its memory with what is not small, and then delivers a stream, and that.
    fn paged(&mut self, measured: &mut Measured) -> Result<()> {
        self.machine.sh("mkdir -p /cold && mount -t tmpfs -o size=80% cold /cold")?;
        self.machine.sh(&format!("dd if=/dev/urandom of={COLD_FILE} bs=1M count={COLD_MIB} 2> /dev/null"))?;
        let digest = self.machine.ask(&format!("sha256sum < {COLD_FILE}"))?;
        let expected = Digest::Sha256(digest.split(' ').next().unwrap_or_default().to_owned());
        self.stream("")?;
        let daemon = self.machine.daemon.as_ref().context("no daemon")?;
        let vm = daemon.client().vm(VM).context("look at the VM")?;
        ensure!(vm.pinned.is_none(), "it is pinned: {:?}", vm.pinned);
        ensure!(vm.resident_bytes <= vm.dram_limit_bytes, "it has more in DRAM than it may");
        measured.out_mib = vm.swapped_bytes as f64 / f64::from(1 << 20);
        measured.paged = self.stream("")?.0;
        let line = format!("cat {COLD_FILE} >");
        measured.cold = self.machine.deliver(Product::Output { line: &line }, &expected, |_| Ok(()))?.0;
        self.machine.sh("umount /cold")
    }

    /// From the request to the guest's line that says that the size is another one. That line's way is part of it.
    fn resize(&mut self, measured: &mut Measured) -> Result<()> {
        let guest = &mut self.machine.guest;
        let client = self.machine.daemon.as_ref().context("no daemon")?.client();
        let watch = format!("watch {OUT}");
        let (mut resizes_ms, mut looks_ms) = (Vec::new(), Vec::new());
        for time in 0..RESIZES {
            guest.begin(&watch)?;
            guest.line("watching")?;
            let space_mib = if time % 2 == 0 { 2 * SPACE_MIB } else { SPACE_MIB };
            let asked = Instant::now();
            client
                .set_outbox(VM, &pagoda_api::OutboxPatch::space(space_mib << 20))
                .context("give the outbox another space")?;
            guest.line("resized")?;
            resizes_ms.push(asked.elapsed().as_secs_f64() * 1e3);
            let (lines, _) = guest.end(&watch)?;
            let done = lines.iter().filter_map(|line| Line::parse(line)).find(|line| line.kind == "done");
            let (looks, us) = done.and_then(|line| line.number("ops").zip(line.number("us"))).context("the looks")?;
            looks_ms.push(us as f64 / 1e3 / looks as f64);
        }
        measured.resize_ms = median(&resizes_ms).context("a resize")?;
        measured.look_ms = median(&looks_ms).context("a look")?;
        Ok(())
    }
}
