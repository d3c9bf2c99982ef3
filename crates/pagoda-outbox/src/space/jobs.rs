//! Jobs: which of the space's files are jobs, and what became of them.

use crate::content::State;
use crate::jobs::{JobCounts, Jobs, Labels};
use crate::node::{Body, Ino};
use crate::space::Space;

impl Space {
    /// A file was opened for writing.
    pub fn job_opened(&mut self, ino: Ino, now_ms: u64) {
        if self.jobs.is_running(ino) {
            return;
        }
        let figures = self.figures();
        self.jobs.opened(ino, now_ms, || figures.used.saturating_sub(figures.disposable));
    }

    /// A write of this file has waited for room.
    pub fn job_waited(&mut self, ino: Ino, us: u64) {
        self.jobs.waited(ino, us);
    }

    /// A file was closed or renamed: if it is whole and published, its job has ended.
    pub fn job_settled(&mut self, ino: Ino, now_ms: u64) {
        if !self.jobs.is_running(ino) {
            return;
        }
        let Ok(node) = self.tree.node(ino) else { return self.jobs.gone(ino) };
        let Body::File(content) = &node.body else { return };
        if !content.is_idle() {
            return;
        }
        let Some(parent) = node.parent else { return self.jobs.gone(ino) };
        match content.state() {
            // Empty: it was not the job yet.
            State::Open | State::Broken => self.jobs.gone(ino),
            State::Sealed if self.is_hidden(parent, ino) => {}
            State::Sealed => {
                let above = self.tree.node(parent).ok();
                let labels = Labels::read(content.policy.mode, |name| {
                    let inherited = || above?.xattrs.get(name).ok();
                    node.xattrs.get(name).ok().or_else(inherited)
                });
                let output = content.size();
                self.jobs.published(ino, now_ms, output, labels);
            }
        }
    }

    /// Its name begins with a dot.
    fn is_hidden(&self, parent: Ino, ino: Ino) -> bool {
        let directory = self.tree.directory(parent);
        directory.is_ok_and(|directory| directory.by_ino.get(&ino).is_some_and(|name| name.starts_with(b".")))
    }

