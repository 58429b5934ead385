/* Stands in for NVIDIA's driver where there is no card. Memory is the host's, copies are copies, launches are held to the limits of an
 * H200. Kernels that the compiler beside it made (compiler.cpp) are computed, block after block, a thread of a block at a time until
 * it waits for the others; kernels that NVRTC made are left out, so that what remains is the time of the host.
 *
 * What a stream is asked for waits in it until somebody waits for that, as late as may be: work that should have waited for another
 * stream's, and does not, finds what was there before.
 *
 * Nothing is zero that a program did not write: memory and shared memory begin as NaN. A place beyond the length of a kernel's buffer
 * ends the program, and so does the page after an allocation. STAND_IN_ORDER=backward runs blocks and threads from the last to the
 * first; STAND_IN_DUMP=FOLDER keeps NVRTC's PTX.
 *
 * STAND_IN_EARLY=kernels runs every kernel, STAND_IN_EARLY=copies every copy on a stream without kernels, and STAND_IN_EARLY=libraries
 * every product of a library, as soon as it is asked for, with what it waits for and no more; all else stays as late as may be. Under one
 * of these and the order without any, work that should have waited runs too soon, or what it should have waited for too late.
 *
 * STAND_IN_RECORD=FILE writes a line for each call, in the order of the calls:
 *
 *   allocate BYTES PLACE | free BYTES PLACE | pin BYTES
 *   up BYTES STREAM MEMORY PLACE | down BYTES STREAM MEMORY PLACE | between BYTES STREAM - PLACE
 *   kernel NAME STREAM
 *   record EVENT STREAM | wait EVENT STREAM OF | reached EVENT OF | finished STREAM | collective STREAM | matmul STREAM
 *
 * A stream is a number, 0 the one that everybody has. MEMORY of the host is pinned or pageable. PLACE is the device's address. `wait`
 * is a stream's: STREAM goes on when EVENT, recorded in OF, is reached; `reached` and `finished` are the host's.
 *
 * STAND_IN_REFUSE=N:BYTES refuses memory from the N-th allocation on, until so many bytes were given back since; at the end the
 * program says how many allocations were asked for, and how many refused. STAND_IN_REFUSE_PINNED=N:BYTES does the same with memory of
 * the host that the driver pins. STAND_IN_REFUSE_WHILE=FILE refuses memory while there is such a file, and adds a line to it with the bytes
 * of each allocation that was refused; a file that begins with the line "at most N" is removed after N of them.
 *
 * STAND_IN_SKIP_KERNELS=1 leaves out what kernels compute, as with NVRTC's, and memory begins as zeros: what remains is the time of the
 * host, and of this file.
 *
 * STAND_IN_CAPABILITY=80 has an Ampere's compute capability, 8.0, in place of Hopper's 9.0; STAND_IN_MULTIPROCESSORS=1 has one in place of
 * 132; STAND_IN_GIB=64 has 64 GiB of memory in place of 8.
 *
 * STAND_IN_DRIVER=12040 is a driver for CUDA 12.4 in place of 12.9.
 *
 * STAND_IN_DEVICES=N has N cards in place of one, with the memory of one. nccl.cpp beside this file connects them.
 *
 * A stream that is captured keeps what it is asked for in a graph; a replay asks for all of it again. While one is captured nobody may
 * allocate, wait or read, as with a real driver (CU_STREAM_CAPTURE_MODE_GLOBAL).
 *
 * Functions are those that cudarc and cubecl-cuda ask for; one that is missing ends the program with its name. Codes are CUresult's.
 */
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "blocks.h"

typedef void *handle;
typedef uint64_t address;

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, NO_SUCH_DEVICE = 101, NOT_READY = 600, LAUNCH_FAILED = 719, UNSUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };

/* What work gives that waits for other threads' streams: it is asked again later. */
static const int AGAIN = -1;

