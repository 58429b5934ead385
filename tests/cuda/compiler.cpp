/* Stands in for NVRTC: a kernel's CUDA source becomes a library of this machine's, by the C++ compiler and kernel.h. What it gives
 * back as PTX is the library's path.
 *
 * Libraries are kept beside this one, with their sources before (.cu) and after rewriting (.cpp), under a hash of the latter.
 * STAND_IN_FLAGS are further flags of the C++ compiler (-fsanitize=undefined, say).
 */
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

enum { OK = 0, INVALID = 3, COMPILATION = 6 };

struct program {
	std::string source, library, log;
};

static std::string folder()
{
	Dl_info info;
	dladdr((void *)&folder, &info);
	std::string path = info.dli_fname;
	return path.substr(0, path.rfind('/'));
}

/* The same with every place in a buffer held to the buffer's length, which CubeCL passes along in the order of the buffers. */
static std::string held_to_lengths(const std::string &text, size_t entry)
{
	size_t from = text.find('(', entry), to = text.find_first_of("{", from);
	to = text.rfind(')', to);
	std::string taken = text.substr(from + 1, to - from - 1), result = text;
	std::vector<std::string> buffers;
	std::smatch found;
	if (!std::regex_search(taken, found, std::regex("info_st const (\\w+)$")) || text.find(" static_meta[") == std::string::npos)
		return "#error this kernel is told no lengths of its buffers\n" + text;
	std::string lengths = found[1].str() + ".static_meta";
	static const std::regex buffer("\\*(?: const)? __restrict__ (\\w+)");
	for (std::sregex_iterator each(taken.begin(), taken.end(), buffer), end; each != end; each++)
		buffers.push_back((*each)[1]);
	for (size_t i = 0; i < buffers.size(); i++) {
		std::string number = std::to_string(i), within = "stand_in_within($1, " + lengths + "[" + number + "], " + number + ")";
		result = std::regex_replace(result, std::regex("&" + buffers[i] + "\\[(\\w+)\\]"), "&" + buffers[i] + "[" + within + "]");
	}
	return result;
}

/* The source as C++: types of <cstdint>, shared memory that the driver has, additions that are calls. */
static std::string rewritten(const std::string &source)
{
	static const std::regex types("typedef (?:un)?signed [a-z ]*u?int[0-9]+_t;\n"), includes("#include <[a-z0-9_.]+>\n"),
		shared("(?:extern )?__shared__ __align__\\([0-9]+\\) char (\\w+)\\[[^\\]]*\\];"),
		half("asm volatile\\(\"atom\\.relaxed\\.add\\.noftz\\.(b?f16) %0, \\[%1\\], %2;\" : \"=h\"\\((\\w+)\\) : \"l\"\\((\\w+)\\), \"h\"\\((\\w+)\\) \\);"),
		whole("asm volatile\\(\"atom\\.relaxed\\.add\\.[fus](?:32|64) %0, \\[%1\\], %2;\" : \"=[frd]\"\\((\\w+)\\) : \"l\"\\((\\w+)\\), \"[frd]\"\\((\\w+)\\) \\);"),
		entry("extern \"C\" __global__ void(?: __launch_bounds__\\([^)]*\\))?\\s+(\\w+)\\(");
	std::smatch found;
	if (!std::regex_search(source, found, entry))
		return "#error no kernel in this source\n" + source;
	std::string name = found[1], text = std::regex_replace(source, types, "");
	text = std::regex_replace(text, includes, "");
	text = std::regex_replace(text, shared, "char *const $1 = stand_in_block.shared;");
	text = std::regex_replace(text, half, "$2 = stand_in_atomic_add_$1((void *)$3, $4);");
	text = std::regex_replace(text, whole, "$1 = stand_in_atomic_add((void *)$2, $3);");
	text = held_to_lengths(text, text.find(name + "("));
	bool waits = std::regex_search(text, std::regex("__sync|_sync\\("));
	return text + "\nextern \"C\" void *stand_in_hold(void **arguments) { return stand_in_copied(&" + name + ", arguments); }\n" +
	       "extern \"C\" void stand_in_launch(void *held) { stand_in_call(&" + name + ", held); }\n" +
	       "extern \"C\" void stand_in_drop(void *held) { stand_in_forget(&" + name + ", held); }\n" +
	       "extern \"C\" const char stand_in_name[] = \"" + name + "\";\nextern \"C\" const bool stand_in_waits = " +
	       (waits ? "true" : "false") + ";\n";
}

static std::string read(const std::string &path)
{
	std::ifstream file(path);
	std::stringstream text;
	text << file.rdbuf();
	return text.str();
}

static int compile(program &made)
{
	std::string here = folder();
	const char *asked = getenv("STAND_IN_FLAGS");
	std::string flags = asked ? asked : "";
	std::ostringstream stem;
	stem << here << "/kernels/" << std::hex << std::hash<std::string>()(made.source + flags);
	made.library = stem.str() + ".so";
	if (access(made.library.c_str(), R_OK) == 0)
		return OK;
	/* after the look-up, since regular expressions take longer than everything else that a cached kernel needs; tests/cuda/run
	   empties the folder when this file changes */
	std::string text = rewritten(made.source);
	/* several processes and threads may be at the same kernel */
	static std::atomic<unsigned> count;
	std::string own = stem.str() + "." + std::to_string(getpid()) + "-" + std::to_string(count++), code = own + ".cpp", log = own + ".log", library = own + ".so";
	std::ofstream(code) << text;
	std::string command = "g++ " + read(here + "/flags") + flags +
	                      " -include '" + here + "/kernel.h' '" + code + "' '" + here + "/libcuda.so' -o '" + library + "' 2>'" + log + "'";
	int status = system(command.c_str());
	if (status == 0) {
		rename(code.c_str(), (stem.str() + ".cpp").c_str());
		std::ofstream(stem.str() + ".cu") << made.source;
		status = rename(library.c_str(), made.library.c_str());
	} else {
		made.log = "the stand-in cannot compile " + code + ":\n" + read(log);
		fprintf(stderr, "%s\n", made.log.c_str());
	}
	unlink(log.c_str());
	return status == 0 ? OK : COMPILATION;
}

extern "C" {
int nvrtcVersion(int *major, int *minor) { return *major = 12, *minor = 9, OK; }
int nvrtcCreateProgram(program **made, const char *source, const char *name, int headers, const char **texts, const char **names)
{
	*made = new program{source, "", ""};
	return OK;
}
int nvrtcCompileProgram(program *made, int count, const char **options) { return compile(*made); }
int nvrtcGetPTXSize(program *made, size_t *bytes) { return *bytes = made->library.size() + 1, OK; }
int nvrtcGetPTX(program *made, char *to) { return memcpy(to, made->library.c_str(), made->library.size() + 1), OK; }
int nvrtcGetProgramLogSize(program *made, size_t *bytes) { return *bytes = made->log.size() + 1, OK; }
int nvrtcGetProgramLog(program *made, char *to) { return memcpy(to, made->log.c_str(), made->log.size() + 1), OK; }
int nvrtcDestroyProgram(program **made) { return delete *made, *made = nullptr, OK; }
const char *nvrtcGetErrorString(int code) { return code == COMPILATION ? "the kernel does not compile" : "an error of the stand-in"; }
}
