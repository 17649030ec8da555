// Calls of the CUDA runtime whose results do not depend on the device: memory, copies, launches, variables, streams.
#include "check.h"

#include <cuda_runtime.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 4096u
#define BYTES (4 * COUNT)

__device__ unsigned factor = 2;
__device__ unsigned table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__constant__ unsigned limit;

#ifdef SEPARATE
void fill_elsewhere(unsigned *to, u64 count, unsigned value); // other.cu
unsigned elsewhere();
#endif

static unsigned host[COUNT], back[COUNT];

static void number() {
    for (unsigned i = 0; i < COUNT; i++)
        host[i] = 7 * i + 1;
    memset(back, 0, sizeof back);
}

static void devices() {
    int count = -1, device = -1, value = 0, version = 0;
    OK(cudaGetDeviceCount(&count));
    CHECK(count >= 1);
    OK(cudaGetDevice(&device));
    EQUAL(device, 0);
    cudaDeviceProp p;
    for (int i = 0; i < count; i++) {
        OK(cudaGetDeviceProperties(&p, i));
        OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, i));
        EQUAL(p.multiProcessorCount, value);
        OK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, i));
        EQUAL(p.sharedMemPerBlockOptin, value);
        OK(cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, i));
        EQUAL(p.clusterLaunch, value);
        CHECK(strlen(p.name) > 0 && p.warpSize == 32 && p.major > 0 && p.totalGlobalMem > 0);
    }
    EQUAL(cudaGetDeviceProperties(&p, count), cudaErrorInvalidDevice);
    EQUAL(cudaDeviceEnablePeerAccess(count, 0), cudaErrorInvalidDevice);
    EQUAL(cudaDeviceDisablePeerAccess(count), cudaErrorInvalidDevice);
    EQUAL(cudaSetDevice(count), cudaErrorInvalidDevice);
    EQUAL(cudaGetLastError(), cudaErrorInvalidDevice);
    OK(cudaGetLastError());
    OK(cudaRuntimeGetVersion(&version));
    EQUAL(version / 1000, CUDART_VERSION / 1000);
    OK(cudaDriverGetVersion(&version));
    size_t free_bytes = 0, total = 0;
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(free_bytes <= total && total > 0);
}

static void memory() {
    unsigned *a, *b;
    number();
    OK(cudaMalloc(&a, BYTES));
    OK(cudaMalloc(&b, BYTES));
    OK(cudaMemcpy(a, host, BYTES, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(b, a, BYTES, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(back, b, BYTES, cudaMemcpyDeviceToHost));
    CHECK(!memcmp(host, back, BYTES));
    memset(back, 0, BYTES);
    OK(cudaMemset(a, 0, BYTES));
    OK(cudaMemcpy(a, host, BYTES, cudaMemcpyDefault));
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDefault));
    CHECK(!memcmp(host, back, BYTES));
    memset(back, 0, BYTES);
    OK(cudaMemcpy(back, host, BYTES, cudaMemcpyHostToHost));
    CHECK(!memcmp(host, back, BYTES));
    EQUAL(cudaMemcpy(a, host, 4, (cudaMemcpyKind)7), cudaErrorInvalidMemcpyDirection);
    EQUAL(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
    OK(cudaMemset(a, 0x5a, BYTES));
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 0x5a5a5a5a);
    unsigned *none = a;
    OK(cudaMalloc(&none, 0));
    CHECK(!none);
    OK(cudaFree(NULL));
    OK(cudaMallocManaged(&none, 0));
    EQUAL(cudaMalloc(&none, (size_t)1 << 60), cudaErrorMemoryAllocation);
    EQUAL(cudaGetLastError(), cudaErrorMemoryAllocation);

    cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, a + 3));
    CHECK(attributes.type == cudaMemoryTypeDevice && attributes.devicePointer == a + 3 && attributes.device == 0);
    OK(cudaPointerGetAttributes(&attributes, host));
    EQUAL(attributes.type, cudaMemoryTypeUnregistered);
    unsigned *pinned;
    OK(cudaMallocHost(&pinned, BYTES));
    OK(cudaPointerGetAttributes(&attributes, pinned));
    EQUAL(attributes.type, cudaMemoryTypeHost);
    OK(cudaMemcpyAsync(a, host, BYTES, cudaMemcpyHostToDevice, 0));
    OK(cudaMemcpyAsync(pinned, a, BYTES, cudaMemcpyDeviceToHost, 0));
    OK(cudaStreamSynchronize(0));
    CHECK(!memcmp(host, pinned, BYTES));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(a));
    OK(cudaFree(b));
}

