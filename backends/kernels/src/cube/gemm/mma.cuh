/* Sums of a warp by `mma.sync`: WARP_M × WARP_N of the block's tile, a quarter of it. */
static const u32 WARP_M = TILE_M / 2, WARP_N = TILE_N / 2;

struct Sums {
	float sums[WARP_M / 16][WARP_N / 8][4];
	u32 row, column, a_at[2], b_at[2];

	DEVICE Sums()
	{
		const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, eighth = lane & 7, low = lane >> 3 & 1, high = lane >> 4;
		const u32 m = warp / (TILE_N / WARP_N) * WARP_M, n = warp % (TILE_N / WARP_N) * WARP_N;
		row = m + lane / 4;
		column = n + lane % 4 * 2;
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			a_at[half] = A_BY_INPUTS ? place_by_inputs(m + low * 8 + eighth, half * 2 + high)
			                         : place_by_outputs(half * 16 + high * 8 + eighth, m / 8 + low);
			b_at[half] = B_BY_INPUTS ? place_by_inputs(n + high * 8 + eighth, half * 2 + low)
			                         : place_by_outputs(half * 16 + low * 8 + eighth, n / 8 + high);
		}
#pragma unroll
		for (u32 i = 0; i < WARP_M / 16; i++)
#pragma unroll
			for (u32 j = 0; j < WARP_N / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e++)
					sums[i][j][e] = 0;
	}

	/* Sixteen outputs on: by outputs these are two chunks, which the pattern of the block leaves where an exclusive or finds them. */
	template <bool BY_INPUTS> DEVICE static void load(u32 (&to)[4], u32 tile, u32 at, u32 i)
	{
		if (BY_INPUTS)
			load_matrices(to, tile + at + i * 16 * (INPUTS * 2));
		else
			load_matrices_transposed(to, tile + (at ^ i * 32));
	}

	/* Adds the products of a tile. */
	DEVICE void add(u32 a, u32 b)
	{
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			u32 left[WARP_M / 16][4], right[WARP_N / 16][4];
#pragma unroll
			for (u32 i = 0; i < WARP_M / 16; i++)
				load<A_BY_INPUTS>(left[i], a, a_at[half], i);
#pragma unroll
			for (u32 j = 0; j < WARP_N / 16; j++)
				load<B_BY_INPUTS>(right[j], b, b_at[half], j);
#pragma unroll
			for (u32 i = 0; i < WARP_M / 16; i++)
#pragma unroll
				for (u32 j = 0; j < WARP_N / 8; j++)
					multiply_add(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
		}
	}
	static const bool IN_BACKGROUND = false;
	DEVICE void arrive() {}
	DEVICE void wait() {}
	static const u32 ROWS = WARP_M / 16, COLUMNS = WARP_N / 8;
	/* Of the i-th 16 rows and the j-th 8 columns of a warp: two neighbours in its row, or eight rows on. */
	DEVICE float sum(u32 i, u32 j, u32 e) const { return sums[i][j][e]; }
};
