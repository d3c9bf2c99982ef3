//! The rows of the report, with the bars of each.

use testkit::results::report::{Bar, NO_VALUE, Report};

use super::leg::{Amount, Measured, Part, SLOW_TEXT};
use super::machine::{Delivery, MEMORY_MIB, SPACE_MIB};
use super::way::Way;
use crate::migrate::case::{Case, Of, Rows};
use crate::{Setup, svg};

/// "F/C at most 0.38; F/A at most 0.5" (the prototype had 0.35 and 0.41).
const CPU_OF_STAGED_MAX: f64 = 0.38;
const CPU_OF_SOCKET_MAX: f64 = 0.5;
/// MemNet (CLOUD 2016): 70 % more network throughput, 32 % less energy.
const BESIDE_OF_STAGED_MIN: f64 = 1.70;
const ENERGY_OF_STAGED_MAX: f64 = 0.68;
const JOB_OF_STAGED_MAX: f64 = 0.75;
const SERVED_OF_ALONE_MAX: f64 = 1.10;
const CPU_OF_SHARED_MAX: f64 = 1.0;
const MEMORY_OF_SHARED_MAX: f64 = 0.6;
const FIRST_BYTE_MS_MAX: f64 = 50.0;
const RESIZE_MS_MAX: f64 = 5.0;
const PAGED_OF_ALL_MIN: f64 = 0.85;

/// The model of energy, which is an assumption: what a host of two CPUs draws when it is idle, and what a busy CPU adds.
const IDLE_W: f64 = 10.0;
const BUSY_W: f64 = 8.0;

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = 1024.0 * MIB;

/// What came of each way.
#[derive(Debug, Default)]
pub struct Cases {
    cases: [Case<Measured>; Way::ALL.len()],
}

impl Cases {
    fn of(&self, way: Way) -> &Case<Measured> {
        &self.cases[way as usize]
    }

    pub fn of_mut(&mut self, way: Way) -> &mut Case<Measured> {
        &mut self.cases[way as usize]
    }
}

impl Delivery {
    fn cpu_s_per_gib(&self) -> f64 {
        self.cpu_s / (self.bytes as f64 / GIB)
    }

    fn mib_per_s(&self) -> f64 {
        self.bytes as f64 / MIB / self.seconds
    }

    fn joules(&self) -> f64 {
        IDLE_W * self.seconds + BUSY_W * self.cpu_s
    }
}

const CPU: Of<Measured> = |measured| measured.delivery.cpu_s_per_gib();

/// Adds all rows that were asked for.
pub fn add(report: &mut Report, setup: &Setup, qemu: &str, cases: &Cases) {
    let amount = Amount::of(setup);
    let name = format!("QEMU {qemu}, 1 CPU, {MEMORY_MIB} MiB");
    let mut rows = Table { rows: Rows { report, name }, cases };
    for part in Part::ALL.into_iter().filter(|part| part.is_of(Way::Outbox, setup)) {
        match part {
            Part::Delivery => rows.delivery(amount),
            Part::Beside => rows.beside(amount),
            Part::Served => rows.served(),
            Part::Gzip => rows.output("gzip", |m| m.gzip, |m| m.slow_gzip),
            Part::Ffmpeg => rows.output("ffmpeg", |m| m.ffmpeg, |m| m.slow_ffmpeg),
            Part::Memory => rows.memory(amount),
            Part::Resize => rows.resize(),
            Part::Paged => rows.paged(),
        }
    }
}

struct Table<'a> {
    rows: Rows<'a>,
    cases: &'a Cases,
}

