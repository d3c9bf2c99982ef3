//! What goes wrong in a run, and when.

use std::time::Duration;

use pagoda_core::chance::Chance;
use pagoda_move::rounds::{Mode, OnTimeout, Settings};
use pagoda_move::units::{Rate, RegisterId};

use crate::mistake::Mistake;

pub const MS: Duration = Duration::from_millis(1);

/// Something that goes wrong, for a while or at once. The number is a host's: 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    CutBoth,
    /// Nothing comes from this host.
    CutFrom(usize),
    KillDaemon(usize),
    /// The daemon is stopped, its QEMU is not.
    PauseDaemon(usize),
    KillQemu(usize),
    DiskFails(usize),
    /// This host does not reach the arbiter.
    NoArbiter(usize),
    NoArbiterForBoth,
    /// The user ends the attempt.
    Cancel,
}

impl Fault {
    pub const ALL: [Fault; 15] = [
        Fault::CutBoth,
        Fault::CutFrom(0),
        Fault::CutFrom(1),
        Fault::KillDaemon(0),
        Fault::KillDaemon(1),
        Fault::PauseDaemon(0),
        Fault::PauseDaemon(1),
        Fault::KillQemu(0),
        Fault::KillQemu(1),
        Fault::DiskFails(0),
        Fault::DiskFails(1),
        Fault::NoArbiter(0),
        Fault::NoArbiter(1),
        Fault::NoArbiterForBoth,
        Fault::Cancel,
    ];

    /// How long it lasts, if it ends by itself in a run of the matrix.
    pub fn any_span(self, chance: &mut Chance) -> Duration {
        let most = match self {
            Fault::PauseDaemon(_) => 30_000,
            Fault::KillDaemon(_) => 3000,
            _ => [300, 3000, 15_000][chance.below(3) as usize],
        };
        MS * chance.within(1, most) as u32
    }
}

/// Where a move is when something goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Hello,
    Reserve,
    FirstRound,
    LaterRound,
    Stop,
    State,
    /// The source's note is being written.
    Note,
    GrantSent,
    /// The destination's note is being written.
    GrantHere,
    FirstInstruction,
    Tail,
    CleanUp,
}

impl Phase {
    pub const ALL: [Phase; 12] = [
        Phase::Hello,
        Phase::Reserve,
        Phase::FirstRound,
        Phase::LaterRound,
        Phase::Stop,
        Phase::State,
        Phase::Note,
        Phase::GrantSent,
        Phase::GrantHere,
        Phase::FirstInstruction,
        Phase::Tail,
        Phase::CleanUp,
    ];
}

#[derive(Clone, Debug)]
pub struct Plan {
    /// The arbiter's registers that each host asks, if it asks any.
    pub registers: [Option<RegisterId>; 2],
    pub settings: Settings,
    /// Things that go wrong when a move comes to a phase, each once.
    pub triggers: Vec<(Phase, Fault)>,
    /// Things that go wrong at any moment.
    pub random_faults: usize,
    /// How long things go wrong at random; all heals after that.
    pub chaos: Duration,
    pub delay_max: Duration,
    /// The first data stream takes so many times as long.
    pub slow_stream: u32,
    pub write_max: Duration,
    /// In thousandths: a daemon dies before an action; a message comes again later; memory cannot be reserved.
    pub crash: u64,
    pub stray: u64,
    pub no_room: u64,
    /// Pages that the guest writes in a step, and how often it begins a direct I/O, in thousandths.
    pub writes: u64,
    pub direct_io: u64,
    pub mistake: Option<Mistake>,
}

impl Plan {
    pub fn new(chance: &mut Chance) -> Plan {
        let mut pick = |list: &[u64]| list[chance.below(list.len() as u64) as usize];
        let settings = Settings {
            mode: [Mode::Precopy, Mode::Precopy, Mode::Postcopy, Mode::Hybrid][pick(&[0, 1, 2, 3]) as usize],
            downtime_max: MS * pick(&[30, 60, 200]) as u32,
            stop_cost: MS * 15,
            bandwidth_max: [None, Some(Rate(40 << 20))][pick(&[0, 0, 1]) as usize],
            time_max: [None, Some(MS * 1000), Some(MS * 4000)][pick(&[0, 1, 2]) as usize],
            on_timeout: [OnTimeout::Abort, OnTimeout::SlowGuest, OnTimeout::Postcopy][pick(&[0, 1, 2]) as usize],
        };
        let mut plan = Plan {
            registers: [[0, 0], [1, 1], [1, 1], [1, 2], [1, 0]][pick(&[0, 0, 1, 1, 2, 3, 4]) as usize]
                .map(RegisterId::of),
            settings,
            triggers: Vec::new(),
            random_faults: pick(&[0, 0, 1, 3, 8]) as usize,
            chaos: MS * pick(&[5000, 15_000, 30_000]) as u32,
            delay_max: MS * pick(&[1, 3, 30]) as u32,
            slow_stream: pick(&[1, 1, 20]) as u32,
            write_max: MS * pick(&[1, 20, 100]) as u32,
            crash: pick(&[0, 0, 5, 30]),
            stray: pick(&[0, 30, 200]),
            no_room: pick(&[0, 0, 200]),
            writes: pick(&[1, 4, 30]),
            direct_io: pick(&[0, 50, 500]),
            mistake: None,
        };
        for _ in 0..chance.below(4) {
            let phase = Phase::ALL[chance.below(Phase::ALL.len() as u64) as usize];
            plan.triggers.push((phase, Fault::ALL[chance.below(Fault::ALL.len() as u64) as usize]));
        }
        plan
    }

    /// Both hosts ask one arbiter.
    pub fn with_arbiter(self) -> Plan {
        Plan { registers: [RegisterId::of(1); 2], ..self }
    }

    /// A run in which one thing goes wrong, when a move comes to this phase.
    pub fn of_matrix(phase: Phase, fault: Fault, chance: &mut Chance) -> Plan {
        let mut plan = Plan::new(chance);
        (plan.triggers, plan.random_faults, plan.crash, plan.no_room) = (vec![(phase, fault)], 0, 0, 0);
        if phase == Phase::Tail {
            plan.settings.mode = Mode::Postcopy;
        }
        if phase == Phase::LaterRound {
            (plan.settings.mode, plan.settings.time_max, plan.writes) = (Mode::Precopy, None, 30);
        }
        plan.chaos = MS * 35_000;
        plan
    }
}
