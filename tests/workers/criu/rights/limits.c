/* Stands in for CAP_SYS_RESOURCE where root lacks it: the limits of another user's process are read
 * from /proc, which shows the same figures.  Loaded into CRIU in tests only. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *const names[] = {
    "Max cpu time", "Max file size", "Max data size", "Max stack size", "Max core file size",
    "Max resident set", "Max processes", "Max open files", "Max locked memory",
    "Max address space", "Max file locks", "Max pending signals", "Max msgqueue size",
    "Max nice priority", "Max realtime priority", "Max realtime timeout",
};
enum { LIMITS = sizeof names / sizeof *names, NAME_WIDTH = 26 };

static unsigned long long figure(const char *text) {
    return strcmp(text, "unlimited") ? strtoull(text, NULL, 10) : ~0ULL;
}

static long from_proc(long pid, long which, unsigned long long *limit) {
    char path[64], line[256], soft[64], hard[64];
    snprintf(path, sizeof path, "/proc/%ld/limits", pid);
    FILE *file = fopen(path, "r");
    long found = -EPERM;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, names[which], strlen(names[which]))) continue;
        if (sscanf(line + NAME_WIDTH, "%63s %63s", soft, hard) != 2) continue;
        limit[0] = figure(soft), limit[1] = figure(hard), found = 0;
    }
    if (file) fclose(file);
    return found;
}

#if defined(__x86_64__)
static long kernel(long number, const long *a) {
    register long r10 __asm__("r10") = a[3], r8 __asm__("r8") = a[4], r9 __asm__("r9") = a[5];
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#else
#error "no system call of this architecture is written here"
#endif

/* CRIU asks for limits by this function of the C library. */
long syscall(long number, ...) {
    va_list list;
    long a[6];
    va_start(list, number);
    for (int at = 0; at < 6; at++) a[at] = va_arg(list, long);
    va_end(list);
    long result = kernel(number, a);
    int asks = number == SYS_prlimit64 && !a[2] && a[3] && a[1] >= 0 && a[1] < LIMITS;
    if (asks && result == -EPERM) result = from_proc(a[0], a[1], (unsigned long long *)a[3]);
    if (result < 0 && result > -4096) {
        errno = -result;
        return -1;
    }
    return result;
}
