/* A product of few rows in half precision with a matrix, with what stands before and after it where tokens are decoded: the norm of the
 * rows; the gate of an MLP, or the sum with the residual stream.
 *
 * A block computes TILES tiles of 16 rows by 32 outputs. Its warps take 32 inputs in turn, and read both operands from where they lie into
 * registers: which inputs a lane has does not matter as long as they are the same of both, so each reads eight side by side. Sums of a row
 * are the same however many rows there are.
 */
struct info_st {
	u64 static_meta[7];
	/* Rows, inputs, outputs, inputs from a row of the matrix to the next, groups of TILES tiles of rows. */
	u64 rows, inner, outputs, pitch, groups;
};

static const u32 WARPS = 8, THREADS = WARPS * 32, OUTPUTS = 32, INPUTS = 32, SIDE = 16;
/* Tiles whose sums are in shared memory at a time, and floats of a row there. */
static const u32 HELD = TILES < 2 ? TILES : 2, HEIGHT = HELD * SIDE, PITCH = OUTPUTS + 8;
/* Columns whose squares are summed together, and sums of such that are summed one by one (norm.rs). */
static const u32 CHUNK = 32, CLASSES = 8;
/* Inputs of a warp that are under way. */
static const u32 AHEAD = TILES > 2 ? 1 : 2;

/* Eight numbers. */
struct alignas(16) Eight { u32 pairs[4]; };
struct alignas(4) Pair { Element x, y; };

DEVICE Eight eight_zeros() { return Eight{{0, 0, 0, 0}}; }
DEVICE Pair pair_of(u32 pair) { return *(Pair *)&pair; }

