//! read(2), write(2) and their relatives: direct I/O on guest RAM goes on the clock.

use std::ffi::{c_int, c_void};

use libc::{iovec, off_t, size_t, ssize_t};

use super::hook;
use crate::clock::sync::timed;
use crate::{ram, real};

/// Hooks of one buffer each.
macro_rules! one_buffer {
    ($($($name:ident)|+ => $real:ident($buf:ty $(, $more:ident: $type:ty)*);)*) => {
        hook! {$(
            /// One buffer.
            fn $($name)|+ (fd: c_int, buf: $buf, len: size_t $(, $more: $type)*) -> ssize_t {
                // SAFETY: the caller's call, passed on unchanged.
                timed(fd, ram::overlaps(buf as usize, len), || unsafe { real::$real(fd, buf, len $(, $more)*) })
            }
        )*}
    };
}

one_buffer! {
    read => read(*mut c_void);
    __read_chk => __read_chk(*mut c_void, room: size_t);
    pread | pread64 => pread(*mut c_void, offset: off_t);
    __pread_chk | __pread64_chk => __pread_chk(*mut c_void, offset: off_t, room: size_t);
    write => write(*const c_void);
    pwrite | pwrite64 => pwrite(*const c_void, offset: off_t);
}

/// Hooks of several buffers each.
macro_rules! many_buffers {
    ($($($name:ident)|+ => $real:ident($($more:ident: $type:ty),*);)*) => {
        hook! {$(
            /// Several buffers.
            fn $($name)|+ (fd: c_int, iov: *const iovec, count: c_int $(, $more: $type)*) -> ssize_t {
                // SAFETY: `iov` has `count` elements, as the real function demands; a negative count becomes one that
                // is too large to be looked at.
                let touches_ram = unsafe { ram::any_overlaps(iov, count as usize) };
                // SAFETY: the caller's call, passed on unchanged.
                timed(fd, touches_ram, || unsafe { real::$real(fd, iov, count $(, $more)*) })
            }
        )*}
    };
}

many_buffers! {
    readv => readv();
    preadv | preadv64 => preadv(offset: off_t);
    preadv2 | preadv64v2 => preadv2(offset: off_t, flags: c_int);
    writev => writev();
    pwritev | pwritev64 => pwritev(offset: off_t);
    pwritev2 | pwritev64v2 => pwritev2(offset: off_t, flags: c_int);
}
