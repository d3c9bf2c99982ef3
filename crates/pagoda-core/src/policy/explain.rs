//! Why a VM has the memory it has, in words: the terms of its target, one a line.

use super::controller::Policy;
use super::plan::{Bound, CeilingReason, MinReason, Plan, PolicyStatus, Run, StuckReason, Terms, VmId, VmPlan};
use super::settings::{SHARES_MAX, Shares, VmSettings};
use super::state::ReclaimState;
use crate::units::PageCount;

/// A line explains one term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Its name, an operator's word.
    pub term: &'static str,
    /// The number, if it is one.
    pub pages: Option<PageCount>,
    /// A minus is shown before the number.
    pub is_loss: bool,
    /// The text says what the term means for this VM.
    pub text: String,
}

fn amount(term: &'static str, pages: PageCount, text: String) -> Line {
    Line { term, pages: Some(pages), is_loss: false, text }
}

fn words(term: &'static str, text: String) -> Line {
    Line { term, pages: None, is_loss: false, text }
}

/// The terms of one VM's target, and what would have to change for it to get more.
pub fn explain(policy: &Policy, plan: &Plan, id: VmId, now_ms: u64) -> Vec<Line> {
    let Some(vm) = plan.vm(id) else { return Vec::new() };
    let terms = &vm.terms;
    let mut lines = vec![
        amount("target", terms.target, because(terms)),
        amount(
            "entitlement",
            terms.entitlement,
            format!("by {} of {} shares, if every VM used all it may have", terms.shares.get(), terms.shares_total),
        ),
        beyond_shares(terms),
        working_set(terms),
        amount("min", terms.min, min(terms).to_owned()),
        amount("ceiling", terms.ceiling, ceiling(terms).to_owned()),
        words(
            "pays",
            format!(
                "{:.0} shares per GiB, idle pages counted {:.1} times",
                terms.price.shares_per_gib(),
                idle_cost(terms)
            ),
        ),
        words("state", state(plan)),
        words("status", status(vm, now_ms)),
    ];
    if terms.lent > PageCount::ZERO {
        lines.insert(5, amount("lent", terms.lent, "of its min, not used by it and by others until it is".to_owned()));
    }
    lines.extend(actions(vm));
    if let Some(settings) = policy.settings(id) {
        lines.push(words("more", more(policy, vm, settings)));
    }
    lines
}

/// Lines under one another, numbers in one column.
pub fn render(lines: &[Line]) -> String {
    let sizes: Vec<String> = lines.iter().map(size).collect();
    let width = |lengths: &mut dyn Iterator<Item = usize>| lengths.max().unwrap_or(0);
    let term = width(&mut lines.iter().map(|line| line.term.len()));
    let number = width(&mut sizes.iter().map(String::len));
    let row = |(line, size): (&Line, &String)| format!("{:term$}  {size:>number$}  {}\n", line.term, line.text);
    lines.iter().zip(&sizes).map(row).collect()
}

fn size(line: &Line) -> String {
    let sign = if line.is_loss { "-" } else { "" };
    line.pages.map_or_else(String::new, |pages| format!("{sign}{}", pages.bytes()))
}

fn because(terms: &Terms) -> String {
    match terms.bound {
        Bound::Ceiling => format!("the ceiling: {}", ceiling(terms)),
        Bound::Min => format!("the min: {}; its shares alone would keep less", min(terms)),
        Bound::Price => "other VMs pay more shares for the next page".to_owned(),
    }
}

fn beyond_shares(terms: &Terms) -> Line {
    if terms.target >= terms.entitlement {
        let gained = terms.target - terms.entitlement;
        return amount("gained", gained, "of what others do not use, or pay less for".to_owned());
    }
    let lost = terms.entitlement - terms.target;
    let text = match terms.bound {
        Bound::Ceiling => "not asked for".to_owned(),
        _ => format!("idle tax of {}, and what others need more", terms.tax.per_mille()),
    };
    Line { is_loss: true, ..amount("lost", lost, text) }
}

fn idle_cost(terms: &Terms) -> f64 {
    1000.0 / f64::from(1000 - terms.tax.per_mille().0)
}

