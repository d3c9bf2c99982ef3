//! read(2), write(2) and their relatives, sockets' and stdio's: what names guest RAM goes on the clock.
//!
//! Those with an offset work on files that can be sought: never on a pipe, a socket or a terminal, so they end by themselves
//! and are on the clock without a look at the file. Vectors are the exception in a mapper, and where the offset is the file's own.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{FILE, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

use super::{hook, sockets};
use crate::clock::sync::{timed, timed_unless_copied};
use crate::{mapper, ram, real};

/// Hooks of one buffer each, of files that may make the caller wait.
macro_rules! one_buffer {
    ($($($name:ident)|+ => $real:ident($buf:ty $(, $more:ident: $type:ty)*);)*) => {
        hook! {$(
            /// Moves one buffer, on the clock if that is RAM which the file may pin.
            fn $($name)|+ (fd: c_int, buf: $buf, len: size_t $(, $more: $type)*) -> ssize_t {
                // SAFETY: the caller's call, passed on unchanged.
                let call = || unsafe { real::$real(fd, buf, len $(, $more)*) };
                timed_unless_copied(fd, ram::overlaps(buf as usize, len), call)
            }
        )*}
    };
}

one_buffer! {
    read | __read => read(*mut c_void);
    __read_chk => __read_chk(*mut c_void, room: size_t);
    write | __write => write(*const c_void);
    recv => recv(*mut c_void, flags: c_int);
    __recv_chk => __recv_chk(*mut c_void, room: size_t, flags: c_int);
    recvfrom => recvfrom(*mut c_void, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t);
    __recvfrom_chk =>
        __recvfrom_chk(*mut c_void, room: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t);
}

/// Hooks of one buffer each and an offset.
macro_rules! one_buffer_at {
    ($($($name:ident)|+ => $real:ident($buf:ty $(, $more:ident: $type:ty)*);)*) => {
        hook! {$(
            /// Moves one buffer at an offset, on the clock if that is RAM.
            fn $($name)|+ (fd: c_int, buf: $buf, len: size_t $(, $more: $type)*) -> ssize_t {
                // SAFETY: the caller's call, passed on unchanged.
                timed(ram::overlaps(buf as usize, len), || unsafe { real::$real(fd, buf, len $(, $more)*) })
            }
        )*}
    };
}

one_buffer_at! {
    pread | pread64 | __pread64 => pread(*mut c_void, offset: off_t);
    __pread_chk | __pread64_chk => __pread_chk(*mut c_void, offset: off_t, room: size_t);
    pwrite | pwrite64 | __pwrite64 => pwrite(*const c_void, offset: off_t);
}

/// Hooks of several buffers each.
macro_rules! many_buffers {
    ($($($name:ident)|+ => $real:ident($($more:ident: $type:ty),*);)*) => {
        hook! {$(
            /// Moves several buffers, on the clock if one is RAM which the file may pin.
            fn $($name)|+ (fd: c_int, iov: *const iovec, count: c_int $(, $more: $type)*) -> ssize_t {
                // SAFETY: `iov` has `count` elements, as the real function demands; a negative count becomes one that
                // is too large to be looked at.
                let touches_ram = unsafe { ram::any_overlaps(iov, count as usize) };
                // SAFETY: the caller's call, passed on unchanged.
                timed_unless_copied(fd, touches_ram, || unsafe { real::$real(fd, iov, count $(, $more)*) })
            }
        )*}
    };
}

many_buffers! {
    readv => readv();
    writev => writev();
}

/// Hooks of several buffers each and an offset, which may be "the file's own" for preadv2 and pwritev2.
macro_rules! many_buffers_at {
    ($($($name:ident)|+ => $real:ident(offset $(, $more:ident: $type:ty)*);)*) => {
        hook! {$(
            /// Moves several buffers at an offset, on the clock if one is RAM.
            fn $($name)|+ (fd: c_int, iov: *const iovec, count: c_int, offset: off_t $(, $more: $type)*) -> ssize_t {
                // SAFETY: `iov` has `count` elements, as the real function demands; a negative count becomes one that
                // is too large to be looked at.
                let touches_ram = unsafe { ram::any_overlaps(iov, count as usize) };
                // SAFETY: the caller's call, passed on unchanged.
                let call = || unsafe { real::$real(fd, iov, count, offset $(, $more)*) };
                if offset == -1 || mapper::is_one() { timed_unless_copied(fd, touches_ram, call) } else { timed(touches_ram, call) }
            }
        )*}
    };
}

many_buffers_at! {
    preadv | preadv64 => preadv(offset);
    preadv2 | preadv64v2 => preadv2(offset, flags: c_int);
    pwritev | pwritev64 => pwritev(offset);
    pwritev2 | pwritev64v2 => pwritev2(offset, flags: c_int);
}

