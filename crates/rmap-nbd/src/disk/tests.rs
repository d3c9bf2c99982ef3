//! The disk against an array of bytes, over pages whose results come late and in any order.

use proptest::prelude::*;

use super::*;
use rmap::client::Event;

const PAGES: u64 = 6;
const SIZE: usize = PAGES as usize * PAGE_SIZE;

/// Of a page; none of a hole.
type Content = Option<Box<Page>>;

/// Pages with operations that take effect, one by one, when the test says so. Writes to a page take effect in order.
#[derive(Default)]
struct Model {
    pages: Vec<Content>,
    waiting: Vec<(Token, PageNo, Option<Content>)>,
    /// The question who owns the pages is under way.
    is_asked: bool,
    room: usize,
}

impl Model {
    fn new(room: usize) -> Model {
        Model { pages: vec![None; PAGES as usize], waiting: Vec::new(), is_asked: false, room }
    }

    fn begin(&mut self, token: Token, page: PageNo, change: Option<Content>) -> Result<(), Refused> {
        if self.waiting.len() >= self.room {
            return Err(Refused::Busy);
        }
        let writes = self.waiting.iter().any(|(_, other, before)| *other == page && before.is_some());
        assert!(!writes || change.is_none(), "two writes to page {} at a time", page.0);
        self.waiting.push((token, page, change));
        Ok(())
    }

    /// Ends one operation that waits, chosen by `pick`, and returns its result.
    fn finish(&mut self, pick: usize, page: &mut Page) -> Option<Event> {
        let pick = pick % (self.waiting.len() + usize::from(self.is_asked)).max(1);
        if pick == self.waiting.len() {
            return std::mem::take(&mut self.is_asked).then_some(Event::Written { token: CONFIRM, result: Ok(()) });
        }
        let (token, number, change) = self.waiting.remove(pick);
        let stored = &mut self.pages[number.0 as usize];
        match change {
            None => {
                *page = stored.as_deref().copied().unwrap_or(ZERO_PAGE);
                Some(Event::Read { token, result: Ok(()) })
            }
            Some(content) => {
                *stored = content;
                Some(Event::Written { token, result: Ok(()) })
            }
        }
    }

    fn byte(&self, at: usize) -> u8 {
        self.pages[at / PAGE_SIZE].as_ref().map_or(0, |page| page[at % PAGE_SIZE])
    }
}

impl Pages for Model {
    fn read(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.begin(token, page, None)
    }

    fn write(&mut self, page: PageNo, content: &Page, token: Token) -> Result<(), Refused> {
        self.begin(token, page, Some(Some(Box::new(*content))))
    }

    fn trim(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.begin(token, page, Some(None))
    }

    fn confirm(&mut self, token: Token) -> Result<(), Refused> {
        assert!(token == CONFIRM && !self.is_asked, "asked once for all who wait");
        self.is_asked = true;
        Ok(())
    }

    fn queued(&self) -> usize {
        0
    }

    fn run(&self, page: PageNo, max: u64) -> PageRun {
        let hole = self.pages[page.0 as usize].is_none();
        let alike = self.pages[page.0 as usize..].iter().take(max as usize).take_while(|p| p.is_none() == hole);
        PageRun { pages: alike.count() as u64, hole }
    }
}

/// What a test does.
#[derive(Clone, Debug)]
enum Act {
    Begin {
        kind: Kind,
        offset: usize,
        length: usize,
        fill: u8,
    },
    /// Some of the content of the WRITE that is being received.
    Feed(usize),
    Finish(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let kind = prop_oneof![
        2 => Just(Kind::Read),
        4 => Just(Kind::Write),
        1 => Just(Kind::Zero { holes: true }),
        1 => Just(Kind::Zero { holes: false }),
        1 => Just(Kind::Trim),
    ];
    // Lengths around the size of a page, and a few long ones.
    let length = prop_oneof![1_usize..200, 4000_usize..4200, 1..SIZE];
    prop_oneof![
        3 => (kind, 0..SIZE, length, 1_u8..).prop_map(|(kind, offset, length, fill)| {
            Act::Begin { kind, offset, length: length.min(SIZE - offset), fill }
        }),
        3 => (1..9000_usize).prop_map(Act::Feed),
        4 => any::<prop::sample::Index>().prop_map(|index| Act::Finish(index.index(64))),
    ]
}

/// A request under way, and what each byte of it may turn out to be.
struct Open {
    id: usize,
    kind: Kind,
    offset: usize,
    length: usize,
    fill: u8,
    left: usize,
}

/// What a byte may be.
#[derive(Clone, Debug)]
struct Byte {
    may: Vec<u8>,
    /// What was being written since everything was at rest. Once it is again, one of these is there.
    written: Vec<u8>,
}

impl Byte {
    fn check(&self, at: usize, got: u8) {
        let Byte { may, written } = self;
        assert!(may.contains(&got) || written.contains(&got), "byte {at} is {got}, not of {may:?} or {written:?}");
    }
}

struct Test {
    disk: Disk,
    model: Model,
    bytes: Vec<Byte>,
    open: Vec<Open>,
    receiving: Option<usize>,
}

impl Test {
    fn new(room: usize) -> Test {
        let bytes = vec![Byte { may: vec![0], written: Vec::new() }; SIZE];
        Test { disk: Disk::new(SIZE as u64), model: Model::new(room), bytes, open: Vec::new(), receiving: None }
    }

