// A CUDA driver without a GPU, for tests: its device memory is shared memory, its copies are
// memcpy, and it demands of its callers what the real one does: a context on the calling thread,
// device addresses that it has given out. It has what pd_transfer and UCX's CUDA transports call;
// a memory handle of another process can be opened, as CUDA IPC does.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, BAD_VALUE = 1, NO_MEMORY = 2, NO_CONTEXT = 201, NOT_FOUND = 500, UNSUPPORTED = 801 };

typedef struct {
    uint64_t base, size, id;
    int fd, opened;
} Allocation;

typedef struct {
    uint64_t size, base;
    int pid, fd;
    char rest[40];
} Handle;

static Allocation table[1024];
static int allocated;
static uint64_t last_id;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char the_context, the_stream, the_event;
static __thread void *stack[16];
static __thread int depth;

// What a test may look at.
unsigned long stub_copies, stub_read_from_others, stub_written_to_others;

#define NEED_CONTEXT              \
    if (!depth || !stack[depth - 1]) \
    return NO_CONTEXT

static Allocation *find(uint64_t address) {
    Allocation *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < allocated; i++)
        if (table[i].size && address >= table[i].base && address - table[i].base < table[i].size)
            found = &table[i];
    pthread_mutex_unlock(&lock);
    return found;
}

static int map(int fd, uint64_t size, int opened, uint64_t *address) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return NO_MEMORY;
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < allocated && table[at].size) at++;
    if (at == 1024) abort();
    if (at == allocated) allocated++;
    table[at] = (Allocation){(uint64_t)memory, size, ++last_id, fd, opened};
    pthread_mutex_unlock(&lock);
    *address = (uint64_t)memory;
    return OK;
}

static int unmap(uint64_t address) {
    Allocation *each = find(address);
    if (!each || each->base != address) return BAD_VALUE;
    munmap((void *)each->base, each->size);
    close(each->fd);
    each->size = 0;
    return OK;
}

int cuInit(unsigned flags) { return OK; }
int cuGetErrorString(int error, const char **text) {
    *text = error == NO_CONTEXT ? "invalid device context" : "stub error";
    return OK;
}
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? 101 : OK; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "stub"), OK; }
int cuDeviceTotalMem_v2(size_t *size, int device) { return *size = 1ul << 34, OK; }
int cuDeviceGetUuid(char *uuid, int device) { return memset(uuid, 7, 16), OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = attribute == 33, OK;  // bus 1
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *said) {
    *function = NULL;
    if (said) *said = 1;
    return NOT_FOUND;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &the_context, OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, OK;
}
int cuCtxSetCurrent(void *context) { return stack[depth ? depth - 1 : depth++] = context, OK; }
int cuCtxGetCurrent(void **context) { return *context = depth ? stack[depth - 1] : NULL, OK; }
int cuCtxPushCurrent_v2(void *context) {
    if (depth == 16) abort();
    return stack[depth++] = context, OK;
}
int cuCtxPopCurrent_v2(void **context) {
    NEED_CONTEXT;
    void *old = stack[--depth];
    if (context) *context = old;
    return OK;
}
int cuCtxGetDevice(int *device) {
    NEED_CONTEXT;
    return *device = 0, OK;
}
int cuCtxGetId(void *context, uint64_t *id) {
    if (!context) NEED_CONTEXT;
    return *id = 1, OK;
}
int cuCtxSynchronize(void) {
    NEED_CONTEXT;
    return OK;
}