static int asked(const char *variable, int otherwise)
{
	const char *value = getenv(variable);
	return value ? atoi(value) : otherwise;
}

static const size_t MEMORY = (size_t)asked("STAND_IN_GIB", 8) << 30;
#define ANY(number) ((handle)(uintptr_t)(number))

/* The kernel that runs. */
static const char *running;

static void blame(const char *what)
{
	position index = stand_in_block.index, thread = stand_in_lane->thread;
	fprintf(stderr, "stand-in: %s, block %u %u %u, thread %u %u %u: %s\n", running, index.x, index.y, index.z, thread.x, thread.y,
	        thread.z, what);
}

static void fault(int signal, siginfo_t *info, void *context)
{
	if (running)
		blame("it touches what is no memory of the device");
	_exit(128 + signal);
}

extern "C" void stand_in_stop(const char *what)
{
	blame(what);
	_exit(1);
}

extern "C" void stand_in_beyond(unsigned buffer, uint64_t index, uint64_t length)
{
	char what[128];
	snprintf(what, sizeof what, "place %lu of buffer %u, which has %lu", (unsigned long)index, buffer, (unsigned long)length);
	stand_in_stop(what);
}

/* Streams. One thread of the host is in the driver at a time. */

enum kind { KERNEL, COPY, LIBRARY, OTHER };

struct graph {
	std::vector<std::pair<kind, std::function<int()>>> nodes;
	bool invalidated;
};

struct stream {
	std::deque<std::function<int()>> waiting;
	uint64_t done;
	unsigned number;
	bool computes;
	handle context;
	/* Where what it is asked for goes while it is captured. */
	graph *captured;
};

struct event {
	stream *of;
	uint64_t after;
	unsigned number;
};

static std::recursive_mutex guard;
static std::vector<stream *> streams;

static unsigned number(const stream *of) { return of ? of->number : 0; }

/* What was asked for, where somebody wants to know. */
static struct recording {
	FILE *file = nullptr;

	recording()
	{
		const char *path = getenv("STAND_IN_RECORD");
		if (path && !(file = fopen(path, "a"))) {
			fprintf(stderr, "stand-in: STAND_IN_RECORD=%s cannot be written\n", path);
			_exit(2);
		}
		if (file)
			setvbuf(file, nullptr, _IOLBF, 1 << 16);
	}

	__attribute__((format(printf, 2, 3))) void line(const char *format, ...)
	{
		if (!file)
			return;
		va_list values;
		va_start(values, format);
		vfprintf(file, format, values);
		va_end(values);
		fputc('\n', file);
	}
} recording;


/* What is run as soon as it is asked for. */
static const struct eagerness {
	kind early = OTHER;

	eagerness()
	{
		const char *setting = getenv("STAND_IN_EARLY");
		if (!setting)
			return;
		early = !strcmp(setting, "kernels") ? KERNEL : !strcmp(setting, "copies") ? COPY : !strcmp(setting, "libraries") ? LIBRARY : OTHER;
		if (early == OTHER) {
			fprintf(stderr, "stand-in: STAND_IN_EARLY=%s is none of kernels, copies, libraries\n", setting);
			_exit(2);
		}
	}
} eagerness;

/* Whether kernels are computed. What the host does for a card is all that is left of a run where they are not. */
static const bool computes = !getenv("STAND_IN_SKIP_KERNELS");

/* The first error of what was run late: every call that waits gives it from then on. */
static int failed;

/* What may not happen while a stream is captured; the capture is lost then. */
static bool spoils_capture(void)
{
	bool any = false;
	for (stream *each : streams)
		if (each->captured)
			any = each->captured->invalidated = true;
	return any;
}

static int run_until(stream *of, uint64_t after)
{
	while (of->done < after && !of->waiting.empty()) {
		std::function<int()> next = std::move(of->waiting.front());
		of->waiting.pop_front();
		int code = next();
		if (code == AGAIN)
			return of->waiting.push_front(std::move(next)), AGAIN;
		of->done++;
		if (code != OK && failed == OK)
			failed = code;
	}
	return failed;
}

