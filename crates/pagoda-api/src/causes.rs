//! An error with its causes in one line.

use std::error::Error;

use crate::limits::with_advice;

/// The error and what caused it, from the outside in, each once: many errors name their cause by themselves. At the end, what to do
/// where a limit was reached.
#[must_use]
pub fn in_full(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    for cause in causes.map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if !text.contains(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    with_advice(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    enum Failed {
        #[error("open x: {0}")]
        Said(#[source] io::Error),
        #[error("open x")]
        Silent(#[source] io::Error),
    }

    #[test]
    fn each_cause_is_said_once() {
        let full = || io::Error::from_raw_os_error(2);
        let expected = "open x: No such file or directory (os error 2)";
        assert_eq!(in_full(&Failed::Said(full())), expected);
        assert_eq!(in_full(&Failed::Silent(full())), expected);
    }
}
