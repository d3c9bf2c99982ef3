//! Messages and connections: what is sent, what arrives, and who finds that a connection is dead.

use pagoda_move::note::Offered;
use pagoda_move::owner::{Answer, Destination, DestinationEvent, SourceEvent, answer};
use pagoda_move::wire::limits::HEADER_SIZE;
use pagoda_move::wire::{Control, ControlHeader, Data, DataHeader};

use crate::destination::Incoming;
use crate::host::Host;
use crate::link::{CONTROL, Frame};
use crate::mistake::Mistake;
use crate::plan::{MS, Phase};
use crate::world::{Event, World};

impl World {
    pub fn send(&mut self, host: usize, message: &Control) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.tell(|| format!("{host} sends {message:?}"));
        match message {
            Control::Grant { .. } => self.reach(Phase::GrantSent),
            Control::Whole { .. } => self.reach(Phase::CleanUp),
            _ => {}
        }
        if self.chance.per_mille(self.plan.stray) {
            let (late, bytes) = (self.any(MS * 20_000), bytes.clone());
            self.schedule_in(late, Event::Stray { to: 1 - host, bytes });
        }
        self.send_bytes(host, CONTROL, bytes);
    }

    pub fn send_data(&mut self, host: usize, stream: usize, data: &Data<'_>) {
        let mut bytes = Vec::new();
        data.encode(&mut bytes);
        self.send_bytes(host, stream, bytes);
    }

    pub fn send_bytes(&mut self, host: usize, channel: usize, bytes: Vec<u8>) {
        let connection = self.link.seen[host];
        if connection == 0 {
            return;
        }
        let slow = if channel == 0 { self.plan.slow_stream } else { 1 };
        let (to, delay) = (1 - host, self.any(self.plan.delay_max) * slow);
        let at = self.link.arrival(to, channel, self.now, delay);
        self.schedule(at, Event::Frame(Frame { to, connection, channel, bytes }));
    }

    pub fn receive_frame(&mut self, frame: Frame) {
        let Frame { to, connection, channel, .. } = frame;
        let is_current = self.link.seen[to] == connection;
        let is_late = self.plan.mistake == Some(Mistake::ForgetsAttempt) && self.link.seen[to] != 0;
        if self.link.cut[1 - to] && (is_current || self.plan.mistake.is_some()) {
            self.link.held.push(frame);
        } else if self.hosts[to].daemon.is_some() && (is_current || is_late) {
            match channel {
                CONTROL => self.receive_control(to, &frame.bytes),
                stream => {
                    let (header, payload) = frame.bytes.split_first_chunk::<HEADER_SIZE>().expect("a header");
                    let header = DataHeader::decode(*header).expect("a frame of ours");
                    self.destination_data(to, stream as u16, Data::decode(header, payload).expect("a frame of ours"));
                }
            }
        }
    }

    pub fn receive_control(&mut self, host: usize, bytes: &[u8]) {
        let (header, payload) = bytes.split_first_chunk::<HEADER_SIZE>().expect("a header");
        let header = ControlHeader::decode(*header).expect("a frame of ours");
        let message = Control::decode(header, payload).expect("a frame of ours");
        let attempt = message.attempt();
        let forgets = self.plan.mistake == Some(Mistake::ForgetsAttempt);
        let is_of = |offered: Offered| offered.attempt == attempt || forgets;
        if let Control::Hello(hello) = &message {
            self.destination_greeted(host, hello);
        } else if self.outgoing(host).is_some_and(|session| is_of(session.owner.offered())) {
            self.source_receives(host, &message);
        } else if self.incoming(host).is_some_and(|session| is_of(session.owner.offered())) {
            self.destination_receives(host, &message);
        } else {
            if let Control::Reserve { .. } = &message {
                self.destination_reserves(host, attempt);
            }
            let is_alive = self.hosts[host].daemon.is_some();
            if is_alive && self.incoming(host).is_none_or(|session| session.owner.offered().attempt != attempt) {
                self.answer(host, &message);
            }
        }
    }

    /// A message about an attempt that this host has no machine for.
    pub fn answer(&mut self, host: usize, message: &Control) {
        let (me, peer) = (self.hosts[host].key, self.hosts[1 - host].key);
        match answer(self.hosts[host].current_note(), peer, message) {
            Answer::Nothing | Answer::Unknown => {}
            Answer::Send(message) => self.send(host, &message),
            // The note is busy with another attempt. A grant that counts is repeated.
            Answer::Refuse(..) if self.outgoing(host).is_some() || self.incoming(host).is_some() => {}
            Answer::Refuse(offered, by) => {
                let offered = Offered { register: self.plan.registers[host], ..offered };
                let mut actions = Vec::new();
                let owner = Destination::refuse_unknown(me, offered, by, self.now, &mut actions);
                let daemon = self.hosts[host].daemon.as_mut().expect("a daemon");
                daemon.destination = Some(Incoming::new(owner, None));
                self.execute(host, actions);
            }
            Answer::Superseded(offered) => self.note_violation(format!("superseded by {offered:?}")),
        }
    }

    pub fn connect(&mut self) {
        self.link.is_connecting = false;
        let now = self.now;
        let is_up = |host: &Host| host.daemon.is_some() && host.paused_until <= now;
        if self.link.is_cut() || !self.hosts.iter().all(is_up) {
            return;
        }
        let seen = self.link.seen;
        if seen[0] == seen[1] && seen[0] != 0 {
            return;
        }
        (0..2).for_each(|host| self.lose_connection(host, seen[host]));
        if !self.hosts.iter().all(is_up) {
            return self.try_connect();
        }
        self.link.last += 1;
        let connection = self.link.last;
        self.link.seen = [connection; 2];
        self.tell(|| format!("connection {connection}"));
        for host in 0..2 {
            self.source_greets(host);
            self.destination_greets(host);
            self.source_event(host, SourceEvent::LinkUp);
            self.destination_event(host, DestinationEvent::LinkUp);
        }
    }

    pub fn try_connect(&mut self) {
        if !std::mem::replace(&mut self.link.is_connecting, true) {
            let delay = self.any(MS * 100);
            self.schedule_in(delay, Event::Connect);
        }
    }

    pub fn lose_connection(&mut self, host: usize, connection: u32) {
        if connection == 0 || self.link.seen[host] != connection {
            return;
        }
        self.link.seen[host] = 0;
        self.tell(|| format!("{host} has lost connection {connection}"));
        let other = 1 - host;
        if !self.link.cut[host] {
            let delay = self.any(MS * 5);
            self.schedule_in(delay, Event::Notice { host: other, connection });
        }
        if self.hosts[host].daemon.is_some() {
            self.source_loses_link(host);
            self.destination_event(host, DestinationEvent::LinkDown);
        }
        self.try_connect();
    }
}
