/* Stands in for libcuda.so.1: keeps what it was called with, and copies on the spot.
 *
 * DRIVER_VERSION     what the driver says it is
 * WITHOUT_BATCH      it has no batch call, whatever its version
 * SILENT             it answers no question
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, STUB_LIBRARY = 34, ILLEGAL_ADDRESS = 700 };
enum { FOUND = 0, NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2 };

typedef struct {
    int type;
    int id;
} location;

typedef struct {
    int source_access_order;
    location source_hint;
    location destination_hint;
    unsigned int flags;
} attributes;

_Static_assert(sizeof(attributes) == 24, "the layout of CUmemcpyAttributes");

struct {
    int64_t batch_calls;
    int64_t single_calls;
    int64_t prototype;
    int64_t count;
    int64_t attribute_sets;
    int64_t first_index;
    int64_t stream;
    int32_t source_access_order;
    int32_t source_hint[2];
    int32_t destination_hint[2];
    uint32_t flags;
} record;

/* The call fails with this code: at the copy of this index, or as a whole (SIZE_MAX). */
int fail_code = SUCCESS;
size_t fail_index = SIZE_MAX;

static struct {
    uint64_t start, end;
    unsigned int type;
    uint64_t device_start;
} memory[8];
static int num_memories;

void add_memory(uint64_t start, uint64_t size, unsigned int type, uint64_t device_start) {
    memory[num_memories].start = start;
    memory[num_memories].end = start + size;
    memory[num_memories].type = type;
    memory[num_memories].device_start = device_start;
    num_memories++;
}

int cuDriverGetVersion(int *version) {
#ifdef SILENT
    return STUB_LIBRARY;
#endif
    *version = DRIVER_VERSION;
    return SUCCESS;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
            : code == STUB_LIBRARY    ? "CUDA_ERROR_STUB_LIBRARY"
            : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                      : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    for (int i = 0; i < num_memories; i++) {
        if (pointer < memory[i].start || pointer >= memory[i].end)
            continue;
        if (attribute == 2)
            *(unsigned int *)value = memory[i].type;
        else if (attribute == 3)
            *(uint64_t *)value = memory[i].device_start + (pointer - memory[i].start);
        else
            return INVALID_VALUE;
        return SUCCESS;
    }
    return INVALID_VALUE;
}

int cuMemHostRegister_v2(void *start, size_t size, unsigned int flags) {
    if (fail_code)
        return fail_code;
    if (flags != 3)
        return INVALID_VALUE;
    add_memory((uint64_t)start, size, 1, (uint64_t)start);
    return SUCCESS;
}

int cuMemHostUnregister(void *start) {
    for (int i = 0; i < num_memories; i++) {
        if (memory[i].start == (uint64_t)start) {
            memory[i].start = memory[i].end = 0;
            return SUCCESS;
        }
    }
    return INVALID_VALUE;
}

int cuMemcpyAsync(uint64_t destination, uint64_t source, size_t size, void *stream) {
    if (fail_code && (size_t)record.single_calls == fail_index)
        return fail_code;
    record.single_calls++;
    record.stream = (intptr_t)stream;
    memcpy((void *)destination, (void *)source, size);
    return SUCCESS;
}

static int copy_batch(uint64_t *destinations, uint64_t *sources, size_t *sizes, size_t count,
                      attributes *sets, size_t *first_indices, size_t num_sets, size_t *failed,
                      void *stream) {
    record.batch_calls++;
    record.count = count;
    record.attribute_sets = num_sets;
    record.first_index = first_indices[0];
    record.stream = (intptr_t)stream;
    record.source_access_order = sets->source_access_order;
    memcpy(record.source_hint, &sets->source_hint, sizeof(location));
    memcpy(record.destination_hint, &sets->destination_hint, sizeof(location));
    record.flags = sets->flags;
    if (num_sets > count || stream == NULL)
        return INVALID_VALUE;
    *failed = SIZE_MAX;
    if (fail_code && fail_index == SIZE_MAX)
        return fail_code;
    for (size_t i = 0; i < count; i++) {
        if (fail_code && i == fail_index) {
            *failed = i;
            return fail_code;
        }
        memcpy((void *)destinations[i], (void *)sources[i], sizes[i]);
    }
    return SUCCESS;
}

static int batch_12080(uint64_t *destinations, uint64_t *sources, size_t *sizes, size_t count,
                       attributes *sets, size_t *first_indices, size_t num_sets, size_t *failed,
                       void *stream) {
    record.prototype = 12080;
    return copy_batch(destinations, sources, sizes, count, sets, first_indices, num_sets, failed,
                      stream);
}

static int batch_13000(uint64_t *destinations, uint64_t *sources, size_t *sizes, size_t count,
                       attributes *sets, size_t *first_indices, size_t num_sets, void *stream) {
    size_t nobody_asked;
    record.prototype = 13000;
    return copy_batch(destinations, sources, sizes, count, sets, first_indices, num_sets,
                      &nobody_asked, stream);
}

/* Like the driver, answers with the newest function that is not newer than the version asked for. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                        int *status) {
    *function = NULL;
    *status = NOT_FOUND;
    if (flags != 0)
        return INVALID_VALUE;
#ifndef WITHOUT_BATCH
    if (strcmp(symbol, "cuMemcpyBatchAsync") == 0) {
        *status = version < 12080 ? VERSION_NOT_SUFFICIENT : FOUND;
        if (version >= 13000 && DRIVER_VERSION >= 13000)
            *function = (void *)batch_13000;
        else if (version >= 12080)
            *function = (void *)batch_12080;
    }
#endif
    return SUCCESS;
}
