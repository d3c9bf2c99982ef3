//! Outboxes of VMs: whether there is room for one, what it costs the pool, how its space changes.

use std::sync::Arc;

use pagoda_abi::Token;
use pagoda_api::types::{ApiError, ErrorCode, OutboxExplanation, OutboxInfo, OutboxList, OutboxPatch};
use pagoda_core::outbox::round::{Auto, HostShare};
use pagoda_core::outbox::settings::InvalidSpace;
use pagoda_core::policy::{Change, ReclaimState, SwapSpace};
use pagoda_core::units::{Bytes, PageCount};

use super::templates::Wanted;
use super::{Registry, internal, no_such_vm};
use crate::outboxes::{Before, Changing, Outbox, Unchanged, settings, watch};
use crate::policy::State;

impl Registry {
    /// Takes in the outboxes of a previous daemon. Their VMs are known already.
    ///
    /// # Errors
    /// Their directory cannot be read.
    pub fn load_outboxes(&self) -> std::io::Result<()> {
        self.outboxes.load(|token| self.has_vm(token))?;
        self.count_outboxes();
        Ok(())
    }

    /// Begins to watch those that were taken in.
    pub fn watch_outboxes(self: &Arc<Self>) {
        for outbox in self.outboxes.all() {
            if let Err(error) = watch::start(self, &outbox) {
                // It stays charged, and nothing is known of it.
                tracing::error!(vm = %outbox.vm, "its outbox is not watched: start a thread: {error}");
            }
        }
    }

    /// A VM with this token is there.
    pub fn has_vm(&self, token: Token) -> bool {
        self.id_by(token).is_some()
    }

    /// Tells the policy what the pool keeps for outboxes.
    pub fn count_outboxes(&self) {
        let mut policy = self.governor.lock();
        self.count_outboxes_in(&mut policy);
    }

    pub(super) fn count_outboxes_in(&self, policy: &mut State) -> PageCount {
        let charged = self.outboxes.charged().charged;
        policy.rounds.policy.set_outboxes(charged);
        charged
    }

    /// The process of an outbox has ended.
    pub fn outbox_ended(&self, outbox: &Outbox) {
        tracing::info!(vm = %outbox.vm, "the process of its outbox has ended");
        outbox.end();
        self.count_outboxes();
        self.governor.doorbell.ring();
    }

    /// What is charged for an outbox whose process never came goes with its VM.
    pub(super) fn forget_outbox(&self, vm_token: Token) {
        self.outboxes.forget_expected(vm_token);
        self.count_outboxes();
    }

    /// The outbox of a VM, if it has one.
    pub(super) fn outbox_of(&self, vm_token: Token) -> Option<OutboxInfo> {
        self.outboxes.of_vm(vm_token).map(|outbox| self.outboxes.info(&outbox, true))
    }

    /// The answer to `GET /v1/outboxes`: all outboxes, in the order of names.
    pub fn list_outboxes(&self) -> OutboxList {
        let mut outboxes: Vec<OutboxInfo> =
            self.outboxes.all().iter().map(|outbox| self.outboxes.info(outbox, self.has_vm(outbox.vm_token))).collect();
        outboxes.sort_by(|a, b| a.vm.cmp(&b.vm));
        OutboxList { outboxes }
    }

    /// `GET /v1/outboxes/NAME`.
    ///
    /// # Errors
    /// No such VM, or one without an outbox.
    pub fn get_outbox(&self, name: &str) -> Result<OutboxInfo, ApiError> {
        let (outbox, has_vm) = self.find_outbox(name)?;
        Ok(self.outboxes.info(&outbox, has_vm))
    }

    /// `GET /v1/outboxes/NAME/explain`.
    ///
    /// # Errors
    /// As [`Self::get_outbox`].
    pub fn explain_outbox(&self, name: &str) -> Result<OutboxExplanation, ApiError> {
        let (outbox, _) = self.find_outbox(name)?;
        Ok(self.outboxes.explain(&outbox))
    }

