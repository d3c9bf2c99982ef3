//! Which kernel modules a guest needs, and in which order.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// What the tests' VMs have; what these depend on comes from `modules.dep`.
pub const WANTED: [&str; 3] = ["virtio_pci", "virtio_blk", "virtio_balloon"];

/// What a client of a pool needs besides: a network, a disk that it serves itself, file systems. crc32c is asked for by the
/// file system by its algorithm, which `modules.dep` does not say.
pub const CLIENT_WANTED: [&str; 9] =
    ["virtio_pci", "virtio_blk", "virtio_balloon", "virtio_net", "e1000", "nbd", "crc32c_generic", "ext4", "virtiofs"];

/// The module files, each after those it depends on. `directory` is that of `modules.dep`.
pub fn in_load_order(wanted: &[&str], directory: &Path) -> Result<Vec<PathBuf>> {
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    };
    let order = plan(wanted, &read("modules.dep")?, &read("modules.builtin")?)?;
    Ok(order.into_iter().map(|path| directory.join(path)).collect())
}

fn plan(wanted: &[&str], dependencies: &str, builtin: &str) -> Result<Vec<String>> {
    let dependencies: HashMap<&str, Vec<&str>> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(module, needs)| (module, needs.split_ascii_whitespace().collect()))
        .collect();
    let files: HashMap<String, &str> = dependencies.keys().map(|path| (module_name(path), *path)).collect();
    let builtin: HashSet<String> = builtin.lines().map(module_name).collect();
    let mut order = Vec::new();
    for name in wanted {
        match files.get(*name) {
            Some(path) => add(path, &dependencies, &mut order),
            None if builtin.contains(*name) => {}
            None => anyhow::bail!("this kernel has no module {name}"),
        }
    }
    Ok(order)
}

/// modules.dep has no cycles: depmod refuses them.
fn add(path: &str, dependencies: &HashMap<&str, Vec<&str>>, order: &mut Vec<String>) {
    if order.iter().any(|added| added == path) {
        return;
    }
    for needed in dependencies.get(path).into_iter().flatten() {
        add(needed, dependencies, order);
    }
    order.push(path.to_owned());
}

/// The kernel's name of a module file: it makes no difference between `-` and `_`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "k/virtio-blk.ko.xz: k/virtio_ring.ko.xz k/virtio.ko.xz\n\
                                k/virtio_ring.ko.xz: k/virtio.ko.xz\n\
                                k/virtio.ko.xz:\n";

    #[test]
    fn dependencies_come_first_and_once() {
        let order = plan(&["virtio_blk", "virtio_ring", "ext4"], DEPENDENCIES, "kernel/fs/ext4.ko\n").expect("known");
        assert_eq!(order, ["k/virtio.ko.xz", "k/virtio_ring.ko.xz", "k/virtio-blk.ko.xz"]);
    }

    #[test]
    fn an_unknown_module_is_named() {
        let error = plan(&["nbd"], DEPENDENCIES, "").expect_err("not there");
        assert!(error.to_string().contains("nbd"));
    }
}
