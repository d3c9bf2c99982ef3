//! What a Hello says of the VM, to the first daemon and to every later one, and what the daemon answers.
//!
//! Owns: the userfaultfds, the shared memory, our fds of the RAM files and of what holds shared pages. They stay open for
//! the life of the process: when the last fd of a userfaultfd is closed, the kernel answers its faults itself, and pages that are out
//! turn into zeros.

use std::ffi::c_int;
use std::sync::OnceLock;

use pagoda_abi::attach::Packet;

use crate::link::{self, Broken, Fds};
use crate::say::say;

/// A connected daemon that is silent for so long gets a line on standard error; the VM goes on waiting.
const SILENCE_MS: c_int = 10_000;

/// All that a Hello says, for the first and every later one.
#[derive(Debug)]
pub struct Attachment {
    pub hello: Packet,
    pub fds: Fds,
}

static ATTACHMENT: OnceLock<Attachment> = OnceLock::new();

/// Says Hello and waits: the Welcome's flags, or the text of a refusal.
pub fn hello(link: c_int, attachment: &Attachment) -> Result<Result<u32, RefusedText>, Broken> {
    link::send(link, &attachment.hello, attachment.fds.as_slice())?;
    match receive_patiently(link)?.0 {
        Packet::Welcome { flags } => Ok(Ok(flags)),
        Packet::Refused { text } => Ok(Err(RefusedText(text))),
        _ => Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
    }
}

/// Keeps what the first Hello is to say, for every later one too.
pub fn keep(attachment: Attachment) -> &'static Attachment {
    ATTACHMENT.get_or_init(|| attachment)
}

/// What the agent says to the next daemon.
pub fn attachment() -> Option<&'static Attachment> {
    ATTACHMENT.get()
}

/// The daemon's reason, as it is to be shown.
pub struct RefusedText(pagoda_abi::attach::Text);

impl std::fmt::Display for RefusedText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.as_str())
    }
}

/// The daemon's next packet, however long it takes.
pub fn receive_patiently(link: c_int) -> Result<(Packet, Fds), Broken> {
    if !link::wait_readable(link, SILENCE_MS) {
        say(format_args!("attach: the daemon is connected but does not answer; waiting for it"));
    }
    link::receive(link)
}
