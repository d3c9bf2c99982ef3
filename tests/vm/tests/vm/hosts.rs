//! Two daemons that trust each other, or do not.

use std::fs;
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use pagoda_api::{ClientError, ErrorCode, HostList, TrustedHost};
use vm_tests::{Daemon, DaemonOptions, Folios, Lab, wait};

/// A daemon that listens on an address of the loopback that no other test has.
fn host(lab: &Lab) -> Result<(Rc<Daemon>, String)> {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let (pid, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let address = format!("127.{}.{}.{number}:7075", 1 + (pid >> 8) % 254, pid % 256);
    let config = lab.dir().join(format!("host{number}.toml"));
    fs::write(&config, format!("[hosts]\nlisten = \"{address}\"\n")).context("write the configuration")?;
    let more = vec!["--config".to_owned(), config.display().to_string()];
    let daemon = lab.daemon_with(DaemonOptions { more, ..DaemonOptions::new(Folios::Small) })?;
    wait::until(&format!("{address} is listened on"), wait::HANG, || Ok(TcpStream::connect(&address).ok().map(drop)))?;
    Ok((daemon, address))
}

fn trust(who: &Daemon, name: &str, of: &HostList, address: &str) -> Result<HostList> {
    let host = TrustedHost { name: name.to_owned(), key: of.own.key.clone(), address: address.to_owned() };
    Ok(who.client().trust(&host)?)
}

fn refusal<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Result<(ErrorCode, String)> {
    match answer {
        Err(ClientError::Refused(error)) => Ok((error.code, format!("{} {:?}", error.message, error.hint))),
        other => anyhow::bail!("not refused: {other:?}"),
    }
}

#[test]
fn hosts_that_trust_each_other_ask_each_other() -> Result<()> {
    Lab::run("two hosts", 0, |lab| {
        let ((one, one_at), (other, other_at)) = (host(lab)?, host(lab)?);
        let (of_one, of_other) = (one.client().hosts()?, other.client().hosts()?);
        ensure!(of_one.own.key != of_other.own.key && of_one.own.listen.as_ref() == Some(&one_at), "{of_one:?}");
        ensure!(refusal(one.client().ping("host2"))?.0 == ErrorCode::NoSuchHost, "nobody is trusted yet");

        trust(&one, "host2", &of_other, &other_at)?;
        let (code, why) = refusal(one.client().ping("host2"))?;
        let key = &of_one.own.key;
        ensure!(code == ErrorCode::Unreachable && why.contains("does not trust") && why.contains(key), "{why}");

        trust(&other, "host1", &of_one, &one_at)?;
        let ping = one.client().ping("host2")?;
        println!("{ping:?}");
        ensure!(ping.look.memory_free_bytes > 0 && ping.look.swap_free_bytes > 0, "{ping:?}");
        ensure!(ping.bytes_per_second > 0 && ping.look.vms == 0, "{ping:?}");
        other.client().ping("host1").context("the other way round")?;

        // Another one at the address, with the wrong key.
        trust(&one, "host3", &HostList { own: of_one.own.clone(), ..HostList::default() }, &other_at)
            .err()
            .context("a host does not trust itself")?;
        let mut wrong = of_other.clone();
        wrong.own.key = "5".repeat(64);
        trust(&one, "host3", &wrong, &other_at)?;
        let (code, why) = refusal(one.client().ping("host3"))?;
        ensure!(code == ErrorCode::Unreachable && why.contains("closed the connection"), "{why}");

        // What was trusted is known to the next daemon, and the key stays.
        other.kill9()?;
        let (code, why) = refusal(one.client().ping("host2"))?;
        ensure!(code == ErrorCode::Unreachable, "{why}");
        other.start_again()?;
        wait::until("the other daemon listens again", wait::HANG, || Ok(one.client().ping("host2").ok()))?;
        other.client().untrust("host1")?;
        ensure!(refusal(one.client().ping("host2"))?.1.contains("does not trust"), "it is not trusted any more");
        ensure!(refusal(other.client().untrust("host1").map(drop))?.0 == ErrorCode::NoSuchHost, "once");

        let said = one.run_cli(&["host", "ls", "--json"])?;
        let list: HostList = serde_json::from_slice(&said.stdout)?;
        let names: Vec<&str> = list.hosts.iter().map(|host| host.name.as_str()).collect();
        ensure!(names == ["host2", "host3"], "{list:?}");
        Ok(())
    })
}

/// Whoever connects and says nothing, or anything, costs a thread for some seconds and no more.
#[test]
fn strangers_are_let_go() -> Result<()> {
    Lab::run("strangers", 0, |lab| {
        let ((one, _), (other, other_at)) = (host(lab)?, host(lab)?);
        let (of_one, of_other) = (one.client().hosts()?, other.client().hosts()?);
        trust(&one, "host2", &of_other, &other_at)?;
        trust(&other, "host1", &of_one, "10.0.0.1")?;
        let silent: Vec<TcpStream> = (0..80).map(|_| Ok(TcpStream::connect(&other_at)?)).collect::<Result<_>>()?;
        for mut stream in &silent[..10] {
            // It may have been closed already.
            let _ = std::io::Write::write_all(&mut stream, &[0x55; 300]);
        }
        wait::until("a host that is trusted is let in again", wait::HANG, || Ok(one.client().ping("host2").ok()))?;
        drop(silent);
        Ok(())
    })
}
