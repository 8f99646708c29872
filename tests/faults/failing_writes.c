/* Makes calls that change files under one folder fail. Loaded with LD_PRELOAD; `disk.py` compiles and drives it.
 *
 *   FAULT_FOLDER  only calls on paths below it count; an absolute path without links
 *   FAULT_MATCH   and only those whose "call path" fits this pattern, such as "write *metrics.jsonl"; nothing: all do
 *   FAULT_LOG     each of them is appended here, "index call path", by a raw system call that does not count itself
 *   FAULT_AT      the first call that fails, from 1; 0 or nothing: none does, they are counted alone
 *   FAULT_TIMES   how many fail from there on; -1: all of them
 *   FAULT_ERRNO   with what
 *
 * Of the process it was loaded into alone: what that starts is not counted, nor what it forks. What libc does inside
 * itself does not come by here (fwrite's write, mkstemp's open), nor do raw system calls and writes to mapped memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static long at, times = 1;
static int failure = ENOSPC, log_file = -1;
static char folder[PATH_MAX];
static const char *match;
static size_t folder_length;
static pid_t process;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

/* Reads what is wanted; a forked child calls it again, with an environment of its own, to be the process that counts. */
void fault_begin(void) {
    const char *wanted = getenv("FAULT_FOLDER"), *log = getenv("FAULT_LOG");
    if (!wanted || strlen(wanted) >= sizeof folder) return;
    strcpy(folder, wanted);
    folder_length = strlen(folder);
    match = getenv("FAULT_MATCH");
    at = number("FAULT_AT", 0);
    times = number("FAULT_TIMES", 1);
    failure = (int)number("FAULT_ERRNO", ENOSPC);
    if (log) log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    process = getpid();
}

__attribute__((constructor)) static void begin(void) {
    fault_begin();
    unsetenv("LD_PRELOAD");
}

