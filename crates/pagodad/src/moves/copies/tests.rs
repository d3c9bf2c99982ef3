use pagoda_move::note::Offered;
use pagoda_move::units::{Generation, HostKey};
use pagoda_move::wire::control::DecidedBy;

use super::*;
use crate::disks::Format;

const VM: &str = "web1";
const ATTEMPT: AttemptId = AttemptId(7);

struct Bench {
    dir: PathBuf,
    copies: Copies,
    notes: Notes,
    launch: Launch,
}

impl Bench {
    fn new(name: &str) -> Bench {
        let dir = std::env::temp_dir().join(format!("pagodad-copies-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("disks")).unwrap();
        std::fs::create_dir_all(dir.join("state")).unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let launch = Launch { program: "/usr/bin/qemu-system-x86_64".into(), uid, gid, ..Launch::default() };
        let state = dir.join("state");
        let bench = Bench { dir, copies: Copies::below(&state), notes: Notes::below(&state), launch };
        bench.note(Note::Incoming(offered(ATTEMPT)));
        bench
    }

    fn note(&self, note: Note) {
        self.notes.write(VM, Some(note)).unwrap();
    }

    fn image(&self, name: &str) -> NewImage {
        let file = self.dir.join("disks").join(name).to_str().unwrap().to_owned();
        NewImage { file, format: Format::Raw, bytes: 1 << 20, cluster: None, room: 1 << 20 }
    }

    fn make(&self, names: &[&str]) -> Result<()> {
        let images: Vec<NewImage> = names.iter().map(|name| self.image(name)).collect();
        self.copies.make(VM, ATTEMPT, &self.launch, &images).map(drop)
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.join("disks")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// As a daemon that has died in between has left it.
    fn change(&self, change: impl FnOnce(&mut Made)) {
        let mut made = self.copies.read(VM).unwrap().unwrap();
        change(&mut made);
        self.copies.write(VM, Some(&made)).unwrap();
    }

    fn remove(&self) {
        self.copies.remove(&self.notes, VM, ATTEMPT);
    }

    fn has_note(&self) -> bool {
        self.copies.read(VM).unwrap().is_some()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn offered(attempt: AttemptId) -> Offered {
    Offered { attempt, peer: HostKey([1; 32]), generation: Generation(2), register: None }
}

#[test]
fn what_was_made_is_removed_and_nothing_else() {
    let bench = Bench::new("removed");
    std::fs::write(bench.dir.join("disks/mine"), "mine").unwrap();
    bench.make(&["a", "b"]).unwrap();
    assert_eq!(bench.files(), ["a", "b", "mine"]);
    assert_eq!(std::fs::metadata(bench.dir.join("disks/a")).unwrap().len(), 1 << 20);
    bench.copies.remove(&bench.notes, VM, AttemptId(8));
    assert_eq!(bench.files(), ["a", "b", "mine"], "it is another attempt");
    // Its user has replaced one.
    std::fs::rename(bench.dir.join("disks/mine"), bench.dir.join("disks/b")).unwrap();
    for _ in 0..2 {
        bench.remove();
        assert_eq!(bench.files(), ["b"]);
    }
    assert_eq!(std::fs::read_to_string(bench.dir.join("disks/b")).unwrap(), "mine");
    assert!(!bench.has_note());
}

#[test]
fn what_is_there_is_never_replaced() {
    let bench = Bench::new("there");
    std::fs::write(bench.dir.join("disks/b"), "mine").unwrap();
    let why = in_full(bench.make(&["a", "b"]).unwrap_err().as_ref());
    assert!(why.contains("disks/b is there already"), "{why}");
    bench.remove();
    assert_eq!(bench.files(), ["b"]);
    assert_eq!(std::fs::read_to_string(bench.dir.join("disks/b")).unwrap(), "mine");
    std::os::unix::fs::symlink("/nowhere", bench.dir.join("disks/c")).unwrap();
    assert!(bench.make(&["c"]).is_err());
    bench.remove();
    assert_eq!(bench.files(), ["b", "c"], "a link is something, too");
}

#[test]
fn a_vm_that_may_have_run_keeps_its_disks() {
    let owned = Note::Owned(Owned::Came(offered(ATTEMPT)));
    for (note, name) in [
        (Note::Accepted(offered(ATTEMPT), DecidedBy::Grant), "accepted"),
        (owned, "owned"),
        (Note::Incoming(offered(AttemptId(8))), "another"),
    ] {
        let bench = Bench::new(name);
        bench.make(&["a"]).unwrap();
        bench.note(note);
        bench.remove();
        assert_eq!(bench.files(), ["a"], "{name}");
    }
    let bench = Bench::new("none");
    bench.make(&["a"]).unwrap();
    bench.notes.write(VM, None).unwrap();
    bench.remove();
    assert_eq!(bench.files(), ["a"], "nobody can tell");
    // It runs: nothing is removed any more, whatever its note says later.
    let bench = Bench::new("keep");
    bench.make(&["a"]).unwrap();
    bench.copies.keep(VM).unwrap();
    bench.remove();
    assert_eq!((bench.files(), bench.has_note()), (vec!["a".to_owned()], false));
    let bench = Bench::new("refused");
    bench.make(&["a"]).unwrap();
    bench.note(Note::Refused(offered(ATTEMPT)));
    bench.remove();
    assert_eq!(bench.files(), [""; 0]);
}

/// A daemon may die between any two steps.
#[test]
fn what_a_daemon_that_died_has_made_is_known() {
    let first = |bench: &Bench| bench.copies.read(VM).unwrap().unwrap().first_name("a");
    // The file is made, and the note does not say which it is.
    let bench = Bench::new("unnamed");
    bench.make(&["a"]).unwrap();
    std::fs::rename(bench.dir.join("disks/a"), bench.dir.join("disks").join(first(&bench))).unwrap();
    std::fs::write(bench.dir.join("disks/a"), "mine").unwrap();
    bench.change(|made| made.images[0].id = None);
    bench.remove();
    assert_eq!(bench.files(), ["a"]);
    assert_eq!(std::fs::read_to_string(bench.dir.join("disks/a")).unwrap(), "mine");
    // The file has both of its names.
    let bench = Bench::new("both");
    bench.make(&["a"]).unwrap();
    std::fs::hard_link(bench.dir.join("disks/a"), bench.dir.join("disks").join(first(&bench))).unwrap();
    bench.remove();
    assert_eq!(bench.files(), [""; 0]);
    // The directory of the disks is gone: there is nothing to remove.
    let bench = Bench::new("nothing");
    bench.make(&["a"]).unwrap();
    std::fs::remove_dir_all(bench.dir.join("disks")).unwrap();
    bench.remove();
    assert!(!bench.has_note());
}

#[test]
fn a_daemon_that_starts_forgets_what_is_over() {
    for (note, is_left, name) in [
        (Some(Note::Incoming(offered(ATTEMPT))), true, "start-incoming"),
        (Some(Note::Refused(offered(ATTEMPT))), true, "start-refused"),
        (Some(Note::Accepted(offered(ATTEMPT), DecidedBy::Arbiter)), true, "start-accepted"),
        (Some(Note::Owned(Owned::Came(offered(ATTEMPT)))), false, "start-came"),
        (Some(Note::Incoming(offered(AttemptId(9)))), false, "start-another"),
        (None, false, "start-none"),
    ] {
        let bench = Bench::new(name);
        bench.make(&["a"]).unwrap();
        bench.notes.write(VM, note).unwrap();
        bench.copies.settle(&bench.notes);
        assert_eq!((bench.has_note(), bench.files()), (is_left, vec!["a".to_owned()]), "{name}");
    }
}

#[test]
fn what_is_not_possible_is_refused_before_anything_is_made() {
    let bench = Bench::new("check");
    let config = MovesConfig { accept: true, paths: vec![bench.dir.join("disks")], ..MovesConfig::default() };
    let said = |image: NewImage| check(&config, &bench.launch, &[image]).err().unwrap_or_default().join("; ");
    assert_eq!(said(bench.image("a")), "");
    std::fs::write(bench.dir.join("disks/there"), "").unwrap();
    let why = said(bench.image("there"));
    assert!(why.contains("disks/there is there already"), "{why}");
    let elsewhere = NewImage { file: bench.dir.join("state/a").to_str().unwrap().into(), ..bench.image("a") };
    assert!(said(elsewhere).contains("is not below one of paths"));
    assert!(said(bench.image("none/a")).contains("is not here"));
    std::os::unix::fs::symlink(bench.dir.join("state"), bench.dir.join("disks/link")).unwrap();
    assert!(said(bench.image("link/a")).contains("a link to elsewhere"));
    let large = NewImage { room: 1 << 46, ..bench.image("a") };
    let why = said(large);
    assert!(why.contains("take 67108864 MiB") && why.contains("are free"), "{why}");
    assert_eq!(bench.files(), ["link", "there"]);
}
