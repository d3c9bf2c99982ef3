//! A space that follows an SLO: a guest does jobs, a client takes their files slowly, and the daemon chooses the size.

use super::*;

/// A job's output, and what the client takes in a second. A space of a mebibyte makes a job wait for nearly all of it.
const OUTPUT_MIB: u64 = 24;
const CLIENT_MIB_PER_S: u64 = 8;

/// One job after the other, with a pause in which the network takes all of it.
fn jobs_begin(control: &mut Control) -> Result<()> {
    control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count={OUTPUT_MIB} 2>/dev/null"))?;
    let job = format!("dd if={INPUT} of=/mnt/j$i bs=256k || break; i=$((i+1)); sleep 3");
    control.sh(&format!("(i=0; while [ ! -e /tmp/stop ]; do {job}; done) >/tmp/log 2>&1 &"))?;
    Ok(())
}

/// A client that takes a file after the other, until there is a file `stop`.
struct Client {
    shell: Child,
    stop: PathBuf,
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = fs::write(&self.stop, "");
        let _ = self.shell.wait();
    }
}

fn client_begins(site: &Site) -> Result<Client> {
    let stop = site.dir.join("stop");
    let script = format!(
        "i=0; while [ ! -e \"$0\" ]; do curl -sf --max-time 60 --limit-rate {CLIENT_MIB_PER_S}M -o /dev/null \
         -H 'Authorization: Bearer {TOKEN}' {}/j$i && i=$((i+1)) || sleep 0.1; done",
        site.base
    );
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).arg(&stop).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Client { shell: shell.spawn().context("start a client")?, stop })
}

fn verdict(outbox: &OutboxInfo) -> Option<&str> {
    outbox.profile.as_ref()?.verdict.as_deref()
}

#[test]
fn its_space_follows_an_slo() -> Result<()> {
    Lab::run("outbox-slo", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, Qemu::System, "1M", 60)?;
        let client = client_begins(&site)?;
        jobs_begin(&mut control)?;

        // What cannot be is refused by name, and nothing is changed.
        let set = ["outbox", "set", "web1", "--space", "auto"];
        let refuses =
            |more: &[&str], status: i32, part: &str| refused(&daemon, &[&set[..], more].concat(), status, part);
        refuses(&["--slo", "p90 4.6"], 1, "has no unit; write 4.6s")?;
        refuses(&["--slo", "p90 1s", "--max", "64G"], NO_ROOM, "beyond the")?;
        refuses(&["--slo", "p90 1s", "--min", "8M", "--max", "4M"], 1, "above its max")?;
        refuses(&[], 1, "give --slo")?;
        let before = daemon.client().outbox("web1")?;
        ensure!(before.auto.is_none() && before.space_bytes == MIB, "{before:#?}");

        // Too small for what is promised: it grows until the promise is kept.
        let limits = ["set", "web1", "--space", "auto", "--slo", "mean 2200ms", "--min", "1M", "--max", "64M"];
        let set = outbox(&daemon, &limits)?;
        ensure!(set.space_bytes == MIB && verdict(&set).is_none_or(|verdict| verdict == "learning"), "{set:#?}");
        let grown = wait_outbox(&daemon, "a space that its SLO needs", |outbox| {
            outbox.space_bytes >= 4 * MIB && verdict(outbox) == Some("feasible")
        })?;
        let profile = grown.profile.context("no profile")?;
        ensure!(profile.jobs >= 10 && profile.recent[0].output_bytes == OUTPUT_MIB * MIB, "{profile:#?}");
        ensure!(df(&mut control)?[0] >= 4 << 10, "the guest's df does not follow");
        let charged = daemon.client().host()?.policy.outbox_bytes;
        ensure!((4 * MIB..=(64 + OUTPUT_MIB) * MIB).contains(&charged), "{charged} bytes are charged");
        let said = daemon.run_cli(&["outbox", "explain", "web1"])?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        ensure!(said.contains("feasible: ") && said.contains("memory helps"), "{said}");
        println!("outbox-slo: {} for mean 2200ms\n{said}", grown.space_bytes);

        // No space makes the guest faster.
        outbox(&daemon, &["set", "web1", "--slo", "p90 5ms", "--weight", "300"])?;
        let hopeless = wait_outbox(&daemon, "that it is infeasible", |outbox| verdict(outbox) == Some("infeasible"))?;
        let said = daemon.run_cli(&["outbox", "explain", "web1"])?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        ensure!(said.contains("infeasible: no size keeps p90 5ms") && said.contains(" would"), "{said}");
        println!("outbox-slo: infeasible\n{said}");

        // The next daemon knows what is set, and hears of jobs.
        daemon.kill9()?;
        daemon.start_again()?;
        let after = wait_outbox(&daemon, "jobs that the next daemon hears of", |outbox| {
            outbox.profile.as_ref().is_some_and(|profile| profile.jobs >= 1)
        })?;
        let auto = after.auto.context("the next daemon has forgotten the SLO")?;
        ensure!(
            (auto.slo.as_str(), auto.min_bytes, auto.max_bytes, auto.weight) == ("p90 5ms", MIB, Some(64 * MIB), 300)
        );
        ensure!(after.pid == hopeless.pid, "another process serves");

        // The size is set by hand again.
        let fixed = outbox(&daemon, &["set", "web1", "--space", "2M"])?;
        ensure!(fixed.auto.is_none() && fixed.space_bytes == 2 * MIB, "{fixed:#?}");
        control.sh("touch /tmp/stop")?;
        drop(client);
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}