impl Table<'_> {
    fn against(&mut self, what: &str, unit: &str, of: Of<Measured>, peer: Way, bar: Bar) {
        let Self { rows, cases } = self;
        let what = format!("{what}: against {}", peer.text());
        rows.pair(&what, unit, (cases.of(Way::Outbox), of), (cases.of(peer), of), bar);
    }

    fn single(&mut self, what: &str, unit: &str, of: Of<Measured>, bar: Bar) {
        self.rows.single(what, unit, (self.cases.of(Way::Outbox), of), bar);
    }

    fn delivery(&mut self, Amount { stream_mib, .. }: Amount) {
        let what = "CPU-seconds a GiB delivered";
        self.against(what, "s/GiB", CPU, Way::Staged, Bar::AtMost(CPU_OF_STAGED_MAX));
        self.against(what, "s/GiB", CPU, Way::Socket, Bar::AtMost(CPU_OF_SOCKET_MAX));
        self.against(what, "s/GiB", CPU, Way::Shared, Bar::AtMost(CPU_OF_SHARED_MAX));
        let energy = format!("energy of {stream_mib} MiB for a client, an estimate");
        self.against(&energy, "J", |m| m.delivery.joules(), Way::Staged, Bar::AtMost(ENERGY_OF_STAGED_MAX));
        self.rows
            .report
            .note(format!("no meter: {IDLE_W} W x seconds + {BUSY_W} W x CPU-seconds, an assumption for two CPUs"));
        let first = "first byte of a file that grows, from the command in the guest";
        self.single(first, "ms", |m| m.delivery.first_byte_s * 1e3, Bar::AtMost(FIRST_BYTE_MS_MAX));
        let peer = self.cases.of(Way::Shared).values(|m| m.delivery.first_byte_s * 1e3);
        let what = format!("{}, first byte of a file that is closed: {}", self.rows.name, Way::Shared.text());
        self.rows.report.peer_only(&what, "ms", &peer);
        for peer in [Way::Staged, Way::Socket, Way::Shared] {
            self.against("delivered", "MiB/s", |m| m.delivery.mib_per_s(), peer, Bar::None);
        }
        let client = "CPU-seconds a GiB of the client";
        self.against(
            client,
            "s/GiB",
            |m| m.delivery.client_cpu_s / (m.delivery.bytes as f64 / GIB),
            Way::Staged,
            Bar::None,
        );
    }

    fn beside(&mut self, Amount { stream_mib, .. }: Amount) {
        let bar = Bar::AtLeast(BESIDE_OF_STAGED_MIN);
        self.against("delivered beside a job", "MiB/s", |m| m.beside.mib_per_s(), Way::Staged, bar);
        let job = format!("a job beside {stream_mib} MiB that are written and delivered");
        self.against(&job, "s", |m| m.beside_job_s, Way::Staged, Bar::None);
    }

    fn served(&mut self) {
        let ours = self.cases.of(Way::Outbox);
        let what = "a job beside what is sent at 1 Gbit/s: against the job alone";
        let alone = ours.values(|m| m.alone_job_s);
        self.rows.against(what, "s", (ours, |m| m.served_job_s), &alone, Bar::AtMost(SERVED_OF_ALONE_MAX));
        let peer = self.cases.of(Way::Staged).values(|m| m.served_job_s / m.alone_job_s);
        let what = format!("{}, the same of {}, to the job alone", self.rows.name, Way::Staged.text());
        self.rows.report.peer_only(&what, "ratio", &peer);
        self.against("sent meanwhile", "MiB/s", |m| m.served_mib_per_s, Way::Staged, Bar::None);
    }

    fn output(&mut self, program: &str, fast: fn(&Measured) -> Delivery, slow: fn(&Measured) -> Delivery) {
        let Self { rows, cases } = self;
        let (ours, peer) = (cases.of(Way::Outbox), cases.of(Way::Staged));
        for (of, link, bar) in
            [(fast, "a link without a limit", Bar::AtMost(JOB_OF_STAGED_MAX)), (slow, SLOW_TEXT, Bar::None)]
        {
            let seconds = |case: &Case<Measured>| case.map(|measured| of(measured).seconds);
            let what = format!("{program} until its output is delivered, {link}: against {}", Way::Staged.text());
            rows.pair(&what, "s", (&seconds(ours), |s| *s), (&seconds(peer), |s| *s), bar);
            let output = ours.last().map_or(NO_VALUE, |measured| of(measured).bytes as f64 / MIB);
            rows.report.note(format!("{output:.1} MiB of output"));
        }
    }

    fn memory(&mut self, Amount { stream_mib, .. }: Amount) {
        let what = format!("memory for {stream_mib} MiB that are delivered");
        let bar = Bar::AtMost(MEMORY_OF_SHARED_MAX);
        self.against(&what, "MiB", |m| m.memory.bytes / MIB, Way::Shared, bar);
        self.rows.report.note(format!(
            "the most of the server's memfds or the tmpfs every 10 ms, and the growth of the guest's page cache; the outbox has {SPACE_MIB} MiB"
        ));
    }

    fn paged(&mut self) {
        let Self { rows, cases } = self;
        let (ours, all) = (cases.of(Way::Paged), cases.of(Way::Outbox));
        let against = "against a VM that has all of it in DRAM";
        let stream = format!("delivered by a VM with half its memory in DRAM: {against}");
        rows.pair(
            &stream,
            "MiB/s",
            (ours, |m| m.paged.mib_per_s()),
            (all, |m| m.paged.mib_per_s()),
            Bar::AtLeast(PAGED_OF_ALL_MIN),
        );
        rows.report.note("every byte is compared".to_owned());
        let cpu = format!("CPU-seconds a GiB of that: {against}");
        rows.pair(&cpu, "s/GiB", (ours, |m| m.paged.cpu_s_per_gib()), (all, |m| m.paged.cpu_s_per_gib()), Bar::None);
        let cold = format!("delivered of what has left DRAM: {against}");
        rows.pair(&cold, "MiB/s", (ours, |m| m.cold.mib_per_s()), (all, |m| m.cold.mib_per_s()), Bar::None);
        rows.single("out of DRAM before that", "MiB", (ours, |m| m.out_mib), Bar::None);
    }

    fn resize(&mut self) {
        let what = "another space, from the request until a program in the guest has said so";
        self.single(what, "ms", |m| m.resize_ms, Bar::AtMost(RESIZE_MS_MAX));
        self.single("of that, one look at the space in the guest", "ms", |m| m.look_ms, Bar::None);
    }
}

/// Those that deliver the same without a limit of DRAM.
const PLOTTED: [Way; 4] = [Way::Outbox, Way::Socket, Way::Staged, Way::Shared];

/// CPU time of each way.
pub fn plot(cases: &Cases) -> String {
    let bars = PLOTTED.map(|way| svg::Bar::of(&cases.of(way).values(CPU)));
    svg::bar_chart(&svg::BarChart {
        title: "What it costs the host that a guest publishes a file".to_owned(),
        y_label: "CPU-seconds a GiB".to_owned(),
        y_scale: svg::Scale::Linear,
        series: PLOTTED.map(|way| way.text().to_owned()).to_vec(),
        groups: vec![("delivered as it is written, or after that".to_owned(), bars.to_vec())],
    })
}
