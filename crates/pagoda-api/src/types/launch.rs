//! What starts a VM's program again: its user's own words, before Pagoda changed any.

use serde::{Deserialize, Serialize};

/// Longest launch specification, in bytes of JSON as a VM's record has it. The longest command lines of libvirt have 16 KiB.
pub const LAUNCH_BYTES_MAX: usize = 32 << 10;
/// Why a program cannot be started again of which nobody knows how it was started.
pub const UNKNOWN_LAUNCH: &str = "its command line is not known";
/// What an indented line of JSON has more than its text.
const LINE_BYTES: usize = 16;

/// How a VM's program was started. Its words may hold secrets, so `Debug` shows their number.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Path of the program, from `cwd` if it is relative.
    pub program: String,
    /// Its arguments, without its name.
    pub words: Vec<String>,
    /// The directory in which it was started.
    pub cwd: String,
    /// The user and group that it was started as.
    pub uid: u32,
    pub gid: u32,
    /// Why it cannot be started again by this alone: a sentence or word for each thing that cannot be written down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unstartable: Vec<String>,
}

impl Launch {
    /// The same if it fits into a record, else one without words that says so.
    #[must_use]
    pub fn bounded(self) -> Launch {
        if self.fits() {
            return self;
        }
        let why = format!("its command line has more than {LAUNCH_BYTES_MAX} bytes");
        let unstartable = vec![why];
        Launch { program: String::new(), words: Vec::new(), cwd: String::new(), unstartable, ..self }
    }

    /// Why the program cannot be started again, in words for its user. `None`: it can, as far as this tells.
    #[must_use]
    pub fn why_unstartable(&self) -> Option<String> {
        if !self.unstartable.is_empty() {
            return Some(self.unstartable.join("; "));
        }
        self.program.is_empty().then(|| UNKNOWN_LAUNCH.to_owned())
    }

    /// Whether it has at most [`LAUNCH_BYTES_MAX`] bytes.
    #[must_use]
    pub fn fits(&self) -> bool {
        let lines = 8 + self.words.len() + self.unstartable.len();
        serde_json::to_string(self).is_ok_and(|json| json.len() + lines * LINE_BYTES <= LAUNCH_BYTES_MAX)
    }
}

impl std::fmt::Debug for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Launch({}, {} words, user {}:{})", self.program, self.words.len(), self.uid, self.gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(words: Vec<String>) -> Launch {
        Launch { program: "/q".into(), words, cwd: "/".into(), uid: 1, gid: 2, unstartable: vec![] }
    }

    #[test]
    fn words_that_are_too_long_are_left_out_with_the_reason() {
        let short = launch(vec!["-m".into(), "secret=x".into()]);
        assert_eq!(short.clone().bounded(), short);
        // A byte of control is six of JSON; short words cost their lines.
        for words in [vec!["x".repeat(LAUNCH_BYTES_MAX)], vec!["\u{1}".repeat(6000)], vec!["x".into(); 2000]] {
            let bounded = launch(words).bounded();
            assert!(bounded.words.is_empty() && bounded.fits());
            assert!(bounded.unstartable[0].contains("32768 bytes"), "{:?}", bounded.unstartable);
        }
        let nearly = launch(vec!["x".repeat(LAUNCH_BYTES_MAX - 400)]);
        assert_eq!(nearly.clone().bounded(), nearly);
        assert!(serde_json::to_string_pretty(&nearly).unwrap().len() <= LAUNCH_BYTES_MAX);
    }

    #[test]
    fn it_is_said_why_it_cannot_be_started_again() {
        let known = launch(vec!["-m".into()]);
        assert_eq!(known.why_unstartable(), None);
        let unstartable = vec!["-netdev fd=9".into(), "-chardev fd=8".into()];
        let of_descriptors = Launch { unstartable, ..known.clone() };
        assert_eq!(of_descriptors.why_unstartable().unwrap(), "-netdev fd=9; -chardev fd=8");
        let unknown = Launch { program: String::new(), ..known };
        assert_eq!(unknown.why_unstartable().unwrap(), UNKNOWN_LAUNCH);
    }

    #[test]
    fn words_stay_out_of_logs() {
        let said = format!("{:?}", launch(vec!["-m".into(), "secret=x".into()]));
        assert_eq!(said, "Launch(/q, 2 words, user 1:2)");
    }
}
