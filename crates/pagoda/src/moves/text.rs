//! What users read of moves: plans, progress and ends in words.

use std::fmt::Write;

use pagoda_api::{MoveArbiter, MoveDirection, MovePlan, MoveRemote, MoveRoom, MoveStatus, RemoteFate};

use crate::output::{Side, Table, lines_text};
use crate::units::{format_rate, format_size};

/// `moved web1 to host2: 2.1 GiB in 19 s, pause 24 ms`.
pub fn moved(status: &MoveStatus) -> String {
    let MoveStatus { vm, host, .. } = status;
    let (sent, took) = (long_size(status.sent_bytes), span(status.elapsed_ms));
    let pause = status.downtime_ms.map_or(String::new(), |ms| format!(", pause {ms} ms"));
    let disks = match status.disk_files.is_empty() {
        true => String::new(),
        false => format!(", and {} of disks", long_size(status.disk_copied_bytes)),
    };
    let left: String =
        status.disk_files.iter().map(|file| format!("its disk here is used no more: {file}\n")).collect();
    format!("moved {vm} to {host}: {sent}{disks} in {took}{pause}\n{left}")
}

/// How far it is, for one line of a terminal.
pub fn line(status: &MoveStatus) -> String {
    let mut text = format!("{} {} {}: {}", status.vm, to_or_from(status), status.host, status.phase.word());
    // Writing into a String cannot fail.
    let mut add = |part: std::fmt::Arguments<'_>| {
        let _ = text.write_fmt(part);
    };
    if status.round > 0 {
        add(format_args!(", round {}", status.round));
    }
    if status.round > 0 || status.sent_bytes > 0 {
        let [sent, total, left] = [status.sent_bytes, status.total_bytes, status.left_bytes].map(format_size);
        add(format_args!(", {sent}/{total} sent, {left} left"));
    }
    if status.disk_total_bytes > 0 {
        let [copied, total] = [status.disk_copied_bytes, status.disk_total_bytes].map(format_size);
        add(format_args!(", {copied}/{total} of disks copied"));
    }
    if let Some(rate) = status.bytes_per_second {
        add(format_args!(", {}", format_rate(rate)));
    }
    if let Some(eta_ms) = status.eta_ms {
        add(format_args!(", {} to go", span(eta_ms)));
    }
    if let Some(waits) = &status.waits {
        add(format_args!("; {waits}"));
    }
    if status.write_delay_us > 0 {
        add(format_args!("; writers wait {}", write_delay(status.write_delay_us)));
    }
    text
}

/// All that is known of a move.
pub fn status(status: &MoveStatus) -> String {
    let mut lines = vec![
        ("vm", status.vm.clone()),
        (to_or_from(status), status.host.clone()),
        ("phase", status.phase.word().to_owned()),
    ];
    if status.is_over() {
        lines.push(("outcome", status.outcome.word().to_owned()));
    }
    lines.extend(status.why.clone().map(|why| ("why", why)));
    lines.push(("sent", format!("{} of {}", format_size(status.sent_bytes), format_size(status.total_bytes))));
    if status.spared_bytes > 0 {
        lines.push(("zeros", format!("{}, not sent", format_size(status.spared_bytes))));
    }
    if status.pool_bytes > 0 {
        lines.push(("into the pool", format!("{}, not sent", format_size(status.pool_bytes))));
    }
    if status.disk_total_bytes > 0 {
        let [copied, total] = [status.disk_copied_bytes, status.disk_total_bytes].map(format_size);
        lines.push(("disks", format!("{copied} of {total} copied")));
    }
    lines.extend(status.disk_files.iter().map(|file| ("disk", file.clone())));
    lines.extend(ratio(status).map(|ratio| ("compression", ratio)));
    lines.push(("left", format_size(status.left_bytes)));
    if status.round > 0 {
        lines.push(("round", status.round.to_string()));
    }
    lines.extend(status.bytes_per_second.map(|rate| ("rate", format_rate(rate))));
    lines.push(("guest writes", format_rate(status.written_bytes_per_second)));
    lines.push(("took", span(status.elapsed_ms)));
    lines.extend(status.eta_ms.map(|ms| ("to go", span(ms))));
    lines.extend(status.expected_downtime_ms.map(|ms| ("pause if now", format!("{ms} ms"))));
    lines.extend(status.downtime_ms.map(|ms| ("pause", format!("{ms} ms"))));
    lines.extend(status.waits.clone().map(|waits| ("waits for", waits)));
    lines.extend(status.arbiter.as_ref().map(|arbiter| ("arbiter", in_words(arbiter))));
    if status.write_delay_us > 0 {
        lines.push(("writers wait", write_delay(status.write_delay_us)));
    }
    lines_text(&lines)
}