static uint64_t asked(stream *of) { return of->done + of->waiting.size(); }

static int run_all()
{
	for (stream *each : streams)
		run_until(each, asked(each));
	return failed;
}

/* The stream that everybody has waits for all others, and they for it. */
static int enqueue(stream *of, kind what, std::function<int()> work)
{
	if (of && of->captured)
		return of->captured->nodes.push_back({what, std::move(work)}), OK;
	if (of) {
		of->computes |= what == KERNEL;
		of->waiting.push_back(std::move(work));
		bool now = what != OTHER && what == eagerness.early && !(what == COPY && of->computes);
		return now ? run_until(of, asked(of)) : OK;
	}
	if (spoils_capture())
		return CAPTURE_UNSUPPORTED;
	int code = run_all();
	return code ? code : work();
}

static int look(stream *of, uint64_t after)
{
	run_until(of, of->done < after ? of->done + 1 : after);
	return failed ? failed : of->done < after ? NOT_READY : OK;
}

typedef std::lock_guard<std::recursive_mutex> locked;

/* Work that may wait for other threads, which need the driver meanwhile. */
template <typename work> static int patiently(work tried)
{
	for (;;) {
		{
			locked lock(guard);
			int code = tried();
			if (code != AGAIN)
				return code;
		}
		usleep(100);
	}
}

/* Cards. */
static int devices()
{
	const char *setting = getenv("STAND_IN_DEVICES");
	int count = setting ? atoi(setting) : 1;
	return count < 1 || count > 16 ? 1 : count;
}

static thread_local handle context = ANY(16);

extern "C" {

/* The device. */

int cuInit(unsigned flags)
{
	struct sigaction action = {};
	action.sa_sigaction = fault;
	action.sa_flags = SA_SIGINFO;
	return sigaction(SIGSEGV, &action, nullptr), OK;
}

int cuDriverGetVersion(int *version) { return *version = asked("STAND_IN_DRIVER", 12090), OK; }
int cuDeviceGetCount(int *count) { return *count = devices(), OK; }
int cuDeviceGet(int *device, int index) { return *device = index, index >= 0 && index < devices() ? OK : NO_SUCH_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "stand-in for an H200"), OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 7 + device, 16), OK; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:%02x:00.0", 1 + device), OK; }
int cuDeviceGetLuid(char *luid, unsigned *mask, int device) { return UNSUPPORTED; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = MEMORY, OK; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	switch (attribute) {
	case 1: case 2: case 3: *value = 1024; break;  /* threads of a block, its x, its y */
	case 4: *value = 64; break;                    /* its z */
	case 5: *value = 2147483647; break;            /* blocks of a grid in x */
	case 6: case 7: *value = 65535; break;         /* in y and z */
	case 8: *value = 49152; break;                 /* shared memory of a block */
	case 10: *value = 32; break;                   /* threads of a warp */
	case 16: *value = asked("STAND_IN_MULTIPROCESSORS", 132); break;
	case 38: *value = 52428800; break;             /* level-2 cache */
	case 39: *value = 2048; break;                 /* threads of a multiprocessor */
	case 75: *value = asked("STAND_IN_CAPABILITY", 90) / 10; break;
	case 76: *value = asked("STAND_IN_CAPABILITY", 90) % 10; break;
	case 81: *value = 233472; break;               /* shared memory of a multiprocessor */
	case 97: *value = MOST_SHARED; break;          /* of a block that asks for it */
	case 106: *value = 32; break;                  /* blocks of a multiprocessor */
	default: *value = 1;
	}
	return OK;
}

