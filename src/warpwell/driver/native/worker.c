/* Start and end of a worker.
 *
 *     ww_worker --driver PATH --device ORDINAL|UUID --ordinal K [--quota BYTES] --control FD --life FD
 *
 * The worker starts the driver, sends the properties of the device to the server over `control`, and waits for a client
 * there (a ww_hand_over): until then it has no context and uses no device memory. Then it serves the client over the
 * socket from the ww_hand_over. It exits when the client closes that socket, when the client's process (pidfd) exits,
 * or when the server closes the other end of `life`. It updates a ww_counts in the file `counts`.
 */
#include "worker.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#define LEAST_DRIVER 12040        /* the first with cuFuncGetParamInfo */
#define RESIZE_LOCAL_TO_MOST 0x10 /* context flag: else a launch that needs more local memory waits for the device */

static struct options {
    const char *driver;
    int device, control, life, pidfd, counts, board;
    int64_t pid, priority;
    char tenant[WW_GATE_NAME];
} given = {.driver = "libcuda.so.1", .control = -1, .life = -1, .pidfd = -1, .counts = -1, .board = -1};

/* -- exit ---------------------------------------------------------------------------------------------------------- */

/* Exit without a shutdown of the socket, unlike ww_end: a client that closes its context waits for the socket's end,
 * and expects that the device memory is free then. */
static _Noreturn void end_quietly(void) { _exit(0); }

/* Runs in its own thread, because the executor may block in the driver, or on a full pipe at stdout. */
static void *watch(void *unused) {
    (void)unused;
    struct pollfd all[3] = {{ww.socket, POLLRDHUP, 0}, {given.pidfd, POLLIN, 0}, {given.life, POLLIN, 0}};
    for (;;) {
        if (poll(all, 3, -1) <= 0)
            continue;
        if (all[0].revents || all[1].revents || all[2].revents)
            end_quietly();
    }
    return NULL;
}

static void start_watch(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, watch, NULL))
        ww_die("there is no thread to watch the client");
    pthread_detach(thread);
}

/* Wait for the client that the server hands over; exit if the server exits. */
static void await_client(void) {
    struct pollfd all[2] = {{given.control, POLLIN, 0}, {given.life, POLLIN, 0}};
    while (poll(all, 2, -1) < 0)
        ;
    struct ww_hand_over packet;
    int fds[6], is_cut;
    if (all[1].revents ||
        ww_receive_packet(given.control, &packet, sizeof packet, fds, 6, &is_cut) != (ssize_t)sizeof packet ||
        packet.type != WW_HAND_OVER || fds[3] < 0)
        end_quietly();
    ww.socket = fds[0];
    given.counts = fds[1];
    for (int i = 2; i < 4; i++) /* the client's stdout and stderr become those of the worker */
        if (dup2(fds[i], i - 1) < 0 || close(fds[i]))
            end_quietly();
    if (packet.has_process)
        given.pidfd = fds[4];
    packet.share[sizeof packet.share - 1] = 0;
    if (packet.has_board && ww_gate_parse(packet.share, &given.priority, given.tenant))
        given.board = fds[packet.has_process ? 5 : 4];
    given.pid = packet.pid;
    close(given.control);
    given.control = -1;
}

