//! What would start the same program again, for the VM's record.

use std::path::Path;

use pagoda_api::Launch;

use crate::qemu_args;

/// Of a QEMU that this process becomes. Never refuses: what cannot be written down is listed instead.
pub fn of(program: &Path, words: &[String], has_outbox: bool) -> Launch {
    let mut unstartable = qemu_args::inherited_descriptors(words);
    if has_outbox {
        unstartable.push("--outbox: the files in it belong to this run".into());
    }
    let mut text = |path: &Path, what: &str| {
        let text = path.to_str().unwrap_or_default();
        if text.is_empty() {
            unstartable.push(format!("{what} cannot be written down: {}", path.display()));
        }
        text.to_owned()
    };
    let cwd = std::env::current_dir().unwrap_or_default();
    let (program, cwd) = (text(program, "the path of its program"), text(&cwd, "the path of its directory"));
    Launch {
        program,
        words: words.to_vec(),
        cwd,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        unstartable,
    }
    .bounded()
}