static void registered() {
    unsigned *mapped = NULL,
             *pages = (unsigned *)mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    for (unsigned i = 0; i < COUNT; i++)
        pages[i] = 3 * i;
    OK(cudaHostRegister(pages, BYTES, cudaHostRegisterMapped));
    EQUAL(cudaHostRegister(pages, BYTES, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
    cudaGetLastError();
    CHECK(pages[0] == 0 && pages[COUNT - 1] == 3 * (COUNT - 1));
    OK(cudaHostGetDevicePointer(&mapped, pages + 8, 0));
    cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, pages + 8));
    CHECK(attributes.type == cudaMemoryTypeHost && attributes.device == 0 && attributes.devicePointer == mapped);
    CHECK(attributes.hostPointer == pages + 8);
    fill<<<1, 32>>>(mapped, 4, 77);
    OK(cudaDeviceSynchronize());
    CHECK(pages[7] == 21 && pages[8] == 77 && pages[11] == 77 && pages[12] == 36);
    pages[8] = 5; // the kernel reads what the program wrote
    fill<<<1, 32>>>(mapped + 1, 1, 10);
    add<<<1, 32>>>(mapped + 1, mapped, 1);
    OK(cudaDeviceSynchronize());
    EQUAL(pages[9], 15);
    unsigned *a;
    OK(cudaMalloc(&a, BYTES));
    OK(cudaMemcpyAsync(a, pages, BYTES, cudaMemcpyHostToDevice, 0));
    OK(cudaMemcpyAsync(back, a, BYTES, cudaMemcpyDeviceToHost, 0));
    OK(cudaDeviceSynchronize());
    CHECK(!memcmp(back, pages, BYTES));
    OK(cudaHostUnregister(pages));
    EQUAL(cudaHostUnregister(pages), cudaErrorHostMemoryNotRegistered);
    cudaGetLastError();
    EQUAL(pages[9], 15); // to unregister memory keeps its content
    OK(cudaHostRegister(pages, BYTES, cudaHostRegisterDefault));
    OK(cudaHostUnregister(pages));
    CHECK(!munmap(pages, BYTES));
    OK(cudaFree(a));
}

