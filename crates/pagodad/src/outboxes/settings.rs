//! What is set for an outbox: a size, or an SLO that its size follows.

use pagoda_api::types::{OUTBOX_SPACE_BYTES_MAX, OutboxAuto, OutboxPatch};
use pagoda_core::outbox::round::{Auto, MIN_DEFAULT};
use pagoda_core::policy::Shares;
use pagoda_core::units::Bytes;

/// The weight of an outbox for which none was set: the same for all.
const WEIGHT_DEFAULT: u32 = 100;

/// What an outbox is to have from now on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wanted {
    /// The outbox has this size until another one is set.
    Fixed(Bytes),
    /// The outbox has the size that its SLO needs.
    Auto(Auto),
}

/// The SLO and its bounds as they are written down and shown.
pub fn shown(auto: &Auto) -> OutboxAuto {
    OutboxAuto {
        slo: auto.slo.to_string(),
        min_bytes: auto.min.0,
        max_bytes: auto.max.map(|max| max.0),
        weight: auto.weight.get(),
    }
}

/// The other way round.
///
/// # Errors
/// What is wrong with it, and what would be right.
pub fn read(auto: &OutboxAuto) -> Result<Auto, String> {
    let bound = |what: &str, bytes: u64| match bytes {
        0..=OUTBOX_SPACE_BYTES_MAX => Ok(Bytes(bytes)),
        _ => Err(format!("a {what} of {bytes} bytes is more than an outbox can have")),
    };
    Ok(Auto {
        slo: auto.slo.parse().map_err(|error: pagoda_core::outbox::slo::ParseSloError| error.to_string())?,
        min: bound("min", auto.min_bytes)?,
        max: auto.max_bytes.map(|max| bound("max", max)).transpose()?,
        weight: Shares::new(auto.weight).map_err(|_| format!("{} is no weight: give 1 to 1000000", auto.weight))?,
    })
}

/// What a patch makes of what is set.
///
/// # Errors
/// It contradicts itself, or what is set.
pub fn merge(patch: &OutboxPatch, now: Option<&Auto>) -> Result<Wanted, String> {
    patch.check()?;
    if let Some(bytes) = patch.space_bytes {
        return Ok(Wanted::Fixed(Bytes(bytes)));
    }
    if now.is_none() && !patch.auto {
        return Err("its size is set by hand; --space auto with --slo has it follow an SLO".into());
    }
    let now = now.map(shown);
    let slo = patch.slo.clone().or_else(|| now.as_ref().map(|now| now.slo.clone()));
    let slo = slo.ok_or("a size that follows an SLO needs one; give --slo, such as --slo 'p90 4.6s'")?;
    let merged = OutboxAuto {
        slo,
        min_bytes: patch.min_bytes.or(now.as_ref().map(|now| now.min_bytes)).unwrap_or(MIN_DEFAULT.0),
        max_bytes: patch.max_bytes.or(now.as_ref().and_then(|now| now.max_bytes)),
        weight: patch.weight.or(now.as_ref().map(|now| now.weight)).unwrap_or(WEIGHT_DEFAULT),
    };
    read(&merged).map(Wanted::Auto)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_stays() {
        let patch = |text: &str| serde_json::from_str::<OutboxPatch>(text).unwrap();
        let Wanted::Auto(first) = merge(&patch(r#"{"auto":true,"slo":"p90 4.6s"}"#), None).unwrap() else { panic!() };
        assert_eq!((first.min, first.max, first.weight.get()), (MIN_DEFAULT, None, WEIGHT_DEFAULT));
        assert_eq!(read(&shown(&first)), Ok(first));
        let Wanted::Auto(second) = merge(&patch(r#"{"weight":7,"max_bytes":33554432}"#), Some(&first)).unwrap() else {
            panic!()
        };
        let expected = Auto { weight: Shares::new(7).unwrap(), max: Some(Bytes(32 << 20)), ..first };
        assert_eq!((second, read(&shown(&second))), (expected, Ok(expected)));
        assert_eq!(merge(&patch(r#"{"space_bytes":4194304}"#), Some(&first)), Ok(Wanted::Fixed(Bytes(4 << 20))));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let check = |text: &str, part: &str| {
            let said = merge(&serde_json::from_str(text).unwrap(), None).unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        };
        check(r#"{"auto":true}"#, "give --slo");
        check(r#"{"weight":3}"#, "set by hand");
        check(r#"{"auto":true,"slo":"p90 4.6"}"#, "has no unit; write 4.6s");
        check(r#"{"auto":true,"slo":"4.6s"}"#, "write it like 'p90 4.6s'");
        check(r#"{"auto":true,"slo":"p90 1s","weight":0}"#, "is no weight");
    }
}