/* Eight numbers of a row times its reciprocal and the norm's weights. */
DEVICE Eight normed(const Eight &x, float reciprocal, const float (&weights)[8])
{
	Eight y;
#pragma unroll
	for (u32 i = 0; i < 4; i++) {
		const Pair pair = pair_of(x.pairs[i]);
		y.pairs[i] = pack_pair((float)pair.x * reciprocal * weights[i * 2], (float)pair.y * reciprocal * weights[i * 2 + 1]);
	}
	return y;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_linear(Element const* __restrict__ x, Element const* __restrict__ w, Element const* __restrict__ norm, float const* __restrict__ squares, Element const* __restrict__ base, Element* __restrict__ out, float* __restrict__ out_squares, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char shared[WARPS * HEIGHT * PITCH * 4];
	const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_of = lane / 4, quarter = lane % 4;
	const u32 rows = (u32)info.rows, outputs = (u32)info.outputs, inner = (u32)info.inner, groups = (u32)info.groups;
	const u32 first_row = blockIdx.x % groups * TILES * SIDE, first_output = blockIdx.x / groups * OUTPUTS;

	float reciprocals[TILES * 2];
	if (NORMED) {
		float *const of = (float *)shared;
		const u32 chunks = inner / CHUNK;
		for (u32 i = threadIdx.x; i < TILES * SIDE * CLASSES; i += THREADS) {
			const u32 row = min(first_row + i / CLASSES, rows - 1);
			float sum = 0;
			for (u32 chunk = i % CLASSES; chunk < chunks; chunk += CLASSES) {
				const u64 at = (u64)row * chunks + chunk;
				sum += *&squares[at];
			}
#pragma unroll
			for (u32 other = 1; other < CLASSES; other *= 2)
				sum += __shfl_xor_sync(~0u, sum, other);
			if (i % CLASSES == 0)
				of[i / CLASSES] = 1.0f / sqrtf(sum / (float)inner + EPS);
		}
		__syncthreads();
#pragma unroll
		for (u32 i = 0; i < TILES * 2; i++)
			reciprocals[i] = of[i * 8 + row_of];
		__syncthreads();
	}

	float sums[TILES][OUTPUTS / 8][4];
#pragma unroll
	for (u32 i = 0; i < TILES; i++)
#pragma unroll
		for (u32 j = 0; j < OUTPUTS / 8; j++)
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				sums[i][j][e] = 0;
	for (u32 from = warp * INPUTS; from < inner; from += WARPS * INPUTS * AHEAD) {
		Eight right[AHEAD][OUTPUTS / 8];
#pragma unroll
		for (u32 step = 0; step < AHEAD; step++) {
			const u32 input = from + step * WARPS * INPUTS + quarter * 8;
#pragma unroll
			for (u32 j = 0; j < OUTPUTS / 8; j++) {
				const u64 at = min(first_output + j * 8 + row_of, outputs - 1) * info.pitch + input;
				right[step][j] = input < inner ? *(const Eight *)&w[at] : eight_zeros();
			}
		}
#pragma unroll
		for (u32 step = 0; step < AHEAD; step++) {
			const u32 input = from + step * WARPS * INPUTS + quarter * 8;
			const u64 norm_at = input;
			const bool any = input < inner;
			float weights[8];
			if (NORMED) {
				const Eight eight = any ? *(const Eight *)&norm[norm_at] : eight_zeros();
#pragma unroll
				for (u32 i = 0; i < 4; i++) {
					const Pair pair = pair_of(eight.pairs[i]);
					weights[i * 2] = (float)pair.x + OFFSET;
					weights[i * 2 + 1] = (float)pair.y + OFFSET;
				}
			}
#pragma unroll
			for (u32 i = 0; i < TILES; i++) {
				Eight left[2];
#pragma unroll
				for (u32 half = 0; half < 2; half++) {
					const u64 at = min(first_row + i * SIDE + half * 8 + row_of, rows - 1) * info.inner + input;
					left[half] = any ? *(const Eight *)&x[at] : eight_zeros();
					if (NORMED)
						left[half] = normed(left[half], reciprocals[i * 2 + half], weights);
				}
#pragma unroll
				for (u32 both = 0; both < 4; both += 2) {
					const u32 a[4] = {left[0].pairs[both], left[1].pairs[both], left[0].pairs[both + 1], left[1].pairs[both + 1]};
#pragma unroll
					for (u32 j = 0; j < OUTPUTS / 8; j++)
						multiply_add(sums[i][j], a, right[step][j].pairs[both], right[step][j].pairs[both + 1]);
				}
			}
		}
	}

	float *const partial = (float *)shared;
	/* Of a row, eight outputs from a column on: the sums of all warps. */
	auto summed = [&](float (&to)[8], u32 row, u32 column) {
#pragma unroll
		for (u32 e = 0; e < 8; e++)
			to[e] = 0;
#pragma unroll
		for (u32 of = 0; of < WARPS; of++)
#pragma unroll
			for (u32 e = 0; e < 8; e++)
				to[e] += partial[(of * HEIGHT + row) * PITCH + column + e];
	};
#pragma unroll
	for (u32 first = 0; first < TILES; first += HELD) {
		if (first > 0)
			__syncthreads();
#pragma unroll
		for (u32 i = 0; i < HELD; i++)
#pragma unroll
			for (u32 j = 0; j < OUTPUTS / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e++)
					partial[(warp * HEIGHT + i * SIDE + row_of + e / 2 * 8) * PITCH + j * 8 + quarter * 2 + e % 2] = sums[first + i][j][e];
		__syncthreads();
		/* a thread has eight outputs of a row, and the eight beside them where these are what opens them */
		const u32 each = GATED ? 16 : 8, across = OUTPUTS / each;
		if (threadIdx.x < HEIGHT * across) {
			const u32 down = threadIdx.x / across, column = threadIdx.x % across * each, row = first_row + first * SIDE + down;
			const bool inside = row < rows && first_output + column < outputs;
			float own[8];
			summed(own, down, column);
			if (GATED) {
				float up[8];
				summed(up, down, column + 8);
#pragma unroll
				for (u32 e = 0; e < 8; e++)
					own[e] = gated(own[e], up[e]);
			}
			const u64 at = GATED ? (u64)row * (outputs / 2) + (first_output + column) / 2 : (u64)row * outputs + first_output + column;
			if (ADDS) {
				const Eight before = inside ? *(const Eight *)&base[at] : eight_zeros();
				float square = 0;
#pragma unroll
				for (u32 e = 0; e < 8; e++) {
					const Pair pair = pair_of(before.pairs[e / 2]);
					own[e] = (float)(Element)((float)(e % 2 ? pair.y : pair.x) + (float)(Element)own[e]);
					square = fmaf(own[e], own[e], square);
				}
				square += __shfl_xor_sync(~0u, square, 1);
				square += __shfl_xor_sync(~0u, square, 2);
				const u64 chunk = (u64)row * (outputs / CHUNK) + first_output / CHUNK;
				if (inside && column == 0)
					*&out_squares[chunk] = square;
			}
			if (inside) {
				Eight eight;
#pragma unroll
				for (u32 i = 0; i < 4; i++)
					eight.pairs[i] = pack_pair(own[i * 2], own[i * 2 + 1]);
				*(Eight *)&out[at] = eight;
			}
		}
	}
}
