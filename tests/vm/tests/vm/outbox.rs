//! Outboxes: a guest writes files with unmodified programs, and the host sends them by HTTP.

mod rings;
mod size;
mod survival;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::{OutboxInfo, OutboxList, OutboxState, VmInfo};
use rustix::process::{Pid, Signal, kill_process};
use vm_tests::control::Control;
use vm_tests::daemon::DaemonOptions;
use vm_tests::{Daemon, Folios, Guest, GuestOptions, Lab, MIB, Qemu, wait};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// The guest's input: more than the space holds, and nothing that gzip makes smaller.
const INPUT_MIB: u64 = 24;
/// What curl calls the status of a server that does not listen.
const NO_REPLY: u32 = 0;
const INPUT: &str = "/tmp/input";

/// DRAM for the VM and its outbox.
const POOL: &str = "1G";
/// Exit statuses (`pagoda --help`).
const NOT_FOUND: i32 = 4;
const NO_ROOM: i32 = 5;

/// A daemon with so much DRAM for VMs, which looks at sizes every five seconds.
fn pool_of(lab: &Lab, pool: &str) -> Result<DaemonOptions> {
    let path = lab.dir().join("pagoda.toml");
    fs::write(&path, format!("[policy]\npool = \"{pool}\"\n[outbox]\nperiod_s = 5\n"))
        .context("write the configuration")?;
    let mut options = DaemonOptions::new(Folios::Small);
    options.more = vec!["--config".into(), path.to_string_lossy().into_owned()];
    Ok(options)
}

/// A guest with an outbox, and a way for clients to it.
struct Site {
    dir: PathBuf,
    base: String,
    address: String,
}

impl Site {
    /// Starts the guest `web1` with an outbox of `space`, and mounts it at /mnt.
    fn start(lab: &Lab, qemu: Qemu, space: &str, wait_seconds: u64) -> Result<(Site, Rc<Daemon>, Rc<Guest>, Control)> {
        Site::start_with(lab, qemu, space, wait_seconds, "96M")
    }

    /// The same in so much DRAM.
    fn start_with(
        lab: &Lab,
        qemu: Qemu,
        space: &str,
        wait_seconds: u64,
        dram: &str,
    ) -> Result<(Site, Rc<Daemon>, Rc<Guest>, Control)> {
        let token = lab.dir().join("token");
        fs::write(&token, TOKEN)?;
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
        // Free until it is used in a moment: nothing else on this machine asks for a port by number.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let daemon = lab.daemon_with(pool_of(lab, POOL)?)?;
        let mut options =
            GuestOptions::new("web1", "").memory("-m 512M").dram(dram).client().control().may_reboot().qemu(qemu);
        options.run_options =
            ["--outbox", space, "--outbox-listen", &address, "--outbox-wait", &wait_seconds.to_string()]
                .map(str::to_owned)
                .into();
        options.run_options.extend(["--outbox-token".into(), token.display().to_string()]);
        // More than this machine sends, and longer than a test lasts.
        let bounds = ["--outbox-rate", "100G", "--outbox-client-rate", "90G", "--outbox-ttl", "1d"];
        options.run_options.extend(bounds.map(str::to_owned));
        let guest = lab.guest(&daemon, &options)?;
        let mut control = guest.control()?;
        control.sh("mkdir -p /mnt /tmp && mount -t virtiofs outbox /mnt")?;
        let site = Site { dir: lab.dir().to_owned(), base: format!("http://{address}/web1"), address };
        Ok((site, daemon, guest, control))
    }

    fn curl(&self, path: &str, options: &[&str]) -> Command {
        self.curl_as(TOKEN, path, options)
    }

    fn curl_as(&self, token: &str, path: &str, options: &[&str]) -> Command {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--max-time", "280", "-H", &format!("Authorization: Bearer {token}")]);
        curl.args(options).arg(format!("{}/{path}", self.base)).stdin(Stdio::null());
        curl
    }

    /// The status and what came.
    fn get(&self, path: &str, options: &[&str]) -> Result<(u32, Vec<u8>)> {
        self.reply_to(self.curl(path, options))
    }

    fn reply_to(&self, mut curl: Command) -> Result<(u32, Vec<u8>)> {
        let file = self.dir.join("reply");
        let _ = fs::remove_file(&file);
        let said = curl.args(["--write-out", "%{http_code}", "--output"]).arg(&file).output().context("run curl")?;
        let status = String::from_utf8_lossy(&said.stdout).trim().parse()?;
        Ok((status, fs::read(&file).unwrap_or_default()))
    }

