use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::thread::JoinHandle;

use pagoda_outbox_push::{Cause, Failure, Outcome, growing};

use crate::files::{content, digest};
use crate::rig::{Running, settings};

const MIB: usize = 1 << 20;

/// What a receiver reads of one connection, and how that ends.
type Received = (Vec<u8>, Result<(), ErrorKind>);

/// Takes connections one after the other: of each, at most as many bytes as `limits` says.
fn receiver(limits: Vec<usize>) -> (String, JoinHandle<Vec<Received>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = format!("tcp://{}", listener.local_addr().unwrap());
    let take = move |limit: &usize| {
        let (stream, _) = listener.accept().unwrap();
        let mut bytes = Vec::new();
        let end = stream.take(*limit as u64).read_to_end(&mut bytes);
        (bytes, end.map(|_| ()).map_err(|error| error.kind()))
    };
    (target, std::thread::spawn(move || limits.iter().map(take).collect()))
}

#[tokio::test]
async fn a_connection_ends_when_the_file_does() {
    let (target, receiver) = receiver(vec![usize::MAX]);
    let content = content(20, 3 * MIB);
    let (grower, file) = growing();
    let mut running = Running::start(settings(&target), "file", file.clone());
    for piece in content.chunks(MIB) {
        grower.write(piece);
    }
    running.until(|status| status.sent == content.len() as u64).await;
    assert_eq!(file.freed(), 0, "its kernel has it, which says little");
    grower.seal();
    running.delivered(content.len()).await;
    let received = receiver.join().unwrap();
    assert_eq!((digest(&received[0].0), received[0].1), (digest(&content), Ok(())));
    assert_eq!(file.freed(), content.len() as u64);
}

#[tokio::test]
async fn a_file_that_is_not_whole_does_not_end_in_order() {
    let (target, receiver) = receiver(vec![usize::MAX, usize::MAX]);
    let (grower, file) = growing();
    grower.write(b"abc");
    let mut running = Running::start(settings(&target), "file", file.clone());
    running.until(|status| status.sent == 3).await;
    drop(grower);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Broken, left: None });

    let (grower, file) = growing();
    grower.write(b"abc");
    let mut running = Running::start(settings(&target), "file", file);
    running.until(|status| status.sent == 3).await;
    running.kill().await;
    drop(grower);
    for (_, end) in receiver.join().unwrap() {
        assert_eq!(end, Err(ErrorKind::ConnectionReset));
    }
}

#[tokio::test]
async fn a_receiver_that_goes_early_has_not_taken_it() {
    let (target, receiver) = receiver(vec![MIB, usize::MAX]);
    let content = content(21, 8 * MIB);
    let (grower, file) = growing();
    grower.write(&content);
    grower.seal();
    let mut running = Running::start(settings(&target), "file", file);
    let is_said = |failure: &Failure| matches!(failure, Failure::NotTaken { .. } | Failure::Lost { .. });
    running.until_failed(1, is_said).await;
    running.delivered(content.len()).await;
    let received = receiver.join().unwrap();
    assert_eq!((received.len(), received[0].0.len()), (2, MIB));
    assert_eq!((digest(&received[1].0), received[1].1), (digest(&content), Ok(())));
}
