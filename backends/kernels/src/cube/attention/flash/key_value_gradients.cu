/* dK and dV of a block of keys, summed over some query heads of their group (a part of it). Scores are computed with a key in each row, so that
 * probabilities and their gradients are left operands as they are. */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
flash_key_value_gradients(Element const* __restrict__ q, Element const* __restrict__ k, Element const* __restrict__ v, Element const* __restrict__ gradient, float const* __restrict__ numbers, Out* __restrict__ d_k, Out* __restrict__ d_v, int const* __restrict__ table, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[2 * ROWS * PITCH + 4 * TILE_BYTES];
	const u32 heads = (u32)info.heads, group = (u32)info.group, kv_heads = heads / group, parts = (u32)info.parts;
	const u64 fields = info.blocks + blockIdx.x / kv_heads / parts * BLOCK_FIELDS, first_span = info.spans;
	const Block block(&table[fields]);
	const int *const spans = &table[first_span];
	const int window = (int)info.window;
	const u32 kv_head = blockIdx.x % kv_heads, part = blockIdx.x / kv_heads % parts, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const u32 last_head = kv_head * group + (part + 1) * group / parts - 1, first_row = block.from * kv_heads + kv_head;
	const u32 base = shared_address(tiles), values = base + ROWS * PITCH, queries_at = values + ROWS * PITCH;

	QueryTiles next;
	u32 next_head = kv_head * group + part * group / parts;
	bool more = next.begin(spans, block, window);
	auto copy = [&](u32 buffer) {
		const u32 to = queries_at + buffer * 2 * TILE_BYTES;
		const Rows rows{next.row * heads + next_head, heads, (u32)min(next.end - next.row, (int)OTHERS)};
		stage<OTHERS>(to, rows, [&](u32 to, u64 at, bool wanted) {
			copy_async(to, &q[at], wanted);
			copy_async(to + TILE_BYTES, &gradient[at], wanted);
		});
	};
	const Rows rows{first_row, kv_heads, (u32)block.count};
	stage<ROWS>(base, rows, [&](u32 to, u64 at, bool wanted) { copy_async(to, &k[at], wanted); });
	stage<ROWS>(values, rows, [&](u32 to, u64 at, bool wanted) { copy_async(to, &v[at], wanted); });
	if (more)
		copy(0);
	copy_async_commit();

	float key_sums[TILES][DIM / 8][4], value_sums[TILES][DIM / 8][4];
	clear(key_sums);
	clear(value_sums);
	const int first_key = block.position + (int)(warp * WARP_ROWS), last_key = first_key + (int)WARP_ROWS - 1;
	for (u32 buffer = 0; more; buffer ^= 1) {
		const int row = next.row, end = next.end, shift = next.shift, query = row + shift;
		const u32 head = next_head;
		copy_async_wait<0>();
		__syncthreads();
		more = next.next(spans, block, window);
		if (!more && next_head != last_head) {
			next_head++;
			more = next.begin(spans, block, window);
		}
		if (more)
			copy(buffer ^ 1);
		copy_async_commit();
		if (query + (int)OTHERS - 1 < first_key || query - window + 1 > last_key)
			continue;
		const u32 queries = queries_at + buffer * 2 * TILE_BYTES;
		float scores[TILES][OTHERS / 8][4], upstream[TILES][OTHERS / 8][4];
		products(scores, base, queries);
		products(upstream, values, queries + TILE_BYTES);
		const bool whole = query >= last_key && query + (int)OTHERS - 1 - window < first_key && row + (int)OTHERS <= end;
#pragma unroll
		for (u32 j = 0; j < OTHERS / 8; j++)
#pragma unroll
			for (u32 e = 0; e < 2; e++) {
				const int other = row + (int)(j * 8 + lane % 4 * 2 + e);
				const u64 at = ((u64)min(other, end - 1) * heads + head) * 2;
				const Pair row_numbers = *(const Pair *)&numbers[at];
#pragma unroll
				for (u32 i = 0; i < TILES; i++)
#pragma unroll
					for (u32 half = 0; half < 2; half++) {
						const int key = first_key + (int)(i * 16 + half * 8 + lane / 4);
						float slope, &z = scores[i][j][half * 2 + e], &d = upstream[i][j][half * 2 + e];
						z = exp2_approx(scored(z, slope) - row_numbers.first * LOG2E);
						if (!whole && (other >= end || !visible(other + shift, key, window)))
							z = 0;
						d = z * (d - row_numbers.second) * slope;
					}
			}
		add_weighted(value_sums, scores, queries + TILE_BYTES);
		add_weighted(key_sums, upstream, queries);
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
				const u64 at = (part * info.rows * kv_heads + first_row + within * kv_heads) * DIM + j * 8 + lane % 4 * 2;
				store_pair(&d_k[at], key_sums[i][j][half * 2] * SCALE, key_sums[i][j][half * 2 + 1] * SCALE);
				store_pair(&d_v[at], value_sums[i][j][half * 2], value_sums[i][j][half * 2 + 1]);
			}
		}
}
