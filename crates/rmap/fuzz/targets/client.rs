//! A client, and a server with its key that answers what the bytes say.
#![no_main]

#[allow(dead_code)]
#[path = "../../tests/hostile/client.rs"]
mod client;
#[allow(dead_code)]
#[path = "../../tests/hostile/input.rs"]
mod input;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    client::run(bytes);
});
