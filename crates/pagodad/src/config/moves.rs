//! The section `[moves]` of the configuration file: which VMs of other hosts may come in, and whether etcd decides about moves.
//! It has no options on the command line.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Where users are looked up.
const USERS: &str = "/etc/passwd";
const PROGRAM_DEFAULT: &str = "/usr/bin/qemu-system-x86_64";

/// The keys of the section, as they are in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct MovesFile {
    pub accept: bool,
    pub programs: Option<Vec<PathBuf>>,
    pub users: Vec<User>,
    pub paths: Vec<PathBuf>,
    pub arbiter: Decider,
}

/// What decides about a VM whose link is cut in the moment of the grant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Decider {
    #[default]
    None,
    Etcd,
}

/// A user of the host by its name or number, not looked up yet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "toml::Value")]
pub(super) enum User {
    Name(String),
    Uid(u32),
}

impl FromStr for User {
    type Err = String;

    fn from_str(text: &str) -> Result<User, String> {
        if text.is_empty() || text.contains([':', '\n']) {
            return Err(format!("{text:?} is not the name of a user"));
        }
        Ok(text.parse().map_or_else(|_| User::Name(text.to_owned()), User::Uid))
    }
}

impl TryFrom<toml::Value> for User {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<User, String> {
        match value {
            toml::Value::String(text) => text.parse(),
            toml::Value::Integer(uid) => u32::try_from(uid).map(User::Uid).map_err(|_| format!("{uid} is no user")),
            other => Err(format!("{other} is neither the name of a user nor a number")),
        }
    }
}

impl User {
    /// `users` is the text of /etc/passwd. Users of a directory service are named by their number.
    fn uid(&self, users: &str) -> Result<u32> {
        let name = match self {
            User::Uid(uid) => return Ok(*uid),
            User::Name(name) => name,
        };
        let of_line = |line: &str| {
            let mut fields = line.split(':');
            (fields.next() == Some(name.as_str())).then(|| fields.nth(1)?.parse().ok()).flatten()
        };
        users.lines().find_map(of_line).with_context(|| {
            format!("[moves] users: {USERS} has no user {name}: make it with useradd, or give the user's number")
        })
    }
}

/// Which VMs of other hosts may come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovesConfig {
    /// VMs of other hosts come in at all.
    pub accept: bool,
    /// What may be started for them.
    pub programs: Vec<PathBuf>,
    /// As whom. Empty: as the daemon's own user, unless that is root.
    pub users: Vec<u32>,
    /// Below which directories their files are.
    pub paths: Vec<PathBuf>,
    /// The etcd of the pool decides who owns a VM whose link is cut in the moment of the grant.
    pub arbiter: bool,
}

impl Default for MovesConfig {
    fn default() -> MovesConfig {
        let programs = vec![PROGRAM_DEFAULT.into()];
        MovesConfig { accept: false, programs, users: Vec::new(), paths: Vec::new(), arbiter: false }
    }
}

impl MovesConfig {
    /// What the section says.
    ///
    /// # Errors
    /// A path that is no full one; a user that is not there.
    pub(super) fn resolve(file: MovesFile) -> Result<MovesConfig> {
        let defaults = MovesConfig::default();
        let users = if file.users.is_empty() {
            String::new()
        } else {
            std::fs::read_to_string(USERS).with_context(|| format!("read {USERS}"))?
        };
        let programs = file.programs.unwrap_or(defaults.programs);
        programs.iter().try_for_each(|path| check("programs", path))?;
        file.paths.iter().try_for_each(|path| check("paths", path))?;
        Ok(MovesConfig {
            accept: file.accept,
            programs,
            users: file.users.iter().map(|user| user.uid(&users)).collect::<Result<_>>()?,
            paths: file.paths,
            arbiter: file.arbiter == Decider::Etcd,
        })
    }
}

fn check(key: &str, path: &Path) -> Result<()> {
    let is_plain = path.components().all(|part| part != std::path::Component::ParentDir);
    ensure!(path.is_absolute() && is_plain, "[moves] {key}: {path:?} has to be a full path, without ..");
    Ok(())
}
