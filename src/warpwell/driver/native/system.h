/* Linux system calls for layer, worker and relay: the clock, futexes, shared memory, packets with descriptors. */
#ifndef WW_SYSTEM_H
#define WW_SYSTEM_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/memfd.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* -- waiting ------------------------------------------------------------------------------------------------------- */

static inline uint64_t ww_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Return true if a program and its worker leave a core free. If not, threads spin only briefly. */
static inline bool ww_many_cores(void) {
    cpu_set_t set;
    return !sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) > 2;
}

static inline void ww_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* Sleep until a wake-up, for at most `ns` (less than 1 s), if *futex is `seen`. Return 0 or an errno. */
static inline int ww_futex_wait(const _Atomic uint32_t *futex, uint32_t seen, int64_t ns) {
    struct timespec limit = {0, (long)ns};
    return syscall(SYS_futex, futex, FUTEX_WAIT, seen, &limit, NULL, 0) ? errno : 0;
}

static inline void ww_wake_all(_Atomic uint32_t *futex) {
    syscall(SYS_futex, futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* -- shared memory ------------------------------------------------------------------------------------------------- */

/* Create a memfd that another process can map from *fd, and map it here: at `at`, or anywhere if `at` is NULL. Its size
 * is sealed; with `read_only`, new mappings cannot be writable. All pages are allocated, so that no later write fails
 * for lack of memory. Return the address, or NULL with errno: EEXIST if `at` is in use. The caller closes *fd, also on
 * errors, unless it is -1. */
static inline void *ww_share_memory(const char *name, void *at, size_t nbytes, bool read_only, int *fd) {
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (read_only ? F_SEAL_FUTURE_WRITE : 0);
    *fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING); /* glibc before 2.27 lacks it */
    if (*fd < 0 || ftruncate(*fd, (off_t)nbytes) || fallocate(*fd, 0, 0, (off_t)nbytes))
        return NULL;
    void *got = mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED_NOREPLACE : 0), *fd, 0);
    if (got == MAP_FAILED)
        return NULL;
    if (at && got != at)
        errno = EEXIST; /* Linux before 4.17 treats the address as a hint */
    else if (!fcntl(*fd, F_ADD_SEALS, seals))
        return got;
    munmap(got, nbytes);
    return NULL;
}

/* Map `nbytes` of shared memory that another process created. Return NULL on errors, or if the file is smaller. */
static inline void *ww_map_shared(int fd, size_t nbytes, int protection) {
    struct stat s;
    if (fstat(fd, &s) || (size_t)s.st_size < nbytes)
        return NULL;
    void *at = mmap(NULL, nbytes, protection, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static inline void ww_unmap(const void *at, size_t nbytes) {
    if (at)
        munmap((void *)(uintptr_t)at, nbytes);
}

/* Reserve `nbytes` of address space at `at`, without memory. Return false if any of these addresses is in use. */
static inline bool ww_reserve(void *at, size_t nbytes) {
    void *got = mmap(at, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != MAP_FAILED && got != at)
        munmap(got, nbytes);
    return got == at;
}

/* -- sorted ranges ------------------------------------------------------------------------------------------------- */

/* Return the index of the range that contains address `at`, or else of the next range (`n` if there is no next one).
 * The `n` ranges in `all` are sorted by address and do not overlap. A range is a struct of `each` bytes, which begins
 * with two 64-bit fields: address and size. */
static inline size_t ww_first_behind(const void *all, size_t n, size_t each, uint64_t at) {
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const uint64_t *range = (const void *)((const char *)all + middle * each);
        if (range[0] + range[1] <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Insert an item of `each` bytes at index i of an array of *n items, which has room for it. */
static inline void ww_insert(void *all, size_t *n, size_t each, size_t i, const void *item) {
    char *at = (char *)all + i * each;
    memmove(at + each, at, (*n - i) * each);
    memcpy(at, item, each);
    ++*n;
}

/* Remove the item at index i of an array of *n items of `each` bytes. */
static inline void ww_remove(void *all, size_t *n, size_t each, size_t i) {
    char *at = (char *)all + i * each;
    --*n;
    memmove(at, at + each, (*n - i) * each);
}

/* -- packets with descriptors -------------------------------------------------------------------------------------- */

#define WW_DESCRIPTORS 8 /* maximum number in a packet */

union ww_control {
    struct cmsghdr header;
    char room[CMSG_SPACE(WW_DESCRIPTORS * sizeof(int))];
};

/* Send a packet with `nfds` descriptors. Return 0, or -1 with errno. */
static inline int ww_send_packet(int socket, const void *packet, size_t nbytes, const int *fds, size_t nfds,
                                 int flags) {
    union ww_control control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct iovec part = {(void *)(uintptr_t)packet, nbytes};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (nfds) {
        control.header.cmsg_len = CMSG_LEN(nfds * sizeof *fds);
        memcpy(CMSG_DATA(&control.header), fds, nfds * sizeof *fds);
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
    }
    return sendmsg(socket, &m, MSG_NOSIGNAL | flags) < 0 ? -1 : 0;
}

/* Receive a packet without waiting. Fill fds with its descriptors, then with -1; close descriptors beyond `nfds`.
 * Return the bytes received, 0 if the other side has closed the socket, -1 with errno. *is_cut: the packet did not fit.
 */
static inline ssize_t ww_receive_packet(int socket, void *packet, size_t nbytes, int *fds, size_t nfds, int *is_cut) {
    union ww_control control;
    struct iovec part = {packet, nbytes};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    for (size_t i = 0; i < nfds; i++)
        fds[i] = -1;
    ssize_t n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    struct cmsghdr *c = n < 0 ? NULL : CMSG_FIRSTHDR(&m);
    *is_cut = m.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
        return n;
    for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        if (i < nfds)
            fds[i] = fd;
        else
            close(fd);
    }
    return n;
}

#endif