    /// Fetches a file from when it is there until it has ended.
    fn fetching(&self, path: &str, to: &Path) -> Result<Child> {
        wait::until("the file", wait::HANG, || Ok((self.get(path, &["--head"])?.0 == 200).then_some(())))?;
        self.curl(path, &["--fail", "--no-buffer"]).arg("--output").arg(to).spawn().context("run curl")
    }

    fn figure(&self, name: &str) -> Result<u64> {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "-H",
            &format!("Authorization: Bearer {TOKEN}"),
            &format!("http://{}/status", self.address),
        ]);
        let status: serde_json::Value = serde_json::from_slice(&curl.output()?.stdout)?;
        status[name].as_u64().with_context(|| format!("{name} in {status}"))
    }
}

fn digest_of(command: &str, file: &Path) -> Result<String> {
    let said = Command::new("sh").arg("-c").arg(format!("{command} < \"$0\" | sha256sum")).arg(file).output()?;
    ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    Ok(String::from_utf8(said.stdout)?.split(' ').next().unwrap_or_default().to_owned())
}

fn guest_digest(control: &mut Control, file: &str) -> Result<String> {
    Ok(control.sh(&format!("sha256sum < {file}"))?.split(' ').next().unwrap_or_default().to_owned())
}

/// 1K-blocks, used and available, as the guest's `df` says.
fn df(control: &mut Control) -> Result<Vec<u64>> {
    let said = control.sh("df -k /mnt")?;
    let line = said.lines().nth(1).with_context(|| said.clone())?;
    Ok(line.split_whitespace().skip(1).take(3).map(|word| word.parse().unwrap_or(u64::MAX)).collect())
}

/// What `pagoda outbox` says.
fn outbox(daemon: &Daemon, arguments: &[&str]) -> Result<OutboxInfo> {
    let said = daemon.run_cli(&[&["--json", "outbox"][..], arguments].concat())?;
    ensure!(said.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said.stderr));
    Ok(serde_json::from_slice(&said.stdout)?)
}

/// That a command fails with this status and says this.
fn refused(daemon: &Daemon, arguments: &[&str], status: i32, part: &str) -> Result<()> {
    let said = daemon.run_cli(arguments)?;
    let text = String::from_utf8_lossy(&said.stderr);
    ensure!(said.status.code() == Some(status) && text.contains(part), "{arguments:?}: {}: {text}", said.status);
    Ok(())
}

/// Waits until the daemon has heard what is wanted of the outbox.
fn wait_outbox(daemon: &Daemon, what: &str, wanted: impl Fn(&OutboxInfo) -> bool) -> Result<OutboxInfo> {
    wait::until(what, wait::HANG, || Ok(Some(daemon.client().outbox("web1")?).filter(&wanted)))
}

