//! The state machine: what is asked of the guest next, and why.

use super::*;

/// What a guest may give back by itself without taking memory back: the driver rounds, and compaction moves pages.
const TAKE_BACK_MIN: Bytes = Bytes::from_mib(1);

/// Ballooning of one VM.
#[derive(Clone, Debug)]
pub struct Balloon {
    memory: Bytes,
    /// Memory the guest should keep; `None`: all of it.
    target: Option<Bytes>,
    phase: Phase,
    since_ms: u64,
    /// Memory outside of the balloon.
    actual: Bytes,
    /// The device was heard of.
    is_known: bool,
    asked: Option<Bytes>,
    asked_at_ms: u64,
    /// When `actual` last came closer to what was asked, or something new was asked.
    moved_at_ms: u64,
    step: Bytes,
    /// A driver has shown that it is there.
    is_alive: bool,
    alive_at_ms: u64,
    /// What the device went on saying after a reset, which is not so.
    stale_actual: Option<Bytes>,
    resets: u64,
    guest: Guest,
    /// The VM is paged out to this much.
    paging_to: Option<Bytes>,
    retry_at_ms: Option<u64>,
    retry_wait_ms: u64,
    resisted: u64,
    fallbacks: u64,
}

/// What the guest's statistics tell.
#[derive(Clone, Copy, Debug, Default)]
struct Guest {
    stats: Option<GuestStats>,
    seen_at_ms: u64,
    /// The guest's memory when they were seen.
    actual: Bytes,
    /// They are of this boot, as far as one can tell.
    is_current: bool,
    /// They came with this tick.
    is_fresh: bool,
    faults_per_s: Option<u64>,
    /// The rate before inflating began.
    usual_faults_per_s: u64,
    faulty_updates: u32,
    /// Updates in a row in which it was short and wrote nothing to its own swap.
    full_updates: u32,
    took_back: bool,
}

impl Guest {
    fn current(&self) -> Option<GuestStats> {
        self.stats.filter(|_| self.is_current)
    }

    fn has_swap(&self) -> bool {
        self.current().is_some_and(|stats| stats.swap_out > Bytes::ZERO)
    }
}

impl Balloon {
    /// For a VM with this much memory. `paging_to`: an earlier daemon has paged it out in the balloon's place.
    pub fn new(memory: Bytes, paging_to: Option<Bytes>) -> Balloon {
        Balloon {
            memory,
            target: None,
            phase: Phase::Off,
            since_ms: 0,
            actual: memory,
            is_known: false,
            asked: None,
            asked_at_ms: 0,
            moved_at_ms: 0,
            step: STEP_MIN,
            is_alive: false,
            alive_at_ms: 0,
            stale_actual: None,
            resets: 0,
            guest: Guest::default(),
            paging_to,
            retry_at_ms: None,
            retry_wait_ms: RETRY_MIN_MS,
            resisted: 0,
            fallbacks: 0,
        }
    }

    /// Sets the memory the guest should keep; all of it ends ballooning. Takes effect with the next tick.
    pub fn set_target(&mut self, now_ms: u64, target: Bytes) {
        let target = Bytes(target.0.next_multiple_of(PAGE_SIZE));
        self.target = (target < self.memory).then_some(target);
        self.retry_at_ms = None;
        self.retry_wait_ms = RETRY_MIN_MS;
        self.step = STEP_MIN;
        let is_missing = matches!(self.phase, Phase::Unavailable(Missing::Device | Missing::Driver));
        match self.target {
            None => self.enter(now_ms, Phase::Deflating),
            Some(_) if is_missing => {}
            Some(target) if self.is_known && target > self.actual => self.enter(now_ms, Phase::Deflating),
            Some(_) if self.is_alive => self.enter(now_ms, Phase::Inflating),
            Some(_) => self.enter(now_ms, Phase::Probing),
        }
        self.moved_at_ms = now_ms;
    }