hook! {
    /// Sends a buffer. With MSG_ZEROCOPY its pages are sent later.
    fn send | __send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
        let touches_ram = ram::overlaps(buf as usize, len);
        sockets::before_send(touches_ram, flags);
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(fd, touches_ram, || unsafe { real::send(fd, buf, len, flags) })
    }

    /// Sends a buffer to an address.
    fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t)
        -> ssize_t
    {
        let touches_ram = ram::overlaps(buf as usize, len);
        sockets::before_send(touches_ram, flags);
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(fd, touches_ram, || unsafe { real::sendto(fd, buf, len, flags, to, to_len) })
    }

    /// Sends a message, perhaps with fds.
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        // SAFETY: a message to be sent (caller).
        let touches_ram = unsafe { sockets::inspect_sent(fd, message, flags) };
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(fd, touches_ram, || unsafe { real::sendmsg(fd, message, flags) })
    }

    /// Sends messages, perhaps with fds.
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        // SAFETY: an array of `count` messages to be sent (caller).
        let touches_ram = unsafe { sockets::inspect_all_sent(fd, messages, count, flags) };
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(fd, touches_ram, || unsafe { real::sendmmsg(fd, messages, count, flags) })
    }

    /// Receives a message, on the clock if a buffer is RAM.
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
        // SAFETY: a message to be filled (caller).
        let touches_ram = unsafe { sockets::touches_ram(message) };
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(fd, touches_ram, || unsafe { real::recvmsg(fd, message, flags) })
    }

    /// Receives several messages, on the clock if a buffer is RAM.
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
        // SAFETY: an array of `count` messages to be filled (caller).
        let touches_ram = unsafe { sockets::any_touches_ram(messages, count) };
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(fd, touches_ram, || unsafe { real::recvmmsg(fd, messages, count, flags, timeout) })
    }

    /// stdio reads more than its buffer holds straight into the caller's.
    fn fread | _IO_fread(buf: *mut c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, size, count, || unsafe { real::fread(buf, size, count, file) })
    }

    /// The same without a lock.
    fn fread_unlocked(buf: *mut c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, size, count, || unsafe { real::fread_unlocked(buf, size, count, file) })
    }

    /// The same with a check of the room.
    fn __fread_chk(buf: *mut c_void, room: size_t, size: size_t, count: size_t, file: *mut FILE) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, size, count, || unsafe { real::__fread_chk(buf, room, size, count, file) })
    }

    /// The same with a check of the room and without a lock.
    fn __fread_unlocked_chk(buf: *mut c_void, room: size_t, size: size_t, count: size_t, file: *mut FILE) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, size, count, || unsafe { real::__fread_unlocked_chk(buf, room, size, count, file) })
    }

    /// stdio writes more than its buffer holds straight from the caller's.
    fn fwrite | _IO_fwrite(buf: *const c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, size, count, || unsafe { real::fwrite(buf, size, count, file) })
    }

    /// The same without a lock.
    fn fwrite_unlocked(buf: *const c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, size, count, || unsafe { real::fwrite_unlocked(buf, size, count, file) })
    }

    /// stdio writes a long string straight from where it is.
    fn fputs | _IO_fputs(text: *const c_char, file: *mut FILE) -> c_int {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, text, text_len(text), 1, || unsafe { real::fputs(text, file) })
    }

    /// The same without a lock.
    fn fputs_unlocked(text: *const c_char, file: *mut FILE) -> c_int {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, text, text_len(text), 1, || unsafe { real::fputs_unlocked(text, file) })
    }

    /// The same to standard output.
    fn puts | _IO_puts(text: *const c_char) -> c_int {
        let touches_ram = ram::overlaps(text as usize, text_len(text));
        // SAFETY: the caller's call, passed on unchanged.
        timed_unless_copied(libc::STDOUT_FILENO, touches_ram, || unsafe { real::puts(text) })
    }

    /// stdio's own name of fread(3).
    fn _IO_sgetn(file: *mut FILE, buf: *mut c_void, len: size_t) -> size_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, len, 1, || unsafe { real::_IO_sgetn(file, buf, len) })
    }

    /// Reads a stream's file, as stdio does it itself.
    fn _IO_file_read(file: *mut FILE, buf: *mut c_void, len: ssize_t) -> ssize_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, len.max(0) as size_t, 1, || unsafe { real::_IO_file_read(file, buf, len) })
    }

    /// Writes a stream's file, as stdio does it itself.
    fn _IO_file_write(file: *mut FILE, buf: *const c_void, len: ssize_t) -> ssize_t {
        // SAFETY: the caller's call, passed on unchanged.
        on_stream(file, buf, len.max(0) as size_t, 1, || unsafe { real::_IO_file_write(file, buf, len) })
    }

    /// Gives a stream a buffer, which all its later transfers use. One in RAM cannot be followed.
    fn setvbuf | _IO_setvbuf(file: *mut FILE, buf: *mut c_char, mode: c_int, size: size_t) -> c_int {
        sockets::report_if(ram::overlaps(buf as usize, size));
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::setvbuf(file, buf, mode, size) }
    }

    /// The same with a size of its own.
    fn setbuffer | _IO_setbuffer(file: *mut FILE, buf: *mut c_char, size: size_t) -> () {
        sockets::report_if(ram::overlaps(buf as usize, size));
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::setbuffer(file, buf, size) }
    }

    /// The same with a buffer of BUFSIZ bytes.
    fn setbuf(file: *mut FILE, buf: *mut c_char) -> () {
        sockets::report_if(ram::overlaps(buf as usize, libc::BUFSIZ as usize));
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::setbuf(file, buf) }
    }
}

/// Length of a text that lies in RAM; of any other it does not matter, and is not looked for.
fn text_len(text: *const c_char) -> size_t {
    // SAFETY: a text that is to be written ends in NUL (caller of the hook).
    if ram::overlaps(text as usize, 1) { unsafe { libc::strlen(text) } } else { 0 }
}

/// A stream's transfer, on the clock if its file may pin.
fn on_stream<T, R>(file: *mut FILE, buf: *const T, size: size_t, count: size_t, call: impl FnOnce() -> R) -> R {
    let touches_ram = ram::overlaps(buf as usize, size.saturating_mul(count));
    if !touches_ram {
        return call();
    }
    // SAFETY: a valid stream (caller of the hook); fileno(3) only reads it.
    let fd = unsafe { libc::fileno(file) };
    timed_unless_copied(fd, true, call)
}
