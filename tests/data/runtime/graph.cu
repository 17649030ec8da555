// Calls that the layer serves without a driver: graphs that are captured, built from nodes and changed; managed memory.
#include "check.h"

#include <cuda_runtime.h>

#define COUNT 1024u
#define BYTES (4 * COUNT)

__device__ unsigned table[COUNT];

static unsigned back[COUNT];

static void CUDART_CB note(void *data) { ++*(volatile int *)data; }

static void captured() {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCaptureStatus status;
    unsigned *a;
    size_t nodes = 0;
    OK(cudaStreamCreate(&stream));
    OK(cudaMalloc(&a, BYTES));
    fill<<<1, 32>>>(a, COUNT, 1);
    OK(cudaDeviceSynchronize());
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    add<<<1, 32, 0, stream>>>(a, a, COUNT);
    OK(cudaMemcpyAsync(back, a, BYTES, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamIsCapturing(stream, &status));
    EQUAL(status, cudaStreamCaptureStatusActive);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphGetNodes(graph, NULL, &nodes));
    EQUAL(nodes, 2);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++)
        OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
    EQUAL(back[COUNT - 1], 8);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(a));
}

static void built() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t set, kernel, copied, called, variable;
    unsigned *a, *b, value = 3;
    u64 count = COUNT;
    int calls = 0;
    OK(cudaMalloc(&a, BYTES));
    OK(cudaMalloc(&b, BYTES));
    fill<<<1, 32>>>(b, COUNT, 5);
    OK(cudaGraphCreate(&graph, 0));
    cudaMemsetParams memset_params = {};
    memset_params.dst = a;
    memset_params.elementSize = 4;
    memset_params.value = 2;
    memset_params.width = COUNT;
    memset_params.height = 1;
    OK(cudaGraphAddMemsetNode(&set, graph, NULL, 0, &memset_params));
    void *arguments[] = {&a, &b, &count};
    cudaKernelNodeParams params = {};
    params.func = (void *)add;
    params.gridDim = dim3(1);
    params.blockDim = dim3(32);
    params.kernelParams = arguments;
    OK(cudaGraphAddKernelNode(&kernel, graph, &set, 1, &params));
    OK(cudaGraphKernelNodeSetParams(kernel, &params));
    OK(cudaGraphAddMemcpyNode1D(&copied, graph, &kernel, 1, back, a, BYTES, cudaMemcpyDeviceToHost));
    cudaHostNodeParams host = {note, &calls};
    OK(cudaGraphAddHostNode(&called, graph, &copied, 1, &host));
    OK(cudaGraphAddMemcpyNodeToSymbol(&variable, graph, &kernel, 1, table, a, 16, 8, cudaMemcpyDeviceToDevice));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaDeviceSynchronize());
    CHECK(back[0] == 7 && back[COUNT - 1] == 7 && calls == 1);
    OK(cudaMemcpyFromSymbol(back, table, 32));
    CHECK(back[1] == 0 && back[2] == 7 && back[5] == 7 && back[6] == 0);

    cudaKernelNodeParams read = {};
    OK(cudaGraphKernelNodeGetParams(kernel, &read));
    CHECK(read.func == (void *)add && read.blockDim.x == 32);
    cudaMemcpy3DParms copy_params = {};
    OK(cudaGraphMemcpyNodeGetParams(copied, &copy_params));
    CHECK(copy_params.kind == cudaMemcpyDeviceToHost && copy_params.extent.width == BYTES &&
          copy_params.dstPtr.ptr == back);
    void *filled[] = {&a, &count, &value};
    params.func = (void *)fill;
    params.kernelParams = filled;
    OK(cudaGraphExecKernelNodeSetParams(exec, kernel, &params));
    OK(cudaGraphExecMemcpyNodeSetParams1D(exec, copied, back, a, BYTES / 2, cudaMemcpyDeviceToHost));
    memset(back, 0, BYTES);
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaDeviceSynchronize());
    CHECK(back[0] == 3 && back[COUNT / 2 - 1] == 3 && back[COUNT / 2] == 0 && calls == 2);
    cudaGraphNodeType type;
    OK(cudaGraphNodeGetType(set, &type));
    EQUAL(type, cudaGraphNodeTypeMemset);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaFree(a));
    OK(cudaFree(b));
}

