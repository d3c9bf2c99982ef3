//! What a guest has seen of its processors, and what another QEMU does not give it of that.
//!
//! A guest asks CPUID once, as it boots. QEMU does not compare the answers when it loads a state. A guest that goes on where an
//! instruction is missing dies of it later. So what each CPU has is written down, and is compared before a state is loaded.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Words of features that a processor may have. QEMU 10.0 has 31.
pub const WORDS_MAX: usize = 128;
/// Bytes of the longest vendor: CPUID has room for 12.
const VENDOR_MAX: usize = 12;

/// The first processor of a guest; the others are alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    /// As CPUID says: `GenuineIntel`.
    pub vendor: String,
    /// Bits of features, by where CPUID has them. What is not here is 0.
    pub features: BTreeMap<Word, u32>,
}

/// Where CPUID says it: `7.0.ebx` is leaf 7, sub-leaf 0, register EBX. Leaves are hexadecimal; `1.ecx` has no sub-leaves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Word(String);

impl Word {
    pub fn new(leaf: u32, subleaf: Option<u32>, register: &str) -> Word {
        let subleaf = subleaf.map_or_else(String::new, |subleaf| format!("{subleaf:x}."));
        Word(format!("{leaf:x}.{subleaf}{}", register.to_ascii_lowercase()))
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPUID {}", self.0)
    }
}

impl Cpu {
    /// What a guest that has seen this processor would miss on `here`, by name; empty if it can go on there. More features than
    /// it has seen do no harm.
    pub fn missing_on(&self, here: &Cpu) -> Vec<String> {
        let mut missing = Vec::new();
        if self.vendor != here.vendor {
            missing.push(format!("the vendor {:?} (it is {:?})", self.vendor, here.vendor));
        }
        for (word, bits) in &self.features {
            let lacks = bits & !here.features.get(word).copied().unwrap_or(0);
            missing.extend((0..32).filter(|bit| lacks >> bit & 1 == 1).filter_map(|bit| name(word, bit)));
        }
        missing
    }

    /// What comes from a file or another host makes sense.
    pub fn is_sane(&self) -> bool {
        let is_plain =
            |text: &str, max| text.len() <= max && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        let mut words = self.features.keys();
        self.features.len() <= WORDS_MAX
            && is_plain(&self.vendor, VENDOR_MAX)
            && words.all(|word| is_plain(&word.0, 24))
    }
}

/// The name that QEMU has for a feature, as in `-cpu MODEL,+NAME`. `None`: no guest misses it.
fn name(word: &Word, bit: u32) -> Option<String> {
    let names = NAMES.iter().find(|(at, _)| *at == word.0).map(|(_, names)| *names).unwrap_or_default();
    match names.split_ascii_whitespace().nth(bit as usize) {
        // How processors are numbered and share caches: no instruction depends on it, and what a guest has read of it stays true. QEMU
        // 10.0 sets both for machines with several processors, and 7.2 does not.
        Some("ht" | "cmp-legacy") => None,
        Some(name) if name != "-" => Some(name.to_owned()),
        _ => Some(format!("bit {bit} of {word}")),
    }
}

