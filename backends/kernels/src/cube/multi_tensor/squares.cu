/* Sums of squares of matrices: one of each block of threads, always in one order. */
struct matrix_st {
	u64 elements;
};
struct info_st {
	u64 static_meta[BUFFER_COUNT];
	matrix_st matrices[MATRICES];
	u64 first;
};

extern "C" __global__ void __launch_bounds__(THREADS)
multi_tensor_squares(BUFFERS, __grid_constant__ info_st const info)
{
	__shared__ __align__(16) char shared[THREADS / 32 * sizeof(float)];
	float *const warps = (float *)shared;
	u32 block = blockIdx.x;
	const u32 matrix = matrix_of(info.matrices, block), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const u64 elements = info.matrices[matrix].elements, begin = (u64)block * CHUNK, end = min(begin + CHUNK, elements);
	/* the place of the last element, which the stand-in for a GPU compares with the buffer's end */
	const u64 top = elements - 1, to = info.first + blockIdx.x;
	const Element *const numbers = NUMBERS(matrix, top) - top;
	float sum = 0;
#pragma unroll 4
	for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
		const float number = (float)numbers[i];
		sum += number * number;
	}
	for (u32 distance = 16; distance > 0; distance /= 2)
		sum += __shfl_xor_sync(0xffffffff, sum, distance);
	if (lane == 0)
		warps[warp] = sum;
	__syncthreads();
	if (threadIdx.x == 0) {
		for (u32 i = 1; i < THREADS / 32; i++)
			sum += warps[i];
		*SUMS(0, to) = sum;
	}
}
