//! Judges the facts. Each check says what was found, and what to do if that is not enough.

use pagoda_api::API_VERSION;
use serde::Serialize;

use super::facts::{Device, FOLIO_KIB_CHUNK, FOLIO_KIB_HUGE, Facts, SwapTrial};
use crate::units::format_size;

/// Debian 12's kernel, the oldest one that tests run on; `/dev/userfaultfd` came with it.
const KERNEL_MIN: (u32, u32) = (6, 1);

/// From this kernel on khugepaged leaves a file alone that is registered for missing pages.
const KHUGEPAGED_SPARES_HOLES: (u32, u32) = (6, 4);

/// `-machine memory-backend=` came with 5.0, free page reporting with 5.1.
const QEMU_MIN: (u32, u32) = (5, 1);

/// Mappings a VM may need beyond the default of 65530: shared and moved pages split them.
const MAX_MAP_COUNT: u64 = 1 << 20;

/// Room on the swap disk below which a warning is due: less than one small VM.
const SWAP_FREE_BYTES: u64 = 4 << 30;

/// Locked memory for the fixed buffers of the rings of a few VMs.
const MEMLOCK_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    /// Works, but slower or with limits.
    Warn,
    /// VMs cannot run so.
    Fail,
}

impl Verdict {
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub verdict: Verdict,
    pub found: String,
    /// Empty when all is well.
    pub advice: String,
}

impl Check {
    pub fn new(verdict: Verdict, name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, verdict, found: found.into(), advice: advice.into() }
    }

    pub fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, name, found, "")
    }
}

pub fn check_all(facts: &Facts) -> Vec<Check> {
    vec![
        kernel(facts),
        userfaultfd(facts),
        folios("huge mappings", FOLIO_KIB_HUGE, facts.folios_huge.as_deref(), facts),
        folios("large folios", FOLIO_KIB_CHUNK, facts.folios_chunk.as_deref(), facts),
        khugepaged(facts),
        host_swap(facts),
        map_count(facts),
        io_uring(facts),
        memlock(facts),
        swap(facts),
        kvm(facts),
        qemu(facts),
        daemon(facts),
    ]
}

fn kernel(facts: &Facts) -> Check {
    match version(&facts.kernel) {
        Some(found) if found >= KERNEL_MIN => Check::ok("kernel", &facts.kernel),
        _ => Check::new(
            Verdict::Fail,
            "kernel",
            &facts.kernel,
            "Linux 6.1 or newer is needed, as in Debian 12 and Ubuntu 24.04",
        ),
    }
}

/// Faults of KVM and vhost are the kernel's own, which userfaultfd serves only with one of three
/// permissions. The daemon hands its way on to the VMs, so it is the daemon's user who needs it.
fn userfaultfd(facts: &Facts) -> Check {
    const NAME: &str = "userfaultfd";
    if facts.uffd_device == Device::Usable {
        return Check::ok(NAME, "/dev/userfaultfd can be opened");
    }
    if facts.has_cap_sys_ptrace {
        return Check::ok(NAME, "CAP_SYS_PTRACE");
    }
    if facts.unprivileged_userfaultfd == Some(1) {
        return Check::ok(NAME, "sysctl vm.unprivileged_userfaultfd=1");
    }
    match &facts.uffd_device {
        Device::NoPermission => Check::new(
            Verdict::Fail,
            NAME,
            "no permission for /dev/userfaultfd",
            "give the daemon's user access to the device: setfacl -m u:USER:rw /dev/userfaultfd (and a udev \
             rule, to keep it), or run pagodad as root. This is the narrowest of the three ways; the others are \
             CAP_SYS_PTRACE and sysctl vm.unprivileged_userfaultfd=1",
        ),
        Device::Missing if facts.is_root => Check::new(
            Verdict::Fail,
            NAME,
            "no /dev/userfaultfd, and root has no CAP_SYS_PTRACE",
            "this is a container: start it with --cap-add SYS_PTRACE or --device /dev/userfaultfd, and a \
             seccomp profile that allows userfaultfd(2)",
        ),
        Device::Missing => Check::new(
            Verdict::Fail,
            NAME,
            "no /dev/userfaultfd, no CAP_SYS_PTRACE, vm.unprivileged_userfaultfd is not 1",
            "run pagodad as root, or give it the capability (systemd: AmbientCapabilities=CAP_SYS_PTRACE), or \
             sysctl -w vm.unprivileged_userfaultfd=1, which gives every user the right",
        ),
        Device::Broken(error) => Check::new(
            Verdict::Fail,
            NAME,
            format!("/dev/userfaultfd: {error}"),
            "the kernel may have been built without CONFIG_USERFAULTFD; use the distribution's kernel",
        ),
        Device::Usable => Check::ok(NAME, "/dev/userfaultfd can be opened"),
    }
}