    /// That of the VM that runs by this name. If none does, the last of those whose VMs have ended, and `false`.
    fn find_outbox(&self, name: &str) -> Result<(Arc<Outbox>, bool), ApiError> {
        let token = self.lock().get(name).map(|vm| vm.record.token);
        let Some(token) = token else {
            let named = self.outboxes.all().into_iter().filter(|outbox| outbox.vm == name);
            let last = named.max_by_key(|outbox| outbox.came_at());
            return last.map(|outbox| (outbox, false)).ok_or_else(|| no_such_vm(name));
        };
        let found = self.outboxes.of_vm(token).map(|outbox| (outbox, true));
        found.ok_or_else(|| {
            let hint =
                "`pagoda run --outbox SIZE` starts a VM with one; `pagoda outbox ls` also has those of earlier VMs";
            ApiError::new(ErrorCode::NoSuchOutbox, format!("{name} has no outbox"), Some(hint))
        })
    }

    /// `PATCH /v1/outboxes/NAME`: more is admitted first; less comes back as the process lets go of it.
    ///
    /// # Errors
    /// Settings that contradict themselves or that the pool cannot keep, no such outbox, no room, no answer.
    pub fn set_outbox(&self, name: &str, patch: &OutboxPatch) -> Result<OutboxInfo, ApiError> {
        patch.check().map_err(|text| ApiError::new(ErrorCode::BadRequest, text, None))?;
        let (outbox, has_vm) = self.find_outbox(name)?;
        let mut changing = outbox.change();
        if !has_vm {
            let problem = format!("{name} does not run; its outbox gives its memory back when its process ends");
            return Err(ApiError::new(ErrorCode::NoSuchVm, problem, Some("see `pagoda outbox show`")));
        }
        if outbox.process().is_none() {
            let problem = format!("the process of the outbox of {name} has not come, or has ended");
            return Err(ApiError::new(ErrorCode::WrongState, problem, Some("see `pagoda outbox show`")));
        }
        let wanted = settings::merge(patch, outbox.auto().as_ref())
            .map_err(|text| ApiError::new(ErrorCode::BadRequest, format!("the outbox of {name}: {text}"), None))?;
        let (space, auto) = self.check_wanted(&outbox, wanted)?;
        let swap = self.swap_space(&self.lock())?;
        let begun = match self.begin_space(&changing, (space, auto), &swap) {
            // What no VM uses is in nobody's way.
            Err(_) if self.drop_templates(Wanted::Now) => self.begin_space(&changing, (space, auto), &swap),
            begun => begun,
        };
        let before = begun.map_err(|error| {
            let message = format!("no {space} for the outbox of {name}: {}", error.message);
            ApiError { message, ..error }
        })?;
        let carried_out = changing.carry_out(before);
        drop(changing);
        self.count_outboxes();
        self.governor.doorbell.ring();
        match carried_out {
            Ok(()) => Ok(self.outboxes.info(&outbox, true)),
            Err(error @ Unchanged::Record(_)) => Err(internal("change the space of an outbox", error)),
            Err(Unchanged::Silent(error)) => {
                let why = pagoda_api::in_full(error.as_ref());
                let problem = format!("the outbox of {name} does not answer as it should: {why}");
                let hint = "its space is to be as before; until it answers again the larger of both is charged";
                Err(ApiError::new(ErrorCode::WrongState, problem, Some(hint)))
            }
        }
    }

    /// The space that is wanted from now on, and what it follows. That of an SLO is as it is until the next period, within its limits.
    fn check_wanted(&self, outbox: &Outbox, wanted: settings::Wanted) -> Result<(Bytes, Option<Auto>), ApiError> {
        let auto = match wanted {
            settings::Wanted::Fixed(space) => return Ok((space, None)),
            settings::Wanted::Auto(auto) => auto,
        };
        let (fixed, other_mins) = self.outboxes.of_others(outbox);
        let most = self.governor.lock().rounds.policy.outboxes_max().saturating_sub(fixed).bytes();
        auto.check(most, other_mins, self.outboxes.period()).map_err(|error| {
            let code = match error {
                InvalidSpace::BeyondPool { .. } | InvalidSpace::MinsBeyondPool { .. } => ErrorCode::NoRoom,
                _ => ErrorCode::BadRequest,
            };
            ApiError::new(code, format!("the outbox of {}: {error}", outbox.vm), None)
        })?;
        Ok((outbox.space().clamp(auto.min, auto.max.unwrap_or(most).max(auto.min)), Some(auto)))
    }

