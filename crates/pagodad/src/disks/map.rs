//! What `qemu-img map` says of a file, read as it comes: a disk may be in millions of parts.

use std::io::Read;

use anyhow::{Result, bail};
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::child::Wanted;

/// A stretch of a disk.
#[derive(Debug, Deserialize)]
struct Part {
    /// Whether a file of the chain has it. Versions before 6.1 do not say so.
    present: Option<bool>,
}

/// Goes through the list until a part is found that the file itself has.
struct Search<'a> {
    max: usize,
    outcome: &'a mut Outcome,
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    NotFound,
    Found,
    TooMany,
}

/// Whether the list, of a file alone, has a part that is there.
///
/// # Errors
/// It is no such list; it has more than `max` parts, none of which is there.
pub fn has_own(output: &mut dyn Read, max: usize) -> Result<Wanted<bool>> {
    let mut outcome = Outcome::NotFound;
    let search = Search { max, outcome: &mut outcome };
    let read = serde_json::Deserializer::from_reader(std::io::BufReader::new(output)).deserialize_seq(search);
    match (outcome, read) {
        (Outcome::Found, _) => Ok(Wanted::Part(true)),
        (Outcome::TooMany, _) => bail!("it is in more than {max} parts, too many to look for what is its own"),
        (Outcome::NotFound, Ok(())) => Ok(Wanted::All(false)),
        (Outcome::NotFound, Err(error)) => Err(anyhow::Error::from(error).context("read what qemu-img says")),
    }
}

impl<'de> Visitor<'de> for Search<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of parts")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        for _ in 0..=self.max {
            match list.next_element::<Part>()? {
                None => return Ok(()),
                Some(Part { present: Some(false) }) => {}
                Some(_) => {
                    *self.outcome = Outcome::Found;
                    return Err(A::Error::custom("the rest is not read"));
                }
            }
        }
        *self.outcome = Outcome::TooMany;
        Err(A::Error::custom("too many parts"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_until_one_is_there() {
        let check = |text: &str, expected: Result<bool, &str>| {
            let found = has_own(&mut text.as_bytes(), 3);
            match (found, expected) {
                (Ok(Wanted::All(found) | Wanted::Part(found)), Ok(expected)) => assert_eq!(found, expected, "{text}"),
                (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        };
        let absent = r#"{ "start": 0, "length": 65536, "depth": 0, "present": false, "zero": true, "data": false}"#;
        let zero = r#"{ "start": 0, "length": 65536, "depth": 0, "present": true, "zero": true, "data": false}"#;
        check("[]", Ok(false));
        check(&format!("[{absent},\n{absent}]\n"), Ok(false));
        check(&format!("[{absent},\n{zero}]\n"), Ok(true));
        // What comes behind it is not read, and whatever says nothing counts as there.
        check(&format!("[{zero},\n{{"), Ok(true));
        check(r#"[{ "start": 0 }]"#, Ok(true));
        check(&format!("[{absent},{absent},{absent},{absent}]"), Err("more than 3 parts"));
        check(&format!("[{absent}"), Err("read what qemu-img says"));
        check("{}", Err("read what qemu-img says"));
        check("", Err("read what qemu-img says"));
    }
}
