use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};
use pagoda_core::policy::PerMille;
use pagoda_core::units::Bytes;

use super::file::{self, File};
use super::hosts::HostsFile;
use super::policy::PolicyFile;
use super::snapshots::SnapshotsFile;
use super::{Args, Config, Group, LargeFolios, MovesConfig, PolicyConfig, SHIM_NAME, SnapshotsConfig};
use crate::policy::settings::host_settings;

const FILE: &str = "/etc/pagoda/pagoda.toml";

fn args(words: &[&str]) -> Args {
    Args::try_parse_from([&["pagodad"], words].concat()).unwrap()
}

/// A directory like that of the program, with a shim in it.
fn exe_dir() -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pagodad-config-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join(SHIM_NAME), "").unwrap();
    dir
}

fn resolve(words: &[&str], text: &str) -> anyhow::Result<Config> {
    Config::resolve(args(words), file::parse(text, Path::new(FILE))?, &exe_dir())
}

#[test]
fn defaults() {
    let config = resolve(&[], "").unwrap();
    assert_eq!(config.state_dir, Path::new("/var/lib/pagoda"));
    assert_eq!(config.swap_dir, Path::new("/var/lib/pagoda/swap"));
    assert_eq!(config.pool_dir, Path::new("/var/lib/pagoda/pool"));
    assert_eq!(config.socket, Path::new("/run/pagoda/pagoda.sock"));
    assert_eq!(config.attach_socket, Path::new("/run/pagoda/attach.sock"));
    assert_eq!(config.metrics, Some("127.0.0.1:9464".parse().unwrap()));
    assert_eq!(config.shim, exe_dir().join(SHIM_NAME));
    assert_eq!((config.tune_host, config.large_folios, config.group), (false, LargeFolios::Auto, None));
}

#[test]
fn a_private_instance_derives_the_rest_and_leaves_the_port_alone() {
    let config = resolve(&["--state-dir", "/d", "--socket", "/d/pagoda.sock"], "").unwrap();
    assert_eq!(config.swap_dir, Path::new("/d/swap"));
    assert_eq!(config.attach_socket, Path::new("/d/attach.sock"));
    assert_eq!(config.metrics, None);
    let config = resolve(&["--socket", "d/p.sock", "--metrics", "[::1]:9000"], "").unwrap();
    assert_eq!(config.socket, std::env::current_dir().unwrap().join("d/p.sock"));
    assert_eq!(config.metrics, Some("[::1]:9000".parse().unwrap()));
}

#[test]
fn the_command_line_wins() {
    let text = "state_dir = \"/a\"\nmetrics = \"off\"\ntune_host = true\nlarge_folios = \"off\"\ngroup = \"7\"\n";
    let config = resolve(&[], text).unwrap();
    assert_eq!((config.state_dir.as_path(), config.metrics), (Path::new("/a"), None));
    assert_eq!((config.tune_host, config.large_folios, config.group), (true, LargeFolios::Off, Some(7)));

    let words = ["--state-dir=/b", "--metrics=127.0.0.1:1", "--tune-host=false", "--large-folios=auto", "--group=8"];
    let config = resolve(&words, text).unwrap();
    assert_eq!((config.state_dir.as_path(), config.metrics), (Path::new("/b"), Some("127.0.0.1:1".parse().unwrap())));
    assert_eq!((config.tune_host, config.large_folios, config.group), (false, LargeFolios::Auto, Some(8)));
    assert!(resolve(&["--tune-host"], "").unwrap().tune_host);

    let text = "pool_dir = \"/a\"\n";
    assert_eq!(resolve(&[], text).unwrap().pool_dir, Path::new("/a"));
    assert_eq!(resolve(&["--pool-dir=/b"], text).unwrap().pool_dir, Path::new("/b"));
}

#[test]
fn mistakes_are_named_with_file_line_and_key() {
    let check = |text: &str, expected: &[&str]| {
        let said = format!("{:#}", resolve(&[], text).unwrap_err());
        assert!(expected.iter().all(|part| said.contains(part)), "{text:?}: {said}");
    };
    check("\nswap = \"/x\"\n", &[FILE, "line 2", "`swap`", "swap_dir"]);
    check("tune_host = \"yes\"\n", &[FILE, "line 1", "tune_host", "boolean"]);
    check("# x\n\nmetrics = \"9464\"\n", &[FILE, "line 3", "metrics", "neither \"off\" nor an address"]);
    check("large_folios = \"on\"\n", &[FILE, "line 1", "large_folios", "`auto` or `off`"]);
    check("state_dir = \"/a\"\nswap_dir = \"b\"\n", &[FILE, "line 2", "swap_dir", "full path"]);
    check("pool_dir = \"pool\"\n", &[FILE, "line 1", "pool_dir", "full path"]);
    check("state_dir = /a\n", &[FILE, "line 1"]);
    check("group = \"\"\n", &[FILE, "line 1", "name of a group"]);
    check("group = \"no-such-group\"\n", &["no-such-group", "groupadd"]);
    check("socket = \"/s\"\nattach_socket = \"/s\"\n", &["two paths"]);
    check("shim = \"/nonexistent/shim.so\"\n", &["/nonexistent/shim.so", "--shim"]);
    check(&format!("socket = \"/{}\"\n", "s".repeat(107)), &["at most 107 bytes"]);

    let missing = Args { config: Some("/nonexistent/pagoda.toml".into()), ..Args::default() };
    assert!(format!("{:#}", Config::load(missing).unwrap_err()).contains("/nonexistent/pagoda.toml"));
    assert_eq!(file::read_if_there(Path::new("/nonexistent/pagoda.toml")).unwrap(), File::default());
}

