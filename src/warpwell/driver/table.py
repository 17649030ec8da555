"""The neutral table: names and versions of the driver's interface, and what becomes of each call.

The facts stand here in words of our own; tests compare them with NVIDIA's headers where those are installed.
`generate` writes the C sources of layer and worker from this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

NAMES = """
Array3DCreate:2000,3020 Array3DGetDescriptor:2000,3020 ArrayCreate:2000,3020 ArrayDestroy:2000
ArrayGetDescriptor:2000,3020 ArrayGetMemoryRequirements:11060 ArrayGetPlane:11020 ArrayGetSparseProperties:11010
CheckpointOperationComplete:13040 CheckpointProcessCheckpoint:12080 CheckpointProcessGetRestoreThreadId:12080
CheckpointProcessGetState:12080 CheckpointProcessLock:12080 CheckpointProcessRestore:12080
CheckpointProcessUnlock:12080 CoredumpDeregisterCompleteCallback:13020 CoredumpDeregisterStartCallback:13020
CoredumpGetAttribute:12010 CoredumpGetAttributeGlobal:12010 CoredumpRegisterCompleteCallback:13020
CoredumpRegisterStartCallback:13020 CoredumpSetAttribute:12010 CoredumpSetAttributeGlobal:12010 CtxAttach:2000
CtxCreate:2000,3020,11040,12050 CtxDestroy:2000,4000 CtxDetach:2000 CtxDisablePeerAccess:4000
CtxEnablePeerAccess:4000 CtxFromGreenCtx:12040 CtxGetApiVersion:3020 CtxGetCacheConfig:3020 CtxGetCurrent:4000
CtxGetDevResource:12040 CtxGetDevice:2000,13000 CtxGetExecAffinity:11040 CtxGetFlags:7000 CtxGetId:12000
CtxGetLimit:3010 CtxGetSharedMemConfig:4020 CtxGetStreamPriorityRange:5050 CtxPopCurrent:2000,4000
CtxPushCurrent:2000,4000 CtxRecordEvent:12050 CtxResetPersistingL2Cache:11000 CtxSetCacheConfig:3020
CtxSetCurrent:4000 CtxSetFlags:12010 CtxSetLimit:3010 CtxSetSharedMemConfig:4020 CtxSynchronize:2000,13000
CtxWaitEvent:12050 DestroyExternalMemory:10000 DestroyExternalSemaphore:10000 DevResourceGenerateDesc:12040
DevSmResourceSplit:13010 DevSmResourceSplitByCount:12040 DeviceCanAccessPeer:4000 DeviceComputeCapability:2000
DeviceGet:2000 DeviceGetAttribute:2000 DeviceGetByPCIBusId:4010 DeviceGetCliqueCount:13040 DeviceGetCliqueInfo:13040
DeviceGetCount:2000 DeviceGetDefaultMemPool:11020 DeviceGetDevResource:12040 DeviceGetExecAffinitySupport:11040
DeviceGetFabricClusterUuid:13040 DeviceGetGraphMemAttribute:11040 DeviceGetHostAtomicCapabilities:13000
DeviceGetLuid:10000 DeviceGetMemPool:11020 DeviceGetName:2000 DeviceGetNvSciSyncAttributes:10020
DeviceGetP2PAtomicCapabilities:13000 DeviceGetP2PAttribute:8000 DeviceGetPCIBusId:4010 DeviceGetProperties:2000
DeviceGetTexture1DLinearMaxWidth:11010 DeviceGetUuid:9020,11040 DeviceGraphMemTrim:11040
DevicePrimaryCtxGetState:7000 DevicePrimaryCtxRelease:7000,11000 DevicePrimaryCtxReset:7000,11000
DevicePrimaryCtxRetain:7000 DevicePrimaryCtxSetFlags:7000,11000 DeviceRegisterAsyncNotification:12040
DeviceSetGraphMemAttribute:11040 DeviceSetMemPool:11020 DeviceTotalMem:2000,3020
DeviceUnregisterAsyncNotification:12040 DriverGetVersion:2020 EventCreate:2000 EventDestroy:2000,4000
EventElapsedTime:2000,12080 EventQuery:2000 EventRecord:2000;z7000 EventRecordWithFlags:11010;z11010
EventSynchronize:2000 ExternalMemoryGetMappedBuffer:10000 ExternalMemoryGetMappedMipmappedArray:10000
FabricCpyBatchAsync:13050;z13050 FlushGPUDirectRDMAWrites:11030 FuncGetAttribute:2020 FuncGetModule:11000
FuncGetName:12030 FuncGetParamCount:13020 FuncGetParamInfo:12040 FuncIsLoaded:12040 FuncLoad:12040
FuncSetAttribute:9000 FuncSetBlockShape:2000 FuncSetCacheConfig:3000 FuncSetSharedMemConfig:4020
FuncSetSharedSize:2000 GetErrorName:6000 GetErrorString:6000 GetExportTable:3000 GetProcAddress:11030,12000
GraphAddBatchMemOpNode:11070 GraphAddChildGraphNode:10000 GraphAddDependencies:10000,12030 GraphAddEmptyNode:10000
GraphAddEventRecordNode:11010 GraphAddEventWaitNode:11010 GraphAddExternalSemaphoresSignalNode:11020
GraphAddExternalSemaphoresWaitNode:11020 GraphAddHostNode:10000 GraphAddKernelNode:10000,12000
GraphAddMemAllocNode:11040 GraphAddMemFreeNode:11040 GraphAddMemcpyNode:10000 GraphAddMemsetNode:10000
GraphAddNode:12020,12030,13040 GraphBatchMemOpNodeGetParams:11070 GraphBatchMemOpNodeSetParams:11070
GraphChildGraphNodeGetGraph:10000 GraphClone:10000 GraphConditionalHandleCreate:12030 GraphCreate:10000
GraphDebugDotPrint:11030 GraphDestroy:10000 GraphDestroyNode:10000 GraphEventRecordNodeGetEvent:11010
GraphEventRecordNodeSetEvent:11010 GraphEventWaitNodeGetEvent:11010 GraphEventWaitNodeSetEvent:11010
GraphExecBatchMemOpNodeSetParams:11070 GraphExecChildGraphNodeSetParams:11010 GraphExecDestroy:10000
GraphExecEventRecordNodeSetEvent:11010 GraphExecEventWaitNodeSetEvent:11010
GraphExecExternalSemaphoresSignalNodeSetParams:11020 GraphExecExternalSemaphoresWaitNodeSetParams:11020
GraphExecGetFlags:12000 GraphExecGetId:13010 GraphExecHostNodeSetParams:10020
GraphExecKernelNodeSetParams:10010,12000 GraphExecMemcpyNodeSetParams:10020 GraphExecMemsetNodeSetParams:10020
GraphExecNodeSetParams:12020 GraphExecUpdate:10020,12000 GraphExternalSemaphoresSignalNodeGetParams:11020
GraphExternalSemaphoresSignalNodeSetParams:11020 GraphExternalSemaphoresWaitNodeGetParams:11020
GraphExternalSemaphoresWaitNodeSetParams:11020 GraphGetEdges:10000,12030 GraphGetId:13010 GraphGetNodes:10000
GraphGetRootNodes:10000 GraphHostNodeGetParams:10000 GraphHostNodeSetParams:10000 GraphInstantiate:10000,11000
GraphInstantiateWithFlags:11040 GraphInstantiateWithParams:12000;z12000 GraphKernelNodeCopyAttributes:11000
GraphKernelNodeGetAttribute:11000 GraphKernelNodeGetParams:10000,12000 GraphKernelNodeSetAttribute:11000
GraphKernelNodeSetParams:10000,12000 GraphLaunch:10000;z10000 GraphMemAllocNodeGetParams:11040
GraphMemFreeNodeGetParams:11040 GraphMemcpyNodeGetParams:10000 GraphMemcpyNodeSetParams:10000
GraphMemsetNodeGetParams:10000 GraphMemsetNodeSetParams:10000 GraphNodeFindInClone:10000
GraphNodeGetContainingGraph:13010 GraphNodeGetDependencies:10000,12030 GraphNodeGetDependentNodes:10000,12030
GraphNodeGetEnabled:11060 GraphNodeGetLocalId:13010 GraphNodeGetParams:13020 GraphNodeGetToolsId:13010
GraphNodeGetType:10000 GraphNodeSetEnabled:11060 GraphNodeSetParams:12020,13040 GraphReleaseUserObject:11030
GraphRemoveDependencies:10000,12030 GraphRetainUserObject:11030 GraphUpload:11010;z11010
GraphicsMapResources:3000;z7000 GraphicsResourceGetMappedMipmappedArray:5000
GraphicsResourceGetMappedPointer:3000,3020 GraphicsResourceSetMapFlags:3000,6050
GraphicsSubResourceGetMappedArray:3000 GraphicsUnmapResources:3000;z7000 GraphicsUnregisterResource:3000
GreenCtxCreate:12040 GreenCtxDestroy:12040 GreenCtxGetDevResource:12040 GreenCtxGetId:12090
GreenCtxRecordEvent:12040 GreenCtxStreamCreate:12050 GreenCtxWaitEvent:12040 ImportExternalMemory:10000
ImportExternalSemaphore:10000 Init:2000 IpcCloseMemHandle:4010 IpcGetEventHandle:4010 IpcGetMemHandle:4010
IpcOpenEventHandle:4010 IpcOpenMemHandle:4010,11000 KernelGetAttribute:12000 KernelGetFunction:12000
KernelGetLibrary:12050 KernelGetName:12030 KernelGetParamCount:13020 KernelGetParamInfo:12040
KernelSetAttribute:12000 KernelSetCacheConfig:12000 Launch:2000 LaunchCooperativeKernel:9000;z9000
LaunchCooperativeKernelMultiDevice:9000 LaunchGrid:2000 LaunchGridAsync:2000 LaunchHostFunc:10000,13010;z10000,13010
LaunchKernel:4000;z7000 LaunchKernelEx:11060;z11060 LibraryEnumerateKernels:12040 LibraryGetGlobal:12000
LibraryGetKernel:12000 LibraryGetKernelCount:12040 LibraryGetManaged:12000 LibraryGetModule:12000
LibraryGetUnifiedFunction:12000 LibraryLoadData:12000 LibraryLoadFromFile:12000 LibraryUnload:12000
LinkAddData:5050,6050 LinkAddFile:5050,6050 LinkComplete:5050 LinkCreate:5050,6050 LinkDestroy:5050
LogicalEndpointAddDevice:13030 LogicalEndpointBindAddr:13030 LogicalEndpointBindMem:13030
LogicalEndpointCreate:13030 LogicalEndpointDestroy:13030 LogicalEndpointExport:13030 LogicalEndpointGetLimits:13030
LogicalEndpointIdRelease:13030 LogicalEndpointIdReserve:13030 LogicalEndpointImport:13030 LogicalEndpointQuery:13030
LogicalEndpointUnbind:13030 LogsCurrent:12090 LogsDumpToFile:12090 LogsDumpToMemory:12090 LogsRegisterCallback:12090
LogsUnregisterCallback:12090 MemAddressFree:10020 MemAddressReserve:10020 MemAdvise:8000,12020 MemAlloc:2000,3020
MemAllocAsync:11020;z11020 MemAllocFromPoolAsync:11020;z11020 MemAllocHost:2000,3020 MemAllocManaged:6000
MemAllocPitch:2000,3020 MemBatchDecompressAsync:12060;z12060 MemCreate:10020
MemDiscardAndPrefetchBatchAsync:13000;z13000 MemDiscardBatchAsync:13000;z13000 MemExportToShareableHandle:10020
MemFree:2000,3020 MemFreeAsync:11020;z11020 MemFreeHost:2000 MemGetAccess:10020 MemGetAddressRange:2000,3020
MemGetAllocationGranularity:10020 MemGetAllocationPropertiesFromHandle:10020 MemGetDefaultMemPool:13000
MemGetHandleForAddressRange:11070 MemGetInfo:2000,3020 MemGetLocationInfo:13040 MemGetMemPool:13000
MemHostAlloc:2020 MemHostGetDevicePointer:2020,3020 MemHostGetFlags:2030 MemHostRegister:4000,6050
MemHostUnregister:4000 MemImportFromShareableHandle:10020 MemMap:10020 MemMapArrayAsync:11010;z11010
MemPoolCreate:11020 MemPoolDestroy:11020 MemPoolExportPointer:11020 MemPoolExportToShareableHandle:11020
MemPoolGetAccess:11020 MemPoolGetAttribute:11020 MemPoolImportFromShareableHandle:11020 MemPoolImportPointer:11020
MemPoolSetAccess:11020 MemPoolSetAttribute:11020 MemPoolTrimTo:11020 MemPrefetchAsync:8000,12020;z8000,12020
MemPrefetchBatchAsync:13000;z13000 MemRangeGetAttribute:8000 MemRangeGetAttributes:8000 MemRelease:10020
MemRetainAllocationHandle:11000 MemSetAccess:10020 MemSetMemPool:13000 MemUnmap:10020 Memcpy2D:2000,3020;d7000
Memcpy2DAsync:2000,3020;z7000 Memcpy2DUnaligned:2000,3020;d7000 Memcpy3D:2000,3020;d7000
Memcpy3DAsync:2000,3020;z7000 Memcpy3DBatchAsync:12080,13000;z12080,13000 Memcpy3DPeer:4000;d7000
Memcpy3DPeerAsync:4000;z7000 Memcpy3DWithAttributesAsync:13020;z13020 Memcpy:4000;d7000 MemcpyAsync:4000;z7000
MemcpyAtoA:2000,3020;d7000 MemcpyAtoD:2000,3020;d7000 MemcpyAtoH:2000,3020;d7000 MemcpyAtoHAsync:2000,3020;z7000
MemcpyBatchAsync:12080,13000;z12080,13000 MemcpyDtoA:2000,3020;d7000 MemcpyDtoD:2000,3020;d7000
MemcpyDtoDAsync:3000,3020;z7000 MemcpyDtoH:2000,3020;d7000 MemcpyDtoHAsync:2000,3020;z7000
MemcpyHtoA:2000,3020;d7000 MemcpyHtoAAsync:2000,3020;z7000 MemcpyHtoD:2000,3020;d7000
MemcpyHtoDAsync:2000,3020;z7000 MemcpyPeer:4000;d7000 MemcpyPeerAsync:4000;z7000
MemcpyWithAttributesAsync:13020;z13020 MemsetD16:2000,3020;d7000 MemsetD16Async:3020;z7000
MemsetD2D16:2000,3020;d7000 MemsetD2D16Async:3020;z7000 MemsetD2D32:2000,3020;d7000 MemsetD2D32Async:3020;z7000
MemsetD2D8:2000,3020;d7000 MemsetD2D8Async:3020;z7000 MemsetD32:2000,3020;d7000 MemsetD32Async:3020;z7000
MemsetD8:2000,3020;d7000 MemsetD8Async:3020;z7000 MipmappedArrayCreate:5000 MipmappedArrayDestroy:5000
MipmappedArrayGetLevel:5000 MipmappedArrayGetMemoryRequirements:11060 MipmappedArrayGetSparseProperties:11010
ModuleEnumerateFunctions:12040 ModuleGetFunction:2000 ModuleGetFunctionCount:12040 ModuleGetGlobal:2000,3020
ModuleGetLoadingMode:11070 ModuleGetSurfRef:3000 ModuleGetTexRef:2000 ModuleLoad:2000 ModuleLoadData:2000
ModuleLoadDataEx:2010 ModuleLoadFatBinary:2000 ModuleUnload:2000 MulticastAddDevice:12010
MulticastBindAddr:12010,13010 MulticastBindMem:12010,13010 MulticastCreate:12010 MulticastGetGranularity:12010
MulticastUnbind:12010 OccupancyAvailableDynamicSMemPerBlock:10020 OccupancyMaxActiveBlocksPerMultiprocessor:6050
OccupancyMaxActiveBlocksPerMultiprocessorWithFlags:7000 OccupancyMaxActiveClusters:11070
OccupancyMaxPotentialBlockSize:6050 OccupancyMaxPotentialBlockSizeWithFlags:7000
OccupancyMaxPotentialClusterSize:11070 ParamSetSize:2000 ParamSetTexRef:2000 ParamSetf:2000 ParamSeti:2000
ParamSetv:2000 PointerGetAttribute:4000 PointerGetAttributes:7000 PointerSetAttribute:6000 ProfilerInitialize:4000
ProfilerStart:4000 ProfilerStop:4000 SignalExternalSemaphoresAsync:10000;z10000 StreamAddCallback:5000;z7000
StreamAttachMemAsync:6000;z7000 StreamBatchMemOp:8000,11070;z8000,11070 StreamBeginCapture:10000,10010;z10000,10010
StreamBeginCaptureToCig:13010;z13010 StreamBeginCaptureToGraph:12030;z12030 StreamBeginRecaptureToGraph:13030;z13030
StreamCopyAttributes:11000;z11000 StreamCreate:2000 StreamCreateWithPriority:5050 StreamDestroy:2000,4000
StreamEndCapture:10000;z10000 StreamEndCaptureToCig:13010;z13010 StreamGetAttribute:11000;z11000
StreamGetCaptureInfo:10010,11030,12030;z10010,11030,12030 StreamGetCtx:9020,12050;z9020,12050
StreamGetDevResource:13010;z13010 StreamGetDevice:12080;z12080 StreamGetFlags:5050;z7000 StreamGetGreenCtx:12040
StreamGetId:12000;z12000 StreamGetPriority:5050;z7000 StreamIsCapturing:10000;z10000 StreamQuery:2000;z7000
StreamSetAttribute:11000;z11000 StreamSynchronize:2000;z7000
StreamUpdateCaptureDependencies:11030,12030;z11030,12030 StreamWaitEvent:3020;z7000
StreamWaitValue32:8000,11070;z8000,11070 StreamWaitValue64:9000,11070;z9000,11070
StreamWriteValue32:8000,11070;z8000,11070 StreamWriteValue64:9000,11070;z9000,11070 SurfObjectCreate:5000
SurfObjectDestroy:5000 SurfObjectGetResourceDesc:5000 SurfRefGetArray:3000 SurfRefSetArray:3000
TensorMapEncodeIm2col:12000 TensorMapEncodeIm2colWide:12080 TensorMapEncodeTiled:12000 TensorMapReplaceAddress:12000
TensorMapSetAllocationClass:13050 TexObjectCreate:5000 TexObjectDestroy:5000 TexObjectGetResourceDesc:5000
TexObjectGetResourceViewDesc:5000 TexObjectGetTextureDesc:5000 TexRefCreate:2000 TexRefDestroy:2000
TexRefGetAddress:2000,3020 TexRefGetAddressMode:2000 TexRefGetArray:2000 TexRefGetBorderColor:8000
TexRefGetFilterMode:2000 TexRefGetFlags:2000 TexRefGetFormat:2000 TexRefGetMaxAnisotropy:5000
TexRefGetMipmapFilterMode:5000 TexRefGetMipmapLevelBias:5000 TexRefGetMipmapLevelClamp:5000
TexRefGetMipmappedArray:5000 TexRefSetAddress2D:2020,3020,4010 TexRefSetAddress:2000,3020 TexRefSetAddressMode:2000
TexRefSetArray:2000 TexRefSetBorderColor:8000 TexRefSetFilterMode:2000 TexRefSetFlags:2000 TexRefSetFormat:2000
TexRefSetMaxAnisotropy:5000 TexRefSetMipmapFilterMode:5000 TexRefSetMipmapLevelBias:5000
TexRefSetMipmapLevelClamp:5000 TexRefSetMipmappedArray:5000 ThreadExchangeStreamCaptureMode:10010
UserObjectCreate:11030 UserObjectRelease:11030 UserObjectRetain:11030 WaitExternalSemaphoresAsync:10000;z10000
"""
"""Base names without ``cu``, each with the driver versions at which its variants appeared, as ``cuGetProcAddress``
counts them: the i-th is the symbol with ``_v{i}``, the first has no suffix. After a semicolon those for the default
stream of a thread: ``_ptds`` (d) or ``_ptsz`` (z) behind the newest variant that is no newer."""

ROLES = {
    "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "i32": "int32_t", "u64": "uint64_t", "size": "size_t",
    "f32": "float", "enum": "int32_t", "dev": "int32_t", "dptr": "uint64_t",
    "ctx": "CUcontext", "stream": "CUstream", "event": "CUevent", "func": "CUfunction", "kernel": "CUkernel",
    "library": "CUlibrary", "module": "CUmodule",
    "str": "const char *", "chars": "char *", "host": "void *", "source": "const void *", "ptr": "void *",
}  # fmt: skip
"""Role of an argument to its C type. ``out_`` before one: a pointer to it, written by the call. ``dptr`` is an address
on a device, ``host`` and ``source`` are written and read on the host, ``ptr`` is a pointer to anything else."""

SERVED = """
hand cuInit(u32)
hand cuDriverGetVersion(out_i32)
hand cuGetErrorName(enum, out_str)
hand cuGetErrorString(enum, out_str)
hand cuGetProcAddress(str, out_ptr, i32, u64) -> cuGetProcAddress_v2(a0, a1, a2, a3, NULL)
hand cuGetProcAddress_v2(str, out_ptr, i32, u64, out_enum)
hand cuGetExportTable(ptr, ptr)

