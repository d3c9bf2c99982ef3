use pagoda_outbox_push::{Cause, Failure, Grower, Growing, Outcome, S3Keys, Settings, Source, Status, Stop, growing};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::files::{PlainFile, content, digest};
use crate::relay::Relay;
use crate::rig::{Directory, Running, accept, head, in_time, settings};
use crate::servers::{Program, S3Server};

const MIB: usize = 1 << 20;
/// Of the first thousand parts.
const PART: usize = 5 * MIB;

fn at(port: u16, bucket: &str) -> Settings {
    let mut settings = settings(&format!("s3://{bucket}/in/it?endpoint=http://127.0.0.1:{port}"));
    settings.keys = Some(S3Keys::parse(S3Server::KEYS).unwrap());
    settings
}

fn has_parts(status: &Status, parts: usize) -> bool {
    status.acknowledged >= (parts * PART) as u64
}

/// A file that grows, and the push of it, of which the first part was acknowledged.
async fn begun(port: u16, content: &[u8]) -> (Grower, Growing, Running) {
    let (grower, file) = growing();
    let mut running = Running::start(at(port, S3Server::BUCKET), "file", file.clone());
    grower.write(content);
    running.until(|status| has_parts(status, 1)).await;
    (grower, file, running)
}

/// Each of these tests with each server.
macro_rules! with_each_server {
    ($($name:ident,)*) => {
        mod moto {
            $(#[tokio::test] async fn $name() { super::$name(super::Program::Moto).await; })*
        }
        mod versity {
            $(#[tokio::test] async fn $name() {
                if super::Program::Versity.is_there() {
                    super::$name(super::Program::Versity).await;
                }
            })*
        }
    };
}

with_each_server! {
    a_small_file_is_one_object,
    parts_are_given_back_while_the_file_grows,
    a_file_that_ends_with_a_part_has_no_other,
    a_large_sealed_file_goes_in_parts,
    a_cut_in_the_middle_sends_one_part_again,
    another_process_goes_on_with_the_next_part,
    what_will_not_be_whole_is_removed_from_the_server,
    what_cannot_be_removed_from_the_server_is_named,
    a_server_that_lost_its_parts_gets_them_again_if_they_are_there,
    an_object_whose_completion_was_not_heard_of_is_found,
    a_bucket_that_is_not_there_is_said_and_tried_until_it_is,
}

async fn a_small_file_is_one_object(program: Program) {
    let (server, directory) = (S3Server::start(program), Directory::new("file"));
    let content = content(10, 3 * MIB + 1);
    let file = PlainFile::new(&directory.path().join("file"), &content);
    Running::start(at(server.port, S3Server::BUCKET), "a b/ü%?#", file).delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/a b/ü%?#").unwrap()), digest(&content));
    let (grower, file) = growing();
    grower.seal();
    Running::start(at(server.port, S3Server::BUCKET), "empty", file).delivered(0).await;
    assert_eq!((server.object("in/it/empty"), server.uploads()), (Some(Vec::new()), 0));
}

async fn parts_are_given_back_while_the_file_grows(program: Program) {
    let server = S3Server::start(program);
    let content = content(11, 2 * PART + MIB);
    let (grower, file) = growing();
    let mut running = Running::start(at(server.port, S3Server::BUCKET), "file", file.clone());
    for (number, part) in content.chunks(PART).enumerate() {
        assert_eq!(file.freed(), (number * PART) as u64, "no more than whole parts");
        grower.write(part);
        running.until(|status| has_parts(status, number + part.len() / PART)).await;
    }
    assert_eq!((server.object("in/it/file"), server.uploads()), (None, 1), "there is no object before its end");
    grower.seal();
    running.delivered(content.len()).await;
    assert_eq!(file.freed(), content.len() as u64);
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
    assert_eq!(server.uploads(), 0);
}

async fn a_file_that_ends_with_a_part_has_no_other(program: Program) {
    let server = S3Server::start(program);
    let content = content(12, 2 * PART);
    let (grower, _file, mut running) = begun(server.port, &content).await;
    running.until(|status| has_parts(status, 2)).await;
    grower.seal();
    running.delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
}