    /// Gives the jobs that have ended.
    pub fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// How many jobs there were.
    pub fn job_counts(&self) -> JobCounts {
        self.jobs.counts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{NewNode, ROOT, Time};
    use crate::space::{Access, HandleId};
    use crate::{Kind, Mode, Replace, XattrWrite};

    const NOW: Time = Time { seconds: 1, nanos: 0 };

    fn begun(space: &mut Space, parent: Ino, name: &str, now_ms: u64) -> (Ino, HandleId) {
        let ino = space.create(parent, name.as_bytes(), NewNode::default()).unwrap().ino;
        let handle = space.open(ino, Access::Write).unwrap();
        space.job_opened(ino, now_ms);
        (ino, handle)
    }

    fn write(space: &mut Space, (ino, handle): (Ino, HandleId), offset: u64, length: u64) {
        let write = space.plan_write(handle, ino, offset, length).unwrap();
        space.complete_write(&write, length, NOW);
    }

    fn close(space: &mut Space, (ino, handle): (Ino, HandleId), now_ms: u64) {
        space.release(handle).unwrap();
        space.job_settled(ino, now_ms);
    }

    /// Number, beginning, end, output, backlog of each.
    fn ended(space: &Space) -> Vec<(u64, u64, u64, u64, u64)> {
        let of = |job: &crate::EndedJob| (job.number, job.began_ms, job.ended_ms, job.output, job.backlog);
        space.jobs().after(0, 99).map(of).collect()
    }

    #[test]
    fn a_job_is_a_file_from_its_creation_to_its_close() {
        let mut space = Space::new(1 << 20);
        let first = begun(&mut space, ROOT, "first", 10);
        let second = begun(&mut space, ROOT, "second", 11);
        write(&mut space, first, 0, 5000);
        write(&mut space, second, 0, 1);
        // The second of two writers closes it.
        let again = (first.0, space.open(first.0, Access::Write).unwrap());
        space.job_opened(first.0, 12);
        close(&mut space, first, 20);
        assert_eq!(ended(&space), []);
        close(&mut space, again, 30);
        close(&mut space, second, 40);
        let third = begun(&mut space, ROOT, "third", 50);
        write(&mut space, third, 0, 1);
        close(&mut space, third, 60);
        assert_eq!(ended(&space), [(1, 10, 30, 5000, 0), (2, 11, 40, 1, 0), (3, 50, 60, 1, 12288)]);
        assert_eq!((space.job_counts().began, space.job_counts().given_up), (3, 0));
        close_is_heard_once(&mut space, first.0);
    }

    fn close_is_heard_once(space: &mut Space, ino: Ino) {
        let before = ended(space);
        space.job_settled(ino, 99);
        assert_eq!(ended(space), before);
    }

    #[test]
    fn a_hidden_file_is_published_by_its_rename() {
        let mut space = Space::new(1 << 20);
        let part = begun(&mut space, ROOT, ".part", 1);
        write(&mut space, part, 0, 10);
        close(&mut space, part, 2);
        assert_eq!(ended(&space), []);
        space.rename((ROOT, b".part"), (ROOT, b".other"), Replace::Allowed, NOW).unwrap();
        space.job_settled(part.0, 3);
        assert_eq!(ended(&space), []);
        space.rename((ROOT, b".other"), (ROOT, b"whole"), Replace::Allowed, NOW).unwrap();
        space.job_settled(part.0, 4);
        assert_eq!(ended(&space), [(1, 1, 4, 10, 0)]);
        // Renamed while it is written: its close ends it.
        let early = begun(&mut space, ROOT, ".early", 5);
        write(&mut space, early, 0, 10);
        space.rename((ROOT, b".early"), (ROOT, b"early"), Replace::Allowed, NOW).unwrap();
        space.job_settled(early.0, 6);
        assert_eq!(ended(&space).len(), 1);
        close(&mut space, early, 7);
        assert_eq!(ended(&space).len(), 2);
    }

    #[test]
    fn what_is_removed_left_empty_or_abandoned_is_no_job() {
        let mut space = Space::new(1 << 20);
        let touched = begun(&mut space, ROOT, "touched", 1);
        close(&mut space, touched, 2);
        let removed = begun(&mut space, ROOT, "removed", 3);
        write(&mut space, removed, 0, 10);
        space.unlink(ROOT, b"removed", Kind::File, NOW).unwrap();
        close(&mut space, removed, 4);
        let hidden = begun(&mut space, ROOT, ".hidden", 5);
        write(&mut space, hidden, 0, 10);
        close(&mut space, hidden, 6);
        space.unlink(ROOT, b".hidden", Kind::File, NOW).unwrap();
        let cut = begun(&mut space, ROOT, "cut", 7);
        write(&mut space, cut, 0, 10);
        space.abandon(NOW);
        assert_eq!(ended(&space), []);
        assert_eq!((space.job_counts().began, space.job_counts().given_up), (3, 3));
        // A job that was replaced by the name of another.
        let old = begun(&mut space, ROOT, ".old", 8);
        write(&mut space, old, 0, 10);
        close(&mut space, old, 9);
        let new = begun(&mut space, ROOT, "new", 10);
        write(&mut space, new, 0, 10);
        close(&mut space, new, 11);
        space.rename((ROOT, b"new"), (ROOT, b".old"), Replace::Allowed, NOW).unwrap();
        assert_eq!((ended(&space).len(), space.job_counts().given_up), (1, 4));
        // What was empty begins when it is opened next.
        let again = (touched.0, space.open(touched.0, Access::Write).unwrap());
        space.job_opened(touched.0, 20);
        write(&mut space, again, 0, 1);
        close(&mut space, again, 21);
        assert_eq!(ended(&space)[1].1, 20);
    }

    #[test]
    fn labels_are_the_files_or_its_directorys() {
        let mut space = Space::new(1 << 20);
        let dir = space.make_directory(ROOT, b"d", NewNode::default()).unwrap().ino;
        let set = |space: &mut Space, ino, name: &str, value: &str| {
            space.set_xattr(ino, name.as_bytes(), value.as_bytes(), XattrWrite::Any).unwrap();
        };
        set(&mut space, dir, "user.pagoda.destination", "north");
        set(&mut space, dir, "user.pagoda.mode", "on-close");
        set(&mut space, dir, "user.pagoda.job", "all");
        let file = begun(&mut space, dir, "f", 1);
        set(&mut space, file.0, "user.pagoda.job", "one");
        set(&mut space, file.0, "user.pagoda.priority", "7");
        write(&mut space, file, 0, 1);
        close(&mut space, file, 2);
        let labels = space.jobs().after(0, 1).next().unwrap().labels.clone();
        assert_eq!((&*labels.id, &*labels.destination), (&b"one"[..], &b"north"[..]));
        assert_eq!((labels.priority, labels.mode), (7, Mode::OnClose));
    }
}
