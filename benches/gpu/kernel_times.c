/* Which kernels a program spends a GPU's time in: a libcuda.so in front of NVIDIA's (`kernel_times` builds and uses it).
 *
 * Every launch is put between two events and waited for, so kernels run one at a time and the program is slower than it is alone; what
 * a kernel takes is its own time. The replay of a graph counts as one. At the end a table goes to the file KERNEL_TIMES.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cuGraphLaunch

enum { MOST = 20000, NAME = 96, SHOWN = 100 };

/* Everything that is not defined here the program finds in NVIDIA's library, which this one is linked with. */
#define REAL(name) ({ \
	static __typeof__(&name) found; \
	if (!found) \
		found = (__typeof__(&name))dlsym(dlopen("libcuda.so.1", RTLD_NOW), #name); \
	found; \
})

struct row {
	char name[NAME];
	unsigned grid[3], block[3];
	double milliseconds;
	long launches;
};

static struct row rows[MOST];
static struct { CUfunction function; char name[NAME]; } functions[MOST];
static int row_count, function_count;
static CUevent before, after;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int slower(const void *a, const void *b)
{
	double first = ((const struct row *)a)->milliseconds, second = ((const struct row *)b)->milliseconds;
	return (first < second) - (first > second);
}

__attribute__((destructor)) static void report(void)
{
	const char *path = getenv("KERNEL_TIMES");
	FILE *out = path && row_count ? fopen(path, "w") : NULL;
	double total = 0;
	if (!out)
		return;
	for (int i = 0; i < row_count; i++)
		total += rows[i].milliseconds;
	qsort(rows, row_count, sizeof *rows, slower);
	fprintf(out, "%.1f ms in kernels\n%10s %6s %8s %10s  name, grid, block\n", total, "ms", "share", "launches", "ms each");
	for (int i = 0; i < row_count && i < SHOWN; i++) {
		struct row *r = rows + i;
		fprintf(out, "%10.2f %5.1f%% %8ld %10.4f  %s %u,%u,%u %u,%u,%u\n", r->milliseconds, 100 * r->milliseconds / total,
			r->launches, r->milliseconds / r->launches, r->name, r->grid[0], r->grid[1], r->grid[2], r->block[0], r->block[1],
			r->block[2]);
	}
	fclose(out);
}

static const char *name_of(CUfunction function)
{
	for (int i = function_count - 1; i >= 0; i--)
		if (functions[i].function == function)
			return functions[i].name;
	return "unknown";
}

static void add(const char *name, const unsigned *grid, const unsigned *block, double milliseconds)
{
	struct row *found = NULL;
	for (int i = 0; i < row_count && !found; i++)
		if (!strcmp(rows[i].name, name) && !memcmp(rows[i].grid, grid, 12) && !memcmp(rows[i].block, block, 12))
			found = rows + i;
	if (!found) {
		if (row_count == MOST)
			return;
		found = rows + row_count++;
		snprintf(found->name, NAME, "%s", name);
		memcpy(found->grid, grid, 12);
		memcpy(found->block, block, 12);
	}
	found->milliseconds += milliseconds;
	found->launches++;
}

/* CUDA 12.8 and later have a second version, which their own programs ask for. */
static float elapsed(void)
{
	static CUresult (*read)(float *, CUevent, CUevent);
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	float milliseconds = 0;
	for (int i = 0; i < 2 && !read; i++)
		read = (CUresult(*)(float *, CUevent, CUevent))dlsym(driver, i ? "cuEventElapsedTime" : "cuEventElapsedTime_v2");
	return read(&milliseconds, before, after) == CUDA_SUCCESS ? milliseconds : 0;
}

/* Whether a launch is timed: what a graph records is not run now. */
static int begin(CUstream stream)
{
	CUstreamCaptureStatus status;
	pthread_mutex_lock(&lock);
	if (REAL(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE)
		return 0;
	if (!before) {
		REAL(cuEventCreate)(&before, 0);
		REAL(cuEventCreate)(&after, 0);
	}
	return REAL(cuEventRecord)(before, stream) == CUDA_SUCCESS;
}

static void end(int timed, CUstream stream, const char *name, const unsigned *grid, const unsigned *block)
{
	if (timed && REAL(cuEventRecord)(after, stream) == CUDA_SUCCESS && REAL(cuEventSynchronize)(after) == CUDA_SUCCESS)
		add(name, grid, block, elapsed());
	pthread_mutex_unlock(&lock);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	CUresult result = REAL(cuModuleGetFunction)(function, module, name);
	pthread_mutex_lock(&lock);
	if (result == CUDA_SUCCESS && function_count < MOST) {
		functions[function_count].function = *function;
		snprintf(functions[function_count++].name, NAME, "%s", name);
	}
	pthread_mutex_unlock(&lock);
	return result;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y, unsigned z,
			unsigned shared, CUstream stream, void **arguments, void **extra)
{
	unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {x, y, z};
	int timed = begin(stream);
	CUresult result = REAL(cuLaunchKernel)(function, grid_x, grid_y, grid_z, x, y, z, shared, stream, arguments, extra);
	end(timed, stream, name_of(function), grid, block);
	return result;
}

CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream)
{
	unsigned none[3] = {0};
	int timed = begin(stream);
	CUresult result = REAL(cuGraphLaunch)(graph, stream);
	end(timed, stream, "a graph", none, none);
	return result;
}
