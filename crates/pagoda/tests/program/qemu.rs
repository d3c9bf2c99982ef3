//! QEMU without the shim, here because the small daemon has none to give. Needs qemu-system-x86_64.

use crate::daemon::FakeDaemon;

#[test]
fn without_the_shim_qemu_has_no_ram() {
    let daemon = FakeDaemon::start("noshim");
    let words = ["run", "--name", "web1", "--", "qemu-system-x86_64", "-accel", "tcg", "-nodefaults", "-m", "128M"];
    let output = daemon.pagoda(&words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("can't open backing store /proc/pagoda-shim/ram0 for guest RAM"), "{text}");
}
