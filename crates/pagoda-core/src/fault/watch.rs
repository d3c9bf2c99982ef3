//! Pages whose next use is to be noticed: the sample of the working set, and those that the miss-ratio curve follows.
//!
//! A watched page is *hidden*: it has no page-table entry, and no neighbour's fault gives it one, so the next access to
//! it is a fault message, which is counted and ends the watch. The order: hide the page (nothing maps it from now on), then
//! unmap it in the VMM where it may be mapped. Between the two an access may go unseen, once, and none after.
//!
//! Hiding changes no content and owns nothing: page-out, page-in and discards go on. A thread that waits for a page is
//! never forgotten by it, because its fault has ended the watch ([`Machine::note_use`] comes before anything else), and no
//! watch begins on a chunk of which something is under way.
//!
//! If the VMM's agent is away or a zap fails, the pages wait for the next try and are not counted as watched.

use crate::policy::SampleCount;
use crate::stats::Metric;
use crate::units::PageIdx;

use super::action::{Action, Actions};
use super::machine::Machine;
use super::state::watch::Purpose;
use super::table::Phase;

/// Pages in one zap: what a packet to the agent holds (`pagoda_abi::attach::RANGES_MAX`).
pub const WATCH_ZAP_BATCH: usize = 128;

impl Machine {
    /// Begins a sampling period with these pages, and ends the one before. Pages outside the space are left out. The zaps
    /// are asked for at the next [`super::Event::Tick`].
    pub fn start_sample(&mut self, pages: &[PageIdx]) {
        self.watch.drop_all(Purpose::Sample);
        (self.watch.touched, self.watch.borrowed) = (0, 0);
        let total = self.config.chunks.pages().0;
        self.watch.add(pages.iter().copied().filter(|page| page.0 < total), Purpose::Sample);
    }

    /// What became of this period's pages so far. A page counts as watched from the moment its zap is done.
    pub fn sample_count(&self) -> SampleCount {
        self.watch.sample_count()
    }