static void boxes() {
    cudaPitchedPtr box;
    cudaExtent extent = make_cudaExtent(40, 5, 3);
    size_t pitch;
    char *rows, from[3][5][40], to[3][5][40];
    for (size_t i = 0; i < sizeof from; i++)
        ((char *)from)[i] = (char)(3 * i + 1);
    OK(cudaMallocPitch(&rows, &pitch, 40, 5));
    CHECK(pitch >= 40);
    OK(cudaMemset2D(rows, pitch, 9, 40, 5));
    OK(cudaMemcpy2D(rows, pitch, from[0], 40, 20, 5, cudaMemcpyHostToDevice));
    OK(cudaMemcpy2D(to[0], 40, rows, pitch, 40, 5, cudaMemcpyDeviceToHost));
    for (int y = 0; y < 5; y++)
        CHECK(!memcmp(to[0][y], from[0][y], 20) && to[0][y][20] == 9 && to[0][y][39] == 9);
    EQUAL(cudaMemcpy2D(rows, 8, from[0], 40, 20, 5, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
    cudaGetLastError();
    OK(cudaMemset2DAsync(rows, pitch, 8, 30, 5, 0));
    OK(cudaMemcpy2DAsync(to[0], 40, rows, pitch, 40, 5, cudaMemcpyDeviceToHost, 0));
    OK(cudaDeviceSynchronize());
    for (int y = 0; y < 5; y++)
        CHECK(to[0][y][0] == 8 && to[0][y][29] == 8 && to[0][y][30] == 9);
    OK(cudaFree(rows));

    OK(cudaMalloc3D(&box, extent));
    OK(cudaMemset3D(box, 4, extent));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(from, 40, 40, 5);
    copy.dstPtr = box;
    copy.dstPos = make_cudaPos(8, 1, 1);
    copy.extent = make_cudaExtent(16, 2, 2);
    copy.kind = cudaMemcpyHostToDevice;
    OK(cudaMemcpy3D(&copy));
    cudaMemcpy3DParms out = {};
    out.srcPtr = box;
    out.dstPtr = make_cudaPitchedPtr(to, 40, 40, 5);
    out.extent = extent;
    out.kind = cudaMemcpyDeviceToHost;
    OK(cudaMemcpy3D(&out));
    CHECK(to[0][0][0] == 4 && to[1][0][8] == 4 && to[2][4][39] == 4);
    for (int z = 0; z < 2; z++)
        for (int y = 0; y < 2; y++)
            CHECK(!memcmp(&to[z + 1][y + 1][8], from[z][y], 16) && to[z + 1][y + 1][24] == 4);
    OK(cudaFree(box.ptr));
}

static void launches() {
    unsigned *a, *b;
    OK(cudaMalloc(&a, BYTES));
    OK(cudaMalloc(&b, BYTES));
    fill<<<1, 32>>>(a, COUNT, 40);
    OK(cudaGetLastError());
    fill<<<dim3(1, 1, 1), dim3(8, 4, 1)>>>(b, COUNT, 2);
    add<<<1, 32>>>(a, b, COUNT);
    copy<unsigned><<<1, 32>>>(b, a, BYTES);
    OK(cudaMemcpy(back, b, BYTES, cudaMemcpyDeviceToHost));
    CHECK(back[0] == 42 && back[COUNT - 1] == 42);

    fill<<<0, 32>>>(a, COUNT, 1);
    EQUAL(cudaPeekAtLastError(), CUDART_VERSION < 13000 ? cudaErrorInvalidConfiguration : cudaErrorInvalidValue);
    EQUAL(cudaGetLastError(), CUDART_VERSION < 13000 ? cudaErrorInvalidConfiguration : cudaErrorInvalidValue);
    fill<<<1, 4096>>>(a, COUNT, 1);
    EQUAL(cudaGetLastError(), cudaErrorInvalidConfiguration);
    OK(cudaGetLastError());
    EQUAL(cudaLaunchKernel((const void *)host, dim3(1), dim3(1), NULL, 0, 0), cudaErrorInvalidDeviceFunction);
    EQUAL(cudaGetLastError(), cudaErrorInvalidDeviceFunction);

    u64 count = COUNT;
    unsigned value = 5;
    void *arguments[] = {&a, &count, &value};
    OK(cudaLaunchKernel((const void *)fill, dim3(1), dim3(32), arguments, 0, 0));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(32);
    config.attrs = &attribute;
    config.numAttrs = 1;
    void *doubled[] = {&a, &a, &count};
    OK(cudaLaunchKernelExC(&config, (const void *)add, doubled));
    OK(cudaLaunchCooperativeKernel((const void *)add, dim3(1), dim3(32), doubled, 0, 0));
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 20);

    cudaKernel_t kernel;
    OK(cudaGetKernel(&kernel, (const void *)fill));
    value = 6;
    OK(cudaLaunchKernel((const void *)kernel, dim3(1), dim3(32), arguments, 0, 0));
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[0], 6);
#ifdef SEPARATE
    fill_elsewhere(a, COUNT, 11);
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 11);
    EQUAL(elsewhere(), 77);
#endif

    cudaFuncAttributes attributes;
    OK(cudaFuncGetAttributes(&attributes, fill));
    CHECK(attributes.maxThreadsPerBlock >= 32 && attributes.numRegs > 0 && attributes.sharedSizeBytes == 0);
    OK(cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
    OK(cudaFuncGetAttributes(&attributes, fill));
    EQUAL(attributes.maxDynamicSharedSizeBytes, 65536);
    OK(cudaFuncSetCacheConfig(fill, cudaFuncCachePreferL1));
    const char *name;
    OK(cudaFuncGetName(&name, (const void *)fill));
    CHECK(!strcmp(name, "fill"));
    size_t offset, nbytes;
    OK(cudaFuncGetParamInfo((const void *)fill, 1, &offset, &nbytes));
    CHECK(offset == 8 && nbytes == 8);
    cudaFunction_t function;
    OK(cudaGetFuncBySymbol(&function, (const void *)fill));
    CHECK(function != NULL);
    EQUAL(cudaGetFuncBySymbol(NULL, (const void *)fill), cudaErrorInvalidValue);
    cudaGetLastError();
    int blocks, again, grid, block;
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 128, 0));
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&again, fill, 128, 0));
    CHECK(blocks > 0 && blocks == again);
    OK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, fill, 0, 0));
    CHECK(grid > 0 && block > 0);
    nbytes = 0;
    OK(cudaOccupancyAvailableDynamicSMemPerBlock(&nbytes, fill, 1, 128));
    CHECK(nbytes > 0);
    cudaLaunchConfig_t clusters = {};
    cudaLaunchAttribute cluster = {};
    clusters.gridDim = dim3(8);
    clusters.blockDim = dim3(128);
    clusters.attrs = &cluster;
    clusters.numAttrs = 1;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    OK(cudaOccupancyMaxActiveClusters(&blocks, fill, &clusters));
    CHECK(blocks > 0);
    OK(cudaOccupancyMaxPotentialClusterSize(&blocks, fill, &clusters));
    CHECK(blocks > 0);
    OK(cudaFree(a));
    OK(cudaFree(b));
}

