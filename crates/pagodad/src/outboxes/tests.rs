//! Processes that say what they like, and what is charged meanwhile. The peers are real sockets.

use std::path::Path;
use std::thread::JoinHandle;

use pagoda_sys::socket::{Connection, Received};

use super::*;

const MIB: u64 = 1 << 20;

fn in_dir(name: &str, body: impl FnOnce(&Path, &Outboxes)) {
    let dir = std::env::temp_dir().join(format!("pagodad-outboxes-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(super::dir(&dir)).unwrap();
    body(&dir, &Outboxes::new(&dir, PERIOD_DEFAULT));
    std::fs::remove_dir_all(&dir).unwrap();
}

fn own_process() -> (u32, u64) {
    let own = std::process::id();
    (own, pagoda_sys::process::start_time(own).unwrap())
}

/// An outbox of 64 MiB whose process is this one, and what that listens on.
fn made(outboxes: &Outboxes) -> (Arc<Outbox>, Listener) {
    let outbox = outboxes.plan("web1", Token([1; 16]), Bytes(64 * MIB)).unwrap();
    outboxes.insert(&outbox);
    outboxes.make(&outbox).unwrap();
    let (pid, start) = own_process();
    let listener = outboxes.take(&outbox, pid, start).unwrap();
    outbox.note_process().unwrap();
    (outbox, listener)
}

/// Answers one connection, until it is closed or there is no answer.
fn answer(listener: &Listener, mut answers: impl FnMut(&Connection, Packet) -> Option<Packet>) {
    let connection = listener.accept().unwrap();
    while let Ok(Received::Message { packet, .. }) = connection.recv() {
        let Some(packet) = answers(&connection, packet) else { return };
        if connection.send(&packet, &[]).is_err() {
            return;
        }
    }
}

fn in_thread(
    listener: Listener,
    answers: impl FnMut(&Connection, Packet) -> Option<Packet> + Send + 'static,
) -> JoinHandle<Listener> {
    std::thread::spawn(move || {
        answer(&listener, answers);
        listener
    })
}

fn figures(space: u64, used: u64) -> Figures {
    Figures { space, used, ..Figures::default() }
}

fn charged(outbox: &Outbox) -> u64 {
    outbox.charged().charged.bytes().0
}

/// Whatever it says, nothing is known of it, it stays charged, and the next question is asked anew.
#[test]
fn hostile_answers_are_not_used() {
    in_dir("hostile", |_, outboxes| {
        let (outbox, mut listener) = made(outboxes);
        let wakes = pagoda_sys::process::Wake::new().unwrap();
        type Answer = Box<dyn FnMut(&Connection, Packet) -> Option<Packet> + Send>;
        let always = |packet: Packet| -> Answer { Box::new(move |_, _| Some(packet)) };
        let with = |figures: Figures| -> Answer {
            Box::new(move |_, asked| match asked {
                Packet::Look { seq } | Packet::SetSpace { seq, .. } => Some(Packet::Figures { seq, figures }),
                _ => None,
            })
        };
        let with_descriptor: Answer = Box::new(move |connection, asked| {
            let Packet::Look { seq } = asked else { return None };
            use std::os::fd::AsFd;
            let figures = figures(64 * MIB, 0);
            connection.send(&Packet::Figures { seq, figures }, &[wakes.as_fd()]).unwrap();
            None
        });
        let twisted = Packet::Refused { text: pagoda_abi::attach::Text::new("no\u{1b}[2J\n") };
        let table: Vec<(Answer, &str)> = vec![
            (Box::new(|_, _| None), "closed the connection"),
            (always(Packet::Clock { seq: 1 }), "something else"),
            (always(Packet::Figures { seq: u64::MAX, figures: figures(64 * MIB, 0) }), "not asked"),
            (always(twisted), "it refuses: no[2J"),
            (with_descriptor, "not asked"),
            (with(figures(64 * MIB, 65 * MIB)), "it uses 65 MiB"),
            (with(Figures { disposable: 1, ..figures(64 * MIB, 0) }), "were delivered"),
            (with(figures(u64::MAX, u64::MAX)), "it was told to keep to 64 MiB"),
            // Comes after all: too late for the question.
            (
                Box::new(|connection: &Connection, _| {
                    while let Ok(Received::Message { .. }) = connection.recv() {}
                    None
                }),
                "no answer within 1 s",
            ),
        ];
        for (answers, expected) in table {
            let peer = in_thread(listener, answers);
            let error = in_full(outbox.change().look().unwrap_err().as_ref());
            assert!(error.contains(expected), "{expected}: {error}");
            listener = peer.join().unwrap();
            let info = outbox.info(true);
            assert_eq!((info.figures, charged(&outbox)), (None, 64 * MIB), "{expected}");
        }
        let peer = in_thread(listener, with(figures(64 * MIB, MIB)));
        outbox.change().look().unwrap();
        let info = outbox.info(true);
        assert_eq!((info.state, info.problem, info.figures.unwrap().used_bytes), (OutboxState::Serving, None, MIB));
        outbox.change().line.hang_up();
        drop(peer.join().unwrap());
        // It accepts nothing any more: nobody listens.
        assert!(outbox.change().look().is_err());
        assert_eq!(charged(&outbox), 64 * MIB);
    });
}

/// A process that accepts no connection: those that wait are as many as it allows, and nobody waits in `connect`.
#[test]
fn a_process_that_accepts_nothing_holds_nobody_up() {
    in_dir("backlog", |_, outboxes| {
        let (_outbox, listener) = made(outboxes);
        let mut waiting = Vec::new();
        let refused = loop {
            match Connection::connect_at_once(listener.path()) {
                Ok(connection) => waiting.push(connection),
                Err(error) => break error.to_string(),
            }
            assert!(waiting.len() < 10_000);
        };
        assert!(refused.contains("os error 11") || refused.contains("unavailable"), "{refused}");
    });
}

/// It closes a connection on which it was asked nothing for long: the next question is asked on another.
#[test]
fn a_closed_connection_is_made_anew() {
    in_dir("closed", |_, outboxes| {
        let (outbox, listener) = made(outboxes);
        let (closed, hears) = std::sync::mpsc::channel();
        let peer = std::thread::spawn(move || {
            for _ in 0..2 {
                let connection = listener.accept().unwrap();
                let Ok(Received::Message { packet: Packet::Look { seq }, .. }) = connection.recv() else { panic!() };
                connection.send(&Packet::Figures { seq, figures: figures(64 * MIB, 0) }, &[]).unwrap();
                drop(connection);
                closed.send(()).unwrap();
            }
        });
        for _ in 0..2 {
            outbox.change().look().unwrap();
            hears.recv().unwrap();
        }
        peer.join().unwrap();
    });
}

#[test]
fn a_change_is_charged_first_and_given_back_last() {
    in_dir("changes", |dir, outboxes| {
        let (outbox, listener) = made(outboxes);
        let mut space = 64 * MIB;
        let mut used = 60 * MIB;
        let peer = in_thread(listener, move |_, asked| match asked {
            Packet::Look { seq } => {
                used = used.saturating_sub(20 * MIB);
                Some(Packet::Figures { seq, figures: figures(space, used) })
            }
            Packet::SetSpace { seq, bytes } => {
                space = bytes;
                Some(Packet::Figures { seq, figures: figures(space, used) })
            }
            _ => None,
        });
        let restored = || {
            let again = Outboxes::new(dir, PERIOD_DEFAULT);
            again.load(|_| true).unwrap();
            again.charged().charged.bytes().0
        };
        let mut changing = outbox.change();
        assert_eq!(changing.growth(Bytes(16 * MIB)), PageCount::ZERO);
        let before = changing.begin(Bytes(16 * MIB), None);
        assert_eq!(charged(&outbox), 64 * MIB, "it has let go of nothing");
        changing.carry_out(before).unwrap();
        assert_eq!((charged(&outbox), restored()), (40 * MIB, 40 * MIB));
        assert!(outbox.info(true).is_draining());
        changing.look().unwrap();
        assert_eq!(charged(&outbox), 20 * MIB);
        changing.look().unwrap();
        assert_eq!((charged(&outbox), restored()), (16 * MIB, 16 * MIB), "its space is its own");
        assert_eq!(changing.growth(Bytes(128 * MIB)).bytes(), Bytes(112 * MIB));
        let before = changing.begin(Bytes(128 * MIB), None);
        assert_eq!(charged(&outbox), 128 * MIB);
        changing.line.hang_up();
        drop(peer.join().unwrap());
        // Nobody answers: it is to be as before, and what it may have heard of stays charged.
        assert!(matches!(changing.carry_out(before), Err(Unchanged::Silent(_))));
        assert_eq!((outbox.space(), charged(&outbox), restored()), (Bytes(16 * MIB), 128 * MIB, 128 * MIB));
        drop(changing);
        outbox.end();
        assert_eq!((outboxes.charged(), outbox.info(true).state), (Charged::default(), OutboxState::Ended));
    });
}

#[test]
fn what_cannot_be_written_down_is_not_asked_for() {
    in_dir("unwritten", |dir, outboxes| {
        let (outbox, _listener) = made(outboxes);
        std::fs::rename(super::dir(dir), dir.join("away")).unwrap();
        let mut changing = outbox.change();
        let before = changing.begin(Bytes(128 * MIB), None);
        assert!(matches!(changing.carry_out(before), Err(Unchanged::Record(_))));
        assert_eq!((charged(&outbox), outbox.space()), (64 * MIB, Bytes(64 * MIB)));
    });
}

#[test]
fn the_next_daemon_knows_them_by_their_records() {
    in_dir("next", |dir, outboxes| {
        let (outbox, _listener) = made(outboxes);
        let record = record_path(&super::dir(dir), outbox.id);
        let text = std::fs::read_to_string(&record).unwrap();
        let load = |has_vm: bool| {
            let next = Outboxes::new(dir, PERIOD_DEFAULT);
            next.load(|_| has_vm).unwrap();
            next.all().iter().map(|outbox| (outbox.info(has_vm).state, charged(outbox))).collect::<Vec<_>>()
        };
        assert_eq!(load(true), [(OutboxState::Starting, 64 * MIB)]);
        assert_eq!(load(false), [(OutboxState::Starting, 64 * MIB)], "files wait in it");
        // Not whole, and not in its place: left alone.
        std::fs::write(&record, &text[..text.len() / 2]).unwrap();
        assert_eq!((load(true).len(), record.exists()), (0, true));
        let next = Outboxes::new(dir, PERIOD_DEFAULT);
        next.load(|_| true).unwrap();
        assert_eq!(next.unreadable(), std::slice::from_ref(&record));
        std::fs::write(&record, &text).unwrap();
        std::fs::rename(&record, record.with_file_name("web1.outbox")).unwrap();
        assert_eq!(load(true), []);
        // Its process has ended: said while its VM runs, and forgotten with it.
        let (pid, start) = own_process();
        Record { pid: (pid, start - 1), ..outbox.record() }.write(&record).unwrap();
        assert_eq!(load(true), [(OutboxState::Ended, 0)]);
        assert!(load(false).is_empty() && !record.exists());
        // Its process has not come, and cannot any more.
        Record { pid: (0, 0), ..outbox.record() }.write(&record).unwrap();
        assert!(load(true).is_empty() && !record.exists());
    });
}

fn auto(slo: &str) -> Auto {
    let weight = pagoda_core::policy::Shares::new(7).unwrap();
    Auto { slo: slo.parse().unwrap(), min: Bytes(MIB), max: Some(Bytes(256 * MIB)), weight }
}

/// What a size follows is written down before anything else, kept by the next daemon, and as before if the process does not answer.
#[test]
fn an_slo_is_kept_over_daemons_and_withdrawn_with_its_size() {
    in_dir("slo", |dir, outboxes| {
        let (outbox, listener) = made(outboxes);
        let peer = in_thread(listener, |_, asked| match asked {
            Packet::Look { seq } => Some(Packet::Figures { seq, figures: figures(64 * MIB, 0) }),
            Packet::SetSpace { seq, bytes } => Some(Packet::Figures { seq, figures: figures(bytes, 0) }),
            _ => None,
        });
        let next = || {
            let next = Outboxes::new(dir, PERIOD_DEFAULT);
            next.load(|_| true).unwrap();
            next.all()[0].auto()
        };
        let mut changing = outbox.change();
        let before = changing.begin(Bytes(64 * MIB), Some(auto("p90 4.6s")));
        changing.carry_out(before).unwrap();
        assert_eq!((outbox.auto(), next()), (Some(auto("p90 4.6s")), Some(auto("p90 4.6s"))));
        let elastic = outboxes.elastic();
        assert_eq!((elastic.spaces.bytes(), elastic.mins.bytes()), (Bytes(64 * MIB), Bytes(MIB)));
        outbox.set_lingering(true);
        assert_eq!(outboxes.elastic().spaces, PageCount::ZERO, "its VM has ended");
        outbox.set_lingering(false);
        changing.line.hang_up();
        drop(peer.join().unwrap());
        let before = changing.begin(Bytes(64 * MIB), None);
        assert!(changing.carry_out(before).is_err());
        assert_eq!((outbox.auto(), next()), (Some(auto("p90 4.6s")), Some(auto("p90 4.6s"))));
        assert_eq!(outboxes.elastic().spaces, PageCount::ZERO, "a silent one gives nothing");
    });
}

/// A process of an older version breaks the connection on a question that it does not know. It goes on to serve, and is asked that no more.
#[test]
fn a_process_that_knows_no_jobs_is_survived() {
    in_dir("older", |_, outboxes| {
        let (outbox, listener) = made(outboxes);
        let peer = std::thread::spawn(move || {
            let mut asked = 0;
            // Three that end with the question, and one that does not.
            for _ in 0..4 {
                answer(&listener, |_, packet| match packet {
                    Packet::Look { seq } => Some(Packet::Figures { seq, figures: figures(64 * MIB, 0) }),
                    Packet::Jobs { .. } => {
                        asked += 1;
                        None
                    }
                    _ => None,
                });
            }
            asked
        });
        for _ in 0..5 {
            outbox.change().look().unwrap();
            let _ = outbox.change().hear(1);
            assert_eq!(outbox.info(true).state, OutboxState::Serving);
        }
        outbox.change().line.hang_up();
        assert_eq!(peer.join().unwrap(), 3);
    });
}

/// Jobs as a process tells of them, twice the packets' worth.
#[test]
fn jobs_are_heard_and_shown() {
    use pagoda_abi::attach::{List, OutboxCounts, OutboxJob};
    in_dir("jobs", |_, outboxes| {
        let (outbox, listener) = made(outboxes);
        let mut last = 5;
        let peer = in_thread(listener, move |_, packet| match packet {
            Packet::Look { seq } => Some(Packet::Figures { seq, figures: figures(64 * MIB, 0) }),
            Packet::Jobs { seq, after } => {
                let mut jobs = List::default();
                for number in after.saturating_add(1)..=last {
                    let job = OutboxJob { number, began_ms: 1, ended_ms: 501, output: 9, ..OutboxJob::default() };
                    if !jobs.push(OutboxJob { id: *b"job\x1b0000000000000000000000000000", ..job }) {
                        break;
                    }
                }
                let counts = OutboxCounts { now_ms: 1000, oldest: 1, last, began: last, ..OutboxCounts::default() };
                // More end behind the first question.
                last += if after == u64::MAX { 30 } else { 0 };
                Some(Packet::JobsEnded { seq, counts, jobs })
            }
            _ => None,
        });
        let mut heard = Vec::new();
        for _ in 0..3 {
            outbox.change().look().unwrap();
            let now = outbox.change().hear(outboxes.now_ms()).unwrap().unwrap();
            outboxes.heard(&outbox, &now);
            heard.push(now.jobs.len());
        }
        assert_eq!(heard, [0, 30, 0]);
        let profile = outboxes.info(&outbox, true).profile.unwrap();
        assert_eq!((profile.jobs_ended, profile.jobs_lost, profile.recent.len()), (35, 0, 10));
        let job = &profile.recent[0];
        assert_eq!((job.number, job.took_ms, job.output_bytes), (35, 500, 9));
        assert!(job.id.starts_with("job?000"), "{}", job.id);
        assert_eq!(profile.verdict, None, "its size is set by hand");
        outbox.change().line.hang_up();
        drop(peer.join().unwrap());
    });
}
