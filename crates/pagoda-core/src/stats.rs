//! The catalogue of metrics: one table feeds the counters, Prometheus, `pagoda top` and the documentation.
//!
//! Every fault message is counted under exactly one of the `faults_*` causes; [`Stats::faults`] is their sum, and
//! `messages` is what the pager read from the kernel: the two are counted apart and must be equal.

/// How a value behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows while the VM is attached to one daemon.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// One row of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct MetricDef {
    /// Name without the `pagoda_vm_` prefix.
    pub name: &'static str,
    /// The kind says whether the value only grows.
    pub kind: MetricKind,
    /// The unit is `pages`, `chunks`, `bytes`, `microseconds`, or empty for plain counts.
    pub unit: &'static str,
    /// One sentence for people.
    pub help: &'static str,
}

macro_rules! catalogue {
    ($($variant:ident $name:literal $kind:ident $unit:literal $help:literal;)*) => {
        /// Index into [`Stats`] and [`CATALOGUE`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        #[allow(missing_docs)] // the help texts are the documentation
        pub enum Metric { $($variant),* }

        /// All metrics of a VM, in the order of [`Metric`].
        pub const CATALOGUE: &[MetricDef] =
            &[$(MetricDef { name: $name, kind: MetricKind::$kind, unit: $unit, help: $help }),*];
    };
}

catalogue! {
    Messages "messages" Counter "" "Fault messages read from the kernel: the sum of all causes.";
    FaultsMinor "faults_minor" Counter "" "Faults on a page in DRAM that was only unmapped.";
    FaultsZero "faults_zero" Counter "" "Faults on a page that was nowhere, because it is all zero.";
    FaultsShared "faults_shared" Counter "" "Faults on a shared page, which was copied back.";
    FaultsSwapPage "faults_swap_page" Counter "" "Faults answered by reading one page from swap.";
    FaultsSwapChunk "faults_swap_chunk" Counter "" "Faults answered by reading a whole chunk from swap.";
    FaultsJoined "faults_joined" Counter "" "Faults on a page that was already being read.";
    FaultsWriteProtect "faults_write_protect" Counter "" "First writes to a clean page.";
    FaultsBorrowed "faults_borrowed" Counter "" "First writes to a page that the VM shares with other clones.";
    FaultsCancel "faults_cancel" Counter "" "Faults on a page that was being written out, which stays.";
    FaultsWaited "faults_waited" Counter "" "Faults that had to wait for room in DRAM.";
    PagesIn "pages_in" Counter "pages" "Pages read from swap.";
    PagesOut "pages_out" Counter "pages" "Pages written to swap.";
    PagesDropped "pages_dropped" Counter "pages" "Clean pages that left DRAM without a write.";
    PagesZeroOut "pages_zero_out" Counter "pages" "Zero pages that left DRAM without a write.";
    PagesKept "pages_kept" Counter "pages" "Pages touched while they were being written out, which stayed.";
    PagesDiscarded "pages_discarded" Counter "pages" "Pages the guest gave back by balloon or free page reporting.";
    ReadAheadChunks "read_ahead_chunks" Counter "chunks" "Chunks read before they were asked for.";
    ReadAheadHits "read_ahead_hits" Counter "chunks" "Chunks read ahead and then touched.";
    PagesPrefetched "prefetched_pages" Counter "pages" "Pages of a snapshot read because a VM needed them before.";
    PrefetchedUsed "prefetched_used_pages" Counter "pages" "Such pages that were mapped since, by a fault on them or near them.";
    ZappedChunks "zapped_chunks" Counter "chunks" "Chunks unmapped to see whether they are touched again.";
    RescuedChunks "rescued_chunks" Counter "chunks" "Unmapped chunks that were touched again before they left.";
    EvictedChunks "evicted_chunks" Counter "chunks" "Chunks that left DRAM.";
    PinWaits "pin_waits" Counter "" "Times page-out waited for direct I/O that may hold older pins.";
    TrimmedPages "trimmed_pages" Counter "pages" "Outdated swap blocks given back to the file system.";
    WatchedUses "watched_uses" Counter "" "Faults on pages that were unmapped to see whether they are used.";
    WatchZaps "watch_zaps" Counter "pages" "Single pages unmapped to see whether they are used.";
    WatchZapUs "watch_zap_us" Counter "microseconds" "Time from asking the VMM to unmap such pages to its answer.";
    PagesScanned "share_scanned_pages" Counter "pages" "Pages looked at for equal content.";
    PagesMerged "share_merged_pages" Counter "pages" "Pages that became shared.";
    PagesCopiedBack "share_copied_back_pages" Counter "pages" "Shared pages that became the VM's own again.";
    ShareCollisions "share_collisions" Counter "" "Pages with the hash of a frame and another content.";
    ShareCpu "share_cpu_us" Counter "" "Microseconds of processor time spent looking for equal pages.";
    OwnedChunks "owned_chunks" Counter "chunks" "Chunks that became the VM's own, which clones of its snapshot shared.";
    OwnsGivenUp "owns_given_up" Counter "" "Times a chunk did not become the VM's own, because it was written just then.";
    RemoteIn "remote_in_pages" Counter "pages" "Pages read from the pool.";
    RemoteOut "remote_out_pages" Counter "pages" "Pages written to the pool.";
    RemoteDeclined "remote_declined_pages" Counter "pages" "Pages that the pool did not take, or not in time: swap did.";
    SlowedWrites "move_slowed_writes" Counter "" "First writes to a page that waited, because a move slows the VM's writers.";
    SlowedUs "move_slowed_us" Counter "microseconds" "Time that such writes waited.";
    WriteDelay "move_write_delay_us" Gauge "microseconds" "What each first write to a page waits now; 0 unless a move slows the VM's writers.";
    Resident "resident_pages" Gauge "pages" "Pages in DRAM.";
    Swapped "swapped_pages" Gauge "pages" "Pages whose content is only in swap.";
    Remote "remote_pages" Gauge "pages" "Pages whose block is in the pool, not in the swap file.";
    RemoteWaiting "remote_waiting_pages" Gauge "pages" "Pages asked of the pool that have not come for a second: a server is silent.";
    Shared "shared_pages" Gauge "pages" "Pages whose content is a frame of the share group.";
    SharedPart "shared_part_pages" Gauge "pages" "The VM's part of these frames; the rest of shared pages is saved.";
    ShareBurst "share_burst_pages" Gauge "pages" "Most pages copied back between two counts of the part, a second apart.";
    Borrowed "borrowed_pages" Gauge "pages" "Pages that the VM reads where all clones of its snapshot read them.";
    BorrowedChunks "borrowed_chunks" Gauge "chunks" "Chunks that the VM reads there, but for what it has written.";
    PrivatePages "private_pages" Gauge "pages" "Pages of such chunks that it has written, and so has alone.";
    Limit "dram_limit_pages" Gauge "pages" "Hard cap of the VM's DRAM.";
    Waiting "waiting_faults" Gauge "" "Faults waiting for room in DRAM.";
    InFlight "in_flight_ops" Gauge "" "Reads, page-outs and zaps under way.";
    Cold "cold_chunks" Gauge "chunks" "Chunks unmapped and untouched since.";
    Watched "watched_pages" Gauge "pages" "Pages whose next use will be noticed.";
}

