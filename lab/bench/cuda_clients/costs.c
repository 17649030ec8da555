/* Measure the cost of calls of the CUDA driver: a program over the libcuda.so.1 that the system loads.
 *
 *     cuda_programs fake|gpu ROUNDS MOST_MIB
 *
 * Prints one line of JSON: microseconds, or GB/s for names that begin with `in` or `out`. Medians, unless a name says
 * otherwise. cuda_programs.py compiles and runs it with the machine's driver and with the layer in turns.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_SAMPLES 100000
#define BURST 400
#define SMALL 4096

static const char fake_image[] = "//FAKE\nkernel none 8 8 4\nkernel nap 4\n";
static const char gpu_image[] =
    ".version 6.3\n.target sm_75\n.address_size 64\n"
    ".visible .entry none(.param .u64 a, .param .u64 b, .param .u32 n)\n{\n  ret;\n}\n"
    ".visible .entry nap(.param .u32 micros)\n{\n"
    "  .reg .b32 %r<2>;\n  .reg .b64 %t<4>;\n  .reg .pred %p<2>;\n"
    "  ld.param.u32 %r0, [micros];\n  mul.wide.u32 %t0, %r0, 1000;\n"
    "  mov.u64 %t1, %globaltimer;\n  add.u64 %t0, %t0, %t1;\n"
    "again:\n  mov.u64 %t2, %globaltimer;\n  setp.lt.u64 %p0, %t2, %t0;\n  @%p0 bra again;\n  ret;\n}\n";

static double samples[MOST_SAMPLES];
static size_t nsamples;
static int rounds;
static const char *between = "{";

static struct {
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *), (*load)(void **, const void *);
    int (*function)(void **, void *, const char *), (*synchronize)(void), (*stream)(void **, unsigned);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **);
    int (*wait)(void *), (*alloc)(uint64_t *, size_t), (*release)(uint64_t), (*pin)(void **, size_t, unsigned);
    int (*unpin)(void *), (*in)(uint64_t, const void *, size_t), (*out)(void *, uint64_t, size_t);
    int (*set_bytes)(uint64_t, unsigned char, size_t);
} cu;

static const struct {
    void *at;
    const char *name;
} wanted[] = {
    {&cu.init, "cuInit"},
    {&cu.retain, "cuDevicePrimaryCtxRetain"},
    {&cu.set, "cuCtxSetCurrent"},
    {&cu.load, "cuModuleLoadData"},
    {&cu.function, "cuModuleGetFunction"},
    {&cu.synchronize, "cuCtxSynchronize"},
    {&cu.stream, "cuStreamCreate"},
    {&cu.launch, "cuLaunchKernel"},
    {&cu.wait, "cuStreamSynchronize"},
    {&cu.alloc, "cuMemAlloc_v2"},
    {&cu.release, "cuMemFree_v2"},
    {&cu.pin, "cuMemHostAlloc"},
    {&cu.unpin, "cuMemFreeHost"},
    {&cu.in, "cuMemcpyHtoD_v2"},
    {&cu.out, "cuMemcpyDtoH_v2"},
    {&cu.set_bytes, "cuMemsetD8_v2"},
};

static void check(int code, const char *what) {
    if (!code)
        return;
    fprintf(stderr, "%s gave %d\n", what, code);
    exit(1);
}
#define CHECK(call) check(call, #call)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void rest(long ms) {
    struct timespec t = {0, ms * 1000000};
    nanosleep(&t, NULL);
}

static void sample(double micros) {
    if (nsamples < MOST_SAMPLES)
        samples[nsamples++] = micros;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void say(const char *name, double value) {
    printf("%s\"%s\": %.4g", between, name, value);
    between = ", ";
}

/* Print a quantile of the samples that were taken since the last call, and forget them. */
static void tell(const char *name, double quantile) {
    qsort(samples, nsamples, sizeof *samples, ascending);
    say(name, samples[(size_t)(quantile * (double)(nsamples - 1))]);
    nsamples = 0;
}

/* -- launches and synchronizations -----------------------------------------------------------------------------------
 */

static void *none, *nap, *stream;
static uint64_t memory;

