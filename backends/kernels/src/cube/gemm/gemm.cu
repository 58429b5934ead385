/* Products of pairs of matrices in half precision, summed in f32 on tensor cores: each into a matrix of its own, or with SUMMED all of them
 * into one.
 *
 * A block of threads computes a tile of TILE_M × TILE_N numbers. Copies from global memory run STAGES - 1 tiles of 32 inputs ahead; what
 * lies beyond a matrix is zero. The blocks of `group` rows of tiles are neighbours, so that they find each other's columns in the level-2
 * cache. Where there are few tiles, the inputs are divided among several blocks, each with sums of its own (`part` tiles of inputs each).
 * With ADDS the sums, in f32, are added to what is in the result. With PLUS a matrix is added to each product before it is rounded, whose
 * rows are `plus_pitch` apart: 0 for a row that is added to every row. With GATED, eight columns of a gate lie before the eight that they
 * open, and the result has what comes through.
 *
 * The launcher writes in front of this, of tile.cuh and of mma.cuh or wgmma.cuh what they are compiled for, and here the buffers: LEFT,
 * RIGHT, PLUS_AT and OUT give places in those of a pair.
 */
struct pair_st {
	u64 m, n, k, a_pitch, b_pitch, plus_pitch;
};
struct info_st {
	u64 static_meta[BUFFER_COUNT];
	pair_st pairs[PAIRS];
	u64 part, group;
};

DEVICE u32 ceil_div(u64 a, u32 b) { return (u32)((a + b - 1) / b); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm(BUFFERS, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[STAGES * (TILE_M + TILE_N) * INPUTS * 2];
	/* the pair of this block's tile, or with SUMMED the first, and the tile among the pair's */
	u32 pair = 0, tile = blockIdx.x;
	if (!SUMMED)
		for (; pair + 1 < PAIRS; pair++) {
			const u32 all = ceil_div(info.pairs[pair].m, TILE_M) * ceil_div(info.pairs[pair].n, TILE_N);
			if (tile < all)
				break;
			tile -= all;
		}
	const u64 m = info.pairs[pair].m, n = info.pairs[pair].n;
	const u32 down = ceil_div(m, TILE_M), across = ceil_div(n, TILE_N), group = (u32)info.group;
	const u32 above = tile / (group * across) * group, high = min(down - above, group), within = tile % (group * across);
	const u64 first_row = (u64)(above + within % high) * TILE_M, first_column = (u64)(within / high) * TILE_N;

	/* the pair that is copied from, and how many of its tiles of inputs are left */
	u32 from = pair, first = blockIdx.y * (u32)info.part, all = 0;
	for (u32 i = pair; i < (SUMMED ? PAIRS : pair + 1); i++)
		all += ceil_div(info.pairs[i].k, INPUTS);
	const int steps = (int)min((u32)info.part, all - first);
	if (SUMMED)
		for (; first >= ceil_div(info.pairs[from].k, INPUTS); from++)
			first -= ceil_div(info.pairs[from].k, INPUTS);
	u32 left = ceil_div(info.pairs[from].k, INPUTS) - first;
	Copies<TILE_M, A_BY_INPUTS> rows(first_row, m, first * INPUTS, info.pairs[from].k, info.pairs[from].a_pitch);
	Copies<TILE_N, B_BY_INPUTS> columns(first_column, n, first * INPUTS, info.pairs[from].k, info.pairs[from].b_pitch);
	const u32 base = shared_address(tiles), SIZE = (TILE_M + TILE_N) * INPUTS * 2, B_AT = TILE_M * INPUTS * 2;
	auto copy = [&](u32 stage, bool any) {
		if (any) {
#pragma unroll
			for (u32 i = 0; i < rows.EACH; i++) {
				u64 at = rows.from(i);
				copy_async(base + stage * SIZE + rows.to(i), LEFT(from, at), rows.wanted(i));
			}
#pragma unroll
			for (u32 i = 0; i < columns.EACH; i++) {
				u64 at = columns.from(i);
				copy_async(base + stage * SIZE + B_AT + columns.to(i), RIGHT(from, at), columns.wanted(i));
			}
			rows.advance();
			columns.advance();
			if (SUMMED && --left == 0 && from + 1 < PAIRS) {
				const pair_st &next = info.pairs[++from];
				left = ceil_div(next.k, INPUTS);
				rows = Copies<TILE_M, A_BY_INPUTS>(first_row, m, 0, next.k, next.a_pitch);
				columns = Copies<TILE_N, B_BY_INPUTS>(first_column, n, 0, next.k, next.b_pitch);
			}
		}
		copy_async_commit();
	};

#pragma unroll
	for (int stage = 0; stage < STAGES - 1; stage++)
		copy(stage, stage < steps);
	Sums sums;
	u32 stage = 0;
	for (int step = 0; step < steps; step++) {
		copy_async_wait<STAGES - 2>();
		sums.arrive();
		__syncthreads();
		/* all threads have done with the stage before, which takes the next copies */
		const u32 before = stage == 0 ? STAGES - 1 : stage - 1;
		if (sums.IN_BACKGROUND)
			sums.add(base + stage * SIZE, base + stage * SIZE + B_AT);
		copy(before, step + STAGES - 1 < steps);
		if (!sums.IN_BACKGROUND)
			sums.add(base + stage * SIZE, base + stage * SIZE + B_AT);
		sums.wait();
		stage = stage + 1 == STAGES ? 0 : stage + 1;
	}

#pragma unroll
	for (u32 i = 0; i < sums.ROWS; i++)
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			const u64 row = first_row + sums.row + i * 16 + half * 8;
			if (row >= m)
				continue;
#pragma unroll
			for (u32 j = 0; j < sums.COLUMNS; j += GATED ? 2 : 1) {
				const u64 column = first_column + sums.column + j * 8;
				if (column >= n)
					continue;
				if (GATED) {
					const u64 at = row * (n / 2) + column / 16 * 8 + column % 8;
					*(Pair *)OUT(pair, at) = Pair{(Out)gated(sums.sum(i, j, half * 2), sums.sum(i, j + 1, half * 2)),
					                              (Out)gated(sums.sum(i, j, half * 2 + 1), sums.sum(i, j + 1, half * 2 + 1))};
					continue;
				}
				const u64 at = (blockIdx.y * m + row) * n + column;
				float x = sums.sum(i, j, half * 2), y = sums.sum(i, j, half * 2 + 1);
#ifdef PLUS_AT
				const u64 plus_at = row * info.pairs[pair].plus_pitch + column;
				const Elements plus = *(Elements *)PLUS_AT(pair, plus_at);
				x += (float)plus.x;
				y += (float)plus.y;
#endif
				Pair sum = {(Out)x, (Out)y};
				if (ADDS) {
					const Pair before = *(Pair *)OUT(pair, at);
					sum.x = before.x + sum.x;
					sum.y = before.y + sum.y;
				}
				*(Pair *)OUT(pair, at) = sum;
			}
		}
}