    /// The bytes that a request changes, and to what.
    fn changed(open: &Open) -> Option<(std::ops::Range<usize>, u8)> {
        let (start, end) = (open.offset, open.offset + open.length);
        match open.kind {
            Kind::Read => None,
            Kind::Write => Some((start..end, open.fill)),
            Kind::Zero { .. } => Some((start..end, 0)),
            Kind::Trim => {
                let (first, last) = (start.next_multiple_of(PAGE_SIZE), end / PAGE_SIZE * PAGE_SIZE);
                Some((first..last.max(first), 0))
            }
        }
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Begin { kind, offset, length, fill } => {
                // One WRITE is received at a time, as on a connection.
                if (kind == Kind::Write && self.receiving.is_some()) || self.open.len() >= 12 {
                    return;
                }
                let id = self.disk.begin(0, 7, kind, offset as u64, length as u32);
                let open = Open { id, kind, offset, length, fill, left: length };
                if let Some((range, value)) = Test::changed(&open) {
                    self.bytes[range].iter_mut().for_each(|byte| byte.written.push(value));
                }
                if kind == Kind::Write {
                    self.receiving = Some(id);
                }
                self.open.push(open);
            }
            Act::Feed(count) => self.feed(count),
            Act::Finish(pick) => self.finish(pick),
        }
        self.settle();
    }

    fn feed(&mut self, count: usize) {
        let Some(open) = self.open.iter_mut().find(|open| Some(open.id) == self.receiving) else { return };
        let content = vec![open.fill; count.min(open.left)];
        open.left -= self.disk.put(open.id, &content, &mut self.model);
        assert_eq!(self.disk.has_all(open.id), open.left == 0);
        if open.left == 0 {
            self.receiving = None;
        }
    }

    fn finish(&mut self, pick: usize) {
        let mut page = ZERO_PAGE;
        if let Some(event) = self.model.finish(pick, &mut page) {
            self.disk.on_event(event, &page, &mut self.model);
        }
    }

    fn settle(&mut self) {
        self.disk.begin_round();
        self.disk.run(&mut self.model);
        while let Some((owner, id)) = self.disk.poll_done() {
            assert_eq!(owner, 0);
            let at = self.open.iter().position(|open| open.id == id).unwrap();
            let open = self.open.swap_remove(at);
            let request = self.disk.request(id);
            assert_eq!(request.error, None);
            for (at, got) in (open.offset..).zip(&request.data) {
                self.bytes[at].check(at, *got);
            }
            self.disk.free(id);
        }
        if self.open.is_empty() {
            for byte in self.bytes.iter_mut().filter(|byte| !byte.written.is_empty()) {
                byte.may = std::mem::take(&mut byte.written);
            }
        }
    }

