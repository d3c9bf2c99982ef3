//! memcached in the guest, and the program in Perl that loads it there.
//!
//! The load reads 95 % and writes 5 % of records of 1 KiB. Few records are asked for much oftener than the others: of 100,000 the
//! first hundredth gets 56 %, as in YCSB's default. The program looks at each record that it gets. The store is five sixteenths
//! of the guest's memory, below its DRAM. Beside it is a little more than as much memory again, which nobody uses. Both grow in
//! turns, so that neither is sent first or last: a move that goes by the order of addresses has no luck.
//!
//! The program says every 100 ms, by the guest's clock, how much it did. When the guest ran at its destination is known by the
//! host's clock. So both clocks are compared after the end of the load.

use std::fmt;

use anyhow::{Context, Result, ensure};
use testkit::results::report::median;

use super::Moves;
use crate::migrate::guest::{Common, Size};
use crate::restore::epoch_us;

/// Before the move, alone.
const BEFORE_S: u64 = 10;
/// From when memory begins to be sent: the move and a time after it.
const LOAD_S: u64 = 45;
const BUCKET_S: f64 = 0.1;
/// Buckets over which speed is looked at: with fewer the emulated CPU's own jitter is more than 5 %.
const WINDOW: usize = 5;
const RECOVERED: f64 = 0.95;
/// What the guest's program looks after, to have something that is verified.
const VERIFIED_MIB: u64 = 16;
/// What a record takes in memcached.
const RECORD_BYTES: u64 = 1184;

/// Where the guest has the program and the socket.
const PROGRAM: &str = "/tmp/load.pl";
/// `fill RECORDS COLD_MIB`, which keeps the cold memory, or `load RECORDS SECONDS`. A value is a part of a program, so it compresses as such things do.
const LINES: &[&str] = &[
    r#"($m,$n,$s)=@ARGV;$st=int($n*.618)|1;socket(S,1,1,0)&&connect(S,pack("Sa108",1,"/tmp/m"))||die"connect: $!";"#,
    r#"open(F,"/bin/perl")||die;read(F,$c,3000000)>2999999||die"corpus";"#,
    r#"sub now{my $t=pack"x16";syscall(228,1,$t);my($s,$n)=unpack"qq",$t;$s*1000+int($n/1e6)}"#,
    r#"sub val{substr($c,($_[0]*977)%2900000,1024)}"#,
    r#"sub put{"set k$_[0] 0 0 1024 noreply\r\n".val($_[0])."\r\n"}"#,
    r#"sub out{my $b=$_[0];while(length $b){my $w=syswrite(S,$b)||die"write";substr($b,0,$w)=""}}"#,
    r#"sub get{my $i=$_[0];out("get k$i\r\n");my $r="";my $l=length("VALUE k$i 0 1024\r\n");"#,
    r#"do{sysread(S,$r,4096,length $r)||die"read";$r eq"END\r\n"&&die"no k$i"}until length($r)>=$l+1031;"#,
    r#"substr($r,$l,1024)eq val($i)||die"wrong k$i"}"#,
    r#"if($m eq"fill"){for(0..$n-1){$b.=put($_);if(length $b>60000){out($b);$b=""}"#,
    r#"push@h,substr($c,$_*7919%1900000,1<<20)if int($_*$s/$n)>int(($_-1)*$s/$n)}"#,
    r#"out($b);get($_)for(0,$n>>1,$n-1);exit if fork;close$_ for(STDIN,STDOUT,STDERR);sleep 9 while 1}"#,
    r#"$e=now()+$s*1000;$k=int(now()/100);while(($t=now())<$e){if(int($t/100)>$k){$l.="$k $o\n";$k=int($t/100);$o=0}"#,
    r#"$i=(int($n*rand()**8)*$st)%$n;rand()<.05?out(put($i)):get($i);$o++}print$l"#,
];
/// The guest's clock, as the program reads it.
const CLOCK: &str =
    r#"sh perl -e '$t=pack"x16";syscall(228,1,$t);($s,$n)=unpack"qq",$t;print$s*1000+int($n/1e6),"\n"'"#;

/// How the store was after a move.
pub struct Recovery {
    /// From when the guest ran there until it had its speed again.
    pub recovered_s: f64,
    /// Work done in the first second and in the first ten, against before.
    pub first_s_share: f64,
    pub ten_s_share: f64,
    /// By seconds after that.
    pub points: Vec<[f64; 2]>,
    before_per_s: f64,
}

impl fmt::Display for Recovery {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recovered_s, first_s_share, ten_s_share, before_per_s, .. } = self;
        write!(
            out,
            "95 % after {recovered_s:.1} s; {:.0} % in the first second, {:.0} % in ten; {before_per_s:.0}/s before",
            first_s_share * 100.0,
            ten_s_share * 100.0
        )
    }
}

/// What the store has, in MiB.
pub fn mib(size: Size) -> u64 {
    size.memory_mib / 16 * 5
}

fn cold_mib(size: Size) -> u64 {
    size.work_mib() - mib(size) - VERIFIED_MIB
}