#[test]
fn the_shim_is_looked_for() {
    let dir = exe_dir().join("prefix");
    std::fs::create_dir_all(dir.join("bin")).unwrap();
    std::fs::create_dir_all(dir.join("lib/pagoda")).unwrap();
    std::fs::write(dir.join("lib/pagoda").join(SHIM_NAME), "").unwrap();
    assert_eq!(super::find_shim(None, &dir.join("bin")).unwrap(), dir.join("lib/pagoda").join(SHIM_NAME));
}

#[test]
fn groups_have_names_and_numbers() {
    let groups = "root:x:0:\nkvm:x:107:a,b\n";
    let check = |text: &str, expected: Option<u32>| {
        assert_eq!(text.parse::<Group>().unwrap().gid(groups).ok(), expected, "{text}");
    };
    check("kvm", Some(107));
    check("107", Some(107));
    check("4242", Some(4242));
    check("kv", None);
}

#[test]
fn the_shipped_file_shows_every_key_with_its_default() {
    let shipped = include_str!("../../../../packaging/pagoda.toml");
    assert_eq!(file::parse(shipped, Path::new(FILE)).unwrap(), File::default(), "as shipped it sets nothing");

    // Settings are commented out by "#" alone, prose by "# ".
    let settings: Vec<&str> = shipped
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(|line| !line.starts_with([' ', '#']))
        .collect();
    let keys: Vec<&str> =
        settings.iter().filter_map(|line| line.split([' ', '=']).next()).filter(|key| !key.is_empty()).collect();
    let parsed = file::parse(&settings.join("\n"), Path::new(FILE)).unwrap();
    for option in Args::command().get_arguments() {
        let key = option.get_id().as_str();
        if !matches!(key, "config" | "list_metrics") {
            assert!(keys.contains(&key), "{key} is missing in packaging/pagoda.toml");
        }
    }

    // The pool's default is the host's matter, as that of `group` and of the shim.
    let policy = PolicyConfig::resolve(parsed.policy.clone()).unwrap();
    assert_eq!((policy.sampling, policy.curves), (PolicyConfig::default().sampling, PolicyConfig::default().curves));
    let host = |config: PolicyConfig| host_settings(&config, Bytes::from_gib(32)).unwrap();
    assert!(policy.pool.is_some());
    assert_eq!(host(PolicyConfig { pool: None, ..policy }), host(PolicyConfig::default()));
    // They are off unless they are asked for.
    assert!(parsed.compressed.is_some() && parsed.policy_recording.is_some());
    assert!(parsed.snapshots.max_bytes.is_some() && parsed.snapshots.keep_free.is_some());
    let snapshots = SnapshotsFile { max_bytes: None, ..parsed.snapshots.clone() };
    assert!(parsed.hosts.listen.is_some());
    let off = File { compressed: None, policy_recording: None, snapshots, hosts: HostsFile::default(), ..parsed };
    let shown = File { group: None, shim: None, policy: PolicyFile::default(), ..off };
    assert_eq!(
        Config::resolve(Args::default(), shown, &exe_dir()).unwrap(),
        Config::resolve(Args::default(), File::default(), &exe_dir()).unwrap()
    );
}

#[test]
fn help_shows_a_private_instance() {
    Args::command().debug_assert();
    let help = Args::command().render_help().to_string();
    assert!(help.contains("--state-dir D --swap-dir D/swap --socket D/pagoda.sock"), "{help}");
}