static void variables() {
    unsigned value = 0, two[2] = {50, 60}, all[8];
    OK(cudaMemcpyFromSymbol(&value, factor, 4));
    EQUAL(value, 2);
    value = 3;
    OK(cudaMemcpyToSymbol(factor, &value, 4));
    OK(cudaMemcpyToSymbol(table, two, 8, 8));
    OK(cudaMemcpyToSymbolAsync(limit, &value, 4, 0, cudaMemcpyHostToDevice, 0));
    OK(cudaMemcpyFromSymbol(all, table, 32));
    CHECK(all[0] == 1 && all[1] == 2 && all[2] == 50 && all[3] == 60 && all[4] == 5 && all[7] == 8);
    OK(cudaMemcpyFromSymbol(&value, limit, 4));
    EQUAL(value, 3);
    EQUAL(cudaMemcpyToSymbol(table, two, 8, 28), cudaErrorInvalidValue);
    EQUAL(cudaMemcpyToSymbol(table, two, 8, 0, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
    EQUAL(cudaMemcpyToSymbol((const void *)host, two, 8), cudaErrorInvalidSymbol);
    EQUAL(cudaGetLastError(), cudaErrorInvalidSymbol);
    size_t nbytes;
    void *address;
    OK(cudaGetSymbolSize(&nbytes, table));
    EQUAL(nbytes, 32);
    OK(cudaGetSymbolAddress(&address, table));
    OK(cudaMemcpy(all, (char *)address + 8, 8, cudaMemcpyDeviceToHost));
    CHECK(all[0] == 50 && all[1] == 60);
}

static void CUDART_CB note(void *data) { ++*(volatile int *)data; }

static void CUDART_CB noted(cudaStream_t, cudaError_t error, void *data) {
    *(volatile int *)data += error == cudaSuccess ? 10 : 1000;
}

static void streams() {
    cudaStream_t stream, other;
    cudaEvent_t begin, end;
    unsigned *a, *pinned;
    float milliseconds = -1;
    int calls = 0, least, greatest, priority;
    unsigned flags;
    OK(cudaStreamCreate(&stream));
    OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreateWithFlags(&end, cudaEventBlockingSync));
    OK(cudaMalloc(&a, BYTES));
    OK(cudaHostAlloc(&pinned, BYTES, cudaHostAllocDefault));
    OK(cudaEventRecord(begin, stream));
    fill<<<1, 32, 0, stream>>>(a, COUNT, 21);
    nap<<<1, 1, 0, stream>>>(30000);
    OK(cudaEventRecord(end, stream));
    OK(cudaStreamWaitEvent(other, end, 0));
    add<<<1, 32, 0, other>>>(a, a, COUNT);
    OK(cudaMemcpyAsync(pinned, a, BYTES, cudaMemcpyDeviceToHost, other));
    EQUAL(cudaStreamQuery(other), cudaErrorNotReady);
    cudaGetLastError();
    OK(cudaLaunchHostFunc(other, note, &calls));
    OK(cudaStreamAddCallback(other, noted, &calls, 0));
    OK(cudaStreamSynchronize(other));
    OK(cudaStreamQuery(other));
    EQUAL(pinned[COUNT - 1], 42);
    EQUAL(calls, 11);
    OK(cudaEventSynchronize(end));
    OK(cudaEventElapsedTime(&milliseconds, begin, end));
    CHECK(milliseconds >= 20);
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    OK(cudaStreamGetPriority(stream, &priority));
    EQUAL(priority, 0);
    OK(cudaStreamGetFlags(other, &flags));
    EQUAL(flags, cudaStreamNonBlocking);
    OK(cudaMemsetAsync(a, 1, BYTES, stream));
    OK(cudaMemcpyAsync(pinned, a, BYTES, cudaMemcpyDefault, stream));
    OK(cudaStreamSynchronize(stream));
    EQUAL(pinned[7], 0x01010101);
    unsigned *ordered;
    OK(cudaMallocAsync(&ordered, BYTES, stream));
    fill<<<1, 32, 0, stream>>>(ordered, COUNT, 9);
    OK(cudaMemcpyAsync(pinned, ordered, BYTES, cudaMemcpyDeviceToHost, stream));
    OK(cudaFreeAsync(ordered, stream));
    OK(cudaStreamSynchronize(stream));
    EQUAL(pinned[COUNT - 1], 9);
    // A launch to a default stream comes before a synchronous copy.
    fill<<<1, 32>>>(a, COUNT, 1);
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 1);
    fill<<<1, 32, 0, cudaStreamPerThread>>>(a, COUNT, 2);
    OK(cudaStreamSynchronize(cudaStreamPerThread));
    fill<<<1, 32, 0, cudaStreamLegacy>>>(a, COUNT, 3);
    OK(cudaStreamSynchronize(cudaStreamLegacy));
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 3);
    OK(cudaFreeHost(pinned));
    OK(cudaFree(a));
    OK(cudaEventDestroy(begin));
    OK(cudaEventDestroy(end));
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(other));
}

