// Preloaded: kills the process at its KILL_AT-th operation on files of the folder KILL_IN, a write after half of its bytes. A process that
// ends writes into the file KILL_COUNT how many operations there were.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long count;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void note(const char *file, const char *what) {
    const char *path = getenv(file);
    int to = path ? REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    if (to >= 0) {
        (void)!REAL(write)(to, what, strlen(what));
        close(to);
    }
}

static int is_due(const char *path) {
    const char *in = getenv("KILL_IN"), *at = getenv("KILL_AT");
    if (!in || strncmp(path, in, strlen(in)) != 0) return 0;
    return atomic_fetch_add(&count, 1) + 1 == (at ? atol(at) : 0);
}

static void die(const char *operation, const char *path) {
    char what[PATH_MAX + 64];
    snprintf(what, sizeof what, "%s %s\n", operation, path);
    note("KILL_SAID", what);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void at_path(const char *operation, int folder, const char *path) {
    char whole[PATH_MAX] = "", link[64];
    if (path[0] != '/' && folder != AT_FDCWD) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, whole, sizeof whole - 1);
        whole[length < 0 ? 0 : length] = 0;
        strncat(whole, "/", sizeof whole - strlen(whole) - 1);
    }
    strncat(whole, path, sizeof whole - strlen(whole) - 1);
    if (is_due(whole)) die(operation, whole);
}

static void at_file(const char *operation, int file, const void *bytes, size_t length) {
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) < 0 || !is_due(path)) return;
    if (bytes) (void)!REAL(write)(file, bytes, length / 2);
    die(operation, path);
}

__attribute__((destructor)) static void end(void) {
    char what[32];
    snprintf(what, sizeof what, "%ld\n", atomic_load(&count));
    if (atomic_load(&count)) note("KILL_COUNT", what);
}

ssize_t write(int file, const void *bytes, size_t length) {
    at_file("write", file, bytes, length);
    return REAL(write)(file, bytes, length);
}

int fsync(int file) {
    at_file("fsync", file, NULL, 0);
    return REAL(fsync)(file);
}

int rename(const char *from, const char *to) {
    at_path("rename", AT_FDCWD, from);
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    at_path("unlink", AT_FDCWD, path);
    return REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    at_path("unlink", folder, path);
    return REAL(unlinkat)(folder, path, flags);
}

int rmdir(const char *path) {
    at_path("rmdir", AT_FDCWD, path);
    return REAL(rmdir)(path);
}

int mkdir(const char *path, mode_t mode) {
    at_path("mkdir", AT_FDCWD, path);
    return REAL(mkdir)(path, mode);
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list rest;                                          \
        va_start(rest, flags);                                 \
        mode_t mode = mode_of(flags, rest);                    \
        va_end(rest);                                          \
        if (flags & O_CREAT) at_path("create", AT_FDCWD, path); \
        return REAL(name)(path, flags, mode);                  \
    }

OPEN(open)
OPEN(open64)