int cuDevicePrimaryCtxRetain(handle *made, int device) { return *made = ANY(16 + device), OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxSetCurrent(handle chosen) { return context = chosen, OK; }
int cuCtxGetCurrent(handle *current) { return *current = context, OK; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, OK; }

int cuCtxSynchronize(void)
{
	locked lock(guard);
	return run_all();
}

/* Memory of the device, and of the host where the device may read and write it at any time. */

static std::map<address, size_t> allocations;
static std::map<char *, size_t> pinned;
static size_t in_use;

static size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/* A device, or a host, that has no memory for a while. */
struct shortage {
	const char *what;
	unsigned long from = 0, asked = 0, refused = 0;
	size_t until = 0, given_back = 0;

	shortage(const char *variable, const char *what) : what(what)
	{
		const char *setting = getenv(variable);
		if (setting && sscanf(setting, "%lu:%zu", &from, &until) != 2) {
			fprintf(stderr, "stand-in: %s=%s is no N:BYTES\n", variable, setting);
			_exit(2);
		}
	}

	~shortage()
	{
		if (from)
			fprintf(stderr, "stand-in: %lu %s, %lu refused\n", asked, what, refused);
	}

	bool refuses()
	{
		asked++;
		bool now = from && asked >= from && given_back < until;
		refused += now;
		return now;
	}

	void gets_back(size_t bytes)
	{
		if (refused)
			given_back += bytes;
	}
};

static shortage of_device("STAND_IN_REFUSE", "allocations"), of_pinned("STAND_IN_REFUSE_PINNED", "pinned allocations");

/* Whether somebody says, by a file, that the device has no memory now. */
static bool is_told_to_refuse(size_t bytes)
{
	static const char *path = getenv("STAND_IN_REFUSE_WHILE");
	FILE *file = path ? fopen(path, "r+") : nullptr;
	if (!file)
		return false;
	size_t most = 0, lines = 0;
	bool limited = fscanf(file, "at most %zu", &most) == 1;
	rewind(file);
	for (int c; (c = fgetc(file)) != EOF;)
		lines += c == '\n';
	bool is_over = limited && lines > most;
	if (is_over)
		remove(path);
	else
		fseek(file, 0, SEEK_END), fprintf(file, "%zu\n", bytes);
	fclose(file);
	return !is_over;
}

/* Ends where a page begins that must not be touched. */
static int allocate(address *place, size_t bytes)
{
	locked lock(guard);
	if (spoils_capture())
		return CAPTURE_UNSUPPORTED;
	if (of_device.refuses() || is_told_to_refuse(bytes))
		return OUT_OF_MEMORY;
	size_t held = rounded(bytes ? bytes : 1, 512), mapped = rounded(held, PAGE) + PAGE;
	if (in_use + held > MEMORY)
		run_all();
	if (in_use + held > MEMORY)
		return OUT_OF_MEMORY;
	char *start = (char *)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (start == MAP_FAILED)
		return OUT_OF_MEMORY;
	mprotect(start + mapped - PAGE, PAGE, PROT_NONE);
	*place = (address)(start + mapped - PAGE - held);
	recording.line("allocate %zu %llx", held, (unsigned long long)*place);
	/* a mapping begins as zeros */
	if (computes)
		memset((void *)*place, 0xff, held);
	allocations[*place] = held;
	in_use += held;
	return OK;
}

static int give_back(address place)
{
	auto found = allocations.find(place);
	if (found == allocations.end())
		return INVALID;
	size_t held = found->second;
	recording.line("free %zu %llx", held, (unsigned long long)place);
	munmap((void *)(place + held - rounded(held, PAGE)), rounded(held, PAGE) + PAGE);
	in_use -= held;
	of_device.gets_back(held);
	allocations.erase(found);
	return OK;
}

static bool is_pinned(const void *place)
{
	auto after = pinned.upper_bound((char *)place);
	return after != pinned.begin() && (char *)place < std::prev(after)->first + std::prev(after)->second;
}

/* What was freed in the order of a stream is free when the stream has come to it, as on a card. */
int cuMemGetInfo_v2(size_t *free_bytes, size_t *bytes)
{
	locked lock(guard);
	return *free_bytes = MEMORY - in_use, *bytes = MEMORY, OK;
}

int cuMemAlloc_v2(address *place, size_t bytes) { return allocate(place, bytes); }
int cuMemAllocAsync(address *place, size_t bytes, stream *of) { return allocate(place, bytes); }

int cuMemFree_v2(address place)
{
	locked lock(guard);
	int code = run_all();
	return code ? code : give_back(place);
}

int cuMemFreeAsync(address place, stream *of)
{
	locked lock(guard);
	return enqueue(of, OTHER, [=] { return give_back(place); });
}

int cuMemAllocHost_v2(char **place, size_t bytes)
{
	locked lock(guard);
	if (of_pinned.refuses())
		return OUT_OF_MEMORY;
	if (posix_memalign((void **)place, 512, bytes ? bytes : 512))
		return OUT_OF_MEMORY;
	pinned[*place] = bytes;
	recording.line("pin %zu", bytes);
	return OK;
}

int cuMemFreeHost(char *place)
{
	locked lock(guard);
	int code = run_all();
	auto found = pinned.find(place);
	if (found == pinned.end())
		return INVALID;
	of_pinned.gets_back(found->second);
	pinned.erase(found);
	return free(place), code;
}

/* Rows of bytes. The host's are read when the copy is asked for, and written before it returns, unless they are pinned. */
static int ask_for_copy(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height, bool reads_host,
                        bool writes_host, stream *of, bool &waits)
{
	locked lock(guard);
	const char *memory = !reads_host && !writes_host ? "-" : is_pinned(reads_host ? from : to) ? "pinned" : "pageable";
	recording.line("%s %zu %u %s %llx", reads_host ? "up" : writes_host ? "down" : "between", width * height, number(of), memory,
	               (unsigned long long)(uintptr_t)(writes_host ? from : to));
	std::shared_ptr<std::vector<char>> kept;
	if (reads_host && !is_pinned(from)) {
		kept = std::make_shared<std::vector<char>>(width * height);
		for (size_t row = 0; row < height; row++)
			memcpy(kept->data() + row * width, from + row * from_pitch, width);
		from = kept->data();
		from_pitch = width;
	}
	int code = enqueue(of, COPY, [=] {
		(void)kept;
		for (size_t row = 0; row < height; row++)
			memmove(to + row * to_pitch, from + row * from_pitch, width);
		return OK;
	});
	if (writes_host && of && of->captured)
		return of->captured->invalidated = true, CAPTURE_UNSUPPORTED;
	waits = code == OK && writes_host && of && !is_pinned(to);
	return code;
}

static int copy(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height, bool reads_host,
                bool writes_host, stream *of)
{
	bool waits = false;
	int code = ask_for_copy(to, to_pitch, from, from_pitch, width, height, reads_host, writes_host, of, waits);
	return waits ? patiently([=] { return run_until(of, asked(of)); }) : code;
}

int cuMemcpyHtoDAsync_v2(address to, const char *from, size_t bytes, stream *of)
{
	return copy((char *)to, 0, from, 0, bytes, 1, true, false, of);
}
int cuMemcpyDtoHAsync_v2(char *to, address from, size_t bytes, stream *of)
{
	return copy(to, 0, (char *)from, 0, bytes, 1, false, true, of);
}
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, stream *of)
{
	return copy((char *)to, 0, (char *)from, 0, bytes, 1, false, false, of);
}

