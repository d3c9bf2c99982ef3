//! How an engine starts: its thread, its ring, and the takeover of a VM that an earlier daemon served.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use pagoda_abi::attach::{Packet, Text};
use pagoda_core::fault::{Config, Event, Machine};
use pagoda_core::stats::Metric;
use pagoda_core::units::PageCount;
use pagoda_image::Ledger;
use pagoda_sys::ring::Ring;
use pagoda_sys::socket::Connection;

use super::imager::Imager;
use super::link::VmmLink;
use super::mover::{Awaited, Mover};
use super::paging::Paging;
use super::sampler::Sampler;
use super::sharer::Sharer;
use super::status::{Notify, Reporter};
use super::{Engine, EngineError, Origin, Parts, RING_ENTRIES};
use crate::follow::Follow;
use crate::handle::{Inbox, Notice};
use crate::mapper::NewMapper;
use crate::poll::BusyPoll;
use crate::source::Source;
use crate::threads;

/// Starts the engine's thread; it ends after a notice that says why.
///
/// # Errors
/// The thread could not be made. What goes wrong in it is a [`Notice::Stalled`] or the end of the VM.
pub fn spawn(parts: Parts, inbox: Inbox, notify: Box<dyn Fn(Notice) + Send>) -> Result<(), EngineError> {
    let name = parts.name.clone();
    // A VM that runs already waits, and its agent comes again; a new one is told why it does not start.
    let newcomer = if parts.origin.is_taken_over() { None } else { parts.agent.try_clone().ok() };
    let thread = std::thread::Builder::new().name(threads::name("vm", &name));
    let run = move || match Engine::new(parts, inbox, notify) {
        Ok(mut engine) => {
            drop(newcomer);
            let end = engine.run();
            if end == Some(Notice::Exited) {
                engine.end_image();
                engine.link.mappers.remove_sockets();
                engine.paging.end_tiers();
            }
            engine.paging.leave_group(end == Some(Notice::Exited));
            // Memory, files and the swap file's lock are free before anybody hears of it.
            let notify = engine.into_notify();
            if let Some(end) = end {
                notify(end);
            }
        }
        Err((error, notify)) => {
            tracing::error!(vm = %name, "{error}");
            if let Some(agent) = newcomer {
                let _ =
                    agent.send(&Packet::Refused { text: Text::new(&format!("{name} cannot be served: {error}")) }, &[]);
            }
            notify(Notice::Stalled(format!("the engine did not start: {error}")));
            // Its agent comes again.
            notify(Notice::Detached);
        }
    };
    thread.spawn(run).map(drop).map_err(EngineError::Thread)
}

impl Engine {
    fn new(mut parts: Parts, inbox: Inbox, notify: Notify) -> Result<Engine, (EngineError, Notify)> {
        match Engine::set_up(&mut parts) {
            Ok(ring) => {
                let sharer = Sharer::new(parts.tiers.frames().is_some(), parts.sharing);
                let now = Instant::now();
                let config = Config {
                    chunks: parts.space.chunks(),
                    direct: parts.direct,
                    protect: parts.protect,
                    page_in: parts.page_in,
                    replacement: parts.replacement,
                    seed: u64::from(parts.pid),
                    sharing: parts.sharing,
                };
                let name: Arc<str> = parts.name.into();
                let machine = Machine::new(config);
                let mut engine = Engine {
                    paging: Paging::new(Arc::clone(&name), machine, parts.space, parts.tiers, parts.shared, parts.loan),
                    ring,
                    inbox,
                    link: VmmLink::new(&name, parts.pidfd),
                    actions: Vec::with_capacity(1024),
                    sampler: Sampler::new(parts.pid),
                    sharer,
                    imager: Imager::new(Arc::clone(&name)),
                    mover: Mover::new(),
                    arrival: None,
                    reporter: Reporter::new(Arc::clone(&name), notify, parts.pinned),
                    name,
                    follow: Follow::new(parts.pid),
                    busy_poll: BusyPoll::new(parts.busy_poll),
                    fault_at: now,
                    ticked: now,
                    maintained: now,
                    end: None,
                };
                match engine.start(
                    parts.agent,
                    parts.welcome,
                    (parts.limit, parts.min),
                    parts.origin,
                    (parts.image, parts.mappers),
                ) {
                    Ok(()) => Ok(engine),
                    Err(error) => {
                        engine.paging.leave_group(false);
                        Err((error, engine.into_notify()))
                    }
                }
            }
            Err(error) => {
                if let Some(member) = parts.tiers.take_frames() {
                    member.leave(false);
                }
                Err((error, notify))
            }
        }
    }