static void *in_thread(void *expected) {
    int device = -1;
    unsigned *a, value = 0;
    OK(cudaGetDevice(&device));
    EQUAL(device, 0);
    OK(cudaSetDevice(*(int *)expected));
    OK(cudaMalloc(&a, BYTES));
    fill<<<1, 32>>>(a, COUNT, 30u + (unsigned)*(int *)expected);
    OK(cudaGetLastError());
    OK(cudaMemcpy(&value, a + COUNT - 1, 4, cudaMemcpyDeviceToHost));
    EQUAL(value, 30 + *(int *)expected);
    OK(cudaFree(a));
    return NULL;
}

static void several() {
    int count, access = 0;
    OK(cudaGetDeviceCount(&count));
    for (int i = 0; i < count; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, in_thread, &i);
        pthread_join(thread, NULL);
    }
    if (count < 2)
        return;
    unsigned *here, *there, value = 1;
    OK(cudaMalloc(&here, BYTES));
    fill<<<1, 32>>>(here, COUNT, 12);
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&there, BYTES));
    OK(cudaMemcpyPeer(there, 1, here, 0, BYTES));
    OK(cudaMemset(there, 0, BYTES));
    OK(cudaMemcpyPeerAsync(there, 1, here, 0, BYTES, 0));
    add<<<1, 32>>>(there, there, COUNT);
    OK(cudaMemcpy(&value, there, 4, cudaMemcpyDeviceToHost));
    EQUAL(value, 24);
    OK(cudaMemcpy(here, there, BYTES, cudaMemcpyDefault));
    OK(cudaMemcpyFromSymbol(&value, factor, 4)); // each device has its own `factor`
    EQUAL(value, 2);
    OK(cudaDeviceCanAccessPeer(&access, 0, 1));
    EQUAL(cudaDeviceDisablePeerAccess(0), cudaErrorPeerAccessNotEnabled);
    cudaGetLastError();
    OK(cudaFree(there));
    OK(cudaSetDevice(0));
    OK(cudaMemcpy(&value, here, 4, cudaMemcpyDeviceToHost));
    EQUAL(value, 24);
    OK(cudaMemcpyFromSymbol(&value, factor, 4));
    EQUAL(value, 3);
    OK(cudaFree(here));
}

static void names() {
    CHECK(!strcmp(cudaGetErrorName(cudaErrorInvalidValue), "cudaErrorInvalidValue"));
    CHECK(!strcmp(cudaGetErrorString(cudaSuccess), "no error"));
    CHECK(!strcmp(cudaGetErrorName((cudaError_t)12345), "unrecognized error code"));
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion("cuMemAlloc", &function, 12000, cudaEnableDefault, &found));
    CHECK(function && found == cudaDriverEntryPointSuccess);
    OK(cudaGetDriverEntryPointByVersion("cuNoSuchCall", &function, 12000, cudaEnableDefault, &found));
    CHECK(!function && found == cudaDriverEntryPointSymbolNotFound);
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(format.x == 32 && format.f == cudaChannelFormatKindFloat);
    EQUAL(cudaMallocArray(&array, &format, 16), cudaErrorNotSupported);
    EQUAL(cudaGetLastError(), cudaErrorNotSupported);
}

