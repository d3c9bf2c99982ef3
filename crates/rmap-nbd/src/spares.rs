//! Makes tables of versions ahead, on a thread of its own. That thread may wait for memory, and a thread that serves a disk may
//! not.

use std::io;
use std::sync::mpsc::{self, Receiver};

use rmap::client::{Client, SpareTable};

/// Tables that wait to be fetched, besides those that the client has.
const AHEAD: usize = 8;

/// Of the thread's stack, all of which is locked where memory is.
const STACK_BYTES: usize = 64 << 10;

/// The thread ends with this.
#[derive(Debug)]
pub struct Spares(Receiver<SpareTable>);

impl Spares {
    /// Gives the client all the tables that it keeps ready, and goes on making others.
    ///
    /// # Errors
    /// No thread is to be had.
    pub fn start(client: &mut Client) -> io::Result<Spares> {
        let size = client.slab_size();
        for _ in 0..client.wanted_spares() {
            client.add_spare(SpareTable::new(size));
        }
        let (made, tables) = mpsc::sync_channel(AHEAD);
        let make = move || while made.send(SpareTable::new(size)).is_ok() {};
        std::thread::Builder::new().name("spare-tables".to_owned()).stack_size(STACK_BYTES).spawn(make)?;
        Ok(Spares(tables))
    }

    /// Gives the client those that are there, of those that it has used. Never waits.
    pub fn top_up(&self, client: &mut Client) {
        for table in self.0.try_iter().take(client.wanted_spares()) {
            client.add_spare(table);
        }
    }
}
