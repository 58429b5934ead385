/* The logsumexp and Δ = Σ O ∘ dO of each row and head, side by side. Sixteen threads have a row of a head. */
struct alignas(16) Eight { Element each[8]; };

extern "C" __global__ void __launch_bounds__(256)
flash_delta(Element const* __restrict__ out, Element const* __restrict__ gradient, float const* __restrict__ lse, float* __restrict__ numbers, __grid_constant__ info_st const info)
{
	const u64 row = blockIdx.x * (u64)16 + threadIdx.x / 16;
	const u32 chunk = threadIdx.x % 16;
	float sum = 0;
	if (row < info.rows && chunk < CHUNKS) {
		const u64 at = row * DIM + chunk * 8;
		const Eight a = *(const Eight *)&out[at], b = *(const Eight *)&gradient[at];
#pragma unroll
		for (u32 e = 0; e < 8; e++)
			sum += (float)a.each[e] * (float)b.each[e];
	}
#pragma unroll
	for (u32 mask = 8; mask > 0; mask /= 2)
		sum += __shfl_xor_sync(~0u, sum, mask);
	if (row < info.rows && chunk == 0) {
		const u64 to = row * 2;
		store_pair(&numbers[to], *&lse[row], sum);
	}
}