    fn set_up(parts: &mut Parts) -> Result<Ring, EngineError> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        parts.tiers.attach(&mut ring)?;
        Ok(ring)
    }

    /// Gets ready; the shim lets the VMM go on when it hears the welcome. A new VM is armed by then, so that it never
    /// exceeds its cap; a VM that an earlier daemon served runs already, and its agent must hear the welcome first of all.
    fn start(
        &mut self,
        agent: Connection,
        welcome: Packet,
        (limit, min): (PageCount, PageCount),
        origin: Origin,
        (image, mappers): (Option<Arc<Ledger>>, Vec<NewMapper>),
    ) -> Result<(), EngineError> {
        self.ring.poll_multishot(self.inbox.wake().as_fd(), Source::Wake.key())?;
        self.link.poll_exit(&mut self.ring)?;
        self.paging.poll_all(&mut self.ring)?;
        let mut agent = Some(agent);
        let welcomed = if origin.is_taken_over() { agent.take() } else { None };
        if let Some(agent) = welcomed {
            self.welcome(&agent, &welcome);
            self.connect_agent(agent)?;
        }
        // All mappers are met before anything is registered.
        self.meet_mappers(mappers, origin.is_taken_over())?;
        // What was ordered is done by now, or never is: before anything is looked at.
        self.paging.settle_moves()?;
        // Intents first: one of them may stand where the note of a lost image goes.
        let settled = if origin.is_taken_over() { self.paging.settle_intents()? } else { 0 };
        // The image is known before any page can change.
        let notice = image.and_then(|ledger| self.imager.resume(ledger, origin.is_taken_over(), &self.paging));
        self.report_image(notice);
        match origin {
            Origin::New => {}
            // Before it may touch any page: the kernel would give it zeros.
            Origin::InTiers => {
                self.arm_with_image()?;
                self.paging.begin_prefetch();
            }
            Origin::TakenOver => self.take_over(settled)?,
            Origin::Arriving => {
                self.arrival = Some(Awaited { limit });
                self.paging.await_pages(true);
            }
        }
        if self.reporter.is_pinned() {
            self.paging.push(Event::Pin);
        }
        // Nobody pages a VM whose pages are not there yet.
        let first = if self.arrival.is_some() { self.paging.space().chunks().pages() } else { limit };
        self.paging.begin_with_limits(first, min);
        self.settle();
        if !self.paging.machine().is_armed() && !self.paging.is_halted() {
            self.paging.leave_punches();
        }
        if let Some(agent) = agent.take() {
            self.welcome(&agent, &welcome);
            self.connect_agent(agent)?;
        }
        self.publish();
        Ok(())
    }

    /// `settled`: intents that an earlier daemon left open.
    fn take_over(&mut self, settled: u64) -> Result<(), EngineError> {
        // Whether it was armed cannot be known, and need not be: registering twice is harmless, and a VM that needs no pager
        // disarms itself at the next event.
        self.arm_with_image()?;
        let restarted = self.restart_sample();
        self.or_halt(restarted);
        // References are counted before any of them is dropped.
        self.paging.count_references().map_err(EngineError::Shared)?;
        self.paging.wake_all();
        let resident = self.paging.machine().stats().get(Metric::Resident);
        tracing::info!(vm = %self.name, settled, resident, "took over");
        Ok(())
    }

    fn welcome(&self, agent: &Connection, welcome: &Packet) {
        if let Err(error) = agent.send(welcome, &[]) {
            tracing::warn!(vm = %self.name, "welcome the agent: {error}");
        }
    }

    /// The rest of the engine is gone when this returns.
    fn into_notify(self) -> Notify {
        self.reporter.into_notify()
    }
}
