// A program in Pagoda's RAM that reads a slow file into it by every way there is, while all of its other memory is touched
// so that pages have to leave.
//
//   victim DISK WAY [WAY ...]
//
// Each WAY reads DISK into a buffer of its own, all at the same time, and compares every page with what the file holds: at
// once, and again after two more passes over all memory. One line of JSON a way. It lives on until its standard input ends and
// looks a last time; its exit status says whether all was right.
// A page of DISK begins and ends with its offset, marked (MARK).
#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <liburing.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096ul
#define AREA (1ul << 20)
#define BUFFER (512ul << 10)
#define MARK 0x5a5a000000000000ull
#define OLD 0x1111111111111111ull
#define WAYS_MAX 32

struct way {
    const char *name;
    // Reads BUFFER bytes from `at` of the file; the number of bytes read.
    ssize_t (*run)(const char *path, char *to, off_t at);
};

struct victim {
    const struct way *way;
    const char *path;
    char *buffer;
    off_t at;
    ssize_t got;
    size_t wrong;
};

static char *ram;
static size_t ram_len;
static volatile int stop;
static volatile unsigned long passes;

static int open_disk(const char *path, int flags)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | flags);

    if (fd < 0) {
        perror(path);
        exit(2);
    }
    return fd;
}

static ssize_t sought(const char *path, off_t at, int flags, int *fd)
{
    *fd = open_disk(path, flags);
    return lseek(*fd, at, SEEK_SET);
}

// Two buffers of half the size each.
static void halves(char *to, struct iovec iov[2])
{
    iov[0] = (struct iovec){to, BUFFER / 2};
    iov[1] = (struct iovec){to + BUFFER / 2, BUFFER / 2};
}

static ssize_t by_read(const char *path, char *to, off_t at)
{
    int fd;

    sought(path, at, 0, &fd);
    return read(fd, to, BUFFER);
}

static ssize_t by_readv(const char *path, char *to, off_t at)
{
    struct iovec iov[2];
    int fd;

    halves(to, iov);
    sought(path, at, 0, &fd);
    return readv(fd, iov, 2);
}

static ssize_t by_pread(const char *path, char *to, off_t at)
{
    return pread(open_disk(path, 0), to, BUFFER, at);
}

static ssize_t by_pread_direct(const char *path, char *to, off_t at)
{
    return pread(open_disk(path, O_DIRECT), to, BUFFER, at);
}

static ssize_t by_preadv(const char *path, char *to, off_t at)
{
    struct iovec iov[2];

    halves(to, iov);
    return preadv(open_disk(path, 0), iov, 2, at);
}

static ssize_t by_preadv2(const char *path, char *to, off_t at)
{
    struct iovec iov[2];

    halves(to, iov);
    return preadv2(open_disk(path, 0), iov, 2, at, RWF_HIPRI);
}

static ssize_t by_fread(const char *path, char *to, off_t at)
{
    FILE *file = fdopen(open_disk(path, 0), "r");

    if (!file || fseeko(file, at, SEEK_SET) != 0)
        return -1;
    return fread(to, 1, BUFFER, file);
}

static ssize_t by_syscall_read(const char *path, char *to, off_t at)
{
    int fd;

    sought(path, at, 0, &fd);
    return syscall(SYS_read, fd, to, BUFFER);
}

static ssize_t by_syscall_pread(const char *path, char *to, off_t at)
{
    return syscall(SYS_pread64, open_disk(path, 0), to, BUFFER, at);
}

static ssize_t by_syscall_pread_direct(const char *path, char *to, off_t at)
{
    return syscall(SYS_pread64, open_disk(path, O_DIRECT), to, BUFFER, at);
}

static ssize_t by_syscall_preadv(const char *path, char *to, off_t at)
{
    struct iovec iov[2];

    halves(to, iov);
    return syscall(SYS_preadv, open_disk(path, 0), iov, 2, at, 0);
}

static ssize_t by_libaio_flags(const char *path, char *to, off_t at, int flags)
{
    io_context_t context = 0;
    struct iocb request, *list[] = {&request};
    struct io_event event;

    if (io_setup(8, &context) < 0)
        return -1;
    io_prep_pread(&request, open_disk(path, flags), to, BUFFER, at);
    if (io_submit(context, 1, list) != 1 || io_getevents(context, 1, 1, &event, NULL) != 1)
        return -1;
    io_destroy(context);
    return event.res;
}

