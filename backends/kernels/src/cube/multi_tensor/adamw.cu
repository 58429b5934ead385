/* AdamW (Loshchilov & Hutter, 2019) of slices of matrices, in the arithmetic of `update` in adamw.rs. A slice begins at the `start`-th element of its
 * parameter, and has moments of its `elements`; with `fresh` they are zero before. `second_root` is the root of the second moment's bias
 * correction.
 */
struct slice_st {
	u64 start, elements;
	float clip, b1, rest1, b2, rest2, second_root, eps, rate, keep;
	u32 fresh;
};
struct info_st {
	u64 static_meta[BUFFER_COUNT];
	slice_st slices[MATRICES];
};

extern "C" __global__ void __launch_bounds__(THREADS)
multi_tensor_adamw(BUFFERS, __grid_constant__ info_st const info)
{
	u32 block = blockIdx.x;
	const u32 matrix = matrix_of(info.slices, block);
	const slice_st &slice = info.slices[matrix];
	const u64 begin = (u64)block * CHUNK, end = min(begin + CHUNK, slice.elements);
	/* places of the last elements, which the stand-in for a GPU compares with the buffers' ends */
	const u64 top = slice.elements - 1, last = slice.start + top;
	float *const values = VALUE(matrix, last) - top;
	const Gradient *const gradients = GRADIENT(matrix, last) - top;
	const Moment *const firsts = FIRST(matrix, top) - top, *const seconds = SECOND(matrix, top) - top;
	Moment *const new_firsts = NEW_FIRST(matrix, top) - top, *const new_seconds = NEW_SECOND(matrix, top) - top;
#ifdef STORED
	Stored *const stored = STORED(matrix, last) - top;
#endif
#pragma unroll 2
	for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
		const float g = (float)gradients[i] * slice.clip;
		float m = g * slice.rest1, v = g * g * slice.rest2;
		if (!slice.fresh) {
			m += (float)firsts[i] * slice.b1;
			v += (float)seconds[i] * slice.b2;
		}
		const float change = m / (sqrtf(v) / slice.second_root + slice.eps) * slice.rate;
		const float value = values[i] * slice.keep - change;
		values[i] = value;
#ifdef STORED
		stored[i] = (Stored)value;
#endif
		new_firsts[i] = (Moment)m;
		new_seconds[i] = (Moment)v;
	}
}