int cuStreamCreate(void **stream, unsigned flags) {
    NEED_CONTEXT;
    return *stream = &the_stream, OK;
}
int cuStreamDestroy_v2(void *stream) { return OK; }
int cuStreamSynchronize(void *stream) { return stream == &the_stream ? OK : BAD_VALUE; }
int cuStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *data, unsigned no) {
    return call(stream, OK, data), OK;
}
int cuEventCreate(void **event, unsigned flags) {
    NEED_CONTEXT;
    return *event = &the_event, OK;
}
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventQuery(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { return OK; }

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    NEED_CONTEXT;
    int fd = memfd_create("stub", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return NO_MEMORY;
    return map(fd, size, 0, address);
}
int cuMemFree_v2(uint64_t address) {
    NEED_CONTEXT;
    return unmap(address);
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    Allocation *each = find(address);
    if (!each) return BAD_VALUE;
    if (base) *base = each->base;
    if (size) *size = each->size;
    return OK;
}

static int attribute(void *out, int name, uint64_t address, Allocation *each) {
    switch (name) {
        case 1: return *(void **)out = each ? &the_context : NULL, OK;
        case 2: return *(unsigned *)out = each ? 2 : 0, OK;
        case 6: case 8: return *(int *)out = 0, OK;
        case 7: return *(uint64_t *)out = each ? each->id : 0, OK;
        case 9: return *(int *)out = each ? 0 : -2, OK;
        case 10: return *(int *)out = each && !each->opened, OK;
        case 14: return *(uint64_t *)out = 0, OK;
        case 17: return *(void **)out = NULL, OK;
    }
    return BAD_VALUE;
}
int cuPointerGetAttribute(void *out, int name, uint64_t address) {
    Allocation *each = find(address);
    return each ? attribute(out, name, address, each) : BAD_VALUE;
}
int cuPointerGetAttributes(unsigned count, int *names, void **out, uint64_t address) {
    Allocation *each = find(address);
    for (unsigned i = 0; i < count; i++)
        if (attribute(out[i], names[i], address, each)) return BAD_VALUE;
    return OK;
}
int cuPointerSetAttribute(const void *value, int name, uint64_t address) { return OK; }

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream) {
    NEED_CONTEXT;
    if (stream != &the_stream) return BAD_VALUE;
    memcpy((void *)target, (void *)source, size);
    __atomic_add_fetch(&stub_copies, 1, __ATOMIC_RELAXED);
    return OK;
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *stream) {
    Allocation *from = find(source), *to = find(target);
    if (!from || !to) return BAD_VALUE;
    if (from->opened) __atomic_add_fetch(&stub_read_from_others, 1, __ATOMIC_RELAXED);
    if (to->opened) __atomic_add_fetch(&stub_written_to_others, 1, __ATOMIC_RELAXED);
    return cuMemcpyAsync(target, source, size, stream);
}
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    return cuMemcpyAsync(target, (uint64_t)source, size, &the_stream);
}

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    Allocation *each = find(address);
    if (!each) return BAD_VALUE;
    memset(handle, 0, sizeof *handle);
    handle->size = each->size, handle->base = each->base;
    handle->pid = getpid(), handle->fd = each->fd;
    return OK;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    NEED_CONTEXT;
    if (handle.pid == getpid()) return NO_CONTEXT;  // as the real one does
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return BAD_VALUE;
    return map(fd, handle.size, 1, address);
}
int cuIpcCloseMemHandle(uint64_t address) { return unmap(address); }

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) { return OK; }
int cuMemHostUnregister(void *address) { return OK; }

// Managed, pooled and virtual memory, which nothing here asks for.
#define MISSING(name) \
    int name(void) { return UNSUPPORTED; }
MISSING(cuMemAddressFree)
MISSING(cuMemAddressReserve)
MISSING(cuMemAllocManaged)
MISSING(cuMemCreate)
MISSING(cuMemExportToShareableHandle)
MISSING(cuMemGetAllocationGranularity)
MISSING(cuMemGetAllocationPropertiesFromHandle)
MISSING(cuMemImportFromShareableHandle)
MISSING(cuMemMap)
MISSING(cuMemPoolDestroy)
MISSING(cuMemPoolExportPointer)
MISSING(cuMemPoolExportToShareableHandle)
MISSING(cuMemPoolImportFromShareableHandle)
MISSING(cuMemPoolImportPointer)
MISSING(cuMemPoolSetAccess)
MISSING(cuMemRangeGetAttribute)
MISSING(cuMemRelease)
MISSING(cuMemRetainAllocationHandle)
MISSING(cuMemSetAccess)
MISSING(cuMemUnmap)

// NVML: UCX does without where its driver is not loaded.
int nvmlInit_v2(void) { return 9; }
int nvmlInitWithFlags(unsigned flags) { return 9; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "stub"; }
