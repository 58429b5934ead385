/* A stand-in for NVIDIA's driver where there is no card: it does everything but compute. Memory is the host's, copies are copies,
 * launches are checked against the limits of an H200 and do nothing. So every kernel that a program launches is compiled by NVRTC,
 * and the time that remains is the host's. What a program computes with it is wrong.
 *
 *   cc -shared -fPIC -o STAND_IN/libcuda.so benches/gpu/stand_in.c
 *   LD_LIBRARY_PATH=STAND_IN:NVRTC CUDA_PATH=TOOLKIT STAND_IN_DUMP=FOLDER PROGRAM --device cuda ...
 *   find FOLDER -name "*.ptx" -exec ptxas -arch=sm_90a {} -o /dev/null ";"
 *
 * NVRTC is the folder of libnvrtc.so, TOOLKIT has include/cuda_fp16.h and include/crt/mma.h; the packages nvidia-cuda-nvrtc-cu12,
 * nvidia-cuda-runtime-cu12 and nvidia-cuda-nvcc-cu12 (ptxas too) have them without a card or a driver. Compiled kernels are kept in
 * ~/.cache: a new HOME compiles all of them.
 *
 * Functions are those that cudarc and cubecl-cuda ask for; one that is missing ends the program with its name. Codes are CUresult's.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *handle;
typedef uint64_t address;

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_SUCH_DEVICE = 101, UNSUPPORTED = 801 };

#define MEMORY ((size_t)8 << 30)
#define MOST_SHARED 232448
#define ANY(number) ((handle)(uintptr_t)(number))

/* The device. */

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { return *version = 12090, OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int index) { return *device = 0, index == 0 ? OK : NO_SUCH_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "stand-in for an H200"), OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 7, 16), OK; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:01:00.0"), OK; }
int cuDeviceGetLuid(char *luid, unsigned *mask, int device) { return UNSUPPORTED; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = MEMORY, OK; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *bytes) { return *free_bytes = *bytes = MEMORY, OK; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	switch (attribute) {
	case 1: case 2: case 3: *value = 1024; break;  /* threads of a block, its x, its y */
	case 4: *value = 64; break;                    /* its z */
	case 5: *value = 2147483647; break;            /* blocks of a grid in x */
	case 6: case 7: *value = 65535; break;         /* in y and z */
	case 8: *value = 49152; break;                 /* shared memory of a block */
	case 10: *value = 32; break;                   /* threads of a warp */
	case 16: *value = 132; break;                  /* multiprocessors */
	case 38: *value = 52428800; break;             /* level-2 cache */
	case 39: *value = 2048; break;                 /* threads of a multiprocessor */
	case 75: *value = 9; break;                    /* compute capability */
	case 76: *value = 0; break;
	case 81: *value = 233472; break;               /* shared memory of a multiprocessor */
	case 97: *value = MOST_SHARED; break;          /* of a block that asks for it */
	case 106: *value = 32; break;                  /* blocks of a multiprocessor */
	default: *value = 1;
	}
	return OK;
}