static void launch(void) {
    uint64_t a = memory, b = memory;
    uint32_t n = 1;
    void *params[] = {&a, &b, &n};
    CHECK(cu.launch(none, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

static void work_for(uint32_t micros) {
    void *params[] = {&micros};
    CHECK(cu.launch(nap, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

static void launches(void) {
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < BURST; i++) {
            double begun = now();
            launch();
            sample(now() - begun);
        }
        CHECK(cu.wait(stream));
    }
    tell("launch in a burst", 0.5);
    for (int r = 0; r < rounds; r++) {
        rest(5);
        double begun = now();
        launch();
        sample(now() - begun);
    }
    tell("first launch after 5 ms", 0.5);
    for (int r = 0; r < 3; r++) {
        double begun = now();
        for (int i = 0; i < 500 * rounds; i++)
            launch();
        CHECK(cu.synchronize());
        sample((now() - begun) / (500 * rounds));
    }
    tell("launch done, of many, best", 0.0);
}

static void synchronizations(void) {
    for (int r = 0; r < rounds; r++) {
        double begun = now();
        CHECK(cu.wait(stream));
        sample(now() - begun);
    }
    tell("synchronize an idle stream", 0.5);
    for (int r = 0; r < rounds; r++) {
        double begun = now();
        launch();
        CHECK(cu.wait(stream));
        sample(now() - begun);
    }
    tell("launch and synchronize", 0.5);
    for (int r = 0; r < rounds; r++) {
        rest(5);
        double begun = now();
        launch();
        CHECK(cu.wait(stream));
        sample(now() - begun);
    }
    tell("launch and synchronize after 5 ms", 0.5);
    for (int r = 0; r < rounds / 2; r++) {
        double begun = now();
        work_for(2000);
        CHECK(cu.wait(stream));
        sample(now() - begun - 2000);
    }
    tell("synchronize with 2 ms of work, beyond the work", 0.5);
}

/* -- memory ----------------------------------------------------------------------------------------------------------
 */

static void small_copies(void) {
    static char bytes[SMALL];
    memset(bytes, 1, sizeof bytes);
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < 50; i++) {
            double begun = now();
            CHECK(cu.in(memory, bytes, SMALL));
            sample(now() - begun);
        }
        CHECK(cu.synchronize());
    }
    tell("4 KiB in, in a burst of 50", 0.5);
    for (int r = 0; r < rounds; r++) {
        rest(5);
        double begun = now();
        CHECK(cu.in(memory, bytes, SMALL));
        sample(now() - begun);
    }
    tell("4 KiB in, first after 5 ms", 0.5);
    double begun = now();
    for (int i = 0; i < 50 * rounds; i++)
        CHECK(cu.in(memory, bytes, SMALL));
    CHECK(cu.synchronize());
    say("4 KiB in, one of many done", (now() - begun) / (50 * rounds));
    for (int r = 0; r < rounds; r++) {
        begun = now();
        CHECK(cu.in(memory, bytes, SMALL));
        launch();
        CHECK(cu.wait(stream));
        sample(now() - begun);
    }
    tell("4 KiB in, launch, synchronize", 0.5);
    for (int r = 0; r < 10 * rounds; r++) {
        begun = now();
        CHECK(cu.out(bytes, memory, SMALL));
        sample(now() - begun);
    }
    tell("4 KiB out", 0.5);
}

static void allocations(const char *name, size_t nbytes) {
    uint64_t at;
    for (int r = 0; r < rounds; r++) {
        double begun = now();
        CHECK(cu.alloc(&at, nbytes));
        CHECK(cu.release(at));
        sample(now() - begun);
    }
    tell(name, 0.5);
}

/* Free and allocate one of 64 blocks, as a program that creates arrays does. */
static void many_allocations(void) {
    uint64_t all[64];
    for (int i = 0; i < 64; i++)
        CHECK(cu.alloc(&all[i], 2u << 20));
    for (int r = 0; r < rounds; r++) {
        double begun = now();
        CHECK(cu.release(all[r % 64]));
        CHECK(cu.alloc(&all[r % 64], 2u << 20));
        sample(now() - begun);
    }
    for (int i = 0; i < 64; i++)
        CHECK(cu.release(all[i]));
    tell("free and allocate 2 MiB with 63 other blocks", 0.5);
}

static double best_copy(void *host, size_t nbytes, int in) {
    double best = 1e18, until = now() + 100e3;
    for (int r = 0; r < 200 && (r < 4 || now() < until); r++) {
        double begun = now();
        if (in) {
            CHECK(cu.in(memory, host, nbytes));
            CHECK(cu.synchronize());
        } else {
            CHECK(cu.out(host, memory, nbytes));
        }
        double took = now() - begun;
        best = took < best ? took : best;
    }
    return (double)nbytes / best * 1e-3;
}

static void large_copies(size_t most) {
    static const char *kinds[] = {"pageable", "pinned"};
    char name[64];
    for (int pinned = 0; pinned < 2; pinned++) {
        void *host = NULL;
        if (pinned)
            CHECK(cu.pin(&host, most, 0));
        else
            host = malloc(most);
        if (!host)
            exit(1);
        memset(host, 1 + pinned, most);
        for (size_t n = SMALL; n <= most; n *= 4) {
            snprintf(name, sizeof name, "in %s %zu", kinds[pinned], n);
            say(name, best_copy(host, n, 1));
            snprintf(name, sizeof name, "out %s %zu", kinds[pinned], n);
            say(name, best_copy(host, n, 0));
        }
        if (pinned)
            CHECK(cu.unpin(host));
        else
            free(host);
    }
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    rounds = atoi(argv[2]);
    size_t most = (size_t)atoi(argv[3]) << 20;
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context, *module;
    for (size_t i = 0; library && i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        memcpy(wanted[i].at, &found, sizeof found);
        check(!found, wanted[i].name);
    }
    check(!library, "dlopen");
    double begun = now();
    CHECK(cu.init(0));
    say("cuInit, ms", (now() - begun) / 1e3);
    begun = now();
    CHECK(cu.retain(&context, 0));
    CHECK(cu.set(context));
    CHECK(cu.alloc(&memory, most));
    say("context and first allocation, ms", (now() - begun) / 1e3);
    begun = now();
    CHECK(cu.load(&module, strcmp(argv[1], "fake") ? gpu_image : fake_image));
    say("load a small module, ms", (now() - begun) / 1e3);
    CHECK(cu.function(&none, module, "none"));
    CHECK(cu.function(&nap, module, "nap"));
    CHECK(cu.stream(&stream, 1)); /* nonblocking, like the streams of CuPy, PyTorch and cuda.core */
    CHECK(cu.set_bytes(memory, 0, most));
    launch();
    CHECK(cu.synchronize());
    launches();
    synchronizations();
    small_copies();
    allocations("allocate and free 1 KiB", 1024);
    allocations("allocate and free 2 MiB", 2u << 20);
    many_allocations();
    large_copies(most);
    puts("}");
    return 0;
}
