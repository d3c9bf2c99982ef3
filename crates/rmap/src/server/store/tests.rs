use super::*;

const SPACE: SpaceId = SpaceId(1);
const GENERATION: Generation = Generation(1);
const OWNER: u64 = 7;

fn version(sequence: u64, trimmed: bool) -> Version {
    Version::new(GENERATION, sequence, trimmed)
}

/// A grant in the first life of its slab.
fn since(sequence: u64) -> (Version, Version) {
    (version(sequence, false), Version::NEVER)
}

fn store(slabs: usize) -> Store {
    let mut store = Store::new(slabs, SlabSize::new(8).unwrap(), slabs as u32, None).unwrap();
    assert_eq!(store.fence(SPACE, GENERATION, OWNER), Status::Ok);
    store
}

#[test]
fn pages_come_back_and_late_writes_do_not_land() {
    let mut store = store(1);
    let (old, new) = ([1; SEALED_SIZE], [2; SEALED_SIZE]);
    assert_eq!(store.read(SPACE, PageNo(3), GENERATION), Err(Status::UnknownSlab));
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(1), true), Status::Ok);
    assert_eq!(store.read(SPACE, PageNo(3), GENERATION).unwrap().version, Version::NEVER);
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(5, false), Some(&new)), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(4, false), Some(&old)), Status::Ok);
    assert_eq!(store.read(SPACE, PageNo(3), GENERATION).unwrap().sealed, Some(&new[..]));
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(6, true), None), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(5, false), Some(&new)), Status::Ok);
    let trimmed = store.read(SPACE, PageNo(3), GENERATION).unwrap();
    assert_eq!((trimmed.version, trimmed.sealed), (version(6, true), None));
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(7, true), Some(&new)), Status::BadRequest);
}

#[test]
fn only_the_owner_of_today() {
    let mut store = store(1);
    let later = Generation(2);
    store.grant(SPACE, SlabNo(0), GENERATION, since(1), true);
    assert_eq!(store.read(SPACE, PageNo(0), later), Err(Status::NotFenced));
    assert_eq!(store.fence(SPACE, later, OWNER), Status::Ok);
    assert_eq!(store.fence(SPACE, GENERATION, OWNER), Status::StaleGeneration);
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION), Err(Status::StaleGeneration));
    let page = [0; SEALED_SIZE];
    let late = store.write(SPACE, PageNo(0), GENERATION, version(9, false), Some(&page));
    assert_eq!(late, Status::StaleGeneration);
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(9), true), Status::StaleGeneration);
    assert_eq!(store.read(SPACE, PageNo(0), later).unwrap().version, Version::NEVER);
}

/// As a control plane gives it that was restored from a backup. The second owner's first write has a version that is here.
#[test]
fn a_generation_has_one_owner() {
    let mut store = store(1);
    store.grant(SPACE, SlabNo(0), GENERATION, since(1), true);
    let first = [1; SEALED_SIZE];
    assert_eq!(store.write(SPACE, PageNo(0), GENERATION, version(1, false), Some(&first)), Status::Ok);
    let readers = 0;
    for (owner, status) in [(OWNER, Status::Ok), (readers, Status::Ok), (OWNER + 1, Status::StaleGeneration)] {
        assert_eq!(store.fence(SPACE, GENERATION, owner), status, "{owner}");
    }
    // Whom a reader named first is known when it comes.
    let next = Generation(2);
    for (owner, status) in [(readers, Status::Ok), (3, Status::Ok), (4, Status::StaleGeneration), (3, Status::Ok)] {
        assert_eq!(store.fence(SPACE, next, owner), status, "{owner}");
    }
    // A space that is not known here is told first, and so is its owner.
    assert_eq!(store.grant(SpaceId(2), SlabNo(0), GENERATION, since(1), true), Status::UnknownSlab);
}

/// Disks and VMs come and go: those that have nothing here any more make room for others.
#[test]
fn spaces_without_anything_are_forgotten_when_there_are_too_many() {
    let mut store = store(1);
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(1), true), Status::Ok);
    for other in 0..2 * SPACES_MAX as u64 {
        assert_eq!(store.fence(SpaceId(1_000_000 + other), GENERATION, OWNER), Status::Ok);
    }
    assert_eq!(store.spaces.len(), SPACES_MAX);
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION).unwrap().version, Version::NEVER);
    let forgotten = (0..).map(|other| SpaceId(1_000_000 + other)).find(|space| !store.spaces.contains_key(space));
    let page = store.write(forgotten.unwrap(), PageNo(0), GENERATION, version(1, false), None);
    assert_eq!(page, Status::UnknownSlab, "its owner is told");
    // With something here in each of them nobody is forgotten.
    store.spaces.values_mut().for_each(|space| space.reserved = 1);
    assert_eq!(store.fence(SpaceId(7), GENERATION, OWNER), Status::Full);
}

