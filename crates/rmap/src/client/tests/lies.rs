//! Servers that are admitted and say what is not so.

use super::super::exchange::{Exchange, Role};
use super::many::{SLAB, begin_reads, filled, take_over};
use super::*;
use crate::client::repair::{Repair, Step};
use crate::units::{SEALED_SIZE, Version};

/// The request that a role stands for, taken from the client as if its answer had come.
pub fn take(pool: &mut Pool, is_it: impl Fn(Role) -> bool) -> Exchange {
    let exchange = pool.client.exchanges.find(|e| is_it(e.role)).expect("it was asked");
    pool.client.end_exchange(exchange.id);
    exchange
}

/// A server says that a page is trimmed, in a version between the one that it was asked for and the one that is being written.
#[test]
fn a_trim_that_nobody_made_is_not_believed() {
    let mut pool = filled(2, 1);
    pool.deaf = vec![0, 1];
    begin_reads(&mut pool, std::iter::once(0));
    pool.begin_write(0, 7);
    let exchange = take(&mut pool, |role| matches!(role, Role::Read { .. }));
    let made_up = Version::from_bits(exchange.version.bits() | 1);
    assert!(!made_up.has_content() && exchange.version < made_up);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::Ok, made_up, &[]);
    assert!(!pool.client.has_event(), "no zeros");
    pool.deaf = Vec::new();
    pool.pass(SILENCE);
    let mut content = [0; PAGE_SIZE];
    let mut read = Err(Failure::Lost);
    while let Some(event) = pool.client.poll_event(&mut content) {
        if let Event::Read { result, .. } = event {
            read = result.map(|()| content[0]);
        }
    }
    assert!(matches!(read, Ok(1 | 7)), "{read:?}");
}

/// A source has a page in a version that nobody wrote: no copy gets it, which would stand before what is written later.
#[test]
fn what_a_source_made_up_is_not_copied() {
    let mut pool = filled(3, 1);
    let replicas = pool.client.spaces[0].slabs[0].entry.replicas.clone();
    let source = pool.client.place_of(replicas[0].server).unwrap();
    let target = (0..3).find(|peer| replicas.iter().all(|r| r.server.0 as usize != *peer)).unwrap();
    let grant = pool.client.spaces[0].next_version(false).unwrap();
    let mut repair = Repair::new(target, grant, None);
    repair.step = Step::Copying;
    pool.client.spaces[0].slabs[0].repair = Some(repair);
    pool.client.start_copy(0, 0, 0, Some(source), target);
    let exchange = take(&mut pool, |role| matches!(role, Role::CopyRead { .. }));
    let made_up = Version::new(Generation(1), 1 << 20, true);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::Ok, made_up, &[]);
    let is_write = |role| matches!(role, Role::CopyWrite { .. });
    assert!(pool.client.exchanges.find(|e| is_write(e.role)).is_none());
    assert!(pool.client.copies.is_idle() && pool.client.spaces[0].slabs[0].failed.has(source));
}

/// While a space is taken over one copy has content in a later version than the other. It is not put in the place of what the other has
/// before it has been opened.
#[test]
fn a_seal_that_nobody_made_replaces_nothing() {
    let mut pool = filled(2, 1);
    // One copy lacks it.
    pool.deaf = vec![1];
    pool.begin_write(0, 7);
    take_over(&mut pool, SLAB);
    let of_the_old = pool.client.poll_event(&mut [0; PAGE_SIZE]);
    assert_eq!(of_the_old, Some(Event::Written { token: 1, result: Err(Failure::Fenced) }));
    pool.deaf = Vec::new();
    let copies = |role| matches!(role, Role::CopyRead { .. });
    pool.time_passes();
    while pool.client.exchanges.find(|e| copies(e.role)).is_none() {
        assert!(pool.step(), "nothing is copied");
    }
    let exchange = take(&mut pool, copies);
    let now = pool.now;
    pool.client.answered(now, &exchange, Status::Ok, exchange.version, &[0x55; SEALED_SIZE]);
    pool.run();
    assert_eq!(pool.read(0), Ok(1), "what both had, and was acknowledged");
    assert!(pool.client.stats().transfers_refused > 0);
}
