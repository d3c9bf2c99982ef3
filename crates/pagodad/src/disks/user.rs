//! Acting with the rights of the user whose QEMU it is.
//!
//! Its files lie in directories where it may put anything, such as links to files of others. The kernel decides what it may do.

use anyhow::{Context, Result, bail};
use pagoda_api::types::Launch;
use rustix::process::{DumpableBehavior, Gid, Uid};

/// A user and its group, without others that it may be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

impl User {
    pub fn of(launch: &Launch) -> User {
        User { uid: launch.uid, gid: launch.gid }
    }

    /// This daemon's, also in a thread that acts for another one: the real ids.
    pub(super) fn own() -> User {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        User { uid, gid }
    }

    /// Whether this process has its rights as it is.
    pub fn is_own(self) -> bool {
        self == User::own()
    }

    /// Does something with its rights, in a thread of its own, which alone has them.
    ///
    /// # Errors
    /// This daemon may not; or what `act` says.
    pub fn act<T: Send>(self, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        if self.is_own() {
            return act();
        }
        if User::own().uid != 0 {
            bail!("its QEMU runs as user {}, and only a daemon of root can act for it", self.uid);
        }
        let in_thread = || {
            self.become_it().context("act as the VM's user")?;
            act()
        };
        let joined = std::thread::scope(|scope| scope.spawn(in_thread).join());
        // The kernel has made the process one that may not be dumped; it holds nothing that its own user may not see.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
        joined.unwrap_or_else(|_| bail!("a thread of this daemon panicked"))
    }

    /// Does something with the daemon's own rights, also in a thread that acts for this user. Such a thread could start no other one,
    /// nor a process, where the user has as many as it may.
    ///
    /// # Errors
    /// It may not; or what `act` says.
    pub fn leave<T>(self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let own = User::own();
        if rustix::process::geteuid().as_raw() == own.uid && rustix::process::getegid().as_raw() == own.gid {
            return act();
        }
        // The user first: the right to change the group comes with it.
        rustix::thread::set_thread_res_uid(None, Uid::from_raw(own.uid), None).context("act as the daemon again")?;
        rustix::thread::set_thread_res_gid(None, Gid::from_raw(own.gid), None).context("act as the daemon again")?;
        let done = act();
        // What comes next is not to be done as root.
        self.become_it().expect("a thread of root may act as anybody");
        done
    }

    /// The effective user alone: with another real or saved one, that user could kill the thread, and so the daemon.
    fn become_it(self) -> rustix::io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(None, gid, None)?;
        rustix::thread::set_thread_res_uid(None, uid, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_alone_has_the_rights_of_the_user() {
        let nobody = User { uid: 65534, gid: 65534 };
        let ids = || (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if User::own().uid != 0 {
            assert!(nobody.act(|| Ok(())).is_err(), "it may not");
            return;
        }
        let dir = std::env::temp_dir().join(format!("pagodad-user-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("file");
        std::fs::write(&file, "").unwrap();
        let before = ids();
        let tried =
            nobody.act(|| Ok((ids(), std::fs::write(dir.join("new"), "").is_err(), std::fs::read(&file).is_ok())));
        assert_eq!(tried.unwrap(), ((65534, 65534), true, true));
        assert_eq!(ids(), before);
        // The user cannot end the thread, and with it this process.
        let real = nobody.act(|| Ok(rustix::process::getuid().as_raw())).unwrap();
        assert_eq!(real, 0);
        let again = nobody.act(|| nobody.leave(|| Ok((ids(), std::fs::write(dir.join("new"), "").is_ok()))));
        assert_eq!(again.unwrap(), (before, true));
        // A child has no ids but the user's.
        let status = nobody.act(|| {
            nobody.leave(|| {
                use std::os::unix::process::CommandExt;
                let mut child = std::process::Command::new("/bin/cat");
                Ok(child.arg("/proc/self/status").uid(nobody.uid).gid(nobody.gid).output()?.stdout)
            })
        });
        let status = String::from_utf8(status.unwrap()).unwrap();
        for line in ["Uid:\t65534\t65534\t65534\t65534\n", "Gid:\t65534\t65534\t65534\t65534\n", "Groups:\t \n"] {
            assert!(status.contains(line), "{status}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
