//! Disks of a VM that comes, which its waiting QEMU takes in by NBD.
//!
//! QEMU listens on a socket that it is given, and that has no name: this daemon alone reaches it. Each disk has one stream of the source's,
//! once. When all of the VM's state is here, QEMU serves no disk any more, so that nothing is written to them but by the VM.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use pagoda_move::units::AttemptId;
use serde_json::{Value, json};

use crate::disks::NewImage;
use crate::moves::nameless::{self, path_of};
use crate::qmp::{Held, Monitor};

/// What QEMU calls the socket.
const SOCKET: &str = "pagoda-disks";

/// What the export of a disk is called.
pub fn export_name(disk: usize) -> String {
    format!("pagoda-disk-{disk}")
}

/// The disks that QEMU takes in, and their streams.
#[derive(Debug)]
pub struct Exports {
    /// The socket, which has lost its name.
    socket: OwnedFd,
    streams: Mutex<Streams>,
}

#[derive(Debug, Default)]
struct Streams {
    has_ended: bool,
    /// QEMU's ends of the streams, by disk.
    open: BTreeMap<u16, UnixStream>,
    disks: u16,
}

impl Exports {
    /// Has QEMU serve these disks. `dir`: where a socket may be made, which nobody else reaches.
    ///
    /// # Errors
    /// A disk is not one of QEMU's; QEMU's.
    pub fn start(qmp: &Monitor, cwd: &str, images: &[NewImage], dir: &Path, attempt: AttemptId) -> Result<Exports> {
        let monitor = Held::new(qmp);
        let nodes = nodes(&monitor, cwd, images)?;
        let listening = nameless::listen(dir, &format!("{:016x}.disks", attempt.0));
        let (listener, socket) = listening.context("make a socket for disks")?;
        monitor.execute_with_fd("getfd", json!({ "fdname": SOCKET }), listener.as_fd())?;
        let address = json!({ "type": "fd", "data": { "str": SOCKET } });
        monitor.execute_with("nbd-server-start", json!({ "addr": address, "max-connections": images.len() }))?;
        for (disk, node) in nodes.iter().enumerate() {
            let name = export_name(disk);
            let export = json!({ "type": "nbd", "id": name, "name": name, "node-name": node, "writable": true });
            monitor.execute_with("block-export-add", export)?;
        }
        let disks = u16::try_from(images.len()).context("the number of disks")?;
        Ok(Exports { socket, streams: Mutex::new(Streams { disks, ..Streams::default() }) })
    }

    /// QEMU's end of the stream of a disk.
    ///
    /// # Errors
    /// There is no such disk, it has had its stream, or no disk comes any more.
    pub fn connect(&self, disk: u16) -> Result<UnixStream> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(!streams.has_ended, "its disks are here, or do not come any more");
        ensure!(disk < streams.disks && !streams.open.contains_key(&disk), "no stream is expected for disk {disk}");
        let stream = UnixStream::connect(path_of(self.socket.as_raw_fd())).context("connect to its QEMU")?;
        streams.open.insert(disk, stream.try_clone()?);
        Ok(stream)
    }

    /// Nothing is taken in any more. Whether each disk has had its stream.
    pub fn cut(&self) -> bool {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.has_ended = true;
        streams.open.values().for_each(|stream| drop(stream.shutdown(std::net::Shutdown::Both)));
        streams.open.len() == usize::from(streams.disks)
    }

    /// The same, and QEMU has nothing in flight to a disk, and serves none.
    ///
    /// # Errors
    /// A disk has not come; QEMU's.
    pub fn end(&self, qmp: &Monitor) -> Result<()> {
        ensure!(self.cut(), "a disk has not come");
        qmp.execute("nbd-server-stop").context("have it serve no disks any more")?;
        let answer = qmp.execute("query-block-exports")?;
        let is_none = answer.as_array().is_some_and(Vec::is_empty);
        ensure!(is_none, "it serves disks still");
        Ok(())
    }
}

/// QEMU's nodes of these disks.
fn nodes(monitor: &Monitor, cwd: &str, images: &[NewImage]) -> Result<Vec<String>> {
    let answer = monitor.execute("query-block")?;
    let devices = answer.as_array().context("the list of block devices")?;
    images.iter().map(|image| node_of(devices, cwd, image)).collect()
}

fn node_of(devices: &[Value], cwd: &str, image: &NewImage) -> Result<String> {
    let text = |device: &Value, field: &str| Some(device.get("inserted")?.get(field)?.as_str()?.to_owned());
    let is_it = |device: &&Value| {
        let file = text(device, "file").map(|file| Path::new(cwd).join(file.strip_prefix("file:").unwrap_or(&file)));
        file.as_deref() == Some(Path::new(&image.file))
    };
    let device = devices.iter().find(is_it).with_context(|| format!("its QEMU has no disk {}", image.file))?;
    let driver = text(device, "drv").unwrap_or_default();
    ensure!(driver == image.format.driver(), "its QEMU takes {} for {driver}", image.file);
    text(device, "node-name").with_context(|| format!("the node of {}", image.file))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn each_disk_has_one_stream() {
        let dir = std::env::temp_dir().join(format!("pagodad-exports-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (listener, socket) = nameless::listen(&dir, "7.disks").unwrap();
        let exports = Exports { socket, streams: Mutex::new(Streams { disks: 2, ..Streams::default() }) };
        let mut stream = exports.connect(1).unwrap();
        stream.write_all(b"a").unwrap();
        let (mut taken, _) = listener.accept().unwrap();
        let mut byte = [0];
        taken.read_exact(&mut byte).unwrap();
        assert!(exports.connect(1).is_err(), "it has had its stream");
        assert!(exports.connect(2).is_err(), "there is none");
        assert!(!exports.cut(), "disk 0 has not come");
        assert_eq!((byte, taken.read(&mut [0]).unwrap()), (*b"a", 0));
        assert!(exports.connect(0).is_err(), "no disk comes any more");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_disk_is_found_by_its_path_and_format() {
        let device =
            |file: &str, driver: &str| json!({ "inserted": { "file": file, "drv": driver, "node-name": "n" } });
        let image =
            NewImage { file: "/srv/a".into(), format: crate::disks::Format::Raw, bytes: 512, cluster: None, room: 512 };
        let found = |devices: &[Value]| node_of(devices, "/srv", &image).map_err(|error| error.to_string());
        assert_eq!(found(&[json!({}), device("/srv/a", "raw")]), Ok("n".into()));
        assert_eq!(found(&[device("a", "raw")]), Ok("n".into()));
        assert!(found(&[device("/srv/a", "qcow2")]).unwrap_err().contains("takes /srv/a for qcow2"));
        assert!(found(&[device("/srv/b", "raw")]).unwrap_err().contains("no disk /srv/a"));
    }
}
