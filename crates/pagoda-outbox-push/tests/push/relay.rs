//! Between a push and its server: counts what goes through, and cuts it off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::select;
use tokio::sync::watch;

#[derive(Debug)]
pub struct Relay {
    pub port: u16,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Whether connections may be.
    open: watch::Sender<bool>,
    /// Bytes to the server.
    sent: AtomicU64,
    /// After so many it is cut.
    limit: AtomicU64,
    /// After so many nothing more goes through, and connections stay.
    hold: AtomicU64,
    /// The byte behind so many is another one when it goes through, once.
    spoils: AtomicU64,
    /// Whether it has come to that, with `hold`.
    is_held: watch::Sender<bool>,
    /// The reply to the request that completes an upload is lost, once.
    loses_completion: AtomicBool,
}

impl Relay {
    pub async fn start(server: u16) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            open: watch::Sender::new(true),
            sent: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            hold: AtomicU64::new(u64::MAX),
            spoils: AtomicU64::new(u64::MAX),
            is_held: watch::Sender::new(false),
            loses_completion: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, server, Arc::clone(&shared)));
            }
        });
        Relay { port, state }
    }

    /// No connection stays, and none comes through until [`restore`](Relay::restore).
    pub fn cut(&self) {
        self.state.open.send_replace(false);
    }

    /// The same, after so many more bytes to the server.
    pub fn cut_after(&self, bytes: usize) {
        self.state.limit.store(self.sent() + bytes as u64, Ordering::Relaxed);
    }

    /// The server gets no more after so many more bytes, until it ends the connection.
    pub fn hold_after(&self, bytes: usize) {
        self.state.hold.store(self.sent() + bytes as u64, Ordering::Relaxed);
    }

    /// One byte changes on its way, so many bytes from here.
    pub fn spoil_after(&self, bytes: usize) {
        self.state.spoils.store(self.sent() + bytes as u64, Ordering::Relaxed);
    }

    pub async fn until_held(&self) {
        self.state.is_held.subscribe().wait_for(|is_held| *is_held).await.unwrap();
    }

    pub fn restore(&self) {
        self.state.limit.store(u64::MAX, Ordering::Relaxed);
        self.state.hold.store(u64::MAX, Ordering::Relaxed);
        self.state.open.send_replace(true);
    }

    pub fn lose_completion(&self) {
        self.state.loses_completion.store(true, Ordering::Relaxed);
    }

    /// Bytes to the server so far.
    pub fn sent(&self) -> u64 {
        self.state.sent.load(Ordering::Relaxed)
    }
}

async fn until_cut(is_open: &mut watch::Receiver<bool>) {
    let _ = is_open.wait_for(|is_open| !is_open).await;
}

async fn pass(mut client: TcpStream, server: u16, state: Arc<State>) {
    let mut is_open = state.open.subscribe();
    if !*is_open.borrow() {
        return;
    }
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", server)).await else { return };
    let (mut up, mut down) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    let (mut is_completion, mut is_held) = (false, false);
    loop {
        select! {
            () = until_cut(&mut is_open) => return,
            read = client.read(&mut up), if !is_held => {
                let Ok(read @ 1..) = read else { return };
                let sent = state.sent.fetch_add(read as u64, Ordering::Relaxed) + read as u64;
                let spoils = state.spoils.load(Ordering::Relaxed);
                if (sent - read as u64..sent).contains(&spoils) {
                    up[read - (sent - spoils) as usize] ^= 1;
                }
                if sent > state.limit.load(Ordering::Relaxed) {
                    state.open.send_replace(false);
                    return;
                }
                is_completion |= up[..read].windows(24).any(|window| window == b"<CompleteMultipartUpload");
                if server.write_all(&up[..read]).await.is_err() {
                    return;
                }
                is_held = sent > state.hold.load(Ordering::Relaxed);
                state.is_held.send_replace(is_held);
            }
            read = server.read(&mut down) => {
                let Ok(read @ 1..) = read else { return };
                // The server has done it by now.
                if is_completion && state.loses_completion.swap(false, Ordering::Relaxed) { return }
                if client.write_all(&down[..read]).await.is_err() { return }
            }
        }
    }
}
