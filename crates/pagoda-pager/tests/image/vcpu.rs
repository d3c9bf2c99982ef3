//! What vCPUs do to memory, and what memory then has to hold: a number for each page, 0 for zeros.

use std::thread::JoinHandle;

use pagoda_core::chance::Chance;
use pagoda_core::units::PAGE_SIZE;
use pagoda_sys::guest::Guest;

/// What each page holds.
pub type Memory = Vec<u64>;

/// The words of a page that are not zero, and what they hold.
fn words_of(tag: u64) -> [(usize, u64); 3] {
    [(0, tag), (300, tag.rotate_left(17)), (511, tag.rotate_left(40))]
}

/// The content that a number stands for.
pub fn content_of(tag: u64) -> [u8; PAGE_SIZE as usize] {
    let mut content = [0; PAGE_SIZE as usize];
    for (word, value) in words_of(tag) {
        content[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
    }
    content
}

pub fn write(guest: Guest, page: u64, tag: u64) {
    words_of(tag).into_iter().for_each(|(word, value)| guest.store(page, word, value));
}

pub fn check(guest: Guest, page: u64, tag: u64) {
    for (word, value) in words_of(tag) {
        assert_eq!(guest.load(page, word), value, "page {page}, word {word}");
    }
    assert_eq!(guest.load(page, 100), 0, "page {page}");
}

pub fn check_all(guest: Guest, memory: &Memory) {
    (0..).zip(memory).for_each(|(page, tag)| check(guest, page, *tag));
}

/// A number: some pages are zero, and some are equal.
fn new_tag(chance: &mut Chance) -> u64 {
    match chance.below(10) {
        0..3 => 0,
        3..5 => 1 + chance.below(3),
        _ => chance.draw() | 1,
    }
}

/// Two vCPUs read and write, each its own pages; what memory holds after that.
pub struct Running {
    vcpus: Vec<JoinHandle<Memory>>,
}

impl Running {
    pub fn start(guest: Guest, memory: &Memory, seed: u64, steps: usize) -> Running {
        let run = |vcpu: u64| {
            let mut memory = memory.clone();
            let mut chance = Chance::new(seed ^ ((vcpu + 1) << 32));
            move || {
                let pairs = memory.len() as u64 / 2;
                // Where it works for a while: a stream, or anywhere.
                let mut at = 0;
                for _ in 0..steps {
                    at = if chance.per_mille(700) { (at + 1) % pairs } else { chance.below(pairs) };
                    let page = at * 2 + vcpu;
                    if chance.per_mille(500) {
                        check(guest, page, memory[page as usize]);
                    } else {
                        memory[page as usize] = new_tag(&mut chance);
                        write(guest, page, memory[page as usize]);
                    }
                }
                memory
            }
        };
        Running { vcpus: (0..2).map(|vcpu| std::thread::spawn(run(vcpu))).collect() }
    }

    /// Waits until they have done what they had to do: the VM stands still.
    pub fn stop(self) -> Memory {
        let [even, odd]: [JoinHandle<Memory>; 2] = self.vcpus.try_into().ok().unwrap();
        let (even, odd) = (even.join().unwrap(), odd.join().unwrap());
        even.into_iter()
            .zip(odd)
            .enumerate()
            .map(|(page, (even, odd))| if page % 2 == 0 { even } else { odd })
            .collect()
    }
}
