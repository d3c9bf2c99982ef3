//! Every exported function of glibc, libaio and liburing is hooked by the shim, or listed in `doors/` with the reason why
//! guest RAM cannot be pinned through it. A new function of a new version fails this test until somebody has decided.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use object::{Object, ObjectSymbol, SymbolKind};

/// Of glibc's symbols that only glibc itself may use, the version's name.
const PRIVATE: &str = "GLIBC_PRIVATE";

/// Functions that a library exports, without those that are private to it.
fn exported(library: &Path) -> BTreeSet<String> {
    let data = std::fs::read(library).unwrap_or_else(|error| panic!("read {}: {error}", library.display()));
    let elf = object::read::elf::ElfFile64::<object::Endianness>::parse(&*data).expect("an ELF file of 64 bits");
    let endian = elf.endian();
    let versions = elf.elf_section_table().versions(endian, &*data).expect("a table of versions");
    let name_of = |symbol: &object::read::elf::ElfSymbol64<'_, '_, object::Endianness>| {
        let version = versions.as_ref()?;
        let index = version.version_index(endian, symbol.index());
        version.version(index).ok()?.map(|version| String::from_utf8_lossy(version.name()).into_owned())
    };
    let functions = elf.dynamic_symbols().filter(|symbol| {
        let kind = symbol.elf_symbol().st_type();
        symbol.is_definition() && (symbol.kind() == SymbolKind::Text || kind == object::elf::STT_GNU_IFUNC)
    });
    let public = functions.filter(|symbol| name_of(symbol).as_deref() != Some(PRIVATE));
    public.map(|symbol| symbol.name().expect("a name").to_owned()).collect()
}

/// The file of a library, by the first of its names that is installed (Debian 13 calls libaio `libaio.so.1t64`).
fn find(names: &[&str]) -> PathBuf {
    let directories = ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib"];
    let paths = names.iter().flat_map(|name| directories.iter().map(move |directory| Path::new(directory).join(name)));
    paths.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("none of {names:?} is installed"))
}

fn shim() -> PathBuf {
    let program = std::env::current_exe().expect("this program's path");
    let beside = program.parent().expect("a directory");
    let found = [beside, beside.parent().expect("a directory")].map(|directory| directory.join("libpagoda_shim.so"));
    found.into_iter().find(|path| path.exists()).expect("libpagoda_shim.so beside the test")
}

/// The names and patterns of a list.
fn listed(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace).collect()
}

/// Whether a pattern, in which `*` stands for any characters, fits the whole name.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len()).any(|skipped| rest.is_char_boundary(skipped) && fits(tail, &rest[skipped..]))
        }),
    }
}

/// Functions that nobody has decided about.
fn undecided(library: &BTreeSet<String>, hooked: &BTreeSet<String>, list: &str) -> Vec<String> {
    let listed = listed(list);
    let decided = |name: &String| hooked.contains(name) || listed.iter().any(|pattern| fits(pattern, name));
    library.iter().filter(|name| !decided(name)).cloned().collect()
}

#[test]
fn every_door_is_hooked_or_harmless_for_a_reason() {
    let hooked = exported(&shim());
    let libraries = [
        (&["libc.so.6"][..], include_str!("../doors/libc.txt")),
        (&["libaio.so.1", "libaio.so.1t64"], include_str!("../doors/libaio.txt")),
        (&["liburing.so.2"], include_str!("../doors/liburing.txt")),
    ];
    for (names, list) in libraries {
        let functions = exported(&find(names));
        assert!(functions.len() >= 10, "{names:?} exports {} functions", functions.len());
        let undecided = undecided(&functions, &hooked, list);
        assert!(
            undecided.is_empty(),
            "{names:?}: hook these, or list them in doors/ with the reason why they cannot pin guest RAM: {undecided:?}"
        );
    }
}

/// What moves data between a file and a buffer must not become harmless by a pattern that is too wide.
#[test]
fn what_is_hooked_is_not_listed_too() {
    let hooked = exported(&shim());
    for list in
        [include_str!("../doors/libc.txt"), include_str!("../doors/libaio.txt"), include_str!("../doors/liburing.txt")]
    {
        for pattern in listed(list) {
            let hidden: Vec<_> = hooked.iter().filter(|name| fits(pattern, name)).collect();
            assert!(hidden.is_empty(), "{pattern} would hide {hidden:?} if its hook were lost");
        }
    }
}

#[test]
fn a_function_that_nobody_decided_about_is_found() {
    let library = ["read", "strlen", "read_with_new_flags"].map(String::from).into();
    let hooked = [String::from("read")].into();
    assert_eq!(undecided(&library, &hooked, "# reason\nstr* strange"), ["read_with_new_flags"]);
    assert_eq!(undecided(&library, &[].into(), "# reason\nstr*"), ["read", "read_with_new_flags"]);
}
