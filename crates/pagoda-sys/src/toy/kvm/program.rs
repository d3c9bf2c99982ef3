//! The program that the guest runs, and the same walk in Rust.
//!
//! 64-bit code in ring 3 under identity page tables that lie in the guest's own RAM, so that fetching the code and
//! walking the tables meet evicted pages too. It never ends: the VMM stops entering it after a report. It touches its
//! pages pass after pass, each time in the next of [`ORDERS`]; in every pass it compares all words of every page with the
//! version that must be there, reports the page if they differ, and in a writing pass writes the next version.
//!
//! | page | holds |
//! |---|---|
//! | 1 | the code |
//! | 2 | the top page table |
//! | 3 | the third level |
//! | 4..8 | four second-level tables: 4 GiB in 2 MiB mappings |
//! | 8 | constants and orders |
//! | 16.. | the pages that are walked, a run of them for each vCPU |

use super::super::ram::{PAGE_BYTES, RamPart, WORDS_PER_PAGE};

/// The guest reports after so many positions; the code tests the low six bits of its count.
pub const POSITIONS_PER_REPORT: u64 = 64;
/// The code's own pages end here.
pub const FIRST_WALKED_PAGE: usize = 16;
/// Guest-physical address outside of all RAM: a write to it leaves the guest.
pub const REPORT_ADDRESS: u64 = 0xd000_0000;
/// `REPORT_ADDRESS` receives the number of positions done, this the number of a wrong page.
pub const WRONG_ADDRESS: u64 = REPORT_ADDRESS + 8;

pub(super) const CODE_PAGE: usize = 1;
pub(super) const TOP_TABLE_PAGE: usize = 2;
const THIRD_TABLE_PAGE: usize = 3;
const SECOND_TABLES_PAGE: usize = 4;
const SECOND_TABLES: usize = 4;
const CONSTANTS_PAGE: usize = 8;

/// Makes the versions of a page differ in all bits (2^64 divided by the golden ratio).
const VERSION_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// From a word to the next: odd, so that no two words of a page are equal.
const WORD_STEP: u64 = 0xc2b2_ae3d_27d4_eb4f;
const WORDS_PER_ENTRY: usize = 512;

/// An order of positions, `next = position * multiplier + addend` modulo a power of two, and whether pages are written.
///
/// Every multiplier is 1 modulo 4 and every addend odd, so by Hull and Dobell (1962) each position comes once.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    multiplier: u64,
    addend: u64,
    writes: bool,
}

const UP: (u64, u64) = (1, 1);
const DOWN: (u64, u64) = (1, u64::MAX);
/// Into the next chunk of 256 pages each time.
const STRIDE: (u64, u64) = (1, 257);
/// Multipliers and addends of Numerical Recipes and of Knuth's MMIX.
const CHANCE: (u64, u64) = (1_664_525, 1_013_904_223);
const OTHER_CHANCE: (u64, u64) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);

const fn order(rule: (u64, u64), writes: bool) -> Order {
    Order { multiplier: rule.0, addend: rule.1, writes }
}

/// One pass after another; a power of two of them, for the code masks the pass number.
pub const ORDERS: [Order; 8] = [
    order(UP, true),
    order(UP, false),
    order(CHANCE, true),
    order(CHANCE, false),
    order(DOWN, true),
    order(OTHER_CHANCE, false),
    order(STRIDE, true),
    order(OTHER_CHANCE, true),
];