hand cuDeviceGet(out_dev, i32) | device a1; a0 -> {*a0 = a1;}
hand cuDeviceGetCount(out_i32) | ready; a0 -> {*a0 = layer.ndevices;}
hand cuDeviceGetName(chars, i32, dev) | device a2 -> ww_text_out(a0, a1, d->facts.name)
hand cuDeviceGetUuid(ptr, dev) -> cuDeviceGetUuid_v2(a0, a1)
hand cuDeviceGetUuid_v2(ptr, dev) | device a1; a0 -> {memcpy(a0, d->facts.uuid, sizeof d->facts.uuid);}
hand cuDeviceTotalMem_v2(out_size, dev) | device a1; a0 -> {*a0 = d->facts.total_bytes;}
hand cuDeviceGetAttribute(out_i32, enum, dev)
hand cuDeviceComputeCapability(out_i32, out_i32, dev)
hand cuDeviceGetPCIBusId(chars, i32, dev) | device a2 -> ww_text_out(a0, a1, d->facts.pci)
hand cuDeviceGetByPCIBusId(out_dev, str)
hand cuDeviceCanAccessPeer(out_i32, dev, dev)
hand cuDeviceGetP2PAttribute(out_i32, enum, dev, dev)
hand cuDevicePrimaryCtxRetain(out_ctx, dev)
hand cuDevicePrimaryCtxRelease(dev) -> cuDevicePrimaryCtxRelease_v2(a0)
hand cuDevicePrimaryCtxRelease_v2(dev)
hand cuDevicePrimaryCtxReset(dev) -> cuDevicePrimaryCtxReset_v2(a0)
hand cuDevicePrimaryCtxReset_v2(dev) | device a0 -> {ww_reset(d);}
hand cuDevicePrimaryCtxGetState(dev, out_u32, out_i32) | device a0; a1 && a2 -> {*a1 = d->context_flags; *a2 =
    atomic_load(&d->channel) != NULL;}
