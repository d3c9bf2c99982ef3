//! An NBD connection, from its first byte, with pages that come late.
#![no_main]

use std::collections::VecDeque;

use libfuzzer_sys::fuzz_target;
use rmap::client::{Event, PageRun, Refused, Token};
use rmap_nbd::connection::Connection;
use rmap_nbd::disk::{Disk, Pages};
use rmap_nbd::negotiation::Offer;
use rmap::units::{PAGE_SIZE, Page, PageNo};

const PAGES: u64 = 64;
const SIZE: u64 = PAGES * PAGE_SIZE as u64;
/// As the pool's client has a limit.
const UNDER_WAY_MAX: usize = 32;

/// All zeros, answered in the order in which they were asked for.
#[derive(Default)]
struct Zeros {
    events: VecDeque<Event>,
}

impl Zeros {
    fn begin(&mut self, page: PageNo, event: Event) -> Result<(), Refused> {
        assert!(page.0 < PAGES, "a request beyond the end reached the pages");
        if self.events.len() >= UNDER_WAY_MAX {
            return Err(Refused::Busy);
        }
        self.events.push_back(event);
        Ok(())
    }
}

impl Pages for Zeros {
    fn read(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.begin(page, Event::Read { token, result: Ok(()) })
    }

    fn write(&mut self, page: PageNo, _: &Page, token: Token) -> Result<(), Refused> {
        self.begin(page, Event::Written { token, result: Ok(()) })
    }

    fn trim(&mut self, page: PageNo, token: Token) -> Result<(), Refused> {
        self.begin(page, Event::Written { token, result: Ok(()) })
    }

    fn confirm(&mut self, token: Token) -> Result<(), Refused> {
        self.events.push_back(Event::Written { token, result: Ok(()) });
        Ok(())
    }

    fn queued(&self) -> usize {
        0
    }

    fn run(&self, page: PageNo, max: u64) -> PageRun {
        assert!(page.0 < PAGES);
        PageRun { pages: max.min(PAGES - page.0), hole: page.0 % 2 == 0 }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let offer = Offer { name: "d".to_owned(), size: SIZE, read_only: false };
    let (mut connection, mut disk, mut pages) = (Connection::default(), Disk::new(SIZE), Zeros::default());
    let mut rest = bytes;
    loop {
        let room = connection.wants_input().then(|| connection.room().len()).unwrap_or(0);
        // In pieces, as they come from a socket.
        let piece = rest.len().min(room).min(1 + usize::from(rest.first().copied().unwrap_or(0)));
        if piece > 0 {
            connection.room()[..piece].copy_from_slice(&rest[..piece]);
            connection.filled(piece);
            rest = &rest[piece..];
        }
        disk.begin_round();
        connection.advance(0, &offer, &mut disk, &mut pages);
        disk.run(&mut pages);
        while let Some(event) = pages.events.pop_front() {
            disk.on_event(event, &[0; PAGE_SIZE], &mut pages);
        }
        while let Some((_, request)) = disk.poll_done() {
            connection.answer(&disk, request);
            disk.free(request);
        }
        let said = connection.output().len();
        connection.sent(said);
        if connection.is_over() || (piece == 0 && said == 0 && !disk.has_more()) {
            return;
        }
    }
});
