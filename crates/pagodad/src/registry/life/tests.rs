//! VMs that are let run by their user, with a QEMU of a few lines.

use std::path::{Path, PathBuf};

use pagoda_abi::Token;
use pagoda_image::ImageId;
use pagoda_move::note::{Decision, Offered};
use pagoda_move::units::{AttemptId, Generation, HostKey};
use pagoda_pager::handle::{Inbox, channel_pair};

use super::*;
use crate::qmp::state::tests::fake::{Fake, Way};
use crate::record::{Operation, OperationKind};

struct Bench {
    dir: PathBuf,
    registry: Arc<Registry>,
    id: VmId,
    _engine: Inbox,
}

impl Bench {
    /// The VM `web1`, which an engine serves.
    fn new(name: &str, fake: &Fake) -> Bench {
        let dir = std::env::temp_dir().join(format!("pagodad-life-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        for sub in ["swap", "vms"] {
            std::fs::create_dir_all(dir.join(sub)).unwrap();
        }
        let registry = Arc::new(crate::registry::tests::registry(&dir));
        std::os::unix::fs::symlink(fake.path(), registry.monitor_path("web1")).unwrap();
        let record = Record::new("web1", Token([1; 16]), VmKind::Qemu, &[2 << 20], VmSpec::default());
        registry.find_again(record);
        let (handle, engine) = channel_pair().unwrap();
        let id = registry.id_of("web1").unwrap();
        registry.find_by_id(id, |vm| (vm.handle, vm.keeps_ram) = (Some(Arc::new(handle)), true));
        Bench { dir, registry, id, _engine: engine }
    }

    fn cont(&self) -> Result<(), String> {
        self.registry.cont("web1").map(drop).map_err(|error| error.message)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        remove(&self.dir);
    }
}

fn remove(dir: &Path) {
    let _ = std::fs::remove_dir_all(dir);
}

fn says(answer: Result<(), String>, text: &str) {
    let message = answer.expect_err("refused");
    assert!(message.contains(text), "{message}");
}

/// A snapshot of it, or a move that was given up, has left it in `postmigrate`.
#[test]
fn a_vm_that_its_user_has_paused_is_continued_also_after_its_state_was_saved() {
    let fake = Fake::new(Way::Well);
    let bench = Bench::new("saved", &fake);
    says(bench.cont(), "nothing to continue");
    for status in ["paused", "postmigrate"] {
        fake.model().status = status.to_owned();
        fake.model().migration = "completed";
        bench.cont().expect("it runs again");
        assert_eq!(fake.model().status, "running", "{status}");
    }
}

#[test]
fn a_vm_that_may_run_elsewhere_is_not_continued() {
    let fake = Fake::new(Way::Well);
    let bench = Bench::new("elsewhere", &fake);
    (fake.model().status, fake.model().migration) = ("postmigrate".to_owned(), "completed");
    fake.model().sent_pages = 95;
    says(bench.cont(), "somebody else has migrated it");
    // Nor if it stalls as well.
    bench.registry.find_by_id(bench.id, |vm| vm.stalled = Some(("its disk".into(), Instant::now())));
    says(bench.cont(), "somebody else has migrated it");
    fake.model().sent_pages = 20;
    let offered = Offered { attempt: AttemptId(3), peer: HostKey([7; 32]), generation: Generation(2), register: None };
    bench.registry.moves.notes().write("web1", Some(Note::Given(offered, Decision::Grant))).unwrap();
    says(bench.cont(), "has not ended");
    assert_eq!(fake.model().status, "postmigrate");
    bench.registry.moves.notes().write("web1", None).unwrap();
    bench.cont().expect("it is this host's");
    assert!(bench.registry.find_by_id(bench.id, |vm| vm.stalled.is_none()).unwrap());
}

/// What a move or a snapshot has stopped, nobody lets run who has looked before.
#[test]
fn no_operation_begins_while_a_vm_is_let_run() {
    let fake = Fake::new(Way::Waits("cont"));
    let bench = Bench::new("race", &fake);
    fake.model().status = "paused".to_owned();
    let (registry, id) = (&bench.registry, bench.id);
    std::thread::scope(|scope| {
        let continued = scope.spawn(|| registry.cont("web1").map(drop).map_err(|error| error.message));
        while !fake.model().commands.iter().any(|command| command == "cont") {
            std::thread::yield_now();
        }
        assert!(registry.unless_writing(id, || ()).is_none(), "its record can be written meanwhile");
        let operation = Operation { kind: OperationKind::Move, image: ImageId(3), resume: false };
        let begun = scope.spawn(move || registry.begin_operation(id, operation));
        assert!(registry.find_by_id(id, |vm| vm.record.operation.is_none()).unwrap());
        fake.model().goes_on = true;
        continued.join().unwrap().expect("it runs");
        begun.join().unwrap().map_err(|error| error.message).expect("the operation begins then");
    });
    says(bench.cont(), "a move of web1 is under way");
}