/* CUDA_MEMCPY2D; a type of memory is 1 for the host's. */
struct side { size_t x, y; int type; char *host; char *device; handle array; size_t pitch; };
struct rectangle { struct side from, to; size_t width, height; };

int cuMemcpy2DAsync_v2(const struct rectangle *asked, stream *of)
{
	const side &from = asked->from, &to = asked->to;
	bool reads_host = from.type == 1, writes_host = to.type == 1;
	return copy((writes_host ? to.host : to.device) + to.y * to.pitch + to.x, to.pitch,
	            (reads_host ? from.host : from.device) + from.y * from.pitch + from.x, from.pitch, asked->width, asked->height,
	            reads_host, writes_host, of);
}

/* Streams and events. */

int cuStreamCreate(stream **made, unsigned flags)
{
	locked lock(guard);
	streams.push_back(*made = new stream{});
	(*made)->number = streams.size();
	(*made)->context = context;
	return OK;
}
int cuStreamCreateWithPriority(stream **made, unsigned flags, int priority) { return cuStreamCreate(made, flags); }

int cuStreamSynchronize(stream *of)
{
	{
		locked lock(guard);
		recording.line("finished %u", number(of));
		if (of ? of->captured && spoils_capture() : spoils_capture())
			return CAPTURE_UNSUPPORTED;
	}
	return patiently([=] { return of ? run_until(of, asked(of)) : run_all(); });
}
int cuStreamDestroy_v2(stream *of) { return cuStreamSynchronize(of); }