    /// Lets operations end until no request is open.
    fn drain(&mut self) {
        let mut steps = 0;
        while !self.open.is_empty() {
            self.feed(SIZE);
            self.finish(steps);
            self.settle();
            steps += 1;
            assert!(steps < 100_000, "{} requests never end", self.open.len());
        }
        assert!(self.disk.is_idle());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every byte is what was last written there, or one of the writes that ran at the same time; and neighbours in a page
    /// never undo each other, which alternating bytes would show.
    #[test]
    fn bytes_are_what_was_written(acts in prop::collection::vec(act(), 1..60), room in 1_usize..20) {
        let mut test = Test::new(room);
        acts.iter().for_each(|act| test.act(act));
        test.drain();
        for (at, byte) in test.bytes.iter().enumerate() {
            byte.check(at, test.model.byte(at));
        }
    }

    /// Writes that do not overlap, all at once, into the same few pages: every one of them must be there in the end.
    #[test]
    fn neighbours_in_a_page_stay(
        cuts in prop::collection::btree_set(1..SIZE, 1..24),
        order in prop::collection::vec(any::<prop::sample::Index>(), 400),
        room in 1_usize..8,
    ) {
        let mut test = Test::new(room);
        let cuts: Vec<usize> = std::iter::once(0).chain(cuts).chain([SIZE]).collect();
        let mut left: Vec<(usize, usize, u8)> =
            cuts.windows(2).zip(1..).map(|(cut, fill)| (cut[0], cut[1] - cut[0], fill)).collect();
        let expected = left.clone();
        let mut picks = order.iter().cycle();
        while !left.is_empty() || !test.open.is_empty() {
            let pick = picks.next().unwrap();
            if !left.is_empty() && test.receiving.is_none() {
                let (offset, length, fill) = left.swap_remove(pick.index(left.len()));
                test.act(&Act::Begin { kind: Kind::Write, offset, length, fill });
                if test.receiving.is_none() {
                    left.push((offset, length, fill));
                }
            }
            test.act(&Act::Feed(SIZE));
            test.act(&Act::Finish(pick.index(64)));
        }
        for (offset, length, fill) in expected {
            let wrong = (offset..offset + length).find(|at| test.model.byte(*at) != fill);
            prop_assert_eq!(wrong, None, "of the write at {}", offset);
        }
    }
}

#[test]
fn failures_have_their_numbers_and_nothing_stays_held() {
    for (failure, error) in [
        (Failure::Lost, Errno::Io),
        (Failure::Corrupt, Errno::Io),
        (Failure::Silent, Errno::Io),
        (Failure::Declined, Errno::NoSpace),
        (Failure::Fenced, Errno::Shutdown),
    ] {
        let (mut disk, mut model) = (Disk::new(SIZE as u64), Model::new(8));
        // A part of a page: the read before the write fails.
        let request = disk.begin(3, 1, Kind::Write, 10, 20);
        assert_eq!(disk.put(request, &[1; 20], &mut model), 20);
        let (token, _, _) = model.waiting.remove(0);
        disk.on_event(Event::Read { token, result: Err(failure) }, &ZERO_PAGE, &mut model);
        assert_eq!(disk.poll_done(), Some((3, request)));
        assert_eq!(disk.request(request).error, Some(error));
        disk.free(request);
        assert!(disk.is_idle() && disk.held.is_empty());
    }
}

#[test]
fn what_a_client_left_behind_ends_by_itself() {
    let (mut disk, mut model) = (Disk::new(SIZE as u64), Model::new(2));
    let write = disk.begin(1, 1, Kind::Write, 0, 3 * PAGE_SIZE as u32);
    assert_eq!(disk.put(write, &[1; PAGE_SIZE + 100], &mut model), PAGE_SIZE, "only whole pieces are begun");
    disk.begin(1, 2, Kind::Read, 0, SIZE as u32);
    disk.begin(2, 3, Kind::Zero { holes: false }, 0, 2 * PAGE_SIZE as u32);
    disk.run(&mut model);
    disk.abandon(1);
    let mut page = ZERO_PAGE;
    let mut done = Vec::new();
    while !disk.is_idle() {
        disk.run(&mut model);
        if let Some(event) = model.finish(0, &mut page) {
            disk.on_event(event, &page, &mut model);
        }
        while let Some((owner, id)) = disk.poll_done() {
            done.push((owner, disk.request(id).cookie));
            disk.free(id);
        }
    }
    assert_eq!(done, [(2, 3)], "nobody is there to be told of the rest");
    assert_eq!(disk.free_requests.len(), disk.requests.len());
}

/// Where each hole is a step of its own, a long trim takes many turns, and says each time that it could go on: no result comes of a
/// hole.
#[test]
fn a_trim_of_many_holes_goes_on_by_itself() {
    struct Single;
    impl Pages for Single {
        fn read(&mut self, _: PageNo, _: Token) -> Result<(), Refused> {
            unreachable!("nothing is read")
        }

        fn write(&mut self, _: PageNo, _: &Page, _: Token) -> Result<(), Refused> {
            unreachable!("nothing is written")
        }

        fn trim(&mut self, _: PageNo, _: Token) -> Result<(), Refused> {
            unreachable!("there is no content")
        }

        fn confirm(&mut self, _: Token) -> Result<(), Refused> {
            Ok(())
        }

        fn queued(&self) -> usize {
            0
        }

        fn run(&self, _: PageNo, _: u64) -> PageRun {
            PageRun { pages: 1, hole: true }
        }
    }
    const HOLES: usize = 2 * LOOKS_A_ROUND as usize;
    let bytes = HOLES * PAGE_SIZE;
    let mut disk = Disk::new(bytes as u64);
    let request = disk.begin(0, 1, Kind::Trim, 0, bytes as u32);
    let mut rounds = 1;
    loop {
        disk.begin_round();
        disk.run(&mut Single);
        if !disk.has_more() {
            break;
        }
        rounds += 1;
        assert!(rounds <= HOLES, "it never ends");
    }
    disk.on_event(Event::Written { token: CONFIRM, result: Ok(()) }, &ZERO_PAGE, &mut Single);
    assert_eq!(disk.poll_done(), Some((0, request)));
    assert_eq!(rounds, HOLES / HOLES_A_TURN);
}

/// What this owner takes for a hole a newer one may have written: nobody is told that it was trimmed before it is known that there was
/// no newer one, by a question that was asked after the request. All that wait by then share it.
#[test]
fn a_trim_of_a_hole_waits_for_the_word_that_it_is_one() {
    let holes = |disk: &mut Disk, cookie, kind| disk.begin(0, cookie, kind, 0, SIZE as u32);
    let answer = |disk: &mut Disk, model: &mut Model, result| {
        assert!(std::mem::take(&mut model.is_asked), "nothing is asked");
        disk.on_event(Event::Written { token: CONFIRM, result }, &ZERO_PAGE, model);
        disk.begin_round();
        disk.run(model);
    };
    let done = |disk: &mut Disk| {
        let mut answered: Vec<(u64, Option<Errno>)> = Vec::new();
        while let Some((_, id)) = disk.poll_done() {
            answered.push((disk.request(id).cookie, disk.request(id).error));
            disk.free(id);
        }
        answered
    };
    for (result, error) in
        [(Ok(()), None), (Err(Failure::Fenced), Some(Errno::Shutdown)), (Err(Failure::Silent), Some(Errno::Io))]
    {
        let (mut disk, mut model) = (Disk::new(SIZE as u64), Model::new(8));
        holes(&mut disk, 1, Kind::Trim);
        holes(&mut disk, 2, Kind::Zero { holes: true });
        disk.run(&mut model);
        assert!(model.waiting.is_empty() && !disk.is_idle(), "no page is asked for");
        holes(&mut disk, 3, Kind::Trim);
        disk.run(&mut model);
        assert_eq!(done(&mut disk), []);
        answer(&mut disk, &mut model, result);
        assert_eq!(done(&mut disk), [(1, error), (2, error)], "the third came after the question");
        answer(&mut disk, &mut model, Ok(()));
        assert_eq!(done(&mut disk), [(3, None)]);
        assert!(disk.is_idle() && !model.is_asked);
    }
    // Where pages are trimmed that had content, servers have said that this is the owner.
    let (mut disk, mut model) = (Disk::new(SIZE as u64), Model::new(8));
    model.pages = vec![Some(Box::new([1; PAGE_SIZE])); PAGES as usize];
    holes(&mut disk, 4, Kind::Trim);
    // Nor has a part of a page that stays as it is anything to do with that.
    disk.begin(0, 5, Kind::Trim, 10, 20);
    disk.run(&mut model);
    let mut page = ZERO_PAGE;
    while let Some(event) = model.finish(0, &mut page) {
        assert!(!matches!(event, Event::Written { token: CONFIRM, .. }));
        disk.on_event(event, &ZERO_PAGE, &mut model);
    }
    assert_eq!(done(&mut disk), [(5, None), (4, None)]);
    // Who has gone is not asked for.
    holes(&mut disk, 6, Kind::Trim);
    disk.run(&mut model);
    holes(&mut disk, 7, Kind::Trim);
    disk.abandon(0);
    answer(&mut disk, &mut model, Ok(()));
    assert!(done(&mut disk).is_empty() && disk.is_idle() && !model.is_asked);
    assert_eq!(disk.free_requests.len(), disk.requests.len());
}

/// Pages of which the first are at a server that is silent. Nothing ends by itself.
#[derive(Default)]
struct HalfSilent {
    queued: Vec<Token>,
    asking: Vec<Token>,
    writing: Vec<Token>,
}

/// As many as fill all the slots where reads may wait, and more.
const SILENT_PAGES: u64 = 2 * QUEUED_READS_MAX as u64;

impl HalfSilent {
    fn has_room(&self) -> bool {
        self.asking.len() + self.writing.len() < OPS_MAX
    }
}

impl Pages for HalfSilent {
    fn read(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        if page.0 < SILENT_PAGES && self.queued.len() < QUEUED_READS_MAX {
            self.queued.push(token);
        } else if self.has_room() {
            self.asking.push(token);
        } else {
            return Err(Refused::Busy);
        }
        Ok(())
    }

