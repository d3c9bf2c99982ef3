//! What becomes known of servers while a client is at work. Some servers come into etcd or, where there is none, into the file
//! `servers`. Some are at another address than they were, as etcd or they themselves say.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rmap::announce::Listening;
use rmap::client::{Client, Hint, ServerInfo};
use rmap::units::{BootEpoch, ServerId, Time};
use rmap_etcd::{Etcd, Node};
use rmap_io::net::AnnounceListener;

use crate::config::{PoolConfig, info};
use crate::{Report, store};

/// A server's lease lasts as long.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Until it is twice the same, as a line may take to be written.
const LIST_EVERY: Duration = Duration::from_secs(2);
/// The thread that hears announcements looks so often whether it is still wanted.
const WANTED_EVERY: Duration = Duration::from_secs(1);

/// A piece of news.
#[derive(Debug)]
enum News {
    Came(ServerInfo),
    /// One that is known says where it is; another place than before, or only another life there.
    Is(Hint, AddressChange),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressChange {
    Same,
    Other,
}

/// Looks for news, on threads that end with this.
#[derive(Debug)]
pub struct Watch {
    news: Receiver<News>,
    report: Report,
    /// Nothing is sent: they are the threads' signs that this is still there.
    _wanted: Vec<Sender<()>>,
}

impl Watch {
    /// News besides what is `listed`. Of announcements those of listed servers are heard; where that cannot be done, the operator
    /// is told. One that the client knows only as a silent stand-in ([`crate::connect::stand_in`]) comes when it is there
    /// again.
    ///
    /// # Errors
    /// etcd does not answer; keys are missing; no thread is to be had.
    pub fn start(pool: &PoolConfig, listed: &[ServerInfo]) -> Result<Watch> {
        let (sender, news) = mpsc::channel();
        let mut wanted = Vec::new();
        let known = Known::of(listed);
        let (sign, unwanted) = mpsc::channel();
        let (at_start, news_sender) = (known.clone(), sender.clone());
        match pool.connect()? {
            Some(etcd) => start("etcd-servers", move || look(etcd, at_start, &news_sender, &unwanted))?,
            None => {
                let list = List { dir: pool.dir.clone(), known: at_start, before: Ok(Vec::new()) };
                let report = pool.report;
                start("listed-servers", move || list.follow(&news_sender, report, &unwanted))?;
            }
        }
        wanted.push(sign);
        match listen_for(pool, listed)? {
            Some(Ok(ears)) => {
                let (sign, unwanted) = mpsc::channel();
                start("announcements", move || receive_announcements(ears, known, &sender, &unwanted))?;
                wanted.push(sign);
            }
            Some(Err(error)) => {
                (pool.report)(&format!("{error:#}; servers that move are found when this program is started again"));
            }
            None => {}
        }
        Ok(Watch { news, report: pool.report, _wanted: wanted })
    }

    /// Tells the client what is new since the last time. Never waits.
    pub fn inform(&self, client: &mut Client, now: Time) {
        for news in self.news.try_iter() {
            match news {
                News::Came(server) => {
                    let id = server.id.0;
                    match client.add_server(now, server) {
                        Ok(()) => (self.report)(&format!("server {id} has come")),
                        Err(error) => (self.report)(&format!("server {id} is not used: {error}")),
                    }
                }
                News::Is(hint, change) => {
                    client.hint(now, &hint);
                    if change == AddressChange::Other {
                        (self.report)(&format!("server {} says that it is at {} now", hint.server.0, hint.addr));
                    }
                }
            }
        }
    }
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(run).map(drop).context("start a thread")
}

/// Servers, where they are, and in which life if they said so.
#[derive(Clone, Debug)]
struct Known(HashMap<ServerId, (SocketAddr, Option<BootEpoch>)>);

impl Known {
    fn of(listed: &[ServerInfo]) -> Known {
        Known(listed.iter().map(|server| (server.id, (server.addr, None))).collect())
    }