int cuStreamQuery(stream *of)
{
	locked lock(guard);
	return of ? look(of, asked(of)) : run_all();
}

int cuStreamWaitEvent(stream *of, event *awaited, unsigned flags)
{
	locked lock(guard);
	event then = *awaited;
	recording.line("wait %u %u %u", then.number, number(of), number(then.of));
	return then.of ? enqueue(of, OTHER, [=] { return run_until(then.of, then.after); }) : OK;
}

int cuEventCreate(event **made, unsigned flags)
{
	static std::atomic<unsigned> count;
	*made = new event{};
	(*made)->number = ++count;
	return OK;
}
int cuEventDestroy_v2(event *of) { return delete of, OK; }

int cuEventRecord(event *recorded, stream *of)
{
	locked lock(guard);
	*recorded = {of, of ? asked(of) : 0, recorded->number};
	recording.line("record %u %u", recorded->number, number(of));
	return of ? OK : run_all();
}

int cuEventSynchronize(event *awaited)
{
	event then;
	{
		locked lock(guard);
		then = *awaited;
		recording.line("reached %u %u", then.number, number(then.of));
	}
	return then.of ? patiently([=] { return run_until(then.of, then.after); }) : OK;
}

int cuEventQuery(event *awaited)
{
	locked lock(guard);
	return awaited->of ? look(awaited->of, awaited->after) : OK;
}
int cuEventElapsedTime_v2(float *ms, event *from, event *to) { return *ms = 0.1f, OK; }
int cuEventElapsedTime(float *ms, event *from, event *to) { return *ms = 0.1f, OK; }

/* Events of a context: after all that its streams were asked for, and before all that they are asked for later. A stream that nobody
 * sees waits for the others. */
static int with_streams(handle of, int (*each_with)(stream *, event *), event *with)
{
	for (stream *each : streams)
		if (each->context == of && each->captured)
			return each->captured->invalidated = true, CAPTURE_UNSUPPORTED;
	for (stream *each : streams)
		if (each->context == of)
			each_with(each, with);
	return OK;
}

int cuCtxRecordEvent(handle of, event *recorded)
{
	static std::map<handle, stream> joints;
	locked lock(guard);
	stream *joint = &joints[of];
	int code = with_streams(of, [](stream *each, event *joined) {
		uint64_t after = asked(each);
		return enqueue(joined->of, OTHER, [=] { return run_until(each, after); });
	}, std::make_unique<event>(event{joint}).get());
	return *recorded = {joint, asked(joint), recorded->number}, code;
}

int cuCtxWaitEvent(handle of, event *awaited)
{
	locked lock(guard);
	return with_streams(of, [](stream *each, event *awaited) { return cuStreamWaitEvent(each, awaited, 0); }, awaited);
}

