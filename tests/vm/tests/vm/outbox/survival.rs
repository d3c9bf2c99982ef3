//! A process of an outbox is killed, that which serves or the transmitter. Another one goes on: the guest's programs, its files and
//! clients.

use serde_json::json;

use super::*;

/// Often enough that it meets writes, names and the pauses between them.
const KILLS: usize = 5;
/// How long an answer may take that needs no room, the start of another process included. Guests run under TCG.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// What the transmitter's process is called.
const TRANSMITTER: &str = "outbox-transmit";

/// The outbox's child that is the transmitter, or the one that is not.
fn child(keeper: u32, is_transmitter: bool) -> Result<Option<u32>> {
    let children =
        fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).context("the outbox's children")?;
    let is_one = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| (name.trim() == TRANSMITTER) == is_transmitter)
    };
    Ok(children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_one))
}

/// The process that serves.
pub fn worker(keeper: u32) -> Result<Option<u32>> {
    child(keeper, false)
}

/// Kills it and waits until another one is there.
pub fn kill_worker(keeper: u32) -> Result<()> {
    let killed = wait::until("a process that serves", wait::HANG, || worker(keeper))?;
    let pid = Pid::from_raw(killed.cast_signed()).context("no process")?;
    kill_process(pid, Signal::KILL).context("kill the process that serves")?;
    wait::until("another process that serves", wait::HANG, || Ok(worker(keeper)?.filter(|pid| *pid != killed)))?;
    Ok(())
}

/// Kills the transmitter and waits until another one is there.
fn kill_transmitter(keeper: u32) -> Result<()> {
    let killed = wait::until("a transmitter", wait::HANG, || child(keeper, true))?;
    let pid = Pid::from_raw(killed.cast_signed()).context("no process")?;
    kill_process(pid, Signal::KILL).context("kill the transmitter")?;
    let next = || Ok(child(keeper, true)?.filter(|pid| *pid != killed));
    wait::until("another transmitter", wait::HANG, next)?;
    Ok(())
}

/// Waits until the process that serves now says that a write waits for room.
pub fn wait_for_waiting_write(daemon: &Daemon) -> Result<()> {
    let since = Instant::now();
    wait_outbox(daemon, "a write that waits", |outbox| {
        outbox.figures.is_some_and(|figures| {
            figures.waiting_writes > 0 && Duration::from_millis(figures.age_ms) < since.elapsed()
        })
    })
    .map(drop)
}

fn killed(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-killed", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, qemu, "16M", 100)?;
        let keeper = wait_outbox(&daemon, "its process", |outbox| outbox.pid.is_some())?.pid.context("no process")?;
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count=24 2>/dev/null"))?;
        control.sh(&format!("mkdir /mnt/d && dd if={INPUT} of=/mnt/d/sealed bs=100k count=20 2>/dev/null"))?;
        let sealed = guest_digest(&mut control, "/mnt/d/sealed")?;
        let tag = String::from_utf8(site.get("d/sealed", &["--head"])?.1)?;
        let tag = tag.lines().find_map(|line| line.strip_prefix("etag: ")).context("no ETag")?.trim().to_owned();

        // A program that writes notices nothing. Each dd opens nothing: the file is the shell's.
        control.send(&format!(
            "sh (i=0; while [ $i -lt 60 ]; do dd if={INPUT} bs=64k skip=$i count=1 2>/dev/null || exit 1; echo $i > /tmp/at; \
             i=$((i+1)); done) > /mnt/grows"
        ))?;
        for _ in 0..KILLS {
            kill_worker(keeper)?;
            let asked = Instant::now();
            wait::until("an answer", ANSWER_MAX, || Ok((site.get("d/sealed", &["--head"])?.0 == 200).then_some(())))?;
            println!("outbox-killed: a client is answered after {:?}", asked.elapsed());
        }
        control.reply()?;
        let expected = control.sh(&format!("dd if={INPUT} bs=64k count=60 2>/dev/null | sha256sum"))?;
        let expected = expected.split(' ').next().unwrap_or_default();
        ensure!(guest_digest(&mut control, "/mnt/grows")? == expected, "the guest has lost bytes");
        ensure!(site.get("grows", &[])?.0 == 200 && digest_of("cat", &site.dir.join("reply"))? == expected);
        // What was closed before is whole, has the same tag, and a client goes on in the midst of it.
        ensure!(site.get("d/sealed", &[])?.0 == 200 && digest_of("cat", &site.dir.join("reply"))? == sealed);
        let whole = fs::read(site.dir.join("reply"))?;
        let (status, rest) = site.get("d/sealed", &["--range", "1000000-", "-H", &format!("If-Range: {tag}")])?;
        ensure!(status == 206 && rest == whole[1_000_000..], "status {status}: it is another file");
        ensure!(control.sh("ls /mnt /mnt/d; df /mnt")?.contains("sealed"));

        // A write that waits for room when the process is killed waits again, and goes on.
        control.sh("rm /mnt/grows")?;
        control.sh(&format!("(cat {INPUT} > /mnt/large; echo status $?) > /tmp/log 2>&1 &"))?;
        wait_for_waiting_write(&daemon)?;
        kill_worker(keeper)?;
        wait_for_waiting_write(&daemon)?;
        control.sh("ls /mnt")?;
        let large = lab.dir().join("large");
        ensure!(site.curl("large", &["--fail"]).arg("--output").arg(&large).status()?.success(), "curl failed");
        wait::until("the writer's end", wait::HANG, || {
            Ok(control.sh("cat /tmp/log")?.contains("status").then_some(()))
        })?;
        ensure!(control.sh("cat /tmp/log")?.contains("status 0"), "{}", control.sh("cat /tmp/log")?);
        ensure!(digest_of("cat", &large)? == guest_digest(&mut control, INPUT)?, "wrong bytes arrived");

        // All of that with a guest that is paged: each process that served was known as one that maps its memory.
        let vm = daemon.vm("web1")?;
        ensure!(
            vm.pinned.is_none() && vm.swapped_bytes > 0,
            "pinned: {:?}; {} bytes are out",
            vm.pinned,
            vm.swapped_bytes
        );
        ensure!(vm.resident_bytes <= vm.dram_limit_bytes, "{} bytes are resident", vm.resident_bytes);

        // All memory can be had back, and what is closed is delivered though the process is killed after the guest's end.
        control.sh("rm /mnt/large /mnt/d/sealed && echo last words > /mnt/d/last")?;
        wait_outbox(&daemon, "memory that was given back", |outbox| {
            outbox.figures.is_some_and(|figures| figures.used_bytes == 4096)
        })?;
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")?;
        kill_worker(keeper)?;
        wait::until("what was published", ANSWER_MAX, || {
            Ok((site.get("d/last", &[])?.1 == b"last words\n").then_some(()))
        })?;
        wait::until("the end of its charge", wait::HANG, || {
            Ok(daemon.client().outboxes()?.outboxes.is_empty().then_some(()))
        })
    })
}

