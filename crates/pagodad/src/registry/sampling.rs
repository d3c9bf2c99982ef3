//! Sampling periods and miss-ratio curves, as tools ask for them.

use std::sync::Arc;

use pagoda_api::types::{ApiError, CurveInfo, CurvePoint, CurveSwitch, ErrorCode, SampleInfo, SampleRequest};
use pagoda_core::policy::settings::SAMPLE_PAGES_MAX;
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_pager::handle::{Command, Handle, Status};

use super::{Registry, no_such_vm};

impl Registry {
    /// What became of the sampling period's pages so far.
    ///
    /// # Errors
    /// No such VM; one that is not attached.
    pub fn sampled(&self, name: &str) -> Result<SampleInfo, ApiError> {
        Ok(sample_info(&self.attached(name)?.fresh_status()))
    }

    /// Begins a sampling period.
    ///
    /// # Errors
    /// No such VM; one that is not attached; more pages than a period may have, or some that the VM does not have.
    pub fn sample(&self, name: &str, request: &SampleRequest) -> Result<SampleInfo, ApiError> {
        let memory: u64 = {
            let vms = self.lock();
            vms.get(name).ok_or_else(|| no_such_vm(name))?.record.memory()
        };
        let (total, pages) = (memory / PAGE_SIZE, &request.pages);
        if pages.len() > SAMPLE_PAGES_MAX as usize {
            let text = format!("{} pages in a period: give at most {SAMPLE_PAGES_MAX}", pages.len());
            return Err(ApiError::new(ErrorCode::BadRequest, text, None));
        }
        if let Some(page) = pages.iter().find(|page| **page >= total) {
            let text = format!("page {page} is outside {name}: its pages are 0 to {}", total - 1);
            return Err(ApiError::new(ErrorCode::BadRequest, text, None));
        }
        let handle = self.attached(name)?;
        handle.send(Command::Sample(pages.iter().copied().map(PageIdx).collect()));
        Ok(sample_info(&handle.fresh_status()))
    }

    /// The miss-ratio curve.
    ///
    /// # Errors
    /// No such VM; one that is not attached.
    pub fn curve(&self, name: &str) -> Result<CurveInfo, ApiError> {
        Ok(curve_info(&self.attached(name)?.fresh_status()))
    }

    /// Switches the miss-ratio curve on, anew, or off.
    ///
    /// # Errors
    /// No such VM; one that is not attached.
    pub fn watch_curve(&self, name: &str, switch: CurveSwitch) -> Result<CurveInfo, ApiError> {
        let handle = self.attached(name)?;
        handle.send(Command::WatchCurve(switch.on));
        Ok(curve_info(&handle.fresh_status()))
    }

    fn attached(&self, name: &str) -> Result<Arc<Handle>, ApiError> {
        let handle = self.lock().get(name).ok_or_else(|| no_such_vm(name))?.handle.clone();
        handle.ok_or_else(|| ApiError::new(ErrorCode::WrongState, format!("{name} is not attached"), None))
    }
}

fn sample_info(status: &Status) -> SampleInfo {
    SampleInfo { period: status.sample_period, watched: status.sample.watched, touched: status.sample.touched }
}

fn curve_info(status: &Status) -> CurveInfo {
    status.curve.as_ref().map_or_else(CurveInfo::default, |curve| CurveInfo {
        accesses: curve.accesses(),
        points: curve
            .points()
            .map(|(size, _)| CurvePoint { bytes: size.bytes().0, misses: curve.misses(size) })
            .collect(),
    })
}
