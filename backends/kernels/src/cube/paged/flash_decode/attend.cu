/* Attention of one new token of a sequence over a paged cache, by one block for each key head of a row: its query heads are the rows of a
 * left operand of 16. A warp takes every WARPS-th block of 16 tokens, with an online softmax of its own, and copies the next meanwhile; the
 * warps' results are added in their order, which depends on the sequence alone.
 *
 * PARTED: queries are rotated, all tokens are in the pool, and a block has a part of the columns, whose sums are combined by another kernel.
 * Otherwise rows are [queries | keys | values], to which biases are added; the new key is rotated and written to the pool with its value.
 */
struct info_st {
	u64 static_meta[8];
	/* Rows, blocks of a row in the table, key heads, their query heads, slots of a head in the pool, window, parts of a row. */
	u64 rows, stride, kv, group, slots, window, parts;
};

static const u32 THREADS = WARPS * 32, TOKENS = 16, TILE_BYTES = TOKENS * PITCH, PARTIAL = DIM + 2;

/* A number of a row with its bias, rounded as their sum would be where it is stored. */
DEVICE float biased(const Element *row, const Element *bias, u32 at)
{
	return BIASED ? (float)(Element)((float)row[at] + (float)bias[at]) : (float)row[at];
}

/* A pair of a head, rotated by a row's angles, of which the cosines come first. */
DEVICE void rotated(Element *to, u32 apart, float a, float b, const float *angles, u32 pair)
{
	const float cosine = angles[pair], sine = angles[pair + DIM / 2];
	to[0] = (Element)fmaf(a, cosine, -(b * sine));
	to[apart] = (Element)fmaf(b, cosine, a * sine);
}

/* Where a query's number is in shared memory. */
DEVICE u32 query_at(u32 head, u32 d) { return (place(head, d / 8) >> 1) + d % 8; }

