//! How the command starts the servers, with a stand-in for their program.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory with the command, and with a `pagoda-server` if there is to be one.
struct Installed(PathBuf);

impl Installed {
    fn new(name: &str) -> Installed {
        let dir = std::env::temp_dir().join(format!("pagoda-server-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("bin")).unwrap();
        let installed = Installed(dir);
        installed.install(Path::new(env!("CARGO_BIN_EXE_pagoda")), "bin/pagoda");
        installed
    }

    /// By another process: a file that this one had open for writing while a test beside this one starts a program could not
    /// be executed (ETXTBSY).
    fn install(&self, file: &Path, to: &str) {
        let status = Command::new("install").args(["-D", "-m", "755"]).arg(file).arg(self.0.join(to)).status();
        assert!(status.unwrap().success());
    }

    fn with_server(self, at: &str, script: &str) -> Installed {
        let file = self.0.join("script");
        std::fs::write(&file, script).unwrap();
        self.install(&file, at);
        self
    }

    fn pagoda(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.0.join("bin/pagoda"));
        command.args(words);
        command
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const SERVE: [&str; 6] = ["pool", "serve", "--size", "1G", "--listen", "127.0.0.1:0"];

/// Says its process number, what it inherits of a service manager, and its words; ends with a status of its own.
const TALKER: &str = "#!/bin/sh\necho $$ $NOTIFY_SOCKET\nfor word; do echo \"$word\"; done\nexit 7\n";

#[test]
fn the_command_becomes_the_server() {
    let table: [&[&str]; 3] = [
        &["--json", "--socket", "/no/socket", "pool", "serve", "--size", "1G", "--listen", "127.0.0.1", "--spin", "0"],
        &["disk", "export", "d", "--nbd", "/run/a b.sock", "--json"],
        &["pool", "try", "--size", "64M"],
    ];
    for pool_dir in ["bin/pagoda-server", "lib/pagoda/pagoda-server"] {
        let installed = Installed::new(&pool_dir.replace('/', "-")).with_server(pool_dir, TALKER);
        for words in table {
            let mut command = installed.pagoda(words);
            let child = command.env("NOTIFY_SOCKET", "@notify").stdout(Stdio::piped()).spawn().unwrap();
            let pid = child.id();
            let Output { status, stdout, .. } = child.wait_with_output().unwrap();
            assert_eq!(status.code(), Some(7), "{words:?}");
            assert_eq!(text(&stdout), format!("{pid} @notify\n{}\n", words.join("\n")), "{words:?}");
        }
    }
}

#[test]
fn without_the_server_the_command_says_what_to_do() {
    let installed = Installed::new("missing");
    let output = installed.pagoda(&SERVE).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let dirs = ["bin", "lib/pagoda"].map(|dir| installed.0.join(dir).display().to_string());
    for part in ["pagoda: pagoda-server", &dirs[0], &dirs[1], "make install"] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
    let installed = Installed::new("broken").with_server("bin/pagoda-server", "#!/no/such/interpreter\n");
    let output = installed.pagoda(&SERVE).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("pagoda: start ") && said.contains("bin/pagoda-server"), "{said}");
}

/// Help, completion and refusals are the command's.
#[test]
fn the_command_knows_the_servers_options() {
    let installed = Installed::new("options");
    let check = |words: &[&str], status: i32, expected: &[&str]| {
        let output = installed.pagoda(words).arg0("pagoda").output().unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {said}");
        assert!(expected.iter().all(|part| said.contains(part)), "{words:?}: {said}");
    };
    check(
        &["pool", "serve", "--help"],
        0,
        &["Usage: pagoda pool serve [OPTIONS]", "--on-disk <DIR>", "--workers <COUNT>"],
    );
    check(&["disk", "export", "--help"], 0, &["Usage: pagoda disk export [OPTIONS]", "--error-after <SECONDS>"]);
    check(&["pool", "try", "--help"], 0, &["--servers <COUNT>"]);
    check(&["completion", "bash"], 0, &["--on-disk", "--error-after"]);
    check(&["pool", "serve", "--size", "1G"], 2, &["--listen"]);
    check(&["disk", "export", "d"], 2, &["--nbd"]);
    check(&["pool", "try", "--servers", "1"], 2, &["2..=16"]);
}