#[test]
fn the_policy_is_a_section_of_the_file() {
    assert_eq!(resolve(&[], "").unwrap().policy, PolicyConfig::default());
    let text = "[policy]\npool = \"48G\"\nidle_tax = \"50%\"\nthresholds = [\"8%\", \"6%\", \"4%\", \"2%\"]\n\
                host_available_min = \"2G\"\nsample_pages = 200\nsample_period_s = 10\ncurves = false\n";
    let policy = resolve(&[], text).unwrap().policy;
    assert_eq!((policy.pool, policy.idle_tax), (Some(Bytes::from_gib(48)), Some(PerMille(500))));
    assert_eq!(policy.thresholds, Some([80, 60, 40, 20].map(PerMille)));
    assert_eq!(policy.host_available_min, Some(Bytes::from_gib(2)));
    assert_eq!((policy.sampling.pages, policy.sampling.period_s, policy.curves), (200, 10, false));
    let refused = |text: &str, expected: &str| {
        let said = format!("{:#}", resolve(&[], &format!("[policy]\n{text}")).unwrap_err());
        assert!(said.contains(expected), "{said}");
    };
    refused("pool = \"much\"", "much");
    refused("idle_tax = \"750\"", "75%");
    refused("thresholds = [\"8%\", \"6%\"]", "thresholds");
    refused("sample_pages = 0", "1 to 4096");
    refused("sample_period_s = 3601", "1 to 3600");
    refused("tax = \"1%\"", "tax");
}

#[test]
fn moves_are_a_section_of_the_file() {
    let default = resolve(&[], "").unwrap().moves;
    assert_eq!(default, MovesConfig::default());
    assert!(!default.accept && default.users.is_empty() && default.paths.is_empty() && !default.arbiter, "all off");
    assert_eq!(default.programs, [PathBuf::from("/usr/bin/qemu-system-x86_64")]);
    let text =
        "[moves]\naccept = true\nprograms = [\"/opt/q\"]\nusers = [\"root\", \"64055\", 7]\npaths = [\"/vms\"]\n";
    let moves = resolve(&[], text).unwrap().moves;
    assert_eq!((moves.accept, moves.users.as_slice()), (true, &[0, 64055, 7][..]));
    assert_eq!((moves.programs, moves.paths), (vec!["/opt/q".into()], vec!["/vms".into()]));
    let refused = |text: &str, expected: &str| {
        let said = format!("{:#}", resolve(&[], &format!("[moves]\n{text}\n")).unwrap_err());
        assert!(said.contains(expected), "{text}: {said}");
    };
    assert!(resolve(&[], "[moves]\narbiter = \"etcd\"\n").unwrap().moves.arbiter);
    assert!(!resolve(&[], "[moves]\narbiter = \"none\"\n").unwrap().moves.arbiter);
    refused("arbiter = \"zookeeper\"", "`none` or `etcd`");
    refused("accept = \"yes\"", "line 2");
    refused("programs = [\"qemu\"]", "[moves] programs: \"qemu\" has to be a full path");
    refused("paths = [\"/vms/../etc\"]", "without ..");
    refused("users = [\"no-such-user\"]", "useradd");
    refused("users = [-1]", "-1 is no user");
    refused("users = [true]", "neither the name of a user nor a number");
    refused("path = [\"/vms\"]", "`paths`");
}

#[test]
fn snapshots_are_a_section_of_the_file() {
    assert_eq!(resolve(&["--state-dir=/s"], "").unwrap().snapshots, SnapshotsConfig::below(Path::new("/s")));
    let text = "[snapshots]\ndir = \"/big/images\"\nmax_bytes = \"200G\"\nkeep_free = \"5%\"\n";
    let config = resolve(&[], text).unwrap().snapshots;
    assert_eq!((config.dir.as_path(), config.limits.max), (Path::new("/big/images"), Some(Bytes::from_gib(200))));
    assert_eq!(config.limits.keep_free_percent, 5);
    let only_one = resolve(&[], "[snapshots]\nkeep_free = \"0%\"\n").unwrap().snapshots;
    assert_eq!((only_one.dir.as_path(), only_one.limits.max), (Path::new("/var/lib/pagoda/images"), None));
    assert_eq!(only_one.limits.keep_free_percent, 0);
    let refused = |text: &str, expected: &[&str]| {
        let said = format!("{:#}", resolve(&[], &format!("[snapshots]\n{text}\n")).unwrap_err());
        assert!(expected.iter().all(|part| said.contains(part)), "{text}: {said}");
    };
    refused("dir = \"images\"", &["[snapshots] dir", "full path"]);
    refused("max_bytes = \"much\"", &[FILE, "line 2", "much"]);
    refused("max_bytes = \"1M\"", &["[snapshots] max_bytes", "64 MiB"]);
    refused("keep_free = \"10\"", &[FILE, "line 2", "0% to 90%"]);
    refused("keep_free = \"91%\"", &["0% to 90%"]);
    refused("keep_free = 10", &[FILE, "line 2"]);
    assert_eq!(
        (only_one.chain_max, resolve(&[], "[snapshots]\nchain_max = 1\n").unwrap().snapshots.chain_max),
        (16, 1)
    );
    assert!(only_one.prefetch && !resolve(&[], "[snapshots]\nprefetch = false\n").unwrap().snapshots.prefetch);
    refused("prefetch = 1", &[FILE, "line 2"]);
    refused("chain_max = 0", &["[snapshots] chain_max is 0", "to 32"]);
    refused("chain_max = 33", &["[snapshots] chain_max is 33"]);
    refused("directory = \"/a\"", &["directory", "`dir`"]);
}
