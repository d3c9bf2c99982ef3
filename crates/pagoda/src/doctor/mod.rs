//! `pagoda doctor`: is this host ready, and if not, what is to be changed?
//!
//! `facts` looks, `checks` judges, without I/O. Nothing on the host is changed; the swap directory is
//! tried with a file that has no name and is gone when it is closed.

mod announcements;
mod checks;
mod facts;
mod pool;

use anyhow::{Result, bail};
use pagoda_api::Client;

use self::checks::{Check, Verdict};
use crate::cli::{self, DoctorOf};
use crate::output::{Format, Side, Table, print_json, print_text};

/// Fails when a check does.
pub fn run(client: &Client, options: &cli::Doctor, format: Format) -> Result<()> {
    let checks = match &options.of {
        None => checks::check_all(&facts::gather(client, options.swap_dir.clone(), &options.qemu)),
        Some(DoctorOf::Pool(pool_dir)) => pool::check_all(pool_dir),
    };
    match format {
        Format::Json => print_json(&checks)?,
        Format::Text => print_text(&render(&checks))?,
    }
    let failed = checks.iter().filter(|check| check.verdict == Verdict::Fail).count();
    if failed > 0 {
        bail!("{failed} of {} checks failed", checks.len());
    }
    Ok(())
}

fn render(checks: &[Check]) -> String {
    let mut table = Table::new(&[("CHECK", Side::Left), ("IS", Side::Left), ("FOUND", Side::Left)]);
    for check in checks {
        table.row(vec![check.name.into(), check.verdict.word().into(), check.found.clone()]);
    }
    let mut text = table.render();
    let advised = checks.iter().filter(|check| !check.advice.is_empty());
    for check in advised {
        text += &format!("\n{}: {}\n  {}\n", check.verdict.word(), check.name, check.advice);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_the_table() {
        let checks =
            [Check::ok("kernel", "6.18"), Check::new(Verdict::Fail, "userfaultfd", "no permission", "do this")];
        let expected = "\
CHECK        IS    FOUND
kernel       ok    6.18
userfaultfd  FAIL  no permission

FAIL: userfaultfd
  do this
";
        assert_eq!(render(&checks), expected);
    }
}
