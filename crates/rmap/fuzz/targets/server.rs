//! A server, and a client with its key that says what the bytes say.
#![no_main]

#[allow(dead_code)]
#[path = "../../tests/hostile/input.rs"]
mod input;
#[allow(dead_code)]
#[path = "../../tests/hostile/server.rs"]
mod server;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    server::run(bytes);
});