hand cuDevicePrimaryCtxSetFlags_v2(dev, u32) | device a0; a1 <= 0xff && (a1 & 7) != 3 && (a1 & 7) <= 4 ->
    {d->context_flags = a1;}

hand cuCtxSetCurrent(ctx)
hand cuCtxGetCurrent(out_ctx) | ready; a0 -> {*a0 = ww_current() ? ww_context_handle(ww_current()) : NULL;}
hand cuCtxPushCurrent_v2(ctx)
hand cuCtxPushCurrent(ctx) -> cuCtxPushCurrent_v2(a0)
hand cuCtxPopCurrent(out_ctx) -> cuCtxPopCurrent_v2(a0)
hand cuCtxPopCurrent_v2(out_ctx)
hand cuCtxGetDevice(out_dev) | ready; a0; ww_current() else INVALID_CONTEXT -> {*a0 = ww_device_number(ww_current());}
hand cuCtxGetDevice_v2(out_dev, ctx) | context a1; a0 -> {*a0 = ww_device_number(d);}
hand cuCtxGetFlags(out_u32) | context NULL; a0 -> {*a0 = d->context_flags;}
hand cuCtxGetId(ctx, out_u64) | context a0; a1 -> {*a1 = (atomic_load(&d->life) + 1) * WW_DEVICES +
    (uint64_t)ww_device_number(d);}
