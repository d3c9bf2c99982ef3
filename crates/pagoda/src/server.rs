//! Starts the servers: `pagoda pool serve`, `pagoda pool try` and `pagoda disk export` become another program.
//!
//! Who administers a pool does not run its servers, so what only they need is not in this command. They are started by
//! exec(2): the process keeps its number, its signals' sender and its service manager's notification socket, and no
//! process stands between a server and whoever started it.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The program of the servers, and the package that it is built from.
const PROGRAM: &str = "pagoda-server";
const PACKAGE: &str = "pagoda-server";

/// Goes on as the server that this process's words ask for. clap has accepted them, and the server reads them again.
///
/// Returns only if that fails.
///
/// # Errors
/// The server's program is missing, or cannot be started.
pub fn become_server() -> Result<()> {
    let program = find_beside_us(PROGRAM, PACKAGE)?;
    let mut words = std::env::args_os();
    let mut command = Command::new(&program);
    // Lists of processes show what the operator wrote.
    command.arg0(words.next().unwrap_or_else(|| "pagoda".into())).args(words);
    Err(command.exec()).with_context(|| format!("start {}", program.display()))
}

/// Searches a program of ours where a build and where an installation puts it.
///
/// # Errors
/// It is not there.
pub fn find_beside_us(program: &str, package: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("find this program")?;
    find(own.parent().unwrap_or(Path::new("/")), program, package)
}

/// `exe_dir` is the directory of this command.
fn find(exe_dir: &Path, program: &str, package: &str) -> Result<PathBuf> {
    let prefix = exe_dir.parent().unwrap_or(exe_dir);
    let dirs = [exe_dir.to_owned(), prefix.join("lib/pagoda")];
    if let Some(program) = dirs.iter().map(|dir| dir.join(program)).find(|program| program.is_file()) {
        return Ok(program);
    }
    bail!(
        "{program}, a program of Pagoda's, is neither in {} nor in {}: install it there (`make install` does), or build it \
         beside this command (`cargo build -p {package}`)",
        dirs[0].display(),
        dirs[1].display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_searched_beside_this_command_first() {
        let dir = std::env::temp_dir().join(format!("pagoda-find-server-{}", std::process::id()));
        let bin = dir.join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(dir.join("lib/pagoda")).unwrap();
        let said = find(&bin, PROGRAM, PACKAGE).unwrap_err().to_string();
        assert!(["make install", "/bin ", "/lib/pagoda:"].iter().all(|part| said.contains(part)), "{said}");
        let installed = dir.join("lib/pagoda").join(PROGRAM);
        std::fs::write(&installed, "").unwrap();
        assert_eq!(find(&bin, PROGRAM, PACKAGE).unwrap(), installed);
        std::fs::write(bin.join(PROGRAM), "").unwrap();
        assert_eq!(find(&bin, PROGRAM, PACKAGE).unwrap(), bin.join(PROGRAM));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
