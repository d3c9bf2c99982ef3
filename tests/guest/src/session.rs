//! The steps of a guest's work, one after another, on memory that they share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use pagoda_guest::pattern::Pattern;

use crate::files::Files;
use crate::memory::Memory;
use crate::params::{Params, RunParams, Step};
use crate::phases::{self, Phase};
use crate::report::Report;
use crate::{blocks, boot, control, corpus, disk, files, sort, tools};

/// How a guest ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    PowerOff,
    Reboot,
}

#[derive(Debug)]
pub struct Session<'a> {
    pub params: &'a Params,
    /// Absent until the first step that needs it: tools want the room.
    memory: Option<Memory>,
    /// Each phase gets its own accesses.
    phases_run: u64,
    /// Open since the first step that used it.
    files: Option<Files>,
    /// Read once, if pages are to have one.
    corpus: Option<&'static [u64]>,
}

impl<'a> Session<'a> {
    pub fn new(params: &'a Params) -> Self {
        Self { params, memory: None, phases_run: 0, files: None, corpus: None }
    }

    pub fn run(&mut self, step: &Step, report: &Report) -> Result<()> {
        match *step {
            Step::Phase(Phase::Fill, run) if self.memory.is_none() => self.fill(self.params.mib, run, report),
            Step::Phase(phase, run) => self.phase(phase, run, report),
            Step::Disk(beside, run) => self.disk(beside, run, report),
            Step::Blocks(run) => {
                self.phases_run += 1;
                let seed = self.params.seed.wrapping_add(self.phases_run << 32);
                blocks::run(run, self.params.disk.seed, seed, report)
            }
            Step::Files(run) => {
                self.phases_run += 1;
                let files = match self.files.take() {
                    Some(files) => files,
                    None => files::open()?,
                };
                let files = self.files.insert(files);
                files::run(
                    files,
                    run,
                    self.params.disk.seed,
                    self.params.seed.wrapping_add(self.phases_run << 32),
                    report,
                )
            }
            Step::Free => self.free(report),
            Step::Sort => self.sort(report),
            Step::Idle => self.idle(self.params.idle, report),
            Step::Memtester => tools::memtester(&self.params.memtester, report),
            Step::Stress => tools::stress(&self.params.stress, report),
            Step::Control => control::serve(self, report),
        }
    }

    /// Replaces the memory under test by `mib` of fresh pages, all written.
    pub fn fill(&mut self, mib: Option<usize>, run: RunParams, report: &Report) -> Result<()> {
        self.memory = None;
        let mut pattern = Pattern::new(self.params.seed);
        if self.params.corpus_mib > 0 {
            let corpus = match self.corpus {
                Some(corpus) => corpus,
                None => self.corpus.insert(corpus::load(self.params.corpus_mib, report)?),
            };
            pattern = pattern.with_corpus(corpus);
        }
        let memory = self.memory.insert(Memory::allocate(mib, pattern)?);
        phases::run(Phase::Fill, memory, run, self.params.seed, report);
        Ok(())
    }

    pub fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Gives the memory under test back to the guest's kernel.
    pub fn drop_memory(&mut self, report: &Report) -> Result<()> {
        let mib = self.memory.take().map_or(0, |memory| memory.mib());
        report.line(format_args!("done phase=drop mib={mib} memfree_kib={} bad=0 us=0", boot::meminfo_kib("MemFree")?));
        Ok(())
    }

    /// Checks every word of the memory under test, if there is any.
    pub fn verify(&mut self, report: &Report) {
        if let Some(memory) = &mut self.memory {
            phases::run(Phase::Verify, memory, self.params.run, self.params.seed, report);
        }
    }

    pub fn idle(&self, time: Duration, report: &Report) -> Result<()> {
        std::thread::sleep(time);
        report.line(format_args!(
            "done phase=idle memfree_kib={} bad=0 us={}",
            boot::meminfo_kib("MemFree")?,
            time.as_micros()
        ));
        Ok(())
    }

    fn phase(&mut self, phase: Phase, run: RunParams, report: &Report) -> Result<()> {
        self.ensure_filled(run, report)?;
        self.phases_run += 1;
        let seed = self.params.seed.wrapping_add(self.phases_run << 32);
        if let Some(memory) = &mut self.memory {
            phases::run(phase, memory, run, seed, report);
        }
        Ok(())
    }

    fn disk(&mut self, beside: Option<Phase>, run: RunParams, report: &Report) -> Result<()> {
        let disk = disk::Disk::open(self.params.disk)?;
        let Some(phase) = beside else { return disk.read_and_check(disk::Until::Limit(run.limit), report) };
        self.ensure_filled(run, report)?;
        let phase_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| disk.read_and_check(disk::Until::Set(&phase_ended), report));
            let outcome = self.phase(phase, run, report);
            phase_ended.store(true, Ordering::Relaxed);
            // A panic ends the whole guest (panic = "abort"), so joining cannot fail.
            outcome.and(reader.join().expect("disk thread"))
        })
    }

    /// Gives memory back to the guest's kernel, which reports free pages to the host, and takes it again.
    fn free(&mut self, report: &Report) -> Result<()> {
        self.fill(self.params.mib, self.params.run, report)?;
        let mib = self.memory.as_ref().map(Memory::mib);
        self.drop_memory(report)?;
        self.idle(self.params.idle, report)?;
        self.fill(mib, self.params.run, report)?;
        self.verify(report);
        Ok(())
    }

    /// In memory of its own.
    fn sort(&mut self, report: &Report) -> Result<()> {
        self.memory = None;
        sort::run(self.params.mib, self.params.seed, report)
    }

    fn ensure_filled(&mut self, run: RunParams, report: &Report) -> Result<()> {
        if self.memory.is_none() { self.fill(self.params.mib, run, report) } else { Ok(()) }
    }
}