static void forks() {
    int status = -1;
    pid_t child = fork();
    if (!child)
        _exit(cudaDeviceSynchronize() == cudaErrorInitializationError ? 0 : 1);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(cudaDeviceSynchronize());
}

static void resets() {
    unsigned *a, value = 0;
    OK(cudaDeviceReset());
    OK(cudaMemcpyFromSymbol(&value, factor, 4));
    EQUAL(value, 2); // a reset restores the initial value
    OK(cudaMalloc(&a, BYTES));
    fill<<<1, 32>>>(a, COUNT, 8);
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 8);
    fault<<<1, 1>>>();
    EQUAL(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    EQUAL(cudaGetLastError(), cudaErrorIllegalAddress);
    EQUAL(cudaGetLastError(), cudaErrorIllegalAddress); // the error stays until a reset
    EQUAL(cudaMemset(a, 0, 4), cudaErrorIllegalAddress);
}

// Layer only: for a mapping, it replaces pages by shared ones, so they must be whole, private, writable and anonymous.
static void refusals() {
    char *own = (char *)mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *shared = (char *)mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED && shared != MAP_FAILED);
    own[4096] = shared[0] = 7;
    EQUAL(cudaHostRegister(own + 64, 64, cudaHostRegisterMapped), cudaErrorNotSupported);
    EQUAL(cudaHostRegister(own, 4100, cudaHostRegisterMapped), cudaErrorNotSupported);
    EQUAL(cudaHostRegister(shared, 8192, cudaHostRegisterMapped), cudaErrorNotSupported);
    CHECK(!mprotect(own, 4096, PROT_READ));
    EQUAL(cudaHostRegister(own, 8192, cudaHostRegisterMapped), cudaErrorNotSupported);
    OK(cudaHostRegister(own + 4096, 4096, cudaHostRegisterMapped));
    CHECK(own[4096] == 7 && shared[0] == 7);
    OK(cudaDeviceReset()); // ends the registration, too
    EQUAL(cudaHostUnregister(own + 4096), cudaErrorHostMemoryNotRegistered);
    cudaGetLastError();
    CHECK(own[4096] == 7);
    CHECK(!munmap(own, 8192) && !munmap(shared, 8192));
}

// Layer only: the stub driver does not implement access control of memory pools.
static void pools() {
    int count;
    OK(cudaGetDeviceCount(&count));
    if (count < 2)
        return;
    cudaMemPool_t pool;
    cudaMemAccessDesc access = {};
    cudaMemAccessFlags flags = cudaMemAccessFlagsProtNone;
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = 1;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaMemPoolSetAccess(pool, &access, 1));
    OK(cudaMemPoolGetAccess(&flags, pool, &access.location));
    EQUAL(flags, cudaMemAccessFlagsProtReadWrite);
    unsigned *here, *there;
    OK(cudaMallocAsync(&here, BYTES, 0));
    fill<<<1, 32>>>(here, COUNT, 6);
    OK(cudaStreamSynchronize(0));
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&there, BYTES));
    fill<<<1, 32>>>(there, COUNT, 4);
    add<<<1, 32>>>(there, here, COUNT);
    add<<<1, 32>>>(here, there, 1);
    OK(cudaMemcpy(back, there, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 10);
    OK(cudaFree(there));
    OK(cudaSetDevice(0));
    OK(cudaMemcpy(back, here, 8, cudaMemcpyDeviceToHost));
    CHECK(back[0] == 16 && back[1] == 6);
    OK(cudaFreeAsync(here, 0));
    access.flags = cudaMemAccessFlagsProtNone;
    OK(cudaMemPoolSetAccess(pool, &access, 1));
}

// Layer only: a reset starts a new worker process. NVIDIA's driver returns the error until the program exits.
static void recovers() {
    unsigned *a;
    OK(cudaDeviceReset());
    OK(cudaGetLastError());
    OK(cudaMalloc(&a, BYTES));
    fill<<<1, 32>>>(a, COUNT, 18);
    OK(cudaMemcpy(back, a, BYTES, cudaMemcpyDeviceToHost));
    EQUAL(back[COUNT - 1], 18);
}

int main(int argc, char **) {
    devices();
    memory();
    registered();
    boxes();
    launches();
    variables();
    streams();
    several();
    names();
    forks();
    if (argc > 1) {
        refusals();
        pools();
    }
    resets();
    if (argc > 1)
        recovers();
    puts("passed");
    return 0;
}
