//! A far tier on the command line: `pool:`, `pool:copies=2`.

use pagoda_api::FarRequest;

/// # Errors
/// A sentence that says what would be right.
pub fn parse_far(text: &str) -> Result<FarRequest, String> {
    let advice = || format!("{text:?} is no far tier; write pool: or pool:copies=2");
    let options = text.strip_prefix("pool:").ok_or_else(advice)?;
    let mut far = FarRequest::default();
    if !options.is_empty() {
        let copies = options.strip_prefix("copies=").ok_or_else(advice)?;
        far.copies = copies.parse().map_err(|_| format!("{copies:?} is no number of copies; give 1 or 2"))?;
    }
    far.check().map(|()| far)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_tiers() {
        let check = |text: &str, copies: u8| assert_eq!(parse_far(text), Ok(FarRequest { copies }), "{text}");
        check("pool:", 1);
        check("pool:copies=1", 1);
        check("pool:copies=2", 2);
        let refused = |text: &str, expected: &str| {
            let said = parse_far(text).unwrap_err();
            assert!(said.contains(expected), "{text}: {said}");
        };
        for text in ["", "pool", "disk:", "pool:2", "pool:copy=2", "pool:copies=1,copies=2", "POOL:"] {
            refused(text, if text.contains(',') { "give 1 or 2" } else { "write pool: or pool:copies=2" });
        }
        for text in ["pool:copies=", "pool:copies=0", "pool:copies=3", "pool:copies=-1", "pool:copies=256"] {
            refused(text, "give 1 or 2");
        }
    }
}