pub fn table(moves: &[MoveStatus]) -> Table {
    let mut table = Table::new(&[
        ("VM", Side::Left),
        ("HOST", Side::Left),
        ("STATE", Side::Left),
        ("ROUND", Side::Right),
        ("SENT", Side::Right),
        ("LEFT", Side::Right),
        ("TOTAL", Side::Right),
        ("RATE", Side::Right),
        ("TOOK", Side::Right),
        ("TO GO", Side::Right),
        ("PAUSE", Side::Right),
    ]);
    let cell = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for status in moves {
        table.row(vec![
            status.vm.clone(),
            format!("{} {}", to_or_from(status), status.host),
            if status.is_over() { status.outcome.word() } else { status.phase.word() }.to_owned(),
            status.round.to_string(),
            format_size(status.sent_bytes),
            format_size(status.left_bytes),
            format_size(status.total_bytes),
            cell(status.bytes_per_second.map(format_rate)),
            span(status.elapsed_ms),
            cell(status.eta_ms.map(span)),
            cell(status.downtime_ms.map(|ms| format!("{ms} ms"))),
        ]);
    }
    table
}

/// `fits: 512M DRAM + 3.2G swap; sends about 2.1G (rest zero or given back); 19 s at 1 Gbit/s, pause 25 ms`.
pub fn plan(plan: &MovePlan) -> String {
    let mut text = match plan.fits {
        true => format!("fits: {}", room(plan.needs)),
        false => format!("does not fit: needs {}, and {} is not free", room(plan.needs), room(plan.lacks)),
    };
    // Writing into a String cannot fail.
    let _ = write!(text, "; sends about {} (rest zero or given back)", format_size(plan.sends_bytes));
    if plan.pool_bytes > 0 {
        let _ = write!(text, ", {} into the pool", format_size(plan.pool_bytes));
    }
    if plan.disk_bytes > 0 {
        let _ = write!(text, ", and {} of disks", format_size(plan.disk_bytes));
    }
    text.push_str("; ");
    let rate = format_rate(plan.bytes_per_second);
    match (plan.time_ms, plan.downtime_ms) {
        (Some(time_ms), Some(downtime_ms)) => {
            let _ = write!(text, "{} at {rate}, pause {downtime_ms} ms", span(time_ms));
        }
        _ => {
            let _ = write!(text, "never ends at {rate}");
        }
    }
    if !plan.keeps_downtime {
        text.push_str(", longer than the downtime");
    }
    if let Some(MoveRemote { bytes, fate }) = plan.remote {
        let fate = match fate {
            RemoteFate::HandedOver => "is handed over, and not sent",
            RemoteFate::Copied => "is copied, and not kept there: the map of its remote tier is a file of this host",
        };
        let _ = write!(text, "; {} in the pool {fate}", format_size(bytes));
    }
    // Nobody has to be told of one that is neither configured nor there.
    if let Some(arbiter) = plan.arbiter.as_ref().filter(|arbiter| arbiter.decides) {
        let _ = write!(text, "; {}", arbiter.says);
    }
    text + "\n"
}

/// `decides: etcd names host2`.
fn in_words(MoveArbiter { decides, says }: &MoveArbiter) -> String {
    format!("{}: {says}", if *decides { "decides" } else { "none" })
}

/// `400 us for each first write to a page`.
fn write_delay(us: u64) -> String {
    format!("{us} us for each first write to a page")
}

/// `1.2G less, 2.1 to 1`.
fn ratio(status: &MoveStatus) -> Option<String> {
    let MoveStatus { sent_bytes: sent, saved_bytes: saved, .. } = *status;
    let ratio = (sent as f64 + saved as f64) / sent.max(1) as f64;
    (saved > 0).then(|| format!("{} less, {ratio:.1} to 1", format_size(saved)))
}

