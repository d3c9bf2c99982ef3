//! A VM with a QEMU of a few lines, which its destination says to run.

use pagoda_abi::Token;
use pagoda_api::types::{VmKind, VmSpec};
use pagoda_move::units::{AttemptId, Generation, HostKey};
use pagoda_pager::handle::channel_pair;

use super::*;
use crate::moves::outgoing::Order;
use crate::qmp::state::tests::fake::{Fake, Way};
use crate::record::Record;

const OFFERED: Offered =
    Offered { attempt: AttemptId(3), peer: HostKey([7; 32]), generation: Generation(5), register: None };

fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

#[test]
fn a_vm_is_given_away_by_the_proof_of_its_note_and_comes_back_if_it_is_refused() {
    let dir = std::env::temp_dir().join(format!("pagodad-superseded-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    for sub in ["swap", "vms"] {
        std::fs::create_dir_all(dir.join(sub)).unwrap();
    }
    let registry = Arc::new(crate::registry::tests::registry(&dir));
    let fake = Fake::new(Way::Well);
    std::os::unix::fs::symlink(fake.path(), registry.monitor_path("web1")).unwrap();
    registry.find_again(Record::new("web1", Token([1; 16]), VmKind::Qemu, &[2 << 20], VmSpec::default()));
    let (handle, _engine) = channel_pair().unwrap();
    let handle = Arc::new(handle);
    registry.lock().values_mut().for_each(|vm| vm.handle = Some(Arc::clone(&handle)));
    let notes = registry.moves.notes().clone();
    let operation = || registry.lock().get("web1").and_then(|vm| vm.record.operation);

    let others = [
        Owned::Alone(Generation(4)),
        Owned::Came(OFFERED),
        Owned::Back(OFFERED),
        Owned::Offered(Offered { attempt: AttemptId(4), ..OFFERED }),
        Owned::Offered(Offered { peer: HostKey([8; 32]), ..OFFERED }),
        Owned::Offered(Offered { generation: Generation(6), ..OFFERED }),
    ];
    for other in others {
        notes.write("web1", Some(Note::Owned(other))).unwrap();
        supersede(&registry, "web1", OFFERED).unwrap();
        assert_eq!((notes.read("web1").unwrap(), operation()), (Some(Note::Owned(other)), None));
        assert_eq!(fake.model().status, "running", "{other:?}");
    }

    notes.write("web1", Some(Note::Owned(Owned::Offered(OFFERED)))).unwrap();
    supersede(&registry, "web1", OFFERED).unwrap();
    // It is said again and again.
    supersede(&registry, "web1", OFFERED).unwrap();
    until("it is handed over", || registry.moves.has_outgoing(OFFERED.attempt));
    assert_eq!(notes.read("web1").unwrap(), Some(Note::Given(OFFERED, Decision::Grant)));
    assert_eq!(fake.model().status, "paused");
    assert!(operation().is_some_and(|operation| operation.kind == OperationKind::Move && operation.resume));
    assert!(registry.cont("web1").is_err(), "nobody lets it run");

    // As a refusal of the destination does.
    assert!(registry.moves.outgoing.order("web1", Order::Resolve));
    until("the move is over", || !registry.moves.has_outgoing(OFFERED.attempt));
    assert_eq!((fake.model().status.as_str(), operation()), ("running", None));
    assert_eq!(notes.read("web1").unwrap(), Some(Note::Owned(Owned::Back(OFFERED))));
    std::fs::remove_dir_all(&dir).unwrap();
}
