//! Requests are executed as they come; replies are made when they are sent, demand first.

use super::Server;
use super::replies::{Pending, REPLIES_CROWDED, REPLIES_MAX};
use super::sessions::SessionIndex;
use super::stats::ServerStats;
use super::store::{Fault, Store};
use super::workers::{State, WorkerNumbers};
use crate::crypto::handshake::ServerHello;
use crate::crypto::session::Session;
use crate::server::reassembly::WRITE_CREDITS;
use crate::transmit::Transmit;
use crate::units::{Generation, Time, Version};
use crate::wire::OVERHEAD;
use crate::wire::copy::Progress;
use crate::wire::message::{Direction, Load, Message, Op, Pressure, Status};
use crate::wire::report::Report;

impl Server {
    pub(super) fn about(&self) -> ServerHello {
        let identity = &self.shared.identity;
        ServerHello {
            epoch: identity.epoch,
            server: identity.id,
            slab_pages: identity.slab_size.pages() as u32,
            write_credits: WRITE_CREDITS,
            overflow_disk: identity.is_overflow_disk,
        }
    }

    /// Takes in a fragment that the session has found authentic, and acts when its message is whole.
    pub(super) fn take_in(&mut self, now: Time, slot: SessionIndex, body: &[u8]) {
        self.now = now;
        let Ok((message, fragment, part)) = Message::decode(body) else {
            self.stats.malformed += 1;
            return;
        };
        let Direction::Request { generation, .. } = message.direction else {
            self.stats.malformed += 1;
            return;
        };
        self.stats.fragments += 1;
        let payload = usize::from(message.payload);
        let (space, page, version) = (message.space, message.page, message.version);
        let slab = self.shared.identity.slab_size.slab(page);
        let guest = self.sessions.guest(slot);
        let node = self.sessions.node(slot);
        let Some(session) = self.sessions.pieces(slot) else { return };
        let whole = if fragment.count == 1 {
            Some(part)
        } else {
            self.reassembly.add(session, (message.id, version.bits()), fragment, part, payload)
        };
        let Some(whole) = whole else { return };
        let waiting = self.replies.len();
        let can_wait = message.class.may_be_put_off();
        if waiting >= REPLIES_MAX {
            return;
        }
        let status = match (message.op, slab) {
            (_, _) if can_wait && waiting >= REPLIES_CROWDED && message.op != Op::Probe => Status::Busy,
            (_, None) => Status::BadRequest,
            // Another server may do no more.
            (op, _) if guest.is_some() && !matches!(op, Op::Probe | Op::Write | Op::Trim) => Status::Denied,
            // What they are asked for is looked up when the reply is made.
            (Op::Probe | Op::Read | Op::ReadGranted | Op::Versions | Op::Report | Op::Held, _) => Status::Ok,
            (Op::Write | Op::Trim, Some(slab)) => {
                let sealed = (message.op == Op::Write).then_some(whole);
                self.shared.state().write(now, guest, slab, generation, &message, sealed)
            }
            (Op::Fence, _) => self.shared.state().store.fence(space, generation, version.bits()),
            (Op::Grant, Some(slab)) => {
                let mut state = self.shared.state();
                let open = state.pressure == Pressure::None;
                let epoch = whole.try_into().map(u64::from_le_bytes).map(Version::from_bits);
                let lend = |epoch| state.store.grant(space, slab, generation, (version, epoch), open);
                epoch.map_or(Status::BadRequest, lend)
            }
            (Op::Release, Some(slab)) => self.shared.state().store.release(space, slab, generation, version),
            (Op::Reserve, _) => self.shared.state().store.reserve(space, generation, version.bits()),
            (Op::Drain, _) => self.shared.state().drain_asked(node, version),
            (Op::Copy, Some(slab)) => {
                let grant = self.shared.state().store.grant_of(space, slab, generation);
                let with = (&self.shared.identity, &self.entropy);
                self.transfers.ask(now, with, (slab, grant), generation, &message, whole)
            }
            (Op::Admit, Some(slab)) => {
                let State { store, tickets, .. } = &mut *self.shared.state();
                tickets.ask(now, store, slab, generation, &message, whole)
            }
        };
        if let Some(session) = self.sessions.number(slot) {
            let pending = Pending { session, slot, request: message, status };
            self.replies.queues[message.class as usize].push_back(pending);
        }
    }

    pub(super) fn poll_reply(&mut self, out: &mut Vec<u8>) -> Option<Transmit> {
        loop {
            let pending = self.replies.pop()?;
            // The session may have ended since.
            if self.sessions.number(pending.slot) == Some(pending.session) {
                return self.reply(&pending, out);
            }
        }
    }

