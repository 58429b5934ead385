/* Rows of heads of DIM numbers in half precision in shared memory, as operands of tensor cores, and scores of attention. */
static const u32 CHUNKS = DIM / 8, PITCH = DIM * 2;
static const float LOG2E = 1.4426950408889634f, MASKED = -1e30f;

/* Where eight numbers of a row are in a tile: swizzled, so that those of eight rows lie in different banks. */
DEVICE u32 place(u32 row, u32 chunk) { return row * PITCH + ((chunk ^ (DIM % 64 == 0 ? row & 7 : row >> 1 & 3)) << 4); }

/* Left operands of a warp's rows; right operands with the inputs side by side, and with the outputs side by side. */
DEVICE void left(u32 (&to)[4], u32 tile, u32 row, u32 step)
{
	const u32 lane = threadIdx.x % 32;
	load_matrices(to, tile + place(row + (lane & 15), step * 2 + (lane >> 4)));
}
DEVICE void right(u32 (&to)[4], u32 tile, u32 row, u32 step)
{
	const u32 lane = threadIdx.x % 32;
	load_matrices(to, tile + place(row + (lane & 7) + (lane >> 4) * 8, step * 2 + (lane >> 3 & 1)));
}
DEVICE void right_transposed(u32 (&to)[4], u32 tile, u32 row, u32 columns)
{
	const u32 lane = threadIdx.x % 32;
	load_matrices_transposed(to, tile + place(row + (lane & 15), columns * 2 + (lane >> 4)));
}

DEVICE void store_pair(Element *to, float first, float second) { *(u32 *)to = pack_pair(first, second); }
struct alignas(8) Pair { float first, second; };
DEVICE void store_pair(float *to, float first, float second) { *(Pair *)to = Pair{first, second}; }

/* A score in units of log 2, given the product of a query and a key, and the factor of its derivative. */
DEVICE float scored(float product, float &slope)
{
	/* rounded here: a subtraction that follows would take the product in one kernel and not in another */
	slope = 1;
	if (!CAPPED)
		return __fmul_rn(product, SCALE * LOG2E);
	const float t = tanhf(product * SCALE / CAP);
	slope = 1 - t * t;
	return __fmul_rn(t * CAP, LOG2E);
}

/* A step of online softmax of a row (Milakov and Gimelshein, 2018): scores of a quad of threads become weights relative to the largest so far,
 * `top`, to which `total` (of this thread's columns) and sums are rescaled. `half` is which of a thread's two rows. */
template <u32 N> DEVICE void weigh(float (&scores)[N][4], u32 half, float &top, float &total, float (&sums)[DIM / 8][4])
{
	float largest = top, sum = 0;
#pragma unroll
	for (u32 j = 0; j < N; j++)
#pragma unroll
		for (u32 e = 0; e < 2; e++)
			largest = fmaxf(largest, scores[j][half * 2 + e]);
	largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
	largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
	/* of a row that has seen no key yet, masked scores must not count */
	const float level = largest > MASKED / 2 ? largest : 0, factor = exp2_approx(top - level);
	top = largest;
#pragma unroll
	for (u32 j = 0; j < N; j++)
#pragma unroll
		for (u32 e = 0; e < 2; e++) {
			float &z = scores[j][half * 2 + e];
			z = exp2_approx(z - level);
			sum += z;
		}
	total = fmaf(total, factor, sum);
#pragma unroll
	for (u32 j = 0; j < DIM / 8; j++)
#pragma unroll
		for (u32 e = 0; e < 2; e++)
			sums[j][half * 2 + e] *= factor;
}

/* What a row's sums are multiplied by at the end, given its largest score and the sum of a quad's weights, once its sink (MASKED if there is
 * none) is among them; `level` and `total` become those with the sink. */
DEVICE float share(float &level, float &total, float sink)
{
	total += __shfl_xor_sync(~0u, total, 1);
	total += __shfl_xor_sync(~0u, total, 2);
	const float top = level;
	level = fmaxf(top, sink);
	const float kept = exp2_approx(top - level);
	if (SINKS)
		total = fmaf(total, kept, exp2_approx(sink - level));
	return kept / total;
}
