/* Stands in for NCCL between the cards of driver.cpp (STAND_IN_DEVICES). Ranks are threads of a process or processes of a machine: what
 * they send each other are files in its shared memory. It has the functions that backends/collectives/src/nccl/library.rs asks for.
 *
 * A rank reads what it sends when its stream has come to the operation, and writes what it receives when all ranks' streams have: what
 * should have been in a buffer by then, and is not, is missed. Until then its stream waits, and no thread. As of NCCL's communicators
 * that do not block, calls give ncclInProgress, and ncclCommGetAsyncError says when they are through.
 *
 * STAND_IN_NCCL is something that goes wrong:
 *
 *   none             there is no library (tests/cuda/run leaves it out)
 *   version:N        ncclGetVersion gives N
 *   init:RANK        the rank's communicator fails while it is made
 *   refuse:RANK:N    the rank's Nth operation of a communicator, from 0, is refused
 *   error:RANK:N     it is begun, and an asynchronous error follows
 *   silent:RANK:N    the rank never comes to it
 *
 * Codes are ncclResult_t's. */
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

enum { SUCCESS = 0, SYSTEM = 2, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };

/* As driver.cpp has it. */
static const int AGAIN = -1;

typedef void *handle;

static std::mutex guard;
typedef std::lock_guard<std::mutex> locked;

static thread_local std::string last_error;

static int wrong(int code, const std::string &why) { return last_error = why, code; }

template <typename function> static function driver(const char *name)
{
	static handle library = dlopen("libcuda.so", RTLD_NOW);
	handle found = library ? dlsym(library, name) : nullptr;
	if (!found) {
		fprintf(stderr, "stand-in for NCCL: the driver's has no %s\n", name);
		abort();
	}
	return (function)found;
}

/* Whether this goes wrong, for a rank and the operation that it is at. */
static bool goes_wrong(const char *what, int rank, uint64_t at)
{
	char name[16];
	int whose;
	unsigned long when = 0;
	const char *setting = getenv("STAND_IN_NCCL");
	return setting && sscanf(setting, "%15[a-z]:%d:%lu", name, &whose, &when) >= 2 && !strcmp(name, what) && whose == rank && when == at;
}

/* What a rank leaves for another: a file that only the other takes, there at once and whole. */
static bool leave(const std::string &path, const std::string &what)
{
	static std::atomic<unsigned> count;
	std::string unfinished = path + "." + std::to_string(getpid()) + "-" + std::to_string(count++);
	FILE *file = fopen(unfinished.c_str(), "w");
	bool written = file && fwrite(what.data(), 1, what.size(), file) == what.size();
	written = file && !fclose(file) && written;
	return written && !rename(unfinished.c_str(), path.c_str());
}

static std::string take(const std::string &path)
{
	std::string all;
	char part[1 << 16];
	FILE *file = fopen(path.c_str(), "r");
	for (size_t count; file && (count = fread(part, 1, sizeof part, file));)
		all.append(part, count);
	if (file)
		fclose(file);
	return unlink(path.c_str()), all;
}

static bool is_there(const std::string &path) { return !access(path.c_str(), R_OK); }

/* Bytes from or to another rank. */
struct transfer { int peer; char *place; size_t bytes; };

struct communicator {
	std::string id;
	int rank, size;
	/* The card that it is on. */
	uintptr_t device;
	bool joined = false, aborted = false, finalized = false;
	uint64_t asked = 0;
	/* Looks until what was asked for is through. */
	int busy = 2;
	int code = SUCCESS;
	std::string why;

	std::string path(const std::string &what, int from, int to) const
	{
		return id + "-" + what + "-" + std::to_string(from) + "-" + std::to_string(to);
	}

	bool all_left(const std::string &what) const
	{
		for (int from = 0; from < size; from++)
			if (!is_there(path(what, from, rank)))
				return false;
		return true;
	}

	/* All ranks have joined, each with a card of its own. */
	void look_who_joined()
	{
		if (joined || !all_left("join"))
			return;
		joined = true;
		for (int from = 0; from < size; from++)
			if (std::stoull(take(path("join", from, rank))) == device && from != rank && code == SUCCESS) {
				code = INVALID_USAGE;
				why = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(from) + " both on CUDA device 1000";
			}
	}
};

struct ncclComm { std::shared_ptr<communicator> own; };

static std::set<ncclComm *> live;

/* An operation in a rank's stream. */
struct step {
	std::shared_ptr<communicator> own;
	uint64_t at;
	std::vector<transfer> sends, receives;
	bool left = false;

	std::string name() const { return std::to_string(at); }