/// Registers at the start: rsi pass = 0, r8 first page, r9 pages, r11 `REPORT_ADDRESS`, r12 version = 0,
/// rsp position mask. In a pass: rax offset of its order, r13 multiplier, r14 addend, rbp position, r15 positions done.
#[rustfmt::skip]
const CODE: [u8; 0xde] = [
    // next_pass: rax finds the order of this pass, and the walk begins at position 0.
    0x89, 0xf0,                                     //   mov  eax, esi
    0x83, 0xe0, 0x07,                               //   and  eax, 7
    0xc1, 0xe0, 0x05,                               //   shl  eax, 5
    0x4c, 0x8b, 0xa8, 0x10, 0x80, 0x00, 0x00,       //   mov  r13, [rax + 0x8010]
    0x4c, 0x8b, 0xb0, 0x18, 0x80, 0x00, 0x00,       //   mov  r14, [rax + 0x8018]
    0x31, 0xed,                                     //   xor  ebp, ebp
    0x45, 0x31, 0xff,                               //   xor  r15d, r15d
    // next_position: a position behind the last page has no page to visit.
    0x4c, 0x39, 0xcd,                               //   cmp  rbp, r9
    0x0f, 0x83, 0x83, 0x00, 0x00, 0x00,             //   jae  visited
    0x49, 0x8d, 0x1c, 0x28,                         //   lea  rbx, [r8 + rbp]           ; the page
    0x31, 0xff,                                     //   xor  edi, edi                  ; version 0 is all zeros
    0x31, 0xd2,                                     //   xor  edx, edx
    0x4d, 0x85, 0xe4,                               //   test r12, r12
    0x74, 0x17,                                     //   jz   compare
    0x4c, 0x89, 0xe7,                               //   mov  rdi, r12
    0x48, 0x0f, 0xaf, 0x3c, 0x25, 0x00, 0x80, 0x00, 0x00, // imul rdi, [0x8000]         ; VERSION_FACTOR
    0x48, 0x31, 0xdf,                               //   xor  rdi, rbx
    0x48, 0x8b, 0x14, 0x25, 0x08, 0x80, 0x00, 0x00, //   mov  rdx, [0x8008]             ; WORD_STEP
    // compare: rcx begins at the page, and r10 is its end.
    0x48, 0x89, 0xd9,                               //   mov  rcx, rbx
    0x48, 0xc1, 0xe1, 0x0c,                         //   shl  rcx, 12
    0x4c, 0x8d, 0x91, 0x00, 0x10, 0x00, 0x00,       //   lea  r10, [rcx + 4096]
    // compare_word: rdi is what the word must be, and rdx leads to the next.
    0x48, 0x39, 0x39,                               //   cmp  [rcx], rdi
    0x75, 0x7d,                                     //   jne  wrong
    0x48, 0x01, 0xd7,                               //   add  rdi, rdx
    0x48, 0x83, 0xc1, 0x08,                         //   add  rcx, 8
    0x4c, 0x39, 0xd1,                               //   cmp  rcx, r10
    0x72, 0xef,                                     //   jb   compare_word
    // write: a writing pass puts the next version into the page.
    0x48, 0x83, 0xb8, 0x20, 0x80, 0x00, 0x00, 0x00, //   cmp  qword ptr [rax + 0x8020], 0
    0x74, 0x36,                                     //   je   visited
    0x49, 0x8d, 0x7c, 0x24, 0x01,                   //   lea  rdi, [r12 + 1]
    0x48, 0x0f, 0xaf, 0x3c, 0x25, 0x00, 0x80, 0x00, 0x00, // imul rdi, [0x8000]
    0x48, 0x31, 0xdf,                               //   xor  rdi, rbx
    0x48, 0x8b, 0x14, 0x25, 0x08, 0x80, 0x00, 0x00, //   mov  rdx, [0x8008]
    0x48, 0x89, 0xd9,                               //   mov  rcx, rbx
    0x48, 0xc1, 0xe1, 0x0c,                         //   shl  rcx, 12
    0x4c, 0x8d, 0x91, 0x00, 0x10, 0x00, 0x00,       //   lea  r10, [rcx + 4096]
    // write_word: rdi is the word, and rdx leads to the next.
    0x48, 0x89, 0x39,                               //   mov  [rcx], rdi
    0x48, 0x01, 0xd7,                               //   add  rdi, rdx
    0x48, 0x83, 0xc1, 0x08,                         //   add  rcx, 8
    0x4c, 0x39, 0xd1,                               //   cmp  rcx, r10
    0x72, 0xf1,                                     //   jb   write_word
    // visited: rbp becomes the next position; every 64th position is reported.
    0x49, 0x0f, 0xaf, 0xed,                         //   imul rbp, r13
    0x4c, 0x01, 0xf5,                               //   add  rbp, r14
    0x48, 0x21, 0xe5,                               //   and  rbp, rsp
    0x49, 0xff, 0xc7,                               //   inc  r15
    0x41, 0xf6, 0xc7, 0x3f,                         //   test r15b, 63
    0x0f, 0x85, 0x5d, 0xff, 0xff, 0xff,             //   jnz  next_position
    0x4d, 0x89, 0x3b,                               //   mov  [r11], r15                ; leaves the guest
    0x48, 0x85, 0xed,                               //   test rbp, rbp                  ; back at 0: all positions
    0x0f, 0x85, 0x51, 0xff, 0xff, 0xff,             //   jnz  next_position
    0x4c, 0x03, 0xa0, 0x20, 0x80, 0x00, 0x00,       //   add  r12, [rax + 0x8020]
    0xff, 0xc6,                                     //   inc  esi
    0xe9, 0x28, 0xff, 0xff, 0xff,                   //   jmp  next_pass
    // wrong: the page is reported, and is then treated as if it were right.
    0x49, 0x89, 0x5b, 0x08,                         //   mov  [r11 + 8], rbx            ; leaves the guest
    0xeb, 0x89,                                     //   jmp  write
];