    /// Follows a target that moves by itself. Unlike [`Balloon::set_target`], which is a request to be tried at once: a
    /// guest that fights back, or cannot be asked, is left alone for as long as it would have been.
    pub fn follow_target(&mut self, now_ms: u64, target: Bytes) {
        let target = Bytes(target.0.next_multiple_of(PAGE_SIZE));
        let target = (target < self.memory).then_some(target);
        if target == self.target {
            return;
        }
        self.target = target;
        let next = match (target, self.phase) {
            (None, Phase::Off) => Phase::Off,
            (None, _) => Phase::Deflating,
            (Some(_), Phase::Unavailable(Missing::Device | Missing::Driver)) => self.phase,
            (Some(target), _) if self.is_known && target > self.actual => Phase::Deflating,
            (Some(_), Phase::Resisted(_) | Phase::Unavailable(Missing::Effect)) => self.phase,
            (Some(_), _) if self.is_alive => Phase::Inflating,
            (Some(_), _) => Phase::Probing,
        };
        if self.phase != next {
            // Else a target that moves every second would hide a guest that does not.
            self.moved_at_ms = now_ms;
            self.enter(now_ms, next);
        }
    }

    /// Nothing is wanted of the guest, and nothing is under way.
    pub fn is_off(&self) -> bool {
        self.phase == Phase::Off
    }

    /// How soon the next tick should come.
    pub fn tick_ms(&self) -> u64 {
        if self.phase.is_moving() { TICK_MOVING_MS } else { TICK_REST_MS }
    }

    pub fn view(&self) -> View {
        View {
            phase: self.phase,
            since_ms: self.since_ms,
            actual: self.actual,
            asked: self.asked,
            is_paging: self.paging_to.is_some(),
            retry_at_ms: self.retry_at_ms,
            stats: self.guest.stats,
            resisted: self.resisted,
            fallbacks: self.fallbacks,
        }
    }

    /// Looks at what was seen and decides.
    pub fn tick(&mut self, now_ms: u64, sample: &Sample) -> Vec<Action> {
        let mut out = Vec::new();
        if sample.paused {
            self.moved_at_ms = now_ms;
            self.guest.seen_at_ms = now_ms;
            return out;
        }
        match sample.device {
            Device::Silent => return out,
            Device::Absent => {
                self.is_alive = false;
                self.actual = self.memory;
                self.asked = None;
            }
            Device::Present { actual } => self.observe(now_ms, actual, sample),
        }
        let Some(target) = self.target else {
            self.wind_down(now_ms, sample.device, &mut out);
            return out;
        };
        if self.paging_to.is_some_and(|to| to != target) {
            self.page_out(target, &mut out);
        }
        if sample.device == Device::Absent {
            self.lose(now_ms, target, Missing::Device, &mut out);
            return out;
        }
        match self.phase {
            Phase::Off | Phase::Probing => self.probe(now_ms, target, &mut out),
            Phase::Inflating | Phase::Reached => self.inflate(now_ms, target, &mut out),
            Phase::Deflating => self.deflate(now_ms, target, &mut out),
            Phase::Resisted(_) => self.bide(now_ms, target, &mut out),
            Phase::Unavailable(_) => self.watch(now_ms, target, &mut out),
        }
        out
    }

    fn enter(&mut self, now_ms: u64, phase: Phase) {
        if self.phase != phase {
            self.phase = phase;
            self.since_ms = now_ms;
        }
    }

    fn observe(&mut self, now_ms: u64, actual: Bytes, sample: &Sample) {
        let was_reset = sample.resets != self.resets;
        self.resets = sample.resets;
        if was_reset {
            self.is_alive = false;
            self.stale_actual = Some(actual);
            self.guest = Guest { stats: sample.stats, ..Guest::default() };
        }
        // A driver that has been up for a while has said how much it holds, even if it is as much as before.
        let is_settled = self.is_alive && now_ms.saturating_sub(self.alive_at_ms) >= PROBE_WAIT_MS;
        let actual = match self.stale_actual {
            Some(stale) if stale == actual && !is_settled => self.memory,
            _ => {
                self.stale_actual = None;
                actual.min(self.memory)
            }
        };
        let before = std::mem::replace(&mut self.actual, actual);
        let is_first = !std::mem::replace(&mut self.is_known, true);
        self.guest.took_back = false;
        if is_first {
            self.moved_at_ms = now_ms;
        } else if let Some(asked) = self.asked {
            if before.0.abs_diff(asked.0) > actual.0.abs_diff(asked.0) {
                self.moved_at_ms = now_ms;
                self.is_alive |= !was_reset;
                self.alive_at_ms = now_ms;
            }
            let rose = !was_reset && actual >= Bytes(before.0 + TAKE_BACK_MIN.0);
            self.guest.took_back = rose && asked <= before;
        }
        if was_reset && self.target.is_some() {
            // Asked for less than before, or the driver would inflate to the old size while its guest boots.
            self.asked = None;
            self.enter(now_ms, Phase::Probing);
        }
        self.receive_stats(now_ms, sample.stats);
        if is_first {
            // These statistics may be as old as the VM.
            self.is_alive = false;
            (self.guest.is_current, self.guest.is_fresh) = (false, false);
        }
    }