pub fn room(room: MoveRoom) -> String {
    let parts = [(room.dram_bytes, "DRAM"), (room.swap_bytes, "swap")];
    let parts = parts.iter().filter(|(bytes, _)| *bytes > 0);
    let parts: Vec<String> = parts.map(|(bytes, name)| format!("{} {name}", format_size(*bytes))).collect();
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(" + ") }
}

fn to_or_from(status: &MoveStatus) -> &'static str {
    match status.direction {
        MoveDirection::Out => "to",
        MoveDirection::In => "from",
    }
}

/// Seconds, with a decimal below ten, and whole minutes from ten on.
pub fn span(ms: u64) -> String {
    match ms {
        0..9_950 => format!("{:.1} s", ms as f64 / 1000.0),
        9_950..600_000 => format!("{} s", ms.div_ceil(1000)),
        _ => format!("{} min", ms.div_ceil(60_000)),
    }
}

/// As [`format_size`], with the whole unit: `2.1 GiB`.
fn long_size(bytes: u64) -> String {
    let short = format_size(bytes);
    let number = short.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    match &short[number.len()..] {
        "" => format!("{number} B"),
        unit => format!("{number} {unit}iB"),
    }
}

#[cfg(test)]
mod tests {
    use pagoda_api::{MoveOutcome, MovePhase};

    use super::*;
    use crate::moves::tests::sample;

    #[test]
    fn how_far_it_is() {
        let expected = "web1 to host2: copying, round 2, 1.2G/4G sent, 819M left, 936 Mbit/s, 7.3 s to go; \
                        the guest writes as fast as the link sends";
        assert_eq!(line(&sample()), expected);
        let slowed = MoveStatus { write_delay_us: 400, ..sample() };
        assert_eq!(line(&slowed), format!("{expected}; writers wait 400 us for each first write to a page"));
        assert!(
            status(&slowed).contains("writers wait   400 us for each first write to a page\n"),
            "{}",
            status(&slowed)
        );
        let first = MoveStatus {
            phase: MovePhase::Preparing,
            round: 0,
            sent_bytes: 0,
            bytes_per_second: None,
            eta_ms: None,
            waits: None,
            direction: MoveDirection::In,
            ..sample()
        };
        assert_eq!(line(&first), "web1 from host2: preparing");
    }

