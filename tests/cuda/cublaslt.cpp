/* Stands in for cuBLASLt on the cards of driver.cpp: the functions that backends/kernels/src/cube/cublaslt.rs asks for. It tests what
 * they are asked for and in which order streams run, and says nothing of the library's speed or of its order of sums.
 *
 * A product reads its matrices when its stream has come to it. What does not fit together is CUBLAS_STATUS_INVALID_VALUE, as are
 * addresses that are not aligned as a preference says.
 *
 * STAND_IN_CUBLASLT is something that goes wrong:
 *
 *   none             there is no library (tests/cuda/run leaves it out)
 *   unsupported      it has no kernel for any product
 *   failing          a product cannot be launched
 *
 * Codes are cublasStatus_t's. */
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

enum { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { F32 = 0, F16 = 2, BF16 = 14 };
enum { PLAIN = 1, WITH_BIAS = 4 };

typedef void *handle;

struct layout { int type; uint64_t rows, columns; int64_t pitch; };
struct description { int transposed[2] = {0, 0}; int epilogue = PLAIN; uint64_t bias = 0; };
struct preference { uint64_t workspace = 0; uint32_t alignment[4] = {256, 256, 256, 256}; };
/* cublasLtMatmulAlgo_t and cublasLtMatmulHeuristicResult_t. */
struct algorithm { uint64_t data[8]; };
struct heuristic { algorithm algo; size_t workspace; int state; float waves; int reserved[4]; };

static bool goes_wrong(const char *what)
{
	const char *setting = getenv("STAND_IN_CUBLASLT");
	return setting && !strcmp(setting, what);
}

static float value(const void *from, int type, uint64_t at)
{
	if (type == F32)
		return ((const float *)from)[at];
	if (type == F16)
		return (float)((const _Float16 *)from)[at];
	uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
	float result;
	return memcpy(&result, &bits, sizeof result), result;
}

static void store(void *to, int type, uint64_t at, float number)
{
	if (type == F32) {
		((float *)to)[at] = number;
	} else if (type == F16) {
		((_Float16 *)to)[at] = (_Float16)number;
	} else {
		uint32_t bits;
		memcpy(&bits, &number, sizeof bits);
		/* to nearest, ties to even; a NaN stays one */
		bits = number == number ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fc00000;
		((uint16_t *)to)[at] = (uint16_t)(bits >> 16);
	}
}

/* D = alpha · op(A) · op(B) + beta · C, by columns; what a stream is given. */
struct product {
	description of;
	float alpha, beta;
	const void *a, *b, *c;
	void *d;
	layout of_a, of_b, of_d;
};

/* Rows and columns of an operand. */
static uint64_t rows(const layout &of, int transposed) { return transposed ? of.columns : of.rows; }
static uint64_t columns(const layout &of, int transposed) { return transposed ? of.rows : of.columns; }

/* Columns of op(A)ᵀ or of op(B), one after the other, each with all inputs. */
static std::vector<float> columns_of(const void *from, const layout &of, bool as_stored)
{
	std::vector<float> all(of.rows * of.columns);
	for (uint64_t column = 0; column < of.columns; column++)
		for (uint64_t row = 0; row < of.rows; row++)
			all[as_stored ? column * of.rows + row : row * of.columns + column] = value(from, of.type, column * of.pitch + row);
	return all;
}

static int compute(void *argument)
{
	product *asked = (product *)argument;
	const product &p = *asked;
	uint64_t m = p.of_d.rows, n = p.of_d.columns, k = columns(p.of_a, p.of.transposed[0]);
	std::vector<float> a = columns_of(p.a, p.of_a, p.of.transposed[0]), b = columns_of(p.b, p.of_b, !p.of.transposed[1]);
	for (uint64_t column = 0; column < n; column++)
		for (uint64_t row = 0; row < m; row++) {
			float sum = 0;
			for (uint64_t input = 0; input < k; input++)
				sum += a[row * k + input] * b[column * k + input];
			uint64_t at = column * p.of_d.pitch + row;
			sum = p.alpha * sum + (p.beta == 0 ? 0 : p.beta * value(p.c, p.of_d.type, at));
			if (p.of.epilogue == WITH_BIAS)
				sum += value((const void *)p.of.bias, p.of_d.type, row);
			store(p.d, p.of_d.type, at, sum);
		}
	delete asked;
	return SUCCESS;
}

static bool fits(const description *of, const layout *a, const layout *b, const layout *c, const layout *d)
{
	const int *transposed = of->transposed;
	bool pitches = a->pitch >= (int64_t)a->rows && b->pitch >= (int64_t)b->rows && d->pitch >= (int64_t)d->rows;
	bool types = a->type == b->type && a->type != F32 && (d->type == a->type || d->type == F32) && c->type == d->type;
	bool sizes = rows(*a, transposed[0]) == d->rows && columns(*b, transposed[1]) == d->columns &&
	             columns(*a, transposed[0]) == rows(*b, transposed[1]) && c->rows == d->rows && c->columns == d->columns;
	return pitches && types && sizes && (of->epilogue == WITH_BIAS ? of->bias != 0 : of->epilogue == PLAIN);
}

extern "C" {

size_t cublasLtGetVersion(void) { return 120903; }
int cublasLtCreate(handle *made) { return *made = new char, SUCCESS; }

int cublasLtMatrixLayoutCreate(layout **made, int type, uint64_t rows, uint64_t columns, int64_t pitch)
{
	return *made = new layout{type, rows, columns, pitch}, SUCCESS;
}
int cublasLtMatrixLayoutDestroy(layout *of) { return delete of, SUCCESS; }

/* Sums in f32 (CUBLAS_COMPUTE_32F), and factors of it. */
int cublasLtMatmulDescCreate(description **made, int computes, int scales)
{
	if (computes != 68 || scales != F32)
		return NOT_SUPPORTED;
	return *made = new description, SUCCESS;
}
int cublasLtMatmulDescDestroy(description *of) { return delete of, SUCCESS; }

int cublasLtMatmulDescSetAttribute(description *of, int attribute, const void *from, size_t bytes)
{
	void *to = nullptr;
	size_t expected = sizeof(int);
	switch (attribute) {
	case 3: to = &of->transposed[0]; break;
	case 4: to = &of->transposed[1]; break;
	case 7: to = &of->epilogue; break;
	case 8: to = &of->bias, expected = sizeof of->bias; break;
	}
	return to && bytes == expected ? memcpy(to, from, bytes), SUCCESS : INVALID_VALUE;
}

int cublasLtMatmulPreferenceCreate(preference **made) { return *made = new preference, SUCCESS; }
int cublasLtMatmulPreferenceDestroy(preference *of) { return delete of, SUCCESS; }

int cublasLtMatmulPreferenceSetAttribute(preference *of, int attribute, const void *from, size_t bytes)
{
	if (attribute == 1 && bytes == sizeof of->workspace)
		return memcpy(&of->workspace, from, bytes), SUCCESS;
	if (attribute < 5 || attribute > 8 || bytes != sizeof of->alignment[0])
		return INVALID_VALUE;
	return memcpy(&of->alignment[attribute - 5], from, bytes), SUCCESS;
}

/* The algorithm keeps what it was made for. */
int cublasLtMatmulAlgoGetHeuristic(handle library, description *of, layout *a, layout *b, layout *c, layout *d, preference *wanted,
                                   int most, heuristic *found, int *count)
{
	if (!fits(of, a, b, c, d))
		return INVALID_VALUE;
	*count = most > 0 && !goes_wrong("unsupported");
	if (!*count)
		return NOT_SUPPORTED;
	*found = {};
	found->workspace = wanted->workspace;
	found->algo.data[0] = d->rows, found->algo.data[1] = d->columns, found->algo.data[2] = wanted->workspace;
	memcpy(&found->algo.data[3], wanted->alignment, sizeof wanted->alignment);
	return SUCCESS;
}

int cublasLtMatmul(handle library, description *of, const float *alpha, const void *a, layout *of_a, const void *b, layout *of_b,
                   const float *beta, const void *c, layout *of_c, void *d, layout *of_d, const algorithm *by, void *workspace,
                   size_t bytes, handle stream)
{
	uint32_t alignment[4];
	memcpy(alignment, &by->data[3], sizeof alignment);
	const void *places[] = {a, b, c, d};
	for (int each = 0; each < 4; each++)
		if (!alignment[each] || (uintptr_t)places[each] % alignment[each])
			return INVALID_VALUE;
	if (!fits(of, of_a, of_b, of_c, of_d) || by->data[0] != of_d->rows || by->data[1] != of_d->columns || by->data[2] > bytes || !workspace)
		return INVALID_VALUE;
	if (goes_wrong("failing"))
		return EXECUTION_FAILED;
	typedef int (*enqueue)(handle, const char *, int (*)(void *), void *);
	static handle driver = dlopen("libcuda.so", RTLD_NOW);
	static enqueue ask = driver ? (enqueue)dlsym(driver, "stand_in_enqueue") : nullptr;
	if (!ask) {
		fprintf(stderr, "stand-in for cuBLASLt: the driver's has no stand_in_enqueue\n");
		abort();
	}
	if (getenv("STAND_IN_SKIP_KERNELS"))
		return SUCCESS;
	product *next = new product{*of, *alpha, *beta, a, b, c, d, *of_a, *of_b, *of_d};
	return ask(stream, "matmul", compute, next) ? EXECUTION_FAILED : SUCCESS;
}

}