static void of_any_type() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t filled, copied;
    unsigned *a, value = 9;
    u64 count = COUNT;
    OK(cudaMalloc(&a, BYTES));
    OK(cudaGraphCreate(&graph, 0));
    void *arguments[] = {&a, &count, &value};
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = (void *)fill;
    params.kernel.gridDim = dim3(1);
    params.kernel.blockDim = dim3(32);
    params.kernel.kernelParams = arguments;
    OK(cudaGraphAddNode(&filled, graph, NULL, NULL, 0, &params));
    OK(cudaGraphNodeSetParams(filled, &params));
    cudaGraphNodeParams copy = {};
    copy.type = cudaGraphNodeTypeMemcpy;
    copy.memcpy.copyParams.srcPtr = make_cudaPitchedPtr(a, BYTES, COUNT, 1);
    copy.memcpy.copyParams.dstPtr = make_cudaPitchedPtr(back, BYTES, COUNT, 1);
    copy.memcpy.copyParams.extent = make_cudaExtent(BYTES, 1, 1);
    copy.memcpy.copyParams.kind = cudaMemcpyDeviceToHost;
    OK(cudaGraphAddNode(&copied, graph, &filled, NULL, 1, &copy));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaDeviceSynchronize());
    EQUAL(back[COUNT - 1], 9);
    value = 10;
    OK(cudaGraphExecNodeSetParams(exec, filled, &params));
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaDeviceSynchronize());
    EQUAL(back[COUNT - 1], 10);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaFree(a));
}

static void managed() {
    cudaStream_t stream;
    unsigned *a;
    cudaStreamAttrValue attribute = {};
    OK(cudaStreamCreate(&stream));
    OK(cudaMallocManaged(&a, BYTES));
    OK(cudaStreamAttachMemAsync(stream, a, 0, cudaMemAttachSingle));
    EQUAL(cudaStreamAttachMemAsync(stream, back, 0, cudaMemAttachSingle), cudaErrorInvalidValue);
    OK(cudaMemAdvise(a, BYTES, cudaMemAdviseSetReadMostly, {cudaMemLocationTypeDevice, 0}));
    OK(cudaMemPrefetchAsync(a, BYTES, {cudaMemLocationTypeDevice, 0}, 0, stream));
    OK(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &attribute));
    EQUAL(cudaStreamSetAttribute(stream, cudaStreamAttributePriority, &attribute), cudaErrorNotSupported);
    a[7] = 3;
    add<<<1, 32, 0, stream>>>(a, a, COUNT);
    OK(cudaStreamSynchronize(stream));
    EQUAL(a[7], 6);
    cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, a));
    EQUAL(attributes.type, cudaMemoryTypeManaged);
    OK(cudaFree(a));
    OK(cudaStreamDestroy(stream));
}

// Copies as nodes, of bytes and of variables: added, changed in the graph, and changed in its executable.
static void copies() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t out, in, bytes;
    unsigned *a, four[4] = {21, 22, 23, 24}, other[4] = {31, 32, 33, 34};
    OK(cudaMalloc(&a, 32));
    OK(cudaMemcpy(a, four, 16, cudaMemcpyHostToDevice));
    OK(cudaMemcpyToSymbol(table, four, 16));
    OK(cudaGraphCreate(&graph, 0));
    OK(cudaGraphAddMemcpyNodeFromSymbol(&out, graph, NULL, 0, a, table, 4, 0, cudaMemcpyDeviceToDevice));
    OK(cudaGraphMemcpyNodeSetParamsFromSymbol(out, a, table, 4, 12, cudaMemcpyDeviceToDevice));
    OK(cudaGraphAddMemcpyNodeToSymbol(&in, graph, &out, 1, table, a, 4, 0, cudaMemcpyDeviceToDevice));
    OK(cudaGraphMemcpyNodeSetParamsToSymbol(in, table, a, 4, 8, cudaMemcpyDeviceToDevice));
    OK(cudaGraphAddMemcpyNode1D(&bytes, graph, &in, 1, back, a, 8, cudaMemcpyDeviceToHost));
    OK(cudaGraphMemcpyNodeSetParams1D(bytes, back, a, 4, cudaMemcpyDeviceToHost));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    memset(back, 0, sizeof back);
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaDeviceSynchronize());
    CHECK(back[0] == 24 && back[1] == 0);
    OK(cudaMemcpyFromSymbol(back, table, 16));
    CHECK(back[0] == 21 && back[1] == 22 && back[2] == 24 && back[3] == 24);

    OK(cudaMemcpyToSymbol(table, other, 16));
    OK(cudaGraphExecMemcpyNodeSetParamsFromSymbol(exec, out, a + 1, table, 8, 4, cudaMemcpyDeviceToDevice));
    OK(cudaGraphExecMemcpyNodeSetParamsToSymbol(exec, in, table, a + 2, 4, 0, cudaMemcpyDeviceToDevice));
    cudaMemcpy3DParms box = {};
    OK(cudaGraphMemcpyNodeGetParams(bytes, &box));
    box.extent.width = 12;
    box.srcPtr.pitch = box.dstPtr.pitch = 12;
    OK(cudaGraphMemcpyNodeSetParams(bytes, &box));
    OK(cudaGraphExecMemcpyNodeSetParams(exec, bytes, &box));
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaDeviceSynchronize());
    CHECK(back[0] == 24 && back[1] == 32 && back[2] == 33 && back[3] == 24);
    OK(cudaMemcpyFromSymbol(back, table, 4));
    EQUAL(back[0], 33);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaFree(a));
}

int main() {
    managed();
    captured();
    built();
    copies();
    of_any_type();
    puts("passed");
    return 0;
}
