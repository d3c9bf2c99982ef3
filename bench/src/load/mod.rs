//! A load on a disk that can verify what it reads: every page says which page it is and how often it was written.

mod connection;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use pagoda_guest::rng::Rng;
use testkit::results::report::{Bar, Report};

pub use connection::Connection;

pub const PAGE: usize = 4096;
/// Pages of a request that fills or checks a disk.
const RUN_PAGES: u32 = 64;
/// Such requests under way.
const RUN_DEPTH: usize = 4;

/// What the pages of a disk may hold.
///
/// A page's writes are counted. One that failed or was never answered may or may not have happened: the page then holds
/// any count from the last that was answered on. No two requests to one page are under way at a time.
#[derive(Debug)]
pub struct Ledger {
    pages: Vec<Known>,
    /// Counts up to this one belong to others.
    epoch: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    answered: u32,
    issued: u32,
    under_way: bool,
}

impl Ledger {
    fn new(pages: u64) -> Ledger {
        Ledger { pages: vec![Known::default(); pages as usize], epoch: 0 }
    }

    /// From now on somebody else writes, whose counts were never used before. What was under way stays uncertain.
    fn begin_owner(&mut self) {
        self.epoch = self.pages.iter().map(|page| page.issued).max().unwrap_or(0);
        self.pages.iter_mut().for_each(|page| page.under_way = false);
    }

    /// Whether a page may hold this. `certain`: from now on it must.
    fn judge(&mut self, page: u64, content: &[u8], certain: bool) -> bool {
        let known = &mut self.pages[page as usize];
        let Some(count) = count_of(page, content) else { return false };
        let right = (known.answered..=known.issued).contains(&count);
        if right && certain {
            (known.answered, known.issued) = (count, count);
        }
        right
    }
}

/// What a page holds after so many writes.
fn tag(page: u64, count: u32) -> u64 {
    if count == 0 { 0 } else { page << 32 | u64::from(count) }
}

fn fill(page: u64, count: u32, content: &mut [u8]) {
    content.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&tag(page, count).to_le_bytes()));
}

/// The count, if the content is whole and this page's.
fn count_of(page: u64, content: &[u8]) -> Option<u32> {
    let (first, _) = content.split_first_chunk::<8>()?;
    let whole = content.chunks_exact(8).all(|word| word == first);
    let tagged = u64::from_le_bytes(*first);
    let count = tagged as u32;
    (whole && tagged == tag(page, count)).then_some(count)
}

/// Something to ask of a disk.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    pub page: u64,
    pub pages: u32,
    pub write: bool,
}

/// What came of a load.
#[derive(Debug, Default)]
pub struct Done {
    /// Requests that failed, or were not answered when the connection ended.
    pub errors: u64,
    /// Pages that did not hold what they must.
    pub wrong: u64,
    pub bytes: u64,
    /// When each answered request was asked and answered, in the order of the answers.
    pub times: Vec<(Instant, Instant)>,
    /// Why the connection ended, where it did.
    pub cut_off: Option<String>,
}

impl Done {
    /// The longest that a request took, of those answered in this time.
    pub fn longest_ms(&self, from: Instant, to: Instant) -> f64 {
        let within = self.times.iter().filter(|(_, answered)| (from..=to).contains(answered));
        within.map(|(asked, answered)| ms(*answered - *asked)).fold(0.0, f64::max)
    }

    /// The longest time in which nothing was answered.
    pub fn longest_gap_ms(&self) -> f64 {
        self.times.windows(2).map(|pair| ms(pair[1].1.saturating_duration_since(pair[0].1))).fold(0.0, f64::max)
    }

    pub fn mib_per_second(&self) -> f64 {
        let began = self.times.iter().map(|(asked, _)| *asked).min();
        let took = began.zip(self.times.last()).map_or(0.0, |(began, last)| (last.1 - began).as_secs_f64());
        if took > 0.0 { self.bytes as f64 / f64::from(1 << 20) / took } else { 0.0 }
    }
}

/// What must not happen, over all rounds of a bench.
#[derive(Debug, Default)]
pub struct Tally {
    errors: u64,
    wrong: u64,
}

impl Tally {
    pub fn add(&mut self, done: &Done) {
        if let Some(reason) = &done.cut_off {
            eprintln!("bench: the connection ended: {reason}");
        }
        self.errors += done.errors;
        self.wrong += done.wrong;
    }

    pub fn figures(&self, report: &mut Report) {
        report.single("errors, all rounds", "requests", &[self.errors as f64], Bar::AtMost(0.0));
        report.single("wrong pages, all rounds", "pages", &[self.wrong as f64], Bar::AtMost(0.0));
    }
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A disk, and what it must hold.
#[derive(Debug)]
pub struct Load {
    connection: Connection,
    ledger: Ledger,
    under_way: Vec<Option<(Request, Instant)>>,
    content: Vec<u8>,
}

impl Load {
    /// Of a disk that was never written to.
    ///
    /// # Errors
    /// Nobody exports it there.
    pub fn new(socket: &Path) -> Result<Load> {
        let connection = Connection::open(socket)?;
        let ledger = Ledger::new(connection.size / PAGE as u64);
        Ok(Load { connection, ledger, under_way: Vec::new(), content: vec![0; RUN_PAGES as usize * PAGE] })
    }

    /// The same disk at another exporter, whose writes can be told from all before. Gives the last connection.
    ///
    /// # Errors
    /// Nobody exports it there.
    pub fn move_to(&mut self, socket: &Path) -> Result<Connection> {
        let before = std::mem::replace(&mut self.connection, Connection::open(socket)?);
        self.ledger.begin_owner();
        Ok(before)
    }

