//! Admission control (ESX section 6.2): a VM starts only if it can be kept.
//!
//! Memory must hold `min + overhead + reserve` of every VM and what is kept free; swap must hold `max - min`, or a VM that is
//! squeezed could not be preserved. While the pool holds every VM at its cap, none is squeezed, and `max - cap` is enough. `overhead` is what was measured of the VMM and of our tables, `reserve` what copies on
//! write of shared pages may take. Reservations are not allocations: an unused min is used by others until it is wanted.

use super::settings::{MEMORY_MAX, VmSettings};
use crate::units::PageCount;

/// What a VM takes beside its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overhead {
    /// The VMM's own memory and our tables.
    pub overhead: PageCount,
    /// For copies on write.
    pub reserve: PageCount,
}

impl Overhead {
    /// No part beyond the largest memory, so that no sum of all VMs' overflows.
    pub(super) fn bounded(self) -> Overhead {
        Overhead { overhead: self.overhead.min(MEMORY_MAX), reserve: self.reserve.min(MEMORY_MAX) }
    }
}

impl std::ops::Add for Reservation {
    type Output = Reservation;

    fn add(self, other: Reservation) -> Reservation {
        Reservation { memory: self.memory + other.memory, swap: self.swap + other.swap }
    }
}

/// What is reserved for a VM, or for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reservation {
    /// In the pool.
    pub memory: PageCount,
    /// On the swap disk.
    pub swap: PageCount,
}

impl Reservation {
    /// For one VM that may be squeezed down to its min.
    pub fn of(settings: &VmSettings, overhead: Overhead) -> Reservation {
        Reservation {
            memory: settings.min + overhead.overhead + overhead.reserve,
            swap: settings.memory.saturating_sub(settings.min),
        }
    }

    /// For one VM that has all its cap allows.
    pub fn at_cap(settings: &VmSettings, overhead: Overhead) -> Reservation {
        Reservation { swap: settings.memory.saturating_sub(settings.cap), ..Reservation::of(settings, overhead) }
    }
}

/// What there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The pool less what is kept free.
    pub memory: PageCount,
    /// Swap in all: free space of its disk, and what swap files hold already.
    pub swap: PageCount,
}

/// Whether a VM would be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// What it needs.
    pub needs: Reservation,
    /// What the others have reserved.
    pub reserved: Reservation,
    /// What there is.
    pub capacity: Capacity,
}

impl Admission {
    /// What is missing; nothing if the VM is admitted.
    pub fn missing(&self) -> Reservation {
        let missing =
            |needs: PageCount, reserved: PageCount, capacity: PageCount| (needs + reserved).saturating_sub(capacity);
        Reservation {
            memory: missing(self.needs.memory, self.reserved.memory, self.capacity.memory),
            swap: missing(self.needs.swap, self.reserved.swap, self.capacity.swap),
        }
    }

    /// Whether nothing is missing.
    pub fn is_admitted(&self) -> bool {
        self.missing() == Reservation::default()
    }

    /// The verdict.
    ///
    /// # Errors
    /// Something is missing.
    pub fn verdict(self) -> Result<Reservation, Refused> {
        if self.is_admitted() { Ok(self.needs) } else { Err(Refused { admission: self }) }
    }
}

/// A VM is not admitted. The message says what is missing and what would help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not admitted: {}", refusal(.admission))]
pub struct Refused {
    /// The figures.
    pub admission: Admission,
}

fn refusal(admission: &Admission) -> String {
    let missing = admission.missing();
    let part =
        |missing: PageCount, what: &str, needs: PageCount, reserved: PageCount, capacity: PageCount, advice: &str| {
            (missing > PageCount::ZERO).then(|| {
                let (missing, needs) = (missing.bytes(), needs.bytes());
                let (reserved, capacity) = (reserved.bytes(), capacity.bytes());
                format!("{missing} of {what} are missing (needs {needs}, reserved {reserved} of {capacity}); {advice}")
            })
        };
    let Admission { needs, reserved, capacity } = *admission;
    let memory = part(
        missing.memory,
        "memory",
        needs.memory,
        reserved.memory,
        capacity.memory,
        "lower its min or another VM's, stop a VM, or enlarge the pool",
    );
    let advice = "raise its min, or give the swap directory more space";
    let swap = part(missing.swap, "swap", needs.swap, reserved.swap, capacity.swap, advice);
    [memory, swap].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    fn mib(mib: u64) -> PageCount {
        Bytes::from_mib(mib).pages_floor()
    }

    fn admission(memory: u64, min: u64, reserved: [u64; 2], capacity: [u64; 2]) -> Admission {
        let settings = VmSettings { min: mib(min), ..VmSettings::new(mib(memory)) };
        Admission {
            needs: Reservation::of(&settings, Overhead { overhead: mib(30), reserve: mib(2) }),
            reserved: Reservation { memory: mib(reserved[0]), swap: mib(reserved[1]) },
            capacity: Capacity { memory: mib(capacity[0]), swap: mib(capacity[1]) },
        }
    }

    #[test]
    fn min_in_memory_and_the_rest_in_swap() {
        let needs = admission(256, 128, [0, 0], [0, 0]).needs;
        assert_eq!(needs, Reservation { memory: mib(160), swap: mib(128) });
    }

    #[test]
    fn what_is_missing_is_said() {
        let check = |admission: Admission, memory: u64, swap: u64, expected: &[&str]| {
            assert_eq!(admission.missing(), Reservation { memory: mib(memory), swap: mib(swap) });
            assert_eq!(admission.is_admitted(), memory + swap == 0);
            match admission.verdict() {
                Ok(needs) => assert_eq!(needs, admission.needs),
                Err(refused) => {
                    let message = refused.to_string();
                    assert!(expected.iter().all(|part| message.contains(part)), "{message}");
                }
            }
        };
        check(admission(256, 128, [840, 0], [1000, 128]), 0, 0, &[]);
        check(admission(256, 128, [841, 0], [1000, 128]), 1, 0, &["1 MiB of memory are missing", "lower its min"]);
        check(admission(256, 128, [0, 1], [1000, 128]), 0, 1, &["1 MiB of swap are missing", "raise its min"]);
        check(admission(256, 128, [900, 100], [1000, 128]), 60, 100, &["60 MiB of memory", "100 MiB of swap"]);
    }
}
