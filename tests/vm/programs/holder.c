/* A program of `pagoda run --plain` that has a userfaultfd of its own on its RAM, as QEMU may have for post-copy migration and
 * background snapshots. The shim refuses userfaultfds, so it asks the kernel without libc. It says "held", lets go when a line
 * comes, then fills its RAM, verifies it at the next line, and says "right" or "wrong". */

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static long raw_userfaultfd(long flags)
{
    long result;

    __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_userfaultfd), "D"(flags) : "rcx", "r11", "memory");
    return result;
}

static void next_line(void)
{
    char line[16];

    if (!fgets(line, sizeof line, stdin))
        exit(0);
}

int main(void)
{
    char *path = getenv("PAGODA_RAM");
    int fd = path ? open(path, O_RDWR) : -1;
    struct stat st;
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register reg = {.mode = UFFDIO_REGISTER_MODE_MISSING};
    long uffd;
    uint64_t *ram, page, pages;

    if (fd < 0 || fstat(fd, &st) < 0)
        return 2;
    pages = (uint64_t)st.st_size / 4096;
    ram = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uffd = raw_userfaultfd(O_CLOEXEC);
    if (ram == MAP_FAILED || uffd < 0 || ioctl(uffd, UFFDIO_API, &api) < 0)
        return 3;
    reg.range.start = (uintptr_t)ram;
    reg.range.len = st.st_size;
    if (ioctl(uffd, UFFDIO_REGISTER, &reg) < 0)
        return 4;
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("held");
    next_line();
    close(uffd);
    for (page = 0; page < pages; page++)
        ram[page * 512] = page + 1;
    puts("filled");
    next_line();
    for (page = 0; page < pages; page++)
        if (ram[page * 512] != page + 1)
            return puts("wrong"), 5;
    puts("right");
    next_line();
    return 0;
}
