use pagoda_outbox_push::{Cause, Failure, Outcome, Phase, Stop, Trust, growing};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::files::{PlainFile, content, digest};
use crate::rig::{Directory, Running, accept, free_port, head, settings};
use crate::servers::{Nginx, certificate};

const MIB: usize = 1 << 20;

#[tokio::test]
async fn a_sealed_file_is_put() {
    let (nginx, directory) = (Nginx::start(), Directory::new("file"));
    let content = content(1, 3 * MIB + 7);
    let file = PlainFile::new(&directory.path().join("file"), &content);
    let settings = settings(&format!("http://127.0.0.1:{}/new/", nginx.port));
    Running::start(settings, "a b/ü%?#.bin", file).delivered(content.len()).await;
    assert_eq!(digest(&nginx.file("new/a b/ü%?#.bin").unwrap()), digest(&content));
}

#[tokio::test]
async fn a_file_is_put_while_it_grows_and_stays_until_the_server_has_it() {
    let nginx = Nginx::start();
    let content = content(2, 2 * MIB + 11);
    let (grower, file) = growing();
    let mut running = Running::start(settings(&format!("http://127.0.0.1:{}/", nginx.port)), "grows", file.clone());
    let mut written = 0;
    for piece in content.chunks(300_000) {
        grower.write(piece);
        written += piece.len() as u64;
        running.until(|status| status.sent == written).await;
    }
    assert_eq!((file.freed(), nginx.file("grows")), (0, None), "the server has not said that it has it");
    grower.seal();
    running.delivered(content.len()).await;
    assert_eq!(file.freed(), content.len() as u64);
    assert_eq!(digest(&nginx.file("grows").unwrap()), digest(&content));
}

#[tokio::test]
async fn an_empty_file_is_put() {
    let nginx = Nginx::start();
    let (grower, file) = growing();
    grower.seal();
    Running::start(settings(&format!("http://127.0.0.1:{}/", nginx.port)), "empty", file).delivered(0).await;
    assert_eq!(nginx.file("empty"), Some(Vec::new()));
}

#[tokio::test]
async fn a_file_that_is_not_whole_is_none() {
    let nginx = Nginx::start();
    let (grower, file) = growing();
    grower.write(&content(3, MIB));
    let mut running = Running::start(settings(&format!("http://127.0.0.1:{}/", nginx.port)), "broken", file.clone());
    running.until(|status| status.sent == MIB as u64).await;
    drop(grower);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Broken, left: None });
    assert_eq!((file.freed(), nginx.file("broken")), (0, None));
}

#[tokio::test]
async fn a_server_that_is_not_there_is_tried_until_it_is() {
    let mut nginx = Nginx::prepare(None);
    let content = content(4, MIB);
    let (grower, file) = growing();
    grower.write(&content);
    grower.seal();
    let mut running = Running::start(settings(&format!("http://127.0.0.1:{}/", nginx.port)), "late", file.clone());
    let status = running.until_failed(4, |failure| matches!(failure, Failure::Connect { .. })).await;
    assert!(status.describe(std::time::Instant::now()).contains("cannot connect to 127.0.0.1"), "{status:?}");
    assert_eq!((status.acknowledged, file.freed()), (0, 0));
    nginx.begin();
    running.delivered(content.len()).await;
    assert_eq!(digest(&nginx.file("late").unwrap()), digest(&content));
}

#[tokio::test]
async fn a_server_that_is_killed_in_the_middle_gets_it_all_again() {
    let mut nginx = Nginx::start();
    let content = content(5, 6 * MIB);
    let (grower, file) = growing();
    grower.write(&content[..4 * MIB]);
    let mut running = Running::start(settings(&format!("http://127.0.0.1:{}/", nginx.port)), "again", file.clone());
    running.until(|status| status.sent >= 3 * MIB as u64).await;
    nginx.kill();
    running.until_failed(2, |_| true).await;
    assert_eq!(file.freed(), 0);
    nginx.begin();
    grower.write(&content[4 * MIB..]);
    grower.seal();
    running.delivered(content.len()).await;
    assert_eq!(digest(&nginx.file("again").unwrap()), digest(&content));
}