/* Report to the client, and exit. Without a client, report to the server, which may still hand over a client. */
static _Noreturn void refuse(CUresult result, const char *why) {
    struct ww_refused packet = {.type = WW_REFUSED, .result = result};
    snprintf(packet.why, sizeof packet.why, "%s", why);
    if (ww.socket < 0) {
        send(given.control, &packet, sizeof packet, MSG_NOSIGNAL | MSG_DONTWAIT);
        await_client();
    }
    send(ww.socket, &packet, sizeof packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    ww_end(1);
}

static void must(CUresult code, const char *what) {
    if (!code)
        return;
    const char *name = NULL;
    char why[200];
    if (native.cuGetErrorName)
        native.cuGetErrorName(code, &name);
    snprintf(why, sizeof why, "device %u: %s: %s", ww.ordinal, what, name ? name : "unknown error");
    refuse(code, why);
}

/* -- the device ---------------------------------------------------------------------------------------------------- */

static void start_driver(void) {
    char why[400];
    int version = 0;
    setenv("CUDA_MODULE_LOADING", "EAGER", 1); /* else a kernel's first launch may wait for the device */
    if (ww_load_native(given.driver, why, sizeof why))
        refuse(CUDA_ERROR_NO_DEVICE, why);
    must(native.cuInit(0), "the driver does not start");
    must(native.cuDriverGetVersion(&version), "the driver has no version");
    if (version < LEAST_DRIVER)
        refuse(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "the driver is older than CUDA 12.4: update it");
    must(native.cuDeviceGet(&ww.device, given.device), "no such device");
}

/* Find the devices of this machine whose memory the worker can map. Its own is one: two agents may share a GPU. */
static void find_peers(struct ww_facts *facts) {
    int count = 0;
    if (!facts->attributes[CU_DEVICE_HANDLE_POSIX_FD] || native.cuDeviceGetCount(&count))
        return;
    for (int i = 0; i < count && facts->npeers < WW_PEERS; i++) {
        struct ww_peer peer = {.rank = 0, .atomics = 1};
        CUdevice other;
        int can = 0;
        if (native.cuDeviceGet(&other, i))
            continue;
        if (other != ww.device && (native.cuDeviceCanAccessPeer(&can, ww.device, other) || !can))
            continue;
        if (native.cuDeviceGetUuid_v2(peer.uuid, other))
            continue;
        if (other != ww.device) {
            native.cuDeviceGetP2PAttribute(&peer.rank, CU_P2P_RANK, ww.device, other);
            native.cuDeviceGetP2PAttribute(&peer.atomics, CU_P2P_ATOMICS, ww.device, other);
        }
        facts->peers[facts->npeers++] = peer;
    }
}

static void find_facts(struct ww_facts *facts) {
    memset(facts, 0, sizeof *facts);
    size_t total = 0;
    int version = 0;
    facts->type = WW_FACTS;
    must(native.cuDriverGetVersion(&version), "the driver has no version");
    must(native.cuDeviceTotalMem_v2(&total, ww.device), "the device tells no size");
    must(native.cuDeviceGetName(facts->name, sizeof facts->name, ww.device), "the device has no name");
    must(native.cuDeviceGetUuid_v2(facts->uuid, ww.device), "the device has no UUID");
    must(native.cuDeviceGetPCIBusId(facts->pci, sizeof facts->pci, ww.device), "the device has no PCI address");
    facts->driver_version = (uint32_t)version;
    facts->total_bytes = ww.quota && ww.quota < total ? ww.quota : total;
    facts->arena = WW_ARENA_BASE + ww.ordinal * WW_ARENA_STEP;
    facts->arena_bytes = WW_ARENA_STEP;
    for (int i = 1; i < (int)WW_ATTRIBUTES; i++)
        if (native.cuDeviceGetAttribute(facts->attributes + i, i, ww.device))
            facts->attributes[i] = 0;
    find_peers(facts);
    facts->greatest_priority = facts->attributes[CU_DEVICE_STREAM_PRIORITIES] ? -5 : 0;
}

static void start_context(struct ww_facts *facts) {
    native.cuDevicePrimaryCtxSetFlags_v2(ww.device, RESIZE_LOCAL_TO_MOST);
    must(native.cuDevicePrimaryCtxRetain(&ww.context, ww.device), "there is no context");
    must(native.cuCtxSetCurrent(ww.context), "the context cannot be entered");
    native.cuCtxGetStreamPriorityRange(&facts->least_priority, &facts->greatest_priority);
    must(ww_memory_start(ww.ordinal, facts->total_bytes, &facts->arena, &facts->arena_bytes), "there are no addresses");
    must(native.cuMemHostRegister_v2(ww.staging, (size_t)WW_PLACES * WW_PLACE_BYTES, CU_MEMHOST_PORTABLE),
         "staging cannot be registered");
    must(native.cuMemHostRegister_v2(ww.cells, (size_t)WW_CELLS * WW_SMALL, CU_MEMHOST_PORTABLE),
         "cells cannot be registered");
}

/* -- shared memory ------------------------------------------------------------------------------------------------- */

/* Create memory that the client can map, or refuse the client; see ww_share_memory. */
static void *share(const char *name, size_t n, bool read_only, int *fd) {
    void *memory = ww_share_memory(name, NULL, n, read_only, fd);
    if (!memory)
        refuse(CUDA_ERROR_OUT_OF_MEMORY, "shared memory cannot be made and sealed (Linux 5.1 is needed)");
    return memory;
}

static void start_memory(int fds[3]) {
    ww.ring = share("warpwell-ring", sizeof *ww.ring, 0, fds);
    ww.status = share("warpwell-status", sizeof *ww.status, 1, fds + 1);
    ww.staging = share("warpwell-staging", (size_t)WW_PLACES * WW_PLACE_BYTES, 0, fds + 2);
    ww.cells = mmap(NULL, (size_t)WW_CELLS * WW_SMALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ww.cells == MAP_FAILED)
        refuse(CUDA_ERROR_OUT_OF_MEMORY, "the worker is out of memory");
    static struct ww_counts own;
    void *counts =
        given.counts < 0 ? MAP_FAILED : mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, given.counts, 0);
    ww.counts = counts == MAP_FAILED ? &own : counts;
    close(given.counts);
    ww.host_most = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
}