/// An old khugepaged fills holes of RAM that is paged out, wherever it may work on shared memory unasked. The shim keeps the VMM's
/// own mappings out of its reach, but not those of a vhost-user process.
fn khugepaged(facts: &Facts) -> Check {
    const NAME: &str = "khugepaged";
    let top = facts.folios_top.as_deref();
    match (version(&facts.kernel), top) {
        (Some(kernel), _) if kernel >= KHUGEPAGED_SPARES_HOLES => Check::ok(NAME, "leaves RAM that is paged out alone"),
        (_, Some("never" | "deny" | "advise") | None) => Check::ok(NAME, "works on no shared memory unasked"),
        (_, Some(top)) => Check::new(
            Verdict::Fail,
            NAME,
            format!("shmem_enabled is {top}, and this kernel's khugepaged fills holes in RAM that is paged out"),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (now and at every boot), or use Linux 6.4 or newer",
        ),
    }
}

/// The host's own swap beside Pagoda's: slower, and on some kernels wrong.
fn host_swap(facts: &Facts) -> Check {
    const NAME: &str = "the host's own swap";
    if facts.host_swap == Some(false) {
        return Check::ok(NAME, "off");
    }
    let has_folios = |setting: &Option<String>| !matches!(setting.as_deref(), Some("never" | "deny") | None);
    let settings = [&facts.folios_top, &facts.folios_huge, &facts.folios_chunk];
    if settings.into_iter().any(has_folios) && loses_swapped_folios(&facts.kernel) {
        return Check::new(
            Verdict::Warn,
            NAME,
            format!("on, and Linux {} can lose pages of large folios that it swaps out (CVE-2026-23161)", facts.kernel),
            "use Linux 6.12.78, 6.18.9 or newer, or swapoff -a: with Pagoda the host needs no swap for its VMs",
        );
    }
    Check::ok(NAME, if facts.host_swap.is_none() { "cannot be told" } else { "on" })
}

/// Shared memory is swapped out in large folios since 6.12. What punches and swap-in got wrong was mended in 6.12.78, for later
/// kernels in 6.18.9.
fn loses_swapped_folios(kernel: &str) -> bool {
    let patch = || kernel.split(|c: char| !c.is_ascii_digit()).nth(2)?.parse::<u32>().ok();
    match version(kernel) {
        Some((6, 12)) => patch().is_none_or(|patch| patch < 78),
        Some((6, 18)) => patch().is_none_or(|patch| patch < 9),
        Some(version) => ((6, 13)..(6, 18)).contains(&version),
        None => true,
    }
}

/// Whether shared memory of ours gets folios of `kib`: the setting of the size, which may inherit
/// that of all sizes; `force` and `deny` there overrule it (admin-guide/mm/transhuge).
fn folios(name: &'static str, kib: u32, of_size: Option<&str>, facts: &Facts) -> Check {
    let top = facts.folios_top.as_deref();
    let effective = match (top, of_size) {
        (Some("force" | "deny"), _) | (_, Some("inherit")) => top,
        (_, Some(of_size)) => Some(of_size),
        // Before 6.14 shared memory had only the size of huge pages, set for all.
        (_, None) if kib == FOLIO_KIB_HUGE => top,
        (_, None) => None,
    };
    let size = format_size(u64::from(kib) << 10);
    match effective {
        Some(value @ ("always" | "force" | "advise" | "within_size")) => {
            Check::ok(name, format!("{size} folios of shared memory: {value}"))
        }
        Some(value) => {
            let advice = if top == Some("deny") {
                "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled".to_owned()
            } else {
                format!(
                    "echo advise > /sys/kernel/mm/transparent_hugepage/hugepages-{kib}kB/shmem_enabled \
                     (now and at every boot; without it memory is slower, never wrong)"
                )
            };
            Check::new(Verdict::Warn, name, format!("{size} folios of shared memory: {value}"), advice)
        }
        None => Check::new(
            Verdict::Warn,
            name,
            format!("{size} folios of shared memory: not in this kernel"),
            "paging works on 4 KiB pages and costs more; newer kernels have them",
        ),
    }
}

fn map_count(facts: &Facts) -> Check {
    const NAME: &str = "vm.max_map_count";
    match facts.max_map_count {
        Some(count) if count >= MAX_MAP_COUNT => Check::ok(NAME, count.to_string()),
        Some(count) => Check::new(
            Verdict::Warn,
            NAME,
            count.to_string(),
            format!("large VMs need more: sysctl -w vm.max_map_count={MAX_MAP_COUNT}"),
        ),
        None => Check::new(Verdict::Warn, NAME, "not readable", "is /proc mounted?"),
    }
}

