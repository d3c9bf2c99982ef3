//! Endpoints at which something else than etcd answers, as a proxy whose etcd is away.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use rmap_etcd::{Etcd, EtcdError};

use crate::rig::{EtcdProcess, HANG, Scheme, config};
use crate::store::new_space;

const PAGE: &str = "<html><body><h1>Sorry</h1></body></html>";

/// Answers every request with this status and a page, until the test's process ends.
fn proxy(status: &'static str) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let endpoint = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // One request, of which its head is enough.
            let _ = stream.read(&mut [0; 4096]);
            let length = PAGE.len();
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{PAGE}");
        }
    });
    endpoint
}

fn at(endpoints: &str, patience: Duration) -> rmap_etcd::EtcdConfig {
    let mut config = config(endpoints, Scheme::Plain, "a", None);
    config.patience = patience;
    config
}

#[test]
fn the_next_endpoint_is_asked() {
    let etcd = EtcdProcess::start();
    let statuses = ["503 Service Unavailable", "502 Bad Gateway", "429 Too Many Requests", "404 Not Found", "200 OK"];
    for (number, status) in statuses.into_iter().enumerate() {
        let mut way = Etcd::connect(at(&format!("{},{}", proxy(status), etcd.endpoint()), HANG)).unwrap();
        // Once only, whoever was asked first.
        let name = format!("s{number}");
        way.create_space(&new_space(&name)).unwrap();
        assert_eq!(way.spaces().unwrap().len(), number + 1, "{status}");
        // The other way round as well: the wrong one is the next after the right one.
        let mut way = Etcd::connect(at(&format!("{},{}", etcd.endpoint(), proxy(status)), HANG)).unwrap();
        assert_eq!(way.space(&name).unwrap().name, name);
    }
}

#[test]
fn where_no_endpoint_is_well_the_error_says_what_answers() {
    let end = |statuses: &[&'static str]| {
        let endpoints: Vec<String> = statuses.iter().map(|status| proxy(status)).collect();
        Etcd::connect(at(&endpoints.join(","), Duration::from_millis(500))).unwrap_err()
    };
    // It may pass by itself.
    let away = end(&["503 Service Unavailable"]);
    assert!(away.is_transient() && away.to_string().contains("503"), "{away}");
    // It does not, and nobody waits for it.
    for statuses in [&["404 Not Found"][..], &["404 Not Found", "200 OK"]] {
        let wrong = end(statuses);
        assert!(matches!(wrong, EtcdError::Nonsense { .. }), "{wrong}");
    }
}