#[test]
fn its_process_is_killed_and_the_guest_goes_on() -> Result<()> {
    killed(Qemu::System)
}

#[test]
fn its_process_is_killed_and_the_guest_goes_on_qemu_10() -> Result<()> {
    killed(Qemu::Ten)
}

/// A request over which processes end again and again gets an error, and the mount goes on; and so it does after a reboot.
#[test]
fn a_request_that_kills_twice_gets_an_error() -> Result<()> {
    Lab::run("outbox-killed-twice", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, Qemu::System, "4M", 100)?;
        let keeper = wait_outbox(&daemon, "its process", |outbox| outbox.pid.is_some())?.pid.context("no process")?;
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count=8 2>/dev/null"))?;
        control.sh(&format!("(dd if={INPUT} of=/mnt/large bs=1M; echo status $?) > /tmp/log 2>&1 &"))?;
        for _ in 0..2 {
            wait_for_waiting_write(&daemon)?;
            kill_worker(keeper)?;
        }
        wait::until("the writer's end", ANSWER_MAX, || {
            Ok(control.sh("cat /tmp/log")?.contains("status").then_some(()))
        })?;
        let log = control.sh("cat /tmp/log")?;
        ensure!(log.contains("Input/output error") || log.contains("I/O error"), "{log}");
        control.sh("rm /mnt/large && echo more > /mnt/more")?;
        ensure!(site.get("more", &[])? == (200, b"more\n".to_vec()));

        // QEMU stops the device and goes on with it, and its process is killed before and after.
        for _ in 0..2 {
            let mut qmp = guest.qmp()?;
            qmp.execute("stop", json!({}))?;
            kill_worker(keeper)?;
            qmp.execute("cont", json!({}))?;
            ensure!(control.sh("cat /mnt/more")?.contains("more"), "nothing is read after stop and cont");
        }

        // The guest begins anew: another mount by the same process, and another kernel.
        control.sh("umount /mnt && mount -t virtiofs outbox /mnt")?;
        kill_worker(keeper)?;
        ensure!(control.sh("cat /mnt/more")?.contains("more"));
        guest.qmp()?.execute("system_reset", json!({}))?;
        // Before the next kernel knows its device.
        kill_worker(keeper)?;
        control.wait_ready()?;
        kill_worker(keeper)?;
        control.sh("mkdir -p /mnt && mount -t virtiofs outbox /mnt && echo anew > /mnt/anew")?;
        kill_worker(keeper)?;
        ensure!(control.sh("cat /mnt/more /mnt/anew")?.contains("anew"));
        ensure!(site.get("anew", &[])? == (200, b"anew\n".to_vec()));
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

/// Kills of the transmitter while clients fetch.
const TRANSMITTER_KILLS: usize = 6;
/// What clients fetch at most while it is killed, so that it happens in the midst of it.
const FETCH_RATE: &str = "3M";

/// Fetches so many bytes of a file and goes on where the reply was cut off, as often as it takes. How often it was.
fn fetch_whole(site: &Site, path: &str, to: &Path, bytes: u64, options: &[&str]) -> Result<u32> {
    let mut cut_off = 0;
    wait::until("the whole file", wait::HANG, || {
        let mut curl = site.curl(path, &["--fail", "--no-buffer", "--continue-at", "-"]);
        let status = curl.args(options).arg("--output").arg(to).stderr(Stdio::null()).status().context("run curl")?;
        // 18: less came than was promised, or the last chunk is missing.
        cut_off += u32::from(status.code() == Some(18));
        Ok(fs::metadata(to).is_ok_and(|stat| stat.len() >= bytes).then_some(cut_off))
    })
}

/// The transmitter is killed again and again while a client fetches a sealed file and another one what the guest writes meanwhile. Both
/// have every byte in the end, the guest's program notices nothing, and the process that serves stays.
fn transmitter_killed(qemu: Qemu) -> Result<()> {
    Lab::run("outbox-transmitter", 1, |lab| {
        let (site, daemon, guest, mut control) = Site::start(lab, qemu, "48M", 100)?;
        let keeper = wait_outbox(&daemon, "its process", |outbox| outbox.pid.is_some())?.pid.context("no process")?;
        let serves = worker(keeper)?.context("no process that serves")?;
        control.sh(&format!("dd if=/dev/urandom of={INPUT} bs=1M count={INPUT_MIB} 2>/dev/null"))?;
        let expected = guest_digest(&mut control, INPUT)?;
        control.sh(&format!("dd if={INPUT} of=/mnt/sealed bs=1M 2>/dev/null"))?;
        let files = [lab.dir().join("sealed"), lab.dir().join("grows")];
        let bytes = INPUT_MIB * MIB;
        let cut_off = std::thread::scope(|scope| {
            let sealed = scope.spawn(|| fetch_whole(&site, "sealed", &files[0], bytes, &["--limit-rate", FETCH_RATE]));
            let grows = scope.spawn(|| fetch_whole(&site, "grows", &files[1], bytes, &[]));
            control.send(&format!(
                "sh (i=0; while [ $i -lt 96 ]; do dd if={INPUT} bs=256k skip=$i count=1 2>/dev/null || exit 1; i=$((i+1)); done) \
                 > /mnt/grows"
            ))?;
            for kill in 0..TRANSMITTER_KILLS {
                let before = fs::metadata(&files[0]).map_or(0, |stat| stat.len());
                wait::until("more of the file", wait::HANG, || {
                    let more = fs::metadata(&files[0]).is_ok_and(|stat| stat.len() > before);
                    Ok((more || sealed.is_finished()).then_some(()))
                })?;
                println!("outbox-transmitter: kill {kill} at {before} bytes");
                kill_transmitter(keeper)?;
            }
            control.reply()?;
            let [sealed, grows] =
                [sealed, grows].map(|client| client.join().map_err(|_| anyhow::anyhow!("a client's thread")));
            Ok::<u32, anyhow::Error>(sealed?? + grows??)
        })?;
        ensure!(cut_off > 0, "no reply was cut off");
        for file in &files {
            ensure!(digest_of("cat", file)? == expected, "{} is wrong", file.display());
        }
        ensure!(guest_digest(&mut control, "/mnt/grows")? == expected, "the guest has lost bytes");
        ensure!(worker(keeper)? == Some(serves), "the process that serves was started again");

        // Readers of the one that was killed hold nothing back.
        wait::until("no reader", wait::HANG, || Ok((site.figure("readers")? == 0).then_some(())))?;
        control.sh("rm /mnt/sealed /mnt/grows")?;
        wait_outbox(&daemon, "memory that was given back", |outbox| {
            outbox.figures.is_some_and(|figures| figures.used_bytes == 0)
        })?;
        // It ends with the process that serves.
        let sends = child(keeper, true)?.context("no transmitter")?;
        kill_worker(keeper)?;
        wait::until("another transmitter", wait::HANG, || Ok(child(keeper, true)?.filter(|pid| *pid != sends)))?;
        control.sh("echo more > /mnt/more")?;
        wait::until("an answer", ANSWER_MAX, || Ok((site.get("more", &[])?.1 == b"more\n").then_some(())))?;
        kill_transmitter(keeper)?;
        wait::until("an answer", ANSWER_MAX, || Ok((site.get("more", &[])?.1 == b"more\n").then_some(())))?;
        control.send("poweroff")?;
        guest.finish()?;
        daemon.wait_gone("web1")
    })
}

#[test]
fn its_transmitter_is_killed_and_clients_go_on() -> Result<()> {
    transmitter_killed(Qemu::System)
}

#[test]
fn its_transmitter_is_killed_and_clients_go_on_qemu_10() -> Result<()> {
    transmitter_killed(Qemu::Ten)
}