static ssize_t by_libaio(const char *path, char *to, off_t at)
{
    return by_libaio_flags(path, to, at, 0);
}

static ssize_t by_libaio_direct(const char *path, char *to, off_t at)
{
    return by_libaio_flags(path, to, at, O_DIRECT);
}

static ssize_t by_ring(const char *path, char *to, off_t at, int flags, int vectored)
{
    struct io_uring ring;
    struct io_uring_cqe *cqe;
    struct iovec iov[2];
    int fd = open_disk(path, flags);
    ssize_t got;

    if (io_uring_queue_init(8, &ring, 0) < 0)
        return -1;
    halves(to, iov);
    if (vectored)
        io_uring_prep_readv(io_uring_get_sqe(&ring), fd, iov, 2, at);
    else
        io_uring_prep_read(io_uring_get_sqe(&ring), fd, to, BUFFER, at);
    if (io_uring_submit(&ring) != 1 || io_uring_wait_cqe(&ring, &cqe) < 0)
        return -1;
    got = cqe->res;
    io_uring_cqe_seen(&ring, cqe);
    io_uring_queue_exit(&ring);
    return got;
}

static ssize_t by_uring_read(const char *path, char *to, off_t at)
{
    return by_ring(path, to, at, 0, 0);
}

static ssize_t by_uring_readv(const char *path, char *to, off_t at)
{
    return by_ring(path, to, at, 0, 1);
}

static ssize_t by_uring_direct(const char *path, char *to, off_t at)
{
    return by_ring(path, to, at, O_DIRECT, 0);
}

// What follows cannot be followed: the VM has to be pinned.

static ssize_t by_posix_aio(const char *path, char *to, off_t at)
{
    struct aiocb request = {.aio_fildes = open_disk(path, 0), .aio_buf = to, .aio_nbytes = BUFFER, .aio_offset = at};
    const struct aiocb *list[] = {&request};

    if (aio_read(&request) != 0)
        return -1;
    while (aio_error(&request) == EINPROGRESS)
        aio_suspend(list, 1, NULL);
    return aio_return(&request);
}

static ssize_t by_raw_uring(const char *path, char *to, off_t at)
{
    struct io_uring_params params = {0};
    int ring = syscall(SYS_io_uring_setup, 8, &params);
    size_t len = params.sq_off.array + params.sq_entries * 4 + params.cq_off.cqes + params.cq_entries * 16;
    char *rings = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqe = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);

    if (ring < 0 || rings == MAP_FAILED || sqe == MAP_FAILED)
        return -1;
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_READ;
    sqe->fd = open_disk(path, 0);
    sqe->addr = (uintptr_t)to;
    sqe->len = BUFFER;
    sqe->off = at;
    ((unsigned *)(rings + params.sq_off.array))[0] = 0;
    __atomic_store_n((unsigned *)(rings + params.sq_off.tail), 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
        return -1;
    return ((struct io_uring_cqe *)(rings + params.cq_off.cqes))->res;
}

static ssize_t by_stream_buffer(const char *path, char *to, off_t at)
{
    FILE *file = fdopen(open_disk(path, 0), "r");

    if (!file || setvbuf(file, to, _IOFBF, BUFFER) != 0 || fseeko(file, at, SEEK_SET) != 0)
        return -1;
    // The first character brings the whole buffer.
    return fgetc(file) == EOF ? -1 : (ssize_t)BUFFER;
}

// Pages that are in a pipe by reference have to come out as they went in.
static ssize_t by_vmsplice(const char *path, char *to, off_t at)
{
    struct iovec iov = {to, 8 * PAGE};
    unsigned long from = passes;
    int ends[2];

    if (pread(open_disk(path, 0), to, BUFFER, at) != (ssize_t)BUFFER || pipe(ends) != 0)
        return -1;
    if (vmsplice(ends[1], &iov, 1, SPLICE_F_GIFT) != (ssize_t)iov.iov_len)
        return -1;
    while (passes < from + 2)
        usleep(1000);
    for (size_t done = 0; done < iov.iov_len;) {
        ssize_t got = read(ends[0], to + done, iov.iov_len - done);
        if (got <= 0)
            return -1;
        done += got;
    }
    return BUFFER;
}

