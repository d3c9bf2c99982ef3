//! Limits of a process, its user, a file system or the machine that an error of the system speaks of.
//!
//! Such an error says what happened, not whose limit it was: ENFILE is the machine's, EMFILE the process's.

/// Error numbers of Linux, with what to do about each.
const ADVICE: [(i32, &str); 5] = [
    (23, "this machine has as many open files as it may have: raise its sysctl fs.file-max"),
    (
        24,
        "this process has as many open files as it may have: raise LimitNOFILE= of its unit, or `ulimit -n` before it starts",
    ),
    (
        27,
        "this process may not make files so long: set LimitFSIZE=infinity in its unit, or `ulimit -f unlimited` before it starts; \
          or the file system has no files so long",
    ),
    (28, "that file system is full, or has no inode left: make room there (`df`, `df -i`)"),
    (122, "its user's quota on that file system is used up: make room there, or raise it (`quota`)"),
];

/// A message, and what to do if it has the error of a limit in it, as errors of the standard library and of rustix print it.
#[must_use]
pub fn with_advice(message: String) -> String {
    let is_in = |number: i32| message.contains(&format!("(os error {number})"));
    match ADVICE.iter().find(|(number, _)| is_in(*number)) {
        Some((_, advice)) if !message.contains(advice) => format!("{message}: {advice}"),
        _ => message,
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn whose_limit_it_is() {
        for (error, expected) in [
            (Errno::NFILE, "sysctl fs.file-max"),
            (Errno::MFILE, "LimitNOFILE="),
            (Errno::FBIG, "LimitFSIZE="),
            (Errno::NOSPC, "`df -i`"),
            (Errno::DQUOT, "quota"),
        ] {
            let said = with_advice(format!("open /x: {}", std::io::Error::from(error)));
            assert!(said.starts_with("open /x: ") && said.contains(expected), "{said}");
        }
        let once = with_advice(format!("open /x: {}", std::io::Error::from(Errno::MFILE)));
        assert_eq!(with_advice(once.clone()), once);
        let other = format!("open /x: {}", std::io::Error::from_raw_os_error(2));
        assert_eq!(with_advice(other.clone()), other);
    }
}
