/* Packets with descriptors, over a Unix socket. */
#ifndef WW_DESCRIPTORS_H
#define WW_DESCRIPTORS_H

#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WW_DESCRIPTORS 8 /* of a packet at most */

union ww_control {
    struct cmsghdr header;
    char room[CMSG_SPACE(WW_DESCRIPTORS * sizeof(int))];
};

/* Send a packet with `nfds` descriptors: 0, or -1 with errno. */
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

/* Receive a packet that has arrived. Absent descriptors are -1, and those beyond `nfds` are closed. Return its bytes, 0
 * at the end, -1 with errno. *is_cut: the packet is longer. */
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
