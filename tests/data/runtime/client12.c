/* A client of libcudart.so.12 without nvcc: it registers its code by hand, as nvcc 12's start-up code does. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dim3 {
    unsigned x, y, z;
};

extern void **__cudaRegisterFatBinary(void *);
extern void __cudaRegisterFatBinaryEnd(void **), __cudaUnregisterFatBinary(void **);
extern void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *,
                                   int *);
extern int cudaLaunchKernel(const void *, struct dim3, struct dim3, void **, size_t, void *);
extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemcpy(void *, const void *, size_t, int);
extern int cudaGetLastError(void), cudaThreadSynchronize(void), cudaRuntimeGetVersion(int *);
extern int cudaGetDeviceProperties_v2(void *, int), cudaDeviceGetAttribute(int *, int, int);
extern int cudaGetDeviceProperties(void *, int), cudaMemPrefetchAsync_v2(void *, size_t, uint64_t, unsigned, void *);

struct fatbin {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t nbytes;
    uint16_t kind, entry_version;
    uint32_t entry_bytes;
    uint64_t text_bytes;
    uint32_t packed, unused[2], capability, name[2];
    uint64_t flags, more[2];
    char text[1 << 16];
};

struct wrapper {
    uint32_t magic, version;
    const void *data, *file;
};

static struct fatbin fatbin = {
    .magic = 0xba55ed50, .version = 1, .header_bytes = 16, .kind = 1, .entry_version = 0x101};
static struct wrapper wrapper = {0x466243b1, 1, &fatbin, NULL};

static struct fatbin other = {.magic = 0xba55ed50,
                              .version = 1,
                              .header_bytes = 16,
                              .nbytes = 64 + 8,
                              .kind = 2,
                              .entry_version = 0x101,
                              .entry_bytes = 64,
                              .text_bytes = 8,
                              .capability = 100};
static struct wrapper other_wrapper = {0x466243b1, 1, &other, NULL};

static void fill(void) {} /* host functions of two kernels; a device of capability 9.0 has no code of the second */
static void absent(void) {}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s\n", __LINE__, #condition);                                                             \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

int main(int argc, char **argv) {
    static unsigned back[256];
    unsigned char properties[1032];
    void *memory;
    uint64_t count = 256;
    unsigned value = 17;
    int number, version = 0;
    FILE *f = argc == 2 ? fopen(argv[1], "rb") : NULL;
    CHECK(f);
    fatbin.text_bytes = (fread(fatbin.text, 1, sizeof fatbin.text - 1, f) + 8) / 8 * 8;
    fatbin.entry_bytes = 64;
    fatbin.nbytes = fatbin.entry_bytes + fatbin.text_bytes;
    fclose(f);
    void **handle = __cudaRegisterFatBinary(&wrapper);
    __cudaRegisterFunction(handle, (const char *)(uintptr_t)fill, NULL, "fill", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(handle);
    CHECK(!cudaMalloc(&memory, sizeof back));
    void *arguments[] = {&memory, &count, &value};
    struct dim3 one = {1, 1, 1}, block = {32, 1, 1};
    CHECK(!cudaLaunchKernel((const void *)(uintptr_t)fill, one, block, arguments, 0, NULL));
    CHECK(!cudaThreadSynchronize());
    CHECK(!cudaMemcpy(back, memory, sizeof back, 2));
    CHECK(back[0] == 17 && back[255] == 17);
    CHECK(!cudaRuntimeGetVersion(&version) && version / 1000 == 12);
    memset(properties, 0xff, sizeof properties);
    CHECK(!cudaGetDeviceProperties_v2(properties, 0));
    memcpy(&number, properties + 360, 4); /* major */
    int major;
    CHECK(!cudaDeviceGetAttribute(&major, 75, 0) && major == number);
    CHECK(cudaGetDeviceProperties(properties, 0) == 801 && cudaGetLastError() == 801);
    void **without = __cudaRegisterFatBinary(&other_wrapper);
    __cudaRegisterFunction(without, (const char *)(uintptr_t)absent, NULL, "absent", -1, NULL, NULL, NULL, NULL, NULL);
    CHECK(cudaLaunchKernel((const void *)(uintptr_t)absent, one, block, arguments, 0, NULL) == 209);
    CHECK(cudaGetLastError() == 209);
    __cudaUnregisterFatBinary(without);
    CHECK(!cudaFree(memory));
    __cudaUnregisterFatBinary(handle);
    CHECK(cudaLaunchKernel((const void *)(uintptr_t)fill, one, block, arguments, 0, NULL) == 98);
    puts("passed");
    return 0;
}
