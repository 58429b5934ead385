/* What a CUDA kernel finds when it is compiled for a CPU: threads of a block that wait for each other, warps, half precision, the
 * matrices of tensor cores, and mathematics. Names that CUDA gives are CUDA's; the compiler of the stand-in includes this before a
 * kernel's own text. A kernel that asks for something else does not compile.
 */
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct position { unsigned x, y, z; };

/* What a kernel knows of the thread that runs it. `slot` is what it shows the other threads of its warp, which lie beside it. */
struct lane {
	position thread;
	unsigned in_warp;
	bool ended;
	alignas(64) unsigned char slot[256];
	/* Copies to shared memory that are under way, by groups of which so many were closed. */
	struct copy { unsigned to; const char *from; unsigned group; } copied[64];
	unsigned copies, groups;
};

/* The thread and the block that run: there is one of each at a time. The driver has them; kernels are linked with it. */
struct block {
	position index, size, grid;
	char *shared;
};
extern lane *stand_in_lane;
extern block stand_in_block;
extern "C" void stand_in_wait_for_block();
extern "C" void stand_in_wait_for_warp();
/* A thread of the same warp. */
inline lane &stand_in_neighbour(unsigned in_warp) { return stand_in_lane[(int)in_warp - (int)stand_in_lane->in_warp]; }

/* An index of the `buffer`-th buffer that a kernel takes; one beyond its length ends the program. */
extern "C" void stand_in_stop(const char *what);
extern "C" void stand_in_beyond(unsigned buffer, uint64_t index, uint64_t length);
inline uint64_t stand_in_within(uint64_t index, uint64_t length, unsigned buffer)
{
	if (__builtin_expect(index >= length, 0))
		stand_in_beyond(buffer, index, length);
	return index;
}

#define threadIdx (stand_in_lane->thread)
#define blockIdx (stand_in_block.index)
#define blockDim (stand_in_block.size)
#define gridDim (stand_in_block.grid)
#define warpSize 32

inline void __syncthreads() { stand_in_wait_for_block(); }
inline void __syncwarp(unsigned = ~0u) { stand_in_wait_for_warp(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned __activemask() { return ~0u; }

/* Warps: every lane shows its value, waits, reads another's, and waits until all have read. */

template <typename T> T stand_in_exchange(const T &value, unsigned from)
{
	static_assert(sizeof(T) <= sizeof(lane::slot), "too large to be shown to a warp");
	memcpy(stand_in_lane->slot, &value, sizeof(T));
	stand_in_wait_for_warp();
	T result = value;
	if (from < 32 && !stand_in_neighbour(from).ended)
		memcpy(&result, stand_in_neighbour(from).slot, sizeof(T));
	stand_in_wait_for_warp();
	return result;
}

template <typename T> T __shfl_sync(unsigned, T value, unsigned from) { return stand_in_exchange(value, from % 32); }
template <typename T> T __shfl_xor_sync(unsigned, T value, unsigned mask) { return stand_in_exchange(value, stand_in_lane->in_warp ^ mask); }
template <typename T> T __shfl_up_sync(unsigned, T value, unsigned by) { return stand_in_exchange(value, stand_in_lane->in_warp - by); }
template <typename T> T __shfl_down_sync(unsigned, T value, unsigned by) { return stand_in_exchange(value, stand_in_lane->in_warp + by); }

inline unsigned __ballot_sync(unsigned, bool value)
{
	unsigned result = 0;
	stand_in_lane->slot[0] = value;
	stand_in_wait_for_warp();
	for (unsigned other = 0; other < 32; other++)
		if (!stand_in_neighbour(other).ended)
			result |= (unsigned)stand_in_neighbour(other).slot[0] << other;
	stand_in_wait_for_warp();
	return result;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value); }
inline bool __all_sync(unsigned mask, bool value) { return !__ballot_sync(mask, !value); }

/* Whole numbers. */

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
inline int32_t __mulhi(int32_t a, int32_t b) { return (int64_t)a * b >> 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (unsigned __int128)a * b >> 64; }
inline int __clz(uint32_t a) { return a ? __builtin_clz(a) : 32; }
inline int __clzll(uint64_t a) { return a ? __builtin_clzll(a) : 64; }
inline int __popc(uint32_t a) { return __builtin_popcount(a); }
inline int __popcll(uint64_t a) { return __builtin_popcountll(a); }
inline int __ffs(uint32_t a) { return __builtin_ffs(a); }
inline int __ffsll(uint64_t a) { return __builtin_ffsll(a); }
inline uint32_t __brev(uint32_t a)
{
	uint32_t result = 0;
	for (int bit = 0; bit < 32; bit++)
		result |= (a >> bit & 1) << (31 - bit);
	return result;
}

/* Half precision: a number is kept in 16 bits, worked on in f32, and rounded to the nearest once, as a card does. */

inline float stand_in_bits(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, 4);
	return value;
}