    fn has(&self, server: ServerId) -> bool {
        self.0.contains_key(&server)
    }

    /// Adds one; `false` if it was known.
    fn add(&mut self, server: &ServerInfo) -> bool {
        let count = self.0.len();
        self.0.entry(server.id).or_insert((server.addr, None));
        self.0.len() > count
    }

    /// Takes note of a place; whether it is another one, if there is anything new about it.
    fn note(&mut self, hint: &Hint) -> Option<AddressChange> {
        let reported = (hint.addr, Some(hint.epoch));
        match self.0.insert(hint.server, reported) {
            before if before == Some(reported) => None,
            Some((addr, _)) if addr == hint.addr => Some(AddressChange::Same),
            _ => Some(AddressChange::Other),
        }
    }

    /// What a record of etcd says that is new.
    fn news_of(&mut self, node: Node) -> Option<News> {
        let hint = Hint { server: node.id, addr: node.addr, epoch: node.epoch };
        let is_known = self.has(node.id);
        let change = self.note(&hint)?;
        Some(if is_known { News::Is(hint, change) } else { News::Came(info(node)) })
    }
}

/// Asks etcd for its servers now and then, until nobody wants to know, and sends what is new.
fn look(mut etcd: Etcd, mut known: Known, news: &Sender<News>, unwanted: &Receiver<()>) {
    while unwanted.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
        // While etcd is away nobody comes; that it is is said by others.
        let nodes = etcd.nodes().map_or(Vec::new(), |(nodes, _)| nodes);
        for node in nodes {
            // Nobody listens: the next look ends.
            let _ = known.news_of(node).map(|piece| news.send(piece));
        }
    }
}

/// The file `servers`, where there is no etcd.
#[derive(Debug)]
struct List {
    dir: PathBuf,
    known: Known,
    /// What it had at the last look, or what was wrong with it.
    before: Result<Vec<ServerInfo>, String>,
}

impl List {
    /// Follows it. Who is not in it any more is not forgotten, and who has another line is not taken for another one: pages are
    /// where they were.
    fn follow(mut self, news: &Sender<News>, report: Report, unwanted: &Receiver<()>) {
        let mut reported = String::new();
        while unwanted.recv_timeout(LIST_EVERY) == Err(RecvTimeoutError::Timeout) {
            match self.look() {
                Ok(new) => {
                    reported.clear();
                    // Nobody listens: the next look ends.
                    new.into_iter().for_each(|server| drop(news.send(News::Came(server))));
                }
                Err(wrong) if wrong == reported => {}
                Err(wrong) => {
                    report(&format!("{wrong}; until that is right, nobody who is new there is used"));
                    reported = wrong;
                }
            }
        }
    }

    /// Those who are new in it. Only what was there at the last look, too, counts: somebody may be writing it.
    fn look(&mut self) -> Result<Vec<ServerInfo>, String> {
        let now = store::servers(&self.dir).map_err(|error| format!("{error:#}"));
        let before = std::mem::replace(&mut self.before, now.clone());
        if now != before {
            return Ok(Vec::new());
        }
        let listed = now?;
        Ok(listed.into_iter().filter(|server| self.known.add(server)).collect())
    }
}

/// What announcements are heard with.
#[derive(Debug)]
pub struct Ears {
    pub listener: AnnounceListener,
    pub listening: Listening,
}

/// To hear the announcements of the servers that make some; `None` if none does.
///
/// # Errors
/// Keys are missing; the inner one: the place where they are made cannot be listened at.
pub fn listen_for(pool: &PoolConfig, listed: &[ServerInfo]) -> Result<Option<Result<Ears>>> {
    let (_, key) = store::identity(&pool.dir)?;
    let mut listening = Listening::new(key);
    // One after the other: all are to be known.
    let known = listed.iter().filter(|server| listening.know(server)).count();
    let heard = pool.announcements;
    let bind =
        || AnnounceListener::bind(heard.on, heard.at).with_context(|| format!("hear announcements at {}", heard.at));
    Ok((known > 0).then(|| Ok(Ears { listener: bind()?, listening })))
}