#[test]
fn a_late_grant_or_release_does_not_empty_a_slab() {
    let mut store = store(1);
    let page = [7; SEALED_SIZE];
    store.grant(SPACE, SlabNo(0), GENERATION, since(2), true);
    store.write(SPACE, PageNo(0), GENERATION, version(3, false), Some(&page));
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(2), true), Status::Ok);
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(1), true), Status::BadRequest);
    assert_eq!(store.release(SPACE, SlabNo(0), GENERATION, version(1, false)), Status::BadRequest);
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION).unwrap().version, version(3, false));
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(4), true), Status::Ok);
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION).unwrap().version, Version::NEVER);
    assert_eq!(store.release(SPACE, SlabNo(0), GENERATION, version(4, false)), Status::Ok);
    assert_eq!(store.free_slabs(), 1);
}

#[test]
fn what_is_of_an_earlier_life_of_a_slab_does_not_land() {
    let mut store = store(1);
    let page = [7; SEALED_SIZE];
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(1), true), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(0), GENERATION, version(2, false), Some(&page)), Status::Ok);
    assert_eq!(store.release(SPACE, SlabNo(0), GENERATION, version(1, false)), Status::Ok);
    // What waited for the grant is older than it.
    let second = (version(6, false), version(4, false));
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, second, true), Status::Ok);
    for late in [version(2, false), version(3, false)] {
        assert_eq!(store.write(SPACE, PageNo(0), GENERATION, late, Some(&page)), Status::UnknownSlab);
    }
    assert_eq!(store.write(SPACE, PageNo(0), GENERATION, version(3, true), None), Status::UnknownSlab);
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION).unwrap().version, Version::NEVER);
    assert_eq!(store.write(SPACE, PageNo(1), GENERATION, version(5, false), Some(&page)), Status::Ok);
    // Late requests for the slab: the same changes nothing, that of the first life is refused, and so is one that confuses lives.
    let again = (version(6, false), version(5, false));
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, again, true), Status::Ok);
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, since(1), true), Status::BadRequest);
    assert_eq!(
        store.grant(SPACE, SlabNo(0), GENERATION, (version(6, false), version(7, false)), true),
        Status::BadRequest
    );
    assert_eq!(store.read(SPACE, PageNo(1), GENERATION).unwrap().version, version(5, false));
    assert_eq!(store.write(SPACE, PageNo(2), GENERATION, version(4, true), None), Status::Ok);
    // Another copy of the same life.
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, (version(8, false), version(4, false)), true), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(0), GENERATION, version(2, false), Some(&page)), Status::UnknownSlab);
    assert_eq!(store.write(SPACE, PageNo(1), GENERATION, version(5, false), Some(&page)), Status::Ok);
    // The next owner knows no epoch: this one's writes are refused as its own.
    let next = Generation(2);
    assert_eq!(store.fence(SPACE, next, OWNER), Status::Ok);
    let grant = (Version::new(next, 1, false), Version::NEVER);
    assert_eq!(store.grant(SPACE, SlabNo(0), next, grant, true), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(0), GENERATION, version(9, false), Some(&page)), Status::StaleGeneration);
    assert_eq!(
        store.write(SPACE, PageNo(1), next, version(5, false), Some(&page)),
        Status::Ok,
        "copied from another server"
    );
}

#[test]
fn free_slabs_go_back_to_the_host_and_held_ones_never() {
    let mut store = store(4);
    let page = [7; SEALED_SIZE];
    store.grant(SPACE, SlabNo(0), GENERATION, since(1), true);
    store.write(SPACE, PageNo(0), GENERATION, version(2, false), Some(&page));
    assert_eq!(store.reserve(SPACE, GENERATION, 2), Status::Ok);
    // One is held, one is promised.
    assert_eq!([store.shed(), store.shed(), store.shed()], [true, true, false]);
    assert_eq!((store.free_slabs(), store.held_slabs()), (1, 1));
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION).unwrap().sealed, Some(&page[..]));
    assert_eq!(store.grant(SPACE, SlabNo(1), GENERATION, since(3), false), Status::Ok);
    assert_eq!(store.grant(SPACE, SlabNo(2), GENERATION, since(4), true), Status::Full);
    assert_eq!([store.regrow(), store.regrow(), store.regrow()], [true, true, false]);
    store.shut = true;
    assert_eq!(store.grant(SPACE, SlabNo(2), GENERATION, since(4), true), Status::Full);
    store.shut = false;
    assert_eq!(store.grant(SPACE, SlabNo(2), GENERATION, since(4), true), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(16), GENERATION, version(5, false), Some(&page)), Status::Ok);
    assert_eq!(store.read(SPACE, PageNo(17), GENERATION).unwrap().version, Version::NEVER);
}

#[test]
fn reservations_and_quotas() {
    let mut store = Store::new(3, SlabSize::new(8).unwrap(), 2, None).unwrap();
    let other = SpaceId(2);
    store.fence(SPACE, GENERATION, OWNER);
    store.fence(other, GENERATION, OWNER);
    assert_eq!(store.reserve(SPACE, GENERATION, 3), Status::OverQuota);
    assert_eq!(store.reserve(SPACE, GENERATION, 2), Status::Ok);
    assert_eq!(store.reserve(other, GENERATION, 2), Status::Full);
    let mut grant = |space, slab, open| store.grant(space, SlabNo(slab), GENERATION, since(1), open);
    assert_eq!(grant(other, 0, true), Status::Ok);
    assert_eq!(grant(other, 1, true), Status::Full, "the rest is kept for the other space");
    // A closed server still keeps its promises.
    assert_eq!(grant(SPACE, 0, false), Status::Ok);
    assert_eq!(grant(SPACE, 1, false), Status::Ok);
    assert_eq!(grant(SPACE, 2, true), Status::OverQuota);
}