#[tokio::test]
async fn what_a_server_refuses_is_tried_again_until_it_is_too_old() {
    let nginx = Nginx::start();
    let (grower, file) = growing();
    grower.write(b"abc");
    grower.seal();
    let target = format!("http://127.0.0.1:{}/closed/", nginx.port);
    let mut running = Running::start(settings(&target), "file", file.clone());
    let status = running.until_failed(3, |failure| matches!(failure, Failure::Refused { status: 403, .. })).await;
    assert!(status.last_failure.unwrap().to_string().starts_with("the server said 403"));
    running.stop(Stop::Expired);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Expired, left: None });
    assert_eq!(file.freed(), 0);
}

#[tokio::test]
async fn tls_with_a_server_that_is_vouched_for() {
    let directory = Directory::new("tls");
    let (own, key) = certificate(directory.path());
    let others = Directory::new("tls");
    let (other, _) = certificate(others.path());
    let mut nginx = Nginx::prepare(Some((&own, &key)));
    nginx.begin();
    let content = content(6, MIB);
    let start = |path: &str, trust: Option<Trust>| {
        let (grower, file) = growing();
        grower.write(&content);
        grower.seal();
        let mut settings = settings(&format!("https://127.0.0.1:{}/", nginx.port));
        settings.trust = trust;
        Running::start(settings, path, file)
    };
    let trust = |path| Some(Trust::from_pem(&std::fs::read(path).unwrap()).unwrap());
    start("secret", trust(&own)).delivered(content.len()).await;
    assert_eq!(digest(&nginx.file("secret").unwrap()), digest(&content));
    for nobody in [trust(&other), None] {
        let mut running = start("stranger", nobody);
        running.until_failed(2, |failure| matches!(failure, Failure::Tls { .. })).await;
        running.kill().await;
    }
    assert_eq!(nginx.file("stranger"), None);
}

#[tokio::test]
async fn a_server_that_wants_the_length_gets_it_when_the_file_has_one() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}/", listener.local_addr().unwrap());
    let content = content(7, MIB);
    let (grower, file) = growing();
    grower.write(&content[..1000]);
    let mut running = Running::start(settings(&target), "file", file.clone());
    let mut stream = accept(&listener).await;
    assert!(head(&mut stream).await.contains("transfer-encoding: chunked"));
    stream.write_all(b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\n\r\n").await.unwrap();
    running.until_failed(1, |failure| matches!(failure, Failure::Refused { status: 411, .. })).await;
    drop(stream);
    running.until(|status| status.attempts == 2 && status.phase == Phase::Sending).await;
    grower.write(&content[1000..]);
    grower.seal();
    let mut stream = accept(&listener).await;
    assert!(head(&mut stream).await.contains(&format!("content-length: {}\r\n", content.len())));
    let mut taken = vec![0; content.len()];
    stream.read_exact(&mut taken).await.unwrap();
    assert_eq!(file.freed(), 0);
    stream.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n").await.unwrap();
    running.delivered(content.len()).await;
    assert_eq!(digest(&taken), digest(&content));
}

#[tokio::test]
async fn a_success_before_the_end_is_none() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}/", listener.local_addr().unwrap());
    let (grower, file) = growing();
    grower.write(b"abc");
    let mut running = Running::start(settings(&target), "file", file.clone());
    let mut stream = accept(&listener).await;
    head(&mut stream).await;
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
    running.until_failed(1, |failure| *failure == Failure::Early { status: 200 }).await;
    assert_eq!(file.freed(), 0);
    drop(grower);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Broken, left: None });
}

#[tokio::test]
async fn headers_of_a_file_go_with_each_put() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut settings = settings(&format!("http://{}/", listener.local_addr().unwrap()));
    settings.headers = pagoda_outbox_push::Header::parse("Authorization: Bearer token\n").unwrap();
    let (grower, file) = growing();
    grower.seal();
    let running = Running::start(settings, "file", file);
    let mut stream = accept(&listener).await;
    let head = head(&mut stream).await;
    assert!(head.starts_with("put /file http/1.1\r\n"), "{head}");
    assert!(head.contains("authorization: bearer token\r\n") && head.contains("content-length: 0\r\n"), "{head}");
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
    running.delivered(0).await;
}

#[tokio::test]
async fn a_push_that_nobody_wants_any_more_ends_while_it_pauses() {
    let (grower, file) = growing();
    grower.seal();
    let mut settings = settings(&format!("http://127.0.0.1:{}/", free_port()));
    settings.pauses.first = std::time::Duration::from_secs(3600);
    settings.pauses.longest = settings.pauses.first;
    let mut running = Running::start(settings, "file", file);
    running.until_failed(1, |_| true).await;
    running.stop(Stop::Removed);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Removed, left: None });
}