/// gzip's output is far larger than the space, and arrives while it is written.
fn streams(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-streams", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, qemu, "8M", 60)?;
        ensure!(df(&mut control)?[0] == 8 << 10, "df shows another size than 8 MiB");
        let pinned = daemon.vm("web1")?.pinned;
        ensure!(pinned.is_none(), "{pinned:?}");
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count={INPUT_MIB} 2>/dev/null"))?;
        let expected = guest_digest(&mut control, INPUT)?;

        control.send(&format!("sh gzip -1 < {INPUT} > /mnt/out.gz"))?;
        let file = lab.dir().join("out.gz");
        let mut client = site.fetching("out.gz", &file)?;
        control.reply()?;
        ensure!(client.wait()?.success(), "curl failed");
        let size = fs::metadata(&file)?.len();
        ensure!(size > 8 << 20, "{size} bytes would have fitted");
        ensure!(digest_of("gzip -dc", &file)? == expected, "wrong bytes arrived");
        ensure!(site.get("out.gz", &[])?.0 == 410, "its beginning cannot be there any more");

        // A file that is finished, in a directory, published by its name.
        control.sh(&format!(
            "mkdir /mnt/d && dd if={INPUT} of=/mnt/d/.part bs=64k count=16 2>/dev/null && mv /mnt/d/.part /mnt/d/part"
        ))?;
        let expected = guest_digest(&mut control, "/mnt/d/part")?;
        let (status, whole) = site.get("d/part", &[])?;
        ensure!((status, whole.len()) == (200, 1 << 20), "status {status}, {} bytes", whole.len());
        ensure!(digest_of("cat", &site.dir.join("reply"))? == expected, "wrong bytes arrived");
        let (status, part) = site.get("d/part", &["--range", "1000-4999"])?;
        ensure!(status == 206 && part == whole[1000..5000], "a range is wrong");
        ensure!(site.reply_to(site.curl_as("no", "d/part", &[]))?.0 == 401, "another token is enough");
        ensure!(String::from_utf8_lossy(&site.get("d/", &[])?.1).contains(">part</a> 1048576 sealed"));
        // Finished means that it does not change any more.
        ensure!(
            control.sh("dd if=/dev/zero of=/mnt/d/part bs=1 count=1 conv=notrunc").is_err(),
            "it was written again"
        );
        ensure!(control.sh("> /mnt/d/part").is_err(), "it was truncated");
        ensure!(site.get("d/part", &[])?.1 == whole, "it has changed");

        // What nobody has fetched is there after the guest's end, and so is its charge; then the process ends, and nothing is left.
        control.sh("echo last words > /mnt/last")?;
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")?;
        wait_outbox(&daemon, "an outbox that lingers", |outbox| {
            (outbox.state, outbox.charged_bytes) == (OutboxState::Lingering, 8 * MIB)
        })?;
        ensure!(outbox(&daemon, &["show", "web1"])?.space_bytes == 8 * MIB, "show says something else");
        refused(&daemon, &["outbox", "set", "web1", "--space", "2M"], NOT_FOUND, "web1 does not run")?;
        ensure!(site.get("last", &[])? == (200, b"last words\n".to_vec()), "what was published is gone");
        wait::until("the end of the outbox", wait::HANG, || Ok((site.get("last", &[])?.0 == NO_REPLY).then_some(())))?;
        wait::until("the end of its charge", wait::HANG, || {
            let (host, list) = (daemon.client().host()?.policy.outbox_bytes, daemon.client().outboxes()?.outboxes);
            Ok((host == 0 && list.is_empty()).then_some(()))
        })?;
        let dir = daemon.state_dir().join("outboxes");
        wait::until("the end of its files", wait::HANG, || Ok((fs::read_dir(&dir)?.count() == 0).then_some(())))
    })
}

#[test]
fn what_gzip_writes_arrives_while_it_grows() -> Result<()> {
    streams(Qemu::System)
}

#[test]
fn what_gzip_writes_arrives_while_it_grows_qemu_10() -> Result<()> {
    streams(Qemu::Ten)
}

/// DRAM of the VM that is paged, and what its guest writes into its own memory and then sends: together with the rest of the
/// guest, far more.
const PAGED_DRAM: &str = "128M";
const PAGED_INPUT_MIB: u64 = 160;

