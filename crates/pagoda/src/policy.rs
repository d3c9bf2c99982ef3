//! What the memory policy is asked: `admit`, `whatif`, and how it speaks in `host show` and `vm show`.

use anyhow::Result;
use pagoda_api::{
    AdmitReply, AdmitRequest, Client, CreateVm, HostPolicy, PolicySettings, VmKind, VmPolicy, VmSpec, WhatIfReply,
    WhatIfRequest,
};

use crate::cli::{Admit, WhatIf};
use crate::exit::{NotAdmitted, UsageError};
use crate::output::{Format, lines_text, print_json, print_text};
use crate::units::{format_per_mille, format_size};

/// Succeeds if it would be admitted.
pub fn admit(client: &Client, options: &Admit, format: Format) -> Result<()> {
    let dram = options.dram.map(|dram| dram.of(options.memory));
    // The same VM as `run` would ask for, so that the same is refused; only the name is not known yet.
    let vm = CreateVm {
        name: "admit".into(),
        memory: vec![options.memory],
        kind: VmKind::Qemu,
        spec: VmSpec {
            dram,
            policy: PolicySettings { min: options.min, ..PolicySettings::default() },
            ..VmSpec::default()
        },
        launch: None,
        outbox: None,
    };
    vm.check().map_err(UsageError)?;
    let reply = client.admit(&AdmitRequest { memory_bytes: options.memory, dram, min: options.min })?;
    match format {
        Format::Json => print_json(&reply)?,
        Format::Text => print_text(&admit_text(&reply))?,
    }
    if reply.admitted { Ok(()) } else { Err(NotAdmitted(reply.missing).into()) }
}

fn admit_text(reply: &AdmitReply) -> String {
    let row = |needed, free| format!("{} needed, {} free", format_size(needed), format_size(free));
    lines_text(&[
        ("admitted", if reply.admitted { "yes" } else { "no" }.into()),
        ("memory", row(reply.memory_needed_bytes, reply.memory_free_bytes)),
        ("swap", row(reply.swap_needed_bytes, reply.swap_free_bytes)),
    ])
}

pub fn what_if(client: &Client, options: &WhatIf, format: Format) -> Result<()> {
    let vm = client.vm(&options.name)?;
    let dram = options.dram.map(|dram| dram.of(vm.memory_bytes));
    let request = WhatIfRequest { dram, ..options.request.clone() };
    request.patch().applied_to(&vm.settings(), vm.memory_bytes).map_err(UsageError)?;
    let reply = client.what_if(&options.name, &request)?;
    match format {
        Format::Json => print_json(&reply)?,
        Format::Text => print_text(&what_if_text(&reply))?,
    }
    Ok(())
}

fn what_if_text(reply: &WhatIfReply) -> String {
    let per_s = |rate: f64| format!("{rate:.1}/s");
    let then = reply.page_ins_per_s_then.map_or("not known yet: there is no miss-ratio curve".into(), per_s);
    let mut lines = vec![
        ("", format!("{:<10} then", "now")),
        ("target", now_then(&format_size(reply.target_bytes[0]), &format_size(reply.target_bytes[1]))),
        ("page-ins", now_then(&per_s(reply.page_ins_per_s), &then)),
    ];
    if let Some([now, then]) = reply.miss_ratio {
        lines.push(("miss ratio", now_then(&format!("{now:.3}"), &format!("{then:.3}"))));
    }
    lines_text(&lines)
}

fn now_then(now: &str, then: &str) -> String {
    format!("{now:<10} {then}")
}

/// How a VM stands, in words for people: `squeezed for 12 s`. Nothing while nothing is kept from it.
pub fn status(policy: &VmPolicy) -> Option<String> {
    match policy.status.as_str() {
        "" | "at_ease" => None,
        word => Some(format!("{} for {} s", word.replace('_', " "), policy.status_since_s)),
    }
}

/// The policy's part of `vm show`.
pub fn vm_lines(policy: &VmPolicy) -> Vec<(&'static str, String)> {
    let sampling = policy.sampling;
    let size = |bytes: Option<u64>, missing: &str| bytes.map_or(missing.to_owned(), format_size);
    let mut lines = vec![
        ("min", format_size(policy.min_bytes)),
        ("shares", policy.shares.to_string()),
        ("share group", policy.share_group.clone().unwrap_or("its own".into())),
        ("sampling", format!("{} pages in {} s", sampling.pages, sampling.period_s)),
        ("target", size(policy.target_bytes, "not planned yet")),
        ("limit now", format_size(policy.limit_bytes)),
        ("touched", format_size(policy.touched_bytes)),
        ("active", size(policy.active_bytes, "not known before its first sampling period has ended")),
        ("shared", format!("{}, which saves {}", format_size(policy.shared_bytes), format_size(policy.saved_bytes))),
        ("overhead", format_size(policy.overhead_bytes)),
    ];
    if let Some(status) = status(policy) {
        lines.push(("status", status));
    }
    lines
}

