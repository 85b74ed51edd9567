/* A disk that is slow or full when told to. To be preloaded (LD_PRELOAD).

   DISK_GATE   a path. While it exists, whoever syncs a file of a trainer's checkpoint waits; while DISK_GATE.full
               exists, rank 1 is told that there is no space left; while DISK_GATE.none exists, nobody can write to a
               file of the run, which is the folder `run` beside it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int fsync(int handle) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    const char *gate = getenv("DISK_GATE");
    char link[64], path[PATH_MAX], full[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (!gate || !strstr(path, "/trainer.partial")) return real(handle);
    while (!access(gate, F_OK)) usleep(10000);
    snprintf(full, sizeof full, "%s.full", gate);
    if (strstr(path, "rank-00001") && !access(full, F_OK)) {
        errno = ENOSPC;
        return -1;
    }
    return real(handle);
}

static int is_full(int handle) {
    const char *gate = getenv("DISK_GATE");
    char none[PATH_MAX], link[64], path[PATH_MAX], run[PATH_MAX + 8];
    if (!gate || handle < 3) return 0;
    snprintf(none, sizeof none, "%s.none", gate);
    if (access(none, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    snprintf(run, sizeof run, "%s/run/", dirname(none));
    return !strncmp(path, run, strlen(run));
}

ssize_t write(int handle, const void *data, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (is_full(handle)) {
        errno = ENOSPC;
        return -1;
    }
    return real(handle, data, count);
}

ssize_t pwrite64(int handle, const void *data, size_t count, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    if (is_full(handle)) {
        errno = ENOSPC;
        return -1;
    }
    return real(handle, data, count, offset);
}