struct stand_in_bf16 {
	static float wide(uint16_t bits) { return stand_in_bits((uint32_t)bits << 16); }
	static uint16_t narrow(float value)
	{
		uint32_t bits;
		memcpy(&bits, &value, 4);
		if (value != value)
			return 0x7fff;
		return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
	}
};

struct stand_in_f16 {
	static float wide(uint16_t bits) { _Float16 value; memcpy(&value, &bits, 2); return value; }
	static uint16_t narrow(float value) { _Float16 half = value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }
};

template <typename Format> struct stand_in_half {
	uint16_t bits;
	stand_in_half() = default;
	template <typename T, typename = typename std::enable_if<std::is_arithmetic<T>::value>::type>
	stand_in_half(T value) : bits(Format::narrow((float)value)) {}
	template <typename Other> explicit stand_in_half(stand_in_half<Other> other) : bits(Format::narrow((float)other)) {}
	operator float() const { return Format::wide(bits); }
	stand_in_half &operator+=(stand_in_half other) { return *this = *this + other; }
	friend stand_in_half operator+(stand_in_half a, stand_in_half b) { return (float)a + (float)b; }
	friend stand_in_half operator-(stand_in_half a, stand_in_half b) { return (float)a - (float)b; }
	friend stand_in_half operator*(stand_in_half a, stand_in_half b) { return (float)a * (float)b; }
	friend stand_in_half operator/(stand_in_half a, stand_in_half b) { return (float)a / (float)b; }
	friend stand_in_half operator-(stand_in_half a) { return -(float)a; }
	friend bool operator<(stand_in_half a, stand_in_half b) { return (float)a < (float)b; }
	friend bool operator>(stand_in_half a, stand_in_half b) { return (float)a > (float)b; }
	friend bool operator<=(stand_in_half a, stand_in_half b) { return (float)a <= (float)b; }
	friend bool operator>=(stand_in_half a, stand_in_half b) { return (float)a >= (float)b; }
	friend bool operator==(stand_in_half a, stand_in_half b) { return (float)a == (float)b; }
	friend bool operator!=(stand_in_half a, stand_in_half b) { return (float)a != (float)b; }
};
typedef stand_in_half<stand_in_bf16> __nv_bfloat16;
typedef stand_in_half<stand_in_f16> __half;

#define STAND_IN_OF_HALF(name, formula) \
	template <typename F> stand_in_half<F> name(stand_in_half<F> a) { return formula((float)a); }
STAND_IN_OF_HALF(hexp, expf)
STAND_IN_OF_HALF(hlog, logf)
STAND_IN_OF_HALF(hsqrt, sqrtf)
STAND_IN_OF_HALF(htanh, tanhf)
STAND_IN_OF_HALF(hsin, sinf)
STAND_IN_OF_HALF(hcos, cosf)
STAND_IN_OF_HALF(hfloor, floorf)
STAND_IN_OF_HALF(hceil, ceilf)
STAND_IN_OF_HALF(__habs, fabsf)
STAND_IN_OF_HALF(exp, expf)
STAND_IN_OF_HALF(log, logf)
STAND_IN_OF_HALF(sqrt, sqrtf)
STAND_IN_OF_HALF(tanh, tanhf)
#undef STAND_IN_OF_HALF
template <typename F> stand_in_half<F> __hmax(stand_in_half<F> a, stand_in_half<F> b) { return fmaxf(a, b); }
template <typename F> stand_in_half<F> __hmin(stand_in_half<F> a, stand_in_half<F> b) { return fminf(a, b); }
template <typename F> stand_in_half<F> __hfma(stand_in_half<F> a, stand_in_half<F> b, stand_in_half<F> c)
{
	return std::fma((double)(float)a, (double)(float)b, (double)(float)c);
}
template <typename F> bool __hisnan(stand_in_half<F> a) { return std::isnan((float)a); }

