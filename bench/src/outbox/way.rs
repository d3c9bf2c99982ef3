//! The ways from a guest's program to a client.

/// One of the ways that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Ours: the guest writes files into its outbox, and the host sends them while they grow.
    Outbox,
    /// The same of a VM that has half of its memory in DRAM at most.
    Paged,
    /// The guest writes to a TCP socket.
    Socket,
    /// The guest writes a file into its own memory, and nginx in it sends that by sendfile.
    Staged,
    /// The guest writes a file into memory of the host by QEMU's own virtiofsd, and nginx of the host sends that by sendfile.
    Shared,
}

impl Way {
    pub const ALL: [Way; 5] = [Self::Outbox, Self::Paged, Self::Socket, Self::Staged, Self::Shared];

    /// As rows name it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Outbox => "outbox",
            Self::Paged => "outbox of a VM with half its memory in DRAM",
            Self::Socket => "a socket of the guest's",
            Self::Staged => "nginx in the guest",
            Self::Shared => "virtiofsd and nginx of the host",
        }
    }

    /// It is one of ours.
    pub fn has_outbox(self) -> bool {
        matches!(self, Self::Outbox | Self::Paged)
    }

    /// A guest's sender under TCG stalls or resets now and then (one of ten runs, 2026-11-26; not diagnosed): a peer's round is tried
    /// again, and its row says so. Ours has one try.
    pub fn tries(self) -> usize {
        if self.has_outbox() { 1 } else { 3 }
    }
}
