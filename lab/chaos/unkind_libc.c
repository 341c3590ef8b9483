/* Preloaded before the libc of one process, to step its time of day and to refuse writes to files of one folder.

CHAOS_LIBC names a file of two 64-bit numbers, which may change at any time: how many seconds the time of day is ahead,
and whether writes to the folder that CHAOS_DISK names are refused. Monotonic clocks are not changed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define FILES 1024
#define THE(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static volatile const int64_t *told;
static char of_folder[FILES];

__attribute__((constructor)) static void begin(void) {
    const char *place = getenv("CHAOS_LIBC");
    int file = place ? THE(open64)(place, O_RDONLY) : -1;
    void *seen = file < 0 ? MAP_FAILED : mmap(NULL, 2 * sizeof *told, PROT_READ, MAP_SHARED, file, 0);
    if (seen != MAP_FAILED)
        told = seen;
    if (file >= 0)
        THE(close)(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int answer = THE(clock_gettime)(clock, now);
    if (!answer && clock == CLOCK_REALTIME && told)
        now->tv_sec += told[0];
    return answer;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int answer = THE(gettimeofday)(now, zone);
    if (!answer && told)
        now->tv_sec += told[0];
    return answer;
}

time_t time(time_t *now) {
    time_t answer = THE(time)(NULL) + (told ? told[0] : 0);
    if (now)
        *now = answer;
    return answer;
}

static int is_refused(int file) {
    int refused = told && told[1] && file >= 0 && file < FILES && of_folder[file];
    if (refused)
        errno = EROFS;
    return refused;
}

int open64(const char *path, int flags, ...) {
    const char *folder = getenv("CHAOS_DISK");
    int within = folder && *folder && !strncmp(path, folder, strlen(folder)), file;
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (within && told && told[1] && flags & (O_WRONLY | O_RDWR)) {
        errno = EROFS;
        return -1;
    }
    file = THE(open64)(path, flags, mode);
    if (file >= 0 && file < FILES)
        of_folder[file] = within;
    return file;
}

int close(int file) {
    if (file >= 0 && file < FILES)
        of_folder[file] = 0;
    return THE(close)(file);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t place) {
    return is_refused(file) ? -1 : THE(pwrite64)(file, data, size, place);
}

ssize_t write(int file, const void *data, size_t size) {
    return is_refused(file) ? -1 : THE(write)(file, data, size);
}

int ftruncate64(int file, off64_t size) {
    return is_refused(file) ? -1 : THE(ftruncate64)(file, size);
}