async fn a_large_sealed_file_goes_in_parts(program: Program) {
    let (server, directory) = (S3Server::start(program), Directory::new("file"));
    let content = content(13, 17 * MIB);
    let file = PlainFile::new(&directory.path().join("file"), &content);
    let mut running = Running::start(at(server.port, S3Server::BUCKET), "file", file);
    running.until(|status| has_parts(status, 1)).await;
    running.delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
}

async fn a_cut_in_the_middle_sends_one_part_again(program: Program) {
    let server = S3Server::start(program);
    let relay = Relay::start(server.port).await;
    let content = content(14, 3 * PART + MIB);
    let (grower, file, mut running) = begun(relay.port, &content[..PART + 1]).await;
    relay.cut_after(2 * MIB);
    grower.write(&content[PART + 1..2 * PART]);
    let status = running.until_failed(3, |_| true).await;
    assert!(has_parts(&status, 1) && file.freed() >= PART as u64);
    relay.restore();
    grower.write(&content[2 * PART..]);
    grower.seal();
    running.delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
    let most = content.len() + PART + MIB;
    assert!(relay.sent() < most as u64, "{} bytes for {}", relay.sent(), content.len());
    assert_eq!(server.uploads(), 0);
}

async fn another_process_goes_on_with_the_next_part(program: Program) {
    let server = S3Server::start(program);
    let content = content(15, 3 * PART + MIB);
    let (grower, file, running) = begun(server.port, &content[..PART + MIB]).await;
    running.stop(Stop::Ending);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Ending, left: None });
    assert_eq!((file.freed(), server.uploads()), (PART as u64, 1));

    // What it gave back it cannot send again.
    let mut next = Running::start(at(server.port, S3Server::BUCKET), "file", file.clone());
    grower.write(&content[PART + MIB..2 * PART]);
    next.until(|status| has_parts(status, 2)).await;
    next.kill().await;
    grower.write(&content[2 * PART..]);
    grower.seal();
    Running::start(at(server.port, S3Server::BUCKET), "file", file).delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
    assert_eq!(server.uploads(), 0);
}

async fn what_will_not_be_whole_is_removed_from_the_server(program: Program) {
    let server = S3Server::start(program);
    let content = content(16, PART + MIB);
    let (grower, _file, running) = begun(server.port, &content).await;
    assert_eq!(server.uploads(), 1);
    drop(grower);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Broken, left: None });
    assert_eq!(server.uploads(), 0);

    let (_grower, _file, running) = begun(server.port, &content).await;
    running.stop(Stop::Removed);
    assert_eq!(running.end().await, Outcome::GivenUp { cause: Cause::Removed, left: None });
    assert_eq!((server.uploads(), server.object("in/it/file")), (0, None));
}

async fn what_cannot_be_removed_from_the_server_is_named(program: Program) {
    let server = S3Server::start(program);
    let relay = Relay::start(server.port).await;
    let (_grower, _file, running) = begun(relay.port, &content(17, PART + MIB)).await;
    relay.cut();
    running.stop(Stop::Removed);
    let Outcome::GivenUp { cause: Cause::Removed, left: Some(left) } = running.end().await else { panic!() };
    assert!(left.ends_with("of in/it/file"), "{left}");
    assert_eq!(server.uploads(), 1);
}

async fn a_server_that_lost_its_parts_gets_them_again_if_they_are_there(program: Program) {
    let (mut server, directory) = (S3Server::start(program), Directory::new("file"));
    let content = content(18, 17 * MIB);
    let (grower, given_back, mut partly) = begun(server.port, &content[..PART + MIB]).await;
    let relay = Relay::start(server.port).await;
    let file = PlainFile::new(&directory.path().join("file"), &content);
    relay.cut_after(PART + 2 * MIB);
    let mut whole = Running::start(at(relay.port, S3Server::BUCKET), "whole", file);
    let status = whole.until_failed(2, |_| true).await;
    assert!(has_parts(&status, 1) && !has_parts(&status, 2));
    server.kill();
    server.begin_without_parts();
    relay.restore();
    whole.until_failed(2, |failure| *failure == Failure::UploadLost).await;
    whole.delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/whole").unwrap()), digest(&content));

    assert_eq!(given_back.freed(), PART as u64);
    grower.write(&content[PART + MIB..]);
    partly.until_failed(1, |failure| *failure == Failure::UploadLost).await;
    let expected = Outcome::GivenUp { cause: Cause::GivenBack { oldest: PART as u64 }, left: None };
    assert_eq!(partly.end().await, expected);
    assert_eq!(server.uploads(), 0);
}