    #[test]
    fn how_it_was() {
        let ended = MoveStatus {
            phase: MovePhase::Over,
            outcome: MoveOutcome::Moved,
            sent_bytes: 2254857830,
            elapsed_ms: 18_600,
            downtime_ms: Some(24),
            eta_ms: None,
            ..sample()
        };
        assert_eq!(moved(&ended), "moved web1 to host2: 2.1 GiB in 19 s, pause 24 ms\n");
        let disks = MoveStatus {
            disk_total_bytes: 3 << 30,
            disk_copied_bytes: 3 << 30,
            disk_files: vec!["/srv/a".into()],
            ..ended.clone()
        };
        let expected = "moved web1 to host2: 2.1 GiB, and 3 GiB of disks in 19 s, pause 24 ms\nits disk here is used no more: /srv/a\n";
        assert_eq!(moved(&disks), expected);
        assert!(status(&disks).contains("disks          3G of 3G copied\n"), "{}", status(&disks));
        assert!(line(&disks).contains(", 3G/3G of disks copied"), "{}", line(&disks));
        let expected = "\
VM    HOST      STATE    ROUND  SENT  LEFT  TOTAL        RATE    TOOK  TO GO  PAUSE
web1  to host2  moved        2  2.1G  819M     4G  936 Mbit/s    19 s      -  24 ms
web1  to host2  copying      2  1.2G  819M     4G  936 Mbit/s    12 s  7.3 s      -
";
        let said = table(&[ended, sample()]).render();
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&said), words(expected), "{said}");
        let said = status(&MoveStatus { outcome: MoveOutcome::GivenUp, why: Some("cancelled".into()), ..sample() });
        for part in ["outcome        given up\n", "why            cancelled\n", "pause if now   7400 ms\n"] {
            assert!(said.contains(part), "{part:?} in {said}");
        }
        assert!(!said.contains("zeros") && !said.contains("compression"), "{said}");
        for (decides, expected) in [(true, "arbiter        decides: so\n"), (false, "arbiter        none: so\n")] {
            let arbiter = Some(MoveArbiter { decides, says: "so".into() });
            let said = status(&MoveStatus { arbiter, ..sample() });
            assert!(said.contains(expected), "{said}");
        }
        let said = status(&MoveStatus { spared_bytes: 3 << 30, saved_bytes: 1288490188, ..sample() });
        assert!(!said.contains("into the pool"), "{said}");
        let split = status(&MoveStatus { pool_bytes: 5 << 30, ..sample() });
        assert!(split.contains("into the pool  5G, not sent\n"), "{split}");
        for part in ["zeros          3G, not sent\n", "compression    1.2G less, 2.0 to 1\n"] {
            assert!(said.contains(part), "{part:?} in {said}");
        }
    }

    #[test]
    fn what_would_come_of_it() {
        let fits = MovePlan {
            vm: "web1".into(),
            host: "host2".into(),
            fits: true,
            needs: MoveRoom { dram_bytes: 512 << 20, swap_bytes: 3435973837 },
            lacks: MoveRoom::default(),
            reserves: MoveRoom::default(),
            free: MoveRoom::default(),
            sends_bytes: 2254857830,
            spared_bytes: 1 << 31,
            pool_bytes: 0,
            disk_bytes: 0,
            bytes_per_second: 125_000_000,
            time_ms: Some(18_100),
            downtime_ms: Some(25),
            keeps_downtime: true,
            remote: None,
            arbiter: None,
        };
        let expected =
            "fits: 512M DRAM + 3.2G swap; sends about 2.1G (rest zero or given back); 19 s at 1 Gbit/s, pause 25 ms\n";
        assert_eq!(plan(&fits), expected);
        let lacks = MoveRoom { dram_bytes: 0, swap_bytes: 1 << 30 };
        let said = plan(&MovePlan { fits: false, lacks, time_ms: None, keeps_downtime: false, ..fits.clone() });
        let expected = "does not fit: needs 512M DRAM + 3.2G swap, and 1G swap is not free; sends about 2.1G (rest zero or given \
                        back); never ends at 1 Gbit/s, longer than the downtime\n";
        assert_eq!(said, expected);
        let said = plan(&MovePlan { pool_bytes: 3 << 30, ..fits.clone() });
        assert!(said.contains("sends about 2.1G (rest zero or given back), 3G into the pool; 19 s at"), "{said}");
        let said = plan(&MovePlan { disk_bytes: 3 << 30, ..fits.clone() });
        assert!(said.contains("sends about 2.1G (rest zero or given back), and 3G of disks; 19 s at"), "{said}");
        let with = |fate| MovePlan { remote: Some(MoveRemote { bytes: 2 << 30, fate }), ..fits.clone() };
        let said = plan(&with(RemoteFate::HandedOver));
        assert!(said.ends_with("pause 25 ms; 2G in the pool is handed over, and not sent\n"), "{said}");
        let said = plan(&with(RemoteFate::Copied));
        assert!(said.contains("2G in the pool is copied"), "{said}");
        let with = |decides| MovePlan { arbiter: Some(MoveArbiter { decides, says: "etcd".into() }), ..fits.clone() };
        let said = [true, false].map(|decides| plan(&with(decides)));
        assert!(said[0].ends_with("pause 25 ms; etcd\n") && said[1].ends_with("pause 25 ms\n"), "{said:?}");
        assert_eq!(room(MoveRoom::default()), "nothing");
    }

    #[test]
    fn spans() {
        let check = |ms: u64, expected: &str| assert_eq!(span(ms), expected);
        check(0, "0.0 s");
        check(1_940, "1.9 s");
        check(9_949, "9.9 s");
        check(9_950, "10 s");
        check(599_001, "600 s");
        check(600_000, "10 min");
        assert_eq!((long_size(512), long_size(3 << 29)), ("512 B".to_owned(), "1.5 GiB".to_owned()));
    }
}
