/* Attention of one new token of a sequence, whose query is rotated and whose key and value are in the pool, by a warp for each key head of a row:
 * its query heads are the rows of a left operand of 16. Tiles, sums and their order are those of flash_forward, so that a token gets the same
 * numbers to the bit here, as part of a prompt, and in training.
 */
struct info_st {
	u64 static_meta[6];
	/* Rows, blocks of a row in the table, key heads, their query heads, slots of a head in the pool, window. */
	u64 rows, stride, kv, group, slots, window;
};

extern "C" __global__ void __launch_bounds__(THREADS)
paged_attend_in_order(Element const* __restrict__ queries, float const* __restrict__ sinks, int const* __restrict__ table, Element const* __restrict__ keys, Element const* __restrict__ values, Element* __restrict__ out, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[ROWS * PITCH + 4 * TILE_BYTES];
	const u32 kv = (u32)info.kv, group = (u32)info.group, row = blockIdx.x / kv, head = blockIdx.x % kv, lane = threadIdx.x;
	const u64 length_at = row, blocks_at = 3 * info.rows + row * info.stride;
	const int length = *&table[length_at], *const blocks = &table[blocks_at];
	const int from = max(length - (int)info.window, 0);
	const u32 first_head = blockIdx.x * group, first_slot = head * (u32)info.slots;
	const u32 base = shared_address(tiles), keys_at = base + ROWS * PITCH;

	const Rows heads{first_head, 1, group};
	stage<ROWS>(base, heads, [&](u32 to, u64 at, bool wanted) { copy_async(to, &queries[at], wanted); });
	auto copy = [&](int tile, u32 buffer) {
		auto slots = [&](u32 i) {
			const int token = tile + (int)i;
			const bool seen = token >= from && token < length;
			return seen ? first_slot + (u32)(blocks[token / TOKENS] * TOKENS + token % TOKENS) : NO_ROW;
		};
		stage<OTHERS>(keys_at + buffer * 2 * TILE_BYTES, slots, [&](u32 to, u64 at, bool wanted) {
			copy_async(to, &keys[at], wanted);
			copy_async(to + TILE_BYTES, &values[at], wanted);
		});
	};
	float sums[TILES][DIM / 8][4], top[2] = {MASKED, MASKED}, total[2] = {0, 0};
	clear(sums);
	int tile = from / (int)OTHERS * (int)OTHERS;
	if (tile < length)
		copy(tile, 0);
	copy_async_commit();
	for (u32 buffer = 0; tile < length; buffer ^= 1) {
		const int first = tile;
		copy_async_wait<0>();
		__syncwarp();
		/* all threads have done with the tile before, whose buffer takes the next */
		tile += OTHERS;
		if (tile < length)
			copy(tile, buffer ^ 1);
		copy_async_commit();
		const u32 tile_at = keys_at + buffer * 2 * TILE_BYTES;
		float scores[TILES][OTHERS / 8][4];
		products(scores, base, tile_at);
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			float slope;
#pragma unroll
			for (u32 j = 0; j < OTHERS / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 2; e++) {
					float &z = scores[0][j][half * 2 + e];
					const int token = first + (int)(j * 8 + lane % 4 * 2 + e);
					z = scored(z, slope);
					if (token < from || token >= length)
						z = MASKED;
				}
			weigh(scores[0], half, top[half], total[half], sums[0]);
		}
		add_weighted(sums, scores, tile_at + TILE_BYTES);
	}
#pragma unroll
	for (u32 half = 0; half < 2; half++) {
		const u32 within = half * 8 + lane / 4;
		const u64 sink_at = head * group + min(within, group - 1);
		const float sink = SINKS ? __fmul_rn(*&sinks[sink_at], LOG2E) : MASKED;
		/* a row in no sequence gets zeros */
		const float shared = share(top[half], total[half], sink), factor = length > 0 ? shared : 0;
		if (within >= group)
			continue;
#pragma unroll
		for (u32 j = 0; j < DIM / 8; j++) {
			const u64 to = (u64)(first_head + within) * DIM + j * 8 + lane % 4 * 2;
			store_pair(&out[to], sums[0][j][half * 2] * factor, sums[0][j][half * 2 + 1] * factor);
		}
	}
}
