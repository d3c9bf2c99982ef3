//! Owns what a test starts, and tells what happened when it fails.

use std::cell::RefCell;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use testkit::tuned::{TUNED_BY_DAEMON, Tuned};

use crate::daemon::{Daemon, DaemonOptions, Folios};
use crate::disk::Throttle;
use crate::guest::{Guest, GuestOptions};
use crate::loopfs::{FileSystem, LoopFs};
use crate::pool::Pool;
use crate::slots::Slots;
use crate::toy::{Toy, ToyOptions};
use crate::{accel, programs};

/// Set to keep the files of tests.
const KEEP_ENV: &str = "PAGODA_KEEP";

/// Everything of one test. Dropped from the top down: VMs, daemons, throttles, pools, file systems, files.
#[derive(Debug)]
pub struct Lab {
    guests: RefCell<Vec<Rc<Guest>>>,
    toys: RefCell<Vec<Rc<Toy>>>,
    daemons: RefCell<Vec<Rc<Daemon>>>,
    throttles: RefCell<Vec<Rc<Throttle>>>,
    pools: RefCell<Vec<Rc<Pool>>>,
    disks: RefCell<Vec<Rc<LoopFs>>>,
    directory: Directory,
    _tuned: Tuned,
    _slots: Slots,
}

#[derive(Debug)]
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        if std::env::var_os(KEEP_ENV).is_none()
            && let Err(error) = fs::remove_dir_all(&self.0)
        {
            eprintln!("remove {}: {error}", self.0.display());
        }
    }
}