    /// Takes the guest's statistics, if they are new.
    fn receive_stats(&mut self, now_ms: u64, stats: Option<GuestStats>) {
        let guest = &mut self.guest;
        guest.is_fresh = stats.is_some_and(|new| guest.stats.is_none_or(|old| old.updated_s != new.updated_s));
        let (true, Some(new)) = (guest.is_fresh, stats) else { return };
        let faults = |stats: &GuestStats| stats.major_faults.saturating_add(stats.swap_in.0 / PAGE_SIZE);
        // Counters that went back are those of another boot.
        let delta = guest.stats.and_then(|old| faults(&new).checked_sub(faults(&old)));
        let elapsed_ms = now_ms.saturating_sub(guest.seen_at_ms).max(1);
        guest.faults_per_s = delta.map(|delta| delta.saturating_mul(1000) / elapsed_ms);
        let limit = guest.usual_faults_per_s.saturating_add(FAULTS_PER_S_MAX);
        let is_faulty = guest.faults_per_s.is_some_and(|rate| rate > limit);
        guest.faulty_updates = if is_faulty { guest.faulty_updates + 1 } else { 0 };
        let writes = guest.stats.is_none_or(|old| old.swap_out != new.swap_out);
        let is_full = !writes && new.available.0 < reserve(self.memory).0 / 2;
        guest.full_updates = if is_full { guest.full_updates + 1 } else { 0 };
        guest.stats = Some(new);
        guest.is_current = true;
        guest.seen_at_ms = now_ms;
        guest.actual = self.actual;
        if !std::mem::replace(&mut self.is_alive, true) {
            self.alive_at_ms = now_ms;
        }
    }

    /// Ends ballooning: all memory is the guest's, and none is paged out for us.
    fn wind_down(&mut self, now_ms: u64, device: Device, out: &mut Vec<Action>) {
        self.end_page_out(out);
        self.retry_at_ms = None;
        if device != Device::Absent && self.phase != Phase::Off {
            self.ask(now_ms, self.memory, out);
            if self.actual < self.memory && !self.is_stuck(now_ms) {
                return;
            }
        }
        self.enter(now_ms, Phase::Off);
    }

    fn probe(&mut self, now_ms: u64, target: Bytes, out: &mut Vec<Action>) {
        if self.actual <= target {
            // It has given its memory already, to an earlier daemon.
            self.ask(now_ms, target, out);
            return self.reach(now_ms, out);
        }
        if self.is_alive && self.stale_actual.is_none() {
            return self.begin(now_ms, target, out);
        }
        if self.asked.is_none() {
            self.ask(now_ms, target.max(self.actual.saturating_sub(PROBE)), out);
        }
        // A guest that was reset is known to have no driver for now.
        if self.stale_actual.is_some() || now_ms.saturating_sub(self.since_ms) >= PROBE_WAIT_MS {
            self.lose(now_ms, target, Missing::Driver, out);
        }
    }

    fn begin(&mut self, now_ms: u64, target: Bytes, out: &mut Vec<Action>) {
        self.step = STEP_MIN;
        self.moved_at_ms = now_ms;
        self.retry_at_ms = None;
        self.guest.usual_faults_per_s = self.guest.faults_per_s.unwrap_or(0);
        (self.guest.faulty_updates, self.guest.full_updates) = (0, 0);
        self.enter(now_ms, Phase::Inflating);
        self.inflate(now_ms, target, out);
    }