/* Mathematics of f32 and f64, and the smaller and larger of two numbers of one type. */

using std::abs, std::acos, std::atan, std::atan2, std::ceil, std::cos, std::cosh, std::erf, std::exp, std::exp2, std::expm1, std::floor,
	std::fma, std::isinf, std::isnan, std::log, std::log1p, std::log2, std::pow, std::rint, std::round, std::sin, std::sinh, std::sqrt,
	std::tan, std::tanh, std::trunc;
inline float rsqrt(float a) { return 1.0f / std::sqrt(a); }
inline double rsqrt(double a) { return 1.0 / std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
inline float __logf(float a) { return std::log(a); }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return 1.0f / std::sqrt(a); }
inline float __powf(float a, float b) { return std::pow(a, b); }

template <typename T> T stand_in_smaller(T a, T b) { return b < a ? b : a; }
template <typename T> T stand_in_larger(T a, T b) { return a < b ? b : a; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#define STAND_IN_OF_WHOLE(T) \
	inline T min(T a, T b) { return stand_in_smaller(a, b); } \
	inline T max(T a, T b) { return stand_in_larger(a, b); }
STAND_IN_OF_WHOLE(int)
STAND_IN_OF_WHOLE(unsigned)
STAND_IN_OF_WHOLE(long)
STAND_IN_OF_WHOLE(unsigned long)
STAND_IN_OF_WHOLE(unsigned long long)
#undef STAND_IN_OF_WHOLE

/* Atomics: blocks run one after the other and threads change only where they wait, so a plain addition is one. */

template <typename T> T stand_in_atomic_add(void *place, T value)
{
	T before;
	memcpy(&before, place, sizeof(T));
	T after = before + value;
	memcpy(place, &after, sizeof(T));
	return before;
}
inline uint16_t stand_in_atomic_add_f16(void *place, uint16_t value)
{
	__half addend;
	addend.bits = value;
	return stand_in_atomic_add(place, addend).bits;
}
inline uint16_t stand_in_atomic_add_bf16(void *place, uint16_t value)
{
	__nv_bfloat16 addend;
	addend.bits = value;
	return stand_in_atomic_add(place, addend).bits;
}

/* Matrices of tensor cores: every lane holds a run of elements, row after row, and shows it to the others for a product. */

namespace nvcuda {
namespace wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K> struct shape { static constexpr int rows = M, columns = N; };
template <int M, int N, int K> struct shape<matrix_a, M, N, K> { static constexpr int rows = M, columns = K; };
template <int M, int N, int K> struct shape<matrix_b, M, N, K> { static constexpr int rows = K, columns = N; };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
	static constexpr int rows = shape<Use, M, N, K>::rows, columns = shape<Use, M, N, K>::columns, num_elements = rows * columns / 32;
	T x[num_elements];
};

template <typename F, typename T> void stand_in_load(F &to, const T *from, unsigned stride, bool by_rows)
{
	stand_in_wait_for_warp();
	for (int i = 0; i < F::num_elements; i++) {
		unsigned element = stand_in_lane->in_warp * F::num_elements + i, row = element / F::columns, column = element % F::columns;
		to.x[i] = from[by_rows ? row * stride + column : column * stride + row];
	}
}

template <typename Use, int M, int N, int K, typename T> void load_matrix_sync(fragment<Use, M, N, K, T, row_major> &to, const T *from, unsigned stride)
{
	stand_in_load(to, from, stride, true);
}
template <typename Use, int M, int N, int K, typename T> void load_matrix_sync(fragment<Use, M, N, K, T, col_major> &to, const T *from, unsigned stride)
{
	stand_in_load(to, from, stride, false);
}
template <int M, int N, int K, typename T>
void load_matrix_sync(fragment<accumulator, M, N, K, T> &to, const T *from, unsigned stride, layout_t layout)
{
	stand_in_load(to, from, stride, layout == mem_row_major);
}

template <int M, int N, int K, typename T>
void store_matrix_sync(T *to, const fragment<accumulator, M, N, K, T> &from, unsigned stride, layout_t layout)
{
	stand_in_wait_for_warp();
	for (int i = 0; i < from.num_elements; i++) {
		unsigned element = stand_in_lane->in_warp * from.num_elements + i, row = element / N, column = element % N;
		to[layout == mem_row_major ? row * stride + column : column * stride + row] = from.x[i];
	}
	stand_in_wait_for_warp();
}

template <typename F, typename T> void fill_fragment(F &matrix, T value)
{
	for (auto &element : matrix.x)
		element = value;
}

/* Sums are made in f32, in the order of K, by the first thread of a warp for all. */
template <int M, int N, int K, typename T, typename LayoutA, typename LayoutB, typename Sum>
void mma_sync(fragment<accumulator, M, N, K, Sum> &to, const fragment<matrix_a, M, N, K, T, LayoutA> &a,
              const fragment<matrix_b, M, N, K, T, LayoutB> &b, const fragment<accumulator, M, N, K, Sum> &c)
{
	struct shown { T a[M * K / 32], b[K * N / 32]; Sum c[M * N / 32]; };
	static_assert(sizeof(shown) <= sizeof(lane::slot), "too large to be shown to a warp");
	auto of = [](unsigned thread) { return (shown *)stand_in_neighbour(thread).slot; };
	shown *own = of(stand_in_lane->in_warp);
	memcpy(own->a, a.x, sizeof a.x);
	memcpy(own->b, b.x, sizeof b.x);
	memcpy(own->c, c.x, sizeof c.x);
	stand_in_wait_for_warp();
	if (stand_in_lane->in_warp == 0) {
		float left[M][K], right[K][N], sums[M][N];
		for (int i = 0; i < M * K; i++)
			left[i / K][i % K] = of(i / a.num_elements)->a[i % a.num_elements];
		for (int i = 0; i < K * N; i++)
			right[i / N][i % N] = of(i / b.num_elements)->b[i % b.num_elements];
		for (int i = 0; i < M * N; i++)
			sums[i / N][i % N] = of(i / c.num_elements)->c[i % c.num_elements];
		for (int row = 0; row < M; row++)
			for (int k = 0; k < K; k++)
				for (int column = 0; column < N; column++)
					sums[row][column] += left[row][k] * right[k][column];
		for (int i = 0; i < M * N; i++)
			of(i / c.num_elements)->c[i % c.num_elements] = sums[i / N][i % N];
	}
	stand_in_wait_for_warp();
	memcpy(to.x, own->c, sizeof to.x);
	stand_in_wait_for_warp();
}
} // namespace wmma
} // namespace nvcuda

#include "ptx.h"

/* A launch: what a kernel takes is copied when the launch is asked for, and given to each thread when it runs. */

template <typename... A> using stand_in_arguments = std::tuple<typename std::remove_const<A>::type...>;

template <typename... A, size_t... I>
stand_in_arguments<A...> *stand_in_copied(void (*)(A...), void **arguments, std::index_sequence<I...>)
{
	return new stand_in_arguments<A...>(*(typename std::remove_const<A>::type *)arguments[I]...);
}
template <typename... A> stand_in_arguments<A...> *stand_in_copied(void (*kernel)(A...), void **arguments)
{
	return stand_in_copied(kernel, arguments, std::index_sequence_for<A...>());
}
template <typename... A> void stand_in_call(void (*kernel)(A...), void *held) { std::apply(kernel, *(stand_in_arguments<A...> *)held); }
template <typename... A> void stand_in_forget(void (*)(A...), void *held) { delete (stand_in_arguments<A...> *)held; }