async fn an_object_whose_completion_was_not_heard_of_is_found(program: Program) {
    let server = S3Server::start(program);
    let relay = Relay::start(server.port).await;
    let content = content(19, PART + MIB);
    let (grower, file, mut running) = begun(relay.port, &content).await;
    relay.lose_completion();
    grower.seal();
    running.until_failed(1, |failure| matches!(failure, Failure::Lost { .. })).await;
    running.delivered(content.len()).await;
    assert_eq!((file.freed(), server.uploads()), (content.len() as u64, 0));
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
}

async fn a_bucket_that_is_not_there_is_said_and_tried_until_it_is(program: Program) {
    let server = S3Server::start(program);
    let (grower, file) = growing();
    grower.write(b"abc");
    grower.seal();
    let mut running = Running::start(at(server.port, "elsewhere"), "file", file.clone());
    let status = running.until_failed(3, |failure| matches!(failure, Failure::Refused { status: 404, .. })).await;
    let said = status.last_failure.unwrap().to_string();
    assert!(said.starts_with("the server said 404: NoSuchBucket: "), "{said}");
    assert_eq!(file.freed(), 0);
    server.make_bucket("elsewhere");
    running.delivered(3).await;
}

#[tokio::test]
async fn a_server_that_is_killed_and_has_its_parts_gets_the_others() {
    if !Program::Versity.is_there() {
        return;
    }
    let mut server = S3Server::start(Program::Versity);
    let relay = Relay::start(server.port).await;
    let content = content(20, 3 * PART + MIB);
    let (grower, file, mut running) = begun(relay.port, &content[..PART + 1]).await;
    // It is killed in the middle of the second part.
    relay.hold_after(2 * MIB);
    grower.write(&content[PART + 1..2 * PART]);
    in_time(relay.until_held()).await;
    server.kill();
    running.until_failed(3, |failure| matches!(failure, Failure::Lost { .. } | Failure::Connect { .. })).await;
    assert_eq!(file.freed(), PART as u64);
    relay.restore();
    server.begin();
    grower.write(&content[2 * PART..]);
    grower.seal();
    running.delivered(content.len()).await;
    assert_eq!(digest(&server.object("in/it/file").unwrap()), digest(&content));
    assert!(relay.sent() < (content.len() + PART + MIB) as u64);
    assert_eq!(server.uploads(), 0);
}

