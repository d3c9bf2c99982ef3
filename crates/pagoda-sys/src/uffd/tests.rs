use std::os::fd::{FromRawFd, IntoRawFd};

use super::*;
use crate::ram::LargeFolios;
use crate::testing::{Guest, PAGE, PATIENCE, armed, next_fault, ram};

const PAGES: u64 = 16;

fn page_of(byte: u8) -> [u8; PAGE_SIZE] {
    [byte; PAGE_SIZE]
}

#[test]
fn a_second_enable_is_accepted_and_other_files_are_not() {
    let uffd = Uffd::from_fd(create().unwrap()).unwrap();
    uffd.enable().unwrap();
    // A restarted daemon holds another descriptor of the same userfaultfd.
    let again = Uffd::from_fd(uffd.fd.try_clone().unwrap()).unwrap();
    again.enable().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let error = Uffd::from_fd(event).unwrap_err();
    assert!(error.to_string().contains("[eventfd]"), "{error}");
}

#[test]
fn a_userfaultfd_that_is_not_enabled_reads_as_an_error() {
    let uffd = Uffd::from_fd(create().unwrap()).unwrap();
    assert!(!uffd.is_enabled().unwrap());
    let error = uffd.read(&mut [Fault::default()]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert_eq!(uffd.register(0x10_0000, PAGE), Err(Errno::INVAL));
}

#[test]
fn absent_features_are_named_with_their_kernel() {
    let all = FEATURES.iter().fold(0, |bits, (bit, ..)| bits | bit);
    assert_eq!(name_missing(all), "");
    assert_eq!(name_missing(all & !kernel::FEATURE_MINOR_SHMEM), "UFFD_FEATURE_MINOR_SHMEM (Linux 5.14)");
}

#[test]
fn faults_tell_page_kind_and_thread() {
    let file = ram("faults", PAGES * PAGE);
    let guest = Guest::map(&file);
    let uffd = armed(guest);
    let waiting: Vec<_> = (0..4).map(|page| guest.write_aside(page, page as u8 + 1)).collect();
    let mut seen: Vec<Fault> = (0..4).map(|_| next_fault(&uffd)).collect();
    seen.sort_by_key(|fault| fault.addr);
    for (page, fault) in seen.iter().enumerate() {
        assert_eq!(fault.addr, guest.at(page as u64));
        assert!(fault.write && !fault.wp && !fault.minor);
        assert_eq!(crate::process::process_of(fault.tid).unwrap(), std::process::id());
    }
    assert_eq!(uffd.read(&mut [Fault::default(); 8]).unwrap(), 0);
    assert_eq!(uffd.read(&mut []).unwrap(), 0);
    assert!(uffd.zeropage(guest.at(0), 4 * PAGE).is_all());
    for (page, receiver) in waiting.iter().enumerate() {
        assert_eq!(receiver.recv_timeout(PATIENCE), Ok(page as u8 + 1));
    }
    assert_eq!(uffd.ignored(), 0);
}

#[test]
fn continue_stops_at_mapped_pages_and_holes_and_steps_over_the_mapped() {
    let file = ram("continue", PAGES * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let guest = Guest::map(&file);
    let uffd = armed(guest);
    (0..PAGES).filter(|page| *page != 12).for_each(|page| view.write_page(page, &page_of(page as u8 + 1)));
    for mapped in [0, 5, 6] {
        assert!(uffd.cont(guest.at(mapped), PAGE, Protect::No).is_all());
    }
    let first = uffd.cont(guest.at(0), PAGES * PAGE, Protect::No);
    assert_eq!(first, Resolved::Partial { bytes: 0, errno: Errno::EXIST });
    let some = uffd.cont(guest.at(1), 15 * PAGE, Protect::No);
    assert_eq!(some, Resolved::Partial { bytes: 4 * PAGE, errno: Errno::EXIST });
    assert!(some.exists() && some.bytes(15 * PAGE) == 4 * PAGE && !some.gone());
    let over = uffd.cont_over(guest.at(0), PAGES * PAGE, Protect::No);
    assert_eq!(over, Resolved::Partial { bytes: 12 * PAGE, errno: Errno::FAULT });
    assert!(over.hole());
    assert!(uffd.cont_over(guest.at(0), 12 * PAGE, Protect::No).is_all());
    assert!(uffd.cont_over(guest.at(13), 3 * PAGE, Protect::No).is_all());
    // All mapped now: no fault comes when this thread reads them.
    for page in (0..PAGES).filter(|page| *page != 12) {
        assert_eq!(guest.read(page), page as u8 + 1);
    }
    assert_eq!(uffd.read(&mut [Fault::default()]).unwrap(), 0);
}

#[test]
fn copy_and_zeropage_never_overwrite() {
    let file = ram("exists", PAGES * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let guest = Guest::map(&file);
    let uffd = armed(guest);
    view.write_page(2, &page_of(7));
    let source = [1; 4 * PAGE_SIZE];
    let copied = uffd.copy(guest.at(0), &source, Protect::No);
    assert_eq!(copied, Resolved::Partial { bytes: 2 * PAGE, errno: Errno::EXIST });
    assert!(uffd.zeropage(guest.at(2), PAGE).exists());
    assert!(uffd.copy(guest.at(3), &source[..PAGE_SIZE], Protect::No).is_all());
    assert!(uffd.cont(guest.at(2), PAGE, Protect::No).is_all());
    assert_eq!([0, 1, 2, 3].map(|page| guest.read(page)), [1, 1, 7, 1]);
}

#[test]
fn a_punched_page_is_missing_though_it_was_mapped() {
    let file = ram("punched", PAGES * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let guest = Guest::map(&file);
    let uffd = armed(guest);
    view.write_page(3, &page_of(9));
    assert!(uffd.cont(guest.at(3), PAGE, Protect::No).is_all());
    assert_eq!(guest.read(3), 9);
    file.punch(3 * PAGE, PAGE).unwrap();
    let waiting = guest.read_aside(3);
    let fault = next_fault(&uffd);
    assert_eq!((fault.addr, fault.minor, fault.write), (guest.at(3), false, false));
    assert!(uffd.copy(guest.at(3), &page_of(10), Protect::No).is_all());
    assert_eq!(waiting.recv_timeout(PATIENCE), Ok(10));
}

#[test]
fn protection_of_absent_pages_outlives_zap_and_punch_until_a_page_is_mapped_without() {
    let file = ram("protected", PAGES * PAGE);
    let view = file.map(LargeFolios::Never).unwrap();
    let guest = Guest::map(&file);
    let uffd = armed(guest);
    for page in [0, 1] {
        view.write_page(page, &page_of(1));
        assert!(uffd.cont(guest.at(page), PAGE, Protect::No).is_all());
    }
    uffd.protect(guest.at(0), 2 * PAGE).unwrap();
    guest.advise(rustix::mm::Advice::LinuxDontNeed);
    file.punch(0, 2 * PAGE).unwrap();
    assert!(uffd.copy(guest.at(0), &page_of(2), Protect::No).is_all());
    assert!(uffd.copy(guest.at(1), &page_of(2), Protect::Yes).is_all());
    // Page 0 lost its protection by the copy without it: the write does not fault.
    guest.write(0, 3);
    let waiting = guest.write_aside(1, 4);
    let fault = next_fault(&uffd);
    assert_eq!((fault.addr, fault.write, fault.wp), (guest.at(1), true, true));
    uffd.unprotect(guest.at(1), PAGE).unwrap();
    assert_eq!(waiting.recv_timeout(PATIENCE), Ok(4));
    assert_eq!(view_byte(&view, 1), 4);
}

fn view_byte(view: &crate::ram::RamView, page: u64) -> u8 {
    let mut content = page_of(0);
    view.read_page(page, &mut content);
    content[0]
}

#[test]
fn unregistered_memory_is_the_kernels_again() {
    let file = ram("unregistered", PAGES * PAGE);
    let guest = Guest::map(&file);
    let uffd = armed(guest);
    let waiting = guest.read_aside(1);
    assert_eq!(next_fault(&uffd).addr, guest.at(1));
    uffd.unregister(guest.at(0), PAGES * PAGE).unwrap();
    assert_eq!(waiting.recv_timeout(PATIENCE), Ok(0));
    assert_eq!(guest.read(2), 0);
    let refused = uffd.zeropage(guest.at(4), PAGE);
    assert!(refused.gone(), "{refused:?}");
}

#[test]
fn a_dead_process_is_gone_not_an_error() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    // A process with an address space of its own, so that the userfaultfd it makes is of that one, and our file table, so
    // that it duplicates no descriptor another test is about to close.
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: clone(2) without CLONE_VM is like fork(2): the child of a process with threads may make async-signal-safe
    // calls only. It makes system calls and never returns.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } as i32;
    assert!(child >= 0);
    if child == 0 {
        let number = create().map_or(-1, IntoRawFd::into_raw_fd);
        let _ = rustix::io::write(&write, &number.to_ne_bytes());
        loop {
            // SAFETY: pause(2) has no conditions; the parent ends this process.
            unsafe { libc::pause() };
        }
    }
    let mut number = [0; 4];
    assert_eq!(rustix::io::read(&read, &mut number), Ok(4));
    let number = i32::from_ne_bytes(number);
    assert!(number >= 0);
    // SAFETY: the descriptor is open in our table, and the child, which made it, gave it up.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    let uffd = Uffd::from_fd(fd).unwrap();
    uffd.enable().unwrap();
    let unmapped = uffd.copy(0x1_0000_0000, &page_of(1), Protect::No);
    assert!(unmapped.gone(), "{unmapped:?}");
    // SAFETY: kill(2) and waitpid(2) of our own child; the status is not asked for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    for resolved in [
        uffd.copy(0x1_0000_0000, &page_of(1), Protect::No),
        uffd.zeropage(0x1_0000_0000, PAGE),
        uffd.cont(0x1_0000_0000, PAGE, Protect::No),
    ] {
        assert_eq!(resolved, Resolved::Partial { bytes: 0, errno: Errno::SRCH });
    }
    assert_eq!(uffd.protect(0x1_0000_0000, PAGE), Err(Errno::SRCH));
}