static const struct way WAYS[] = {
    {"read", by_read},
    {"readv", by_readv},
    {"pread", by_pread},
    {"pread-direct", by_pread_direct},
    {"preadv", by_preadv},
    {"preadv2", by_preadv2},
    {"fread", by_fread},
    {"syscall-read", by_syscall_read},
    {"syscall-pread", by_syscall_pread},
    {"syscall-pread-direct", by_syscall_pread_direct},
    {"syscall-preadv", by_syscall_preadv},
    {"libaio", by_libaio},
    {"libaio-direct", by_libaio_direct},
    {"uring-read", by_uring_read},
    {"uring-readv", by_uring_readv},
    {"uring-direct", by_uring_direct},
    {"posix-aio", by_posix_aio},
    {"raw-uring", by_raw_uring},
    {"stream-buffer", by_stream_buffer},
    {"vmsplice", by_vmsplice},
};

static const struct way *find_way(const char *name)
{
    for (size_t i = 0; i < sizeof WAYS / sizeof *WAYS; i++)
        if (strcmp(WAYS[i].name, name) == 0)
            return &WAYS[i];
    fprintf(stderr, "no such way: %s\n", name);
    exit(2);
}

// Writes everything behind the buffers' areas, over and over: more than may be in DRAM.
static void *storm(void *areas)
{
    while (!stop) {
        for (size_t at = (uintptr_t)areas; at < ram_len && !stop; at += PAGE)
            *(uint64_t *)(ram + at) = at;
        passes++;
    }
    return NULL;
}

static size_t count_wrong(const struct victim *victim)
{
    size_t wrong = 0;

    for (size_t at = 0; at < BUFFER; at += PAGE) {
        uint64_t expected = MARK | (victim->at + at);
        uint64_t first = *(uint64_t *)(victim->buffer + at), last = *(uint64_t *)(victim->buffer + at + PAGE - 8);
        wrong += first != expected || last != expected;
    }
    return wrong;
}

static void *fall(void *argument)
{
    struct victim *victim = argument;

    victim->got = victim->way->run(victim->path, victim->buffer, victim->at);
    victim->wrong = count_wrong(victim);
    return NULL;
}

static void wait_for_passes(unsigned long count)
{
    unsigned long from = passes;

    while (passes < from + count)
        usleep(1000);
}

int main(int argc, char **argv)
{
    struct victim victims[WAYS_MAX] = {0};
    pthread_t threads[WAYS_MAX], toucher;
    int count = argc - 2, failed = 0, fd;
    struct stat st;
    char *path = getenv("PAGODA_RAM");

    if (count < 1 || count > WAYS_MAX || !path) {
        fprintf(stderr, "usage: pagoda run --plain ... -- victim DISK WAY [WAY ...]\n");
        return 2;
    }
    fd = open(path, O_RDWR);
    if (fd < 0 || fstat(fd, &st) < 0) {
        perror(path);
        return 2;
    }
    // A name that is no text, and reads like the end of one in /proc/PID/stat.
    prctl(PR_SET_NAME, "\xff\xfe) Z 1 (");
    ram_len = st.st_size;
    ram = mmap(NULL, ram_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ram == MAP_FAILED) {
        perror("mmap");
        return 2;
    }
    for (int i = 0; i < count; i++) {
        victims[i] = (struct victim){.way = find_way(argv[i + 2]), .path = argv[1], .buffer = ram + i * AREA, .at = i * BUFFER};
        for (size_t at = 0; at < BUFFER; at += 8)
            *(uint64_t *)(victims[i].buffer + at) = OLD;
    }
    pthread_create(&toucher, NULL, storm, (void *)(count * AREA));
    wait_for_passes(2);
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, fall, &victims[i]);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    wait_for_passes(2);
    for (int i = 0; i < count; i++) {
        size_t later = count_wrong(&victims[i]);
        printf("{\"way\":\"%s\",\"pages\":%lu,\"bytes_read\":%zd,\"wrong_at_once\":%zu,\"wrong_later\":%zu}\n",
               victims[i].way->name, BUFFER / PAGE, victims[i].got, victims[i].wrong, later);
        failed |= victims[i].got != (ssize_t)BUFFER || victims[i].wrong || later;
    }
    fflush(stdout);
    while (getchar() != EOF)
        ;
    // The daemon may have been replaced meanwhile.
    wait_for_passes(2);
    for (int i = 0; i < count; i++)
        failed |= count_wrong(&victims[i]) != 0;
    stop = 1;
    pthread_join(toucher, NULL);
    return failed;
}