    fn write(&mut self, _: PageNo, _: &Page, token: Token) -> Result<(), Refused> {
        if !self.has_room() {
            return Err(Refused::Busy);
        }
        self.writing.push(token);
        Ok(())
    }

    fn trim(&mut self, _: PageNo, _: Token) -> Result<(), Refused> {
        unreachable!("nothing is trimmed")
    }

    fn confirm(&mut self, _: Token) -> Result<(), Refused> {
        unreachable!("nothing is trimmed")
    }

    fn queued(&self) -> usize {
        self.queued.len()
    }

    fn run(&self, _: PageNo, max: u64) -> PageRun {
        PageRun { pages: max, hole: false }
    }
}

/// What a silent server has is waited for by who asks for it, and by nobody else.
#[test]
fn pages_of_a_silent_server_hold_up_no_others() {
    const PAGE: u32 = PAGE_SIZE as u32;
    let at = |page: u64| page * PAGE_SIZE as u64;
    let mut disk = Disk::new(at(SILENT_PAGES + 1024));
    let mut pages = HalfSilent::default();
    // A request begins some pieces each time.
    let run = |disk: &mut Disk, pages: &mut HalfSilent| (0..OPS_MAX).for_each(|_| disk.run(pages));
    for page in 0..ONE_KIND_MAX as u64 {
        disk.begin(0, page, Kind::Read, at(page), PAGE);
    }
    run(&mut disk, &mut pages);
    assert_eq!(pages.queued.len(), ONE_KIND_MAX);
    disk.begin(1, 1, Kind::Read, at(SILENT_PAGES), PAGE);
    disk.run(&mut pages);
    assert_eq!(pages.asking.len(), 1);
    // Of a long READ a part waits; of many of them all that may.
    disk.begin(0, 2, Kind::Read, 0, 1000 * PAGE);
    run(&mut disk, &mut pages);
    assert_eq!(pages.queued.len(), ONE_KIND_MAX + PIECES_A_READ);
    for cookie in 0..(QUEUED_READS_MAX / PIECES_A_READ) as u64 - 2 {
        disk.begin(0, cookie, Kind::Read, at(1000), PIECES_A_READ as u32 * PAGE);
    }
    run(&mut disk, &mut pages);
    let queued = pages.queued.len();
    assert!(queued > QUEUED_READS_MAX - PIECES_A_READ && queued <= QUEUED_READS_MAX, "{queued}");
    // Others begin as if nothing waited, and leave room for writes; so do parts of pages that are read to be written.
    for page in 1..1000 {
        disk.begin(1, page, Kind::Read, at(SILENT_PAGES + page), PAGE);
    }
    run(&mut disk, &mut pages);
    assert_eq!(pages.asking.len(), ONE_KIND_MAX);
    let write = disk.begin(2, 0, Kind::Write, at(SILENT_PAGES), PAGE + 10);
    assert_eq!(disk.put(write, &[1; PAGE_SIZE + 10], &mut pages), PAGE_SIZE + 10);
    assert_eq!((pages.writing.len(), pages.asking.len()), (1, ONE_KIND_MAX + 1));
    // All of it ends.
    let tokens = [&pages.queued[..], &pages.asking].concat();
    pages.queued.clear();
    pages.asking.clear();
    tokens.into_iter().for_each(|token| disk.on_event(Event::Read { token, result: Ok(()) }, &ZERO_PAGE, &mut pages));
    assert_eq!((disk.fetching, pages.writing.len()), (0, 2));
}
