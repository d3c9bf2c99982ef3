//! Names of clones: a pattern with a number, as printf(3) has it.

use pagoda_api::check_clone_names;

/// Most digits that a number is filled up to.
const DIGITS_MAX: usize = 9;

/// The names of `count` clones, the first of which has this number.
///
/// # Errors
/// The pattern is none, or gives names that no VMs can have: in words for the user.
pub fn expand(pattern: &str, first: u32, count: u32) -> Result<Vec<String>, String> {
    let names = match parse(pattern)? {
        None if count > 1 => {
            return Err(format!("{count} clones cannot all be called {pattern}: write %d where their number goes"));
        }
        None => vec![pattern.to_owned()],
        Some(Pattern { before, digits, after }) => {
            let last = u64::from(first) + u64::from(count);
            (u64::from(first)..last).map(|number| format!("{before}{number:0digits$}{after}")).collect()
        }
    };
    check_clone_names(names.iter().map(String::as_str))?;
    Ok(names)
}

/// A name with one number in it.
struct Pattern<'a> {
    before: &'a str,
    /// How many the number has at least.
    digits: usize,
    after: &'a str,
}

/// `None`: there is no number in it.
fn parse(pattern: &str) -> Result<Option<Pattern<'_>>, String> {
    let wrong =
        || format!("{pattern:?} is no pattern of names: write one %d or %02d where the number goes, and no other %");
    let Some((before, rest)) = pattern.split_once('%') else { return Ok(None) };
    let (digits, after) = rest.split_once('d').ok_or_else(wrong)?;
    let digits = match digits.strip_prefix('0') {
        None if digits.is_empty() => 1,
        Some(digits) => digits.parse().ok().filter(|digits| (1..=DIGITS_MAX).contains(digits)).ok_or_else(wrong)?,
        None => return Err(wrong()),
    };
    if after.contains('%') {
        return Err(wrong());
    }
    Ok(Some(Pattern { before, digits, after }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_numbered() {
        let check = |pattern: &str, first: u32, count: u32, expected: &[&str]| {
            assert_eq!(expand(pattern, first, count).unwrap(), expected, "{pattern}");
        };
        check("job-%02d", 1, 3, &["job-01", "job-02", "job-03"]);
        check("job-%d", 9, 2, &["job-9", "job-10"]);
        check("%03d.test", 0, 2, &["000.test", "001.test"]);
        check("job-%02d", 99, 2, &["job-99", "job-100"]);
        check("test", 5, 1, &["test"]);
        check("%d", u32::MAX, 2, &["4294967295", "4294967296"]);
    }

    #[test]
    fn other_patterns_are_refused() {
        let check = |pattern: &str, count: u32, expected: &str| {
            let said = expand(pattern, 1, count).unwrap_err();
            assert!(said.contains(expected), "{pattern}: {said}");
        };
        check("job", 2, "2 clones cannot all be called job");
        for pattern in ["%s", "%", "a%", "%2d", "%-2d", "%00d", "%0d", "%010d", "%d%d", "%d%%", "%%d", "%02x"] {
            check(pattern, 1, "is no pattern of names");
        }
        check("a/%d", 2, "a/1");
        check("%d", 129, "1 to 128 clones");
    }
}