hand cuCtxGetApiVersion(ctx, out_u32) | context a0; a1 -> {*a1 = 3020;}
hand cuCtxGetStreamPriorityRange(out_i32, out_i32)
hand cuCtxEnablePeerAccess(ctx, u32)
hand cuCtxDisablePeerAccess(ctx)
hand cuCtxSynchronize() | need -> ww_synchronize(d)
hand cuCtxSynchronize_v2(ctx) | context a0; done ww_open(d) -> ww_synchronize(d)
call cuCtxGetLimit(out_size, enum)
call cuCtxSetLimit(enum, size)
call cuCtxGetCacheConfig(out_enum)
call cuCtxSetCacheConfig(enum)
call cuCtxGetSharedMemConfig(out_enum)
call cuCtxSetSharedMemConfig(enum)
call cuCtxResetPersistingL2Cache()

hand cuMemGetInfo_v2(out_size, out_size)
hand cuMemAlloc_v2(out_dptr, size) | need; a0 && a1; unsafe -> ww_allocate(d, WW_OP_ALLOC, 0, a1, 0, NULL, a0)
hand cuMemFree_v2(dptr)
hand cuMemAllocAsync(out_dptr, size, stream) -> ww_allocate_in_stream(a0, a1, NULL, a2)
hand cuMemFreeAsync(dptr, stream)
near cuMemAllocManaged(out_dptr, size, u32)
near cuMemPrefetchAsync(dptr, size, dev, stream)
near cuMemPrefetchAsync_v2(dptr, size, u64, u32, stream)
near cuMemAdvise(dptr, size, enum, dev)
near cuMemAdvise_v2(dptr, size, enum, u64)
near cuStreamAttachMemAsync(stream, dptr, size, u32)
hand cuMemAllocPitch_v2(out_dptr, out_size, size, size, u32)
hand cuMemAllocHost_v2(out_host, size) -> cuMemHostAlloc(a0, a1, CU_MEMHOST_PORTABLE | CU_MEMHOST_DEVICEMAP)
hand cuMemHostAlloc(out_host, size, u32)
hand cuMemFreeHost(host)
hand cuMemHostGetDevicePointer_v2(out_dptr, host, u32)
hand cuMemHostGetFlags(out_u32, host)
hand cuMemHostRegister_v2(host, size, u32)
hand cuMemHostUnregister(host)
hand cuMemGetAddressRange_v2(out_dptr, out_size, dptr)
hand cuPointerGetAttribute(host, enum, dptr)
hand cuPointerGetAttributes(u32, out_enum, out_host, dptr)
hand cuMemcpy(dptr, dptr, size) -> ww_copy(a0, WW_ANY, a1, WW_ANY, a2, stream, true)
hand cuMemcpyAsync(dptr, dptr, size, stream) -> ww_copy(a0, WW_ANY, a1, WW_ANY, a2, a3, false)
hand cuMemcpyHtoD_v2(dptr, source, size) -> ww_copy(a0, WW_DEVICE, (uintptr_t)a1, WW_HOST, a2, stream, true)
hand cuMemcpyHtoDAsync_v2(dptr, source, size, stream) -> ww_copy(a0, WW_DEVICE, (uintptr_t)a1, WW_HOST, a2, a3, false)
hand cuMemcpyDtoH_v2(host, dptr, size) -> ww_copy((uintptr_t)a0, WW_HOST, a1, WW_DEVICE, a2, stream, true)
hand cuMemcpyDtoHAsync_v2(host, dptr, size, stream) -> ww_copy((uintptr_t)a0, WW_HOST, a1, WW_DEVICE, a2, a3, false)
hand cuMemcpyDtoD_v2(dptr, dptr, size) -> ww_copy(a0, WW_DEVICE, a1, WW_DEVICE, a2, stream, true)
hand cuMemcpyDtoDAsync_v2(dptr, dptr, size, stream) -> ww_copy(a0, WW_DEVICE, a1, WW_DEVICE, a2, a3, false)
hand cuMemcpyPeer(dptr, ctx, dptr, ctx, size) -> ww_copy_between(a0, a1, a2, a3, a4, stream, true)
hand cuMemcpyPeerAsync(dptr, ctx, dptr, ctx, size, stream) -> ww_copy_between(a0, a1, a2, a3, a4, a5, false)
hand cuMemsetD8_v2(dptr, u8, size) -> ww_fill(a0, 0, a1, 1, a2, 1, stream, true)
hand cuMemsetD16_v2(dptr, u16, size) -> ww_fill(a0, 0, a1, 2, a2, 1, stream, true)
hand cuMemsetD32_v2(dptr, u32, size) -> ww_fill(a0, 0, a1, 4, a2, 1, stream, true)
hand cuMemsetD8Async(dptr, u8, size, stream) -> ww_fill(a0, 0, a1, 1, a2, 1, a3, false)
hand cuMemsetD16Async(dptr, u16, size, stream) -> ww_fill(a0, 0, a1, 2, a2, 1, a3, false)
hand cuMemsetD32Async(dptr, u32, size, stream) -> ww_fill(a0, 0, a1, 4, a2, 1, a3, false)
near cuMemsetD2D8_v2(dptr, size, u8, size, size) -> ww_fill(a0, a1, a2, 1, a3, a4, stream, true)
near cuMemsetD2D16_v2(dptr, size, u16, size, size) -> ww_fill(a0, a1, a2, 2, a3, a4, stream, true)
near cuMemsetD2D32_v2(dptr, size, u32, size, size) -> ww_fill(a0, a1, a2, 4, a3, a4, stream, true)
near cuMemsetD2D8Async(dptr, size, u8, size, size, stream) -> ww_fill(a0, a1, a2, 1, a3, a4, a5, false)
near cuMemsetD2D16Async(dptr, size, u16, size, size, stream) -> ww_fill(a0, a1, a2, 2, a3, a4, a5, false)
near cuMemsetD2D32Async(dptr, size, u32, size, size, stream) -> ww_fill(a0, a1, a2, 4, a3, a4, a5, false)
near cuMemcpy2D_v2(ptr) -> ww_copy_plane(a0, stream, true)
near cuMemcpy2DUnaligned_v2(ptr) -> ww_copy_plane(a0, stream, true)
near cuMemcpy2DAsync_v2(ptr, stream) -> ww_copy_plane(a0, a1, false)
near cuMemcpy3D_v2(ptr) -> ww_copy_boxes(a0, stream, true)
near cuMemcpy3DAsync_v2(ptr, stream) -> ww_copy_boxes(a0, a1, false)

