//! The peer that nothing can be faster than: as many bytes, from memory to memory, by one encrypted stream between the same hosts.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use pagoda_link::{Keypair, Link, RECORD_MAX};
use testkit::wait;

use super::network::{ADDRESSES, Network};

const PORT: u16 = 7076;
/// Of both ends. Nobody else is on this network.
const KEYS: [[u8; 32]; 2] = [[1; 32], [2; 32]];

/// Milliseconds from the first byte until the sender knows that the last one has come. The connection is there before.
///
/// # Errors
/// The stream breaks.
pub fn send(network: &Network, bytes: u64) -> Result<f64> {
    // Both are in DRAM before it begins.
    let (source, mut target) = (vec![0x5a; bytes as usize], vec![0xa5; bytes as usize]);
    let address = format!("{}:{PORT}", ADDRESSES[1]);
    let listener = network.inside(1, || TcpListener::bind(&address).context("listen"))?;
    listener.set_nonblocking(true).context("set up a listener")?;
    let [caller, called] = KEYS.map(Keypair::from_private);
    let to = called.public();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || receive(&listener, &called, &mut target));
        let sent = network.inside(0, || {
            let mut link = Link::connect(&caller, &to, &address).context("call the other host")?;
            let began = Instant::now();
            for record in source.chunks(RECORD_MAX) {
                link.sender.send(&[record]).context("send")?;
            }
            link.receiver.receive().context("wait until all has come")?;
            Ok(began.elapsed().as_secs_f64() * 1e3)
        });
        let received = receiver.join().map_err(|_| anyhow!("the receiver has panicked"))?;
        // Why it was not sent says more than that it has not come.
        let ms = sent?;
        received.map(|()| ms)
    })
}

fn receive(listener: &TcpListener, own: &Keypair, target: &mut [u8]) -> Result<()> {
    let accept = || match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    };
    let stream = wait::until("the other host calls", wait::HANG, accept)?;
    let mut link = Link::answer(own, stream, |_| Ok(())).context("answer")?;
    let mut at = 0;
    while at < target.len() {
        let record = link.receiver.receive().context("receive")?;
        target.get_mut(at..at + record.len()).context("more has come than was sent")?.copy_from_slice(record);
        at += record.len();
    }
    link.sender.send(&[&[1]]).context("say that all has come")?;
    // Until the sender has read that and has gone.
    let _ = link.receiver.receive();
    Ok(())
}
