//! Arming and disarming, which several owners have a part in: the memory changes hands between the kernel and the
//! engine, and with it how sampled pages are watched.

use pagoda_sys::Errno;

use super::Engine;
use super::broken::Broken;
use super::parts::EngineError;

impl Engine {
    /// Executes `Action::Arm`. While another has the memory the action is not answered, so the machine does nothing that
    /// needs it.
    pub(super) fn begin_to_arm(&mut self) -> Result<(), Broken> {
        match self.arm_without_image() {
            Ok(()) => {
                self.restart_sample()?;
                self.paging.begin_to_page();
                Ok(())
            }
            Err(EngineError::Register { errno: Errno::BUSY, registered }) => self.paging.wait_until_free(registered),
            Err(error) => Err(format!("it could not be armed: {error}").into()),
        }
    }

    pub(super) fn restart_sample(&mut self) -> Result<(), Broken> {
        let (sampler, mut context) = self.sampling();
        sampler.restart_sample(&mut context)
    }

    /// Executes `Action::Disarm`: the kernel answers the VM's faults from then on.
    pub(super) fn disarm(&mut self) -> Result<(), Broken> {
        if self.paging.disarm()? {
            self.link.agent.collapse(&mut self.ring, self.paging.space());
            // The sample begins anew after the collapse, which maps what nobody has used.
            let restarted = self.restart_sample();
            self.link.calls.release_pin_waiters();
            return restarted;
        }
        Ok(())
    }
}
