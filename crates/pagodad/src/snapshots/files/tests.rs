//! Exports and imports of the owner of images.

use pagoda_api::types::SnapshotImport;
use pagoda_image::Stage;

use super::*;
use crate::images::Which;
use crate::images::tests::{Bench, make, manifest};

fn name(vm: &str, name: &str) -> SnapshotName {
    SnapshotName::new(vm, name)
}

fn exported(bench: &Bench, of: &SnapshotName) -> Vec<u8> {
    let mut file = Vec::new();
    let export = begin_export(&bench.images, of, &ExportRequest::default()).unwrap();
    let report = export.run(&mut |bytes| {
        file.extend(bytes);
        Ok(())
    });
    assert_eq!(report.unwrap().bytes, file.len() as u64);
    file
}

#[test]
fn what_comes_from_a_file_is_started_when_it_was_accepted() {
    let bench = Bench::new("transfers");
    let store = bench.images.store().unwrap();
    make(store, manifest(1, "web1", "one"), Stage::Filled);
    let file = exported(&bench, &name("web1", "one"));
    let made = import(&bench.images, Some(&name("copy", "first")), &*file).unwrap();
    assert_eq!((made.full_name(), made.imported), (name("copy", "first"), Some(SnapshotImport::Waiting)));
    let copy = name("copy", "first");
    let error = bench.images.launch(&copy).unwrap_err();
    assert!(error.code == ErrorCode::Refused && error.hint.unwrap().contains("pagoda snapshot accept copy/first"));
    assert!(bench.images.hold(&copy, "web2").is_err());
    assert_eq!(program(&bench.images, &copy).unwrap(), bench.images.launch(&name("web1", "one")).unwrap());
    let other = accept(&bench.images, &copy, &"0".repeat(32)).unwrap_err();
    assert!(other.message.contains("is another image by now"), "{}", other.message);
    let accepted = accept(&bench.images, &copy, &made.id).unwrap();
    assert_eq!(accepted.imported, Some(SnapshotImport::Accepted));
    assert!(bench.images.launch(&copy).is_ok() && bench.images.hold(&copy, "web2").is_ok());
    assert!(accept(&bench.images, &name("web1", "one"), &format!("{:032x}", 1)).is_err(), "it was taken here");
    assert_eq!(exported(&bench, &copy).len(), file.len() + 2, "the names are longer by two bytes");
}

#[test]
fn what_is_refused_leaves_nothing() {
    let bench = Bench::new("transfers-refused");
    let store = bench.images.store().unwrap();
    make(store, manifest(1, "web1", "one"), Stage::Filled);
    let file = exported(&bench, &name("web1", "one"));
    let check = |file: &[u8], code: ErrorCode, expected: &str| {
        let error = import(&bench.images, None, file).unwrap_err();
        assert!(error.code == code && error.message.contains(expected), "{error:?}");
        assert_eq!(std::fs::read_dir(bench.dir.join("images")).unwrap().count(), 1);
    };
    check(&file, ErrorCode::Refused, "web1 has a snapshot of the name one");
    bench.images.remove(&Which::Named(name("web1", "one")), |_| Ok(())).unwrap();
    make(store, manifest(2, "web1", "two"), Stage::Filled);
    check(&file[..file.len() - 1], ErrorCode::Refused, "byte ");
    check(b"QEVM", ErrorCode::Refused, "byte 4: the file ends here");
    struct Gone;
    impl Read for Gone {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionAborted.into())
        }
    }
    assert_eq!(import(&bench.images, None, Gone).unwrap_err().code, ErrorCode::GivenUp);
    assert!(import(&bench.images, None, &*file).is_ok());
}

#[test]
fn an_export_keeps_its_snapshot_and_there_are_two_at_most() {
    let bench = Bench::new("transfers-held");
    let store = bench.images.store().unwrap();
    make(store, manifest(1, "web1", "one"), Stage::Filled);
    let one = name("web1", "one");
    let begin = || begin_export(&bench.images, &one, &ExportRequest::default());
    let (first, second) = (begin().unwrap(), begin().unwrap());
    assert_eq!(begin().unwrap_err().code, ErrorCode::WrongState);
    drop(first);
    drop(begin().unwrap());
    let remove = || bench.images.remove(&Which::Named(one.clone()), |_| Ok(()));
    let error = remove().unwrap_err();
    assert!(error.code == ErrorCode::Refused && error.message.contains("it is being exported"), "{error:?}");
    drop(second);
    remove().unwrap();
    assert_eq!(begin().unwrap_err().code, ErrorCode::NoSuchSnapshot);
}

#[test]
fn a_state_that_is_not_known_is_no_stream_for_qemu() {
    let bench = Bench::new("transfers-qemu");
    make(bench.images.store().unwrap(), manifest(1, "web1", "one"), Stage::Filled);
    let request = ExportRequest { format: ExportFormat::Qemu, compress: None };
    let error = begin_export(&bench.images, &name("web1", "one"), &request).unwrap_err();
    assert!(error.code == ErrorCode::Refused && error.message.contains("no migration stream"), "{error:?}");
}
