//! What another host wants to have started, held against `[moves]` of the configuration.
//!
//! Looked at here: the path of the program is one of the list, letter by letter; the user is listed, and is in the group; the directory
//! is below a listed one, also when links are followed. The words are looked at by the process itself, when it has no more rights than
//! that user (`qemu_args/arrived.rs` of the command): full paths in them have to be below a listed directory too. Nobody looks
//! at what a disk image refers to.

use std::path::{Component, Path};

use pagoda_api::types::Launch;

use super::accounts::Accounts;
use crate::config::MovesConfig;

/// Whether this host would start that.
///
/// # Errors
/// All reasons why it would not.
pub fn check(config: &MovesConfig, launch: &Launch) -> Result<(), Vec<String>> {
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let accounts = Accounts::read().map_err(|error| vec![format!("{error:#}")])?;
    check_for(own, &accounts, config, launch)
}

/// The same for a daemon of this user and group.
fn check_for(own: (u32, u32), accounts: &Accounts, config: &MovesConfig, launch: &Launch) -> Result<(), Vec<String>> {
    if !config.accept {
        return Err(vec![
            "it accepts no VMs of other hosts: set accept = true in [moves] of its pagoda.toml".to_owned(),
        ]);
    }
    let mut reasons: Vec<String> = launch.why_unstartable().into_iter().map(|why| shown(&why)).collect();
    if !launch.fits() || launch.words.iter().any(|word| word.contains('\0')) {
        reasons.push("its command line cannot be one: it is too long, or has bytes of zero".to_owned());
    }
    if !config.programs.iter().any(|program| program.as_os_str() == launch.program.as_str()) {
        reasons.push(format!("its program {} is not among programs in [moves] of pagoda.toml", shown(&launch.program)));
    }
    reasons.extend(check_user(own, accounts, config, (launch.uid, launch.gid)).err());
    reasons.extend(check_dir(config, Path::new(&launch.cwd), "its directory").err());
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

fn check_user(
    own: (u32, u32),
    accounts: &Accounts,
    config: &MovesConfig,
    (uid, gid): (u32, u32),
) -> Result<(), String> {
    let is_root = own.0 == 0;
    if config.users.is_empty() && is_root {
        return Err(
            "users in [moves] of pagoda.toml is empty and the daemon is root: list the users that QEMU may run as"
                .to_owned(),
        );
    }
    if !is_root && (uid, gid) != own {
        return Err(format!(
            "its QEMU runs as {uid}:{gid}, and a daemon of the user {}:{} starts nothing as another one",
            own.0, own.1
        ));
    }
    // Root too only if it is listed.
    if !config.users.is_empty() && !config.users.contains(&uid) {
        return Err(format!("its QEMU runs as user {uid}, who is not among users in [moves] of pagoda.toml"));
    }
    if is_root && !accounts.is_in(uid, gid) {
        return Err(format!(
            "its QEMU runs in group {gid}, and user {uid} is not in that here, or is not in /etc/passwd"
        ));
    }
    Ok(())
}

/// That a directory, which is `what`, is below a listed one, also when links are followed.
///
/// # Errors
/// It is not.
pub fn check_dir(config: &MovesConfig, dir: &Path, what: &str) -> Result<(), String> {
    let is_plain = dir.is_absolute() && dir.components().all(|part| part != Component::ParentDir);
    let said = shown(&dir.to_string_lossy());
    if !is_plain || !config.paths.iter().any(|path| dir.starts_with(path)) {
        return Err(format!("{what} {said} is not below one of paths in [moves] of pagoda.toml"));
    }
    let real = dir.canonicalize().map_err(|error| format!("{what} {said} is not here: {error}"))?;
    let is_below = |path: &std::path::PathBuf| path.canonicalize().is_ok_and(|path| real.starts_with(path));
    match real.is_dir() && config.paths.iter().any(is_below) {
        true => Ok(()),
        false => Err(format!("{what} {said} is a link to elsewhere, or none")),
    }
}

/// A text of the other host's, in a message.
fn shown(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    text.chars().take(CHARS_MAX).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const QEMU: &str = "/usr/bin/qemu-system-x86_64";

    fn launch() -> Launch {
        let cwd = std::env::temp_dir().to_str().unwrap().to_owned();
        Launch { program: QEMU.into(), words: vec!["-m".into(), "1G".into()], cwd, uid: 7, gid: 8, unstartable: vec![] }
    }

    fn config() -> MovesConfig {
        MovesConfig { accept: true, users: vec![7], paths: vec![std::env::temp_dir()], ..MovesConfig::default() }
    }

    fn accounts() -> Accounts {
        let users = "root:x:0:0::/:\nseven:x:7:8::/:\nme:x:1000:1000::/:\n".to_owned();
        Accounts { users, groups: "kvm:x:107:seven\ndisk:x:6:\n".into() }
    }

    const ROOT: (u32, u32) = (0, 0);
    const ME: (u32, u32) = (1000, 1000);

    fn reasons(own: (u32, u32), config: &MovesConfig, launch: &Launch) -> Vec<String> {
        check_for(own, &accounts(), config, launch).err().unwrap_or_default()
    }

    #[test]
    fn what_is_listed_is_started() {
        assert_eq!(reasons(ROOT, &config(), &launch()), [""; 0]);
        assert_eq!(reasons(ROOT, &config(), &Launch { gid: 107, ..launch() }), [""; 0]);
        let root = MovesConfig { users: vec![0], ..config() };
        assert_eq!(reasons(ROOT, &root, &Launch { uid: 0, gid: 0, ..launch() }), [""; 0]);
        // A daemon of another user starts VMs as that one.
        let own = Launch { uid: 1000, gid: 1000, ..launch() };
        assert_eq!(reasons(ME, &MovesConfig { users: vec![], ..config() }, &own), [""; 0]);
        assert_eq!(reasons(ME, &MovesConfig { users: vec![1000], ..config() }, &own), [""; 0]);
    }

    #[test]
    fn all_reasons_are_said_at_once() {
        let launch = Launch { program: "/tmp/evil\n".into(), cwd: "/".into(), uid: 0, gid: 0, ..launch() };
        let said = reasons(ROOT, &config(), &launch);
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(said[0].contains("program /tmp/evil? is not"), "{said:?}");
        assert!(said[1].contains("user 0, who is not") && said[2].contains("directory / is not below"), "{said:?}");
        let off = reasons(ROOT, &MovesConfig::default(), &launch);
        assert!(off.len() == 1 && off[0].contains("accept = true"), "{off:?}");
    }

    #[test]
    fn one_thing_that_is_wrong_is_enough() {
        let check = |own, config: MovesConfig, launch: Launch, expected: &str| {
            let said = reasons(own, &config, &launch);
            assert!(said.len() == 1 && said[0].contains(expected), "{expected}: {said:?}");
        };
        check(ROOT, MovesConfig { users: vec![], ..config() }, launch(), "the daemon is root");
        check(ROOT, config(), Launch { gid: 0, ..launch() }, "group 0");
        check(ROOT, config(), Launch { gid: 6, ..launch() }, "group 6");
        check(ROOT, MovesConfig { users: vec![9], ..config() }, Launch { uid: 9, ..launch() }, "/etc/passwd");
        check(ME, config(), launch(), "starts nothing as another one");
        check(ME, MovesConfig { users: vec![], ..config() }, Launch { uid: 0, gid: 0, ..launch() }, "as another one");
        let own = Launch { uid: 1000, gid: 1000, ..launch() };
        check(ME, config(), own, "user 1000, who is not among");
        for cwd in ["", ".", "/tmpx", "/tmp-evil", "/tmp/../etc", "/tmp/../..", "/tmp/vms/../.."] {
            check(ROOT, config(), Launch { cwd: cwd.into(), ..launch() }, "not below one of paths");
        }
        check(ROOT, MovesConfig { paths: vec![], ..config() }, launch(), "not below one of paths");
        let missing = std::env::temp_dir().join("no-such-directory").to_str().unwrap().to_owned();
        check(ROOT, config(), Launch { cwd: missing, ..launch() }, "is not here");
        check(ROOT, config(), Launch { program: format!("{QEMU}/"), ..launch() }, "not among programs");
        check(ROOT, config(), Launch { program: "/usr/bin/../bin/qemu-system-x86_64".into(), ..launch() }, "programs");
        check(ROOT, config(), Launch { words: vec!["a\0b".into()], ..launch() }, "bytes of zero");
        check(ROOT, config(), Launch { unstartable: vec!["-netdev fd=9".into()], ..launch() }, "-netdev fd=9");
    }

    #[test]
    fn a_link_does_not_lead_out() {
        let dir = std::env::temp_dir().join(format!("pagodad-moves-check-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::os::unix::fs::symlink("/etc", dir.join("link")).unwrap();
        let config = MovesConfig { paths: vec![dir.clone()], ..config() };
        let cwd = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        assert_eq!(reasons(ROOT, &config, &Launch { cwd: cwd(""), ..launch() }), [""; 0]);
        let said = reasons(ROOT, &config, &Launch { cwd: cwd("link"), ..launch() });
        assert!(said.len() == 1 && said[0].contains("a link to elsewhere"), "{said:?}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
