//! How a VM's program was started, and so how it is started again.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The user's own command line: what Pagoda puts into it is planned anew at each start.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// As it was typed: a path, or a name that is looked up in `PATH`.
    pub program: String,
    /// Its arguments. Some may be secrets.
    pub words: Vec<String>,
    /// The directory that it was started in.
    pub cwd: String,
    /// The user that started it.
    pub uid: u32,
    /// The group that started it.
    pub gid: u32,
    /// What cannot be written down, such as descriptors that it inherited: each a sentence for the user. A VM that has one
    /// cannot be started again from here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unstartable: Vec<String>,
}

impl fmt::Debug for Launch {
    /// Its words may be secrets: they stay out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launch { program, words, cwd, uid, gid, unstartable } = self;
        let words = words.len();
        write!(f, "Launch({program:?}, {words} words, in {cwd:?}, as {uid}:{gid}, unstartable: {unstartable:?})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_out_of_logs() {
        let launch = Launch { program: "qemu".into(), words: vec!["password=x".into()], ..Launch::default() };
        assert_eq!(format!("{launch:?}"), r#"Launch("qemu", 1 words, in "", as 0:0, unstartable: [])"#);
    }
}