    /// What the host has for outboxes now.
    pub fn outbox_share(&self) -> HostShare {
        let policy = self.governor.lock();
        let capacity = policy.rounds.policy.outboxes_max().bytes();
        let Some(last) = policy.rounds.last() else {
            return HostShare { capacity, spare: Bytes::ZERO, yielded: None };
        };
        let is_at_ease = last.plan.state == ReclaimState::High;
        let free = last.plan.free.saturating_sub(policy.rounds.policy.host().free_goal()).min(last.pool.room);
        let spare = if is_at_ease { free.bytes() } else { Bytes::ZERO };
        HostShare { capacity, spare, yielded: last.yielded }
    }

    /// Has an outbox whose size follows an SLO have another one.
    ///
    /// # Errors
    /// There is no room for it, or its process does not answer: it is to have what it had.
    pub fn resize_outbox(&self, outbox: &Outbox, space: Bytes) -> Result<(), String> {
        let mut changing = outbox.change();
        // Meanwhile it may have been set by hand, or have ended.
        let Some(auto) = outbox.auto().filter(|_| outbox.process().is_some()) else { return Ok(()) };
        let swap = self.swap_space(&self.lock()).map_err(|error| error.message)?;
        let begun = self.begin_space(&changing, (space, Some(auto)), &swap).map_err(|error| error.message)?;
        let carried_out = changing.carry_out(begun);
        drop(changing);
        self.count_outboxes();
        self.governor.doorbell.ring();
        carried_out.map_err(|error| pagoda_api::in_full(&error))
    }

    /// Charges what a new space needs, if there is room for it.
    fn begin_space(
        &self,
        changing: &Changing<'_>,
        (space, auto): (Bytes, Option<Auto>),
        swap: &SwapSpace,
    ) -> Result<Before, ApiError> {
        let mut policy = self.governor.lock();
        let charged = self.count_outboxes_in(&mut policy);
        let growth = changing.growth(space);
        if growth > PageCount::ZERO {
            let admission = policy.rounds.policy.admission(&Change::Outboxes(charged + growth), swap);
            admission.verdict().map_err(|refused| self.not_admitted(&refused.into()))?;
        }
        let before = changing.begin(space, auto);
        self.count_outboxes_in(&mut policy);
        Ok(before)
    }

    /// What of outboxes needs somebody's attention.
    pub(super) fn outbox_problems(&self) -> Vec<String> {
        let of = |outbox: &Arc<Outbox>| {
            Some(format!("the outbox of {}: {}", outbox.vm, self.outboxes.info(outbox, true).problem?))
        };
        let unreadable = self.outboxes.unreadable().into_iter().map(|path| {
            format!(
                "{}: the record of an outbox cannot be read, and the pool keeps nothing for it: end its process \
                 (`pagoda-outbox`), then remove the file",
                path.display()
            )
        });
        self.outboxes.all().iter().filter_map(of).chain(unreadable).collect()
    }

    /// Registers the process of an outbox, and gives what it listens on.
    ///
    /// # Errors
    /// No outbox has this token, or its process has come before.
    pub fn give_outbox(
        self: &Arc<Self>,
        token: Token,
        may: impl FnOnce(&super::Vm) -> anyhow::Result<()>,
        (pid, start): (u32, u64),
    ) -> anyhow::Result<pagoda_sys::socket::Listener> {
        let outbox = self.outboxes.by_token(token);
        let outbox = outbox.ok_or_else(|| anyhow::anyhow!("no outbox has this token"))?;
        {
            let vms = self.lock();
            let vm = vms.values().find(|vm| vm.record.token == outbox.vm_token);
            may(vm.ok_or_else(|| anyhow::anyhow!("its VM is gone"))?)?;
        }
        let listener = self.outboxes.take(&outbox, pid, start)?;
        // From here on the end of its process is seen.
        if let Err(error) = watch::start(self, &outbox) {
            self.outboxes.refuse(&outbox, listener);
            return Err(anyhow::Error::new(error).context("start a thread that watches it"));
        }
        outbox.note_process()?;
        Ok(listener)
    }
}
