//! A push beside the test, and what it says of itself.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pagoda_outbox_push::{Failure, ObjectName, Origin, Outcome, Pauses, Settings, Source, Status, Stop, Target, push};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// After that a test hangs. What is waited for takes a moment.
const HANGS_AFTER: Duration = Duration::from_secs(120);

pub fn settings(target: &str) -> Settings {
    let target = Target::parse(target, Origin::CommandLine).unwrap();
    let pauses = Pauses { first: Duration::from_millis(20), longest: Duration::from_millis(200) };
    Settings { pauses, ..Settings::new(target) }
}

pub fn name(path: &str) -> ObjectName {
    ObjectName::new(path.split('/').map(str::as_bytes)).unwrap()
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A directory of a test, which goes with it.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    pub fn new(what: &str) -> Directory {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pagoda-push-{what}-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// What comes in time.
pub async fn in_time<T>(what: impl Future<Output = T>) -> T {
    timeout(HANGS_AFTER, what).await.expect("it hangs")
}

/// The next connection that somebody makes.
pub async fn accept(listener: &TcpListener) -> TcpStream {
    in_time(listener.accept()).await.unwrap().0
}

/// The head of a request, in small letters.
pub async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap().to_ascii_lowercase()
}

/// A push that is under way.
#[derive(Debug)]
pub struct Running {
    task: JoinHandle<Outcome>,
    status: watch::Receiver<Status>,
    stop: watch::Sender<Option<Stop>>,
}

impl Running {
    pub fn start(settings: Settings, path: &str, mut source: impl Source + 'static) -> Running {
        let name = name(path);
        let (stop, stopped) = watch::channel(None);
        let (progress, status) = watch::channel(Status::default());
        let task = tokio::spawn(async move { push(&settings, &name, &mut source, stopped, &progress).await });
        Running { task, status, stop }
    }

    /// Until the push says so of itself.
    pub async fn until(&mut self, what: impl FnMut(&Status) -> bool) -> Status {
        let found = timeout(HANGS_AFTER, self.status.wait_for(what)).await;
        let found = found.map(|found| found.map(|status| status.clone()));
        let Ok(found) = found else { panic!("it hangs: {}", self.status.borrow().describe(Instant::now())) };
        found.expect("the push ended before it said so")
    }

    /// Until it has failed so often, and in this way.
    pub async fn until_failed(&mut self, attempts: u64, how: impl Fn(&Failure) -> bool) -> Status {
        self.until(|status| status.attempts >= attempts && status.last_failure.as_ref().is_some_and(&how)).await
    }

    pub fn stop(&self, stop: Stop) {
        self.stop.send_replace(Some(stop));
    }

    /// Kills it where it is.
    pub async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    pub async fn end(self) -> Outcome {
        let Ok(ended) = timeout(HANGS_AFTER, self.task).await else {
            panic!("it hangs: {}", self.status.borrow().describe(Instant::now()))
        };
        ended.unwrap()
    }

    pub async fn delivered(self, bytes: usize) {
        assert_eq!(self.end().await, Outcome::Delivered { bytes: bytes as u64 });
    }
}