hand cuDeviceGetMemPool(out_ptr, dev) | ready; a0; device a1 -> ww_give_pool(a0, ww_pool_of(d))
hand cuDeviceGetDefaultMemPool(out_ptr, dev) | ready; a0; device a1 -> ww_give_pool(a0, ww_default_pool(d, false))
near cuDeviceSetMemPool(dev, ptr) | device a0; pool a1 -> ww_pool_choose(d, pool)
near cuMemGetDefaultMemPool(out_ptr, ptr, enum)
near cuMemGetMemPool(out_ptr, ptr, enum)
near cuMemSetMemPool(ptr, enum, ptr)
near cuMemPoolCreate(out_ptr, ptr)
near cuMemPoolDestroy(ptr)
hand cuMemAllocFromPoolAsync(out_dptr, size, ptr, stream) | pool a2 -> ww_allocate_in_stream(a0, a1, pool, a3)
hand cuMemPoolGetAttribute(ptr, enum, ptr) | pool a0; a2 -> ww_pool_get(pool, a1, a2)
hand cuMemPoolSetAttribute(ptr, enum, ptr) | pool a0; a2 -> ww_pool_set(pool, a1, a2)
near cuMemPoolGetAccess(out_enum, ptr, ptr)
near cuMemPoolSetAccess(ptr, ptr, size) | pool a0; !a2 || a1 -> ww_pool_set_access(pool, a1, a2)
hand cuMemPoolTrimTo(ptr, size) | pool a0 -> ww_pool_trim(pool, a1)

hand cuStreamCreate(out_stream, u32) -> cuStreamCreateWithPriority(a0, a1, 0)
hand cuStreamCreateWithPriority(out_stream, u32, i32)
hand cuStreamDestroy_v2(stream)
hand cuStreamDestroy(stream) -> cuStreamDestroy_v2(a0)
hand cuStreamSynchronize(stream) | stream a0; unwatched; done ww_call(d, WW_OP_STREAM_SYNC, id, NULL, 0, NULL, 0,
    NULL) -> ww_earlier(d)
hand cuStreamQuery(stream)
hand cuStreamWaitEvent(stream, event, u32)
hand cuStreamGetCtx(stream, out_ctx) | stream a0; a1 -> {*a1 = ww_context_handle(d);}
hand cuStreamGetCtx_v2(stream, out_ctx, ptr)
hand cuStreamGetDevice(stream, out_dev) | stream a0; a1 -> {*a1 = ww_device_number(d);}
hand cuStreamGetFlags(stream, out_u32) | stream a0; a1 -> {*a1 = ww_stream_object(a0) ? ww_stream_object(a0)->flags
    : 0;}
hand cuStreamGetPriority(stream, out_i32) | stream a0; a1 -> {*a1 = ww_stream_object(a0) ?
    ww_stream_object(a0)->priority : 0;}
hand cuStreamGetId(stream, out_u64) | stream a0; a1 -> {*a1 = ww_stream_object(a0) ? ww_stream_object(a0)->serial +
    WW_IDS : id;}
near cuStreamSetAttribute(stream, enum, ptr) | stream a0; a2 -> ww_stream_attribute(a1)
hand cuStreamIsCapturing(stream, out_enum)
hand cuLaunchHostFunc(stream, ptr, ptr)
hand cuStreamAddCallback(stream, ptr, ptr, u32)
hand cuEventCreate(out_event, u32)
hand cuEventDestroy_v2(event)
hand cuEventDestroy(event) -> cuEventDestroy_v2(a0)
hand cuEventRecord(event, stream) -> cuEventRecordWithFlags(a0, a1, 0)
hand cuEventRecordWithFlags(event, stream, u32)
hand cuEventQuery(event) -> ww_event_ask(a0, WW_OP_EVENT_QUERY)
hand cuEventSynchronize(event) -> ww_event_ask(a0, WW_OP_EVENT_SYNC)
hand cuEventElapsedTime(out_f32, event, event) -> cuEventElapsedTime_v2(a0, a1, a2)
hand cuEventElapsedTime_v2(out_f32, event, event)

hand cuModuleLoadData(out_module, source) -> cuModuleLoadDataEx(a0, a1, 0, NULL, NULL)
hand cuModuleLoadDataEx(out_module, source, u32, out_enum, out_host)
hand cuModuleLoadFatBinary(out_module, source) -> cuModuleLoadDataEx(a0, a1, 0, NULL, NULL)
hand cuModuleLoad(out_module, str)
hand cuModuleUnload(module)
hand cuModuleGetFunction(out_func, module, str)
hand cuModuleGetGlobal_v2(out_dptr, out_size, module, str)
hand cuModuleGetLoadingMode(out_enum) | a0 -> {*a0 = 1;}
hand cuLibraryLoadData(out_library, source, out_enum, out_host, u32, out_enum, out_host, u32)
hand cuLibraryLoadFromFile(out_library, str, out_enum, out_host, u32, out_enum, out_host, u32)
hand cuLibraryUnload(library)
hand cuLibraryGetKernel(out_kernel, library, str)
hand cuLibraryGetKernelCount(out_u32, library)
hand cuLibraryEnumerateKernels(out_kernel, u32, library)
hand cuLibraryGetModule(out_module, library)
hand cuLibraryGetGlobal(out_dptr, out_size, library, str)
near cuLibraryGetManaged(out_dptr, out_size, library, str) -> ww_refused("cuLibraryGetManaged")
hand cuKernelGetFunction(out_func, kernel)
hand cuKernelGetName(out_str, kernel)
hand cuKernelGetLibrary(out_library, kernel)
hand cuKernelGetAttribute(out_i32, enum, kernel, dev) | device a3; kernel a2 -> ww_get_attribute(f, a1, a0)
hand cuKernelSetAttribute(enum, i32, kernel, dev) | device a3; kernel a2 -> ww_set_attribute(f, a0, a1)
hand cuKernelSetCacheConfig(kernel, enum, dev)
hand cuKernelGetParamInfo(kernel, size, out_size, out_size)
hand cuFuncGetAttribute(out_i32, enum, func) | function a2 -> ww_get_attribute(f, a1, a0)
hand cuFuncGetName(out_str, func) | function a1; a0 -> {*a0 = f->name;}
hand cuFuncGetModule(out_module, func)
hand cuFuncGetParamInfo(func, size, out_size, out_size) | function a0 -> ww_param_info(f, a1, a2, a3)
hand cuFuncSetAttribute(func, enum, i32) | function a0 -> ww_set_attribute(f, a1, a2)
call cuFuncSetCacheConfig(func, enum)
call cuFuncSetSharedMemConfig(func, enum)
hand cuFuncLoad(func) | function a0 -> {}
hand cuFuncIsLoaded(out_enum, func) | function a1; a0 -> {*a0 = 1;}
call cuOccupancyMaxActiveBlocksPerMultiprocessor(out_i32, func, i32, size)
call cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out_i32, func, i32, size, u32)
call cuOccupancyAvailableDynamicSMemPerBlock(out_size, func, i32, i32)
hand cuOccupancyMaxPotentialBlockSize(out_i32, out_i32, func, ptr, size, i32) ->
    cuOccupancyMaxPotentialBlockSizeWithFlags(a0, a1, a2, a3, a4, a5, 0)