	/* Leaves each rank what it is sent: a length and so many bytes, again and again. */
	bool leave_all()
	{
		left = true;
		for (int to = 0; to < own->size; to++) {
			std::string all;
			for (const transfer &send : sends)
				if (send.peer == to)
					all.append((const char *)&send.bytes, sizeof send.bytes).append(send.place, send.bytes);
			if (!leave(own->path(name(), own->rank, to), all))
				return false;
		}
		return true;
	}

	/* Takes what the others have left; what is wrong with it. */
	std::string take_all()
	{
		std::string why;
		for (int from = 0; from < own->size; from++) {
			std::string all = take(own->path(name(), from, own->rank));
			size_t at = 0, bytes = 0;
			for (const transfer &receive : receives) {
				if (receive.peer != from)
					continue;
				if (at + sizeof bytes <= all.size())
					memcpy(&bytes, &all[at], sizeof bytes);
				if (at + sizeof bytes + receive.bytes > all.size() || bytes != receive.bytes) {
					why = "rank " + std::to_string(own->rank) + " receives " + std::to_string(receive.bytes) + " bytes that rank " +
					      std::to_string(from) + " does not send";
					break;
				}
				memcpy(receive.place, &all[at + sizeof bytes], bytes);
				at += sizeof bytes + bytes;
			}
		}
		return why;
	}
};

static int work(void *argument)
{
	step *asked = (step *)argument;
	locked lock(guard);
	communicator &own = *asked->own;
	if (!own.aborted) {
		if (goes_wrong("silent", own.rank, asked->at) || goes_wrong("error", own.rank, asked->at))
			return AGAIN;
		if (!asked->left && !asked->leave_all()) {
			own.code = SYSTEM;
			own.why = "a file in " + own.id + " cannot be written";
		}
		if (!own.all_left(asked->name()))
			return AGAIN;
		std::string why = asked->take_all();
		if (!why.empty()) {
			own.code = INVALID_USAGE;
			own.why = why;
		}
	}
	delete asked;
	return 0;
}

static int issue(ncclComm *comm, step *asked, handle stream)
{
	std::unique_ptr<step> next(asked);
	{
		locked lock(guard);
		communicator &own = *comm->own;
		if (own.code != SUCCESS || !own.joined)
			return wrong(INVALID_USAGE, "the communicator is not ready");
		if (goes_wrong("refuse", own.rank, own.asked))
			return wrong(INTERNAL, "no channel is left");
		if (goes_wrong("error", own.rank, own.asked)) {
			own.code = REMOTE;
			own.why = "socketProgress: Connection closed by remote peer";
		}
		next->own = comm->own;
		next->at = own.asked++;
		own.busy = 2;
	}
	auto enqueue = driver<int (*)(handle, const char *, int (*)(void *), void *)>("stand_in_enqueue");
	return enqueue(stream, "collective", work, next.release()) ? wrong(1, "the stand-in's driver") : IN_PROGRESS;
}

/* Groups of calls are a thread's. */
static thread_local int depth;
static thread_local std::map<ncclComm *, std::pair<step *, handle>> queued;

static int ask(ncclComm *comm, const std::vector<transfer> &sends, const std::vector<transfer> &receives, handle stream)
{
	{
		locked lock(guard);
		if (!live.count(comm))
			return wrong(INVALID_ARGUMENT, "the communicator was given back");
	}
	auto &[own, of] = queued[comm];
	if (!own)
		own = new step;
	of = stream;
	own->sends.insert(own->sends.end(), sends.begin(), sends.end());
	own->receives.insert(own->receives.end(), receives.begin(), receives.end());
	if (depth > 0)
		return SUCCESS;
	step *alone = own;
	queued.erase(comm);
	return issue(comm, alone, stream);
}

static size_t width(int type)
{
	static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
	return type >= 0 && type < 10 ? widths[type] : 0;
}

