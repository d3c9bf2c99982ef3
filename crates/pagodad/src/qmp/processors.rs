//! Which threads of QEMU are the guest's processors.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Monitor;

/// The kernel's numbers of the threads in which the guest runs. With TCG several processors may share one.
///
/// # Errors
/// QEMU does not say.
pub fn processors(monitor: &Monitor) -> Result<Vec<u32>> {
    parse(&monitor.execute("query-cpus-fast")?).context("QEMU does not say which threads are the guest's processors")
}

fn parse(reply: &Value) -> Option<Vec<u32>> {
    let thread = |cpu: &Value| cpu.get("thread-id")?.as_u64()?.try_into().ok();
    reply.as_array()?.iter().map(thread).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn threads_of_processors() {
        let check = |reply: Value, expected: Option<&[u32]>| assert_eq!(parse(&reply).as_deref(), expected, "{reply}");
        check(json!([]), Some(&[]));
        check(
            json!([{"cpu-index": 0, "thread-id": 25627}, {"thread-id": 25628, "target": "x86_64"}]),
            Some(&[25627, 25628]),
        );
        check(json!([{"cpu-index": 0}]), None);
        check(json!([{"thread-id": -1}]), None);
        check(json!({"thread-id": 1}), None);
    }
}