/// The catalogue has so many metrics.
pub const METRICS: usize = CATALOGUE.len();

/// The causes a fault can have.
pub const FAULT_CAUSES: [Metric; 10] = [
    Metric::FaultsMinor,
    Metric::FaultsZero,
    Metric::FaultsShared,
    Metric::FaultsSwapPage,
    Metric::FaultsSwapChunk,
    Metric::FaultsJoined,
    Metric::FaultsWriteProtect,
    Metric::FaultsBorrowed,
    Metric::FaultsCancel,
    Metric::FaultsWaited,
];

/// The values of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats([u64; METRICS]);

impl Default for Stats {
    fn default() -> Self {
        Stats([0; METRICS])
    }
}

impl Stats {
    /// Adds to a counter.
    pub fn add(&mut self, metric: Metric, n: u64) {
        self.0[metric as usize] += n;
    }

    /// Sets a gauge to a new value.
    pub fn set(&mut self, metric: Metric, value: u64) {
        self.0[metric as usize] = value;
    }

    /// Gives the present value of a counter or gauge.
    pub fn get(&self, metric: Metric) -> u64 {
        self.0[metric as usize]
    }

    /// All values, in the order of [`CATALOGUE`].
    pub fn values(&self) -> &[u64; METRICS] {
        &self.0
    }

    /// Faults of every cause.
    pub fn faults(&self) -> u64 {
        FAULT_CAUSES.iter().map(|cause| self.get(*cause)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_counters_say_what_they_count() {
        for (i, def) in CATALOGUE.iter().enumerate() {
            assert!(CATALOGUE[..i].iter().all(|other| other.name != def.name), "{}", def.name);
            assert!(def.help.ends_with('.') && !def.name.is_empty());
        }
    }

    #[test]
    fn causes_are_exactly_the_fault_counters() {
        let by_name = CATALOGUE.iter().filter(|def| def.name.starts_with("faults_")).count();
        assert_eq!(by_name, FAULT_CAUSES.len());
        assert!(FAULT_CAUSES.iter().all(|cause| CATALOGUE[*cause as usize].name.starts_with("faults_")));
    }
}