/// Names of bits from 0 on (Intel's and AMD's manuals, in QEMU's spelling); `-` where there is none here.
const NAMES: [(&str, &str); 9] = [
    (
        "1.edx",
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - ds acpi mmx fxsr sse sse2 ss ht tm ia64 pbe",
    ),
    (
        "1.ecx",
        "pni pclmulqdq dtes64 monitor ds-cpl vmx smx est tm2 ssse3 cid - fma cx16 xtpr pdcm - pcid dca sse4.1 sse4.2 x2apic movbe popcnt \
         tsc-deadline aes xsave osxsave avx f16c rdrand hypervisor",
    ),
    (
        "7.0.ebx",
        "fsgsbase tsc-adjust sgx bmi1 hle avx2 - smep bmi2 erms invpcid rtm - - mpx - avx512f avx512dq rdseed adx smap avx512ifma pcommit \
         clflushopt clwb intel-pt avx512pf avx512er avx512cd sha-ni avx512bw avx512vl",
    ),
    (
        "7.0.ecx",
        "- avx512vbmi umip pku ospke waitpkg avx512vbmi2 - gfni vaes vpclmulqdq avx512vnni avx512bitalg - avx512-vpopcntdq - la57 - - - - - \
         rdpid - bus-lock-detect cldemote - movdiri movdir64b - sgxlc pks",
    ),
    (
        "7.0.edx",
        "- - avx512-4vnniw avx512-4fmaps fsrm - - - avx512-vp2intersect - md-clear - - - serialize - tsx-ldtrk - - arch-lbr - - amx-bf16 \
         avx512-fp16 amx-tile amx-int8 spec-ctrl stibp flush-l1d arch-capabilities core-capability ssbd",
    ),
    ("7.1.eax", "- - - - avx-vnni avx512-bf16 - cmpccxadd - - fzrm fsrs fsrc - - - - - - - - amx-fp16 - avx-ifma"),
    ("d.1.eax", "xsaveopt xsavec xgetbv1 xsaves xfd"),
    (
        "80000001.edx",
        "- - - - - - - - - - - syscall - - - - - - - - nx - mmxext - - fxsr-opt pdpe1gb rdtscp - lm 3dnowext 3dnow",
    ),
    (
        "80000001.ecx",
        "lahf-lm cmp-legacy svm extapic cr8legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop skinit wdt - lwp fma4 tce - nodeid-msr - \
         tbm topoext perfctr-core perfctr-nb",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(vendor: &str, features: &[(&str, u32)]) -> Cpu {
        let features = features.iter().map(|(word, bits)| (Word((*word).to_owned()), *bits)).collect();
        Cpu { vendor: vendor.to_owned(), features }
    }

    #[test]
    fn what_a_guest_would_miss_is_named() {
        let seen = cpu("GenuineIntel", &[("1.ecx", 1 << 28 | 1), ("7.0.ebx", 1 << 16), ("24.0.ebx", 1 << 3)]);
        let check = |here: &Cpu, expected: &[&str]| assert_eq!(seen.missing_on(here), expected);
        check(&seen, &[]);
        let more =
            cpu("GenuineIntel", &[("1.ecx", u32::MAX), ("7.0.ebx", u32::MAX), ("24.0.ebx", u32::MAX), ("6.eax", 1)]);
        check(&more, &[]);
        check(&cpu("GenuineIntel", &[("1.ecx", 1 << 28)]), &["pni", "bit 3 of CPUID 24.0.ebx", "avx512f"]);
        let other =
            cpu("AuthenticAMD", &more.features.iter().map(|(word, bits)| (word.0.as_str(), *bits)).collect::<Vec<_>>());
        check(&other, &[r#"the vendor "GenuineIntel" (it is "AuthenticAMD")"#]);
    }

    #[test]
    fn how_processors_are_numbered_is_missed_by_nobody() {
        let seen = cpu("AuthenticAMD", &[("1.edx", 1 << 28), ("80000001.ecx", 1 << 1)]);
        assert!(seen.missing_on(&cpu("AuthenticAMD", &[])).is_empty());
    }

    #[test]
    fn names_are_where_they_belong() {
        let check = |word: Word, bit, expected: &str| assert_eq!(name(&word, bit).as_deref(), Some(expected));
        check(Word::new(1, None, "EDX"), 31, "pbe");
        check(Word::new(1, None, "ECX"), 31, "hypervisor");
        check(Word::new(7, Some(0), "EBX"), 31, "avx512vl");
        check(Word::new(7, Some(0), "ECX"), 22, "rdpid");
        check(Word::new(7, Some(0), "ECX"), 31, "pks");
        check(Word::new(7, Some(0), "EDX"), 31, "ssbd");
        check(Word::new(7, Some(1), "EAX"), 23, "avx-ifma");
        check(Word::new(0x8000_0001, None, "EDX"), 29, "lm");
        check(Word::new(0x8000_0001, None, "ECX"), 23, "perfctr-core");
    }

    #[test]
    fn nonsense_is_found() {
        assert!(cpu("GenuineIntel", &[("1.ecx", 1)]).is_sane());
        assert!(!cpu("GenuineIntel or so", &[]).is_sane());
        assert!(!cpu("x", &[("1.ecx\n", 1)]).is_sane());
        let words: Vec<String> = (0..=WORDS_MAX).map(|word| word.to_string()).collect();
        assert!(!cpu("x", &words.iter().map(|word| (word.as_str(), 1)).collect::<Vec<_>>()).is_sane());
    }
}