hand cuOccupancyMaxPotentialBlockSizeWithFlags(out_i32, out_i32, func, ptr, size, i32, u32)
hand cuOccupancyMaxActiveClusters(out_i32, func, ptr) -> ww_clusters(a0, a1, a2, 0)
hand cuOccupancyMaxPotentialClusterSize(out_i32, func, ptr) -> ww_clusters(a0, a1, a2, WW_CLUSTER_SIZE)
hand cuLaunchKernel(func, u32, u32, u32, u32, u32, u32, u32, stream, out_host, out_host)
hand cuLaunchKernelEx(ptr, func, out_host, out_host)
hand cuLaunchCooperativeKernel(func, u32, u32, u32, u32, u32, u32, u32, stream, out_host)

near cuStreamBeginCapture(stream) -> cuStreamBeginCapture_v2(a0, CU_CAPTURE_GLOBAL)
near cuStreamBeginCapture_v2(stream, enum) -> ww_capture_begin(a0, a1, NULL, NULL, 0)
hand cuStreamBeginCaptureToGraph(stream, ptr, ptr, ptr, size, enum)
hand cuStreamEndCapture(stream, out_ptr)
near cuStreamGetCaptureInfo(stream, out_enum, out_u64) -> cuStreamGetCaptureInfo_v3(a0, a1, a2, NULL, NULL, NULL, NULL)
hand cuStreamGetCaptureInfo_v2(stream, out_enum, out_u64, out_ptr, out_ptr, out_size) ->
    cuStreamGetCaptureInfo_v3(a0, a1, a2, a3, a4, NULL, a5)
near cuStreamGetCaptureInfo_v3(stream, out_enum, out_u64, out_ptr, out_ptr, out_ptr, out_size)
near cuStreamUpdateCaptureDependencies(stream, ptr, size, u32) ->
    cuStreamUpdateCaptureDependencies_v2(a0, a1, NULL, a2, a3)
near cuStreamUpdateCaptureDependencies_v2(stream, ptr, ptr, size, u32)
near cuThreadExchangeStreamCaptureMode(out_enum)

hand cuGraphCreate(out_ptr, u32) | ready; a0 && !a1 -> ww_graph_create(a0)
hand cuGraphDestroy(ptr) | graphs; graph a0; !graph->within -> {ww_graph_end(graph);}
near cuGraphClone(out_ptr, ptr) | graphs; graph a1; a0 -> ww_graph_clone_to(a0, graph)
near cuGraphGetId(ptr, out_u32) | graphs; graph a0; a1 -> {*a1 = (unsigned)graph->serial;}
hand cuGraphGetNodes(ptr, ptr, ptr) | graphs; graph a0; a2 -> ww_graph_nodes(graph, a1, a2, false)
near cuGraphGetRootNodes(ptr, ptr, ptr) | graphs; graph a0; a2 -> ww_graph_nodes(graph, a1, a2, true)
near cuGraphGetEdges(ptr, ptr, ptr, ptr) -> cuGraphGetEdges_v2(a0, a1, a2, NULL, a3)
near cuGraphGetEdges_v2(ptr, ptr, ptr, ptr, ptr) | graphs; graph a0; a4 && !a1 == !a2 -> ww_graph_edges(graph, a1,
    a2, a3, a4)
hand cuGraphAddDependencies(ptr, ptr, ptr, size) -> cuGraphAddDependencies_v2(a0, a1, a2, NULL, a3)
near cuGraphAddDependencies_v2(ptr, ptr, ptr, ptr, size) | graphs; graph a0; !a4 || (a1 && a2) ->
    ww_graph_connect(graph, a1, a2, a3, a4)
near cuGraphRemoveDependencies(ptr, ptr, ptr, size) -> cuGraphRemoveDependencies_v2(a0, a1, a2, NULL, a3)
near cuGraphRemoveDependencies_v2(ptr, ptr, ptr, ptr, size) | graphs; graph a0; !a4 || (a1 && a2) ->
    ww_graph_disconnect(graph, a1, a2, a4)
near cuGraphNodeGetDependencies(ptr, ptr, ptr) -> cuGraphNodeGetDependencies_v2(a0, a1, NULL, a2)
near cuGraphNodeGetDependencies_v2(ptr, ptr, ptr, ptr) | graphs; node a0; a3 -> ww_node_dependencies(node, a1, a2, a3)
near cuGraphNodeGetDependentNodes(ptr, ptr, ptr) -> cuGraphNodeGetDependentNodes_v2(a0, a1, NULL, a2)
near cuGraphNodeGetDependentNodes_v2(ptr, ptr, ptr, ptr) | graphs; node a0; a3 -> ww_node_dependents(node, a1, a2, a3)
near cuGraphNodeFindInClone(out_ptr, ptr, ptr) | graphs; node a1; graph a2; a0 -> ww_graph_find_clone(a0, node, graph)
near cuGraphNodeGetType(ptr, out_enum) | graphs; node a0; a1 -> {*a1 = node->work.kind;}
near cuGraphNodeGetContainingGraph(ptr, out_ptr) | graphs; node a0; a1 -> {*(void **)a1 = node->graph->object;}
near cuGraphNodeGetLocalId(ptr, out_u32) | graphs; node a0; a1 -> {*a1 = node->id;}
hand cuGraphDestroyNode(ptr) | graphs; node a0; !ww_graph_has_memory(node->graph) else NOT_SUPPORTED ->
    {ww_node_end(node);}
hand cuGraphAddEmptyNode(out_ptr, ptr, ptr, size) -> ww_node_make(a0, a1, a2, a3, CU_NODE_EMPTY, NULL, NULL)
near cuGraphAddKernelNode(out_ptr, ptr, ptr, size, ptr) -> ww_node_make(a0, a1, a2, a3, WW_NODE_KERNEL_V1, a4, NULL)
near cuGraphAddKernelNode_v2(out_ptr, ptr, ptr, size, ptr) -> ww_node_make(a0, a1, a2, a3, CU_NODE_KERNEL, a4, NULL)
near cuGraphKernelNodeGetParams(ptr, ptr) | graphs; node a0; node->work.kind == CU_NODE_KERNEL && a1 ->
    {ww_node_kernel(node, a1, false);}
near cuGraphKernelNodeGetParams_v2(ptr, ptr) | graphs; node a0; node->work.kind == CU_NODE_KERNEL && a1 ->
    {ww_node_kernel(node, a1, true);}
near cuGraphKernelNodeSetParams(ptr, ptr) -> ww_node_set(a0, WW_NODE_KERNEL_V1, a1, NULL)
near cuGraphKernelNodeSetParams_v2(ptr, ptr) -> ww_node_set(a0, CU_NODE_KERNEL, a1, NULL)
near cuGraphAddMemcpyNode(out_ptr, ptr, ptr, size, ptr, ctx) -> ww_node_make(a0, a1, a2, a3, CU_NODE_COPY, a4, a5)
near cuGraphMemcpyNodeGetParams(ptr, ptr) | graphs; node a0; node->work.kind == CU_NODE_COPY && a1 -> {*(struct
    cu_copy3 *)a1 = node->work.of.copy;}
near cuGraphMemcpyNodeSetParams(ptr, ptr) -> ww_node_set(a0, CU_NODE_COPY, a1, NULL)
near cuGraphAddMemsetNode(out_ptr, ptr, ptr, size, ptr, ctx) -> ww_node_make(a0, a1, a2, a3, CU_NODE_SET, a4, a5)
near cuGraphMemsetNodeGetParams(ptr, ptr) | graphs; node a0; node->work.kind == CU_NODE_SET && a1 -> {memcpy(a1,
    &node->work.of.set, offsetof(struct cu_node_set, context));}
near cuGraphMemsetNodeSetParams(ptr, ptr) -> ww_node_set(a0, CU_NODE_SET, a1, NULL)
near cuGraphAddHostNode(out_ptr, ptr, ptr, size, ptr) -> ww_node_make(a0, a1, a2, a3, CU_NODE_HOST, a4, NULL)
near cuGraphHostNodeGetParams(ptr, ptr) | graphs; node a0; node->work.kind == CU_NODE_HOST && a1 -> {*(struct
    cu_node_host *)a1 = node->work.of.host;}
