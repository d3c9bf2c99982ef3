//! Crates that compute and do nothing else: no socket, file, thread or clock, and no chance but what they are given.
//!
//! What such a crate may name of other crates, the standard library and macros among them, is a list of what is known to be
//! safe. So a new way to reach the system is refused as long as nobody has looked at it. Tests may use anything.

use anyhow::Result;

use super::Source;
use super::code::{Token, code_of, line_of, tokens, without_tests};
use super::imports::product_files;
use super::manifests::{Manifest, Needed, members};

/// Pure crates, each with what it may use of other crates: whole crates, or modules and items of them.
const PURE: [(&str, &[&str]); 4] = [
    ("pagoda-core", &["thiserror"]),
    ("pagoda-move", &["pagoda_core", "thiserror"]),
    ("pagoda-outbox", &[]),
    (
        "rmap",
        &[
            "aws_lc_rs::aead",
            "aws_lc_rs::constant_time",
            "aws_lc_rs::hmac",
            "aws_lc_rs::signature",
            "smallvec",
            "snow",
            "thiserror",
        ],
    ),
];

/// What every pure crate may use of `std`, and of `core` and `alloc` by the same names. Of a module that is not safe as a
/// whole, its items.
const STD: [&str; 47] = [
    "array",
    "borrow",
    "cell",
    "char",
    "cmp",
    "collections::BTreeMap",
    "collections::BTreeSet",
    "collections::BinaryHeap",
    "collections::HashMap",
    "collections::HashSet",
    "collections::VecDeque",
    "collections::btree_map",
    "collections::hash_map::Entry",
    "convert",
    "error::Error",
    "fmt",
    "hash::Hash",
    "hash::Hasher",
    "io::Error",
    "io::ErrorKind",
    "io::Result",
    "iter",
    "marker",
    "mem",
    "net::IpAddr",
    "net::Ipv4Addr",
    "net::Ipv6Addr",
    "net::SocketAddr",
    "net::SocketAddrV4",
    "net::SocketAddrV6",
    "num",
    "ops",
    "option",
    "rc",
    "result",
    "slice",
    "str",
    "string",
    // Data that several threads of a driver share. What waits for another thread's work is not here: channels, conditions.
    "sync::Arc",
    "sync::LazyLock",
    "sync::Mutex",
    "sync::MutexGuard",
    "sync::OnceLock",
    "sync::PoisonError",
    "sync::atomic",
    "time::Duration",
    "vec",
];

/// Macros of other crates. Those that print or take in other files are not here.
const MACROS: [&str; 14] = [
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "debug_assert_eq",
    "debug_assert_ne",
    "format",
    "matches",
    "panic",
    "smallvec",
    "unreachable",
    "vec",
    "write",
    "writeln",
];

/// What pure crates use and may not.
///
/// # Errors
/// A `Cargo.toml` is no TOML.
pub fn check(sources: &[Source]) -> Result<Vec<String>> {
    let members = members(sources)?;
    let mut complaints = Vec::new();
    for (name, allowed) in PURE {
        match members.iter().find(|member| member.name == name) {
            Some(member) => complaints.extend(check_crate(member, allowed, sources)),
            None => complaints.push(format!("{name}: no such crate, take it off the list in xtask/src/tidy/pure.rs")),
        }
    }
    Ok(complaints)
}

