//! Old names of metrics that were renamed: exported beside the new ones in this version, and marked as deprecated.
//!
//! A family is repeated under its old name, with the same values. Remove this file, its two calls and the paragraph in
//! the head of `docs/metrics.md` to drop the old names.

use std::fmt::Write as _;

/// Beginnings of names, after `pagoda_vm_`: today's and the old one.
const RENAMED: [(&str, &str); 2] = [("remote_", "far_"), ("status", "standing")];
const PREFIX: &str = "pagoda_vm_";

/// The old name of a VM's counter, if it has one. Both are without `pagoda_vm_`.
pub fn of_counter(name: &str) -> Option<String> {
    RENAMED.iter().find_map(|(new, old)| Some(format!("{old}{}", name.strip_prefix(new)?)))
}

/// OpenMetrics text with the renamed families repeated under their old names, before its last line.
pub fn with_old_families(text: &str) -> String {
    let (families, end) = text.split_at(text.rfind("# EOF").unwrap_or(text.len()));
    let mut all = families.to_owned();
    families.lines().filter_map(old_line).for_each(|line| {
        let _ = writeln!(all, "{line}");
    });
    all + end
}

/// The same line of the family's old name; `None` for a family that has none.
fn old_line(line: &str) -> Option<String> {
    let start = ["# HELP ", "# TYPE ", ""].into_iter().find(|start| line.starts_with(start))?;
    let rest = line[start.len()..].strip_prefix(PREFIX)?;
    let (name, more) = rest.split_at(rest.find([' ', '{']).unwrap_or(rest.len()));
    let old = of_counter(name)?;
    Some(match start {
        "# HELP " => format!("{start}{PREFIX}{old} Deprecated, use {PREFIX}{name}."),
        // A label that is called as its metric was renamed with it.
        _ if name == "status" => format!("{start}{PREFIX}{old}{}", more.replacen(",status=", ",standing=", 1)),
        _ => format!("{start}{PREFIX}{old}{more}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_were_renamed_have_an_old_name() {
        assert_eq!(of_counter("remote_in_pages").as_deref(), Some("far_in_pages"));
        assert_eq!(of_counter("faults_minor"), None);
    }

    #[test]
    fn families_are_repeated_under_their_old_names() {
        let text = "\
# HELP pagoda_vm_remote_in_pages Pages read from the pool.
# TYPE pagoda_vm_remote_in_pages counter
pagoda_vm_remote_in_pages_total{vm=\"remote_\"} 3
# HELP pagoda_vm_status 1 for the VM's status.
# TYPE pagoda_vm_status gauge
pagoda_vm_status{vm=\"a\",status=\"squeezed\"} 1
# HELP pagoda_vm_armed 1 if armed.
# TYPE pagoda_vm_armed gauge
pagoda_vm_armed{vm=\"a\"} 1
";
        let old = "\
# HELP pagoda_vm_far_in_pages Deprecated, use pagoda_vm_remote_in_pages.
# TYPE pagoda_vm_far_in_pages counter
pagoda_vm_far_in_pages_total{vm=\"remote_\"} 3
# HELP pagoda_vm_standing Deprecated, use pagoda_vm_status.
# TYPE pagoda_vm_standing gauge
pagoda_vm_standing{vm=\"a\",standing=\"squeezed\"} 1
";
        assert_eq!(with_old_families(&format!("{text}# EOF\n")), format!("{text}{old}# EOF\n"));
    }
}
