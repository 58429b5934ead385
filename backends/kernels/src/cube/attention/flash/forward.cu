/* Attention of a block of queries by online softmax, and every row's logsumexp, which includes the head's sink. */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
flash_forward(Element const* __restrict__ q, Element const* __restrict__ k, Element const* __restrict__ v, float const* __restrict__ sinks, Element* __restrict__ out, float* __restrict__ lse, int const* __restrict__ table, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[ROWS * PITCH + 4 * TILE_BYTES];
	const u32 heads = (u32)info.heads, kv_heads = heads / (u32)info.group;
	const u64 fields = info.blocks + blockIdx.x / heads * BLOCK_FIELDS, first_span = info.spans;
	const Block block(&table[fields]);
	const int *const spans = &table[first_span];
	const int window = (int)info.window;
	const u32 head = blockIdx.x % heads, kv_head = head / (u32)info.group, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const u32 base = shared_address(tiles), keys_at = base + ROWS * PITCH;

	KeyTiles next(spans, block, window);
	auto copy = [&](u32 buffer) {
		stage_tile(keys_at + buffer * 2 * TILE_BYTES, next, kv_heads, kv_head, [&](u32 to, u64 at, bool wanted) {
			copy_async(to, &k[at], wanted);
			copy_async(to + TILE_BYTES, &v[at], wanted);
		});
	};
	const Rows queries{block.from * heads + head, heads, (u32)block.count};
	stage<ROWS>(base, queries, [&](u32 to, u64 at, bool wanted) { copy_async(to, &q[at], wanted); });
	copy(0);
	copy_async_commit();

	float sums[TILES][DIM / 8][4], top[TILES][2], total[TILES][2];
	clear(sums);
#pragma unroll
	for (u32 i = 0; i < TILES; i++)
#pragma unroll
		for (u32 half = 0; half < 2; half++)
			top[i][half] = MASKED, total[i][half] = 0;
	/* positions of this warp's first and last row */
	const int first_position = block.position + (int)(warp * WARP_ROWS), last_position = first_position + (int)WARP_ROWS - 1;
	for (u32 buffer = 0; next.any(); buffer ^= 1) {
		const int key = next.position;
		copy_async_wait<0>();
		__syncthreads();
		/* all threads have done with the tile before, whose buffer takes the next */
		next.advance();
		if (next.any())
			copy(buffer ^ 1);
		copy_async_commit();
		if (key > last_position || key + (int)OTHERS - 1 < first_position - window + 1)
			continue;
		const u32 keys = keys_at + buffer * 2 * TILE_BYTES;
		float scores[TILES][OTHERS / 8][4];
		products(scores, base, keys);
		const bool whole = key + (int)OTHERS - 1 <= first_position && key > last_position - window;
#pragma unroll
		for (u32 i = 0; i < TILES; i++)
#pragma unroll
			for (u32 half = 0; half < 2; half++) {
				const int position = first_position + (int)(i * 16 + half * 8 + lane / 4);
				float slope;
#pragma unroll
				for (u32 j = 0; j < OTHERS / 8; j++)
#pragma unroll
					for (u32 e = 0; e < 2; e++) {
						float &z = scores[i][j][half * 2 + e];
						z = scored(z, slope);
						if (!whole && !visible(position, key + (int)(j * 8 + lane % 4 * 2 + e), window))
							z = MASKED;
					}
				weigh(scores[i], half, top[i][half], total[i][half], sums[i]);
			}
		add_weighted(sums, scores, keys + TILE_BYTES);
	}
	const u64 sink_at = head;
	const float sink = SINKS ? __fmul_rn(*&sinks[sink_at], LOG2E) : MASKED;
#pragma unroll
	for (u32 i = 0; i < TILES; i++)
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			const float factor = share(top[i][half], total[i][half], sink);
			const u32 within = warp * WARP_ROWS + i * 16 + half * 8 + lane / 4;
			if ((int)within >= block.count)
				continue;
			const u64 at = (u64)(block.from + within) * heads + head;
#pragma unroll
			for (u32 j = 0; j < DIM / 8; j++) {
				const u64 to = at * DIM + j * 8 + lane % 4 * 2;
				store_pair(&out[to], sums[i][j][half * 2] * factor, sums[i][j][half * 2 + 1] * factor);
			}
			if (lane % 4 == 0)
				*&lse[at] = top[i][half] / LOG2E + logf(total[i][half]);
		}
}