int cuDevicePrimaryCtxRetain(handle *context, int device) { return *context = ANY(16), OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxSetCurrent(handle context) { return OK; }
int cuCtxGetCurrent(handle *context) { return *context = ANY(16), OK; }
int cuCtxSynchronize(void) { return OK; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, OK; }

/* Memory. Zeros, so that two runs are alike. */

static int allocate(void **place, size_t bytes)
{
	if (posix_memalign(place, 512, bytes ? bytes : 512))
		return OUT_OF_MEMORY;
	memset(*place, 0, bytes);
	return OK;
}

int cuMemAlloc_v2(address *place, size_t bytes) { return allocate((void **)place, bytes); }
int cuMemAllocAsync(address *place, size_t bytes, handle stream) { return allocate((void **)place, bytes); }
int cuMemFree_v2(address place) { return free((void *)place), OK; }
int cuMemFreeAsync(address place, handle stream) { return free((void *)place), OK; }
int cuMemAllocHost_v2(void **place, size_t bytes) { return allocate(place, bytes); }
int cuMemFreeHost(void *place) { return free(place), OK; }

int cuMemcpyHtoDAsync_v2(address to, void *from, size_t bytes, handle stream) { return memcpy((void *)to, from, bytes), OK; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, handle stream) { return memcpy(to, (void *)from, bytes), OK; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, handle stream) { return memmove((void *)to, (void *)from, bytes), OK; }

/* CUDA_MEMCPY2D; a type of memory is 1 for the host's. */
struct side { size_t x, y; int type; char *host; char *device; handle array; size_t pitch; };
struct rectangle { struct side from, to; size_t width, height; };

int cuMemcpy2DAsync_v2(const struct rectangle *copy, handle stream)
{
	const char *from = copy->from.type == 1 ? copy->from.host : copy->from.device;
	char *to = copy->to.type == 1 ? copy->to.host : copy->to.device;
	for (size_t row = 0; row < copy->height; row++)
		memcpy(to + (copy->to.y + row) * copy->to.pitch + copy->to.x,
		       from + (copy->from.y + row) * copy->from.pitch + copy->from.x, copy->width);
	return OK;
}

/* Streams and events: everything is done when it is asked for. */

int cuStreamCreate(handle *stream, unsigned flags) { return *stream = ANY(32), OK; }
int cuStreamCreateWithPriority(handle *stream, unsigned flags, int priority) { return *stream = ANY(32), OK; }
int cuStreamDestroy_v2(handle stream) { return OK; }
int cuStreamSynchronize(handle stream) { return OK; }
int cuStreamQuery(handle stream) { return OK; }
int cuStreamWaitEvent(handle stream, handle event, unsigned flags) { return OK; }
int cuEventCreate(handle *event, unsigned flags) { return *event = malloc(8), OK; }
int cuEventDestroy_v2(handle event) { return free(event), OK; }
int cuEventRecord(handle event, handle stream) { return OK; }
int cuEventSynchronize(handle event) { return OK; }
int cuEventQuery(handle event) { return OK; }
int cuEventElapsedTime_v2(float *ms, handle from, handle to) { return *ms = 0.1f, OK; }
int cuEventElapsedTime(float *ms, handle from, handle to) { return *ms = 0.1f, OK; }

/* Kernels: PTX is written down, and given back as if it had been assembled. */

struct linked { char *code; size_t bytes; };

static void dump(const char *ptx, size_t bytes)
{
	static atomic_int count;
	const char *folder = getenv("STAND_IN_DUMP");
	char path[4096];
	if (!folder)
		return;
	snprintf(path, sizeof path, "%s/%d-%d.ptx", folder, (int)getpid(), atomic_fetch_add(&count, 1));
	FILE *file = fopen(path, "w");
	if (!file || fwrite(ptx, 1, bytes, file) != bytes || fclose(file))
		fprintf(stderr, "stand-in: %s cannot be written\n", path);
}

int cuLinkCreate_v2(unsigned count, int *options, void **values, handle *state)
{
	*state = calloc(1, sizeof(struct linked));
	return OK;
}

int cuLinkAddData_v2(struct linked *state, int type, void *data, size_t bytes, const char *name, unsigned count, int *options,
                     void **values)
{
	dump(data, strnlen(data, bytes));
	state->code = calloc(1, bytes + 1);
	memcpy(state->code, data, bytes);
	state->bytes = bytes;
	return OK;
}

int cuLinkComplete(struct linked *state, void **code, size_t *bytes) { return *code = state->code, *bytes = state->bytes, OK; }
int cuLinkDestroy(struct linked *state) { return free(state->code), free(state), OK; }
int cuModuleLoadData(handle *module, const void *image) { return *module = ANY(64), OK; }
int cuModuleLoadDataEx(handle *module, const void *image, unsigned count, int *options, void **values) { return *module = ANY(64), OK; }
int cuModuleUnload(handle module) { return OK; }
int cuModuleGetFunction(handle *function, handle module, const char *name) { return *function = ANY(80), OK; }
int cuFuncGetAttribute(int *value, int attribute, handle function) { return *value = 1024, OK; }

int cuFuncSetAttribute(handle function, int attribute, int value)
{
	return attribute == 8 && value > MOST_SHARED ? INVALID : OK;
}

int cuLaunchKernel(handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y, unsigned z,
                   unsigned shared, handle stream, void **arguments, void **extra)
{
	int grid = grid_x && grid_x <= 2147483647u && grid_y && grid_y <= 65535 && grid_z && grid_z <= 65535;
	if (grid && x && y && z && z <= 64 && x * y * z <= 1024 && shared <= MOST_SHARED)
		return OK;
	fprintf(stderr, "stand-in: no card launches %u %u %u blocks of %u %u %u threads with %u bytes\n", grid_x, grid_y, grid_z, x, y, z,
	        shared);
	return INVALID;
}

int cuTensorMapEncodeTiled(handle map) { return OK; }
int cuTensorMapEncodeIm2col(handle map) { return OK; }
int cuGetErrorName(int code, const char **name) { return *name = "an error of the stand-in", OK; }
int cuGetErrorString(int code, const char **text) { return *text = "an error of the stand-in", OK; }
