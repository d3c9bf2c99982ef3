//! Counting boots across resets, in the first sector of a scratch disk: a reset loses everything else.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Context, Result};
use rustix::fs::OFlags;

use crate::params::Params;
use crate::report::Report;
use crate::session::End;

const DEVICE: &str = "/dev/vdb";
const MAGIC: u64 = u64::from_le_bytes(*b"PAGODARB");

/// The sector's content: magic, boots so far, wrong pages so far; three little-endian words.
const RECORD_BYTES: usize = 24;

#[derive(Debug)]
pub struct BootCount {
    scratch: Option<File>,
    wanted: u64,
    done: u64,
    bad_pages: u64,
}

impl BootCount {
    /// Without reboots asked for, the disk is not needed and not touched.
    pub fn load(params: &Params) -> Result<Self> {
        let mut count = Self { scratch: None, wanted: params.reboots, done: 0, bad_pages: 0 };
        if params.reboots == 0 {
            return Ok(count);
        }
        let scratch = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::SYNC.bits().cast_signed())
            .open(DEVICE)
            .with_context(|| format!("pagoda.reboot counts boots on {DEVICE}: give the VM a second virtio-blk disk"))?;
        let mut record = [0; RECORD_BYTES];
        scratch.read_exact_at(&mut record, 0).with_context(|| format!("read {DEVICE}"))?;
        let word =
            |index: usize| u64::from_le_bytes(record[index * 8..][..8].try_into().expect("a word of eight bytes"));
        if word(0) == MAGIC {
            (count.done, count.bad_pages) = (word(1), word(2));
        }
        count.scratch = Some(scratch);
        Ok(count)
    }

    pub fn number(&self) -> u64 {
        self.done
    }

    /// The last duty of a boot: reboot if more are wanted, else the verdict over all of them.
    pub fn finish(mut self, report: &Report) -> Result<End> {
        self.bad_pages += report.bad_pages();
        if self.done < self.wanted {
            self.done += 1;
            self.store(MAGIC)?;
            report.line(format_args!("reboot {}", self.done));
            return Ok(End::Reboot);
        }
        // The disk can be used again.
        self.store(0)?;
        match self.bad_pages {
            0 => report.line(format_args!("result ok")),
            bad => report.line(format_args!("result bad {bad}")),
        }
        Ok(End::PowerOff)
    }

    fn store(&self, magic: u64) -> Result<()> {
        let Some(scratch) = &self.scratch else { return Ok(()) };
        let record: Vec<u8> = [magic, self.done, self.bad_pages].into_iter().flat_map(u64::to_le_bytes).collect();
        scratch.write_all_at(&record, 0).with_context(|| format!("write {DEVICE}"))
    }
}