/// As announcements count time: milliseconds since 1970.
pub fn stamp_ms() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64)
}

/// Takes in announcements of servers until nobody wants to know, and sends what is new.
fn receive_announcements(ears: Ears, mut known: Known, news: &Sender<News>, unwanted: &Receiver<()>) {
    let Ears { listener, mut listening } = ears;
    while unwanted.try_recv() == Err(TryRecvError::Empty) {
        let heard = listener.wait(WANTED_EVERY).and_then(|()| {
            let now = stamp_ms();
            listener.receive(|datagram| {
                let Ok(said) = listening.take(now, datagram) else { return };
                let hint = said.hint();
                let change = known.note(&hint);
                // Nobody listens: the next look ends.
                let _ = change.map(|change| news.send(News::Is(hint, change)));
            })
        });
        if heard.is_err() {
            // Not again at once.
            let _ = unwanted.recv_timeout(WANTED_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_new_is_told() {
        let addr = |port| SocketAddr::from(([10, 0, 0, 5], port));
        let key = rmap::crypto::PublicKey([1; 32]);
        let mut known = Known::of(&[ServerInfo { id: ServerId(1), addr: addr(1), key, zone: 0, announcer: None }]);
        let hint = |port, epoch| Hint { server: ServerId(1), addr: addr(port), epoch: BootEpoch(epoch) };
        for (port, epoch, expected) in [
            (1, 7, Some(AddressChange::Same)),
            (1, 7, None),
            (1, 8, Some(AddressChange::Same)),
            (2, 8, Some(AddressChange::Other)),
            (2, 8, None),
            (1, 8, Some(AddressChange::Other)),
        ] {
            assert_eq!(known.note(&hint(port, epoch)), expected, "{port} {epoch}");
        }
        assert!(known.has(ServerId(1)) && !known.has(ServerId(2)));
    }

    /// As an operator edits it, and as an editor writes it.
    #[test]
    fn servers_come_by_the_list_when_it_has_settled() {
        let dir = std::env::temp_dir().join(format!("pagoda-news-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let line = |id: u32, zone| format!("{id} 10.0.0.{id}:7070 {} {zone}\n", "5c".repeat(32));
        let listed = rmap::servers::parse(&line(1, 0)).unwrap();
        let mut list = List { dir: dir.clone(), known: Known::of(&listed), before: Ok(Vec::new()) };
        let mut look = |content: Option<String>| {
            if let Some(content) = content {
                std::fs::write(store::servers_path(&dir), content).unwrap();
            }
            list.look().map(|new| new.into_iter().map(|server| (server.id.0, server.zone)).collect::<Vec<_>>())
        };
        // None yet; then the one that is known.
        assert_eq!((look(None), look(None)), (Ok(vec![]), Ok(vec![])));
        assert_eq!((look(Some(line(1, 0))), look(None)), (Ok(vec![]), Ok(vec![])));
        // Half of a line makes sense by chance, or none.
        let whole = line(1, 0) + &line(2, 12) + &line(3, 4);
        let half = whole.split_once("12").unwrap().0.to_owned() + "1";
        assert_eq!((look(Some(half)), look(Some(whole[..whole.len() - 9].to_owned()))), (Ok(vec![]), Ok(vec![])));
        assert_eq!((look(Some(whole)), look(None), look(None)), (Ok(vec![]), Ok(vec![(2, 12), (3, 4)]), Ok(vec![])));
        // What is wrong for longer is an error, and ends with it.
        assert_eq!(look(Some("4 nowhere\n".to_owned())), Ok(vec![]));
        assert!(look(None).unwrap_err().contains("line 1"));
        // Who was in it is not told again, nor as another one.
        assert_eq!((look(Some(line(4, 0) + &line(2, 7))), look(None)), (Ok(vec![]), Ok(vec![(4, 0)])));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