near cuGraphHostNodeSetParams(ptr, ptr) -> ww_node_set(a0, CU_NODE_HOST, a1, NULL)
near cuGraphAddChildGraphNode(out_ptr, ptr, ptr, size, ptr) -> ww_node_make(a0, a1, a2, a3, CU_NODE_GRAPH, a4, NULL)
near cuGraphChildGraphNodeGetGraph(ptr, out_ptr) | graphs; node a0; node->work.kind == CU_NODE_GRAPH && a1 ->
    {*(void **)a1 = node->work.of.graph->object;}
near cuGraphAddEventRecordNode(out_ptr, ptr, ptr, size, event) -> ww_node_make(a0, a1, a2, a3, CU_NODE_RECORD, a4, NULL)
near cuGraphEventRecordNodeGetEvent(ptr, out_event) | graphs; node a0; node->work.kind == CU_NODE_RECORD && a1 ->
    {*a1 = node->work.of.event;}
near cuGraphEventRecordNodeSetEvent(ptr, event) -> ww_node_set(a0, CU_NODE_RECORD, a1, NULL)
near cuGraphAddEventWaitNode(out_ptr, ptr, ptr, size, event) -> ww_node_make(a0, a1, a2, a3, CU_NODE_WAIT, a4, NULL)
near cuGraphEventWaitNodeGetEvent(ptr, out_event) | graphs; node a0; node->work.kind == CU_NODE_WAIT && a1 -> {*a1 =
    node->work.of.event;}
near cuGraphEventWaitNodeSetEvent(ptr, event) -> ww_node_set(a0, CU_NODE_WAIT, a1, NULL)
near cuGraphAddMemAllocNode(out_ptr, ptr, ptr, size, ptr) -> ww_node_make(a0, a1, a2, a3, CU_NODE_ALLOC, a4, NULL)
near cuGraphMemAllocNodeGetParams(ptr, ptr) | graphs; node a0; node->work.kind == CU_NODE_ALLOC && a1 ->
    {ww_node_alloc(node, a1);}
near cuGraphAddMemFreeNode(out_ptr, ptr, ptr, size, dptr) -> ww_node_make(a0, a1, a2, a3, CU_NODE_FREE, (void
    *)(uintptr_t)a4, NULL)
near cuGraphMemFreeNodeGetParams(ptr, out_dptr) | graphs; node a0; node->work.kind == CU_NODE_FREE && a1 -> {*a1 =
    node->work.of.memory->address;}
hand cuGraphAddNode(out_ptr, ptr, ptr, size, ptr) -> cuGraphAddNode_v2(a0, a1, a2, NULL, a3, a4)
hand cuGraphConditionalHandleCreate(out_u64, ptr, ctx, u32, u32)
near cuGraphAddNode_v2(out_ptr, ptr, ptr, ptr, size, ptr)
near cuGraphNodeSetParams(ptr, ptr)
near cuGraphDebugDotPrint(ptr, str, u32) | graphs; graph a0; a1 -> ww_graph_draw(graph, a1)
near cuUserObjectCreate(out_ptr, ptr, ptr, u32, u32)
near cuUserObjectRetain(ptr, u32) | graphs; user a0; a1 -> {ww_user_retain(user, a1);}
near cuUserObjectRelease(ptr, u32) | graphs; user a0; a1 && a1 <= user->refs -> {ww_user_release(user, a1);}
near cuGraphRetainUserObject(ptr, ptr, u32, u32) | graphs; graph a0; user a1; a2 && a3 <= 1 && (!a3 || a2 <=
    user->refs) -> ww_graph_hold(graph, user, a2, a3)
near cuGraphReleaseUserObject(ptr, ptr, u32) | graphs; graph a0; user a1 -> ww_graph_let_go(graph, user, a2)
near cuDeviceGraphMemTrim(dev)
near cuDeviceGetGraphMemAttribute(dev, enum, ptr)
near cuDeviceSetGraphMemAttribute(dev, enum, ptr)
near cuGraphInstantiate(out_ptr, ptr, ptr, chars, size) -> cuGraphInstantiate_v2(a0, a1, a2, a3, a4)
near cuGraphInstantiate_v2(out_ptr, ptr, ptr, chars, size)
hand cuGraphInstantiateWithFlags(out_ptr, ptr, u64)
near cuGraphInstantiateWithParams(out_ptr, ptr, ptr)
hand cuGraphExecDestroy(ptr)
near cuGraphExecGetFlags(ptr, out_u64) | graphs; exec a0; a1 -> {*a1 = exec->flags;}
near cuGraphExecGetId(ptr, out_u32) | graphs; exec a0; a1 -> {*a1 = (unsigned)exec->object->serial;}
near cuGraphExecUpdate(ptr, ptr, out_ptr, out_enum)
near cuGraphExecUpdate_v2(ptr, ptr, ptr)
near cuGraphExecNodeSetParams(ptr, ptr, ptr)
near cuGraphExecKernelNodeSetParams(ptr, ptr, ptr) -> ww_exec_set(a0, a1, WW_NODE_KERNEL_V1, a2, NULL)
near cuGraphExecKernelNodeSetParams_v2(ptr, ptr, ptr) -> ww_exec_set(a0, a1, CU_NODE_KERNEL, a2, NULL)
near cuGraphExecMemcpyNodeSetParams(ptr, ptr, ptr, ctx) -> ww_exec_set(a0, a1, CU_NODE_COPY, a2, a3)
near cuGraphExecMemsetNodeSetParams(ptr, ptr, ptr, ctx) -> ww_exec_set(a0, a1, CU_NODE_SET, a2, a3)
near cuGraphExecHostNodeSetParams(ptr, ptr, ptr) -> ww_exec_set(a0, a1, CU_NODE_HOST, a2, NULL)
near cuGraphExecEventRecordNodeSetEvent(ptr, ptr, event) -> ww_exec_set(a0, a1, CU_NODE_RECORD, a2, NULL)
near cuGraphExecEventWaitNodeSetEvent(ptr, ptr, event) -> ww_exec_set(a0, a1, CU_NODE_WAIT, a2, NULL)
near cuGraphNodeSetEnabled(ptr, ptr, u32)
near cuGraphNodeGetEnabled(ptr, ptr, out_u32) | graphs; exec a0; a2 -> ww_exec_enabled(exec, a1, a2)
near cuGraphUpload(ptr, stream) | need; done ww_stream(a1, &d, &id); ww_exec(a0) -> {}
hand cuGraphLaunch(ptr, stream)
send cuProfilerStart()
send cuProfilerStop()

inner cuModuleGetFunctionCount(out_u32, module)
inner cuModuleEnumerateFunctions(out_func, u32, module)
inner cuMemAddressReserve(out_dptr, size, size, dptr, u64)
inner cuMemAddressFree(dptr, size)
inner cuMemCreate(out_u64, size, ptr, u64)
inner cuMemRelease(u64)
inner cuMemMap(dptr, size, size, u64, u64)
inner cuMemUnmap(dptr, size)
inner cuMemSetAccess(dptr, size, ptr, size)
inner cuMemGetAllocationGranularity(out_size, ptr, enum)
inner cuMemExportToShareableHandle(ptr, u64, enum, u64)
inner cuMemImportFromShareableHandle(out_u64, ptr, enum)
"""
"""Each symbol that is served, with its class and its arguments' roles. ``hand``: layer.c has it. ``near``: the layer
alone has it, no driver is asked (most of graphs: see layer_graph.c). ``call``: it is sent and its answer is waited for.
``send``: nobody waits, an error is returned by a later call. ``inner``: the worker calls it, programs may not.
All other symbols are refused: NOT_SUPPORTED, with a line that names them.