fn check_crate(member: &Manifest, allowed: &[&str], sources: &[Source]) -> Vec<String> {
    let Manifest { name, directory, dependencies } = member;
    let advice = format!("{name} is pure: put this into a crate beside it, or on the list in xtask/src/tidy/pure.rs");
    let mut complaints = Vec::new();
    let of_crate = |name: &str| name.replace('-', "_");
    for (dependency, _) in dependencies.iter().filter(|(_, needed)| *needed == Needed::Always) {
        if !allowed.iter().any(|path| root_of(path) == of_crate(dependency)) {
            complaints.push(format!("{directory}Cargo.toml: {dependency}. {advice}"));
        }
    }
    // It would run while the crate is compiled.
    if sources.iter().any(|source| source.path == format!("{directory}build.rs")) {
        complaints.push(format!("{directory}build.rs. {advice}"));
    }
    let files: Vec<(&Source, String)> = product_files(sources, &format!("{directory}src/"))
        .into_iter()
        .map(|(source, _)| (source, without_tests(&code_of(&source.text))))
        .collect();
    let own_macros: Vec<&str> = files.iter().flat_map(|(_, code)| macros_defined(code)).collect();
    let others: Vec<String> = dependencies
        .iter()
        .map(|(name, _)| of_crate(name))
        .chain(["std", "core", "alloc"].map(str::to_owned))
        .collect();
    for (source, code) in &files {
        let paths = Paths::of(code)
            .into_iter()
            .filter(|(_, path)| others.iter().any(|other| path[0] == other) && !is_allowed(path, allowed));
        let paths = paths.map(|(at, path)| (at, path.join("::")));
        let found = paths.chain(other_ways(code, &own_macros));
        complaints.extend(found.map(|(at, what)| format!("{}:{}: {what}. {advice}", source.path, line_of(code, at))));
    }
    complaints
}

/// The crate that a path leads into.
fn root_of(path: &str) -> &str {
    path.split("::").next().unwrap_or(path)
}

/// Whether `path` is on the list, or leads to something inside what is on it.
fn is_allowed(path: &[&str], allowed: &[&str]) -> bool {
    let is_inside = |path: &[&str], outer: &str| {
        let mut names = path.iter();
        outer.split("::").all(|name| names.next() == Some(&name))
    };
    match path {
        ["std" | "core" | "alloc", inside @ ..] => STD.iter().any(|outer| is_inside(inside, outer)),
        path => allowed.iter().any(|outer| is_inside(path, outer)),
    }
}

