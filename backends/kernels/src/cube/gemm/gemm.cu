/* A product of two matrices in half precision, summed in f32 on tensor cores.
 *
 * A block of threads computes a tile of TILE_M × TILE_N numbers. Copies from global memory run STAGES - 1 tiles of 32 inputs ahead; what
 * lies beyond a matrix is zero. The blocks of `group` rows of tiles are neighbours, so that they find each other's columns in the level-2
 * cache. Where there are few tiles, the inputs are divided among several blocks, each with sums of its own (`part` inputs each). With ADDS
 * the sums, in f32, are added to what is in `out`. With GATED, eight columns of a gate lie before the eight that they open, and `out` has
 * what comes through.
 *
 * The launcher writes in front of this, of tile.cuh and of mma.cuh or wgmma.cuh what they are compiled for.
 */
struct info_st {
	u64 static_meta[3];
	u64 m, n, k, a_pitch, b_pitch, part, group;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm(Element const* __restrict__ a, Element const* __restrict__ b, Out* __restrict__ out, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[STAGES * (TILE_M + TILE_N) * INPUTS * 2];
	const u32 down = (u32)((info.m + TILE_M - 1) / TILE_M), across = (u32)((info.n + TILE_N - 1) / TILE_N), group = (u32)info.group;
	const u32 above = blockIdx.x / (group * across) * group, high = min(down - above, group), within = blockIdx.x % (group * across);
	const u64 first_row = (u64)(above + within % high) * TILE_M, first_column = (u64)(within / high) * TILE_N;
	const u64 first = blockIdx.y * info.part, end = min(first + info.part, info.k);
	const int steps = (int)((end - first + INPUTS - 1) / INPUTS);

	Copies<TILE_M, A_BY_INPUTS> rows(first_row, info.m, first, end, info.a_pitch);
	Copies<TILE_N, B_BY_INPUTS> columns(first_column, info.n, first, end, info.b_pitch);
	const u32 base = shared_address(tiles), SIZE = (TILE_M + TILE_N) * INPUTS * 2, B_AT = TILE_M * INPUTS * 2;
	auto copy = [&](u32 stage, bool any) {
		if (any) {
#pragma unroll
			for (u32 i = 0; i < rows.EACH; i++) {
				u64 at = rows.from(i);
				copy_async(base + stage * SIZE + rows.to(i), &a[at], rows.wanted(i));
			}
#pragma unroll
			for (u32 i = 0; i < columns.EACH; i++) {
				u64 at = columns.from(i);
				copy_async(base + stage * SIZE + B_AT + columns.to(i), &b[at], columns.wanted(i));
			}
			rows.advance();
			columns.advance();
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
			if (row >= info.m)
				continue;
#pragma unroll
			for (u32 j = 0; j < sums.COLUMNS; j += GATED ? 2 : 1) {
				const u64 column = first_column + sums.column + j * 8;
				if (column >= info.n)
					continue;
				if (GATED) {
					const u64 at = row * (info.n / 2) + column / 16 * 8 + column % 8;
					*(Pair *)&out[at] = Pair{(Out)gated(sums.sum(i, j, half * 2), sums.sum(i, j + 1, half * 2)),
					                         (Out)gated(sums.sum(i, j, half * 2 + 1), sums.sum(i, j + 1, half * 2 + 1))};
					continue;
				}
				const u64 at = (blockIdx.y * info.m + row) * info.n + column;
				Pair pair = {(Out)sums.sum(i, j, half * 2), (Out)sums.sum(i, j, half * 2 + 1)};
				if (ADDS) {
					const Pair before = *(Pair *)&out[at];
					pair.x = before.x + pair.x;
					pair.y = before.y + pair.y;
				}
				*(Pair *)&out[at] = pair;
			}
		}
}