Behind an arrow stands the body in the layer: a C expression that is the result, or statements in braces. ``a0`` is the
first argument, and ``stream`` the default stream, or the calling thread's in a variant for it. Between a bar and the
arrow stand the checks before the body, in their order: those of `generate.CHECKS` by name, and C conditions, without
which the call returns INVALID_VALUE, or the code behind ``else``. Checks define ``d``, ``id`` (of a stream), ``f``,
``pool``, ``graph``, ``node``, ``exec``, ``user``. A long line goes on in an indented one."""

ERRORS = """
1:INVALID_VALUE 2:OUT_OF_MEMORY 3:NOT_INITIALIZED 4:DEINITIALIZED 5:PROFILER_DISABLED 6:PROFILER_NOT_INITIALIZED
7:PROFILER_ALREADY_STARTED 8:PROFILER_ALREADY_STOPPED 34:STUB_LIBRARY 36:CALL_REQUIRES_NEWER_DRIVER
46:DEVICE_UNAVAILABLE 47:MULTICAST_RESOURCE_FULL 100:NO_DEVICE 101:INVALID_DEVICE 102:DEVICE_NOT_LICENSED
200:INVALID_IMAGE 201:INVALID_CONTEXT 202:CONTEXT_ALREADY_CURRENT 205:MAP_FAILED 206:UNMAP_FAILED
207:ARRAY_IS_MAPPED 208:ALREADY_MAPPED 209:NO_BINARY_FOR_GPU 210:ALREADY_ACQUIRED 211:NOT_MAPPED
212:NOT_MAPPED_AS_ARRAY 213:NOT_MAPPED_AS_POINTER 214:ECC_UNCORRECTABLE 215:UNSUPPORTED_LIMIT
216:CONTEXT_ALREADY_IN_USE 217:PEER_ACCESS_UNSUPPORTED 218:INVALID_PTX 219:INVALID_GRAPHICS_CONTEXT
220:NVLINK_UNCORRECTABLE 221:JIT_COMPILER_NOT_FOUND 222:UNSUPPORTED_PTX_VERSION 223:JIT_COMPILATION_DISABLED
224:UNSUPPORTED_EXEC_AFFINITY 225:UNSUPPORTED_DEVSIDE_SYNC 226:CONTAINED 227:INSUFFICIENT_LOADER_VERSION
300:INVALID_SOURCE 301:FILE_NOT_FOUND 302:SHARED_OBJECT_SYMBOL_NOT_FOUND 303:SHARED_OBJECT_INIT_FAILED
304:OPERATING_SYSTEM 400:INVALID_HANDLE 401:ILLEGAL_STATE 402:LOSSY_QUERY 500:NOT_FOUND 600:NOT_READY
700:ILLEGAL_ADDRESS 701:LAUNCH_OUT_OF_RESOURCES 702:LAUNCH_TIMEOUT 703:LAUNCH_INCOMPATIBLE_TEXTURING
704:PEER_ACCESS_ALREADY_ENABLED 705:PEER_ACCESS_NOT_ENABLED 708:PRIMARY_CONTEXT_ACTIVE 709:CONTEXT_IS_DESTROYED
710:ASSERT 711:TOO_MANY_PEERS 712:HOST_MEMORY_ALREADY_REGISTERED 713:HOST_MEMORY_NOT_REGISTERED
714:HARDWARE_STACK_ERROR 715:ILLEGAL_INSTRUCTION 716:MISALIGNED_ADDRESS 717:INVALID_ADDRESS_SPACE 718:INVALID_PC
719:LAUNCH_FAILED 720:COOPERATIVE_LAUNCH_TOO_LARGE 721:TENSOR_MEMORY_LEAK 800:NOT_PERMITTED 801:NOT_SUPPORTED
802:SYSTEM_NOT_READY 803:SYSTEM_DRIVER_MISMATCH 804:COMPAT_NOT_SUPPORTED_ON_DEVICE 805:MPS_CONNECTION_FAILED
806:MPS_RPC_FAILURE 807:MPS_SERVER_NOT_READY 808:MPS_MAX_CLIENTS_REACHED 809:MPS_MAX_CONNECTIONS_REACHED
810:MPS_CLIENT_TERMINATED 811:CDP_NOT_SUPPORTED 812:CDP_VERSION_MISMATCH 900:STREAM_CAPTURE_UNSUPPORTED
901:STREAM_CAPTURE_INVALIDATED 902:STREAM_CAPTURE_MERGE 903:STREAM_CAPTURE_UNMATCHED 904:STREAM_CAPTURE_UNJOINED
905:STREAM_CAPTURE_ISOLATION 906:STREAM_CAPTURE_IMPLICIT 907:CAPTURED_EVENT 908:STREAM_CAPTURE_WRONG_THREAD
909:TIMEOUT 910:GRAPH_EXEC_UPDATE_FAILURE 911:EXTERNAL_DEVICE 912:INVALID_CLUSTER_SIZE 913:FUNCTION_NOT_LOADED
914:INVALID_RESOURCE_TYPE 915:INVALID_RESOURCE_CONFIGURATION 916:KEY_ROTATION 917:STREAM_DETACHED
918:GRAPH_RECAPTURE_FAILURE 919:FABRIC_NOT_READY 999:UNKNOWN
"""
"""Codes that a call returns, and their names without ``CUDA_ERROR_``. 0 is ``CUDA_SUCCESS``."""


@dataclass(frozen=True)
class Call:
    """A served symbol: its class, its arguments' roles, and the checks and body of what is generated for it."""

    symbol: str
    kind: str
    roles: tuple[str, ...]
    forward: str = ""
    checks: tuple[str, ...] = ()

    @property
    def c_types(self) -> tuple[str, ...]:
        """C types of the arguments."""
        return tuple(ROLES[role[4:]] + " *" if role.startswith("out_") else ROLES[role] for role in self.roles)


@dataclass(frozen=True)
class Entry:
    """One variant of a base name: what ``cuGetProcAddress`` finds."""

    name: str
    version: int
    symbol: str
    per_thread: bool


@cache
def entries() -> tuple[Entry, ...]:
    """All variants of all names, in order of name, per-thread streams last, and version."""
    found = []
    for word in NAMES.split():
        name, _, versions = word.partition(":")
        plain, _, threads = versions.partition(";")
        first = [int(version) for version in plain.split(",")]
        symbols = [f"cu{name}" + (f"_v{i + 1}" if i else "") for i in range(len(first))]
        found += [Entry(f"cu{name}", v, symbol, False) for v, symbol in zip(first, symbols, strict=True)]
        for version in threads[1:].split(",") if threads else []:
            newest = max(i for i, v in enumerate(first) if v <= int(version))
            found.append(Entry(f"cu{name}", int(version), f"{symbols[newest]}{THREAD_SUFFIX[threads[0]]}", True))
    return tuple(found)


THREAD_SUFFIX = {"d": "_ptds", "z": "_ptsz"}


@cache
def calls() -> dict[str, Call]:
    """Served symbols, by name, in the table's order."""
    found = {}
    for line in filter(None, re.sub(r"\n +", " ", SERVED).splitlines()):
        head, _, forward = line.partition(" -> ")
        head, _, checks = head.partition(" | ")
        kind, _, signature = head.partition(" ")
        symbol, _, inside = signature.removesuffix(")").partition("(")
        roles = tuple(inside.split(", ")) if inside else ()
        found[symbol] = Call(symbol, kind, roles, forward, tuple(checks.split("; ")) if checks else ())
    return found


@cache
def errors() -> dict[int, str]:
    """Names of error codes, whole."""
    return {0: "CUDA_SUCCESS"} | {int(w.split(":")[0]): "CUDA_ERROR_" + w.split(":")[1] for w in ERRORS.split()}


def plain_symbol(symbol: str) -> str:
    """Return a symbol without ``_ptds`` or ``_ptsz``."""
    return re.sub(r"_pt[sd][zs]$", "", symbol)
