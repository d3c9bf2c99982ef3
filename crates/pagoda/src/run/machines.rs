//! Machine types that QEMU itself has to be asked about.

use pagoda_api::in_full;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::qemu_args::{ArgError, known_ram_id};

/// How long QEMU may take to start without a machine and to answer.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// The id of a machine type's RAM; `None` is QEMU's default machine.
pub fn ram_id(program: &Path, machine: Option<&str>) -> Result<String, ArgError> {
    if let Some(id) = known_ram_id(&program.to_string_lossy(), machine) {
        return Ok(id.to_owned());
    }
    let named = machine.unwrap_or("by default");
    ask(program).and_then(|machines| find(&machines, machine)).map_err(|error| ArgError {
        problem: format!(
            "what the RAM of the machine {named} is called cannot be found out: {error}",
            error = in_full(error.as_ref())
        ),
        advice: "name a machine type that has RAM (-machine), or give it a back end: -object \
                 memory-backend-ram,id=ram0,size=... -machine memory-backend=ram0"
            .into(),
    })
}

fn find(machines: &[Value], wanted: Option<&str>) -> Result<String> {
    let is_wanted = |machine: &&Value| match wanted {
        Some(name) => machine["name"] == name || machine["alias"] == name,
        None => machine["is-default"] == true,
    };
    let machine = machines.iter().find(is_wanted).context("QEMU does not know it")?;
    let id = machine["default-ram-id"].as_str().context("it has no RAM that could be given another back end")?;
    Ok(id.to_owned())
}

/// QEMU's own list (`query-machines`), from a QEMU without a machine.
fn ask(program: &Path) -> Result<Vec<Value>> {
    let mut command = Command::new(program);
    command.args(["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S", "-qmp", "stdio"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut qemu = Asked(child.with_context(|| format!("start {}", program.display()))?);
    let mut input = qemu.0.stdin.take().context("QEMU's input")?;
    let mut output = BufReader::new(qemu.0.stdout.take().context("QEMU's output")?);
    for command in ["qmp_capabilities", "query-machines"] {
        writeln!(input, "{}", json!({ "execute": command, "id": command })).context("ask QEMU")?;
    }
    let deadline = Instant::now() + ANSWER_MAX;
    loop {
        if output.buffer().is_empty() {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).context("a time")?;
            let ready = poll(&mut [PollFd::new(&output.get_ref().as_fd(), PollFlags::IN)], Some(&left));
            ensure!(ready.context("wait for QEMU")? > 0, "QEMU does not answer");
        }
        let mut line = String::new();
        ensure!(output.read_line(&mut line).context("read QEMU's answer")? > 0, "QEMU ended without an answer");
        let mut answer: Value = serde_json::from_str(&line).context("understand QEMU's answer")?;
        if let Some(error) = answer.get("error") {
            bail!("QEMU refuses: {error}");
        }
        if answer["id"] == "query-machines" {
            return serde_json::from_value(answer["return"].take()).context("understand QEMU's list");
        }
    }
}

/// A QEMU that ends when it has been asked.
struct Asked(Child);

impl Drop for Asked {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is known without asking is what QEMU says.
    #[test]
    fn what_is_known_is_what_qemu_says() {
        let machines = ask(Path::new("qemu-system-x86_64")).unwrap();
        for machine in
            [Some("pc"), Some("q35"), Some("isapc"), Some("microvm"), Some("pc-i440fx-5.2"), Some("pc-q35-7.2"), None]
        {
            let said = find(&machines, machine).unwrap();
            assert_eq!(known_ram_id("qemu-system-x86_64", machine), Some(said.as_str()), "{machine:?}");
        }
        let bare = [json!({ "name": "bare" })];
        assert!(find(&bare, Some("bare")).unwrap_err().to_string().contains("no RAM"));
        assert!(find(&machines, Some("pdp11")).unwrap_err().to_string().contains("does not know"));
        for machine in machines.iter().filter_map(|machine| machine["name"].as_str()) {
            let known = known_ram_id("qemu-system-x86_64", Some(machine));
            let said = find(&machines, Some(machine)).ok();
            assert!(known.is_none() || known == said.as_deref(), "{machine}: {known:?} instead of {said:?}");
        }
    }
}