    fn inflate(&mut self, now_ms: u64, target: Bytes, out: &mut Vec<Action>) {
        if let Some(resistance) = self.resistance() {
            return self.resist(now_ms, target, resistance, out);
        }
        if self.actual <= target {
            // A guest that gave more than it has to gets it back.
            self.ask(now_ms, target, out);
            return self.reach(now_ms, out);
        }
        if self.phase != Phase::Inflating {
            self.moved_at_ms = now_ms;
            self.enter(now_ms, Phase::Inflating);
        }
        let asked = self.asked.unwrap_or(self.actual);
        let is_settled = self.actual <= asked;
        if !is_settled && self.is_stuck(now_ms) {
            let is_short = self.available().is_some_and(|available| available.0 < 2 * reserve(self.memory).0);
            return if is_short {
                self.resist(now_ms, target, Resistance::LowMemory, out)
            } else if self.is_stale(now_ms) {
                self.lose(now_ms, target, Missing::Driver, out)
            } else {
                self.lose(now_ms, target, Missing::Effect, out)
            };
        }
        let waited_ms = now_ms.saturating_sub(self.asked_at_ms);
        // What the guest could give without paging is no limit where it is to page.
        let least = self.least().filter(|least| *least < self.actual || !self.guest.has_swap());
        let wanted = match least {
            Some(least) => self.actual.saturating_sub(self.step).max(least),
            // Only the rate is left.
            None if self.asked.is_none() || (is_settled && waited_ms >= STEP_SLOW_MS) => {
                self.actual.saturating_sub(STEP_MIN)
            }
            None => asked,
        };
        let wanted = wanted.max(target);
        if wanted < asked || self.asked.is_none() {
            self.step = match () {
                () if is_settled => Bytes(self.step.0 * 2).min(STEP_MAX),
                () if waited_ms >= STEP_SLOW_MS => Bytes(self.step.0 / 2).max(STEP_MIN),
                () => self.step,
            };
            self.ask(now_ms, wanted.min(asked), out);
        } else if is_settled && self.guest.is_fresh && self.guest.seen_at_ms > self.moved_at_ms {
            // All that was asked is given, and what the guest has said since leaves nothing to ask for.
            self.resist(now_ms, target, Resistance::LowMemory, out);
        }
    }

    fn deflate(&mut self, now_ms: u64, target: Bytes, out: &mut Vec<Action>) {
        self.ask(now_ms, target, out);
        if self.actual >= target || self.is_stuck(now_ms) {
            self.reach(now_ms, out);
        }
    }

    /// Waits beside a guest that fights back.
    fn bide(&mut self, now_ms: u64, target: Bytes, out: &mut Vec<Action>) {
        if self.is_stale(now_ms) {
            return self.lose(now_ms, target, Missing::Driver, out);
        }
        if let Some(resistance) = self.resistance() {
            self.give_back(now_ms, target, resistance, out);
        }
        if self.retry_at_ms.is_some_and(|at| now_ms >= at) {
            self.retry_wait_ms = (self.retry_wait_ms * 2).min(RETRY_MAX_MS);
            self.begin(now_ms, target, out);
        }
    }

    /// Watches for a driver that works.
    fn watch(&mut self, now_ms: u64, target: Bytes, out: &mut Vec<Action>) {
        let is_due = self.retry_at_ms.is_some_and(|at| now_ms >= at);
        match self.phase {
            Phase::Unavailable(Missing::Device) => self.enter(now_ms, Phase::Probing),
            Phase::Unavailable(Missing::Effect) if self.moved_at_ms == now_ms || is_due => {
                self.retry_wait_ms = (self.retry_wait_ms * 2).min(RETRY_MAX_MS);
                self.begin(now_ms, target, out);
            }
            Phase::Unavailable(Missing::Driver) if self.is_alive && self.stale_actual.is_none() => {
                self.begin(now_ms, target, out);
            }
            _ if self.is_stale(now_ms) => self.lose(now_ms, target, Missing::Driver, out),
            _ => self.page_out(target, out),
        }
    }

    fn resistance(&self) -> Option<Resistance> {
        let guest = &self.guest;
        let is_short = || self.available().is_some_and(|available| available.0 < reserve(self.memory).0 / 2);
        let is_active = self.phase == Phase::Inflating || guest.faulty_updates >= FAULTY_UPDATES;
        match () {
            () if guest.took_back => Some(Resistance::TookBack),
            () if guest.has_swap() => {
                let is_full = is_active && guest.is_fresh && guest.full_updates >= FULL_UPDATES;
                is_full.then_some(Resistance::LowMemory)
            }
            () if guest.is_fresh && is_short() => Some(Resistance::LowMemory),
            () if guest.is_fresh && guest.faulty_updates >= FAULTY_UPDATES => Some(Resistance::Faults),
            () => None,
        }
    }