/// Names of the macros that `code` defines.
fn macros_defined(code: &str) -> Vec<&str> {
    let all: Vec<Token<'_>> = tokens(code).map(|(_, token)| token).collect();
    let name = |window: &[Token<'_>]| matches!(window[..2], [Token::Word("macro_rules"), Token::Other('!')]);
    let names = all.windows(3).filter(|window| name(window)).map(|window| window[2]);
    names.filter_map(|token| if let Token::Word(name) = token { Some(name) } else { None }).collect()
}

/// What comes in by other ways than paths, with its offset: macros, by their names, and whole files and crates.
fn other_ways<'a>(code: &'a str, own_macros: &[&str]) -> Vec<(usize, String)> {
    // As in `if !(a || b)`, which negates and is no macro.
    const KEYWORDS: [&str; 6] = ["break", "if", "in", "match", "return", "while"];
    let is_safe = |name: &&'a str| MACROS.contains(name) || KEYWORDS.contains(name) || own_macros.contains(name);
    let all: Vec<(usize, Token<'a>)> = tokens(code).collect();
    let found = all.windows(3).filter_map(|window| match [window[0].1, window[1].1, window[2].1] {
        [Token::Word(name), Token::Other('!'), Token::Other('(' | '[' | '{')] if !is_safe(&name) => {
            Some((window[0].0, format!("{name}!")))
        }
        [Token::Word("extern"), Token::Word("crate"), _] => Some((window[0].0, "extern crate".to_owned())),
        [Token::Other('[' | ','), Token::Word("path"), Token::Other('=')] => Some((window[1].0, "#[path]".to_owned())),
        _ => None,
    });
    found.collect()
}

/// Goes through the tokens of a file once, and notes each path of at least two names, and each path of `use`.
struct Paths<'a> {
    tokens: Vec<(usize, Token<'a>)>,
    at: usize,
    found: Vec<(usize, Vec<&'a str>)>,
}

impl<'a> Paths<'a> {
    fn of(code: &'a str) -> Vec<(usize, Vec<&'a str>)> {
        let mut paths = Self { tokens: tokens(code).collect(), at: 0, found: Vec::new() };
        while let Some((_, token)) = paths.tokens.get(paths.at).copied() {
            match token {
                Token::Word("use") => {
                    paths.at += 1;
                    paths.read_use(&[]);
                }
                Token::Word(_) => paths.read_path(),
                _ => paths.at += 1,
            }
        }
        paths.found
    }

    fn next(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|(_, token)| *token)
    }

    /// Names as far as they go, behind `path`. Ends behind a `::` that no name follows.
    fn read_names(&mut self, path: &mut Vec<&'a str>) {
        while let Some(Token::Word(name)) = self.next() {
            path.push(name);
            self.at += 1;
            if self.next() != Some(Token::PathSeparator) {
                return;
            }
            self.at += 1;
        }
    }

    fn read_path(&mut self) {
        let start = self.tokens[self.at].0;
        let mut path = Vec::new();
        self.read_names(&mut path);
        if path.len() > 1 {
            self.found.push((start, path));
        }
    }

    /// One branch of a `use`, behind `prefix`. An alias is read as a word of the code, which it does no harm to.
    fn read_use(&mut self, prefix: &[&'a str]) {
        if self.next() == Some(Token::PathSeparator) {
            self.at += 1;
        }
        let Some((start, _)) = self.tokens.get(self.at).copied() else { return };
        let mut path = prefix.to_vec();
        self.read_names(&mut path);
        if self.next() != Some(Token::Other('{')) {
            // `a::{self}` names the same as `a`.
            if path.len() > 1 && path.last() == Some(&"self") {
                path.pop();
            }
            if !path.is_empty() {
                self.found.push((start, path));
            }
            return;
        }
        self.at += 1;
        while !matches!(self.next(), Some(Token::Other('}')) | None) {
            self.read_use(&path);
            // Behind an alias or a `*` too.
            while !matches!(self.next(), Some(Token::Other('}' | ',')) | None) {
                self.at += 1;
            }
            if self.next() == Some(Token::Other(',')) {
                self.at += 1;
            }
        }
        self.at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    /// Complaints of a pure crate with these dependencies and this code.
    fn complaints(dependencies: &[(&str, Needed)], files: &[(&str, &str)]) -> Vec<String> {
        let member = Manifest {
            name: "rmap".to_owned(),
            directory: "crates/rmap/".to_owned(),
            dependencies: dependencies.iter().map(|(name, needed)| ((*name).to_owned(), *needed)).collect(),
        };
        let sources: Vec<Source> =
            files.iter().map(|(path, text)| source(&format!("crates/rmap/{path}"), text)).collect();
        let (_, allowed) = PURE.iter().find(|(name, _)| *name == "rmap").expect("rmap is pure");
        check_crate(&member, allowed, &sources)
    }

    /// What is found in a file, by its first words.
    fn found(text: &str) -> Vec<String> {
        let of_code = complaints(&[("snow", Needed::Always), ("aws-lc-rs", Needed::Always)], &[("src/a.rs", text)]);
        let what = |complaint: String| complaint.split(' ').nth(1).unwrap_or_default().trim_end_matches('.').to_owned();
        of_code.into_iter().map(what).collect()
    }

    #[test]
    fn what_reaches_the_system_is_found() {
        for (text, expected) in [
            ("use std::fs;", "std::fs"),
            ("use std::fs::File;", "std::fs::File"),
            ("fn f() { std::fs::read(x) }", "std::fs::read"),
            ("use std::thread;", "std::thread"),
            ("fn f() { std::thread::spawn(g) }", "std::thread::spawn"),
            ("use std::net::{SocketAddr, UdpSocket};", "std::net::UdpSocket"),
            ("use std::{fmt, net::{IpAddr, TcpStream}};", "std::net::TcpStream"),
            ("use std::net::TcpListener as L;", "std::net::TcpListener"),
            ("use std::net::ToSocketAddrs;", "std::net::ToSocketAddrs"),
            ("use std::net;", "std::net"),
            ("use std::net::*;", "std::net"),
            ("use std::os::unix::net::UnixStream;", "std::os::unix::net::UnixStream"),
            ("use std::time::{Duration, Instant};", "std::time::Instant"),
            ("fn f() { std::time::SystemTime::now() }", "std::time::SystemTime::now"),
            ("fn f() { g(0..std::time::Instant::now()) }", "std::time::Instant::now"),
            ("use std::sync::mpsc;", "std::sync::mpsc"),
            ("use std::sync::{Arc, Condvar};", "std::sync::Condvar"),
            ("use std::io::{self, Error};", "std::io"),
            ("use std::io::Read;", "std::io::Read"),
            ("use std::{self};", "std"),
            ("use std as s;", "std"),
            ("use ::std::process;", "std::process"),
            ("use core::arch;", "core::arch"),
            ("fn f() { <std::path::Path>::exists(p) }", "std::path::Path"),
            ("fn f() { Vec::<std::fs::File>::new() }", "std::fs::File"),
            ("macro_rules! m { () => { std::env::var(x) } }", "std::env::var"),
            ("use std::collections::hash_map::RandomState;", "std::collections::hash_map::RandomState"),
            ("use aws_lc_rs::rand::SystemRandom;", "aws_lc_rs::rand::SystemRandom"),
            ("extern crate std as s;", "extern"),
            ("#[path = \"../../b.rs\"] mod b;", "#[path]"),
            ("fn f() { println!(\"a\") }", "println!"),
            ("fn f() { dbg!(a) }", "dbg!"),
            ("#[cfg_attr(a, path = \"b.rs\")] mod b;", "#[path]"),
            ("include!(\"b.rs\");", "include!"),
        ] {
            assert_eq!(found(text), [expected], "{text}");
        }
    }

    #[test]
    fn what_is_safe_is_let_through() {
        for text in [
            "use std::collections::{BTreeMap, HashMap, hash_map::Entry}; use std::time::Duration;",
            "use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr}; fn f() -> std::io::Result<()> { g() }",
            "use std::fmt::{self, Debug}; use std::sync::atomic::{AtomicU64, Ordering};",
            "use aws_lc_rs::aead::{AES_256_GCM, Aad}; use snow::{Builder, HandshakeState};",
            "use crate::std_like::fs; fn f() { a.fs.thread(); fs::read(); a != (b); if !(b) { x.alloc::<T>() } }",
            "macro_rules! own { () => {} } own!(); vec![format!(\"std::fs {}\", 1)]; // std::fs",
            "#[cfg(test)] mod tests { use std::fs; use std::time::Instant; } impl Iterator<Item = u8> + use<'a> {}",
        ] {
            assert_eq!(found(text), [""; 0], "{text}");
        }
    }

    /// A file is one of tests if the code says so, whatever its name is.
    #[test]
    fn only_tests_may_use_anything() {
        let io = "use std::fs;";
        let files = |root| [("src/lib.rs", root), ("src/tests.rs", io), ("src/tests/a.rs", io), ("tests/b.rs", io)];
        assert_eq!(complaints(&[], &files("#[cfg(test)] mod tests;")), [""; 0]);
        assert_eq!(complaints(&[], &files("mod tests;")).len(), 2);
        assert_eq!(complaints(&[], &[("build.rs", io)]).len(), 1);
    }

    #[test]
    fn crates_that_are_not_on_the_list_are_found_in_the_manifest() {
        for name in ["rustix", "nix", "socket2", "quinn-udp", "tokio", "libc", "rmap-io", "pagoda-sys"] {
            let complaints = complaints(&[(name, Needed::Always)], &[]);
            let start = format!("crates/rmap/Cargo.toml: {name}. rmap is pure");
            assert!(complaints.len() == 1 && complaints[0].starts_with(&start), "{complaints:?}");
        }
        let dependencies = [("aws-lc-rs", Needed::Always), ("snow", Needed::Always), ("pagoda-sys", Needed::ByTests)];
        assert_eq!(complaints(&dependencies, &[]), [""; 0]);
    }

    #[test]
    fn a_pure_crate_that_is_gone_is_no_pure_crate() {
        assert_eq!(check(&[]).unwrap().len(), PURE.len());
    }
}