/// The VM is paged while another process reads and writes its memory: what it sends has left DRAM and comes back to that process,
/// also while daemons come and go, and after that process's end.
fn paged(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-paged", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start_with(lab, qemu, "16M", 60, PAGED_DRAM)?;
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count={PAGED_INPUT_MIB} 2>/dev/null"))?;
        let expected = guest_digest(&mut control, INPUT)?;
        let is_paged = |when: &str| {
            let vm = daemon.vm("web1")?;
            ensure!(vm.pinned.is_none(), "{when}: pinned: {:?}", vm.pinned);
            let most = vm.dram_limit_bytes;
            ensure!(vm.resident_bytes <= most, "{when}: {} bytes are resident, of {most}", vm.resident_bytes);
            ensure!(vm.swapped_bytes > PAGED_INPUT_MIB * MIB / 4, "{when}: {} bytes have left", vm.swapped_bytes);
            Ok(vm)
        };
        let before = is_paged("before anything is sent")?;

        control.send(&format!("sh cat {INPUT} > /mnt/out"))?;
        let file = lab.dir().join("out");
        let mut client = site.fetching("out", &file)?;
        wait::until("the first bytes", wait::HANG, || {
            Ok(fs::metadata(&file).is_ok_and(|stat| stat.len() > 8 * MIB).then_some(()))
        })?;
        is_paged("while it is sent")?;
        daemon.kill9()?;
        daemon.start_again()?;
        control.reply()?;
        ensure!(client.wait()?.success(), "curl failed");
        ensure!(digest_of("cat", &file)? == expected, "wrong bytes arrived");
        let after = is_paged("after it was sent")?;
        let counts = |vm: &VmInfo, name: &str| vm.counters.get(name).copied().unwrap_or(0);
        ensure!(counts(&after, "pages_in") > 0, "nothing came back: {:?}", after.counters);
        ensure!(guest_digest(&mut control, INPUT)? == expected, "the guest's own memory is wrong");

        // What the guest reads from its outbox is written into its memory by that process, in pages that were out.
        control.sh(&format!("dd if={INPUT} of=/mnt/back bs=1M count=12 2>/dev/null; dd if=/dev/urandom of=/tmp/fill bs=1M count=30 2>/dev/null"))?;
        let expected_back = control.sh(&format!("dd if={INPUT} bs=1M count=12 2>/dev/null | sha256sum"))?;
        for round in 0..3 {
            control.sh("cat /mnt/back > /tmp/back")?;
            let back = guest_digest(&mut control, "/tmp/back")?;
            ensure!(expected_back.starts_with(&back), "round {round}: it reads something else than it wrote");
        }

        // Nobody maps the memory any more: it is paged on.
        let pid = outbox(&daemon, &["show", "web1"])?.pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
        kill_process(pid.context("no process")?, Signal::KILL).context("kill the outbox")?;
        control.sh("rm /tmp/back /tmp/fill && dd if=/dev/urandom of=/tmp/more bs=1M count=40 2>/dev/null")?;
        let more = guest_digest(&mut control, "/tmp/more")?;
        ensure!(guest_digest(&mut control, INPUT)? == expected && guest_digest(&mut control, "/tmp/more")? == more);
        let last = is_paged("without the process")?;
        ensure!(counts(&last, "pages_out") > counts(&after, "pages_out"), "nothing has left since");
        println!("outbox-paged: {:?} -> {:?}", before.counters, last.counters);
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        let sockets = daemon.state_dir().join("mappers");
        wait::until("the end of its socket", wait::HANG, || Ok((fs::read_dir(&sockets)?.count() == 0).then_some(())))
    })
}

#[test]
fn a_guest_that_is_paged_sends_what_it_wrote() -> Result<()> {
    paged(Qemu::System)
}

#[test]
fn a_guest_that_is_paged_sends_what_it_wrote_qemu_10() -> Result<()> {
    paged(Qemu::Ten)
}