fn io_uring(facts: &Facts) -> Check {
    const NAME: &str = "io_uring";
    match facts.io_uring_disabled {
        None | Some(0) => Check::ok(NAME, "allowed"),
        Some(1) if facts.is_root => Check::ok(NAME, "allowed for root"),
        Some(1) => Check::new(
            Verdict::Warn,
            NAME,
            "allowed only for root and the group kernel.io_uring_group",
            "put the daemon's user into that group, or sysctl -w kernel.io_uring_disabled=0",
        ),
        Some(_) => Check::new(
            Verdict::Fail,
            NAME,
            "disabled",
            "sysctl -w kernel.io_uring_disabled=0 (or 1, if pagodad runs as root)",
        ),
    }
}

fn memlock(facts: &Facts) -> Check {
    const NAME: &str = "memlock limit";
    match facts.memlock_bytes {
        None => Check::ok(NAME, "none"),
        Some(bytes) if facts.is_root => Check::ok(NAME, format!("{}, not for root", format_size(bytes))),
        Some(bytes) if bytes >= MEMLOCK_BYTES => Check::ok(NAME, format_size(bytes)),
        Some(bytes) => Check::new(
            Verdict::Warn,
            NAME,
            format_size(bytes),
            format!(
                "buffers of io_uring may not fit: raise it to {} (systemd: LimitMEMLOCK=infinity)",
                format_size(MEMLOCK_BYTES)
            ),
        ),
    }
}

fn swap(facts: &Facts) -> Check {
    const NAME: &str = "swap directory";
    let dir = facts.swap_dir.display();
    let elsewhere = "use a directory on ext4 or XFS: pagodad --swap-dir DIR, pagoda doctor --swap-dir DIR";
    match &facts.swap {
        SwapTrial::Works { free_bytes, file_system } => {
            let found = format!("{dir}: {file_system}, {} free", format_size(*free_bytes));
            if *free_bytes >= SWAP_FREE_BYTES {
                Check::ok(NAME, found)
            } else {
                Check::new(
                    Verdict::Warn,
                    NAME,
                    found,
                    "a VM is stopped when its swap disk is full: make room, or choose another directory",
                )
            }
        }
        SwapTrial::NoDirectIo => {
            Check::new(Verdict::Fail, NAME, format!("{dir}: this file system has no direct I/O"), elsewhere)
        }
        SwapTrial::NoHoles => {
            Check::new(Verdict::Fail, NAME, format!("{dir}: this file system cannot punch holes"), elsewhere)
        }
        SwapTrial::Failed { step, error } => Check::new(
            Verdict::Fail,
            NAME,
            format!("{dir}: {step}: {error}"),
            "make the directory (mkdir -p) and run doctor as the daemon's user, or name another with --swap-dir",
        ),
    }
}

fn kvm(facts: &Facts) -> Check {
    const NAME: &str = "KVM";
    let slow = "guests run under TCG, many times slower";
    match &facts.kvm {
        Device::Usable => Check::ok(NAME, "/dev/kvm can be opened"),
        Device::Missing => Check::new(
            Verdict::Warn,
            NAME,
            "no /dev/kvm",
            format!(
                "{slow}; switch virtualization on in the firmware, or nested virtualization on this machine's host"
            ),
        ),
        Device::NoPermission => Check::new(
            Verdict::Warn,
            NAME,
            "no permission for /dev/kvm",
            format!("{slow}; put the user into the group kvm"),
        ),
        Device::Broken(error) => Check::new(Verdict::Warn, NAME, error, slow),
    }
}

fn qemu(facts: &Facts) -> Check {
    const NAME: &str = "QEMU";
    match &facts.qemu {
        Err(error) => {
            Check::new(Verdict::Warn, NAME, error, "install it (apt install qemu-system-x86), or name one with --qemu")
        }
        Ok(program) => {
            let found = format!("{}: {}", program.path.display(), program.version);
            let number = program.version.split_whitespace().find_map(version);
            match number {
                Some(number) if number >= QEMU_MIN => Check::ok(NAME, found),
                _ => Check::new(Verdict::Fail, NAME, found, "QEMU 5.1 or newer is needed"),
            }
        }
    }
}

fn daemon(facts: &Facts) -> Check {
    const NAME: &str = "daemon";
    match &facts.daemon {
        Err(error) => Check::new(Verdict::Warn, NAME, "cannot be asked", error),
        Ok(daemon) if daemon.version.api != API_VERSION => Check::new(
            Verdict::Fail,
            NAME,
            format!("pagodad {} speaks API {}", daemon.version.version, daemon.version.api),
            format!("this pagoda speaks API {API_VERSION}: install both of one version"),
        ),
        Ok(daemon) if daemon.health.ok => Check::ok(NAME, format!("pagodad {} is well", daemon.version.version)),
        Ok(daemon) => Check::new(
            Verdict::Fail,
            NAME,
            format!("pagodad {} has problems", daemon.version.version),
            daemon.health.problems.join("; "),
        ),
    }
}

/// The first two numbers of `6.1.0-13-amd64` or `7.2.22`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
#[path = "checks_tests.rs"]
mod tests;
