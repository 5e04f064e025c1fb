/* Disk errors on request, for lab/benchmarks/faults.py: preloaded, it lets writes and flushes of some files fail with EIO.
 *
 * EIO_FILES: a part of the paths that fail; EIO_WHEN: a file while which exists they do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int failing(int fd) {
    const char *part = getenv("EIO_FILES"), *when = getenv("EIO_WHEN");
    char link[64], path[4096];
    if (!part || !when || access(when, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, part) != NULL;
}

#define FAILS(type, name, parameters, arguments)                                           \
    type name parameters {                                                                 \
        static type(*real) parameters;                                                     \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                     \
        if (failing(fd)) return errno = EIO, -1;                                           \
        return real arguments;                                                             \
    }
FAILS(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n))
FAILS(ssize_t, writev, (int fd, const struct iovec *from, int n), (fd, from, n))
FAILS(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at))
FAILS(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
FAILS(int, fsync, (int fd), (fd))
FAILS(int, fdatasync, (int fd), (fd))
