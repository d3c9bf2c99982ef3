//! The command becomes the server that it starts.

use std::path::Path;

use crate::pool::{Pool, program};

/// So signals, service managers and whoever waits for the command reach the server itself.
#[test]
fn the_process_that_was_started_is_the_server() {
    let pool = Pool::start("process", 1);
    pool.run(&["disk", "create", "d", "--size", "4M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    let server = Path::new(env!("CARGO_BIN_EXE_pagoda-server")).canonicalize().unwrap();
    for (running, words) in [(pool.server(0), ["pool", "serve"]), (&export, ["disk", "export"])] {
        assert_eq!(running.executable(), server);
        let shown = running.words();
        assert_eq!(Path::new(&shown[0]), program(), "what was typed is shown");
        assert_eq!(shown[1..3], words);
    }
    assert_eq!(export.stop(), Some(0));
}