/// Puts the program, its constants and its page tables into the first pages.
pub(super) fn load(ram: &mut RamPart<'_>) {
    // Intel SDM volume 3, 4.5: present, writable, for ring 3; in the second level also "maps 2 MiB".
    const TABLE: u64 = 0x7;
    const LARGE: u64 = 0x87;
    const LARGE_BYTES: u64 = 2 << 20;
    let address = |page: usize| (page * PAGE_BYTES) as u64;
    for (word, bytes) in CODE.chunks(8).enumerate() {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        ram.store(CODE_PAGE, word, u64::from_le_bytes(padded));
    }
    ram.store(TOP_TABLE_PAGE, 0, address(THIRD_TABLE_PAGE) | TABLE);
    for table in 0..SECOND_TABLES {
        ram.store(THIRD_TABLE_PAGE, table, address(SECOND_TABLES_PAGE + table) | TABLE);
        for entry in 0..WORDS_PER_ENTRY {
            let number = (table * WORDS_PER_ENTRY + entry) as u64;
            ram.store(SECOND_TABLES_PAGE + table, entry, (number * LARGE_BYTES) | LARGE);
        }
    }
    ram.store(CONSTANTS_PAGE, 0, VERSION_FACTOR);
    ram.store(CONSTANTS_PAGE, 1, WORD_STEP);
    for (index, order) in ORDERS.iter().enumerate() {
        let word = 2 + 4 * index;
        ram.store(CONSTANTS_PAGE, word, order.multiplier);
        ram.store(CONSTANTS_PAGE, word + 1, order.addend);
        ram.store(CONSTANTS_PAGE, word + 2, u64::from(order.writes));
    }
}

/// How far one vCPU is, as its reports say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// The first of the vCPU's pages.
    pub first_page: usize,
    /// The vCPU has so many pages.
    pub pages: usize,
    /// Passes over all of them.
    pub passes: u64,
    /// Version of pages that this pass has not written.
    version: u64,
    /// Positions of this pass that are done.
    positions: u64,
}

impl Walk {
    pub(super) fn new(first_page: usize, pages: usize) -> Self {
        Self { first_page, pages, passes: 0, version: 0, positions: 0 }
    }

    /// Positions of a pass less one: those past the last page are passed over.
    pub(super) fn mask(&self) -> u64 {
        (self.pages as u64).next_power_of_two().max(POSITIONS_PER_REPORT) - 1
    }

    fn order(&self) -> Order {
        ORDERS[(self.passes % ORDERS.len() as u64) as usize]
    }

    /// Takes a report; false when the guest cannot be there.
    pub(super) fn report(&mut self, positions: u64) -> bool {
        if positions != self.positions + POSITIONS_PER_REPORT {
            return false;
        }
        self.positions = positions;
        if positions > self.mask() {
            self.version += u64::from(self.order().writes);
            self.passes += 1;
            self.positions = 0;
        }
        true
    }

    /// Pages compared so far.
    #[must_use]
    pub fn pages_visited(&self) -> u64 {
        let now = self.walked().count() as u64;
        self.passes * self.pages as u64 + now
    }

    /// Pages of the present pass, counted from `first_page`, in their order.
    fn walked(&self) -> impl Iterator<Item = usize> {
        let (order, mask, pages) = (self.order(), self.mask(), self.pages as u64);
        let next =
            move |position: &u64| Some(position.wrapping_mul(order.multiplier).wrapping_add(order.addend) & mask);
        std::iter::successors(Some(0), next)
            .take(self.positions as usize)
            .filter(move |position| *position < pages)
            .map(|position| position as usize)
    }

    /// Compares all of the vCPU's pages with what its last report says they hold; gives the wrong ones.
    #[must_use]
    pub fn wrong_pages(&self, ram: &RamPart<'_>) -> Vec<usize> {
        let mut versions = vec![self.version; self.pages];
        if self.order().writes {
            self.walked().for_each(|page| versions[page] += 1);
        }
        let pages = (self.first_page..).zip(versions);
        pages.filter(|(page, version)| !holds(ram, *page, *version)).map(|(page, _)| page).collect()
    }
}

fn holds(ram: &RamPart<'_>, page: usize, version: u64) -> bool {
    let (first, step) = match version {
        0 => (0, 0),
        _ => (version.wrapping_mul(VERSION_FACTOR) ^ page as u64, WORD_STEP),
    };
    (0..WORDS_PER_PAGE).all(|word| ram.load(page, word) == first.wrapping_add(step.wrapping_mul(word as u64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_takes_each_page_once() {
        for pages in [64, 100, 1000] {
            let mut walk = Walk::new(16, pages);
            for pass in 0..ORDERS.len() as u64 {
                let mut seen = vec![0; pages];
                walk.positions = walk.mask() + 1;
                walk.walked().for_each(|page| seen[page] += 1);
                assert!(seen.iter().all(|times| *times == 1), "pass {pass} over {pages} pages");
                walk.positions = walk.mask() + 1 - POSITIONS_PER_REPORT;
                assert!(walk.report(walk.mask() + 1));
                assert_eq!((walk.passes, walk.positions), (pass + 1, 0));
            }
            let writing = ORDERS.iter().filter(|order| order.writes).count() as u64;
            assert_eq!(walk.version, writing);
        }
    }

    #[test]
    fn a_report_out_of_step_is_refused() {
        let mut walk = Walk::new(16, 200);
        assert!(walk.report(64) && walk.report(128));
        assert!(!walk.report(128), "twice the same");
        assert!(!walk.report(256), "one was left out");
    }
}