/* As a driver for CUDA 12.9 knows them. */
int cuGetProcAddress_v2(const char *name, handle *found, int version, uint64_t flags, int *status)
{
	*found = !strcmp(name, "cuCtxRecordEvent") ? (handle)cuCtxRecordEvent : !strcmp(name, "cuCtxWaitEvent") ? (handle)cuCtxWaitEvent : nullptr;
	bool known = *found && asked("STAND_IN_DRIVER", 12090) >= 12050;
	if (!known)
		*found = nullptr;
	return *status = !known, OK;
}

/* Work of a library beside this one, in its turn; AGAIN where it waits for other streams. */
int stand_in_enqueue(stream *of, const char *what, int (*work)(void *), void *argument)
{
	locked lock(guard);
	recording.line("%s %u", what, number(of));
	return enqueue(of, strcmp(what, "matmul") ? OTHER : LIBRARY, [=] { return work(argument); });
}

/* Graphs. A node is what a stream was asked for; all are launches or copies. */

int cuStreamBeginCapture_v2(stream *of, int mode)
{
	locked lock(guard);
	if (!of || of->captured)
		return INVALID;
	of->captured = new graph{};
	return OK;
}

/* Programs that watch launches ask (`benches/gpu/kernel_times`). */
int cuStreamIsCapturing(stream *of, int *status) { return *status = of && of->captured, OK; }

int cuStreamEndCapture(stream *of, graph **made)
{
	locked lock(guard);
	if (!of->captured)
		return INVALID;
	*made = of->captured;
	of->captured = nullptr;
	if (!(*made)->invalidated)
		return OK;
	delete *made;
	return *made = nullptr, CAPTURE_INVALIDATED;
}

int cuGraphGetNodes(graph *of, handle *nodes, size_t *count)
{
	for (size_t i = 0; nodes && i < *count && i < of->nodes.size(); i++)
		nodes[i] = ANY(i + 1);
	return *count = of->nodes.size(), OK;
}
int cuGraphNodeGetType(handle node, int *type) { return *type = 0, OK; }
int cuGraphInstantiateWithFlags(graph **executable, graph *of, unsigned long long flags) { return *executable = new graph(*of), OK; }
int cuGraphUpload(graph *executable, stream *of) { return OK; }
int cuGraphDestroy(graph *of) { return delete of, OK; }
int cuGraphExecDestroy(graph *of) { return delete of, OK; }

int cuGraphLaunch(graph *executable, stream *of)
{
	locked lock(guard);
	for (const auto &[what, node] : executable->nodes)
		if (int code = enqueue(of, what, node))
			return code;
	return OK;
}

/* Kernels. What NVRTC made is written down and given back as if it had been assembled; what the compiler beside this one made is the
 * path of a library. */

struct linked { char *code; size_t bytes; };

static void dump(const char *ptx, size_t bytes)
{
	static std::atomic<int> count;
	const char *folder = getenv("STAND_IN_DUMP");
	char path[4096];
	if (!folder)
		return;
	snprintf(path, sizeof path, "%s/%d-%d.ptx", folder, (int)getpid(), count++);
	FILE *file = fopen(path, "w");
	if (!file || fwrite(ptx, 1, bytes, file) != bytes || fclose(file))
		fprintf(stderr, "stand-in: %s cannot be written\n", path);
}

int cuLinkCreate_v2(unsigned count, int *options, void **values, handle *state)
{
	*state = calloc(1, sizeof(linked));
	return OK;
}

int cuLinkAddData_v2(linked *state, int type, void *data, size_t bytes, const char *name, unsigned count, int *options,
                     void **values)
{
	dump((char *)data, strnlen((char *)data, bytes));
	state->code = (char *)calloc(1, bytes + 1);
	memcpy(state->code, data, bytes);
	state->bytes = bytes;
	return OK;
}

int cuLinkComplete(linked *state, void **code, size_t *bytes) { return *code = state->code, *bytes = state->bytes, OK; }
int cuLinkDestroy(linked *state) { return free(state->code), free(state), OK; }

