//! A digest of all that a run did, to compare two versions of the code: equal digests, equal behaviour.

/// Off unless `RMAP_SIM_DIGEST` is set; then each run prints its digest when it is dropped, under the name of its test.
#[derive(Debug)]
pub struct Digest(Option<u64>);

/// The offset basis of 64-bit FNV-1a; `PRIME` is its prime.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

impl Digest {
    pub fn new() -> Digest {
        Digest(std::env::var_os("RMAP_SIM_DIGEST").map(|_| OFFSET))
    }

    /// A datagram that was sent, whether it arrives or not.
    pub fn add_datagram(&mut self, now_ns: u64, from: usize, to: usize, datagram: &[u8]) {
        if self.0.is_some() {
            [now_ns, from as u64, to as u64].iter().for_each(|word| self.add(&word.to_le_bytes()));
            self.add(datagram);
        }
    }

    /// A question to the control plane, or a result.
    pub fn add_text(&mut self, now_ns: u64, node: usize, what: &dyn std::fmt::Debug) {
        if self.0.is_some() {
            self.add(format!("{now_ns} {node} {what:?}").as_bytes());
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        let Some(sum) = &mut self.0 else { return };
        *sum = bytes.iter().fold(*sum, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(PRIME));
    }
}

impl Drop for Digest {
    fn drop(&mut self) {
        if let Some(sum) = self.0 {
            let thread = std::thread::current();
            eprintln!("digest {} {sum:016x}", thread.name().unwrap_or_default());
        }
    }
}