    /// The pages of [`Action::ZapPages`].
    pub fn watch_zaps(&self) -> impl Iterator<Item = PageIdx> + '_ {
        self.watch.zapping.iter().map(|(page, _)| *page)
    }

    /// The zap of [`Action::ZapPages`] whose answer is waited for.
    pub fn watch_ticket(&self) -> u32 {
        self.watch.ticket
    }

    /// Pages whose next use will be noticed, and that have no page-table entry: for tests.
    #[doc(hidden)]
    pub fn watched(&self) -> Vec<PageIdx> {
        let pages =
            self.watch.hidden.iter().flat_map(|(chunk, marks)| marks.all().iter().map(|index| chunk.page(index)));
        pages.filter(|page| self.watch.zapping.iter().all(|(other, _)| other != page)).collect()
    }

    /// A fault came: if it is the first use of a watched page, it is counted.
    pub(super) fn note_use(&mut self, page: PageIdx) {
        let Some(was) = self.watch.show(page) else { return };
        self.stats.add(Metric::WatchedUses, 1);
        self.watch.touched += u32::from(was.sample.count());
        if !was.curve.is_empty() {
            self.note_curve_use(page);
        }
    }

    /// Hides pages that wait for it and asks for their zap. One at a time: what is left comes with the next.
    pub(super) fn plan_watch(&mut self, out: &mut Actions) {
        if !self.armed || !self.watch.zapping.is_empty() || self.watch.pending.is_empty() {
            return;
        }
        let mut pending = std::mem::take(&mut self.watch.pending);
        pending.retain(|&(page, purpose)| {
            let (chunk, index) = (page.chunk(), page.index_in_chunk());
            if self.chunk(chunk).borrowed {
                // It cannot be unmapped without being lost, and what is read of it takes no DRAM of the VM's.
                self.watch.note_borrowed(purpose);
                return false;
            }
            let full = self.watch.zapping.len() == WATCH_ZAP_BATCH;
            // Somebody may wait for a page that is on its way, and nobody would wake him.
            if full || self.chunk(chunk).busy() {
                return true;
            }
            self.watch.hide(page, purpose);
            let c = &mut self.chunks[chunk.as_usize()];
            c.mapped.clear(index);
            if c.ram.contains(index) && !matches!(c.phase, Phase::Cold { .. }) {
                self.watch.zapping.push((page, purpose));
            }
            false
        });
        self.watch.pending = pending;
        if !self.watch.zapping.is_empty() {
            self.watch.ticket = self.watch.ticket.wrapping_add(1);
            self.stats.add(Metric::WatchZaps, self.watch.zapping.len() as u64);
            out.push(Action::ZapPages { ticket: self.watch.ticket });
        }
    }

    pub(super) fn pages_zapped(&mut self, ticket: u32, done: bool, out: &mut Actions) {
        if ticket != self.watch.ticket {
            return;
        }
        let zapped = std::mem::take(&mut self.watch.zapping);
        if done {
            return self.plan_watch(out);
        }
        // Tried again at the next tick.
        for (page, purpose) in zapped {
            self.watch.unhide(page, purpose);
            self.watch.pending.push((page, purpose));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bits::PageSet;
    use crate::fault::{Access, Config, Event, FaultKind, Located, Now, Sharing};
    use crate::units::ChunkIdx;
    use crate::units::{ChunkCount, PageCount};

    /// Pages in DRAM, of a VM of four chunks.
    const PAGES: u64 = 512;

    #[derive(Clone, Debug)]
    enum Step {
        Sample(Vec<u64>),
        Fault(u64, Access),
        Tick,
        Zapped(bool),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        // Few pages, so that they meet.
        let page = || prop_oneof![0..8u64, 250..262u64, 0..PAGES];
        let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
        prop_oneof![
            1 => proptest::collection::btree_set(page(), 1..200).prop_map(|pages| Step::Sample(pages.into_iter().collect())),
            8 => (page(), access).prop_map(|(page, access)| Step::Fault(page, access)),
            3 => Just(Step::Tick),
            3 => any::<bool>().prop_map(Step::Zapped),
        ]
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum State {
        Pending,
        Zapping,
        Watched,
        Touched,
    }

    /// The same by a list of pages and no more.
    #[derive(Default)]
    struct Naive {
        pages: Vec<(u64, State)>,
    }

    impl Naive {
        fn count(&self, state: State) -> u32 {
            self.pages.iter().filter(|(_, other)| *other == state).count() as u32
        }

        fn zap_next(&mut self) {
            if self.count(State::Zapping) == 0 {
                let pending = self.pages.iter_mut().filter(|(_, state)| *state == State::Pending);
                pending.take(WATCH_ZAP_BATCH).for_each(|(_, state)| *state = State::Zapping);
            }
        }

        fn is_hidden(&self, page: u64) -> bool {
            self.pages.iter().any(|(other, state)| *other == page && matches!(state, State::Zapping | State::Watched))
        }
    }

    fn apply(machine: &mut Machine, event: Event) -> Actions {
        let mut out = Actions::new();
        machine.apply(event, Now { ms: 0, oldest_io: u64::MAX }, &mut out);
        machine.check();
        out
    }

    fn armed() -> Machine {
        let config = Config {
            chunks: ChunkCount(4),
            direct: false,
            protect: true,
            page_in: Default::default(),
            replacement: Default::default(),
            seed: 0,
            sharing: Sharing::Off,
        };
        let mut machine = Machine::new(config);
        apply(&mut machine, Event::SetLimit { limit: PageCount(1023) });
        let full = Located { ram: PageSet::FULL, ..Located::default() };
        machine.armed(|chunk| if chunk.0 < 2 { full } else { Located::default() });
        machine
    }

    fn step(machine: &mut Machine, naive: &mut Naive, step: Step) -> Actions {
        match step {
            Step::Sample(pages) => {
                machine.start_sample(&pages.iter().copied().map(PageIdx).collect::<Vec<_>>());
                naive.pages = pages.into_iter().map(|page| (page, State::Pending)).collect();
                Actions::new()
            }
            Step::Fault(page, access) => {
                if naive.is_hidden(page) {
                    naive
                        .pages
                        .iter_mut()
                        .filter(|(other, _)| *other == page)
                        .for_each(|(_, state)| *state = State::Touched);
                }
                apply(machine, Event::Fault { page: PageIdx(page), access, kind: FaultKind::Unmapped })
            }
            Step::Tick => {
                naive.zap_next();
                apply(machine, Event::Tick)
            }
            Step::Zapped(done) => {
                let under_way = naive.count(State::Zapping) > 0;
                let state = if done { State::Watched } else { State::Pending };
                let zapped: Vec<u64> =
                    naive.pages.iter().filter(|(_, state)| *state == State::Zapping).map(|(page, _)| *page).collect();
                naive.pages.retain(|(page, _)| !zapped.contains(page));
                naive.pages.extend(zapped.into_iter().map(|page| (page, state)));
                if !under_way {
                    // An answer that nobody waits for.
                    let stale = machine.watch_ticket().wrapping_sub(1);
                    return apply(machine, Event::PagesZapped { ticket: stale, done });
                }
                if done {
                    naive.zap_next();
                }
                apply(machine, Event::PagesZapped { ticket: machine.watch_ticket(), done })
            }
        }
    }

    proptest! {
        #[test]
        fn it_counts_as_a_list_does_and_maps_no_watched_page(steps in proptest::collection::vec(any_step(), 1..150)) {
            let (mut machine, mut naive) = (armed(), Naive::default());
            for one in steps {
                let actions = step(&mut machine, &mut naive, one);
                for action in actions {
                    if let Action::Map { pages, .. } = action {
                        let first = pages.first().0;
                        let hidden = (first..first + u64::from(pages.run.len)).find(|page| naive.is_hidden(*page));
                        prop_assert_eq!(hidden, None, "mapped, though watched");
                    }
                }
                let touched = naive.count(State::Touched);
                let expected = SampleCount { watched: naive.count(State::Watched) + touched, touched };
                prop_assert_eq!(machine.sample_count(), expected);
            }
        }
    }

    #[test]
    fn neighbours_are_mapped_around_a_watched_page() {
        let mut machine = armed();
        machine.start_sample(&[PageIdx(3), PageIdx(5000)]);
        let ticket = match apply(&mut machine, Event::Tick)[..] {
            [Action::ZapPages { ticket }, ..] => ticket,
            ref other => panic!("{other:?}"),
        };
        assert_eq!(machine.watch_zaps().collect::<Vec<_>>(), [PageIdx(3)], "a page outside the VM is left out");
        assert_eq!(machine.sample_count(), SampleCount::default(), "not unmapped yet");
        apply(&mut machine, Event::PagesZapped { ticket, done: true });
        assert_eq!(machine.sample_count(), SampleCount { watched: 1, touched: 0 });
        let fault = |page| Event::Fault { page: PageIdx(page), access: Access::Read, kind: FaultKind::Unmapped };
        apply(&mut machine, fault(0));
        assert!(!machine.chunk(ChunkIdx(0)).mapped.contains(3) && machine.chunk(ChunkIdx(0)).mapped.contains(4));
        apply(&mut machine, fault(3));
        assert_eq!(machine.sample_count(), SampleCount { watched: 1, touched: 1 });
        assert!(machine.chunk(ChunkIdx(0)).mapped.contains(3));
    }
}
