//! Names of VMs and of snapshots.

/// Bytes of [`vm_file_name`]: with the path of its directory it has to fit into the address of a Unix socket (108).
pub const VM_FILE_NAME_LEN_MAX: usize = 64;

/// What a name may have between its letters and digits.
const SIGNS: &str = ". _-+@()";

/// Checks a VM's name: letters and digits of any language, blanks and `.`, `_`, `-`, `+`, `@`, `(`, `)`, as libvirt's domains may
/// have; at its start no `.` and no `-`, at its ends no blank. So it is safe in tables, logs, metrics and options.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_vm_name(name: &str) -> Result<(), String> {
    check_name("a VM", name)
}

/// The same of something else that is named so.
pub(super) fn check_name(of: &str, name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err(format!("the name of {of} cannot be empty"));
    }
    if name.starts_with(['.', '-']) || name != name.trim() {
        return Err(format!("the name of {of} has no `.`, `-` or blank in front, and no blank at its end: {name:?}"));
    }
    if let Some(bad) = name.chars().find(|c| !c.is_alphanumeric() && !SIGNS.contains(*c)) {
        return Err(format!("the name of {of} has letters, digits, blanks and any of `._-+@()`: {name:?} has {bad:?}"));
    }
    match vm_file_name(name).len() {
        0..=VM_FILE_NAME_LEN_MAX => Ok(()),
        long => Err(format!(
            "the name of {of} takes at most {VM_FILE_NAME_LEN_MAX} characters in file names, and {name:?} takes {long}: a \
             blank counts as 3, `ä` as 6"
        )),
    }
}

/// A VM's name as part of file names and of requests' paths: what is no ASCII letter or digit, `.`, `_` or `-` is `%XX`, byte by
/// byte. Different names have different file names.
#[must_use]
pub fn vm_file_name(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'.' | b'_' | b'-' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(escape).collect()
}