static void tell_opened(struct ww_facts *facts, const int fds[3]) {
    facts->type = WW_OPENED;
    if (ww_send_packet(ww.socket, facts, sizeof *facts, fds, 3, 0))
        ww_end(1);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
}

/* -- main ---------------------------------------------------------------------------------------------------------- */

static void parse(int argc, char **argv) {
    long ordinal = -1;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--driver"))
            given.driver = value;
        else if (!strcmp(name, "--device"))
            given.device = atoi(value);
        else if (!strcmp(name, "--ordinal"))
            ordinal = atol(value);
        else if (!strcmp(name, "--quota"))
            ww.quota = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--control"))
            given.control = atoi(value);
        else if (!strcmp(name, "--life"))
            given.life = atoi(value);
    }
    if (given.control < 0 || given.life < 0 || ordinal < 0 || ordinal >= 64) {
        fprintf(stderr, "ww_worker is started by Warpwell's server of CUDA clients\n");
        exit(2);
    }
    ww.ordinal = (uint32_t)ordinal;
}

int main(int argc, char **argv) {
    static const int ignored[] = {SIGINT, SIGQUIT, SIGTSTP, SIGHUP, SIGPIPE}; /* only the client reacts to them */
    int fds[3];
    struct ww_facts facts;
    struct rlimit most;
    parse(argc, argv);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        signal(ignored[i], SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000ul);
    if (!getrlimit(RLIMIT_NOFILE, &most)) { /* one for each block of pinned memory that other workers map */
        most.rlim_cur = most.rlim_max;
        setrlimit(RLIMIT_NOFILE, &most);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    start_driver();
    find_facts(&facts);
    send(given.control, &facts, sizeof facts, MSG_NOSIGNAL | MSG_DONTWAIT);
    await_client();
    start_watch();
    start_memory(fds);
    start_context(&facts);
    ww_streams_start();
    if (given.board >= 0)
        ww_gate_attach(&ww.gate, given.board, WW_GATE_WORKER, given.pid, given.priority, given.tenant);
    ww_heavy_start();
    tell_opened(&facts, fds);
    ww_execute();
}