impl Lab {
    /// Runs a test that has at most `vms` VMs at a time.
    ///
    /// # Errors
    /// What the test says; daemons and consoles have been printed then.
    pub fn run(name: &str, vms: usize, test: impl FnOnce(&Lab) -> Result<()>) -> Result<()> {
        // Built before the machine is taken: other tests need not wait for that.
        programs::bin_dir()?;
        let queued = Instant::now();
        let lab = Self::new(vms)?;
        let start = Instant::now();
        let waited = (start - queued).as_secs_f64();
        let outcome = catch_unwind(AssertUnwindSafe(|| test(&lab)));
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(Ok(())) => {
                eprintln!("{name}: ok after {seconds:.1} s ({}); {waited:.1} s in the queue", accel::accelerator()?);
                Ok(())
            }
            Ok(Err(error)) => {
                lab.post_mortem(name);
                Err(error.context(format!("{name}, after {seconds:.1} s")))
            }
            Err(panic) => {
                lab.post_mortem(name);
                resume_unwind(panic)
            }
        }
    }

    fn new(vms: usize) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let slots = Slots::take(vms)?;
        let tuned = Tuned::begin(TUNED_BY_DAEMON.map(Path::new)).context("save the host's settings")?;
        // Short, because sockets are in there.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = programs::work_dir()?.join(format!("t{}-{number}", std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("make {}", dir.display()))?;
        Ok(Self {
            guests: RefCell::default(),
            toys: RefCell::default(),
            daemons: RefCell::default(),
            throttles: RefCell::default(),
            pools: RefCell::default(),
            disks: RefCell::default(),
            directory: Directory(dir),
            _tuned: tuned,
            _slots: slots,
        })
    }

    /// A directory for the test's files.
    pub fn dir(&self) -> &Path {
        &self.directory.0
    }

    /// Starts a daemon with the usual options.
    ///
    /// # Errors
    /// It does not start.
    pub fn daemon(&self, folios: Folios) -> Result<Rc<Daemon>> {
        self.daemon_with(DaemonOptions::new(folios))
    }

    /// Starts a daemon with more options.
    ///
    /// # Errors
    /// It does not start.
    pub fn daemon_with(&self, options: DaemonOptions) -> Result<Rc<Daemon>> {
        let dir = self.next_daemon_dir();
        self.keep_daemon(Daemon::start(&dir, options)?)
    }

    /// Starts a daemon whose state directory is below another one, such as a disk of its own. Its sockets and its log are not there.
    ///
    /// # Errors
    /// It does not start.
    pub fn daemon_in(&self, parent: &Path, options: DaemonOptions) -> Result<Rc<Daemon>> {
        let run_dir = self.next_daemon_dir();
        fs::create_dir(&run_dir).with_context(|| format!("make {}", run_dir.display()))?;
        let options = DaemonOptions { run_dir: Some(run_dir), ..options };
        self.keep_daemon(Daemon::start(&parent.join("state"), options)?)
    }

    fn next_daemon_dir(&self) -> PathBuf {
        self.dir().join(format!("d{}", self.daemons.borrow().len()))
    }

    fn keep_daemon(&self, daemon: Daemon) -> Result<Rc<Daemon>> {
        let daemon = Rc::new(daemon);
        self.daemons.borrow_mut().push(Rc::clone(&daemon));
        Ok(daemon)
    }

    /// Starts a guest that the daemon manages.
    ///
    /// # Errors
    /// No such program.
    pub fn guest(&self, daemon: &Daemon, options: &GuestOptions) -> Result<Rc<Guest>> {
        let guest = Guest::start(daemon, self.dir(), options)?;
        Ok(self.keep_guest(guest))
    }

    /// Starts a guest without a daemon.
    ///
    /// # Errors
    /// No such program.
    pub fn guest_alone(&self, options: &GuestOptions) -> Result<Rc<Guest>> {
        let guest = Guest::start_alone(self.dir(), options)?;
        Ok(self.keep_guest(guest))
    }

    /// Takes over a guest that was started in another way.
    pub fn keep_guest(&self, guest: Guest) -> Rc<Guest> {
        let guest = Rc::new(guest);
        self.guests.borrow_mut().push(Rc::clone(&guest));
        guest
    }

    /// Starts a toy VMM.
    ///
    /// # Errors
    /// It does not start.
    pub fn toy(&self, daemon: &Daemon, options: &ToyOptions) -> Result<Rc<Toy>> {
        let toy = Rc::new(Toy::start(daemon, options)?);
        self.toys.borrow_mut().push(Rc::clone(&toy));
        Ok(toy)
    }

    /// Starts a toy with more options of `pagoda run`.
    ///
    /// # Errors
    /// It does not start.
    pub fn toy_with(&self, daemon: &Daemon, options: &ToyOptions, more: &[&str]) -> Result<Rc<Toy>> {
        let toy = Rc::new(Toy::start_with(daemon, options, more)?);
        self.toys.borrow_mut().push(Rc::clone(&toy));
        Ok(toy)
    }

    /// Makes a small file system on a loop device.
    ///
    /// # Errors
    /// It cannot be made or mounted.
    pub fn loop_fs(&self, kind: FileSystem, mib: u64) -> Result<Rc<LoopFs>> {
        let number = self.disks.borrow().len();
        let disk = Rc::new(LoopFs::make(&self.dir().join(format!("fs{number}")), kind, mib)?);
        self.disks.borrow_mut().push(Rc::clone(&disk));
        Ok(disk)
    }

    /// Starts servers that lend memory: so many slabs of 64 MiB each.
    ///
    /// # Errors
    /// They do not start.
    pub fn pool(&self, slabs: &[u64]) -> Result<Rc<Pool>> {
        self.pool_in(slabs, None)
    }

    /// The same in a cluster, whose etcd is at this address.
    ///
    /// # Errors
    /// They do not start.
    pub fn pool_in(&self, slabs: &[u64], cluster: Option<&str>) -> Result<Rc<Pool>> {
        let number = self.pools.borrow().len();
        let pool = Rc::new(Pool::start_in(&self.dir().join(format!("p{number}")), slabs, cluster)?);
        self.pools.borrow_mut().push(Rc::clone(&pool));
        Ok(pool)
    }

    /// A way to stall a VMM's disk reads.
    ///
    /// # Errors
    /// No such cgroup.
    pub fn throttle(&self) -> Result<Rc<Throttle>> {
        let name = self.dir().file_name().context("name of the directory")?.to_string_lossy().into_owned();
        let throttle = Rc::new(Throttle::make(&format!("pagoda-{name}"))?);
        self.throttles.borrow_mut().push(Rc::clone(&throttle));
        Ok(throttle)
    }

    fn post_mortem(&self, name: &str) {
        eprintln!("=== {name} failed");
        for daemon in self.daemons.borrow().iter() {
            eprintln!("{}", daemon.post_mortem());
        }
        for guest in self.guests.borrow().iter() {
            eprintln!("--- console of {}\n{}", guest.name, guest.console.tail());
        }
        for toy in self.toys.borrow().iter() {
            eprintln!("--- output of {}\n{}", toy.name, toy.output_tail());
        }
    }
}