extern "C" __global__ void __launch_bounds__(THREADS)
paged_attend(Element const* __restrict__ queries, Element const* __restrict__ bias, float const* __restrict__ angles, float const* __restrict__ sinks, int const* __restrict__ table, Element* __restrict__ keys, Element* __restrict__ values, Out* __restrict__ out, __grid_constant__ info_st const info)
{
	__shared__ __align__(1024) char tiles[TILE_BYTES + WARPS * 4 * TILE_BYTES];
	const u32 kv = (u32)info.kv, group = (u32)info.group, rows = (u32)info.rows, parts = (u32)info.parts, stride = (u32)info.stride;
	const u32 task = blockIdx.x / parts, head = task % kv, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	/* parts take rows in a sequence first, as the kernel that combines them does */
	const u64 row_at = PARTED ? rows + task / kv : 0;
	const u32 row = PARTED ? *&table[row_at] : task / kv;
	const u64 length_at = row, blocks_at = 3 * (u64)rows + (u64)row * stride;
	const int length = *&table[length_at], *const blocks = &table[blocks_at];
	int from = max(length - (int)info.window, 0), to = length;
	if (PARTED) {
		const int each = (to - from + (int)parts - 1) / (int)parts;
		from = min(from + (int)(blockIdx.x % parts) * each, to);
		to = min(from + each, to);
	}
	const u64 head_slots = head * info.slots, first_query = ((u64)row * kv + head) * group * DIM;

	Element *const shared_queries = (Element *)tiles;
	for (u32 i = threadIdx.x; i < TOKENS * DIM; i += THREADS)
		shared_queries[i] = (Element)0.0f;
	__syncthreads();
	if (PARTED) {
		const Element *const from_row = &queries[first_query];
		for (u32 i = threadIdx.x; i < group * DIM; i += THREADS)
			shared_queries[query_at(i / DIM, i % DIM)] = from_row[i];
	} else if (length > 0) {
		const u64 row_first = (u64)row * (group + 2) * kv * DIM, angles_at = (u64)row * DIM;
		const Element *const from_row = &queries[row_first];
		const float *const row_angles = &angles[angles_at];
		const u32 query = head * group * DIM, key = (kv * group + head) * DIM, value = key + kv * DIM;
		for (u32 i = threadIdx.x; i < group * (DIM / 2); i += THREADS) {
			const u32 of = i / (DIM / 2), pair = i % (DIM / 2), at = query + of * DIM + pair;
			Element both[2];
			rotated(both, 1, biased(from_row, bias, at), biased(from_row, bias, at + DIM / 2), row_angles, pair);
			shared_queries[query_at(of, pair)] = both[0];
			shared_queries[query_at(of, pair + DIM / 2)] = both[1];
		}
		const u64 slot = (head_slots + blocks[(length - 1) / TOKENS] * TOKENS + (length - 1) % TOKENS) * DIM;
		Element *const new_key = &keys[slot], *const new_value = &values[slot];
		for (u32 pair = threadIdx.x; pair < DIM / 2; pair += THREADS)
			rotated(new_key + pair, DIM / 2, biased(from_row, bias, key + pair), biased(from_row, bias, key + pair + DIM / 2), row_angles, pair);
		for (u32 d = threadIdx.x; d < DIM; d += THREADS)
			new_value[d] = (Element)biased(from_row, bias, value + d);
	}
	__syncthreads();

	const u32 base = shared_address(tiles), own_tiles = base + TILE_BYTES + warp * 4 * TILE_BYTES;
	const int last = (to + (int)TOKENS - 1) / (int)TOKENS;
	auto copy = [&](int block, u32 buffer) {
		const u64 first = (head_slots + blocks[block] * TOKENS) * DIM;
		const u32 tile = own_tiles + buffer * 2 * TILE_BYTES;
#pragma unroll
		for (u32 i = 0; i < TOKENS * CHUNKS / 32; i++) {
			const u32 index = lane + i * 32, token = index / CHUNKS, chunk = index % CHUNKS;
			const bool wanted = block * (int)TOKENS + (int)token < to;
			const u64 at = wanted ? first + index * 8 : 0;
			copy_async(tile + place(token, chunk), &keys[at], wanted);
			copy_async(tile + TILE_BYTES + place(token, chunk), &values[at], wanted);
		}
	};
	float sums[DIM / 8][4], top[2] = {MASKED, MASKED}, total[2] = {0, 0};
#pragma unroll
	for (u32 j = 0; j < DIM / 8; j++)
#pragma unroll
		for (u32 e = 0; e < 4; e++)
			sums[j][e] = 0;
	int block = from / (int)TOKENS + (int)warp;
	if (block < last)
		copy(block, 0);
	copy_async_commit();
	for (u32 buffer = 0; block < last; buffer ^= 1) {
		const int next = block + (int)WARPS;
		if (next < last)
			copy(next, buffer ^ 1);
		copy_async_commit();
		copy_async_wait<1>();
		__syncwarp();
		const u32 tile = own_tiles + buffer * 2 * TILE_BYTES;
		float scores[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
		for (u32 step = 0; step < DIM / 16; step++) {
			u32 a[4], b[4];
			left(a, base, 0, step);
			right(b, tile, 0, step);
			multiply_add(scores[0], a, b[0], b[1]);
			multiply_add(scores[1], a, b[2], b[3]);
		}
#pragma unroll
		for (u32 half = 0; half < 2; half++) {
			float slope;
#pragma unroll
			for (u32 j = 0; j < 2; j++)
#pragma unroll
				for (u32 e = 0; e < 2; e++) {
					float &z = scores[j][half * 2 + e];
					const int column = block * (int)TOKENS + (int)(j * 8 + lane % 4 * 2 + e);
					z = column >= from && column < to ? scored(z, slope) : MASKED;
				}
			weigh(scores, half, top[half], total[half], sums);
		}
		const u32 weights[4] = {pack_pair(scores[0][0], scores[0][1]), pack_pair(scores[0][2], scores[0][3]), pack_pair(scores[1][0], scores[1][1]),
		                        pack_pair(scores[1][2], scores[1][3])};
#pragma unroll
		for (u32 j = 0; j < DIM / 16; j++) {
			u32 b[4];
			right_transposed(b, tile + TILE_BYTES, 0, j);
			multiply_add(sums[j * 2], weights, b[0], b[1]);
			multiply_add(sums[j * 2 + 1], weights, b[2], b[3]);
		}
		__syncwarp();
		block = next;
	}
	copy_async_wait<0>();
	__syncthreads();

	/* of each warp and head: sums, the largest score, and the sum of weights */
	float *const partial = (float *)tiles;
#pragma unroll
	for (u32 half = 0; half < 2; half++) {
		total[half] += __shfl_xor_sync(~0u, total[half], 1);
		total[half] += __shfl_xor_sync(~0u, total[half], 2);
		float *const of = partial + (warp * TOKENS + half * 8 + lane / 4) * PARTIAL;
#pragma unroll
		for (u32 j = 0; j < DIM / 8; j++)
			of[j * 8 + lane % 4 * 2] = sums[j][half * 2], of[j * 8 + lane % 4 * 2 + 1] = sums[j][half * 2 + 1];
		if (lane % 4 == 0)
			of[DIM] = top[half], of[DIM + 1] = total[half];
	}
	__syncthreads();
	for (u32 i = threadIdx.x; i < group * DIM; i += THREADS) {
		const u32 of = i / DIM, d = i % DIM;
		const u64 sink_at = head * group + of;
		const float sink = SINKS ? *&sinks[sink_at] * LOG2E : MASKED;
		float level = sink, sum = 0, all = 0;
#pragma unroll
		for (u32 w = 0; w < WARPS; w++)
			level = fmaxf(level, partial[(w * TOKENS + of) * PARTIAL + DIM]);
#pragma unroll
		for (u32 w = 0; w < WARPS; w++) {
			const float *const from_warp = partial + (w * TOKENS + of) * PARTIAL;
			const float factor = exp2_approx(from_warp[DIM] - level);
			sum += factor * from_warp[d];
			all += factor * from_warp[DIM + 1];
		}
		if (PARTED) {
			const u64 first = blockIdx.x * (u64)group * PARTIAL, at = first + i, top_at = first + group * DIM + of, total_at = top_at + group;
			*&out[at] = (Out)sum;
			if (d == 0) {
				*&out[top_at] = (Out)(level / LOG2E);
				*&out[total_at] = (Out)all;
			}
		} else {
			all += SINKS ? exp2_approx(sink - level) : 0;
			const u64 at = first_query + i;
			/* a row in no sequence gets zeros */
			*&out[at] = (Out)(length > 0 ? sum / all : 0);
		}
	}
}