    /// How long the server is waited for.
    ///
    /// # Errors
    /// The system refuses.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        self.connection.set_patience(patience)
    }

    /// Writes every page once.
    pub fn fill(&mut self) -> Done {
        self.pass(true)
    }

    /// Reads every page. What it holds then is what it must hold from now on.
    pub fn check(&mut self) -> Done {
        self.pass(false)
    }

    fn pass(&mut self, write: bool) -> Done {
        let count = self.ledger.pages.len() as u64;
        let request = |page| Request { page, pages: RUN_PAGES.min((count - page) as u32), write };
        let mut requests = (0..count).step_by(RUN_PAGES as usize).map(request);
        self.drive(RUN_DEPTH, |_| requests.next())
    }

    /// Reads and writes single pages at random, half and half, until `is_over`.
    pub fn at_random(&mut self, depth: usize, seed: u64, is_over: impl Fn() -> bool) -> Done {
        let mut rng = Rng::new(seed);
        self.drive(depth, |ledger| {
            if is_over() {
                return None;
            }
            let count = ledger.pages.len() as u64;
            let mut page = rng.below(count);
            while ledger.pages[page as usize].under_way {
                page = (page + 1) % count;
            }
            Some(Request { page, pages: 1, write: rng.percent(50) })
        })
    }

    /// Reads and writes at random on a thread of its own, for as long as `meanwhile` goes on.
    ///
    /// # Errors
    /// Those of `meanwhile`.
    pub fn during<T>(&mut self, depth: usize, seed: u64, meanwhile: impl FnOnce() -> Result<T>) -> Result<(Done, T)> {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| self.at_random(depth, seed, || over.load(Ordering::Relaxed)));
            let result = meanwhile();
            over.store(true, Ordering::Relaxed);
            let done = load.join().map_err(|_| anyhow!("the load has ended"))?;
            Ok((done, result?))
        })
    }

    /// Keeps `depth` requests under way until there are no more, or the connection ends.
    fn drive(&mut self, depth: usize, mut next: impl FnMut(&Ledger) -> Option<Request>) -> Done {
        let mut done = Done::default();
        self.under_way = vec![None; depth];
        if let Err(error) = self.work(&mut next, &mut done) {
            done.errors += self.under_way.iter().flatten().count() as u64;
            done.cut_off = Some(format!("{error:#}"));
        }
        done
    }

    fn work(&mut self, next: &mut impl FnMut(&Ledger) -> Option<Request>, done: &mut Done) -> Result<()> {
        let mut over = false;
        loop {
            while !over && let Some(slot) = self.under_way.iter().position(Option::is_none) {
                match next(&self.ledger) {
                    Some(request) => self.ask(slot, request)?,
                    None => over = true,
                }
            }
            if self.under_way.iter().all(Option::is_none) {
                return Ok(());
            }
            self.answer(done)?;
        }
    }

    fn ask(&mut self, slot: usize, request: Request) -> Result<()> {
        let Request { page, pages, write } = request;
        let content = &mut self.content[..pages as usize * PAGE];
        for (page, content) in (page..).zip(content.chunks_exact_mut(PAGE)) {
            let known = &mut self.ledger.pages[page as usize];
            known.under_way = true;
            if write {
                known.issued = known.issued.max(self.ledger.epoch) + 1;
                fill(page, known.issued, content);
            }
        }
        self.under_way[slot] = Some((request, Instant::now()));
        let length = content.len() as u32;
        self.connection.ask(slot as u64, page * PAGE as u64, length, write.then_some(&*content))
    }

    fn answer(&mut self, done: &mut Done) -> Result<()> {
        let answer = self.connection.answer()?;
        let slot = self.under_way.get_mut(answer.cookie as usize).and_then(Option::take);
        let Some((Request { page, pages, write }, asked)) = slot else { bail!("an answer to no request") };
        let content = &mut self.content[..pages as usize * PAGE];
        let good = answer.error == 0;
        if good && !write {
            self.connection.content(content)?;
        }
        done.times.push((asked, Instant::now()));
        done.errors += u64::from(!good);
        done.bytes += if good { content.len() as u64 } else { 0 };
        for (page, content) in (page..).zip(content.chunks_exact(PAGE)) {
            let known = &mut self.ledger.pages[page as usize];
            known.under_way = false;
            match (good, write) {
                (true, true) => known.answered = known.issued,
                (true, false) => done.wrong += u64::from(!self.ledger.judge(page, content, true)),
                (false, _) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_holds_what_was_answered_or_what_may_have_happened() {
        let mut ledger = Ledger::new(8);
        let judge = |ledger: &mut Ledger, page: u64, count: u32| {
            let mut content = vec![0; PAGE];
            fill(page, count, &mut content);
            ledger.judge(5, &content, false)
        };
        (ledger.pages[5].answered, ledger.pages[5].issued) = (2, 4);
        let got: Vec<bool> = (1..=5).map(|count| judge(&mut ledger, 5, count)).collect();
        assert_eq!(got, [false, true, true, true, false]);
        assert!(!judge(&mut ledger, 6, 3), "another page");
        assert!(!judge(&mut ledger, 5, 0), "zeros");
        let mut torn = vec![0; PAGE];
        fill(5, 3, &mut torn);
        fill(5, 4, &mut torn[PAGE / 2..]);
        assert!(!ledger.judge(5, &torn, false), "half of one write and half of another");
        fill(5, 3, &mut torn);
        assert!(ledger.judge(5, &torn, true) && !judge(&mut ledger, 5, 4), "what was once read stays");
    }
}