static int below(const char *path) {
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

/* Whether this call, on an absolute path, is to fail; errno is then set. */
static int fails(const char *call, const char *path) {
    if (!below(path)) return 0;
    char line[PATH_MAX + 64];
    if (snprintf(line, sizeof line, "%s %s", call, path) >= (int)sizeof line) return 0;
    if (match && *match && fnmatch(match, line, 0)) return 0;
    long index = atomic_fetch_add(&calls, 1) + 1;
    int length = snprintf(line, sizeof line, "%ld %s %s\n", index, call, path);
    if (log_file >= 0 && length < (int)sizeof line) (void)!syscall(SYS_write, log_file, line, (size_t)length);
    if (at <= 0 || index < at || (times >= 0 && index >= at + times)) return 0;
    errno = failure;
    return 1;
}

static int fails_file(const char *call, int file) {
    if (!folder_length || getpid() != process) return 0;
    char link[64], path[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

static int fails_path(const char *call, int directory, const char *path) {
    if (!folder_length || !path || getpid() != process) return 0;
    if (path[0] == '/') return fails(call, path);
    char link[64], whole[2 * PATH_MAX];
    int before = errno;
    if (directory == AT_FDCWD)
        strcpy(link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    errno = before;
    if (length <= 0 || strlen(path) >= PATH_MAX) return 0;
    whole[length] = '/';
    strcpy(whole + length + 1, path);
    return fails(call, whole);
}

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
static void *real(void *_Atomic *known, const char *name) {
    if (!*known) *known = dlsym(RTLD_NEXT, name);
    return *known;
}

/* result name(parameters) fails with -1 where `test` says so, and is libc's with `arguments` otherwise. */
#define CALL(result, name, parameters, test, arguments) \
    static void *_Atomic real_##name; \
    result name parameters { return test ? (result)-1 : REAL(name) arguments; }

#define ON_FILE(name, parameters, arguments) CALL(ssize_t, name, parameters, fails_file(#name, file), arguments)
ON_FILE(write, (int file, const void *data, size_t size), (file, data, size))
ON_FILE(pwrite, (int file, const void *data, size_t size, off_t place), (file, data, size, place))
ON_FILE(pwrite64, (int file, const void *data, size_t size, off64_t place), (file, data, size, place))
ON_FILE(writev, (int file, const struct iovec *parts, int count), (file, parts, count))
ON_FILE(pwritev, (int file, const struct iovec *parts, int count, off_t place), (file, parts, count, place))
ON_FILE(pwritev64, (int file, const struct iovec *parts, int count, off64_t place), (file, parts, count, place))
ON_FILE(pwritev2, (int file, const struct iovec *parts, int count, off_t place, int flags),
        (file, parts, count, place, flags))
ON_FILE(pwritev64v2, (int file, const struct iovec *parts, int count, off64_t place, int flags),
        (file, parts, count, place, flags))
ssize_t sendfile(int, int, off_t *, size_t);
ON_FILE(sendfile, (int file, int from, off_t *place, size_t size), (file, from, place, size))
ssize_t sendfile64(int, int, off64_t *, size_t);
ON_FILE(sendfile64, (int file, int from, off64_t *place, size_t size), (file, from, place, size))
ON_FILE(copy_file_range, (int from, off64_t *start, int file, off64_t *place, size_t size, unsigned flags),
        (from, start, file, place, size, flags))

#define CHANGE(name, parameters, arguments) CALL(int, name, parameters, fails_file(#name, file), arguments)
CHANGE(fsync, (int file), (file))
CHANGE(fdatasync, (int file), (file))
CHANGE(ftruncate, (int file, off_t size), (file, size))
CHANGE(ftruncate64, (int file, off64_t size), (file, size))
CHANGE(fallocate, (int file, int mode, off_t place, off_t size), (file, mode, place, size))
CHANGE(fallocate64, (int file, int mode, off64_t place, off64_t size), (file, mode, place, size))

#define ALLOCATE(name, offset) /* gives the error instead of setting errno */ \
    static void *_Atomic real_##name; \
    int name(int file, offset place, offset size) { \
        int before = errno, failed = fails_file(#name, file); \
        errno = before; \
        return failed ? failure : REAL(name)(file, place, size); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

/* Of two paths the new one counts. */
#define NAMED(name, parameters, directory, path, arguments) \
    CALL(int, name, parameters, fails_path(#name, directory, path), arguments)
NAMED(creat, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
NAMED(creat64, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
NAMED(truncate, (const char *path, off_t size), AT_FDCWD, path, (path, size))
NAMED(truncate64, (const char *path, off64_t size), AT_FDCWD, path, (path, size))
NAMED(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
NAMED(mkdirat, (int in, const char *path, mode_t mode), in, path, (in, path, mode))
NAMED(rename, (const char *from, const char *to), AT_FDCWD, to, (from, to))
NAMED(renameat, (int in, const char *from, int under, const char *to), under, to, (in, from, under, to))
NAMED(renameat2, (int in, const char *from, int under, const char *to, unsigned flags), under, to,
      (in, from, under, to, flags))
NAMED(link, (const char *from, const char *to), AT_FDCWD, to, (from, to))
NAMED(linkat, (int in, const char *from, int under, const char *to, int flags), under, to, (in, from, under, to, flags))
NAMED(symlink, (const char *from, const char *to), AT_FDCWD, to, (from, to))
NAMED(symlinkat, (const char *from, int under, const char *to), under, to, (from, under, to))

static int writes(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE;
}

static mode_t mode_of(int flags, va_list rest) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name) \
    static void *_Atomic real_##name; \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        if (writes(flags) && fails_path(#name, AT_FDCWD, path)) return -1; \
        return REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    static void *_Atomic real_##name; \
    int name(int in, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        if (writes(flags) && fails_path(#name, in, path)) return -1; \
        return REAL(name)(in, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    static void *_Atomic real_##name; \
    FILE *name(const char *path, const char *mode) { \
        int changes = mode && strpbrk(mode, "wa+"); \
        return changes && fails_path(#name, AT_FDCWD, path) ? NULL : REAL(name)(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)
