//! `pagoda pool key`: the keys of this machine, and of clients that a server admits.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagoda_pool::store::{self, Admitted};
use rmap::server::ADMITTED_MAX;
use rmap::servers::parse_key;
use serde::Serialize;

use crate::exit::{NoSuchClient, UsageError};
use crate::output::{Format, Side, Table, print_json, print_text};

/// Instead of a name; `pagoda pool key add` without `--name`.
const UNNAMED: &str = "-";

#[derive(Debug, Serialize)]
struct KeyRow {
    public_key: String,
    name: String,
    /// Whether it is this machine's.
    own: bool,
    /// Whether it may drain the server here.
    admin: bool,
}

pub fn init(dir: &Path, format: Format) -> Result<()> {
    store::make_keys(dir)?;
    let (own, _) = store::identity(dir)?;
    let public_key = format!("{:?}", own.public());
    match format {
        Format::Json => print_json(&KeyRow { public_key, name: "-".into(), own: true, admin: false })?,
        Format::Text => print_text(&format!(
            "Public key of this machine: {public_key}\nOn each server: pagoda pool key add {public_key}\n"
        ))?,
    }
    Ok(())
}

pub fn add(dir: &Path, key: &str, name: &str, admin: bool) -> Result<()> {
    let key =
        parse_key(key).ok_or_else(|| UsageError(format!("{key:?} is not a public key: give 64 hexadecimal digits")))?;
    let plain = |c: char| c.is_ascii_graphic() && c != '#';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(UsageError(format!("{name:?} is no name: at most 64 letters, digits and signs, no blanks")).into());
    }
    ensure!(dir.is_dir(), "{} is not there: run `pagoda pool key init` first", dir.display());
    let _lock = store::lock(dir)?;
    let mut clients = store::admitted(dir)?;
    match clients.iter_mut().find(|client| client.key == key) {
        Some(same) if admin && !same.admin => same.admin = true,
        Some(same) => anyhow::bail!("{key:?} is admitted already, as {}", same.name),
        None => clients.push(Admitted { key, name: name.to_owned(), admin }),
    }
    ensure!(clients.len() <= ADMITTED_MAX, "{ADMITTED_MAX} clients are admitted: a server takes no more");
    store::set_admitted(dir, &clients).context("admit the client")
}

pub fn remove(dir: &Path, key_or_name: &str) -> Result<()> {
    let _lock = dir.is_dir().then(|| store::lock(dir)).transpose()?;
    let mut clients = store::admitted(dir)?;
    let key = parse_key(key_or_name);
    let is_meant = |client: &Admitted| match key {
        Some(key) => client.key == key,
        None => client.name == key_or_name && client.name != UNNAMED,
    };
    match clients.iter().filter(|client| is_meant(client)).count() {
        0 => return Err(NoSuchClient(key_or_name.to_owned()).into()),
        1 => clients.retain(|client| !is_meant(client)),
        several => {
            return Err(UsageError(format!("{several} clients are called {key_or_name}: give the public key")).into());
        }
    }
    store::set_admitted(dir, &clients).context("remove the client")
}

pub fn list(dir: &Path, format: Format) -> Result<()> {
    let (own, _) = store::identity(dir)?;
    let row = |key, name, own, admin| KeyRow { public_key: format!("{key:?}"), name, own, admin };
    let mut rows = vec![row(own.public(), "this machine".into(), true, false)];
    rows.extend(store::admitted(dir)?.into_iter().map(|client| row(client.key, client.name, false, client.admin)));
    if format == Format::Json {
        return Ok(print_json(&rows)?);
    }
    let mut table = Table::new(&[("PUBLIC KEY", Side::Left), ("ADMIN", Side::Left), ("NAME", Side::Left)]);
    let admin = |row: &KeyRow| if row.admin { "yes" } else { "-" }.to_owned();
    rows.into_iter().for_each(|row| table.row(vec![row.public_key.clone(), admin(&row), row.name]));
    Ok(table.print()?)
}