    fn reply(&mut self, pending: &Pending, out: &mut Vec<u8>) -> Option<Transmit> {
        let Pending { slot, request, mut status, .. } = *pending;
        let Direction::Request { cut, generation } = request.direction else { return None };
        let queued = self.replies.len() as u16;
        let numbers = if request.op == Op::Report { self.own_numbers() } else { WorkerNumbers::default() };
        let start = out.len();
        let Server { shared, replies, transfers, sessions, .. } = self;
        let peer = sessions.peer(slot)?;
        let scratch = &mut replies.scratch;
        scratch.clear();
        let mut version = request.version;
        let mut payload: &[u8] = &[];
        // Held until the page is copied; what is encrypted is the copy.
        let mut state = shared.state();
        let pressure = state.pressure;
        let load = Load { free_slabs: state.store.free_slabs() as u32, write_credits: write_credits(pressure), queued };
        match request.op {
            Op::Probe => {
                scratch.resize(usize::from(request.payload), 0);
                payload = scratch;
            }
            Op::Copy => {
                let slab = shared.identity.slab_size.slab(request.page);
                let owner = status == Status::Ok;
                let progress = slab.filter(|_| owner).and_then(|slab| transfers.report_progress(request.space, slab));
                version = Version::from_bits(progress.unwrap_or(Progress::Failed) as u64);
            }
            Op::Report => {
                let reported =
                    (status == Status::Ok).then(|| report(&state, &shared.sum(self.worker, numbers), self.now));
                scratch.extend(reported.unwrap_or_default().encode());
                payload = scratch;
            }
            Op::Read | Op::ReadGranted if status == Status::Ok => match read(&mut state.store, &request, generation) {
                Ok(found) => (version, payload) = found,
                Err(failure) => status = failure,
            },
            Op::Versions if status == Status::Ok => {
                let lies = state.store.has(Fault::MakesUpTrims) || state.store.has(Fault::KeepsToTrims);
                match state.store.versions(request.space, request.page, generation) {
                    Ok((grant, versions)) => {
                        version = grant;
                        let trims = u64::from(lies);
                        versions.iter().for_each(|version| {
                            let listed = version.bits() | if version.has_content() { trims } else { 0 };
                            scratch.extend_from_slice(&listed.to_le_bytes());
                        });
                        payload = scratch;
                    }
                    Err(failure) => status = failure,
                }
            }
            Op::Held if status == Status::Ok => {
                match state.store.held(request.space, generation, request.version.bits(), scratch) {
                    Ok(next) => {
                        version = Version::from_bits(next);
                        payload = scratch;
                    }
                    Err(failure) => status = failure,
                }
            }
            _ => {}
        }
        if status != Status::Ok {
            version = Version::NEVER;
        }
        let direction = Direction::Reply { status, pressure, load };
        let message = Message { direction, version, payload: payload.len() as u16, ..request };
        // A probe is answered as it came, or it would say nothing about the way back.
        let cut = if request.op == Op::Probe { usize::from(request.payload) + OVERHEAD } else { usize::from(cut) };
        let segment = Session::lay_out(&message, payload, cut, out);
        drop(state);
        peer.session.encrypt(&mut out[start..], segment);
        count_answer(&mut self.stats, request.op, status);
        Some(Transmit { to: peer.addr, segment })
    }
}

/// The page that is read: its version, and its content as it is stored.
fn read<'a>(store: &'a mut Store, request: &Message, generation: Generation) -> Result<(Version, &'a [u8]), Status> {
    let (space, page) = (request.space, request.page);
    let keeps_to_trims = store.has(Fault::KeepsToTrims);
    let stored = match request.op {
        Op::ReadGranted => store.read_granted(space, page, request.version),
        _ => store.read(space, page, generation),
    }?;
    let version = stored.version;
    if keeps_to_trims && version.has_content() && version.generation() < generation {
        return Ok((Version::from_bits(version.bits() | 1), &[]));
    }
    Ok((version, stored.sealed.unwrap_or(&[])))
}

fn report(state: &State, workers: &WorkerNumbers, now: Time) -> Report {
    Report {
        slabs: state.store.slabs() as u32,
        held: state.store.held_slabs() as u32,
        spaces: state.store.spaces().filter(|space| space.slabs > 0).count() as u32,
        sessions: workers.sessions as u32,
        reads: workers.stats.pages_read,
        writes: workers.stats.pages_written,
        uptime_ms: now.0 / 1_000_000,
        draining: state.store.shut,
    }
}

/// Fewer writes at a time the shorter memory is: the client slows down before it is told to go.
fn write_credits(pressure: Pressure) -> u16 {
    match pressure {
        Pressure::None => WRITE_CREDITS,
        Pressure::Yellow => WRITE_CREDITS / 4,
        Pressure::Orange => WRITE_CREDITS / 8,
        Pressure::Red => 1,
    }
}

fn count_answer(stats: &mut ServerStats, op: Op, status: Status) {
    stats.answered[status as usize] += 1;
    match op {
        Op::Read | Op::ReadGranted if status == Status::Ok => stats.pages_read += 1,
        Op::Write | Op::Trim if status == Status::Ok => stats.pages_written += 1,
        _ => {}
    }
}
