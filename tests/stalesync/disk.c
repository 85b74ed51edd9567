/* A disk that is slow or full when told to. To be preloaded (LD_PRELOAD).

   DISK_GATE   a path. While it exists, whoever syncs a file of a trainer's checkpoint waits; while DISK_GATE.full
               exists, rank 1 is told that there is no space left. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
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