    fn resist(&mut self, now_ms: u64, target: Bytes, resistance: Resistance, out: &mut Vec<Action>) {
        self.resisted += 1;
        self.enter(now_ms, Phase::Resisted(resistance));
        self.end_page_out(out);
        self.give_back(now_ms, target, resistance, out);
        self.retry_at_ms = Some(now_ms + self.retry_wait_ms);
    }

    /// Relieves the guest: what it lacks of its reserve, or a step, and at least what it took by itself.
    fn give_back(&mut self, now_ms: u64, target: Bytes, resistance: Resistance, out: &mut Vec<Action>) {
        let lack = match (resistance, self.available()) {
            (Resistance::LowMemory, Some(available)) => reserve(self.memory).saturating_sub(available),
            (Resistance::Faults, _) => STEP_MIN,
            _ => Bytes::ZERO,
        };
        let lack = Bytes(lack.0.next_multiple_of(PAGE_SIZE));
        let relieved = Bytes(self.actual.0.saturating_add(lack.0));
        self.ask(now_ms, relieved.max(target).min(self.memory), out);
        // Trouble that goes on when everything is given back is not ours.
        if self.actual < self.memory {
            self.retry_at_ms = self.retry_at_ms.max(Some(now_ms + self.retry_wait_ms / 2));
        }
    }

    fn reach(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        self.end_page_out(out);
        self.retry_at_ms = None;
        if self.phase == Phase::Reached && now_ms.saturating_sub(self.since_ms) >= self.retry_wait_ms {
            self.retry_wait_ms = RETRY_MIN_MS;
        }
        self.enter(now_ms, Phase::Reached);
    }

    /// Has the VM paged out, for its guest cannot be asked.
    fn lose(&mut self, now_ms: u64, target: Bytes, missing: Missing, out: &mut Vec<Action>) {
        let phase = Phase::Unavailable(missing);
        if self.phase != phase {
            self.enter(now_ms, phase);
            self.retry_at_ms = (missing == Missing::Effect).then_some(now_ms + self.retry_wait_ms);
            if missing == Missing::Driver {
                self.is_alive = false;
            }
            if missing != Missing::Device {
                self.ask(now_ms, self.actual.saturating_sub(PROBE).max(target), out);
            }
        }
        self.page_out(target, out);
    }

    fn page_out(&mut self, target: Bytes, out: &mut Vec<Action>) {
        let before = self.paging_to.replace(target);
        self.fallbacks += u64::from(before.is_none());
        if before != Some(target) {
            out.push(Action::PageOut(target));
        }
    }

    fn end_page_out(&mut self, out: &mut Vec<Action>) {
        if self.paging_to.take().is_some() {
            out.push(Action::EndPageOut);
        }
    }

    fn ask(&mut self, now_ms: u64, memory: Bytes, out: &mut Vec<Action>) {
        if self.asked != Some(memory) {
            let is_settled = self.asked.is_none_or(|asked| self.actual <= asked);
            if is_settled || self.phase != Phase::Inflating {
                self.moved_at_ms = now_ms;
            }
            self.asked = Some(memory);
            self.asked_at_ms = now_ms;
            out.push(Action::Ask(memory));
        }
    }

    /// The least memory that leaves the guest its reserve, by its own account. What it gave since then is counted.
    fn least(&self) -> Option<Bytes> {
        let available = self.guest.current()?.available;
        Some(self.guest.actual.saturating_sub(available.saturating_sub(reserve(self.memory))))
    }

    /// Memory the guest has available, what it gave since it said so deducted.
    fn available(&self) -> Option<Bytes> {
        let given = self.guest.actual.saturating_sub(self.actual);
        Some(self.guest.current()?.available.saturating_sub(given))
    }

    fn is_stuck(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.moved_at_ms) >= IGNORE_WAIT_MS
    }

    /// The guest used to report, and no longer does.
    fn is_stale(&self, now_ms: u64) -> bool {
        self.guest.stats.is_some() && now_ms.saturating_sub(self.guest.seen_at_ms) >= STATS_STALE_MS
    }
}