/// What was sent does not change; a full space makes a writer wait, and others go on.
#[test]
fn cursors_and_a_full_space() -> Result<()> {
    Lab::run("outbox-full", 1, |lab| {
        let wait_seconds = 15;
        let (site, daemon, guest, mut control) = Site::start(lab, Qemu::System, "4M", wait_seconds)?;
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count=8 2>/dev/null"))?;

        // A writer that pauses, and a client that has all there is so far.
        let pausing = "while [ ! -e /tmp/go ]; do sleep 0.1; done";
        control.sh(&format!(
            "(dd if={INPUT} bs=100k count=1; {pausing}; dd if={INPUT} bs=100k skip=1 count=1) > /mnt/grow 2>/tmp/log &"
        ))?;
        let file = lab.dir().join("grow");
        let mut client = site.fetching("grow", &file)?;
        wait::until("what there is", wait::HANG, || {
            Ok(fs::metadata(&file).is_ok_and(|stat| stat.len() == 100 << 10).then_some(()))
        })?;
        ensure!(
            control.sh("dd if=/dev/zero of=/mnt/grow bs=1 seek=102399 count=1 conv=notrunc").is_err(),
            "overwritten"
        );
        ensure!(site.figure("refused_changes")? == 1, "refusals are counted");
        // dd says nothing of a truncation that fails.
        let _ = control.sh("dd if=/dev/null of=/mnt/grow bs=1 seek=102399");
        ensure!(site.figure("refused_changes")? == 2, "it was truncated");
        control.sh("touch /tmp/go")?;
        ensure!(client.wait()?.success(), "curl failed");
        let expected = control.sh(&format!("dd if={INPUT} bs=200k count=1 2>/dev/null | sha256sum"))?;
        ensure!(expected.starts_with(&digest_of("cat", &file)?), "wrong bytes arrived");

        // Nobody fetches this one.
        let begin = Instant::now();
        control.sh(&format!("(dd if={INPUT} of=/mnt/full bs=1M count=8; echo status $? ) > /tmp/dd 2>&1 &"))?;
        wait::until("a full space", wait::HANG, || Ok((site.figure("available_bytes")? == 0).then_some(())))?;
        ensure!(df(&mut control)? == [4 << 10, 4 << 10, 0], "df does not show that it is full");
        let listed = Instant::now();
        ensure!(control.sh("ls /mnt; mkdir /mnt/aside")?.contains("full"));
        let took = listed.elapsed();
        ensure!(!control.sh("cat /tmp/dd")?.contains("status"), "names waited for {took:?}, until the writer was done");
        let said = wait::until("the end of the wait", wait::HANG, || {
            let said = control.sh("cat /tmp/dd")?;
            Ok(said.contains("status").then_some(said))
        })?;
        ensure!(said.contains("No space left on device") && said.contains("status 1"), "{said}");
        ensure!(begin.elapsed() >= Duration::from_secs(wait_seconds), "it did not wait");
        // Delivered, it makes room; and so does removing it.
        ensure!(site.get("full", &[])?.0 == 200);
        wait::until("room", wait::HANG, || Ok((df(&mut control)?[2] == 4 << 10).then_some(())))?;
        control.sh("rm /mnt/full && dd if=/dev/zero of=/mnt/more bs=1M count=3 2>/dev/null")?;
        ensure!(df(&mut control)?[2] == 1 << 10, "df does not show what is left");
        println!("outbox-full: ls and mkdir beside a waiting writer took {took:?}");
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

/// The space has another size as soon as somebody says so, and what it holds is fetched whole whatever the size, and
/// whatever happens to the daemon. An outbox that is killed costs nothing any more, and its VM goes on.
fn resized(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-space", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, qemu, "8M", 60)?;
        let set = |size: &str| outbox(&daemon, &["set", "web1", "--space", size]);
        let charged = || Ok::<_, anyhow::Error>(daemon.client().host()?.policy.outbox_bytes);
        let dir = lab.dir().to_owned();
        let arrived = |name: &str, status: u32, expected: &str| {
            let digest = digest_of("cat", &dir.join("reply"))?;
            ensure!(status == 200 && digest == expected, "{name}: status {status}, {digest} and not {expected}");
            Ok(())
        };

        set("24M")?;
        ensure!(df(&mut control)? == [24 << 10, 0, 24 << 10], "the guest's df does not follow");
        ensure!(charged()? == 24 * MIB, "its growth is not charged");
        refuses_what_the_pool_has_not(&daemon)?;
        ensure!(df(&mut control)?[0] == 24 << 10 && charged()? == 24 * MIB, "a refusal has changed something");

        // The daemon is killed while one client is in the midst of a file, and another has not begun.
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count=16 2>/dev/null"))?;
        control.sh(&format!(
            "dd if={INPUT} of=/mnt/a bs=1M 2>/dev/null && dd if={INPUT} of=/mnt/b bs=1M skip=12 count=2 2>/dev/null"
        ))?;
        let (whole, part) = (guest_digest(&mut control, INPUT)?, guest_digest(&mut control, "/mnt/b")?);
        let before = wait_outbox(&daemon, "what is written", |outbox| {
            outbox.figures.is_some_and(|figures| figures.written_bytes == 18 * MIB && figures.used_bytes == 18 * MIB)
        })?;
        let slow = dir.join("slow");
        let mut client = site.curl("a", &["--fail", "--limit-rate", "4M"]).arg("--output").arg(&slow).spawn()?;
        wait::until("its first bytes", wait::HANG, || {
            Ok(fs::metadata(&slow).is_ok_and(|stat| stat.len() > 0).then_some(()))
        })?;
        daemon.kill9()?;
        ensure!(client.try_wait()?.is_none(), "the client was done before the daemon was killed");
        arrived("b without a daemon", site.get("b", &[])?.0, &part)?;
        ensure!(client.wait()?.success() && digest_of("cat", &slow)? == whole, "a did not arrive without a daemon");
        daemon.start_again()?;
        let after = wait_outbox(&daemon, "an answer to the next daemon", |outbox| outbox.figures.is_some())?;
        ensure!(
            (after.state, after.space_bytes, after.charged_bytes, after.pid)
                == (before.state, before.space_bytes, before.charged_bytes, before.pid),
            "{before:#?}\n{after:#?}"
        );
        ensure!(charged()? == 24 * MIB, "the next daemon charges something else");

        // Smaller than what nobody has fetched: nothing new is written until that is fetched, and nothing is lost.
        control.sh(&format!("rm /mnt/a /mnt/b; dd if={INPUT} of=/mnt/c bs=1M count=12 2>/dev/null"))?;
        let expected = guest_digest(&mut control, "/mnt/c")?;
        let drains = set("4M")?;
        ensure!(drains.is_draining() && drains.space_bytes == 4 * MIB, "{drains:#?}");
        ensure!(df(&mut control)?[0] == 4 << 10 && df(&mut control)?[2] == 0, "the guest's df does not follow");
        ensure!(charged()? >= 12 * MIB, "the pool has back what the outbox still holds");
        let written = drains.figures.context("no figures")?.written_bytes;
        control.sh(&format!("(dd if={INPUT} of=/mnt/d bs=1M count=2; echo status $?) > /tmp/dd 2>&1 &"))?;
        let waits = wait_outbox(&daemon, "a write that waits", |outbox| {
            outbox.figures.is_some_and(|figures| figures.waiting_writes > 0)
        })?;
        ensure!(waits.figures.is_some_and(|figures| figures.written_bytes == written), "new bytes: {waits:#?}");
        arrived("c", site.get("c", &[])?.0, &expected)?;
        wait_outbox(&daemon, "the size that was set", |outbox| {
            !outbox.is_draining() && outbox.charged_bytes == 4 * MIB
        })?;
        wait::until("the write that waited", wait::HANG, || {
            Ok(control.sh("cat /tmp/dd")?.contains("status 0").then_some(()))
        })?;
        let expected = control.sh(&format!("dd if={INPUT} bs=1M count=2 2>/dev/null | sha256sum"))?;
        arrived("d", site.get("d", &[])?.0, expected.split(' ').next().unwrap_or_default())?;
        ensure!(charged()? == 4 * MIB, "its charge is not its space");

        // Its process is killed. Nobody can mount it again, and the VM is paged as before.
        let pid = after.pid.and_then(|pid| Pid::from_raw(pid.cast_signed())).context("no process")?;
        kill_process(pid, Signal::KILL).context("kill the outbox")?;
        wait::until("the end of its charge", wait::HANG, || Ok((charged()? == 0).then_some(())))?;
        let list: OutboxList = serde_json::from_slice(&daemon.run_cli(&["--json", "outbox", "ls"])?.stdout)?;
        let [ended] = &list.outboxes[..] else { anyhow::bail!("{list:#?}") };
        ensure!((ended.state, ended.charged_bytes, ended.pid) == (OutboxState::Ended, 0, None), "{ended:#?}");
        refused(&daemon, &["outbox", "set", "web1", "--space", "8M"], 1, "has ended")?;
        let faults = |vm: VmInfo| vm.counters.get("messages").copied().unwrap_or(0);
        let before = faults(daemon.vm("web1")?);
        control.sh("dd if=/dev/urandom of=/tmp/more bs=1M count=48 2>/dev/null")?;
        let more = guest_digest(&mut control, "/tmp/more")?;
        ensure!(faults(daemon.vm("web1")?) > before, "no page came since");
        ensure!(guest_digest(&mut control, "/tmp/more")? == more && guest_digest(&mut control, INPUT)? == whole);
        guest.kill9()?;
        daemon.wait_gone("web1")?;
        wait::until("the end of what is known of it", wait::HANG, || {
            Ok(daemon.client().outboxes()?.outboxes.is_empty().then_some(()))
        })
    })
}

/// More than the pool has is refused, by the name of the VM, before that starts and while it runs.
fn refuses_what_the_pool_has_not(daemon: &Daemon) -> Result<()> {
    refused(daemon, &["outbox", "set", "web1", "--space", "4G"], NO_ROOM, "no 4 GiB for the outbox of web1")?;
    refused(daemon, &["outbox", "set", "web2", "--space", "4M"], NOT_FOUND, "web2")?;
    let run = ["run", "--name", "web2", "--outbox", "2G", "--", "qemu-system-x86_64", "-m", "64M", "-accel", "tcg"];
    refused(daemon, &run, NO_ROOM, "web2 with an outbox of 2 GiB")?;
    let (vms, outboxes) = (daemon.client().vms()?.vms.len(), daemon.client().outboxes()?.outboxes.len());
    ensure!((vms, outboxes) == (1, 1), "{vms} VMs and {outboxes} outboxes are there");
    Ok(())
}

#[test]
fn its_space_is_set_while_it_serves() -> Result<()> {
    resized(Qemu::System)
}

#[test]
fn its_space_is_set_while_it_serves_qemu_10() -> Result<()> {
    resized(Qemu::Ten)
}