/* A kernel; one that is not computed has no code. */
struct module {
	const char *name;
	void *(*hold)(void **);
	void (*launch)(void *);
	void (*drop)(void *);
	bool waits;
};

int cuModuleLoadData(module **loaded, const char *image)
{
	*loaded = new module{};
	/* PTX begins with a comment, a library's path with one stroke */
	if (image[0] != '/' || image[1] == '/')
		return OK;
	handle library = dlopen(image, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return fprintf(stderr, "stand-in: %s\n", dlerror()), INVALID_IMAGE;
	**loaded = {(const char *)dlsym(library, "stand_in_name"), (void *(*)(void **))dlsym(library, "stand_in_hold"),
	            (void (*)(void *))dlsym(library, "stand_in_launch"), (void (*)(void *))dlsym(library, "stand_in_drop"),
	            *(const bool *)dlsym(library, "stand_in_waits")};
	return OK;
}

int cuModuleLoadDataEx(module **loaded, const char *image, unsigned count, int *options, void **values)
{
	return cuModuleLoadData(loaded, image);
}
int cuModuleUnload(module *loaded) { return OK; }
int cuModuleGetFunction(module **function, module *loaded, const char *name) { return *function = loaded, OK; }
int cuFuncGetAttribute(int *value, int attribute, handle function) { return *value = 1024, OK; }

int cuFuncSetAttribute(handle function, int attribute, int value)
{
	return attribute == 8 && value > MOST_SHARED ? INVALID : OK;
}

static int run(const module *kernel, void *arguments, position size, position grid, unsigned shared)
{
	prepare_machine();
	own->kernel = kernel->launch;
	own->arguments = arguments;
	stand_in_block = {{0, 0, 0}, size, grid, own->shared};
	running = kernel->name;
	uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
	for (uint64_t count = 0; count < blocks; count++) {
		uint64_t index = place(count, blocks);
		stand_in_block.index = {(unsigned)(index % grid.x), (unsigned)(index / grid.x % grid.y), (unsigned)(index / grid.x / grid.y)};
		memset(own->shared, 0xff, shared);
		if (!run_block(size.x * size.y * size.z, kernel->waits)) {
			fprintf(stderr, "stand-in: threads of a block of %s wait for others that never come\n", running);
			return LAUNCH_FAILED;
		}
	}
	running = nullptr;
	return OK;
}

int cuLaunchKernel(module *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y, unsigned z,
                   unsigned shared, stream *of, void **arguments, void **extra)
{
	int grid = grid_x && grid_x <= 2147483647u && grid_y && grid_y <= 65535 && grid_z && grid_z <= 65535;
	if (!grid || !x || !y || !z || z > 64 || x * y * z > MOST_THREADS || shared > (unsigned)MOST_SHARED) {
		fprintf(stderr, "stand-in: no card launches %u %u %u blocks of %u %u %u threads with %u bytes\n", grid_x, grid_y, grid_z, x, y,
		        z, shared);
		return INVALID;
	}
	locked lock(guard);
	recording.line("kernel %s %u", kernel->name ? kernel->name : "-", number(of));
	if (!kernel->launch)
		return OK;
	if (!computes)
		return enqueue(of, KERNEL, [] { return OK; });
	/* a graph runs it several times */
	std::shared_ptr<void> held(kernel->hold(arguments), kernel->drop);
	return enqueue(of, KERNEL, [=] { return run(kernel, held.get(), {x, y, z}, {grid_x, grid_y, grid_z}, shared); });
}

int cuTensorMapEncodeTiled(handle map) { return OK; }
int cuTensorMapEncodeIm2col(handle map) { return OK; }
int cuGetErrorName(int code, const char **name) { return *name = "an error of the stand-in", OK; }
int cuGetErrorString(int code, const char **text) { return *text = "an error of the stand-in", OK; }
}