/// Fails at one place.
#[derive(Debug)]
struct Brittle {
    pages: HashMap<u64, crate::units::Page>,
    bad: u64,
}

impl Medium for Brittle {
    fn read(&mut self, index: u64, page: &mut crate::units::Page) -> std::io::Result<()> {
        *page = *self.pages.get(&index).filter(|_| index != self.bad).ok_or(std::io::ErrorKind::Other)?;
        Ok(())
    }

    fn write(&mut self, index: u64, page: &crate::units::Page) -> std::io::Result<()> {
        self.pages.insert(index, *page);
        Ok(())
    }
}

#[test]
fn pages_on_a_medium_come_back_and_a_slab_that_it_fails_is_gone() {
    let medium = Brittle { pages: HashMap::new(), bad: 9 };
    let mut store = Store::new(3, SlabSize::new(8).unwrap(), 3, Some(Box::new(medium))).unwrap();
    let sealed = |filler: u8| {
        let mut page = [filler; SEALED_SIZE];
        page[PAGE_SIZE..].fill(filler + 100);
        page
    };
    store.fence(SPACE, GENERATION, OWNER);
    for slab in 0..2 {
        assert_eq!(store.grant(SPACE, SlabNo(slab), GENERATION, since(1), true), Status::Ok);
    }
    for page in 0..16 {
        let written = store.write(SPACE, PageNo(page), GENERATION, version(2, false), Some(&sealed(page as u8)));
        assert_eq!(written, Status::Ok);
    }
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(3, false), Some(&sealed(50))), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(2, false), Some(&sealed(51))), Status::Ok);
    for (page, filler) in [(0, 0), (3, 50), (7, 7), (15, 15)] {
        assert_eq!(store.read(SPACE, PageNo(page), GENERATION).unwrap().sealed, Some(&sealed(filler)[..]), "{page}");
    }
    // The second slab lies at places 8 to 15.
    assert_eq!(store.read(SPACE, PageNo(9), GENERATION), Err(Status::UnknownSlab));
    assert_eq!(store.read(SPACE, PageNo(15), GENERATION), Err(Status::UnknownSlab), "what else it has is not trusted");
    assert_eq!((store.slabs(), store.held_slabs(), store.free_slabs(), store.broken_slabs()), (2, 1, 1, 1));
    assert_eq!(store.read(SPACE, PageNo(0), GENERATION).unwrap().sealed, Some(&sealed(0)[..]));
    assert_eq!(store.spaces().next().unwrap().slabs, 1);
}

/// Another grant is another life of the slab, and not what was asked for; the owner's generation does not matter.
#[test]
fn a_page_of_a_grant_is_read_as_long_as_that_is_there() {
    let mut store = store(1);
    let (page, grant) = ([7; SEALED_SIZE], version(1, false));
    store.fence(SPACE, GENERATION, OWNER);
    assert_eq!(store.grant(SPACE, SlabNo(0), GENERATION, (grant, Version::NEVER), true), Status::Ok);
    assert_eq!(store.write(SPACE, PageNo(3), GENERATION, version(2, false), Some(&page)), Status::Ok);
    let read = |store: &mut Store, grant| store.read_granted(SPACE, PageNo(3), grant).map(|stored| stored.version);
    assert_eq!(read(&mut store, grant), Ok(version(2, false)));
    assert_eq!(read(&mut store, version(3, false)), Err(Status::UnknownSlab));
    let next = Generation(GENERATION.0 + 1);
    store.fence(SPACE, next, OWNER);
    assert_eq!(read(&mut store, grant), Ok(version(2, false)));
    assert_eq!(store.release(SPACE, SlabNo(0), next, grant), Status::Ok);
    assert_eq!(read(&mut store, grant), Err(Status::UnknownSlab));
    // The request of before, late: it would be an empty slab of the same grant.
    let late = store.grant(SPACE, SlabNo(0), next, (grant, Version::NEVER), true);
    assert_eq!((late, read(&mut store, grant)), (Status::BadRequest, Err(Status::UnknownSlab)));
    // Of another slab an older one may be.
    let other = store.grant(SPACE, SlabNo(1), next, (grant, Version::NEVER), true);
    assert_eq!((other, store.release(SPACE, SlabNo(1), next, grant)), (Status::Ok, Status::Ok));
    let new = Version::new(next, 1, false);
    assert_eq!(store.grant(SPACE, SlabNo(0), next, (new, Version::NEVER), true), Status::Ok);
    assert_eq!((read(&mut store, new), read(&mut store, grant)), (Ok(Version::NEVER), Err(Status::UnknownSlab)));
}
