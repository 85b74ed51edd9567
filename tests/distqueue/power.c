/* Keeps beside a folder what a power loss would leave of it. To be preloaded (LD_PRELOAD) by a process that writes there.

   POWER_LOSS_DIR      the folder; whoever has it not set is left alone
   POWER_LOSS_SHADOW   where it is kept, on the same file system:
       contents/INODE  what the file held when it was last synced
       names/INODE     of a folder: a line "INODE name" ("INODE name/": a folder) for every entry when it was last synced
       gone/INODE      what was unlinked, so that its inode is not another file's soon

   Nothing else counts as durable: not a file's content before its own fsync, fdatasync or msync(MS_SYNC), nor its name,
   nor that it was renamed or unlinked, before the fsync of its folder. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static int is_watched(const char *path) {
    const char *folder = getenv("POWER_LOSS_DIR");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int handle, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && is_watched(path);
}

static void kept_at(char *path, const char *kind, ino_t inode) {
    snprintf(path, PATH_MAX, "%s/%s/%lu", getenv("POWER_LOSS_SHADOW"), kind, (unsigned long)inode);
}

static void check(int ok, const char *what) {
    if (!ok) {
        perror(what);
        abort();
    }
}

static void write_names(const char *from, FILE *to) {
    DIR *folder = opendir(from);
    check(folder != NULL, from);
    for (struct dirent *entry; (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            fprintf(to, "%lu %s%s\n", (unsigned long)entry->d_ino, entry->d_name, entry->d_type == DT_DIR ? "/" : "");
    closedir(folder);
}

static void write_content(const char *from, FILE *to) {
    static char bytes[1 << 16];
    FILE *file = fopen(from, "r");
    check(file != NULL, from);
    for (size_t count; (count = fread(bytes, 1, sizeof bytes, file)) > 0;)
        check(fwrite(bytes, 1, count, to) == count, from);
    fclose(file);
}

/* What is at `from`, a name of an open file or a path, is durable now. */
static void keep(const char *from) {
    char path[PATH_MAX], part[PATH_MAX + 8];
    struct stat about;
    check(!stat(from, &about), from);
    pthread_mutex_lock(&one_at_a_time);
    kept_at(path, S_ISDIR(about.st_mode) ? "names" : "contents", about.st_ino);
    snprintf(part, sizeof part, "%s.part", path);
    FILE *to = fopen(part, "w");
    check(to != NULL, part);
    (S_ISDIR(about.st_mode) ? write_names : write_content)(from, to);
    check(!fclose(to), part);
    check(!renameat(AT_FDCWD, part, AT_FDCWD, path), path); /* not the one below */
    pthread_mutex_unlock(&one_at_a_time);
}

static int sync_handle(int handle, const char *name) {
    char path[PATH_MAX], link[64];
    if (!path_of(handle, path))
        return ((int (*)(int))dlsym(RTLD_NEXT, name))(handle);
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    keep(link);
    return 0;
}

int fsync(int handle) { return sync_handle(handle, "fsync"); }

int fdatasync(int handle) { return sync_handle(handle, "fdatasync"); }

int msync(void *start, size_t length, int flags) {
    char line[PATH_MAX + 128], path[PATH_MAX];
    unsigned long first, last;
    FILE *maps = flags & MS_SYNC && getenv("POWER_LOSS_DIR") ? fopen("/proc/self/maps", "r") : NULL;
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %4095[^\n]", &first, &last, path) == 3 && is_watched(path) &&
            first < (unsigned long)start + length && (unsigned long)start < last)
            keep(path);
    if (maps)
        fclose(maps);
    return ((int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync"))(start, length, flags);
}

/* The name at `path` goes; its file stays what it was until the folder is synced. */
static void hold(int folder, const char *path) {
    char held[PATH_MAX], above[PATH_MAX];
    struct stat about;
    if (!getenv("POWER_LOSS_DIR") || !(path[0] == '/' ? is_watched(path) : folder != AT_FDCWD && path_of(folder, above)))
        return;
    if (fstatat(folder, path, &about, AT_SYMLINK_NOFOLLOW) || !S_ISREG(about.st_mode))
        return;
    kept_at(held, "gone", about.st_ino);
    linkat(folder, path, AT_FDCWD, held, 0);
}

int unlink(const char *path) {
    hold(AT_FDCWD, path);
    return ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path);
}

int unlinkat(int folder, const char *path, int flags) {
    hold(folder, path);
    return ((int (*)(int, const char *, int))dlsym(RTLD_NEXT, "unlinkat"))(folder, path, flags);
}

int rename(const char *from, const char *to) {
    hold(AT_FDCWD, to);
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