extern "C" {

struct ncclUniqueId { char internal[128]; };
struct config { size_t size; unsigned magic, version; int blocking; };

int ncclGetVersion(int *version)
{
	const char *setting = getenv("STAND_IN_NCCL");
	*version = 22105;
	if (setting)
		sscanf(setting, "version:%d", version);
	return SUCCESS;
}

/* Where files of a group begin. */
int ncclGetUniqueId(ncclUniqueId *id)
{
	static std::atomic<unsigned> count;
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	memset(id, 0, sizeof *id);
	snprintf(id->internal, sizeof id->internal, "%s/stand-in-nccl-%d-%u-%lx", is_there("/dev/shm") ? "/dev/shm" : P_tmpdir, (int)getpid(),
	         count++, now.tv_sec * 1000000000L + now.tv_nsec);
	return SUCCESS;
}

int ncclCommInitRankConfig(ncclComm **made, int size, ncclUniqueId id, int rank, config *settings)
{
	handle device;
	driver<int (*)(handle *)>("cuCtxGetCurrent")(&device);
	locked lock(guard);
	if (strncmp(id.internal, "/", 1) || rank < 0 || rank >= size)
		return wrong(INVALID_ARGUMENT, "no such id, or no such rank");
	if (settings->size < sizeof *settings || settings->magic != 0xcafebeef || settings->version < 21400 || settings->blocking != 0)
		return wrong(INVALID_ARGUMENT, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
	auto own = std::make_shared<communicator>();
	own->id = id.internal;
	own->rank = rank;
	own->size = size;
	own->device = (uintptr_t)device;
	if (goes_wrong("init", rank, 0)) {
		own->code = REMOTE;
		own->why = "bootstrapInit: Connection refused";
	}
	for (int to = 0; to < size; to++)
		if (!leave(own->path("join", rank, to), std::to_string(own->device)))
			return wrong(SYSTEM, "a file in " + own->id + " cannot be written");
	*made = new ncclComm{own};
	live.insert(*made);
	return IN_PROGRESS;
}

int ncclCommGetAsyncError(ncclComm *comm, int *code)
{
	locked lock(guard);
	if (!live.count(comm))
		return wrong(INVALID_ARGUMENT, "the communicator was given back");
	communicator &own = *comm->own;
	own.look_who_joined();
	bool waits = !own.joined || (own.busy > 0 && own.busy-- > 0);
	*code = own.code != SUCCESS ? own.code : waits ? IN_PROGRESS : SUCCESS;
	return SUCCESS;
}

int ncclCommFinalize(ncclComm *comm)
{
	locked lock(guard);
	if (!live.count(comm) || comm->own->finalized || comm->own->code != SUCCESS)
		return wrong(INVALID_USAGE, "the communicator was given back, or has failed");
	comm->own->finalized = true;
	comm->own->busy = 2;
	return IN_PROGRESS;
}

int ncclCommDestroy(ncclComm *comm)
{
	locked lock(guard);
	if (!live.count(comm) || !comm->own->finalized || comm->own->busy > 0)
		return wrong(INVALID_USAGE, "the communicator is not finalized");
	live.erase(comm);
	delete comm;
	return SUCCESS;
}

int ncclCommAbort(ncclComm *comm)
{
	locked lock(guard);
	if (!live.erase(comm))
		return wrong(INVALID_ARGUMENT, "the communicator was given back");
	comm->own->aborted = true;
	delete comm;
	return SUCCESS;
}

const char *ncclGetErrorString(int code)
{
	switch (code) {
	case SUCCESS: return "no error";
	case SYSTEM: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
	case INTERNAL: return "internal error - please report this issue to the NCCL developers";
	case INVALID_ARGUMENT: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
	case INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
	case REMOTE: return "remote process exited or there was a network error";
	default: return "unknown result code";
	}
}

const char *ncclGetLastError(ncclComm *comm)
{
	locked lock(guard);
	if (comm && live.count(comm) && !comm->own->why.empty())
		last_error = comm->own->why;
	return last_error.c_str();
}

int ncclGroupStart(void) { return depth++, SUCCESS; }

int ncclGroupEnd(void)
{
	if (depth == 0)
		return wrong(INVALID_USAGE, "no group was begun");
	if (--depth > 0)
		return SUCCESS;
	int code = SUCCESS;
	for (auto &[comm, asked] : queued) {
		int own = issue(comm, asked.first, asked.second);
		if (code == SUCCESS || code == IN_PROGRESS)
			code = own;
	}
	return queued.clear(), code;
}

int ncclAllGather(const char *from, char *to, size_t count, int type, ncclComm *comm, handle stream)
{
	size_t bytes = count * width(type);
	std::vector<transfer> sends, receives;
	for (int peer = 0; peer < comm->own->size; peer++) {
		sends.push_back({peer, (char *)from, bytes});
		receives.push_back({peer, to + peer * bytes, bytes});
	}
	return ask(comm, sends, receives, stream);
}

int ncclSend(const char *from, size_t count, int type, int peer, ncclComm *comm, handle stream)
{
	return ask(comm, {{peer, (char *)from, count * width(type)}}, {}, stream);
}

int ncclRecv(char *to, size_t count, int type, int peer, ncclComm *comm, handle stream)
{
	return ask(comm, {}, {{peer, to, count * width(type)}}, stream);
}
}