fn working_set(terms: &Terms) -> Line {
    let estimate = &terms.estimate;
    let text = match estimate.known {
        false => "not known yet: all its memory counts as active until the first sampling period ends".to_owned(),
        true => format!(
            "the largest of slow {:.0} %, fast {:.0} %, current {:.0} % of {}",
            estimate.slow.as_percent(),
            estimate.fast.as_percent(),
            estimate.current.as_percent(),
            terms.memory.bytes()
        ),
    };
    amount("working set", estimate.working_set, text)
}

fn min(terms: &Terms) -> &'static str {
    match terms.min_reason {
        MinReason::Min => "its min",
        MinReason::Pinned => "pinned: what is in DRAM cannot leave",
    }
}

fn ceiling(terms: &Terms) -> &'static str {
    match terms.ceiling_reason {
        CeilingReason::Memory => "all the memory it has",
        CeilingReason::Cap => "its DRAM cap",
        CeilingReason::Demand => "what it has touched, and room to grow",
    }
}

fn state(plan: &Plan) -> String {
    let free = plan.free.bytes();
    let meaning = match plan.state {
        ReclaimState::High if plan.restrained => "free memory suffices; VMs are held to their targets",
        ReclaimState::High => "free memory suffices; nothing is held back",
        ReclaimState::Soft => "reclaiming by balloon",
        ReclaimState::Hard => "reclaiming by page-out",
        ReclaimState::Low => "reclaiming by page-out, VMs above their targets are blocked",
    };
    let stuck = match plan.stuck {
        None => "",
        Some((_, StuckReason::NothingToTake)) => "; stuck: every VM is at its min or pinned",
        Some((_, StuckReason::BalloonsDoNotMove)) => "; stuck: balloons do not move",
        Some((_, StuckReason::PageOutDoesNotMove)) => "; stuck: page-out has no effect",
    };
    format!("{}: {meaning}; {free} free{stuck}", plan.state)
}

fn status(vm: &VmPlan, now_ms: u64) -> String {
    let text = match vm.status {
        PolicyStatus::AtEase => "at ease: nothing is kept from it",
        PolicyStatus::Squeezed => "squeezed: it has less than it would use",
        PolicyStatus::Blocked => "blocked: stopped until memory is found",
        PolicyStatus::Pinned => "pinned: it cannot be paged out",
    };
    format!("{text}, for {} s", now_ms.saturating_sub(vm.status_since_ms) / 1000)
}

fn actions(vm: &VmPlan) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(size) = vm.actions.balloon.filter(|size| *size > PageCount::ZERO) {
        let text =
            if vm.balloon_ignored { "asked for; the guest does not follow, so it is paged out" } else { "asked for" };
        lines.push(amount("balloon", size, text.to_owned()));
    }
    if vm.actions.page_out_cap < vm.terms.memory {
        lines.push(amount("page-out", vm.actions.page_out_cap, "above this".to_owned()));
    }
    if vm.actions.run == Run::Block {
        lines.push(words("run", "stopped by the policy".to_owned()));
    }
    lines
}

/// What would have to change for it to get more.
fn more(policy: &Policy, vm: &VmPlan, settings: &VmSettings) -> String {
    match (vm.terms.bound, vm.terms.ceiling_reason) {
        (Bound::Ceiling, CeilingReason::Memory) => "it has all the guest can see".to_owned(),
        (Bound::Ceiling, CeilingReason::Cap) => format!("raise its DRAM cap of {}", settings.cap.bytes()),
        (Bound::Ceiling, CeilingReason::Demand) => "nothing: it gets more when it uses more".to_owned(),
        (Bound::Min | Bound::Price, _) => {
            let doubled = Shares::new((settings.shares.get() * 2).min(SHARES_MAX)).unwrap_or(settings.shares);
            let with = VmSettings { shares: doubled, ..settings.clone() };
            let shares = policy.what_if(vm.id, &with).map_or_else(String::new, |target| {
                format!(
                    "{} shares instead of {} would make it {}; ",
                    doubled.get(),
                    settings.shares.get(),
                    target.bytes()
                )
            });
            format!("{shares}a higher min guarantees it; a larger pool or a busier guest raise it")
        }
    }
}
