//! The repository, the programs that are built from it, and cargo, which builds them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// What the demo and the benches start, by package: the daemon, the command, the shim.
const PRODUCT: [&str; 6] = ["-p", "pagodad", "-p", "pagoda", "-p", "pagoda-shim"];
/// The profile of `make demo` (Cargo.toml).
const DEMO_PROFILE: &str = "demo";

/// What one call of cargo builds. The packages are those that the Makefile selects for the same purpose: cargo's features
/// depend on the packages that are selected, so another selection would compile much a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// For `make demo`, in the profile of the xtask that runs: `demo` by `make`, `release` by `cargo xtask demo`. xtask is
    /// selected and not built.
    Demo,
    /// For `make bench`: also the toy VMM. xtask and the benches are selected and not built: one of them runs.
    Bench,
    /// The same and the benches.
    BenchProgram,
}

impl Build {
    /// Options of `cargo build`.
    fn options(self) -> Vec<&'static str> {
        const BENCH_PACKAGES: [&str; 8] =
            ["-p", "pagoda-server", "-p", "pagoda-outbox-server", "-p", "testkit", "-p", "pagoda-bench"];
        let is_demo_profile = self == Self::Demo && programs_dir().is_ok_and(|dir| dir.ends_with(DEMO_PROFILE));
        let mut options = vec!["--profile", if is_demo_profile { DEMO_PROFILE } else { "release" }];
        options.extend(PRODUCT);
        options.extend(["-p", "xtask"]);
        if self != Self::Demo {
            options.extend(BENCH_PACKAGES);
        }
        options.extend(["--lib", "--bin", "pagodad", "--bin", "pagoda"]);
        if self != Self::Demo {
            options.extend(["--bin", "pagoda-server", "--bin", "pagoda-outbox", "--bin", "toy-vmm"]);
        }
        if self == Self::BenchProgram {
            options.extend(["--bin", "pagoda-bench"]);
        }
        options
    }

    /// Builds it. After `make` has built it there is nothing to do.
    ///
    /// # Errors
    /// cargo cannot be run, or something does not compile.
    pub fn run(self) -> Result<()> {
        let status = cargo_command().arg("build").args(self.options()).status().context("run cargo build")?;
        ensure!(status.success(), "building Pagoda failed");
        Ok(())
    }
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_owned()
}

/// cargo, in the root of the repository.
pub fn cargo_command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(repository());
    command
}

/// The directory of the program that runs now: the others that were built with it are beside it.
///
/// # Errors
/// The system does not say which program runs.
pub fn programs_dir() -> Result<PathBuf> {
    let program = std::env::current_exe().context("find this program")?;
    Ok(program.parent().context("find the directory of this program")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_holds_the_workspace() {
        assert!(repository().join("Cargo.lock").exists());
    }

    /// The packages that the Makefile selects for a target.
    fn selected(makefile: &str, target: &str) -> Vec<String> {
        let recipe = makefile.split(&format!("\n{target}:")).nth(1).expect("a target of the Makefile");
        let build = recipe.lines().find(|line| line.contains("cargo build")).expect("a target that builds");
        let words = build.replace("$(PROGRAMS)", "-p pagoda-server -p pagoda-outbox-server $(DEMO_PROGRAMS)");
        let words = words.replace("$(DEMO_PROGRAMS)", &PRODUCT.join(" "));
        let words: Vec<&str> = words.split_whitespace().collect();
        words.windows(2).filter(|pair| pair[0] == "-p").map(|pair| pair[1].to_owned()).collect()
    }

    #[test]
    fn what_is_selected_is_what_the_makefile_selects() {
        let makefile = std::fs::read_to_string(repository().join("Makefile")).unwrap();
        for (build, target) in [(Build::Demo, "demo"), (Build::Bench, "bench"), (Build::BenchProgram, "bench")] {
            let options = build.options();
            let mut ours: Vec<&str> = options.windows(2).filter(|pair| pair[0] == "-p").map(|pair| pair[1]).collect();
            let mut makefile = selected(&makefile, target);
            ours.sort_unstable();
            makefile.sort_unstable();
            assert_eq!(ours, makefile, "{build:?}");
        }
    }
}
