//! Small files of text that are whole or refused: a line with the format, JSON, and a line with a checksum.
//!
//! ```text
//! pagoda-image 1
//! { … }
//! sum 0123456789abcdef
//! ```
//!
//! The checksum is the 64-bit FNV-1a of all bytes before its line. It finds what a disk or a cut does, not what somebody does on
//! purpose. VM records have this form too.

use serde_json::Value;

/// The checksum of a text.
pub fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The file: `first_line`, `json`, and the checksum.
pub fn seal(first_line: &str, json: &str) -> String {
    let text = format!("{first_line}\n{json}\n");
    let sum = checksum(&text);
    text + &format!("sum {sum:016x}\n")
}

/// The first line of such a file, and what stands between it and the checksum.
///
/// # Errors
/// It is cut or changed; in words.
pub fn unseal(text: &str) -> Result<(&str, &str), &'static str> {
    let (body, sum) = text.trim_end().rsplit_once('\n').ok_or("too short")?;
    // What is summed ends with a line's end.
    let body = &text[..body.len() + 1];
    let sum = sum.strip_prefix("sum ").ok_or("no checksum")?;
    if sum != format!("{:016x}", checksum(body)) {
        return Err("checksum does not match");
    }
    body.split_once('\n').ok_or("too short")
}

/// The first field of `said` that is not in `understood`. One that says nothing (null, false, 0) cannot be lost.
pub fn find_lost(said: &Value, understood: &Value) -> Option<String> {
    let says_nothing = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64() == Some(0),
        _ => false,
    };
    let Value::Object(said) = said else { return None };
    said.iter().filter(|(_, value)| !says_nothing(value)).find_map(|(key, value)| match understood.get(key) {
        None => Some(format!("{key:?}")),
        Some(understood) => find_lost(value, understood),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_cut_or_changed_text_is_refused() {
        let text = seal("pagoda-test 1", "{\"a\": 1}");
        assert_eq!(text, "pagoda-test 1\n{\"a\": 1}\nsum d6da313fa5470b9b\n");
        assert_eq!(unseal(&text), Ok(("pagoda-test 1", "{\"a\": 1}\n")));
        for len in 0..text.len() - 1 {
            assert!(unseal(&text[..len]).is_err(), "{len}");
        }
        for at in 0..text.len() - 1 {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            assert!(unseal(std::str::from_utf8(&bytes).unwrap()).is_err(), "{at}");
        }
    }

    #[test]
    fn what_is_not_understood_is_found() {
        let understood = json!({ "a": 1, "b": { "c": true } });
        let check = |said: Value, expected: Option<&str>| {
            assert_eq!(find_lost(&said, &understood).as_deref(), expected, "{said}");
        };
        check(understood.clone(), None);
        check(json!({ "a": 1, "later": null, "b": { "later": 0 } }), None);
        check(json!({ "later": 2 }), Some("\"later\""));
        check(json!({ "b": { "later": "x" } }), Some("\"later\""));
    }
}
