/* Sums of a warpgroup by Hopper's `wgmma`, which reads both tiles where they lie: 64 rows of the block's tile. */
struct Sums {
	float sums[TILE_N / 2];
	u32 row, column;

	DEVICE Sums()
	{
		const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
		row = warp * 16 + lane / 4;
		column = lane % 4 * 2;
#pragma unroll
		for (u32 i = 0; i < TILE_N / 2; i++)
			sums[i] = 0;
	}

	/* How a tile lies from `at` on (PTX ISA, "Matrix Descriptor Format"): bytes between blocks of 64 outputs and between eight rows of it, in
	 * units of 16, and its pattern. */
	template <bool BY_INPUTS> DEVICE static u64 descriptor(u32 at)
	{
		const u64 lead = BY_INPUTS ? 1 : BLOCK_BYTES >> 4, stride = (BY_INPUTS ? 8 * INPUTS * 2 : 8 * 128) >> 4, pattern = BY_INPUTS ? 2 : 1;
		return (u64)((at & 0x3ffff) >> 4) | lead << 16 | stride << 32 | pattern << 62;
	}

	/* Begins to add the products of a tile. */
	DEVICE void add(u32 a, u32 b)
	{
		a += threadIdx.x / 128 * (A_BY_INPUTS ? 64 * INPUTS * 2 : BLOCK_BYTES);
		warpgroup_arrive();
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			u64 left = descriptor<A_BY_INPUTS>(a + half * (A_BY_INPUTS ? 32 : 16 * 128));
			u64 right = descriptor<B_BY_INPUTS>(b + half * (B_BY_INPUTS ? 32 : 16 * 128));
			warpgroup_multiply_add<A_BY_INPUTS, B_BY_INPUTS>(sums, left, right);
		}
		warpgroup_commit();
	}
	static const bool IN_BACKGROUND = true;
	DEVICE void arrive() { fence_async_proxy(); }
	DEVICE void wait() { warpgroup_wait(); }
	static const u32 ROWS = 1, COLUMNS = TILE_N / 8;
	DEVICE float sum(u32 i, u32 j, u32 e) const { return sums[j * 4 + e]; }
};
