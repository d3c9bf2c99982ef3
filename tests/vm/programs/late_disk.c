// A FUSE file system with one file, `disk`, whose reads are answered late.
//
//   late_disk MOUNTPOINT IMAGE DELAY_MS direct|cached
//
// `disk` has the content of IMAGE. With `direct` it is opened with FOPEN_DIRECT_IO: the kernel then pins the reader's
// pages for as long as a read takes, and no flag of the file shows it. It runs until it is unmounted or ended.
#define FUSE_USE_VERSION 34
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { DISK = 2 };

static int image;
static off_t size;
static long delay_ms;
static int direct;

static void describe(fuse_ino_t ino, struct stat *st)
{
    memset(st, 0, sizeof *st);
    st->st_ino = ino;
    st->st_mode = ino == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0644;
    st->st_nlink = 1;
    st->st_size = ino == FUSE_ROOT_ID ? 0 : size;
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry = {.ino = DISK, .attr_timeout = 3600, .entry_timeout = 3600};

    if (parent != FUSE_ROOT_ID || strcmp(name, "disk") != 0) {
        fuse_reply_err(req, ENOENT);
        return;
    }
    describe(DISK, &entry.attr);
    fuse_reply_entry(req, &entry);
}

static void on_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct stat st;

    (void)fi;
    describe(ino, &st);
    fuse_reply_attr(req, &st, 3600);
}

static void on_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    fi->direct_io = direct;
    fuse_reply_open(req, fi);
}

static void on_read(fuse_req_t req, fuse_ino_t ino, size_t len, off_t at, struct fuse_file_info *fi)
{
    struct timespec late = {.tv_sec = delay_ms / 1000, .tv_nsec = delay_ms % 1000 * 1000000};
    char *data = malloc(len);
    ssize_t got = data ? pread(image, data, len, at) : -1;

    (void)ino, (void)fi;
    nanosleep(&late, NULL);
    if (got < 0)
        fuse_reply_err(req, EIO);
    else
        fuse_reply_buf(req, data, got);
    free(data);
}

int main(int argc, char **argv)
{
    static const struct fuse_lowlevel_ops ops = {
        .lookup = on_lookup, .getattr = on_getattr, .open = on_open, .read = on_read};
    char *words[] = {argv[0], "-o", "allow_other", NULL};
    struct fuse_args args = FUSE_ARGS_INIT(3, words);
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    struct fuse_session *session;
    struct stat st;

    if (argc != 5) {
        fprintf(stderr, "usage: late_disk MOUNTPOINT IMAGE DELAY_MS direct|cached\n");
        return 2;
    }
    image = open(argv[2], O_RDONLY | O_CLOEXEC);
    if (image < 0 || fstat(image, &st) < 0) {
        perror(argv[2]);
        return 1;
    }
    size = st.st_size;
    delay_ms = atol(argv[3]);
    direct = strcmp(argv[4], "direct") == 0;
    session = fuse_session_new(&args, &ops, sizeof ops, NULL);
    if (!session || fuse_set_signal_handlers(session) < 0 || fuse_session_mount(session, argv[1]) < 0)
        return 1;
    printf("mounted\n");
    fflush(stdout);
    fuse_loop_cfg_set_max_threads(config, 128);
    fuse_loop_cfg_set_idle_threads(config, 128);
    fuse_session_loop_mt(session, config);
    fuse_session_unmount(session);
    return 0;
}
