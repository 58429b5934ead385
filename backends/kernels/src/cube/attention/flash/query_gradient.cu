/* dQ of a block of queries. `numbers` has the logsumexp and Δ of each row and head. */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
flash_query_gradient(Element const* __restrict__ q, Element const* __restrict__ k, Element const* __restrict__ v, Element const* __restrict__ gradient, float const* __restrict__ numbers, Element* __restrict__ d_q, int const* __restrict__ table, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[2 * ROWS * PITCH + 4 * TILE_BYTES];
	const u32 heads = (u32)info.heads, kv_heads = heads / (u32)info.group;
	const u64 fields = info.blocks + blockIdx.x / heads * BLOCK_FIELDS, first_span = info.spans;
	const Block block(&table[fields]);
	const int *const spans = &table[first_span];
	const int window = (int)info.window;
	const u32 head = blockIdx.x % heads, kv_head = head / (u32)info.group, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const u32 first_row = block.from * heads + head, base = shared_address(tiles), gradients = base + ROWS * PITCH, keys_at = gradients + ROWS * PITCH;

	KeyTiles next(spans, block, window);
	auto copy = [&](u32 buffer) {
		stage_tile(keys_at + buffer * 2 * TILE_BYTES, next, kv_heads, kv_head, [&](u32 to, u64 at, bool wanted) {
			copy_async(to, &k[at], wanted);
			copy_async(to + TILE_BYTES, &v[at], wanted);
		});
	};
	const Rows rows{first_row, heads, (u32)block.count};
	stage<ROWS>(base, rows, [&](u32 to, u64 at, bool wanted) { copy_async(to, &q[at], wanted); });
	stage<ROWS>(gradients, rows, [&](u32 to, u64 at, bool wanted) { copy_async(to, &gradient[at], wanted); });
	copy(0);
	copy_async_commit();

	float sums[TILES][DIM / 8][4];
	Pair row_numbers[TILES][2];
	clear(sums);
#pragma unroll
	for (u32 i = 0; i < TILES; i++)
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			const u32 within = warp * WARP_ROWS + i * 16 + half * 8 + lane / 4;
			const u64 at = ((int)within < block.count ? (u64)first_row + within * heads : 0) * 2;
			row_numbers[i][half] = (int)within < block.count ? *(const Pair *)&numbers[at] : Pair{-MASKED, 0};
		}
	const int first_position = block.position + (int)(warp * WARP_ROWS), last_position = first_position + (int)WARP_ROWS - 1;
	for (u32 buffer = 0; next.any(); buffer ^= 1) {
		const int key = next.position;
		copy_async_wait<0>();
		__syncthreads();
		next.advance();
		if (next.any())
			copy(buffer ^ 1);
		copy_async_commit();
		if (key > last_position || key + (int)OTHERS - 1 < first_position - window + 1)
			continue;
		const u32 keys = keys_at + buffer * 2 * TILE_BYTES;
		float scores[TILES][OTHERS / 8][4], upstream[TILES][OTHERS / 8][4];
		products(scores, base, keys);
		products(upstream, gradients, keys + TILE_BYTES);
		const bool whole = key + (int)OTHERS - 1 <= first_position && key > last_position - window;
#pragma unroll
		for (u32 i = 0; i < TILES; i++)
#pragma unroll
			for (u32 j = 0; j < OTHERS / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e++) {
					const int position = first_position + (int)(i * 16 + e / 2 * 8 + lane / 4);
					const int other = key + (int)(j * 8 + lane % 4 * 2 + e % 2);
					float slope, z = scored(scores[i][j][e], slope);
					float p = exp2_approx(z - row_numbers[i][e / 2].first * LOG2E);
					if (!whole && !visible(position, other, window))
						p = 0;
					scores[i][j][e] = p * (upstream[i][j][e] - row_numbers[i][e / 2].second) * slope;
				}
		add_weighted(sums, scores, keys);
	}
#pragma unroll
	for (u32 i = 0; i < TILES; i++)
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			const u32 within = warp * WARP_ROWS + i * 16 + half * 8 + lane / 4;
			if ((int)within >= block.count)
				continue;
#pragma unroll
			for (u32 j = 0; j < DIM / 8; j++) {
				const u64 at = ((u64)first_row + within * heads) * DIM + j * 8 + lane % 4 * 2;
				store_pair(&d_q[at], sums[i][j][half * 2] * SCALE, sums[i][j][half * 2 + 1] * SCALE);
			}
		}
}
