//! A daemon whose control period is short, and guests with outboxes. Each guest has a link of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testkit::daemon::Daemon;
use testkit::undo::{Guard, Undo};

use super::link::Link;
use crate::Setup;
use crate::balloon::guest::{Guest, QEMU, Shape, Start};

/// The control period, and the window of the SLO.
pub const PERIOD: Duration = Duration::from_secs(3);
pub const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// The guest has its outbox under this name, and here.
const TAG: &str = "outbox";
pub const OUT: &str = "/out";
const MEMORY_MIB: u64 = 256;
/// Files that were delivered go after this; none waits so long for its client.
const TTL: &str = "60s";
/// A VM that has ended is forgotten within that, or hangs.
const GONE_MAX: Duration = Duration::from_secs(60);

/// The daemon and guests of a course, as the head of this module says.
pub struct Lab {
    pub daemon: Daemon,
    cli: Vec<String>,
    token: String,
    _config: Guard,
}

/// A guest, its name and its link. Ends with this value.
pub struct Tenant {
    pub name: String,
    pub guest: Guest,
    pub link: Link,
}

impl Lab {
    /// # Errors
    /// The daemon does not start.
    pub fn start(setup: &Setup) -> Result<Lab> {
        let config = setup.dir.join(format!("outbox-control-{}.toml", std::process::id()));
        let guard = Guard::new(Undo::File { path: config.clone() })?;
        let text = format!("[outbox]\nperiod_s = {}\n", PERIOD.as_secs());
        fs::write(&config, text).context("write the daemon's configuration")?;
        let path = config.to_str().context("a path in UTF-8")?;
        let daemon = Daemon::start_with(&setup.dir, "daemon", &["--config", path])?;
        let token = daemon.dir().join("token");
        write_token(&token)?;
        let token = token.to_str().context("a path in UTF-8")?.to_owned();
        Ok(Lab { cli: daemon.cli_words()?, token, daemon, _config: guard })
    }

    /// What `pagoda --json` says to these words.
    ///
    /// # Errors
    /// It fails: with its message.
    pub fn pagoda(&self, words: &[&str]) -> Result<Value> {
        let done = Command::new(&self.cli[0]).args(&self.cli[1..]).arg("--json").args(words).output();
        let done = done.context("run pagoda")?;
        let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        ensure!(done.status.success(), "pagoda {}: {said}", words.join(" "));
        serde_json::from_slice(&done.stdout).with_context(|| format!("read what pagoda {} says", words.join(" ")))
    }

    /// Boots all of them at once; `options` are those of `pagoda run` about their outboxes.
    ///
    /// # Errors
    /// One does not boot.
    pub fn boot(&self, wanted: &[(String, Vec<String>)], start: &Start<'_>) -> Result<Vec<Tenant>> {
        let one = |(number, (name, options)): (usize, &(String, Vec<String>))| {
            let link = Link::new(number)?;
            let mut words = link.host_words();
            words.extend(self.cli.iter().cloned());
            let memory = format!("{MEMORY_MIB}M");
            words.extend(["run", "--name", name, "--min", &memory].map(str::to_owned));
            words.extend(options.iter().cloned());
            let listen = Link::server().to_string();
            let rest = ["--outbox-listen", &listen, "--outbox-token", &self.token, "--outbox-ttl", TTL];
            words.extend(rest.map(str::to_owned));
            words.extend(["--outbox-linger", "0", "--", QEMU].map(str::to_owned));
            let shape = Shape { name, memory_mib: MEMORY_MIB, append: "no_timer_check", ..Shape::default() };
            let guest = Guest::begin_boot(&words, self.daemon.dir(), &shape, start)?;
            Ok(Tenant { name: name.clone(), guest, link })
        };
        let mut tenants = wanted.iter().enumerate().map(one).collect::<Result<Vec<Tenant>>>()?;
        for Tenant { name, guest, .. } in &mut tenants {
            guest.wait_booted().with_context(|| format!("boot {name}"))?;
            guest.command(&format!("sh mkdir -p {OUT} && mount -t virtiofs {TAG} {OUT}"))?;
        }
        Ok(tenants)
    }

    /// Ends a guest, and waits until its name is free.
    ///
    /// # Errors
    /// It stays.
    pub fn end(&self, tenant: Tenant) -> Result<()> {
        let Tenant { name, guest, link } = tenant;
        drop(guest);
        let gone = self.daemon.wait_gone(&name, GONE_MAX);
        drop(link);
        gone
    }
}

fn write_token(path: &Path) -> Result<()> {
    fs::write(path, TOKEN).context("write the token")?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).context("keep the token")
}