/// The policy's part of `host show`.
pub fn host_lines(policy: &HostPolicy) -> Vec<(&'static str, String)> {
    let size = format_size;
    let mut pool =
        format!("{}, {} used, {} free", size(policy.pool_bytes), size(policy.used_bytes), size(policy.free_bytes));
    if policy.pool_now_bytes < policy.pool_bytes {
        let reason = policy.pool_reason.as_deref().unwrap_or("the host itself is short of memory");
        pool += &format!("; {} now: {reason}", size(policy.pool_now_bytes));
    }
    let parts: Vec<String> = policy.thresholds.iter().map(|part| format_per_mille(*part)).collect();
    let mut lines = vec![
        ("pool", pool),
        ("idle tax", format_per_mille(policy.idle_tax)),
        ("thresholds", parts.join(", ")),
        ("state", format!("{} for {} s", policy.state, policy.state_since_s)),
        (
            "reserved",
            format!("{} of the pool, {} of swap", size(policy.reserved_bytes), size(policy.swap_reserved_bytes)),
        ),
        ("shared", format!("{}, which saves {}", size(policy.shared_bytes), size(policy.saved_bytes))),
        ("templates", format!("{}, which clones of snapshots read", size(policy.template_bytes))),
        ("outboxes", format!("{}, for files that guests write and the host sends", size(policy.outbox_bytes))),
        ("ballooned", size(policy.ballooned_bytes)),
        ("swapped", size(policy.swapped_bytes)),
    ];
    if policy.shortfall_bytes > 0 {
        let missing =
            format!("{} of what VMs are guaranteed: the host has less than its pool", size(policy.shortfall_bytes));
        lines.push(("missing", missing));
    }
    if let Some(stuck) = &policy.stuck {
        lines.push(("stuck", stuck.clone()));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_admitted_says_what_it_needs() {
        let reply = AdmitReply {
            admitted: false,
            memory_needed_bytes: 3 << 30,
            memory_free_bytes: 1 << 30,
            swap_needed_bytes: 5 << 30,
            swap_free_bytes: 9 << 30,
            missing: "2 GiB of the pool".into(),
        };
        let expected = "\
admitted       no
memory         3G needed, 1G free
swap           5G needed, 9G free
";
        assert_eq!(admit_text(&reply), expected);
    }

    #[test]
    fn other_settings_side_by_side() {
        let mut reply = WhatIfReply {
            target_bytes: [4 << 30, 2 << 30],
            page_ins_per_s: 1.25,
            page_ins_per_s_then: Some(80.0),
            miss_ratio: Some([0.001, 0.125]),
        };
        let expected = "               now        then
target         4G         2G
page-ins       1.2/s      80.0/s
miss ratio     0.001      0.125
";
        assert_eq!(what_if_text(&reply), expected);
        (reply.page_ins_per_s_then, reply.miss_ratio) = (None, None);
        assert!(what_if_text(&reply).ends_with("1.2/s      not known yet: there is no miss-ratio curve\n"));
    }

    #[test]
    fn how_a_vm_stands() {
        let check = |status_of: &str, expected: Option<&str>| {
            let policy = VmPolicy { status: status_of.to_owned(), status_since_s: 12, ..VmPolicy::default() };
            assert_eq!(status(&policy).as_deref(), expected, "{status_of}");
        };
        check("", None);
        check("at_ease", None);
        check("squeezed", Some("squeezed for 12 s"));
        check("blocked", Some("blocked for 12 s"));
    }

    #[test]
    fn a_host_that_is_short_says_so() {
        let mut policy = HostPolicy {
            pool_bytes: 48 << 30,
            pool_now_bytes: 48 << 30,
            idle_tax: 750,
            thresholds: [60, 40, 20, 5],
            state: "soft".into(),
            state_since_s: 3,
            ..HostPolicy::default()
        };
        let text = lines_text(&host_lines(&policy));
        for part in ["idle tax       75 %\n", "thresholds     6 %, 4 %, 2 %, 0.5 %\n", "state          soft for 3 s\n"]
        {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!text.contains("missing") && !text.contains("now:"), "{text}");
        policy.pool_now_bytes = 40 << 30;
        policy.shortfall_bytes = 1 << 30;
        policy.stuck = Some("no VM can give memory".into());
        let text = lines_text(&host_lines(&policy));
        for part in ["40G now: the host itself", "missing        1G of what", "stuck          no VM can"] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
    }
}