#[tokio::test]
async fn what_changes_on_its_way_is_sent_again() {
    if !Program::Versity.is_there() {
        return;
    }
    let server = S3Server::start(Program::Versity);
    for (path, bytes) in [("object", 2 * MIB), ("parts", 17 * MIB)] {
        let relay = Relay::start(server.port).await;
        let content = content(22, bytes);
        let (grower, file) = growing();
        grower.write(&content);
        grower.seal();
        relay.spoil_after(MIB);
        let mut running = Running::start(at(relay.port, S3Server::BUCKET), path, file);
        let status = running.until_failed(1, |failure| matches!(failure, Failure::Refused { status: 400, .. })).await;
        let said = status.last_failure.unwrap().to_string();
        assert!(said.starts_with("the server said 400: BadDigest: "), "{said}");
        running.delivered(bytes).await;
        assert_eq!(digest(&server.object(&format!("in/it/{path}")).unwrap()), digest(&content));
    }
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_said() {
    if !Program::Versity.is_there() {
        return;
    }
    let server = S3Server::start(Program::Versity);
    let (grower, file) = growing();
    grower.write(b"abc");
    grower.seal();
    let mut settings = at(server.port, S3Server::BUCKET);
    settings.keys = Some(S3Keys::parse(&S3Server::KEYS.replace("secret+", "secret-")).unwrap());
    let mut running = Running::start(settings, "file", file.clone());
    let status = running.until_failed(2, |failure| matches!(failure, Failure::Refused { status: 403, .. })).await;
    let said = status.last_failure.unwrap().to_string();
    assert!(said.starts_with("the server said 403: SignatureDoesNotMatch: "), "{said}");
    assert_eq!((file.freed(), server.object("in/it/file")), (0, None));
    running.kill().await;
}

/// Answers one request after the other, each on a connection of its own, with a status and headers and a body, or not at all. What was asked.
async fn scripted(listener: TcpListener, replies: Vec<Option<(String, &str)>>) -> Vec<String> {
    let mut asked = Vec::new();
    for reply in replies {
        let mut stream = accept(&listener).await;
        let head = head(&mut stream).await;
        let length =
            head.split_once("content-length: ").map_or(0, |(_, rest)| rest.lines().next().unwrap().parse().unwrap());
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        asked.push(head.split_once(' ').unwrap().0.to_owned());
        if let Some((first, body)) = reply {
            let text = format!("HTTP/1.1 {first}\r\nConnection: close\r\n\r\n{body}");
            stream.write_all(text.as_bytes()).await.unwrap();
        }
    }
    asked
}

/// Servers answer a request to complete that is repeated as they did before. This one does not, as if the time for that was over.
#[tokio::test]
async fn an_object_that_is_complete_is_known_by_its_etag() {
    // The ETag of the parts' two ETags, and another.
    for (etag, is_it) in [("96e024ba2074fe77e8e965ba43a704be-2", true), ("96e024ba2074fe77e8e965ba43a704be-3", false)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let settings = at(listener.local_addr().unwrap().port(), S3Server::BUCKET);
        let object = format!("200 OK\r\nETag: \"{etag}\"\r\nContent-Length: {}", PART + 1);
        let replies = vec![
            Some((
                "200 OK".to_owned(),
                "<InitiateMultipartUploadResult><UploadId>id</UploadId></InitiateMultipartUploadResult>",
            )),
            Some(("200 OK\r\nETag: \"0cc175b9c0f1b6a831c399e269772661\"\r\nContent-Length: 0".to_owned(), "")),
            Some(("200 OK\r\nETag: \"92eb5ffee6ae2fec3ad71c777531578f\"\r\nContent-Length: 0".to_owned(), "")),
            None,
            Some(("404 Not Found".to_owned(), "<Error><Code>NoSuchUpload</Code><Message>m</Message></Error>")),
            Some((object, "")),
        ];
        let (grower, file) = growing();
        let mut running = Running::start(settings, "file", file);
        let server = tokio::spawn(async move { scripted(listener, replies).await });
        grower.write(&content(23, PART + 1));
        // A file that is sealed before would be one object.
        running.until(|status| has_parts(status, 1)).await;
        grower.seal();
        let asked = in_time(server).await.unwrap();
        assert_eq!(asked, ["post", "put", "put", "post", "post", "head"]);
        let expected = if is_it {
            Outcome::Delivered { bytes: PART as u64 + 1 }
        } else {
            Outcome::GivenUp { cause: Cause::GivenBack { oldest: PART as u64 + 1 }, left: None }
        };
        assert_eq!(running.end().await, expected);
    }
}

#[tokio::test]
async fn an_upload_that_has_more_than_the_file_is_of_another() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = at(listener.local_addr().unwrap().port(), S3Server::BUCKET);
    let part = "<Part><PartNumber>1</PartNumber><ETag>a</ETag><Size>4</Size></Part>";
    let list = format!("<ListPartsResult><IsTruncated>false</IsTruncated>{part}</ListPartsResult>");
    let (grower, mut file) = growing();
    grower.write(b"abc");
    grower.seal();
    file.remember(Some("id"));
    let running = Running::start(settings, "file", file.clone());
    let replies = vec![
        Some(("200 OK".to_owned(), list.as_str())),
        Some(("204 No Content".to_owned(), "")),
        Some(("200 OK\r\nContent-Length: 0".to_owned(), "")),
    ];
    assert_eq!(in_time(scripted(listener, replies)).await, ["get", "delete", "put"]);
    running.delivered(3).await;
    assert_eq!(file.remembered(), None);
}

#[tokio::test]
async fn without_keys_nothing_is_tried() {
    let (_grower, file) = growing();
    let mut settings = at(1, S3Server::BUCKET);
    settings.keys = None;
    let ended = Running::start(settings, "file", file).end().await;
    assert_eq!(ended, Outcome::GivenUp { cause: Cause::NoKeys, left: None });
}
