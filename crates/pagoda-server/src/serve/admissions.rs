//! The clients that may use what this machine lends, as they change.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Result, ensure};
use pagoda_api::in_full;
use pagoda_pool::store::{self, Admitted};
use rmap::crypto::PublicKey;
use rmap::server::Server;

/// The admitted clients, read again when their file changes.
#[derive(Debug)]
pub struct Admissions {
    dir: PathBuf,
    clients: Vec<Admitted>,
    read: Option<Edition>,
}

/// When a file was written, how long it is, and which one it is: another list has another of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edition(SystemTime, u64, u64);

impl Admissions {
    /// # Errors
    /// The list cannot be read.
    pub fn read(dir: &Path) -> Result<Admissions> {
        let mut admissions = Admissions { dir: dir.to_owned(), clients: Vec::new(), read: None };
        admissions.refresh()?;
        Ok(admissions)
    }

    /// `true` if the list is another one than before. A list is replaced as a whole, never changed in place; one that is gone was
    /// not meant to be.
    fn refresh(&mut self) -> Result<bool> {
        let path = store::admitted_path(&self.dir);
        let edition = |file: Metadata| Ok(Edition(file.modified()?, file.len(), file.ino()));
        let edition = std::fs::metadata(&path).and_then(edition).ok();
        if edition == self.read {
            return Ok(false);
        }
        let had_one = std::mem::replace(&mut self.read, edition).is_some();
        ensure!(edition.is_some() || !had_one, "{} is gone", path.display());
        self.clients = store::admitted(&self.dir)?;
        Ok(true)
    }

    pub fn keys(&self) -> Vec<PublicKey> {
        self.clients.iter().map(|client| client.key).collect()
    }

    pub fn admins(&self) -> Vec<PublicKey> {
        self.clients.iter().filter(|client| client.admin).map(|client| client.key).collect()
    }

    /// The name of a client, for people; its key if it has none.
    pub fn name_of(&self, key: PublicKey) -> String {
        let named = self.clients.iter().find(|client| client.key == key && client.name != "-");
        named.map_or_else(|| format!("{key:?}"), |client| client.name.clone())
    }

    /// Tells the server of a list that has changed. One that cannot be read changes nothing.
    pub fn follow(&mut self, server: &mut Server) {
        let result = self.refresh().and_then(|is_new| {
            if is_new {
                server.admit(self.keys())?;
                server.set_admins(self.admins());
            }
            Ok(())
        });
        if let Err(error) = result {
            eprintln!("pagoda: {error}; the clients admitted before stay", error = in_full(error.as_ref()));
        }
    }
}
