//! What the driver does for disks that are copied.

use std::time::Duration;

use anyhow::{Result, ensure};
use pagoda_move::rounds::Settings;

use super::super::mirror::Mirror;
use super::super::standing::BeforeState;
use super::{Driver, Stage};

impl Driver {
    /// Before its memory, since they take longer: the guest writes more often to that.
    pub(super) fn copy_disks(&mut self) {
        let (Some((offer, settings)), Some((qmp, pid))) = (&self.begun.offer, self.begun.guest.monitor()) else {
            return self.give_up("the VM has ended".to_owned());
        };
        if offer.disks.is_empty() {
            return self.own_all();
        }
        let attempt = self.begun.owner.offered().attempt;
        let speed = settings.bandwidth_max;
        match Mirror::begin(
            (&qmp, pid),
            self.begun.notes.dir(),
            &self.begun.called,
            attempt,
            &offer.disks,
            speed,
            &self.begun.own,
        ) {
            Ok(mirror) => {
                let files = offer.disks.iter().map(|disk| disk.image.file.clone()).collect();
                let mut shown = self.shown();
                (shown.disk_files, shown.has_begun) = (files, true);
                drop(shown);
                self.mirror = Some(mirror);
                self.begun.stage = Stage::Mirroring;
                self.answer(Ok(()));
            }
            Err(error) => self.give_up(format!("start a thread: {error}")),
        }
    }

    /// Its time is that of all of the move.
    pub(super) fn look_at_time(&mut self) {
        let max = self.begun.offer.as_ref().and_then(|(_, settings)| settings.time_max);
        if self.begun.stage == Stage::Mirroring && max.is_some_and(|max| self.began.elapsed() > max) {
            self.give_up("its time was over before its disks were copied".to_owned());
        }
    }

    /// The rest of its disks is copied before its state is saved.
    ///
    /// # Errors
    /// It has not been stopped.
    pub(super) fn stop(&mut self) -> Result<()> {
        let disks = self.mirror.as_ref().map(Mirror::completer);
        let has_disks = self.begun.offer.as_ref().is_some_and(|(offer, _)| !offer.disks.is_empty());
        ensure!(disks.is_some() || !has_disks, "its disks are not being copied");
        let complete = disks.map(|disks| Box::new(move |deadline| disks.complete(deadline)) as BeforeState);
        self.begun.guest.stop(complete, self.begun.own.clone())
    }

    /// The connection is lost. Each disk has one stream. Once the state is saved they are there.
    pub(super) fn lost_disks(&mut self) {
        if self.mirror.is_some() && self.state.is_none() && !self.begun.owner.is_over() {
            let why = self.unreachable.clone().unwrap_or_default();
            self.give_up(format!("the connection was lost while its disks were copied: {why}"));
        }
    }

    /// Of the time that it may take its disks have had a part.
    pub(super) fn behind_disks(&self, settings: Settings) -> Settings {
        let left = |max: Duration| max.saturating_sub(self.began.elapsed()).max(Duration::from_millis(1));
        let is_less = self.mirror.is_some();
        Settings { time_max: settings.time_max.map(|max| if is_less { left(max) } else { max }), ..settings }
    }
}