/// Has a guest that has just booted run the store, moves it into half or all under load, and looks how fast it is.
///
/// # Errors
/// It does not run or move, or a record is wrong.
pub fn measure(side: &mut dyn Moves, common: Common<'_>, half: bool) -> Result<Recovery> {
    let size = common.size;
    let records = (mib(size) << 20) / RECORD_BYTES;
    // In place of what it has filled when it booted.
    side.command(&format!("fill {VERIFIED_MIB}"))?;
    side.command("sh mkdir -p /etc && printf 'root:x:0:0::/:\\n' > /etc/passwd")?;
    let memory_mib = mib(size) + mib(size) / 8;
    side.command(&format!(
        "sh memcached -d -u root -m {memory_mib} -t 1 -s /tmp/m </dev/null >/dev/null 2>&1; sleep 1"
    ))?;
    for line in LINES {
        side.command(&format!("sh printf '%s\\n' '{line}' >> {PROGRAM}"))?;
    }
    side.command(&format!("sh perl {PROGRAM} fill {records} {}", cold_mib(size))).context("fill memcached")?;
    let before =
        buckets(&side.command(&format!("sh perl {PROGRAM} load {records} {BEFORE_S}")).context("load memcached")?);
    let counts: Vec<f64> = before.iter().map(|(_, done)| *done).collect();
    let usual = median(&counts).filter(|usual| *usual > 0.0).context("memcached did nothing")?;
    let load = format!("sh perl {PROGRAM} load {records} {LOAD_S}");
    let (resumed_us, said) = side.moves(half, Some(&load)).context("move under load")?;
    let offset_ms = clock_offset_ms(side)?;
    side.command("verify").context("its memory is right")?;
    recovery(&buckets(&said), resumed_us / 1e3 - offset_ms, usual)
}

/// What the host's clock is beyond the guest's, in milliseconds.
fn clock_offset_ms(side: &mut dyn Moves) -> Result<f64> {
    let mut best = (f64::INFINITY, 0.0);
    for _ in 0..5 {
        let began = epoch_us()? / 1e3;
        let said = side.command(CLOCK)?;
        let ended = epoch_us()? / 1e3;
        let guest: f64 = output(&said).next().and_then(|text| text.parse().ok()).context("the guest's clock")?;
        if ended - began < best.0 {
            best = (ended - began, (began + ended) / 2.0 - guest);
        }
    }
    Ok(best.1)
}

fn output(lines: &[String]) -> impl Iterator<Item = &str> {
    lines.iter().filter_map(|line| Some(line.split_once("output ")?.1.trim()))
}

/// The number of each tenth of a second by the guest's clock, and what was done in it.
fn buckets(lines: &[String]) -> Vec<(u64, f64)> {
    let of = |text: &str| -> Option<(u64, f64)> {
        let (number, done) = text.split_once(' ')?;
        Some((number.parse().ok()?, done.parse().ok()?))
    };
    output(lines).filter_map(of).collect()
}

/// Buckets that are missing did nothing: the program waited.
fn recovery(buckets: &[(u64, f64)], resumed_ms: f64, usual: f64) -> Result<Recovery> {
    let first = (resumed_ms / 1e3 / BUCKET_S).ceil() as u64;
    let last = buckets.last().context("what the guest did")?.0;
    ensure!(last > first + WINDOW as u64, "the load has ended before the move");
    let done = |number: u64| buckets.iter().find(|(at, _)| *at == number).map_or(0.0, |(_, done)| *done);
    let shares: Vec<f64> = (first..last).map(|number| done(number) / usual).collect();
    let mean = |shares: &[f64]| shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    let recovered = shares.windows(WINDOW).position(|window| mean(window) >= RECOVERED);
    // What never had its speed again took at least as long as was looked at. The time is up to the end of the window.
    let recovered_s = recovered.map_or(shares.len(), |at| at + WINDOW) as f64 * BUCKET_S;
    let within = |seconds: f64| mean(&shares[..shares.len().min((seconds / BUCKET_S) as usize)]);
    Ok(Recovery {
        recovered_s,
        first_s_share: within(1.0),
        ten_s_share: within(10.0),
        points: shares.chunks(WINDOW).enumerate().map(|(at, part)| [at as f64 * 0.5, mean(part)]).collect(),
        before_per_s: usual / BUCKET_S,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_counts_from_the_move_and_stalls_are_nothing() {
        // 10 a bucket before; the guest runs at 1.0 s; nothing for 0.5 s, half of it for 1 s, then all.
        let done = |number: u64| match number {
            0..10 => 10.0,
            10..15 => 0.0,
            15..25 => 5.0,
            _ => 10.0,
        };
        let buckets: Vec<_> = (0..60).filter(|n| done(*n) > 0.0).map(|number| (number, done(number))).collect();
        let recovery = recovery(&buckets, 1000.0, 10.0).unwrap();
        assert!((recovery.recovered_s - 2.0).abs() < 1e-9, "{}", recovery.recovered_s);
        assert!((recovery.first_s_share - 0.25).abs() < 1e-9, "{}", recovery.first_s_share);
        assert!(super::recovery(&buckets, 9000.0, 10.0).is_err());
    }

    #[test]
    fn lines_of_the_guest_are_read() {
        let lines =
            ["PAGODA output 271 42".to_owned(), "PAGODA output x".to_owned(), "PAGODA reply ok bad=0".to_owned()];
        assert_eq!(buckets(&lines), [(271, 42.0)]);
    }

    #[test]
    fn the_program_fits_into_commands() {
        // A command of the guest has at most 1024 bytes, and the shell's quotes end at the first of these.
        for line in LINES {
            assert!(line.len() < 900 && !line.contains('\''), "{line}");
        }
    }
}
